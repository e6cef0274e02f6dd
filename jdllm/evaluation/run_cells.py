"""Runs cells one after the other or side by side, each in processes of its own, and keeps what became of them.

A cell that is done, diverged or collapsed never runs again; one that was stopped goes on from its checkpoint when its
commands are run again, which is what `jdllm train` does by itself; one that failed is tried again.  Every cell is on the disk
before the next begins.  What a cell is made of, and which there are, is the experiment's business.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jdllm.config import Config, ConfigError
from jdllm.evaluation import cell_report, cells
from jdllm.evaluation.cells import Record
from jdllm.evaluation.report import command_line, commit
from jdllm.training.tracking import read_metrics


@dataclasses.dataclass(frozen=True)
class Job:
    """One cell at one seed."""

    name: str
    seed: int
    size: str
    budget: str
    question: str
    config: Config

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.seed, self.size, self.budget

    @property
    def run_name(self) -> str:
        """Folder of the run."""
        return f"{self.name}-{self.size}-{self.budget.replace(' ', '-')}-seed{self.seed}"


class Runner:
    """The cells in `out`, and how they get there.

    `commands` gives what trains and what evaluates a cell, in that order; the second leaves eval.json in the run's folder.
    At `deadline` (of time.monotonic) running cells are asked to stop, and no other begins.
    """

    def __init__(
        self,
        out: Path,
        runs_dir: Path,
        about: dict[str, str],
        commands: Callable[[Job], list[list[str]]],
        *,
        side_by_side: int = 1,
        deadline: float = math.inf,
    ):
        self.out, self.runs_dir, self.about, self.commands = out, runs_dir, about, commands
        self.side_by_side, self.deadline = side_by_side, deadline
        self.lock = threading.Lock()
        self.records = cells.read(out / "cells.json")
        runs_dir.mkdir(parents=True, exist_ok=True)

    def open_jobs(self, jobs: Sequence[Job], same: Callable[[dict[str, Any], Config], bool]) -> list[Job]:
        """Those that have no result yet.  ConfigError if one has, but of another recipe by `same`(stored config, config)."""
        known = {cells.key(record): record for record in self.records if record["status"] in cells.FINISHED}
        for job in jobs:
            if job.key in known and not same(known[job.key]["config"], job.config):
                raise ConfigError(
                    f"{self.out}: {job.name}, seed {job.seed}, was run with another recipe than today's; give another --out, "
                    "or go back to the defaults of that time"
                )
        return [job for job in jobs if job.key not in known]

    def run(self, jobs: Sequence[Job]) -> int:
        """Run them until time is up or somebody stops it; 1 when a cell failed."""
        print(f"{len(jobs)} cells to run, {len(self.records)} in {self.out}", flush=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: setattr(self, "deadline", 0.0))
        with ThreadPoolExecutor(self.side_by_side) as pool:
            ended = list(pool.map(self.run_cell, jobs))
        if left := ended.count(None):
            print(f"{left} cells are open; the same command goes on with them", flush=True)
        return int("failed" in ended)

    def run_cell(self, job: Job) -> str | None:
        """The status of the cell, or None when there was no time for all of it."""
        name, began = job.run_name, time.monotonic()
        if began >= self.deadline:
            return None
        with (self.runs_dir / f"{name}.log").open("a") as log, (self.runs_dir / f"{name}.lock").open("w") as lock:
            try:  # the processes of the cell hold it too, so what survived an earlier call is not run over
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{name}: a process of an earlier call still works on it; wait for it or end it", flush=True)
                return None
            begin = log.tell()
            print(f"{name}: begins", flush=True)
            for command in self.commands(job):
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=self.environment(job), pass_fds=[lock.fileno()],
                    start_new_session=True,  # Ctrl-C reaches it through `wait`, and only once
                )  # fmt: skip
                code = self.wait(process)
                if code is None:
                    print(f"{name}: stopped before its end", flush=True)
                    return None
                if code:
                    break
        text = (self.runs_dir / f"{name}.log").read_bytes()[begin:].decode(errors="replace")
        record = self.record(job, code, text)
        self.keep(record)
        print(
            f"{name}: {record['status']} after {(time.monotonic() - began) / 60:.1f} minutes {record['reason'] or ''}",
            flush=True,
        )
        return record["status"]

    def wait(self, process: subprocess.Popen) -> int | None:
        """Its exit code; None when time was up first, after training has written a checkpoint."""
        while process.poll() is None and time.monotonic() < self.deadline:
            time.sleep(0.1)
        if process.poll() is None:
            process.terminate()
            return None if process.wait() else 0
        return process.returncode

    def environment(self, job: Job) -> dict[str, str]:
        """One compilation cache and one Weights & Biases group for all cells."""
        shared = {
            "JAX_COMPILATION_CACHE_DIR": str((self.runs_dir / "compiled").absolute()),
            "WANDB_RUN_GROUP": self.about["title"], "WANDB_JOB_TYPE": job.name,
        }  # fmt: skip
        if self.side_by_side > 1:
            shared["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return os.environ | shared

    def record(self, job: Job, code: int, log: str) -> Record:
        """What became of a cell: its figures, or why there are none."""
        run_dir = self.runs_dir / job.run_name
        metrics = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
        status, reason = verdict(metrics, code, log)
        found = json.loads((run_dir / "eval.json").read_text()) if status == "done" else None
        train, samples, texts = last_figures(metrics), {}, []
        if found:
            samples = found["samples"]
            train["minutes"] = found["minutes"]
            if found["reconstruction"]:
                train["recon"] = found["reconstruction"]["0"]
            sheet = run_dir / "samples" / f"steps-{max(samples, key=int)}.txt"
            texts = re.split(r"^--- \d+ ---\n", sheet.read_text(), flags=re.MULTILINE)[1:9]
        return Record(
            name=job.name, seed=job.seed, size=job.size, budget=job.budget, status=status, reason=reason,
            question=job.question, config=job.config.to_dict(), gpu_minutes=train.get("minutes"),
            side_by_side=self.side_by_side, train=train,
            samples={steps: row["samples"] for steps, row in samples.items()},
            human=samples[max(samples, key=int)]["human"] if samples else None,
            scorer=found["scorer"] if found else None, scorer_is_encoder=bool(found and found["scorer_is_encoder"]),
            texts=texts, command=command_line(), commit=commit(),
        )  # fmt: skip

    def keep(self, record: Record) -> None:
        """Write it at once, since the next cell may be the one that is killed."""
        with self.lock:
            self.records = cells.merge(self.records, [record])
            cell_report.write(self.out, self.records, self.about)

    def to_wandb(self, mode: str) -> None:
        """All rows as one table, in a run of its own in the group of the cells."""
        import wandb

        rows, keys = cells.summary(self.records), [*cells.SCHEMA, "status", "size", "budget"]
        group = self.about["title"]
        run = wandb.init(
            project="jdllm", group=group, name=f"{group}-table", job_type="table", mode=mode, dir=self.runs_dir,
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        run.log({"cells": wandb.Table(columns=keys, data=[[row.get(key) for key in keys] for row in rows])})
        run.finish()


def verdict(metrics: list[dict[str, Any]], code: int, log: str) -> tuple[str, str | None]:
    """Status and reason of a cell whose last command ended with `code`, from its record and what it printed."""
    stopped = re.findall(r"^error: (step \d+: .*)$", log, flags=re.MULTILINE)
    reason = stopped[-1] if stopped else None
    last = next((record for record in reversed(metrics) if record["kind"] == "train"), {})
    broken = [name for name, value in last.items() if isinstance(value, float) and not math.isfinite(value)]
    if broken:
        return "diverged", reason or f"step {last['step']}: {', '.join(broken)} became NaN or infinite"
    if code == 0:
        return "done", None
    if reason:
        return "collapsed", reason
    return "failed", f"exit code {code}: {' '.join(log.split())[-300:]}"


def last_figures(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """What the tables show of training."""
    latest: dict[str, Any] = {}
    for record in metrics:
        latest |= {key: value for key, value in record.items() if value is not None}
    names = {
        "step": "step", "recon": "reconstruction", "recon_noisy": "reconstruction_noisy", "gamma": "gamma",
        "effective_rank": "effective_rank", "loss_diffusion": "loss_diffusion", "tokens_per_second": "tokens_per_second",
    }  # fmt: skip
    return {ours: latest[name] for ours, name in names.items() if name in latest}
