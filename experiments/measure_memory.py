"""What a training step takes of a GPU's memory, beside what `jdllm plan` says.

    python experiments/measure_memory.py --out results/memory-h200/summary.json
    python experiments/measure_memory.py --switches --out results/memory-h200/switches.json
    python experiments/measure_memory.py --toy [--grid]

Each case is a process of its own: the real step of a preset on synthetic hidden states of the right shape, three steps, then
a held-out probe, and the allocator's peak after each.  Beside it stands XLA's own account of the compiled step, so that
an error of the plan can be told from memory that XLA does not know of.  `--switches` measures one preset with each
memory option turned, `--toy` does the same at toy size on a CPU, where the peak is XLA's account, and `--grid` compares
estimate and account there over many shapes.  Encoders are not loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tyro

from jdllm.config import Config, preset

PRESETS = ("books", "qwen3.6-27b-5090", "qwen3.6-35b-a3b")
SWITCHED = "qwen3.6-27b-5090"
SWITCHES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no remat": {"training__remat": False},
    "accumulate 4": {"training__accumulate": 4},
    "first moment bfloat16": {"optimizer__first_moment": "bfloat16"},
    "second moment factored": {"optimizer__second_moment": "factored"},
    "both": {"optimizer__first_moment": "bfloat16", "optimizer__second_moment": "factored"},
}
TOY: dict[str, Any] = {
    "model__num_tokens": 32, "model__num_latents": 32, "model__latent_dim": 128, "model__head_dim": 32,
    "model__hidden_dim": 96, "model__vocab_size": 512, "model__encoder_depth": 2, "model__decoder_depth": 2,
    "model__denoiser_depth": 2, "model__token_decoder_depth": 2, "training__batch_size": 32,
    "training__compute_dtype": "float32", "feed__valid_windows": 16,
}  # fmt: skip
GRID: list[dict[str, Any]] = [
    {}, {"training__batch_size": 64}, {"training__batch_size": 4}, {"training__remat": True},
    {"training__batch_size": 128, "training__accumulate": 4}, {"model__denoiser_depth": 6}, {"model__encoder_depth": 6},
    {"model__decoder_depth": 6}, {"model__token_decoder_depth": 4}, {"model__vocab_size": 16_384},
    {"model__head": "encoder", "model__vocab_size": 16_384}, {"model__num_latents": 16}, {"optimizer__name": "muon"},
    {"model__denoiser_depth": 8, "training__remat": True}, {"model__encoder_depth": 8, "training__remat": True},
]  # fmt: skip
GRID_BASE: dict[str, Any] = {
    "model__num_tokens": 64, "model__num_latents": 64, "model__latent_dim": 128, "model__hidden_dim": 160,
    "model__vocab_size": 1024, "training__batch_size": 32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    presets: tuple[str, ...] = PRESETS
    """Presets, one after the other."""
    switches: bool = False
    """Instead: qwen3.6-27b-5090 with each memory option turned."""
    toy: bool = False
    """Scale the models down and run on the CPU; the peak is then XLA's account."""
    grid: bool = False
    """With --toy: also compare the estimate with XLA's account over many small shapes (minutes of compilation)."""
    steps: int = 3
    """Training steps before the peak is read."""
    out: Path | None = None
    """Where the JSON goes."""
    case: str | None = None
    """For the process of one case: its preset and changes as JSON."""


def main() -> int:
    options = tyro.cli(Options)
    if options.case is not None:
        print(json.dumps(measure(config_of(json.loads(options.case)), options.steps)))
        return 0
    began = time.perf_counter()
    scale = TOY if options.toy else {}
    cases = [(f"{SWITCHED}, {name}", SWITCHED, changes) for name, changes in SWITCHES.items()]
    if not options.switches:
        cases = [(name, name, {}) for name in options.presets]
    rows, environment = {}, {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    if options.toy:
        environment["JAX_PLATFORMS"] = "cpu"
    for name, of, changes in cases:
        case = json.dumps({"preset": of, "changes": scale | changes})
        command = [sys.executable, __file__, "--case", case, "--steps", str(options.steps)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            rows[name] = {"failed": done.stderr.strip().splitlines()[-1:] or ["no output"]}
            print(f"{name}: failed: {rows[name]['failed'][0][:300]}", flush=True)
            continue
        rows[name] = json.loads(lines[-1])
        report(name, rows[name])
    if options.grid:
        rows["grid"] = grid()
    from jdllm.training.loop import commit

    found = {"command": " ".join(sys.argv), "commit": commit(), "seconds": time.perf_counter() - began, "rows": rows}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{found['seconds']:.0f} s.  Not measured: the frozen encoder, the input pipeline, generation, several devices."
    )
    return 1 if any("failed" in row for row in rows.values()) else 0


def config_of(case: dict[str, Any]) -> Config:
    """The config of one case."""
    return preset(case["preset"]).replace(**case["changes"])


def measure(config: Config, steps: int) -> dict[str, Any]:
    """Planned, accounted and measured peaks of step and probe in GB, and seconds; in a process that did nothing else."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jdllm.model.ldlm import Model
    from jdllm.training.memory import batch_shapes, memory
    from jdllm.training.probe import WINDOWS, make_probe
    from jdllm.training.state import init_state, make_optimizer
    from jdllm.training.step import make_train_step

    device, m = jax.devices()[0], config.model
    kind = "gpu" if jax.default_backend() == "gpu" else "cpu"
    plan = memory(config, kind)
    optimizer = make_optimizer(config.optimizer)
    model = Model(config, "remat" if config.training.remat else "unroll")
    key = jax.random.key(0)

    def windows(rows: int) -> dict[str, Any]:
        """On the host, as a loader gives them."""
        rng, shapes = np.random.default_rng(0), batch_shapes(config, rows)
        hidden = rng.standard_normal(shapes["hidden"].shape, np.float32).astype(jnp.bfloat16)
        ids = rng.integers(0, m.vocab_size, shapes["ids"].shape).astype(np.int32)
        return {"hidden": hidden, "ids": ids, "lengths": np.full(rows, m.num_tokens, np.int32)}

    def peak() -> float | None:
        found = device.memory_stats()
        return found["peak_bytes_in_use"] / 1e9 if found else None

    state = jax.jit(lambda: init_state(model, optimizer, jnp.zeros(m.hidden_dim), jnp.ones(m.hidden_dim)))()
    frozen = jax.tree.map(lambda s: 0.02 * jax.random.normal(key, s.shape, s.dtype), model.frozen_shapes)
    jax.block_until_ready((state, frozen))
    at_start = peak()
    began = time.perf_counter()
    batch = windows(config.training.batch_size)
    step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
    compiled = step.lower(state, frozen, batch, 0.0).compile()
    compile_seconds, loss, times = time.perf_counter() - began, [], []
    after_compile = peak()  # products are tried out while compiling, in memory of the same allocator
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = compiled(state, frozen, jax.device_put(batch), 0.0)
        loss.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    after_steps = peak()
    held_out = jax.device_put(windows(min(config.feed.valid_windows, WINDOWS)))
    probe = jax.jit(make_probe(Model(config)), keep_unused=True).lower(state, frozen, held_out).compile()
    jax.block_until_ready(probe(state, frozen, held_out))
    after_probe = peak()

    def account(found: Any) -> float:
        total = found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
        return (total - found.alias_size_in_bytes) / 1e9

    held = next((part.size for part in plan.parts if part.name == "held-out windows"), 0)
    xla = {"step": account(compiled.memory_analysis()), "probe": account(probe.memory_analysis())}
    return {
        "device": device.device_kind, "jax": jax.__version__, "backend": kind, "steps": steps, "loss": loss,
        "compile_seconds": compile_seconds, "step_seconds": times[-1],
        "gb": {
            "planned_step": (plan.total("always") - held + plan.step) / 1e9,
            "planned_probe": (plan.total("always") + plan.total("probe")) / 1e9,
            "planned": plan.peak / 1e9,
            "xla_step": xla["step"], "xla_probe": xla["probe"],
            "after_init": at_start, "after_compile": after_compile, "after_steps": after_steps, "after_probe": after_probe,
            "measured": max(xla.values()) if after_probe is None else after_probe,
            "measured_by": "XLA's account" if after_probe is None else "peak_bytes_in_use",
        },
        "parts": {part.name: part.size / 1e9 for part in plan.parts},
    }  # fmt: skip


def report(name: str, row: dict[str, Any]) -> None:
    """One case on the terminal."""
    gb = row["gb"]
    print(f"{name} on {row['device']} ({row['compile_seconds']:.0f} s to compile, {row['step_seconds']:.3f} s a step)")
    step = gb["xla_step"] if gb["after_steps"] is None else gb["after_steps"]
    for what, planned, measured in (("step", gb["planned_step"], step), ("run", gb["planned"], gb["measured"])):
        print(f"  {what:<5} planned {planned:8.3f} GB, measured {measured:8.3f} GB: {planned / measured - 1:+.1%}")
    print(f"  XLA's account of step {gb['xla_step']:.3f} GB, of probe {gb['xla_probe']:.3f} GB", flush=True)


def grid() -> dict[str, dict[str, float]]:
    """Estimate and XLA's account of a step's own memory, in MB, over small shapes on a CPU."""
    from jdllm.training.memory import ask_xla, memory

    rows = {}
    for changes in GRID:
        config = preset("smoke").replace(**GRID_BASE | changes)
        planned, account = memory(config, "cpu").step / 1e6, ask_xla(config).temporary / 1e6
        rows[json.dumps(changes)] = {"planned": planned, "account": account}
        print(f"{planned:8.1f} {account:8.1f} MB {planned / account - 1:+7.1%}  {changes}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
