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
import gc
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants memory of the same card

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import jdllm
from jdllm.config import Config, ConfigError, preset
from jdllm.evaluation import report, speed
from jdllm.evaluation.speed import NotRun, Row
from jdllm.generation.generate import estimate_and_read, generate
from jdllm.kernels import card, measure
from jdllm.kernels.quantize import FORMATS, quantize_params, quantized_weights
from jdllm.kernels.roofline import RTX_5090, generation_work, project
from jdllm.model.ldlm import Model, Params
from jdllm.model.random_weights import random_weights

PRESETS = {
    "gpu": ("qwen3.6-35b-a3b", "qwen3.6-27b", "books", "qwen3.6-27b-5090", "gpt2-paper", "quickstart", "smoke"),
    "cpu": ("quickstart", "books", "smoke"),
}
BATCHES = {"gpu": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cpu": (1, 2, 4, 8)}
LATENTS = {"gpu": (16, 32, 64, 128, 256, 512, 1024), "cpu": (16, 32, 64, 128)}
STEPS = {"gpu": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 2, 4, 8)}
SWEPT_STEPS = 10
TIMES = 128  # length of the padded time grid: one program serves every step count
SIDE_BY_SIDE = {"gpu": 12, "cpu": 1}
LONG = {"bf16": "bfloat16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time; without options everything."""

    presets: tuple[str, ...] = ()
    """Presets of the main table; the first one is also swept.  By default all on a GPU, the small ones on a CPU."""
    steps: tuple[int, ...] = (4, 10)
    """Denoising steps of the main table."""
    implementations: tuple[str, ...] = ()
    """By default all there are."""
    weights: tuple[str, ...] = ()
    """By default bf16 (fp32 on a CPU), int8, fp8, int4."""
    runs: tuple[Path, ...] = ()
    """Trained runs, quantised ones too, to time besides, with their own weights and quality."""
    sweeps: bool = True
    """Also vary batch, latents and steps."""
    torch: bool = True
    """Also time the PyTorch twin."""
    minutes: float = 8.0
    """No row is begun after so many minutes."""
    seconds: float = 0.7
    """Time for the repetitions of a row."""
    out: Path | None = None
    """By default results/generation-<device>."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Rows that share their weights and programs: one model at one batch size."""

    table: str
    config: Config
    batch: int
    steps: tuple[int, ...]
    implementations: tuple[str, ...]
    weights: tuple[str, ...]
    run: Path | None = None


class Benchmark:
    """The rows so far, and how to add to them."""

    def __init__(self, options: Options, out: Path, about: dict[str, Any]):
        self.options, self.out, self.about = options, out, about
        self.backend, self.cache = about["backend"], about["l2_bytes"]
        self.bandwidth, self.peak = 1e12 * about["read_bandwidth_tb_s"], 1e12 * about["matmul_tflop_s"]
        self.plain = "bf16" if self.backend == "gpu" else "fp32"
        self.rows: list[Row] = []
        self.missing: list[NotRun] = []
        self.tokens: dict[tuple[Any, ...], np.ndarray] = {}
        self.compiled: set[tuple[Any, ...]] = set()
        self.began, self.watch = time.monotonic(), card.Watch()
        self.held: tuple[Any, Params, Params] | None = None
        self.twin: tuple[Any, Any] | None = None

    @property
    def over(self) -> str:
        return f"--minutes {self.options.minutes:g} were over"

    def late(self) -> bool:
        return time.monotonic() - self.began > 60 * self.options.minutes

    def run(self, points: list[Point]) -> None:
        with self.watch:
            for point in points:
                names = [(i, w) for i in point.implementations for w in point.weights if fits(i, w)]
                if self.late():
                    for (implementation, weights), steps in itertools.product(names, point.steps):
                        self.skip(
                            point, steps, implementation, weights, f"--minutes {self.options.minutes:g} were over"
                        )
                    continue
                said = f"{point.config.preset}, batch {point.batch}, {point.config.model.num_latents} latents"
                print(f"[{(time.monotonic() - self.began) / 60:4.1f} min] {said}: {names}", flush=True)
                ours = [(i, w) for i, w in names if not i.startswith("torch")]
                if ours:
                    self.time_jax(point, ours)
                for implementation, weights in names:
                    if implementation.startswith("torch"):
                        self.time_torch(point, implementation, weights)
                self.write()

    def weights_of(self, point: Point) -> tuple[Params, Params]:
        """Unquantised weights of a point; kept for the next one, since the sweeps share them."""
        if self.held is None or self.held[0] != (point.config, point.run):
            self.held = None
            gc.collect()
            if point.run:
                loaded = jdllm.load(point.run, dtype=LONG[self.plain])
                self.held = ((point.config, point.run), loaded.params, loaded.frozen)
            else:
                self.held = ((point.config, None), *random_weights(Model(point.config), 0, LONG[self.plain]))
        return self.held[1], self.held[2]

    def time_jax(self, point: Point, names: list[tuple[str, str]]) -> None:
        """Compile all programs of a point side by side, then time one after the other."""
        model, (params, frozen) = Model(point.config), self.weights_of(point)
        if point.table == "main" and not point.run:
            self.check(model, params, frozen)
        convert = jax.jit(quantize_params, static_argnums=1)
        stored: dict[str, tuple[Params, Params]] = {}
        for weights in dict.fromkeys(weights for _, weights in names):
            own = point.run or weights not in FORMATS
            try:
                stored[weights] = (params, frozen) if own else (convert(params, weights), convert(frozen, weights))
            except ConfigError as error:
                self.refuse(point, [name for name in names if name[1] == weights], str(error))
        for name in names:
            problem = refusal(name, point, self.plain)
            if problem and name[1] in stored:
                self.refuse(point, [name], problem)
        names = [name for name in names if name[1] in stored and not refusal(name, point, self.plain)]
        calls = {
            (name, steps): caller(model, *stored[name[1]], point.batch, steps, name[0], self.plain)
            for name, steps in itertools.product(names, point.steps)
        }

        def cold(name: tuple[str, str]) -> float | Exception:
            start = time.perf_counter()
            try:
                calls[name, point.steps[0]]()
            except Exception as error:  # whatever stops an implementation is its reason in the list of rows not run
                return error
            return time.perf_counter() - start

        with ThreadPoolExecutor(SIDE_BY_SIDE[self.backend]) as pool:
            started = dict(zip(names, pool.map(cold, names)))
        fresh = {name: (model, point.batch, name) not in self.compiled for name in names}
        self.compiled |= {(model, point.batch, name) for name in names}
        for (name, steps), call in calls.items():
            if isinstance(started[name], Exception):
                self.skip(point, steps, *name, reason(started[name]))
            else:
                began = time.monotonic()
                timing = measure.time_calls(call, seconds=self.options.seconds)
                first = fresh[name] and steps == point.steps[0]
                self.add(point, steps, *name, timing, began, np.asarray(call()), started[name] if first else None)

    def time_torch(self, point: Point, implementation: str, weights: str) -> None:
        """The twin with the same weights and noise."""
        from weights_port import torch_baseline as baseline

        key = (point.config, point.run, implementation)
        if self.twin is not None and self.twin[0] != key:
            self.twin = None
            gc.collect()
            baseline.release()
        try:
            if self.twin is None:
                twin = baseline.twin(point.config, *self.weights_of(point), LONG[weights])
                graph = implementation == speed.TORCH_GRAPH[0]
                self.twin = (key, baseline.prepared(twin, dynamic=point.table == "batch") if graph else twin)
            make = baseline.eager if implementation == speed.TORCH_EAGER[0] else baseline.graph
            noise = baseline.noise(point.config, jax.random.key(0), point.batch)
            for index, steps in enumerate(point.steps):
                began, start = time.monotonic(), time.perf_counter()
                call = make(self.twin[1], noise, steps)
                tokens = call().cpu().numpy()
                cold = time.perf_counter() - start
                timing = measure.time_calls(call, seconds=self.options.seconds)
                self.add(point, steps, implementation, weights, timing, began, tokens, None if index else cold)
        except Exception as error:  # as above: the reason is reported, and our own rows go on
            self.refuse(point, [(implementation, weights)], reason(error))

    def check(self, model: Model, params: Params, frozen: Params) -> None:
        """ConfigError unless the weights give finite latents that differ between positions and between draws."""
        m = model.config.model
        z = jax.random.normal(jax.random.key(1), (2, m.num_latents, m.latent_dim))
        dtype = LONG[self.plain]
        x0, tokens = estimate_and_read(
            model, params, frozen, z, jnp.float32(0.9), jnp.zeros_like(z), 0.0, guided=False, dtype=dtype
        )
        x0, tokens = np.asarray(x0), np.asarray(tokens)
        if not np.isfinite(x0).all() or x0.std() < 0.05 or len(np.unique(tokens)) < tokens.size / 16:
            raise ConfigError(
                f"{model.config.preset}: random weights give latents or tokens that do not vary; nothing was timed"
            )

    def add(
        self, point: Point, steps: int, implementation: str, weights: str, timing: measure.Timing, began: float,
        tokens: np.ndarray, cold: float | None,
    ) -> None:  # fmt: skip
        """Account a measured row, and write everything."""
        m = point.config.model
        work = generation_work(point.config, batch=point.batch, steps=steps, weights=weights)
        floors = work.memory_ms(self.bandwidth), work.arithmetic_ms(self.peak)
        reached = min(max(floors) / timing.median, 1.0)
        size = (point.config.preset, point.run, point.batch, m.num_latents, steps)
        if implementation == speed.XLA:
            self.tokens[(*size, weights)] = tokens
        others = implementation != speed.XLA
        same = (
            self.tokens.get((*size, self.plain if implementation.startswith("torch") else weights)) if others else None
        )
        self.rows.append(
            Row(
                table=point.table, preset=point.config.preset if point.run is None else point.run.name,
                steps=steps, batch=point.batch, latents=m.num_latents, tokens=m.num_tokens,
                implementation=implementation, weights=weights, ms_median=timing.median, ms_p90=timing.p90,
                repeats=timing.repeats, bytes=work.bytes, flops=work.flops, floor_fraction=floors[0] / timing.median,
                peak_fraction=floors[1] / timing.median,
                in_cache=0 < work.step_weights <= self.cache, quality=speed.quality(point.run, steps), cold_start_s=cold,
                projected_5090_ms=project(work, RTX_5090, reached) if self.backend == "gpu" else None,
                equal_to_xla=None if same is None else float((same == tokens).mean()),
                throttled=tuple(self.watch.since(began)),
            )
        )  # fmt: skip
        row = self.rows[-1]
        print(
            f"  {row.steps:3d} steps  {implementation:12s} {weights:5s} {row.ms_median:9.3f} ms  {row.floor_fraction:5.0%}",
            flush=True,
        )
        self.write()

    def skip(self, point: Point, steps: int, implementation: str, weights: str, why: str) -> None:
        m = point.config.model
        name = point.config.preset if point.run is None else point.run.name
        self.missing.append(NotRun(name, steps, point.batch, m.num_latents, implementation, weights, why))

    def refuse(self, point: Point, names: list[tuple[str, str]], why: str) -> None:
        for (implementation, weights), steps in itertools.product(names, point.steps):
            self.skip(point, steps, implementation, weights, why)

    def write(self) -> None:
        self.about["clocks"] = self.watch.summary()
        speed.write(self.out, self.about, self.rows, self.missing)


def caller(
    model: Model, params: Params, frozen: Params, batch: int, steps: int, implementation: str, plain: str
) -> Callable[[], jax.Array]:
    """A call that generates and waits; small arguments lie on the device, as they would in a loop of calls."""
    times = jnp.pad(jnp.linspace(1.0, 0.0, steps + 1), (0, TIMES - steps - 1))
    key, count, one, none = jax.random.key(0), jnp.int32(steps), jnp.float32(1.0), jnp.float32(0.0)
    chosen = {"implementation": implementation} if "implementation" in inspect.signature(generate).parameters else {}
    dtype = LONG[plain]

    def call() -> jax.Array:
        tokens = generate(
            model, params, frozen, key, times, count, one, none,
            num=batch, sampler="ddim", guided=False, dtype=dtype, **chosen,
        )  # fmt: skip
        return jax.block_until_ready(tokens)

    return call


def fits(implementation: str, weights: str) -> bool:
    """PyTorch is timed in the two ways that are named for it, ours in everything else."""
    if implementation.startswith("torch"):
        return (implementation, weights) in (speed.TORCH_EAGER, speed.TORCH_GRAPH)
    return True


def refusal(name: tuple[str, str], point: Point, plain: str) -> str | None:
    """Why jdllm/kernels/op.py would not run this row, or None."""
    if name[0] == speed.XLA:
        return None
    from jdllm.kernels.op import choose

    weights = name[1] if name[1] in FORMATS else None
    try:
        choose(name[0], point.config.model, num=point.batch, guided=False, dtype=LONG[plain], weights=weights)
    except ConfigError as error:
        return str(error)
    return None


def reason(error: Exception) -> str:
    """The first line of an error, without the rest of its trace."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def implementations() -> tuple[str, ...]:
    """Those of jdllm/kernels/op.py, `auto` aside, which is one of the others."""
    if importlib.util.find_spec("jdllm.kernels.op") is None:
        return (speed.XLA,)
    from jdllm.kernels.op import IMPLEMENTATIONS

    return (speed.XLA, *(name for name in IMPLEMENTATIONS if name not in (speed.XLA, "auto")))


def plan(options: Options, backend: str) -> Iterator[Point]:
    """All points, the ones that answer the main question first."""
    plain = "bf16" if backend == "gpu" else "fp32"
    ours = options.implementations or implementations()
    weights = options.weights or (plain, "fp8", "int8", "int4")
    graphs = ("torch-graph",) if backend == "gpu" else ()
    twin = ("torch-eager", *graphs) if options.torch else ()
    names = options.presets or PRESETS[backend]
    for path in options.runs:
        loaded = jdllm.load(path)
        own = quantized_weights(loaded.params)
        yield Point("main", loaded.config, 1, options.steps, ours, (own or plain,), path)
        if own is None:
            yield Point("main", loaded.config, 1, options.steps, twin, ("fp32", "bf16"), path)
    leading = 2 if backend == "gpu" else len(names)
    for name in names[:leading]:
        yield Point("main", preset(name), 1, options.steps, ours, weights)
        yield Point("main", preset(name), 1, options.steps, twin, ("fp32", "bf16"))
    for name in names[leading:]:
        yield Point("main", preset(name), 1, options.steps, ours, weights)
    if options.sweeps:
        yield from sweeps(preset(names[0]), backend, ours, (plain,))
    if options.torch:
        for name in names[leading:]:
            yield Point("main", preset(name), 1, options.steps, twin, ("fp32", "bf16"))
        if options.sweeps:
            yield from sweeps(preset(names[0]), backend, ("torch-eager",), ("fp32",))
            yield from sweeps(preset(names[0]), backend, graphs, ("bf16",))


def sweeps(config: Config, backend: str, ways: tuple[str, ...], weights: tuple[str, ...]) -> Iterator[Point]:
    """Batch, latents and steps, one at a time."""
    for batch in BATCHES[backend]:
        yield Point("batch", config, batch, (SWEPT_STEPS,), ways, weights)
    for latents in LATENTS[backend]:
        changed = config.replace(model__num_latents=latents, model__num_tokens=latents)
        yield Point("latents", changed, 1, (SWEPT_STEPS,), ways, weights)
    yield Point("steps", config, 1, STEPS[backend], ways, weights)


def describe(backend: str) -> dict[str, Any]:
    """Device, ceilings and versions."""
    from weights_port import torch_baseline as baseline

    device = jax.devices()[0].device_kind if backend == "gpu" else f"CPU ({os.cpu_count()} cores)"
    bandwidth, peak = measure.read_bandwidth(), measure.matmul_peak()
    packages = ("jax", "torch", "triton", "jax-triton")
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in packages
        if importlib.util.find_spec(name.replace("-", "_"))
    ]
    return {
        "device": device, "backend": backend, "read_bandwidth_tb_s": bandwidth / 1e12, "matmul_tflop_s": peak / 1e12,
        "matmul": "bfloat16 products of 8192 x 8192" if backend == "gpu" else "float32 products of 1024 x 1024",
        "l2_bytes": baseline.l2_bytes() if backend == "gpu" else 0, "torch_threads": baseline.threads(), "commit": report.commit(), "command": report.command_line(), "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "compiled_side_by_side": SIDE_BY_SIDE[backend], "clocks": {},
    }  # fmt: skip


def main() -> int:
    options = tyro.cli(Options, description=__doc__.partition("\n\n")[0])
    beside = card.other_jobs()  # before this process is on the card itself
    if beside:
        print(f"error: another job is on the card, so timings would mean nothing: {'; '.join(beside)}", file=sys.stderr)
        return 2
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    try:
        about = describe(backend)
        short = about["device"].removeprefix("NVIDIA ").lower().replace(" ", "-") if backend == "gpu" else "cpu"
        bench = Benchmark(options, options.out or Path("results") / f"generation-{short}", about)
        if backend == "cpu":
            print("no GPU here: these are CPU timings, of small presets", flush=True)
        bench.run(list(plan(options, backend)))
        about["plots"] = speed.plot(bench.out, about, bench.rows)
        bench.write()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((bench.out / "README.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
