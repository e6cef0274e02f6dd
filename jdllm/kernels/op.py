"""One operation, noise -> last estimate of the latents, and who carries it out.

    xla      the plain loop of diffusion/samplers.py, compiled; every device, every option; the oracle
    triton   the persistent launch of triton.py; NVIDIA GPUs from sm_80, bfloat16, weights in bfloat16, int8 or fp8

`auto` takes the fastest that was measured (FUSED_ROWS) and otherwise XLA; a name that cannot run here is an error that
says why.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import typing
from typing import Literal

import jax

from jdllm.config import ConfigError, ModelConfig
from jdllm.kernels.fused import Launch

Implementation = Literal["xla", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = typing.get_args(Implementation)

FUSED_ROWS: dict[str, int] = {}
"""By compute capability: up to how many latents (all sequences together) the fused loop was measured to win."""

SHARED_MEMORY_STAGES = {"8.0": 4, "9.0": 6, "10.0": 6}
"""Pieces in flight that fit into shared memory; 3 on cards with 99 KB (8.6, 8.9, 12.0)."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who generates, and why."""

    implementation: Implementation
    reason: str


def compute_capability() -> str | None:
    """Of the first device, such as "9.0"; None when it is no NVIDIA GPU."""
    device = jax.devices()[0]
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


def programs() -> int:
    """Multiprocessors of the first device."""
    return jax.devices()[0].core_count


def launch_options() -> Launch:
    """What suits the first device."""
    capability = compute_capability() or "0.0"
    launch = Launch(stages=SHARED_MEMORY_STAGES.get(capability, 3))
    return launch if int(capability.partition(".")[0]) >= 9 else dataclasses.replace(launch, prefetch=0)


def obstacle(model: ModelConfig, *, guided: bool, sampler: str, dtype: str, weights: str | None) -> str | None:
    """Why the fused loop cannot run this, or None."""
    capability = compute_capability()
    if capability is None:
        return "it needs an NVIDIA GPU"
    if int(capability.partition(".")[0]) < 8:
        return f"it needs compute capability 8.0 or later, and this GPU has {capability}"
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs the package {missing[0].replace('_', '-')} (install with: uv sync --extra cuda)"
    if guided:
        return "it knows no guidance; use guidance 0"
    if sampler == "dpmpp":
        return "it keeps one estimate, and sampler=dpmpp needs the last two; use ddim, sde or early_stop"
    if dtype != "bfloat16":
        return f"it computes in bfloat16, and this is {dtype}"
    if weights == "int4":
        return "it reads weights in bfloat16, int8 and fp8"
    if model.head_dim not in (32, 64, 128):
        return f"it knows heads of 32, 64 and 128, and these are {model.head_dim}"
    if model.latent_dim % 16:
        return f"it needs a width that is a multiple of 16, and this is {model.latent_dim}"
    return None


def choose(
    implementation: str,
    model: ModelConfig,
    *,
    num: int,
    guided: bool,
    sampler: str,
    dtype: str,
    weights: str | None,
) -> Choice:
    """The implementation for `num` sequences at once; ConfigError when the one that was named cannot run here."""
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(f"implementation={implementation!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
    if implementation == "xla":
        return Choice("xla", "as asked")
    problem = obstacle(model, guided=guided, sampler=sampler, dtype=dtype, weights=weights)
    if implementation == "triton":
        if problem:
            raise ConfigError(f"implementation=triton cannot run here: {problem}; use auto or xla")
        return Choice("triton", "as asked")
    rows, limit = num * model.num_latents, FUSED_ROWS.get(compute_capability() or "", 0)
    if problem:
        return Choice("xla", f"the fused loop cannot run here: {problem}")
    if rows > limit:
        measured = f"measured to win up to {limit} latents here" if limit else "not measured on this device"
        return Choice("xla", f"the fused loop is {measured}, and this is {rows}")
    return Choice("triton", f"up to {limit} latents it is the faster one on this device")
