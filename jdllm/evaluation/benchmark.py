"""Time many ways to generate, one row after the other, and keep the table on disk up to date.

A `Point` is a model at one batch size; its programs are compiled side by side and then timed alone.  Whatever stops a row,
an implementation that cannot run here as well as a failed compilation, is listed as its reason.  Baselines from another
framework are passed in as functions, so that this room stays free of torch (weights_port/torch_baseline.py has them).
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jdllm.config import Config, ConfigError
from jdllm.evaluation import card, measure, speed
from jdllm.evaluation.speed import NotRun, Row
from jdllm.generation.generate import Program, estimate_and_read
from jdllm.kernels.quantize import FORMATS, quantize_params
from jdllm.kernels.roofline import RTX_5090, generation_work, project
from jdllm.model.ldlm import Model, Params
from jdllm.model.random_weights import random_weights
from jdllm.training.run import load

LONG = {"bf16": "bfloat16", "fp32": "float32"}
KEY = 0
"""Seed of the noise that every row starts from."""

Name = tuple[str, str]
"""Implementation and weights of a row."""
Ready = tuple[Callable[[], Any], Int[np.ndarray, "b t"]]
"""A call that generates and returns when its tokens are there, and the tokens of its first run."""


class Baseline(Protocol):
    """Another framework's way to generate."""

    def __call__(
        self, config: Config, weights: tuple[Params, Params], name: Name, key: jax.Array, batch: int, *, dynamic: bool
    ) -> Callable[[int], Ready]:
        """Calls by their number of steps, from the same weights and noise; `dynamic`: other batch sizes will follow."""
        ...


@dataclasses.dataclass(frozen=True)
class Point:
    """Rows that share their weights: one model at one batch size."""

    table: str
    config: Config
    batch: int
    steps: tuple[int, ...]
    names: tuple[Name, ...]
    run: Path | None = None
    """Where the weights are from, and their quality; random ones by default."""

    @property
    def label(self) -> str:
        return self.config.preset if self.run is None else self.run.name


class Benchmark:
    """The rows so far, and how to add to them.

    `about` is what speed.write wants to know of device and command; `minutes` is when no further point is begun, `seconds`
    what the repetitions of a row take.
    """

    def __init__(
        self, about: dict[str, Any], out: Path, *, minutes: float, seconds: float, threads: int, baselines: dict[str, Baseline],
    ):  # fmt: skip
        self.about, self.out, self.minutes, self.seconds = about, out, minutes, seconds
        self.threads, self.baselines = threads, baselines
        self.plain = "bf16" if about["backend"] == "gpu" else "fp32"
        self.rows: list[Row] = []
        self.missing: list[NotRun] = []
        self._tokens: dict[tuple[Any, ...], np.ndarray] = {}
        self._began, self._watch = time.monotonic(), card.Watch()
        self._held: tuple[Any, Params, Params] | None = None

    def run(self, points: Sequence[Point]) -> None:
        """Measure point after point."""
        with self._watch:
            for point in points:
                spent = (time.monotonic() - self._began) / 60
                if spent > self.minutes:
                    self._skip(point, point.names, f"{self.minutes:g} minutes were over")
                    continue
                say(f"[{spent:4.1f} min] {point.label}, batch {point.batch}, {point.config.model.num_latents} latents")
                try:
                    self._ours(point, [name for name in point.names if name[0] not in self.baselines])
                    for name in point.names:
                        if name[0] in self.baselines:
                            self._theirs(point, name)
                except ConfigError as error:
                    self._skip(point, point.names, str(error))
                self.write()
        self.write()

    def write(self) -> None:
        """All results so far."""
        self.about["clocks"] = self._watch.summary()
        speed.write(self.out, self.about, self.rows, self.missing)

    def _weights(self, point: Point) -> tuple[Params, Params]:
        """Weights of a point as they are; kept for the next one, since sweeps share them."""
        key = (point.config, point.run)
        if self._held is None or self._held[0] != key:
            self._held = None
            gc.collect()
            if point.run:
                loaded = load(point.run, dtype=LONG[self.plain])
                self._held = (key, loaded.params, loaded.frozen)
            else:
                self._held = (key, *random_weights(Model(point.config), 0, LONG[self.plain]))
                if point.table == "main":
                    check(Model(point.config), *self._held[1:], LONG[self.plain])
        return self._held[1], self._held[2]

    def _ours(self, point: Point, names: list[Name]) -> None:
        """Compile XLA's programs side by side and kernels in a thread of their own, since Triton's compiler is not known to
        stand two; then time one after the other."""
        if not names:
            return
        model, plain, dtype = Model(point.config), self._weights(point), LONG[self.plain]
        edges = jnp.linspace(0.0, 1.0, point.config.diffusion.timestep_bins + 1)
        convert = jax.jit(quantize_params, static_argnums=1)
        stored: dict[str, tuple[Params, Params]] = {}
        for weights in dict.fromkeys(weights for _, weights in names):
            own = point.run is not None or weights not in FORMATS
            try:
                stored[weights] = plain if own else (convert(plain[0], weights), convert(plain[1], weights))
            except ConfigError as error:
                self._skip(point, [name for name in names if name[1] == weights], str(error))
        names = [name for name in names if name[1] in stored]

        def prepare(name: Name) -> dict[int, tuple[Ready, float] | Exception]:
            """Programs of all step counts after their first call, and the seconds that took."""
            ready: dict[int, tuple[Ready, float] | Exception] = {}
            for steps in point.steps:
                start = time.perf_counter()
                try:
                    program = Program(
                        model,
                        *stored[name[1]],
                        edges,
                        num=point.batch,
                        steps=steps,
                        dtype=dtype,
                        implementation=name[0],
                    )
                    ready[steps] = waiting(program), time.perf_counter() - start
                except Exception as error:  # whatever stops it is its reason in the list of rows not run
                    ready[steps] = error
            return ready

        with ThreadPoolExecutor(self.threads) as pool:
            plain_names = [name for name in names if name[0] == speed.XLA]
            others = pool.submit(lambda: {name: prepare(name) for name in names if name not in plain_names})
            prepared = dict(zip(plain_names, pool.map(prepare, plain_names))) | others.result()
        for name, steps in itertools.product(names, point.steps):
            ready = prepared[name].pop(steps)
            if isinstance(ready, Exception):
                self._skip(point, [name], reason(ready), (steps,))
            else:
                self._time(point, steps, name, *ready)

    def _theirs(self, point: Point, name: Name) -> None:
        try:
            calls = self.baselines[name[0]](
                point.config,
                self._weights(point),
                name,
                jax.random.key(KEY),
                point.batch,
                dynamic=point.table == "batch",
            )
            for steps in point.steps:
                start = time.perf_counter()
                ready = calls(steps)
                self._time(point, steps, name, ready, time.perf_counter() - start)
        except Exception as error:  # as above
            done = {row.steps for row in self.rows if (row.table, row.preset, row.batch) == (point.table, point.label, point.batch)
                    and (row.implementation, row.weights) == name and row.latents == point.config.model.num_latents}  # fmt: skip
            self._skip(point, [name], reason(error), [steps for steps in point.steps if steps not in done])

    def _time(self, point: Point, steps: int, name: Name, ready: Ready, cold: float) -> None:
        """Repeat a call and account its row; one whose tokens are all the same is not timed."""
        (call, tokens), began, m = ready, time.monotonic(), point.config.model
        if len(np.unique(tokens)) < 3:
            self._skip(point, [name], "it wrote the same token everywhere", (steps,))
            return
        timing = measure.time_calls(call, seconds=self.seconds)
        work = generation_work(point.config, batch=point.batch, steps=steps, weights=name[1])
        memory = work.memory_ms(1e12 * self.about["read_bandwidth_tb_s"])
        arithmetic = work.arithmetic_ms(1e12 * self.about["matmul_tflop_s"])
        size = (point.config, point.run, point.batch, steps)
        if name[0] == speed.XLA:
            self._tokens[(*size, name[1])] = tokens
        same = self._tokens.get((*size, self.plain if name[0] in self.baselines else name[1]))
        gpu = self.about["backend"] == "gpu"
        row = Row(
            table=point.table, preset=point.label, steps=steps, batch=point.batch, latents=m.num_latents, tokens=m.num_tokens,
            implementation=name[0], weights=name[1], ms_median=timing.median, ms_p90=timing.p90, repeats=timing.repeats,
            bytes=work.bytes, flops=work.flops, floor_fraction=memory / timing.median, peak_fraction=arithmetic / timing.median,
            in_cache=0 < work.step_weights <= self.about["l2_bytes"], quality=speed.quality(point.run, steps),
            cold_start_s=cold if steps == point.steps[0] else None,
            projected_5090_ms=project(work, RTX_5090, min(max(memory, arithmetic) / timing.median, 1.0)) if gpu else None,
            equal_to_xla=None if same is None or name[0] == speed.XLA else float((same == tokens).mean()),
            throttled=tuple(self._watch.since(began)),
        )  # fmt: skip
        self.rows.append(row)
        say(
            f"  {steps:3d} steps  {name[0]:12s} {name[1]:5s} {row.ms_median:9.3f} ms  {row.floor_fraction:5.0%} of the memory floor"
        )
        self.write()

    def _skip(self, point: Point, names: Sequence[Name], why: str, steps: Sequence[int] | None = None) -> None:
        m = point.config.model
        for name, count in itertools.product(names, point.steps if steps is None else steps):
            self.missing.append(NotRun(point.label, count, point.batch, m.num_latents, *name, why))


def waiting(program: Program) -> Ready:
    """Calls of the program, the first one made."""
    key = jax.random.key(KEY)
    return lambda: jax.block_until_ready(program(key)), np.asarray(program(key))


def check(model: Model, params: Params, frozen: Params, dtype: str) -> None:
    """ConfigError unless the weights give finite latents, and tokens that differ between positions and draws of noise."""
    m = model.config.model
    z = jax.random.normal(jax.random.key(1), (2, m.num_latents, m.latent_dim))
    found = estimate_and_read(
        model, params, frozen, z, jnp.float32(0.9), jnp.zeros_like(z), 0.0, guided=False, dtype=dtype
    )
    x0, tokens = (np.asarray(x) for x in found)
    if not np.isfinite(x0).all() or x0.std() < 0.05 or len(np.unique(tokens)) < 4 or (tokens[0] == tokens[1]).all():
        raise ConfigError("these weights give latents or tokens that do not vary, so nothing was timed")


def reason(error: Exception) -> str:
    """A ConfigError as it is, the first line of anything else."""
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def say(message: str) -> None:
    """Progress."""
    print(message, flush=True)
