"""Judge a trained run and put what others need to check it into a folder of results/.

    python experiments/judge_run.py --run runs/books --out results/books-h200

Runs `jdllm eval` and frontier.py (into OUT/frontier) side by side, then collects: summary.json for programs, the tables, 32
unselected samples per step count, the resolved config, metrics.jsonl and the plots.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Options:
    """What to judge."""

    run: Path
    """Folder of the run."""
    out: Path
    """Folder of the results."""
    steps: str = "4,10,32,64"
    """Step counts of `jdllm eval`."""
    num: int = 512
    """Samples for every figure."""
    scorer: str = "smollm2"
    """Language model that scores."""
    frontier_minutes: float = 2.0
    """Time for the frontier of samplers, steps and temperatures; 0 leaves it out."""


def main() -> int:
    options = tyro.cli(Options)
    options.out.mkdir(parents=True, exist_ok=True)
    shared = ["--num", str(options.num), "--scorer", options.scorer]
    evaluate = [sys.executable, "-m", "jdllm.cli", "eval", "--run", str(options.run), *shared, "--steps", options.steps]
    jobs = [subprocess.Popen([*evaluate, "--out", str(options.out / "eval.json")])]
    if options.frontier_minutes:
        program = [sys.executable, str(Path(__file__).parent / "frontier.py"), "--runs", str(options.run), *shared]
        limits = ["--out", str(options.out / "frontier"), "--minutes", str(options.frontier_minutes)]
        jobs.append(subprocess.Popen([*program, *limits]))
    failed = [job.wait() for job in jobs]
    if any(failed):
        return max(failed)
    collect(options.run, options.out)
    return 0


def collect(run: Path, out: Path) -> None:
    """summary.json out of eval.json, and the record of the run beside it."""
    summary = json.loads((out / "eval.json").read_text())["summary"]
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(run / name, out / name)
    shutil.copytree(run / "plots", out / "plots", dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
