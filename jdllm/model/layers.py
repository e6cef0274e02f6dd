"""Attention, feed-forward and the stack of blocks that Perceiver, denoiser and token decoder share.

Weights arrive in the arithmetic of the step (float32 masters are cast once per step, see training/step.py), so modules
only follow the dtype of their input; normalisations, rotations and softmax are float32 inside.  Blocks of one kind are
stacked along a leading axis, so that a kernel finds them contiguous and one block need be compiled however deep the model
is (`Walk` says when that is wanted).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jdllm.model import placement

EPSILON = 1e-6

Walk = Literal["scan", "unroll", "remat"]
"""How a stack is walked.  `scan` compiles one block: for forward passes.  `unroll` compiles all of them: a scan copies what
the backward pass needs into stacked arrays, which made that of the `books` denoiser 1.8x slower on an H200
(results/profile-h200).  `remat` scans and computes activations again in the backward pass, for the least memory."""
ROPE_BASE = 10_000.0


class Frozen(nnx.Variable):
    """A weight that comes from the frozen language model and is never trained."""


class Linear(nnx.Linear):
    """x @ kernel + bias.  The kernel may be anything that knows `x @ kernel`: quantised ones do (kernels/quantize.py)."""

    def __call__(self, x: Float[Array, "*n d_in"]) -> Float[Array, "*n d_out"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


def linear(d_in: int, d_out: int, *, rngs: nnx.Rngs, scale: float = 1.0, bias: bool = False) -> Linear:
    """A projection with variance scale**2 / d_in at the start."""
    init = nnx.initializers.variance_scaling(scale**2, "fan_in", "normal")
    return Linear(d_in, d_out, use_bias=bias, kernel_init=init, rngs=rngs)


def rms_norm(x: Float[Array, "*n d"], gain: Float[Array, " d"] | None = None) -> Float[Array, "*n d"]:
    """x over its root mean square, computed in float32, in the dtype of x; times `gain` where there is one."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPSILON)
    return (y if gain is None else y * gain.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm` with a learned gain."""

    def __init__(self, dim: int):
        self.gain = nnx.Param(jnp.ones((dim,)))

    def __call__(self, x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return rms_norm(x, self.gain[...])


class FeedForward(nnx.Module):
    """Linear, GELU, Linear, with biases."""

    def __init__(self, dim: int, multiple: int, *, out_scale: float, rngs: nnx.Rngs):
        self.up = linear(dim, multiple * dim, bias=True, rngs=rngs)
        self.down = linear(multiple * dim, dim, scale=out_scale, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return self.down(jax.nn.gelu(self.up(x)))


def rotary(x: Float[Array, "b n h c"], first: int | Int[Array, ""] = 0) -> Float[Array, "b n h c"]:
    """Rotary position embedding of positions first..first+n-1 (arXiv 2104.09864), pairs split in halves."""
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = (first + jnp.arange(x.shape[1], dtype=jnp.float32))[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "b n h c"],
    k: Float[Array, "b m h c"],
    v: Float[Array, "b m h c"],
    kv_lengths: Int[Array, " b"] | None = None,
    causal: bool = False,
) -> Float[Array, "b n hc"]:
    """Softmax attention; keys at or beyond `kv_lengths` are not seen, nor later ones if `causal`.  Heads come back side by side.

    cuDNN's fused kernel is taken on a GPU in bfloat16, where XLA's own would write the scores to memory.
    """
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    y = jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=kv_lengths, is_causal=causal, implementation="cudnn" if fused else "xla"
    )
    return y.reshape(*y.shape[:2], -1)


def split_heads(x: Float[Array, "b n hc"], head_dim: int) -> Float[Array, "b n h c"]:
    """Heads out of the last axis."""
    return x.reshape(*x.shape[:2], -1, head_dim)


class SelfAttention(nnx.Module):
    """Self-attention, bidirectional or causal, with rotary positions and normalised queries and keys (qk-norm)."""

    def __init__(self, dim: int, head_dim: int, *, out_scale: float, causal: bool = False, rngs: nnx.Rngs):
        self.head_dim, self.causal = head_dim, causal
        self.qkv = linear(dim, 3 * dim, rngs=rngs)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.out = linear(dim, dim, scale=out_scale, rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return self.out(attend(*self.queries_keys_values(x), causal=self.causal))

    def queries_keys_values(
        self, x: Float[Array, "b n d"], first: int | Int[Array, ""] = 0
    ) -> tuple[Float[Array, "b n h c"], Float[Array, "b n h c"], Float[Array, "b n h c"]]:
        """What attention takes, of tokens at positions `first` and following."""
        q, k, v = (split_heads(part, self.head_dim) for part in jnp.split(self.qkv(x), 3, axis=-1))
        return rotary(self.q_norm(q), first), rotary(self.k_norm(k), first), v


def stack(make: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """`depth` independently initialised modules as one module whose weights have a leading axis."""

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def init(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return init(rngs)


def run_stack(
    blocks: nnx.Module, x: Float[Array, "b n d"], *context: Array | None, walk: Walk
) -> Float[Array, "b n d"]:
    """x through all stacked blocks in turn; each is called as block(x, *context)."""
    graphdef, weights = nnx.split(blocks)
    axes = placement.axes_in_block(weights)

    def body(x: Array, weights: nnx.State) -> tuple[Array, None]:
        block = nnx.merge(graphdef, placement.gather_block(weights, axes))
        return placement.rows(block(placement.rows(x), *context)), None

    depth = jax.tree.leaves(weights)[0].shape[0]
    if walk == "remat":
        return jax.lax.scan(jax.checkpoint(body), x, weights)[0]
    return jax.lax.scan(body, x, weights, unroll=depth if walk == "unroll" else 1)[0]
