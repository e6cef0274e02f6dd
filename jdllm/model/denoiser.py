"""The diffusion transformer: noisy latents, time and the previous estimate -> the clean latents (x0).

Bidirectional blocks with rotary positions and qk-norm.  Time enters by AdaLN-single (PixArt-alpha, arXiv 2310.00426): one
MLP makes six vectors from tau, each block adds its own table to them.  `modulation` is separate from `__call__` so that
generation, which knows its times beforehand, can compute all of it once per call.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jdllm.config import ModelConfig
from jdllm.model.layers import FeedForward, RMSNorm, SelfAttention, Walk, linear, run_stack, stack

TIME_FEATURES = 256
TIME_SCALE = 1000.0  # tau in [0, 1] is spread over the range that the frequencies below were made for


def time_features(tau: Float[Array, " b"]) -> Float[Array, "b f"]:
    """Sines and cosines of 1000 tau at frequencies from 1 to 1/10,000 (as DDPM, arXiv 2006.11239)."""
    half = TIME_FEATURES // 2
    frequency = jnp.exp(-math.log(10_000.0) * jnp.arange(half, dtype=jnp.float32) / half)
    angle = TIME_SCALE * tau.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


class DenoiserBlock(nnx.Module):
    """Self-attention and feed-forward, each shifted, scaled and gated by time."""

    def __init__(self, dim: int, head_dim: int, ffn_multiple: int, depth: int, *, rngs: nnx.Rngs):
        out_scale = (2 * depth) ** -0.5
        self.table = nnx.Param(jnp.zeros((6, dim)))
        self.attention_norm = RMSNorm(dim)
        self.attention = SelfAttention(dim, head_dim, out_scale=out_scale, rngs=rngs)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = FeedForward(dim, ffn_multiple, out_scale=out_scale, rngs=rngs)

    def __call__(self, x: Float[Array, "b k d"], shared: Float[Array, "b 6 d"]) -> Float[Array, "b k d"]:
        m = (shared + self.table[...].astype(shared.dtype))[:, :, None, :]
        shift, scale, gate = m[:, 0], 1 + m[:, 1], 1 + m[:, 2]
        x = x + gate * self.attention(self.attention_norm(x) * scale + shift)
        shift, scale, gate = m[:, 3], 1 + m[:, 4], 1 + m[:, 5]
        return x + gate * self.ffn(self.ffn_norm(x) * scale + shift)


class Denoiser(nnx.Module):
    """D(z_tau, tau, previous estimate) -> estimate of z."""

    def __init__(self, config: ModelConfig, *, walk: Walk, rngs: nnx.Rngs):
        c, d = config, config.latent_dim
        self.walk = walk
        self.input = linear(2 * d, d, rngs=rngs)
        self.time_up = linear(TIME_FEATURES, d, bias=True, rngs=rngs)
        self.time_down = linear(d, d, bias=True, rngs=rngs)
        self.time_modulation = linear(d, 6 * d, scale=1e-2, bias=True, rngs=rngs)
        self.blocks = stack(
            lambda rngs: DenoiserBlock(d, c.head_dim, c.ffn_multiple, c.denoiser_depth, rngs=rngs),
            c.denoiser_depth,
            rngs,
        )
        self.norm = RMSNorm(d)
        self.output = linear(d, d, scale=1e-2, rngs=rngs)

    def modulation(self, tau: Float[Array, " b"]) -> Float[Array, "b 6 d"]:
        """What time contributes to every block (the blocks' own tables are added there)."""
        features = time_features(tau).astype(self.time_up.bias.dtype)
        hidden = jax.nn.silu(self.time_down(jax.nn.silu(self.time_up(features))))
        return self.time_modulation(hidden).reshape(tau.shape[0], 6, -1)

    def __call__(
        self, z_tau: Float[Array, "b k d"], modulation: Float[Array, "b 6 d"], previous: Float[Array, "b k d"]
    ) -> Float[Array, "b k d"]:
        """`previous` is the last estimate, or zeros where there is none."""
        x = self.input(jnp.concatenate([z_tau, previous], axis=-1))
        x = run_stack(self.blocks, x, modulation, walk=self.walk)
        return self.output(self.norm(x))
