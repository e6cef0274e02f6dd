"""The frozen model at its real width: memory, speed and error of every way to load it.

    python experiments/measure_encoder.py --out results/encoder-h200/summary.json      # random weights, 8 layers of the 27B
    python experiments/measure_encoder.py --encoder /models/Qwen3.6-27B --out ...      # the real thing
    python experiments/measure_encoder.py --toy                                        # a rehearsal on the CPU

Each case is a process of its own.  Weights as they are, int8 and nf4: seconds to load, memory on the GPU after loading and at
its peak, memory of this process that belongs to no file, tokens/s.  Then the error of packed weights by layer; the same
states from a model spread over GPU and CPU; and one cache filled by as many processes as there are GPUs.  What the machine
cannot measure is said.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro

from weights_port import encoder_cost
from weights_port.encoder_cost import Work
from weights_port.loading import truncated
from weights_port.packing_error import packing_error
from weights_port.qwen3_6 import published_config, save_random
from weights_port.tiny import save_tiny_multimodal

WEIGHTS = ("auto", "int8", "nf4")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and on what."""

    encoder: str | None = None
    """A folder or Hugging Face id; by default random weights of `shape`."""
    shape: str = "Qwen/Qwen3.6-27B"
    """Published shape of the random weights."""
    layers: int = 8
    """Layers of the random weights; a multiple of four keeps the mix of linear and full attention."""
    layer: int = -3
    """Hidden state that is read."""
    tokens: int = 262_144
    """Tokens that are run for the speed."""
    num_tokens: int = 128
    """Tokens in a window."""
    batch_tokens: int = 8192
    """Tokens in a batch."""
    toy: bool = False
    """A tiny model and few tokens, on whatever there is."""
    out: Path | None = None
    """Where the JSON goes."""
    case: str | None = None
    """For the process of one case: its settings as JSON."""


def main() -> int:
    options = tyro.cli(Options)
    if options.toy:
        options = dataclasses.replace(options, tokens=2048, num_tokens=16, batch_tokens=256)
    if options.case is not None:
        work = Work(options.encoder, options.layer, options.tokens, options.num_tokens, options.batch_tokens)
        print(json.dumps(measure(work, **json.loads(options.case))))
        return 0
    gpus = encoder_cost.gpu_count()
    with tempfile.TemporaryDirectory() as folder:
        encoder = options.encoder or make(options, Path(folder) / "model")
        cases = [{"kind": "loading", "weights": weights} for weights in WEIGHTS] + [{"kind": "errors"}]
        cases += [{"kind": "spread"}] if gpus else []
        if gpus > 1 or (options.toy and not gpus):
            cases += [{"kind": "processes", "count": count} for count in (1, max(gpus, 2))]
        rows = [run(options, encoder, case) for case in cases]
    left_out = [] if gpus else ["memory and speed on a GPU", "a model spread over GPU and CPU"]
    left_out += [] if gpus > 1 else ["several GPUs"]
    left_out += [] if options.encoder else ["real weights: errors and speed are those of random ones"]
    print("Not measured: " + "; ".join(left_out))
    if options.out:
        from jdllm.evaluation.report import command_line, commit

        options.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"command": command_line(), "commit": commit(), "encoder": options.encoder or f"random {options.shape}"}
        found |= {"layers": options.layers, "rows": rows, "not_measured": left_out}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any("failed" in row for row in rows) else 0


def make(options: Options, folder: Path) -> str:
    """Random weights."""
    began = time.perf_counter()
    if options.toy:
        save_tiny_multimodal("qwen3_5", folder)
    else:
        config = published_config(options.shape)
        config.text_config = truncated(config.text_config, options.layers)
        save_random(config, folder, "cuda" if encoder_cost.gpu_count() else "cpu")
    size = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    print(f"random weights, {size:.2f} GB: {time.perf_counter() - began:.0f} s", flush=True)
    return str(folder)


def run(options: Options, encoder: str, case: dict[str, Any]) -> dict[str, Any]:
    """One case in its own process."""
    settings = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("layer", "tokens", "num_tokens", "batch_tokens")
    ]
    command = [sys.executable, __file__, f"--encoder={encoder}", *settings, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    row = {"failed": done.stderr.strip()[-2000:]} if done.returncode or not lines else json.loads(lines[-1])
    print(json.dumps(case | {key: value for key, value in row.items() if key != "table"}))
    print(row.get("table", ""), flush=True)
    return case | row


def measure(work: Work, kind: str, **settings: Any) -> dict[str, Any]:
    """One case."""
    cases = {"loading": encoder_cost.loading, "spread": encoder_cost.spread, "processes": encoder_cost.processes}
    if kind in cases:
        return cases[kind](work, **settings)
    text = work.windows(2048)
    result = packing_error(work.encoder, text.ids, text.lengths, layer=work.layer)
    return {"table": result.table()} | dataclasses.asdict(result)


if __name__ == "__main__":
    sys.exit(main())
