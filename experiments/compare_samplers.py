"""Samplers that cost no training, on one trained run: kind, steps, guidance, temperature; quality of each, one table.

    python experiments/compare_samplers.py --run runs/books --out results/books-h200

Every row is perplexity under the scorer and unigram entropy of the same number of unselected samples from the same seed,
beside held-out human text; rows are comparable at equal entropy only.  All tokens are kept (samplers.npz), so that other
figures can be computed later without the run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import jdllm
from jdllm.evaluation.diversity import text_lengths
from jdllm.evaluation.evaluate import held_out_windows
from jdllm.evaluation.report import command_line, commit, scores_of, text_figures

STEPS = (4, 10, 32, 64)
GRID: list[dict[str, Any]] = [
    {"sampler": "ddim"},
    {"sampler": "sde"},
    {"sampler": "ddim", "guidance": 1.0},
    {"sampler": "sde", "guidance": 1.0},
    {"sampler": "ddim", "temperature": 0.9},
    {"sampler": "ddim", "guidance": 0.5},
    {"sampler": "sde", "guidance": 0.5},
    {"sampler": "ddim", "guidance": 2.0},
    {"sampler": "sde", "temperature": 0.9},
    {"sampler": "ddim", "grid": "tau"},
    {"sampler": "early_stop"},
]
"""The most telling first, since time may run out."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compare."""

    run: Path
    """Folder of the run."""
    out: Path
    """Folder for samplers.json, samplers.md and samplers.npz."""
    num: int = 512
    """Samples in each row."""
    scorer: str = "smollm2"
    """Language model that scores."""
    seconds: float = 120.0
    """No new row is begun after so long."""


def main() -> int:
    options = tyro.cli(Options)
    from weights_port.scorer import scorer_for_run

    generator = jdllm.load(options.run)
    scorer = scorer_for_run(options.scorer, options.run, generator)
    options.out.mkdir(parents=True, exist_ok=True)
    began, rows, tokens = time.perf_counter(), [], {}

    def row(name: str, ids: np.ndarray, about: dict[str, Any]) -> None:
        lengths = text_lengths(ids, generator.eos_id)
        rows.append(
            {
                "name": name,
                **about,
                **dataclasses.asdict(text_figures(ids, lengths, scores_of(ids, lengths, scorer.score))),
            }
        )
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}
        print(json.dumps(shown), flush=True)

    row("human", held_out_windows(options.run)[0][: options.num], {})
    for settings, steps in itertools.product(GRID, STEPS):
        if time.perf_counter() - began > options.seconds:
            print("out of time", flush=True)
            break
        name = " ".join(f"{key}={value}" for key, value in {**settings, "steps": steps}.items())
        ids = generator.generate_tokens(seed=0, num=options.num, steps=steps, **settings)
        tokens[name.replace(" ", ",")] = ids.astype(np.uint16 if ids.max() < 2**16 else np.int32)
        row(name, ids, {**settings, "steps": steps})
    found = {"rows": rows, "scorer": scorer.name, "step": generator.step, "command": command_line(), "commit": commit()}
    (options.out / "samplers.json").write_text(json.dumps(found, indent=1) + "\n")
    np.savez_compressed(options.out / "samplers.npz", **tokens)
    (options.out / "samplers.md").write_text(table(rows, scorer.name))
    return 0


def table(rows: list[dict[str, Any]], scorer: str) -> str:
    """Markdown; perplexity as a ratio to human text too."""
    human = rows[0]
    lines = [
        f"Scorer: {scorer}",
        "",
        "| sampling | perplexity | x human | entropy | vs human | distinct-2 | repeated 4-grams |",
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        ratio, change = r["perplexity"] / human["perplexity"], r["entropy"] / human["entropy"] - 1
        lines.append(
            f"| {r['name']} | {r['perplexity']:.1f} | {ratio:.2f} | {r['entropy']:.3f} | {change:+.1%} "
            f"| {r['distinct_2']:.3f} | {r['repetition_4']:.2%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
