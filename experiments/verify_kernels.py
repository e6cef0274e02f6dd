"""Is the fused denoising loop right, and how fast is it?  Real sizes on the GPU at hand, one table.

    python experiments/verify_kernels.py --out results/kernels-h200           # errors, repeats, poison, two streams, times
    python experiments/verify_kernels.py --tune                               # times of launch options, to choose defaults by
    python experiments/verify_kernels.py --compile 90,120                     # no GPU needed: does it compile, what does it need?

Every case draws fresh random weights and noise.  The reference is the plain loop in float32 with exact products, from the
same (rounded) weights; the error of the plain bfloat16 loop stands beside that of the fused one.  On a CPU the source is run
by Triton's interpreter at toy size, which takes TRITON_INTERPRET=1 in the environment.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
from jdllm.kernels import fused, op
from jdllm.kernels.quantize import dequantize_params, quantize_params
from jdllm.kernels.tables import step_tables
from jdllm.kernels.tiling import tiling
from jdllm.model.ldlm import LDLM, Model, Params
from jdllm.model.random_weights import random_weights

PROGRAMS = {90: 132, 120: 170}
"""Multiprocessors of an H200 and an RTX 5090."""
ERROR_BF16, ERROR_FP32 = 1e-2, 2e-3
REPEATS = 200
LAUNCHES = (
    (8, 6, True, 64), (8, 6, False, 64), (8, 4, True, 64), (8, 8, True, 64), (4, 6, True, 64), (8, 4, True, 128),
    (8, 3, True, 64), (4, 4, True, 64), (4, 8, True, 64), (16, 6, True, 64), (4, 4, True, 128), (8, 3, True, 128),
)  # fmt: skip
"""Warps, stages, prefetch, block_k: what --tune tries, the likely ones first."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to check."""

    out: Path | None = None
    """Folder of verify.json and verify.md; by default results/kernels-<device>."""
    tune: bool = False
    """Only time launch options."""
    compile: str = ""
    """Only compile for these compute capabilities, such as 90,120, and report registers, stack and shared memory."""
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

    def torch_inputs(self, device: str) -> list[Any]:
        """The kernel's arguments as tensors, with the noise that `fused` draws."""
        from weights_port.triton_launch import tensor

        first, later = jax.random.split(self.key)
        size = (self.case.num, self.m.num_latents, self.m.latent_dim)
        start = jax.random.normal(first, size).reshape(self.cut.rows, -1)
        noise = None
        if self.case.sampler == "sde":
            drawn = [jax.random.normal(jax.random.fold_in(later, i), size) for i in range(self.case.steps)]
            noise = jnp.stack(drawn).reshape(self.case.steps, self.cut.rows, -1)
        given = fused.launch_arguments(self.weights, self.tables, self.m, noise, start, self.case.steps)
        return [tensor(x, device) for x in given]

    def constants(self) -> dict[str, Any]:
        return fused.constants(
            self.m, self.cut, self.launch, fresh_noise=self.case.sampler == "sde", quantised=self.weights.quantised
        )


def distance(found: Any, wanted: np.ndarray) -> float:
    """Norm of the difference over the norm; NaN counts as infinitely wrong."""
    error = np.linalg.norm(np.asarray(found, np.float64).reshape(wanted.shape) - wanted) / np.linalg.norm(wanted)
    return float(error) if np.isfinite(error) else float("inf")


def check(case: Case, seed: int, programs: int, launch: fused.Launch, device: str) -> dict[str, Any]:
    """Errors, poison, repeats and times of one case."""
    from weights_port import triton_launch

    launch = dataclasses.replace(launch, stages=2) if case.dtype == "float32" else launch
    bench = Bench(case, seed, programs, launch)
    reference = bench.reference()
    row: dict[str, Any] = {
        "case": case.name, "width": bench.m.latent_dim, "rows": bench.cut.rows, "steps": case.steps,
        "weights": case.weights, "seed": seed,
    }  # fmt: skip
    row["error_xla"] = distance(bench.plain(bench.params, case.dtype), reference)
    from jdllm.kernels.triton import denoise_loop

    memory = triton_launch.poisoned(fused.scratch(bench.m, bench.cut, case.dtype), device)
    inputs = bench.torch_inputs(device)
    options = {} if device == "cpu" else {"num_warps": launch.num_warps, "num_stages": launch.stages}
    triton_launch.launch(denoise_loop, inputs, memory, bench.constants(), **options)
    poisoned = memory["estimate"].cpu().numpy()
    row["error_poisoned"] = distance(poisoned, reference)
    if device == "cpu":
        return row
    first = np.asarray(bench.fused())
    row["error_fused"] = distance(first, reference)
    again = [np.array_equal(np.asarray(bench.fused()), first) for _ in range(REPEATS if case.num == 1 else 10)]
    row["identical"] = f"{sum(again)}/{len(again)}"
    row["same_through_torch"] = bool(np.array_equal(poisoned.reshape(first.shape), first))
    row["ms_fused"] = median_ms(bench.fused)
    row["ms_xla"] = median_ms(lambda: bench.plain(bench.params, case.dtype))
    return row


def median_ms(call: Callable[[], jax.Array], seconds: float = 0.4) -> float:
    """Median milliseconds of a call and the wait for it."""
    return measure.time_calls(lambda: jax.block_until_ready(call()), seconds=seconds).median


def passed(row: dict[str, Any], case: Case) -> bool:
    """Whether a case holds."""
    limit = ERROR_FP32 if case.dtype == "float32" else ERROR_BF16
    errors = [row[name] for name in ("error_fused", "error_poisoned") if name in row]
    done, _, of = row.get("identical", "1/1").partition("/")
    # bfloat16 errors grow over 64 steps in any implementation: there the plain loop's own error is the measure
    return all(error <= max(limit, 1.5 * row["error_xla"]) for error in errors) and done == of


def two_streams(programs: int, launch: fused.Launch, seed: int) -> dict[str, Any]:
    """Two launches on two streams at once: both must end, and both must be right."""
    from jdllm.kernels.triton import denoise_loop
    from weights_port import triton_launch

    case = Case("two streams", lean("books"))
    bench = Bench(case, seed, programs, launch)
    reference, errors = bench.reference(), []
    options = {"num_warps": launch.num_warps, "num_stages": launch.stages}
    inputs, constants = bench.torch_inputs("cuda"), bench.constants()
    for _ in range(20):
        memories = [triton_launch.poisoned(fused.scratch(bench.m, bench.cut, case.dtype), "cuda") for _ in range(2)]
        triton_launch.launch_on_streams(denoise_loop, inputs, memories, constants, **options)
        errors += [distance(memory["estimate"].cpu().numpy(), reference) for memory in memories]
    return {"case": case.name, "error_poisoned": max(errors), "error_xla": 0.0, "launches": len(errors)}


def tune(programs: int, seed: int, until: float) -> Iterator[dict[str, Any]]:
    """Times of launch options, for the shapes that decide."""
    cases = [Case("qwen3.6-35b-a3b", lean("qwen3.6-35b-a3b"), steps=10), Case("books", lean("books"), steps=10)]
    benches = [Bench(case, seed, programs, fused.Launch()) for case in cases]
    for (warps, stages, prefetch, block_k), bench in itertools.product(LAUNCHES, benches):
        row = {"case": bench.case.name, "warps": warps, "stages": stages, "prefetch": prefetch, "block_k": block_k}
        if time.monotonic() > until:
            break
        try:
            row["ms"] = median_ms(
                bench.variant(fused.Launch(warps, stages, prefetch), block_k=block_k).fused, seconds=0.2
            )
        except Exception as error:  # an option that does not fit the card is a row as well
            row["failed"] = str(error).splitlines()[0][:120]
        yield row
    for bench in benches:
        plain = functools.partial(bench.plain, bench.params, "bfloat16")
        yield {"case": bench.case.name, "plain": True, "ms": median_ms(plain)}


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
    return [Case("toy", small, steps=2, dtype="float32"), Case("toy sde x2", small, 2, 2, "sde", dtype="float32")]


@dataclasses.dataclass
class Record:
    """Rows so far, on the disk after each: a launch that hangs takes nothing along."""

    out: Path
    name: str
    about: dict[str, Any]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
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
    programs, launch = (op.programs(), op.launch_options()) if gpu else (1, fused.Launch(prefetch=0))
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
        row = check(case, seed + 10 * index, programs, launch, "cuda" if gpu else "cpu")
        record.add(row | {"ok": passed(row, case)})
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
