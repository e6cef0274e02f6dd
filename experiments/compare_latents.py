"""Which latents can be denoised and still be read?  Short runs that differ in one choice each, and one table.

    python experiments/compare_latents.py --data DIR_OF_BOOKS --valid-data FILE --out results/latents-h200
    python experiments/compare_latents.py --cells full,rmsnorm --steps 200      # some of them, shorter

Settles the open points of docs/decisions.md: how latents are standardised, how far and when gamma rises, how much noise
the decoder gets.  Every cell is a normal run (`jdllm train`, then `jdllm eval`) of a model of about a third of `books`,
all on the same cached hidden states; several run side by side, so that one compiles while another computes.  Cells that
have an eval.json are not run again; a cell that fails stands in the table as failed.  One H200, about 7 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tyro

from jdllm.config import Config, preset

CELLS: dict[str, dict[str, Any]] = {
    "full": {},
    "per-dimension": {"model__standardize": "dimension"},
    "rmsnorm": {"model__standardize": "rmsnorm"},
    "gamma-0": {"objective__gamma_max": 0.0, "objective__gamma_min": 0.0},
    "gamma-clock": {"objective__gamma_gate": 0.0},
    "noise-1.5": {"objective__decoder_noise": 1.5},
    "noise-5": {"objective__decoder_noise": 5.0},
    "noise-3-constant": {"objective__decoder_noise_law": "constant"},
    "muon": {"optimizer__name": "muon"},
}


@dataclasses.dataclass(frozen=True)
class Compare:
    """Options of the comparison."""

    data: str = "data/books"
    """Training text."""
    valid_data: str | None = None
    """Held-out text."""
    out: Path = Path("results/latents")
    """Folder of the table and the runs' figures."""
    runs_dir: Path = Path("runs/latents")
    """Folder of the runs."""
    cache_dir: str = "cache"
    """Folder of the hidden-state cache."""
    cells: str = ",".join(CELLS)
    """Cells to run, in this order."""
    steps: int = 1800
    """Training steps of a cell."""
    max_tokens: int = 8_000_000
    """Training tokens."""
    side_by_side: int = 3
    """Cells that share the device at a time."""
    num: int = 512
    """Samples in each evaluation."""


def cell_config(options: Compare, changes: dict[str, Any]) -> Config:
    """A third of the books model on windows of 64 tokens, with one choice changed."""
    base = preset("books").replace(
        data=options.data, valid_data=options.valid_data,
        model__num_tokens=64, model__num_latents=64, model__latent_dim=384,
        model__encoder_depth=3, model__decoder_depth=3, model__token_decoder_depth=2, model__denoiser_depth=8,
        objective__gamma_gate=0.85, objective__gamma_warmup_steps=600, objective__decoder_noise_ramp_steps=300,
        feed__max_tokens=options.max_tokens, feed__cache_dir=options.cache_dir, feed__valid_windows=512,
        training__steps=options.steps, training__minutes=None, training__wandb="disabled",
        training__sample_every=options.steps, training__checkpoint_every=options.steps, training__probe_every=50,
    )  # fmt: skip
    return base.replace(**changes)


def run_cell(name: str, config: Config, options: Compare) -> dict[str, Any]:
    """Train and evaluate one cell in processes of its own; returns its row."""
    run_dir = options.runs_dir / name
    started = time.perf_counter()
    if not (run_dir / "eval.json").is_file():
        jdllm = [sys.executable, "-m", "jdllm.cli"]
        arguments = ["train", "--preset", "books", "--name", name, "--runs-dir", str(options.runs_dir)]
        commands = [
            [*jdllm, *arguments, *flags(config)],
            [*jdllm, "eval", "--run", str(run_dir), "--steps", "10,32", "--num", str(options.num)],
        ]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with (options.runs_dir / f"{name}.log").open("w") as log:
            for command in commands:
                if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode:
                    print(f"{name}: failed, see {log.name}", flush=True)
                    return {"cell": name, "failed": Path(log.name).read_text()[-400:]}
    row = {"cell": name, "minutes": (time.perf_counter() - started) / 60, **figures(run_dir)}
    print(json.dumps(row), flush=True)
    return row


def flags(config: Config) -> list[str]:
    """Command-line options that turn the books preset into this config."""
    base, here = preset("books").to_dict(), config.to_dict()
    found = []
    for key, value in here.items():
        pairs = value.items() if isinstance(value, dict) else [(None, value)]
        for field, item in pairs:
            before = base[key][field] if field else base[key]
            if item != before:
                name = f"{key}.{field}" if field else key
                found += [f"--{name.replace('_', '-')}", str(item)]
    return found


def figures(run_dir: Path) -> dict[str, Any]:
    """What the table shows of a finished run."""
    found = json.loads((run_dir / "eval.json").read_text())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    return {
        **{key: last[key] for key in ("gamma", "latent_variance", "effective_rank", "loss_diffusion", "loss_hidden")},
        "tokens_per_second": last.get("tokens_per_second"),
        **found["summary"],
    }


def main() -> int:
    options = tyro.cli(Compare)
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.cells.split(",")
    configs = {name: cell_config(options, CELLS[name]) for name in names}
    prepare_all(configs, options)
    with ThreadPoolExecutor(options.side_by_side) as pool:
        rows = list(pool.map(lambda name: run_cell(name, configs[name], options), names))
    (options.out / "cells.json").write_text(json.dumps(rows, indent=2) + "\n")
    return int(any("failed" in row for row in rows))


def prepare_all(configs: dict[str, Config], options: Compare) -> None:
    """Hidden states once; every cell finds what the first one prepared."""
    from weights_port.pipeline import prepare, resolve

    first = next(iter(configs))
    prepared = prepare(configs[first], options.runs_dir / first)
    for name, config in configs.items():
        run_dir = options.runs_dir / name
        run_dir.mkdir(parents=True, exist_ok=True)
        if name != first and not (run_dir / "data.json").is_file():
            for file in ("tokenizer.json", "valid_windows.npz", "data.json"):
                shutil.copy(options.runs_dir / first / file, run_dir)
            resolve(config, prepared.info).save(run_dir / "config.json")


if __name__ == "__main__":
    sys.exit(main())
