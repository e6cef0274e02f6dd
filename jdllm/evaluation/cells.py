"""Cells of an experiment, each a trained model at one seed: kept in one file, merged over sessions, grouped.

A record is a plain dict, one a cell and seed; the keys are those of `Record`.  Nothing is dropped: a cell that diverged or
collapsed has its line with the reason.  Cells are compared only within the same size and budget.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jdllm.config import ConfigError
from jdllm.evaluation.report import AT_HUMAN_ENTROPY

SCHEMA = (
    "name", "seed", "gpu_minutes", "recon", "gen_ppl", "entropy", "mauve", "steps", "ms_per_sequence", "batch", "commit",
)  # fmt: skip
"""Keys that every row of summary.json has; others follow them."""
FULL = "full"
FINISHED = ("done", "diverged", "collapsed")
"""Never run again.  `failed` is a fault of the machine or the program, and is."""


class Record(TypedDict):
    """One cell at one seed."""

    name: str
    seed: int
    size: str
    budget: str
    """In words: `1800 steps`, `10 minutes`."""
    status: str
    """done, diverged, collapsed or failed."""
    reason: str | None
    question: str
    config: dict[str, Any]
    gpu_minutes: float | None
    side_by_side: int
    """Cells that shared the card; their minutes are longer than those of a cell alone."""
    train: dict[str, float]
    """Last figures of training: step, recon, recon_noisy, effective_rank, gamma, loss_diffusion."""
    samples: dict[str, dict[str, Any]]
    """Figures of samples by number of steps, as in eval.json."""
    human: dict[str, Any] | None
    scorer: str | None
    scorer_is_encoder: bool
    texts: list[str]
    """The first unselected samples."""
    command: str
    commit: str


def key(record: Record) -> tuple[Any, ...]:
    """What makes two records the same cell."""
    return record["name"], record["seed"], record["size"], record["budget"]


def read(path: Path) -> list[Record]:
    """Records of a cells.json; none when it is not there yet."""
    if not path.is_file():
        return []
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); restore it from git, or move it away") from None


def merge(*lists: Iterable[Record]) -> list[Record]:
    """One record a cell, in order of first appearance: the later one, unless it failed and the earlier did not."""
    merged: dict[tuple[Any, ...], Record] = {}
    for record in (record for records in lists for record in records):
        before = merged.get(key(record))
        if before is None or record["status"] in FINISHED or before["status"] not in FINISHED:
            merged[key(record)] = record
    return list(merged.values())


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows of summary.json: one for each cell and number of steps, and human text."""
    rows = []
    for r in records:
        about = {
            "status": r["status"],
            "reason": r["reason"],
            "size": r["size"],
            "budget": r["budget"],
            "command": r["command"],
        }
        for steps, figures in (r["samples"] or {"": None}).items():
            row = {
                "name": r["name"], "seed": r["seed"], "gpu_minutes": r["gpu_minutes"], "recon": r["train"].get("recon"),
                "gen_ppl": figures and figures["perplexity"], "entropy": figures and figures["entropy"],
                "mauve": figures and figures.get("mauve"), "steps": int(steps) if steps else None,
                "ms_per_sequence": None, "batch": None, "commit": r["commit"],
            }  # fmt: skip
            equal = figures and figures.get(AT_HUMAN_ENTROPY)
            rows.append({**row, "gen_ppl_at_human_entropy": equal, **about})
    human = next((r for r in records if r["human"]), None)
    if human:
        figures = human["human"]
        row = dict.fromkeys(SCHEMA) | {
            "name": "human", "gen_ppl": figures["perplexity"], "entropy": figures["entropy"],
            "mauve": figures.get("mauve"), "commit": human["commit"],
        }  # fmt: skip
        rows.append({**row, "status": "done", "command": human["command"]})
    return rows


@dataclasses.dataclass(frozen=True)
class Group:
    """All seeds of one cell at one size and budget."""

    name: str
    records: list[Record]
    steps: str
    """Number of denoising steps whose samples are shown."""

    def values(self, figure: str) -> list[float]:
        """One value a finished seed."""
        found = []
        for r in self.records:
            shown = self.shown(r)
            value = r["train"].get(figure, shown.get(figure) if shown else None)
            if r["status"] == "done" and value is not None and math.isfinite(value):
                found.append(float(value))
        return found

    def shown(self, record: Record) -> dict[str, Any] | None:
        """Figures of the samples; of an autoregressive model, which knows one number of steps, those."""
        samples = record["samples"]
        return samples.get(self.steps) or (next(iter(samples.values())) if len(samples) == 1 else None)

    def mean(self, figure: str) -> float | None:
        values = self.values(figure)
        return statistics.fmean(values) if values else None

    def spread(self, figure: str) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        values = self.values(figure)
        return statistics.stdev(values) if len(values) > 1 else None

    def status(self) -> str:
        """`2 seeds`, `1 seed, 1 diverged`."""
        count = {s: sum(r["status"] == s for r in self.records) for s in (*FINISHED, "failed")}
        parts = [f"{count['done']} seed{'s' if count['done'] != 1 else ''}"] if count["done"] else []
        return ", ".join(parts + [f"{n} {s}" for s, n in count.items() if n and s != "done"])


def groups(records: Sequence[Record]) -> dict[str, list[Group]]:
    """Groups by size and budget in words, in order of first appearance."""
    sections: dict[str, dict[str, list[Record]]] = {}
    for r in records:
        section = f"{r['size']}, {r['budget']}"
        sections.setdefault(section, {}).setdefault(r["name"], []).append(r)
    found = {}
    for section, cells in sections.items():
        counts = [set(r["samples"]) for rs in cells.values() for r in rs if len(r["samples"]) > 1]
        common = set.intersection(*counts) if counts else {s for rs in cells.values() for r in rs for s in r["samples"]}
        steps = max(common, key=int, default="")
        found[section] = [Group(name, sorted(rs, key=lambda r: r["seed"]), steps) for name, rs in cells.items()]
    return found
