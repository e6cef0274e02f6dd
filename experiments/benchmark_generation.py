"""How fast every way to generate is, in one command and one table: presets, step counts, implementations, weights.

    python experiments/benchmark_generation.py                                 # all of it, on a free GPU
    python experiments/benchmark_generation.py --runs runs/books runs/books-int8 --no-sweeps

A row is a whole generation, noise to tokens, at one size.  Rows come in the order in which they matter, results are written
after each, and what --minutes leaves undone is listed as not run.  Weights are random and behave like trained ones
(jdllm/model/random_weights.py), or those of --runs, whose figures from `jdllm eval` then stand beside the speed.  The
PyTorch twin gets the same weights and the same noise.  On a CPU the small presets are run, in float32.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants memory of the same card

import jax
import tyro

import jdllm
from jdllm.config import Config, ConfigError, preset
from jdllm.evaluation import card, measure, report, speed
from jdllm.evaluation.benchmark import Benchmark, Name, Point
from jdllm.kernels import op
from jdllm.kernels.quantize import quantized_weights

PRESETS = {
    "gpu": ("qwen3.6-35b-a3b", "qwen3.6-27b", "books", "qwen3.6-27b-5090", "gpt2-paper", "quickstart", "smoke"),
    "cpu": ("quickstart", "books", "smoke"),
}
LEADING = {"gpu": 2, "cpu": 3}
"""Presets whose baselines are timed at once; those of the others come last."""
BATCHES = {"gpu": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cpu": (1, 2, 4, 8)}
LATENTS = {"gpu": (16, 32, 64, 128, 256, 512, 1024), "cpu": (16, 32, 64, 128)}
STEPS = {"gpu": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 2, 4, 8)}
SWEPT_STEPS = 10
COMPILE_THREADS = {"gpu": 12, "cpu": 1}
PLAIN = {"gpu": "bf16", "cpu": "fp32"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time; without options everything."""

    presets: tuple[str, ...] = ()
    """Presets of the main table; the first one is also swept.  By default all on a GPU, the small ones on a CPU."""
    steps: tuple[int, ...] = (4, 10)
    """Denoising steps of the main table."""
    implementations: tuple[str, ...] = op.IMPLEMENTATIONS
    """Of jdllm/kernels/op.py."""
    weights: tuple[str, ...] = ()
    """By default bf16 (fp32 on a CPU), fp8, int8, int4."""
    runs: tuple[Path, ...] = ()
    """Trained runs, quantised ones too, to time first, with their own weights and quality."""
    sweeps: bool = True
    """Also vary batch, latents and steps."""
    torch: bool = True
    """Also time the PyTorch twin."""
    minutes: float = 8.0
    """Nothing is begun after so many minutes."""
    seconds: float = 0.7
    """Time for the repetitions of a row."""
    out: Path | None = None
    """By default results/generation-<device>."""


def plan(options: Options, backend: str) -> Iterator[Point]:
    """All points, the ones that answer the main question first."""
    plain, names = PLAIN[backend], options.presets or PRESETS[backend]
    weights = options.weights or (plain, "fp8", "int8", "int4")
    ours = tuple((way, kind) for way in options.implementations for kind in weights)
    swept = tuple((way, plain) for way in options.implementations)
    eager = (speed.TORCH_EAGER,) if options.torch else ()
    graph = (speed.TORCH_GRAPH,) if options.torch and backend == "gpu" else ()
    for path in options.runs:
        loaded = jdllm.load(path)
        own = quantized_weights(loaded.params)
        beside = () if own else (*eager, *graph)
        run_names = tuple((way, own or plain) for way in options.implementations)
        yield Point("main", loaded.config, 1, options.steps, (*run_names, *beside), path)
    leading = names[: LEADING[backend]]
    for name in leading:
        yield Point("main", preset(name), 1, options.steps, (*ours, *eager, *graph))
    for name in names[len(leading) :]:
        yield Point("main", preset(name), 1, options.steps, ours)
    if options.sweeps:
        yield from sweeps(preset(names[0]), backend, swept)
    for name in names[len(leading) :]:
        yield Point("main", preset(name), 1, options.steps, (*eager, *graph))
    if options.sweeps:
        for way in (eager, graph):
            yield from sweeps(preset(names[0]), backend, way)


def sweeps(config: Config, backend: str, names: tuple[Name, ...]) -> Iterator[Point]:
    """Batch, latents and steps, one at a time."""
    if not names:
        return
    for batch in BATCHES[backend]:
        yield Point("batch", config, batch, (SWEPT_STEPS,), names)
    for latents in LATENTS[backend]:
        changed = config.replace(model__num_latents=latents, model__num_tokens=latents)
        yield Point("latents", changed, 1, (SWEPT_STEPS,), names)
    yield Point("steps", config, 1, STEPS[backend], names)


def describe(backend: str) -> dict[str, Any]:
    """Device, ceilings and versions."""
    from weights_port import torch_baseline

    packages = ("jax", "torch", "triton", "jax-triton")
    there = [name for name in packages if importlib.util.find_spec(name.replace("-", "_"))]
    return {
        "device": jax.devices()[0].device_kind if backend == "gpu" else f"CPU ({os.cpu_count()} cores)",
        "backend": backend, "read_bandwidth_tb_s": measure.read_bandwidth() / 1e12, "matmul_tflop_s": measure.matmul_peak() / 1e12,
        "matmul": "bfloat16 products of 8192 x 8192" if backend == "gpu" else "float32 products of 1024 x 1024",
        "l2_bytes": torch_baseline.l2_bytes() if backend == "gpu" else 0, "torch_threads": torch_baseline.threads(),
        "commit": report.commit(), "command": report.command_line(),
        "versions": [f"{name} {importlib.metadata.version(name)}" for name in there],
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "compiled_side_by_side": COMPILE_THREADS[backend], "clocks": {},
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=arguments, description=__doc__.partition("\n\n")[0])
    beside = card.other_jobs()  # before this process is on the card itself
    if beside:
        print(f"error: another job is on the card, so timings would mean nothing: {'; '.join(beside)}", file=sys.stderr)
        return 2
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    if backend == "cpu":
        print("no GPU here: these are CPU timings, of small presets", flush=True)
    try:
        points = list(plan(options, backend))
        about = describe(backend)
        from weights_port.torch_baseline import Twins

        twins = Twins()
        bench = Benchmark(
            about, options.out or Path("results") / f"generation-{short_name(about['device'])}",
            minutes=options.minutes, seconds=options.seconds, threads=COMPILE_THREADS[backend],
            baselines={speed.TORCH_EAGER[0]: twins, speed.TORCH_GRAPH[0]: twins},
        )  # fmt: skip
        bench.run(points)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about["plots"] = speed.plot(bench.out, about, bench.rows)
    bench.write()
    print((bench.out / "README.md").read_text())
    return 0


def short_name(device: str) -> str:
    """'NVIDIA H200' -> 'h200'; 'CPU (2 cores)' -> 'cpu'."""
    return device.removeprefix("NVIDIA ").partition(" (")[0].lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
