"""What the denoiser needs to know of time, for all steps of a call: computed once, since the times are known beforehand.

With c = gain (1 + scale), a block's first product is ((x / rms(x)) c + shift) W = (x c) W / rms(x) + shift W.  So time enters
the fused loop in three ways only: a factor per column of the residual stream, a bias per column of the product, and a gate.
The sampler's update is linear in the state, the estimate and fresh noise, and is three numbers a step.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.kernels.quantize import QuantizedMatrix
from jdllm.model.layers import ROPE_BASE
from jdllm.model.ldlm import Params


@flax.struct.dataclass
class StepTables:
    """All of float32; m = 2 blocks + 1 norms: two a block, one at the end."""

    factor: Float[Array, "s m d"]
    """Gain times (1 + scale) of the norm that reads the residual stream next."""
    gate: Float[Array, "s 2l d"]
    """1 + gate of attention and feed-forward, block after block."""
    bias_qkv: Float[Array, "s l 3d"]
    bias_up: Float[Array, "s l f"]
    """Includes the layer's own bias."""
    update: Float[Array, "s 3"]
    """Next state = update @ (state, estimate, fresh noise)."""


def update_coefficients(times: Float[Array, " s+1"], schedule: TangentSchedule, sampler: str) -> Float[Array, "s 3"]:
    """The weights of state, estimate and noise in samplers.step, read off by giving it the three unit vectors."""
    z, x0, noise = jnp.eye(3)[:, None, :]

    def one(tau: Array, tau_next: Array) -> Float[Array, " 3"]:
        return samplers.step(z, x0, noise, tau, tau_next, schedule, sampler)[0]

    return jax.vmap(one)(times[:-1], times[1:])


def step_tables(
    denoiser: Params,
    modulation: Float[Array, "s 6 d"],
    times: Float[Array, " s+1"],
    schedule: TangentSchedule,
    sampler: str,
) -> StepTables:
    """Tables for the steps from each of `times` to the next, given the parameters and Denoiser.modulation(times[:-1])."""
    blocks, steps = denoiser["blocks"], times.shape[0] - 1
    m = modulation.astype(jnp.float32)[:, None] + blocks["table"].astype(jnp.float32)
    gains = jnp.stack([blocks["attention_norm"]["gain"], blocks["ffn_norm"]["gain"]], axis=1).astype(jnp.float32)
    factor = gains * (1 + m[:, :, jnp.array([1, 4])])
    width = factor.shape[-1]
    last = jnp.broadcast_to(denoiser["norm"]["gain"].astype(jnp.float32), (steps, 1, width))
    shift = m[:, :, jnp.array([0, 3])].astype(blocks["table"].dtype)

    def through(shift: Array, kernel: Array | QuantizedMatrix) -> Float[Array, "s l n"]:
        return jax.vmap(_product, in_axes=(1, 0), out_axes=1)(shift, kernel)

    up = blocks["ffn"]["up"]
    return StepTables(
        factor=jnp.concatenate([factor.reshape(steps, -1, width), last], axis=1),
        gate=(1 + m[:, :, jnp.array([2, 5])]).reshape(steps, -1, width),
        bias_qkv=through(shift[:, :, 0], blocks["attention"]["qkv"]["kernel"]),
        bias_up=through(shift[:, :, 1], up["kernel"]) + up["bias"].astype(jnp.float32),
        update=update_coefficients(times, schedule, sampler),
    )


def _product(x: Float[Array, "s d"], kernel: Float[Array, "d n"] | QuantizedMatrix) -> Float[Array, "s n"]:
    if isinstance(kernel, QuantizedMatrix):
        return kernel.product(x, jnp.float32)
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def rotary_tables(positions: int, head_dim: int) -> tuple[Float[Array, "k half"], Float[Array, "k half"]]:
    """Cosines and sines of layers.rotary."""
    half = head_dim // 2
    frequency = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(positions, dtype=jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)
