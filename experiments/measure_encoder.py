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

import numpy as np
import tyro

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
        case = json.loads(options.case)
        print(
            json.dumps(
                {"load": loaded, "errors": errors, "spread": spread, "processes": processes}[case.pop("kind")](
                    options, **case
                )
            )
        )
        return 0
    import torch

    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        encoder = options.encoder or make(options, Path(folder) / "model")
        cases = [{"kind": "load", "weights": weights} for weights in WEIGHTS] + [{"kind": "errors"}]
        cases += [{"kind": "spread"}] if gpus else []
        cases += (
            [{"kind": "processes", "count": count} for count in (1, gpus if gpus > 1 else 2)]
            if gpus > 1 or (options.toy and not gpus)
            else []
        )
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
    import torch

    from weights_port.qwen3_6 import published_config, save_random
    from weights_port.tiny import save_tiny_multimodal

    began = time.perf_counter()
    if options.toy:
        save_tiny_multimodal("qwen3_5", folder)
    else:
        from weights_port.loading import truncated

        config = published_config(options.shape)
        config.text_config = truncated(config.text_config, options.layers)
        save_random(config, folder, "cuda" if torch.cuda.is_available() else "cpu")
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
    print(
        json.dumps(case | {k: v for k, v in row.items() if k != "table"}),
        *([row["table"]] if "table" in row else []),
        sep="\n",
        flush=True,
    )
    return case | row


def windows(options: Options, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and lengths of full windows of random bytes, which every tokenizer has."""
    count = max(1, tokens // options.num_tokens)
    ids = np.random.default_rng(0).integers(0, 256, (count, options.num_tokens)).astype(np.int32)
    return ids, np.full(count, options.num_tokens, np.int32)


def speed(encoder: Any, options: Options) -> float:
    """Tokens/s in batches of batch_tokens, after one batch that is not counted."""
    ids, lengths = windows(options, options.tokens)
    size = max(1, options.batch_tokens // options.num_tokens)
    encoder.encode_torch(ids[:size], lengths[:size]).cpu()
    began = time.perf_counter()
    for at in range(0, len(ids), size):
        hidden = encoder.encode_torch(ids[at : at + size], lengths[at : at + size])
    hidden.cpu()
    return ids.size / (time.perf_counter() - began)


def loaded(options: Options, weights: str) -> dict[str, Any]:
    """Load, then run."""
    import torch

    from weights_port.encoder import load_encoder
    from weights_port.loading import missing_kernels

    load_encoder("tiny-qwen3_5", layer=1, weights=weights)  # imports are not counted
    before, began, cuda = anonymous(), time.perf_counter(), torch.cuda.is_available()
    encoder = load_encoder(options.encoder, layer=options.layer, weights=weights)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "dtype": encoder.info.identity["dtype"], "load_seconds": time.perf_counter() - began,
        "ram_not_of_a_file_gb": (anonymous() - before) / 1e9, "missing": missing_kernels(encoder.config, encoder.info.layer),
    }  # fmt: skip
    if cuda:
        found |= {
            "loaded_gb": torch.cuda.memory_allocated() / 1e9,
            "load_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
    found["tokens_per_second"] = speed(encoder, options)
    if cuda:
        found["run_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def errors(options: Options) -> dict[str, Any]:
    """Of packed weights, by layer."""
    from weights_port.packing_error import packing_error

    result = packing_error(options.encoder, *windows(options, 2048), layer=options.layer)
    return {"table": result.table()} | dataclasses.asdict(result)


def spread(options: Options) -> dict[str, Any]:
    """Half of the weights on the GPU, the rest in the CPU's memory: the same states, and how fast."""
    import torch

    from weights_port.encoder import load_encoder

    whole = load_encoder(options.encoder, layer=options.layer)
    states = whole.states(*windows(options, 2048)).float().cpu()
    half = torch.cuda.memory_allocated() / 2e9
    del whole
    torch.cuda.empty_cache()
    encoder = load_encoder(options.encoder, layer=options.layer, device="spread", memory=half)
    other = encoder.states(*windows(options, 2048)).float().cpu()
    fewer = dataclasses.replace(options, tokens=min(options.tokens, 4 * options.batch_tokens))
    difference = float((other - states).norm() / states.norm())
    return {"limit_gb": half, "relative_difference": difference, "tokens_per_second": speed(encoder, fewer)}


def processes(options: Options, count: int) -> dict[str, Any]:
    """One cache on a temporary disk."""
    from jdllm.data.windows import Windows
    from weights_port.checkpoints import open_checkpoint
    from weights_port.extract import extract_to_cache
    from weights_port.processes import start

    text = Windows(*windows(options, options.tokens))
    with tempfile.TemporaryDirectory() as folder, start(
        open_checkpoint(options.encoder), count, options.encoder, "auto", layer=options.layer
    ) as encoder:  # fmt: skip
        first, began = text[np.arange(min(len(text), 16 * count))], 0.0
        for part in (first, text):  # the first is not counted
            began = time.perf_counter()
            extract_to_cache(
                encoder, part, folder, batch_tokens=options.batch_tokens, data_hash=part.hash, progress=False
            )
        return {"tokens_per_second": text.ids.size / (time.perf_counter() - began)}


def anonymous() -> int:
    """Bytes of this process that belong to no file."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(main())
