"""One device against several of the same host: step time, tokens/s, MFU and memory at equal work for each device.

    python experiments/measure_scaling.py --out results/scaling-h200

Hidden states are random normal numbers that already lie on the devices, so what is timed is the training step alone: no
encoder, no loader.  Every case runs in a process of its own, so that peaks of memory are its own:

    one           one device
    sharded       all devices, state in slices (training.fsdp = number of devices)
    copied        all devices, state whole on each (training.fsdp = 1)
    overlapped    sharded, with XLA's latency-hiding scheduler and pipelined collectives switched on
    one-limited, sharded-limited
                  memory of a card limited to halfway between the peaks of `one` and `sharded`: the first is to run out

`scaling.json` is written anew after every case, and a case that is in it already is not run again; delete it to start over.
On a machine with one device it measures that one and says what is left.  --toy runs everything at tiny sizes on four
virtual devices of a CPU, which proves the script and measures nothing.
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

OVERLAP = (
    "--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_pipelined_all_gather=true "
    "--xla_gpu_enable_pipelined_reduce_scatter=true --xla_gpu_enable_while_loop_double_buffering=true"
)
TOY_DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    presets: tuple[str, ...] = ("qwen3.6-35b-a3b", "books")
    """Presets whose trained part is timed."""
    cases: tuple[str, ...] = ("one", "sharded", "copied", "overlapped", "one-limited", "sharded-limited")
    """Cases, as named above, in this order; the limited ones need `one` and `sharded`."""
    devices: int = 0
    """Devices of the larger cases; 0 takes all."""
    batch_size: int = 0
    """Windows for each device; 0 takes the preset's batch."""
    steps: int = 20
    """Timed steps, after three that are not."""
    out: Path | None = None
    """Folder for scaling.json."""
    toy: bool = False
    """Tiny sizes on virtual devices of a CPU."""
    child: str | None = None
    """Used by the program itself: the case that this process is to run, as JSON."""


def sizes(name: str, batch_size: int, count: int, fsdp: int, toy: bool) -> Config:
    """The preset with `batch_size` windows for each of `count` devices."""
    config = preset(name)
    if toy:
        config = config.replace(
            model__hidden_dim=32, model__vocab_size=64, model__num_tokens=8, model__num_latents=8, model__latent_dim=128,
            model__head_dim=32, model__encoder_depth=2, model__decoder_depth=2, model__token_decoder_depth=1,
            model__denoiser_depth=2, training__batch_size=4,
        )  # fmt: skip
    each = batch_size or config.training.batch_size
    return config.replace(training__batch_size=each * count, training__fsdp=fsdp)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Compile and time one case on the devices of this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jdllm.model.ldlm import Model
    from jdllm.training.sharding import batch_sharding, make_mesh, on_mesh, replicated, state_sharding
    from jdllm.training.state import init_state, make_optimizer
    from jdllm.training.step import make_train_step
    from jdllm.training.throughput import flops_per_window, peak_flops

    if case["case"] == "devices":
        device = jax.devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit")
        return {"count": jax.device_count(), "kind": device.device_kind, "platform": device.platform, "pool": memory}
    count = case["devices"]
    config = sizes(case["preset"], case["batch_size"], count, case["fsdp"], case["toy"])
    m, b, devices = config.model, config.training.batch_size, jax.devices()[:count]
    mesh, optimizer = make_mesh(config, devices), make_optimizer(config.optimizer)
    model = Model(config, "remat" if config.training.remat else "unroll")

    def init() -> Any:
        return init_state(model, optimizer, jnp.zeros(m.hidden_dim), jnp.ones(m.hidden_dim))

    def draw() -> dict[str, jax.Array]:
        key = jax.random.key(0)
        return {
            "hidden": jax.random.normal(key, (b, m.num_tokens, m.hidden_dim), jnp.bfloat16),
            "ids": jax.random.randint(key, (b, m.num_tokens), 0, m.vocab_size),
            "lengths": jnp.full(b, m.num_tokens, jnp.int32),
        }

    def head() -> Any:
        return jax.tree.map(
            lambda s: 0.02 * jax.random.normal(jax.random.key(1), s.shape, s.dtype), model.frozen_shapes
        )

    shardings = state_sharding(mesh, jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()
    frozen = jax.jit(head, out_shardings=state_sharding(mesh, model.frozen_shapes))()
    batch = jax.jit(draw, out_shardings=batch_sharding(mesh))()
    function = on_mesh(mesh, make_train_step(model, optimizer))
    began = time.perf_counter()
    step = jax.jit(function, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))
    compiled = step.lower(state, frozen, batch, 0.0).compile()
    compilation = time.perf_counter() - began
    planned = compiled.memory_analysis()

    for _ in range(3):
        state, metrics = compiled(state, frozen, batch, 0.0)
    jax.block_until_ready(metrics)
    began = time.perf_counter()
    for _ in range(case["steps"]):
        state, metrics = compiled(state, frozen, batch, 0.0)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - began) / case["steps"]
    loss = float(metrics["loss"])
    if not np.isfinite(loss):
        raise RuntimeError(f"the loss is {loss} after {case['steps'] + 3} steps")

    peak, stats = peak_flops(), [device.memory_stats() or {} for device in devices]
    arrays = {"params": state.params, "ema": state.ema_params, "optimizer": state.opt_state, "head": frozen}
    return {
        "devices": count, "fsdp": case["fsdp"], "batch_per_device": b // count, "tokens_per_window": m.num_tokens,
        "trained_weights": sum(x.size for x in jax.tree.leaves(state.params)),
        "compile_seconds": compilation, "step_ms": 1e3 * seconds, "tokens_per_second": b * m.num_tokens / seconds,
        "mfu": b * flops_per_window(model) / seconds / (peak / jax.device_count() * count) if peak else None,
        "peak_gb": [s["peak_bytes_in_use"] / 1e9 for s in stats if "peak_bytes_in_use" in s] or None,
        "pool_gb": stats[0].get("bytes_limit", 0) / 1e9 or None,
        "xla_temporary_gb": planned.temp_size_in_bytes / 1e9 if planned else None,
        "state_gb": {
            name: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)) / 1e9 for name, tree in arrays.items()
        },
        "loss": loss,
    }  # fmt: skip


def child(case: dict[str, Any], toy: bool, limit: float | None = None, flags: str = "") -> dict[str, Any]:
    """A case in its own process: its figures, or {"failed": why}."""
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    if toy:
        environment["JAX_PLATFORMS"] = "cpu"
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={TOY_DEVICES}"
    if limit:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{limit:.4f}"
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(case)], env=environment, capture_output=True, text=True
    )
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if "RESOURCE_EXHAUSTED" in done.stderr or "Out of memory" in done.stderr:
        return {"failed": "out of memory"}
    return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1][:500]}


def settings(name: str, case: str, count: int, found: dict[str, Any], pool: float | None) -> dict[str, Any] | str:
    """Devices, fsdp, flags and memory limit of a case, or why it cannot be run."""
    if case != "one" and case != "one-limited" and count == 1:
        return "it needs two devices or more"
    chosen: dict[str, Any] = {"devices": 1 if case.startswith("one") else count, "fsdp": 1, "flags": "", "limit": None}
    if case in ("sharded", "overlapped", "sharded-limited"):
        chosen["fsdp"] = count
    if case == "overlapped":
        chosen["flags"] = OVERLAP
    if case.endswith("limited"):
        peaks = [max(found.get(other, {}).get("peak_gb") or [0.0]) for other in ("one", "sharded")]
        if not all(peaks) or not pool:
            return "it needs the peaks of `one` and `sharded`, and a device that reports its memory"
        if peaks[1] > 0.9 * peaks[0]:
            return f"sharding saves too little here ({peaks[0]:.1f} against {peaks[1]:.1f} GB) to set a limit between"
        # The pool that JAX takes by default is 75% of the card.
        chosen["limit"] = 0.75 * 1e9 * sum(peaks) / 2 / pool
    return chosen


def main() -> int:
    options = tyro.cli(Options)
    if options.child:
        print(json.dumps(run_case(json.loads(options.child))))
        return 0
    machine = child({"case": "devices"}, options.toy)
    if "failed" in machine:
        print(f"no devices: {machine['failed']}", file=sys.stderr)
        return 2
    count = options.devices or machine["count"]
    if count > machine["count"]:
        print(f"--devices {count} is too many; this machine has {machine['count']}", file=sys.stderr)
        return 2
    path = options.out / "scaling.json" if options.out else None
    report = json.loads(path.read_text()) if path and path.is_file() else {"presets": {}}
    if report.get("machine", machine) != machine or report.get("toy", options.toy) != options.toy:
        print(
            f"{path} was measured on {report['machine']['kind']}, or at other sizes; choose another --out",
            file=sys.stderr,
        )
        return 2
    from jdllm.training.loop import commit

    report |= {
        "machine": machine, "toy": options.toy, "steps": options.steps, "commit": commit(), "command": " ".join(sys.argv)
    }  # fmt: skip
    print(
        f"{machine['count']} x {machine['kind']}"
        + (" (toy sizes: proves the script, measures nothing)" if options.toy else "")
    )
    for name in options.presets:
        found = report["presets"].setdefault(name, {})
        for case in options.cases:
            if case in found:
                continue
            chosen = settings(name, case, count, found, machine["pool"])
            if isinstance(chosen, str):
                print(f"{name:18} {case:16} not measured: {chosen}", flush=True)
                continue
            flags, limit = chosen.pop("flags"), chosen.pop("limit")
            what = {
                "case": case,
                "preset": name,
                "batch_size": options.batch_size,
                "steps": options.steps,
                "toy": options.toy,
            }
            found[case] = child(what | chosen, options.toy, limit, flags) | {"memory_fraction": limit, "flags": flags}
            print(f"{name:18} {case:16} {line(found[case])}", flush=True)
            for other in ("sharded", "copied", "overlapped"):
                if "tokens_per_second" in found.get("one", {}) and "tokens_per_second" in found.get(other, {}):
                    found[other]["speedup"] = found[other]["tokens_per_second"] / found["one"]["tokens_per_second"]
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(report, indent=1) + "\n")
        for other in ("sharded", "copied", "overlapped"):
            if "speedup" in found.get(other, {}):
                print(f"{name:18} {other:16} {found[other]['speedup']:.2f}x the tokens/s of one device, on {count}")
    return 0


def line(row: dict[str, Any]) -> str:
    """A case on one line."""
    if "failed" in row:
        return row["failed"] + (f" (memory fraction {row['memory_fraction']:.3f})" if row["memory_fraction"] else "")
    memory = f"{max(row['peak_gb']):.2f} GB peak" if row["peak_gb"] else f"{row['xla_temporary_gb']:.3f} GB temporary"
    mfu = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return f"{row['step_ms']:9.2f} ms, {row['tokens_per_second']:11,.0f} tokens/s{mfu}, {memory} a device"


if __name__ == "__main__":
    sys.exit(main())
