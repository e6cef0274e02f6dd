"""Is the fused denoising loop right, and how fast is it?  Real sizes on the GPU at hand, one table.

    python experiments/verify_kernels.py --out results/kernels-h200           # errors, repeats, poison, two streams, times
    python experiments/verify_kernels.py --tune                               # times of launch options, to choose defaults by
    python experiments/verify_kernels.py --profile                            # where the time of a launch goes, phase by phase
    python experiments/verify_kernels.py --compile 90,120                     # no GPU needed: does it compile, what does it need?
    TRITON_CACHE_DIR=/tmp/kernels python experiments/verify_kernels.py --prepare 90 [--tune]    # no GPU needed: compile ahead

`--prepare` fills Triton's cache on another machine (same Triton, same source, same path of the cache), so that a lent GPU
does not wait seconds for every launch through PyTorch.

Every case draws fresh random weights and noise.  The reference is the plain loop in float32 with exact products, from the
same (rounded) weights; the error of the plain bfloat16 loop stands beside that of the fused one.  A case that is wrong says
with how many programs and in which array it goes wrong first; a case that raises is a row as well, and the next one goes
on.  On a CPU the source is run by Triton's interpreter at toy size, which takes TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # some launches go through PyTorch

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jdllm.config import Config, preset
from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.evaluation import measure, report
from jdllm.generation.generate import make_denoise
from jdllm.kernels import fused, op, plain_step
from jdllm.kernels.quantize import dequantize_params, quantize_params
from jdllm.kernels.tables import step_tables
from jdllm.kernels.tiling import Tiling, tiling
from jdllm.model.ldlm import LDLM, Model, Params
from jdllm.model.random_weights import random_weights

PROGRAMS = {90: 132, 120: 170}
"""Multiprocessors of an H200 and an RTX 5090."""
DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
ERROR_BF16, ERROR_FP32 = 1e-2, 2e-3
REPEATS, TORCH_REPEATS = 200, 20
LAUNCHES = (
    (8, 6, 64, 64), (8, 6, 0, 64), (8, 6, 128, 64), (8, 4, 64, 64), (8, 8, 64, 64), (4, 6, 64, 64), (8, 4, 64, 128),
    (8, 6, 32, 64), (8, 6, 256, 64), (8, 3, 64, 64), (4, 4, 64, 64), (4, 8, 64, 64), (16, 6, 64, 64), (4, 4, 64, 128),
    (8, 3, 64, 128),
)  # fmt: skip
"""Warps, stages, KiB of prefetch, block_k: what --tune tries, the likely ones first."""
DIAGNOSES = 2
"""So many wrong cases are looked into: each takes some half a dozen compilations."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to check."""

    out: Path | None = None
    """Folder of verify.json and verify.md; by default results/kernels-<device>."""
    tune: bool = False
    """Only time launch options."""
    profile: bool = False
    """Only say how long each kind of phase takes: its product, adding up, waiting for the other programs."""
    compile: str = ""
    """Only compile for these compute capabilities, such as 90,120, and report registers, stack and shared memory."""
    prepare: int = 0
    """Only compile the launches of the cases, or of --tune, for this compute capability into Triton's cache."""
    torch_only: bool = False
    """Launch through PyTorch alone: jax-triton compiles every case anew, which takes seconds and is not prepared for."""
    cases: str = ""
    """Names of cases to run, separated by commas; by default all."""
    minutes: float = 6.0
    """No case is begun after so many minutes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, how many sequences of it, and how it is sampled."""

    name: str
    config: Config
    num: int = 1
    steps: int = 4
    sampler: str = "ddim"
    weights: str = "bf16"
    dtype: str = "bfloat16"


def lean(name: str, **model: Any) -> Config:
    """A preset's denoiser, with as little as possible around it."""
    return preset(name).replace(
        model__encoder_depth=1, model__decoder_depth=1, model__token_decoder_depth=0, model__vocab_size=64,
        model__head="trained", **{f"model__{field}": value for field, value in model.items()},
    )  # fmt: skip


def shape(d: int, latents: int, depth: int = 2, **model: Any) -> Config:
    """A denoiser of no preset."""
    return lean(
        "books", hidden_dim=d, latent_dim=d, num_latents=latents, num_tokens=latents, denoiser_depth=depth, **model
    )


def all_cases() -> list[Case]:
    """Presets at batch 1, batches, lengths, odd widths, samplers, weights."""
    big = lean("qwen3.6-35b-a3b")
    names = ("qwen3.6-35b-a3b", "books", "quickstart", "gpt2-paper", "qwen3.6-27b-5090", "qwen3.6-27b")
    return [
        *(Case(name, lean(name)) for name in names),
        *(Case(f"35b-a3b {weights}", big, weights=weights) for weights in ("int8", "fp8")),
        *(Case(f"35b-a3b x{num}", big, num=num) for num in (3, 16)),
        *(Case(f"35b-a3b {k} latents", shape(2048, k, 4, head_dim=128)) for k in (16, 40, 256)),
        Case("books sde", lean("books"), sampler="sde"), Case("books early stop", lean("books"), sampler="early_stop"),
        Case("books x16", lean("books"), num=16), Case("width 320, 24 latents x5", shape(320, 24), num=5),
        Case("width 1152, heads of 128", shape(1152, 64, head_dim=128)), Case("one step", lean("books"), steps=1),
        Case("64 steps", lean("quickstart"), steps=64), Case("float32", shape(512, 64), dtype="float32"),
    ]  # fmt: skip


class Bench:
    """One case with weights on the device."""

    def __init__(self, case: Case, seed: int, programs: int, launch: fused.Launch, **cut: Any):
        self.case, self.key = case, jax.random.key(seed + 1)
        self.model, self.m = Model(case.config), case.config.model
        params, self.frozen = random_weights(self.model, seed, jnp.dtype(case.dtype))
        params = params if case.weights == "bf16" else quantize_params(params, case.weights)
        self.params = params
        self.cut = dataclasses.replace(tiling(self.m, case.num, programs), **cut)
        self.launch = launch
        self.times = samplers.time_grid(jnp.linspace(0.0, 1.0, 101), case.steps, sampler=case.sampler)
        self.weights = jax.jit(fused.fused_weights, static_argnums=(1, 2))(params["denoiser"], self.cut, case.dtype)
        self.tables = jax.jit(self._tables)(params)

    def _tables(self, params: Params) -> Any:
        modulation = self.module(params).denoiser.modulation(self.times[:-1])
        schedule = TangentSchedule(self.case.config.diffusion.schedule_d)
        return step_tables(params["denoiser"], modulation, self.times, schedule, self.case.sampler)

    def variant(self, launch: fused.Launch, **cut: Any) -> Bench:
        """The same weights and noise, launched otherwise; `cut` may change what packing does not depend on."""
        other = copy.copy(self)
        other.__dict__.pop("fused", None)
        other.launch, other.cut = launch, dataclasses.replace(self.cut, **cut)
        return other

    def module(self, params: Params) -> LDLM:
        return self.model.merge(params, self.frozen)

    @functools.cached_property
    def plain(self) -> Any:
        """The oracle as a jitted function of weights, in their dtype."""

        @functools.partial(jax.jit, static_argnums=1)
        def run(params: Params, dtype: str) -> jax.Array:
            schedule = TangentSchedule(self.case.config.diffusion.schedule_d)
            module, size = self.module(params), (self.case.num, self.m.num_latents, self.m.latent_dim)
            return samplers.sample(
                self.key, make_denoise(module, 0.0, False, jnp.dtype(dtype)), size, schedule, self.times,
                sampler=self.case.sampler, conditions=module.denoiser.modulation(self.times),
            )  # fmt: skip

        return run

    @functools.cached_property
    def fused(self) -> Any:
        """The launch, jitted."""
        options = {"tiling": self.cut, "launch": self.launch, "sampler": self.case.sampler, "dtype": self.case.dtype}
        call = jax.jit(lambda w, t, key: fused.denoise_fused(w, t, key, 1.0, self.m, **options))
        return lambda: call(self.weights, self.tables, self.key)

    def reference(self) -> np.ndarray:
        """Float32, products exact."""
        with jax.default_matmul_precision("highest"):
            return np.asarray(self.plain(dequantize_params(self.params, jnp.float32), "float32"), np.float64)

    def drawn(self) -> tuple[jax.Array | None, jax.Array]:
        """Fresh noise and start as `fused` draws them."""
        first, later = jax.random.split(self.key)
        size = (self.case.num, self.m.num_latents, self.m.latent_dim)
        start = jax.random.normal(first, size).reshape(self.cut.rows, -1)
        if self.case.sampler != "sde":
            return None, start
        noise = [jax.random.normal(jax.random.fold_in(later, i), size) for i in range(self.case.steps)]
        return jnp.stack(noise).reshape(self.case.steps, self.cut.rows, -1), start

    @functools.cached_property
    def tensors(self) -> list[Any]:
        """The kernel's arguments for a launch through PyTorch."""
        from weights_port.triton_launch import tensor

        given = fused.launch_arguments(self.weights, self.tables, self.m, *self.drawn(), self.case.steps)
        return [tensor(x, DEVICE) for x in given]

    def through_torch(self, steps: int | None = None, **constants: Any) -> dict[str, Any]:
        """The kernel's arrays after a launch through PyTorch into poisoned memory; it may still be running."""
        from jdllm.kernels.triton import denoise_loop
        from weights_port import triton_launch

        memory = triton_launch.poisoned(fused.scratch(self.m, self.cut, self.case.dtype), DEVICE)
        given = [*self.tensors[:-1], steps or self.case.steps]
        triton_launch.launch(denoise_loop, given, memory, self.constants() | constants, **self.options())
        return memory

    def ms_torch(self) -> float:
        """Median milliseconds of such a launch, by the GPU's clock."""
        from jdllm.kernels.triton import denoise_loop
        from weights_port import triton_launch

        memory = triton_launch.poisoned(fused.scratch(self.m, self.cut, self.case.dtype), DEVICE)
        return triton_launch.median_ms(denoise_loop, self.tensors, memory, self.constants(), **self.options())

    def options(self) -> dict[str, int]:
        """What the compiler is told besides constants."""
        return {"num_warps": self.launch.num_warps, "num_stages": self.launch.stages}

    def constants(self) -> dict[str, Any]:
        return fused.constants(
            self.m, self.cut, self.launch, fresh_noise=self.case.sampler == "sde", quantised=self.weights.quantised
        )


def distance(found: Any, wanted: np.ndarray) -> float:
    """Norm of the difference over the norm; NaN counts as infinitely wrong."""
    error = np.linalg.norm(np.asarray(found, np.float64).reshape(wanted.shape) - wanted) / np.linalg.norm(wanted)
    return float(error) if np.isfinite(error) else float("inf")


def check(
    case: Case,
    seed: int,
    programs: int,
    launch: fused.Launch,
    record: Record,
    *,
    diagnosed: bool = True,
    jitted: bool = True,
) -> None:
    """Errors, poison, repeats and times of one case: a row that grows, and is recorded when it may be the last that is seen."""
    row: dict[str, Any] = {"case": case.name, "ok": False}
    try:
        bench = Bench(
            case, seed, programs, dataclasses.replace(launch, stages=2) if case.dtype == "float32" else launch
        )
        row |= {"width": bench.m.latent_dim, "rows": bench.cut.rows, "steps": case.steps, "weights": case.weights}
        row["seed"] = seed
        reference = bench.reference()
        row["error_xla"] = distance(bench.plain(bench.params, case.dtype), reference)
        poisoned = bench.through_torch()["estimate"].cpu().numpy()
        row["error_poisoned"] = distance(poisoned, reference)
        if row["error_poisoned"] > allowed(row, case) and diagnosed:
            record.add(row)
            row["diagnosis"] = "; ".join(diagnose(bench, reference))
        if DEVICE != "cpu":
            again = [bench.through_torch()["estimate"].cpu().numpy() for _ in range(TORCH_REPEATS)]
            row["identical_torch"] = f"{sum(np.array_equal(poisoned, x) for x in again)}/{len(again)}"
            row["ms_torch"] = bench.ms_torch()
            row["ms_xla"] = median_ms(lambda: bench.plain(bench.params, case.dtype))
            record.add(row)
        if DEVICE != "cpu" and jitted:
            first = np.asarray(bench.fused())
            row["error_fused"] = distance(first, reference)
            again = [np.array_equal(np.asarray(bench.fused()), first) for _ in range(REPEATS if case.num == 1 else 10)]
            row["identical"] = f"{sum(again)}/{len(again)}"
            row["same_through_torch"] = bool(np.array_equal(poisoned.reshape(first.shape), first))
            row["ms_fused"] = median_ms(bench.fused)
        row["ok"] = passed(row, case)
    except Exception as error:  # the next case may tell more
        row["failed"] = str(error).partition("\n")[0][:200] or type(error).__name__
        traceback.print_exc()
    record.add(row)


def diagnose(bench: Bench, reference: np.ndarray) -> list[str]:
    """Where a wrong result comes from: programs that race, or the first array that is wrong after one step of few blocks."""
    findings = []
    for programs in sorted({1, 2, bench.cut.programs}):
        other = bench.variant(bench.launch, programs=programs)
        found = [other.through_torch()["estimate"].cpu().numpy() for _ in range(3)]
        same = all(np.array_equal(found[0], x) for x in found)
        errors = ", ".join(f"{distance(x, reference):.2g}" for x in found)
        findings.append(f"{programs} programs: errors {errors}, {'bit for bit the same' if same else 'DIFFERENT'}")
    noise, start = bench.drawn()
    noise = None if noise is None else noise[0]
    for depth in sorted({0, 1, bench.m.denoiser_depth}):
        memory = bench.through_torch(steps=1, DEPTH=depth)
        wanted = plain_step.arrays_after_one_step(bench.weights, bench.tables, bench.m, bench.cut, noise, start, depth)
        found = {name: memory[name].float().cpu().numpy() for name in wanted}
        wrong = (
            plain_step.difference(name, found[name], np.asarray(wanted[name]), bench.cut, depth) for name in wanted
        )
        first = next((text for text in wrong if text), "every array is right")
        findings.append(f"one step, {depth} blocks: {first}")
    for finding in findings:
        print(f"  {bench.case.name}: {finding}", flush=True)
    return findings


def median_ms(call: Callable[[], jax.Array], seconds: float = 0.4) -> float:
    """Median milliseconds of a call and the wait for it."""
    return measure.time_calls(lambda: jax.block_until_ready(call()), seconds=seconds).median


def allowed(row: dict[str, Any], case: Case) -> float:
    """The largest error that a case may have."""
    # bfloat16 errors grow over 64 steps in any implementation: there the plain loop's own error is the measure
    return max(ERROR_FP32 if case.dtype == "float32" else ERROR_BF16, 1.5 * row["error_xla"])


def passed(row: dict[str, Any], case: Case) -> bool:
    """Whether a case holds: small errors, and every repeat the same."""
    errors = [row[name] for name in ("error_fused", "error_poisoned") if name in row]
    counts = [row[name].split("/") for name in ("identical", "identical_torch") if name in row]
    return all(error <= allowed(row, case) for error in errors) and all(done == of for done, of in counts)


def two_streams(programs: int, launch: fused.Launch, seed: int) -> dict[str, Any]:
    """Two launches on two streams at once: both must end, and both must be right."""
    from jdllm.kernels.triton import denoise_loop
    from weights_port import triton_launch

    case = Case("two streams", lean("books"))
    bench = Bench(case, seed, programs, launch)
    reference, errors = bench.reference(), []
    for _ in range(20):
        memories = [triton_launch.poisoned(fused.scratch(bench.m, bench.cut, case.dtype), DEVICE) for _ in range(2)]
        triton_launch.launch_on_streams(denoise_loop, bench.tensors, memories, bench.constants(), **bench.options())
        errors += [distance(memory["estimate"].cpu().numpy(), reference) for memory in memories]
    return {"case": case.name, "error_poisoned": max(errors), "error_xla": 0.0, "launches": len(errors)}


TUNED = [Case("qwen3.6-35b-a3b", lean("qwen3.6-35b-a3b"), steps=10), Case("books", lean("books"), steps=10)]
"""The shapes that decide."""


def launches(cut: Tiling) -> Iterator[tuple[fused.Launch, Tiling]]:
    """What --tune tries of LAUNCHES: those whose block_k divides what is read along k."""
    for warps, stages, prefetch, block_k in LAUNCHES:
        if all(product.k // product.split % block_k == 0 for product in cut.products.values()):
            yield fused.Launch(warps, stages, 1024 * prefetch), dataclasses.replace(cut, block_k=block_k)


def tune(programs: int, seed: int, until: float) -> Iterator[dict[str, Any]]:
    """Times of launch options through PyTorch, by the GPU's clock; of XLA by the host's."""
    for bench in [Bench(case, seed, programs, fused.Launch()) for case in TUNED]:
        plain = functools.partial(bench.plain, bench.params, "bfloat16")
        yield {"case": bench.case.name, "plain": True, "ms": median_ms(plain)}
        for launch, cut in launches(bench.cut):
            row = {"case": bench.case.name, **dataclasses.asdict(launch), "block_k": cut.block_k}
            if time.monotonic() > until:
                return
            try:
                row["ms"] = bench.variant(launch, block_k=cut.block_k).ms_torch()
            except Exception as error:  # an option that does not fit the card is a row as well
                row["failed"] = str(error).partition("\n")[0][:120]
            yield row


def profile(programs: int, seed: int, launch: fused.Launch) -> Iterator[dict[str, Any]]:
    """Microseconds of the phases of a launch that is compiled with clocks in it, medians over steps, blocks and programs."""
    from jdllm.kernels.triton import denoise_loop
    from weights_port import triton_launch

    for case in TUNED:
        bench = Bench(case, seed, programs, launch)
        kinds = ["input", *("qkv", "out", "up", "down") * bench.m.denoiser_depth, "output"]
        phases = 1 + case.steps * len(kinds)
        memory = triton_launch.poisoned(fused.scratch(bench.m, bench.cut, case.dtype, phases), DEVICE)
        constants = bench.constants() | {"PROFILE": True}
        ms = triton_launch.median_ms(denoise_loop, bench.tensors, memory, constants, **bench.options())
        clock = memory["clock"].cpu().numpy().astype(np.int64)
        began, product, through = np.moveaxis(clock[1:-1], -1, 0)
        spans = {"product": product - began, "add": through - product, "wait": clock[2:, :, 0] - through}
        spans = {name: span % 2**32 for name, span in spans.items()}
        cycles = sum(span[:, 0].sum() for span in spans.values())  # of one program, from end to end
        row = {
            "case": case.name,
            "programs": programs,
            "ms_profiled": ms,
            "ms": bench.ms_torch(),
            "mhz": cycles / ms / 1e3,
        }
        for kind in dict.fromkeys(kinds):
            here = np.resize([name == kind for name in kinds], phases - 1)
            us = {name: span[here] * 1e3 * ms / cycles for name, span in spans.items()}
            whole = np.median(sum(us.values()))
            yield row | {
                "phase": kind, "times": int(here.sum()), "us": whole, **{name: np.median(x) for name, x in us.items()},
                "product_slowest": np.median(us["product"].max(1)), "wait_least": np.median(us["wait"].min(1)),
            }  # fmt: skip


def prepare(capability: int, cases: Sequence[Case], launch: fused.Launch, programs: int, tuned: bool) -> None:
    """Compile for a card that is elsewhere what `check` or `tune` launches through PyTorch, by the same route as a launch."""
    from jdllm.kernels.triton import denoise_loop
    from weights_port import triton_launch

    for case in TUNED if tuned else cases:
        cut = tiling(case.config.model, case.num, programs)
        here = dataclasses.replace(launch, stages=2) if case.dtype == "float32" else launch
        for option, options_cut in launches(cut) if tuned else [(here, cut)]:
            begun = time.monotonic()
            weights = {"bf16": case.dtype, "int8": "int8", "fp8": "float8_e4m3fn"}[case.weights]
            kinds = [weights if name.startswith("w_") else "float32" for name in denoise_loop.arg_names]
            kinds = kinds[: denoise_loop.arg_names.index("steps")]
            changes = {"fresh_noise": case.sampler == "sde", "quantised": case.weights != "bf16"}
            constants = fused.constants(case.config.model, options_cut, option, **changes)
            outputs = fused.scratch(case.config.model, options_cut, jnp.dtype(case.dtype))
            triton_launch.compile_ahead(
                denoise_loop, capability, [*kinds, case.steps], [x.dtype.name for x in outputs.values()], constants,
                num_warps=option.num_warps, num_stages=option.stages,
            )  # fmt: skip
            print(f"{case.name}, {option}, block_k {options_cut.block_k}: {time.monotonic() - begun:.1f} s", flush=True)


def compiled(name: str, capability: int, launch: fused.Launch, programs: int) -> dict[str, Any]:
    """What the kernel for a preset at batch 1 needs on a card that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from jdllm.kernels.triton import denoise_loop

    m, names = preset(name).model, denoise_loop.arg_names
    cut = tiling(m, 1, programs)
    constants = fused.constants(m, cut, launch, fresh_noise=False, quantised=False)
    outputs = fused.scratch(m, cut, jnp.bfloat16)
    kinds = {"float32": "*fp32", "bfloat16": "*bf16", "int32": "*i32"}
    signature = {key: "*bf16" if key.startswith("w_") else "*fp32" for key in names}
    signature |= {key: kinds[jnp.dtype(shape.dtype).name] for key, shape in outputs.items()}
    signature |= {"steps": "i32", **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, key in enumerate(names) if signature[key].startswith("*")}
    fixed = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=denoise_loop, signature=signature, constexprs=fixed, attrs=aligned)
    options = {"num_warps": launch.num_warps, "num_stages": launch.stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    row = {"case": name, "capability": capability, **dataclasses.asdict(launch), "shared": kernel.metadata.shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    return row | {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}


def toy_cases() -> list[Case]:
    """What the interpreter can run in seconds."""
    small = shape(64, 16, head_dim=32, ffn_multiple=2)
    float32 = [Case("toy", small, steps=2, dtype="float32"), Case("toy sde x2", small, 2, 2, "sde", dtype="float32")]
    return [*float32, Case("toy bfloat16", small, steps=2)]


@dataclasses.dataclass
class Record:
    """Rows so far, on the disk after each: a launch that hangs takes nothing along."""

    out: Path
    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """A new row, or more of the last one."""
        if not self.rows or self.rows[-1] is not row:
            self.rows.append(row)
        print(row, flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        values = {**self.about, "rows": self.rows, "failed": self.failed}
        (self.out / f"{self.name}.json").write_text(json.dumps(values, indent=1) + "\n")
        words = "\n".join(f"{key}: {value}" for key, value in self.about.items())
        (self.out / f"{self.name}.md").write_text(f"{words}\n\n{report.rows_table(self.rows)}\n")

    @property
    def failed(self) -> list[str]:
        return [row["case"] for row in self.rows if row.get("ok") is False]


def main() -> int:
    options = tyro.cli(Options, description=__doc__.partition("\n\n")[0])
    gpu = jax.default_backend() == "gpu"
    device = jax.devices()[0].device_kind if gpu else "CPU, Triton's interpreter"
    programs, launch = (op.programs(), op.launch_options()) if gpu else (2, fused.Launch(prefetch=0))
    seed, until = int.from_bytes(os.urandom(3), "big"), time.monotonic() + 60 * options.minutes
    short = device.removeprefix("NVIDIA ").lower().replace(" ", "-") if gpu else "cpu"
    about = {
        "device": device, "commit": report.commit(), "command": report.command_line(), "jax": jax.__version__,
        "launch": dataclasses.asdict(launch), "programs": programs,
    }  # fmt: skip
    out = options.out or Path("results") / f"kernels-{short}"
    record = Record(out, "tune" if options.tune else "verify", about)
    if options.compile:
        told = {key: about[key] for key in ("commit", "command", "jax")}
        record = Record(out, "compiled", {"device": "none; compiled ahead of time, batch 1", **told})
        for capability in map(int, options.compile.split(",")):
            shared = fused.Launch(stages=op.SHARED_MEMORY_STAGES.get(f"{capability / 10:.1f}", 3))
            for name in ("qwen3.6-35b-a3b", "qwen3.6-27b", "books"):
                record.add(compiled(name, capability, shared, PROGRAMS.get(capability, programs)))
        print(report.rows_table(record.rows))
        return 0
    if options.prepare:
        capability = f"{options.prepare / 10:.1f}"
        launch = fused.Launch(stages=op.SHARED_MEMORY_STAGES.get(capability, 3))
        wanted = [case for case in all_cases() if not options.cases or case.name in options.cases.split(",")]
        prepare(options.prepare, wanted, launch, PROGRAMS.get(options.prepare, programs), options.tune)
        return 0
    if options.profile:
        record.name = "profile"
        for row in profile(programs, seed, launch):
            record.add(row)
        print(report.rows_table(record.rows))
        return 0
    if options.tune:
        for row in tune(programs, seed, until):
            record.add(row)
        record.rows.sort(key=lambda row: (row["case"], row.get("ms", float("inf"))))
        print(report.rows_table(record.rows))
        return 0
    wanted = [name.strip() for name in options.cases.split(",") if name.strip()]
    cases = [case for case in (all_cases() if gpu else toy_cases()) if not wanted or case.name in wanted]
    for index, case in enumerate(cases):
        if time.monotonic() > until:
            record.add({"case": case.name, "not_run": f"--minutes {options.minutes:g} were over"})
            continue
        diagnosed, jitted = len(record.failed) < DIAGNOSES, not options.torch_only
        check(case, seed + 10 * index, programs, launch, record, diagnosed=diagnosed, jitted=jitted)
    if gpu and not wanted:  # last, since two launches that wait for each other would never end
        row = two_streams(programs, launch, seed)
        record.add(row | {"ok": row["error_poisoned"] <= ERROR_BF16})
    print(report.rows_table(record.rows))
    if record.failed:
        names = ", ".join(record.failed)
        print(f"error: {len(record.failed)} of {len(record.rows)} cases failed: {names}", file=sys.stderr)
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(main())
