"""Standardising latents, so that neither scale nor constants can make denoising look easy.

Per latent index and dimension over the batch, with gradient and without a learned gain; in use, with running statistics.
RMSNorm per latent and statistics per dimension alone leave a way to cheat open: the encoder moves its energy into what is
the same for all inputs (docs/decisions.md has the measurement).  Both stay available for that ablation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.config import ModelConfig
from jdllm.model.layers import rms_norm

EPSILON = 1e-5


class LatentStats(NamedTuple):
    """Running mean and variance of the encoder's output; `weight` corrects the bias of the first steps."""

    mean: Float[Array, "k d"]
    variance: Float[Array, "k d"]
    weight: Float[Array, ""]


def init_stats(config: ModelConfig) -> LatentStats:
    """Statistics of nothing seen yet."""
    zeros = jnp.zeros((config.num_latents, config.latent_dim), jnp.float32)
    return LatentStats(zeros, zeros, jnp.zeros((), jnp.float32))


def batch_moments(raw: Float[Array, "b k d"], mode: str) -> tuple[Float[Array, "k d"], Float[Array, "k d"]]:
    """Mean and variance over the batch (`index`), or over batch and latents alike (`dimension`)."""
    axes = (0,) if mode == "index" else (0, 1)
    mean = raw.mean(axes, keepdims=True)
    variance = jnp.square(raw - mean).mean(axes, keepdims=True)
    shape = raw.shape[1:]
    return jnp.broadcast_to(mean[0], shape), jnp.broadcast_to(variance[0], shape)


def standardize_batch(raw: Float[Array, "b k d"], mode: str) -> tuple[Float[Array, "b k d"], LatentStats]:
    """In training: zero mean and unit variance by the batch's own statistics, which are returned too."""
    raw = raw.astype(jnp.float32)
    mean, variance = batch_moments(raw, "index" if mode == "rmsnorm" else mode)
    z = rms_norm(raw) if mode == "rmsnorm" else (raw - mean) * jax.lax.rsqrt(variance + EPSILON)
    return z, LatentStats(mean, variance, jnp.ones((), jnp.float32))


def standardize(raw: Float[Array, "b k d"], stats: LatentStats, mode: str) -> Float[Array, "b k d"]:
    """In use: by running statistics."""
    raw = raw.astype(jnp.float32)
    if mode == "rmsnorm":
        return rms_norm(raw)
    weight = jnp.maximum(stats.weight, 1e-8)
    return (raw - stats.mean / weight) * jax.lax.rsqrt(stats.variance / weight + EPSILON)


def update_stats(running: LatentStats, batch: LatentStats, decay: float) -> LatentStats:
    """Exponential average; the batch's statistics carry no gradient here."""
    return jax.tree.map(lambda r, x: decay * r + (1 - decay) * jax.lax.stop_gradient(x), running, batch)
