"""Latent encoder (hidden states -> latents) and latent decoder (latents -> hidden states), both Perceivers.

A block follows COSMOS (arXiv 2506.21170; docs/design.md, section 2): pre-norm, queries attend over queries and context
with separate key and value projections, normalised queries and keys, then a feed-forward layer.  Query i starts from its
own position of the context, because a prototype whose queries were learned vectors alone collapsed
(docs/decisions.md).  Standardising the latents is not done here but in standardize.py: it needs the batch.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jdllm.config import ModelConfig
from jdllm.model.layers import FeedForward, RMSNorm, Walk, attend, linear, rms_norm, run_stack, split_heads, stack

POSITION_SCALE = 0.02  # N(0, 0.02), as COSMOS initialises its queries


class PerceiverBlock(nnx.Module):
    """Attention of queries over [queries; context], then a feed-forward layer."""

    def __init__(self, dim: int, head_dim: int, ffn_multiple: int, depth: int, *, rngs: nnx.Rngs):
        out_scale = (2 * depth) ** -0.5
        self.head_dim = head_dim
        self.query_input_norm = RMSNorm(dim)
        self.context_input_norm = RMSNorm(dim)
        self.query = linear(dim, dim, rngs=rngs)
        self.query_kv = linear(dim, 2 * dim, rngs=rngs)
        self.context_kv = linear(dim, 2 * dim, rngs=rngs)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.out = linear(dim, dim, scale=out_scale, rngs=rngs)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = FeedForward(dim, ffn_multiple, out_scale=out_scale, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b n d"], context: Float[Array, "b m d"], context_lengths: Int[Array, " b"] | None
    ) -> Float[Array, "b n d"]:
        """Queries come first among the keys, so that the padding of the context is a suffix."""
        y = self.query_input_norm(x)
        own_k, own_v = jnp.split(self.query_kv(y), 2, axis=-1)
        context_k, context_v = jnp.split(self.context_kv(self.context_input_norm(context)), 2, axis=-1)
        q = split_heads(self.query(y), self.head_dim)
        k = split_heads(jnp.concatenate([own_k, context_k], axis=1), self.head_dim)
        v = split_heads(jnp.concatenate([own_v, context_v], axis=1), self.head_dim)
        kv_lengths = None if context_lengths is None else x.shape[1] + context_lengths
        x = x + self.out(attend(self.q_norm(q), self.k_norm(k), v, kv_lengths))
        return x + self.ffn(self.ffn_norm(x))


class LatentEncoder(nnx.Module):
    """Standardised hidden states of t tokens -> k latents in float32, not yet standardised."""

    def __init__(self, config: ModelConfig, *, walk: Walk, rngs: nnx.Rngs):
        c, d = config, config.latent_dim
        normal = nnx.initializers.normal(POSITION_SCALE)
        self.walk = walk
        self.positional_path = c.positional_path
        self.num_latents = c.num_latents
        self.input = linear(c.hidden_dim, d, rngs=rngs)
        self.token_positions = nnx.Param(normal(rngs.params(), (c.num_tokens, d)))
        self.queries = nnx.Param(normal(rngs.params(), (c.num_latents, d)))
        self.blocks = stack(
            lambda rngs: PerceiverBlock(d, c.head_dim, c.ffn_multiple, c.encoder_depth, rngs=rngs),
            c.encoder_depth,
            rngs,
        )
        self.output = linear(d, d, rngs=rngs)

    def __call__(self, hidden: Float[Array, "b t dh"], lengths: Int[Array, " b"]) -> Float[Array, "b k d"]:
        """`lengths` (b,) counts the valid tokens of each row; what stands behind them is never read."""
        b, t, _ = hidden.shape
        valid = jnp.arange(t)[None, :, None] < lengths[:, None, None]
        context = self.input(jnp.where(valid, hidden, 0)) + self.token_positions[...].astype(hidden.dtype)
        context = jnp.where(valid, context, 0)
        queries = jnp.broadcast_to(self.queries[...].astype(hidden.dtype), (b, *self.queries.shape))
        if self.positional_path:
            groups = t // self.num_latents
            pooled = context.reshape(b, self.num_latents, groups, -1).sum(axis=2)
            counts = valid.reshape(b, self.num_latents, groups, 1).sum(axis=2)
            queries = queries + pooled / jnp.maximum(counts, 1).astype(hidden.dtype)
        x = run_stack(self.blocks, queries, context, lengths, walk=self.walk)
        # Float32, since standardising subtracts what may be many times larger than what remains.
        return rms_norm(x).astype(jnp.float32) @ self.output.kernel.astype(jnp.float32)


class LatentDecoder(nnx.Module):
    """k latents, possibly noisy -> standardised hidden states of t tokens."""

    def __init__(self, config: ModelConfig, *, walk: Walk, rngs: nnx.Rngs):
        c, d = config, config.latent_dim
        normal = nnx.initializers.normal(POSITION_SCALE)
        self.walk = walk
        self.positional_path = c.positional_path
        self.repeat = c.num_tokens // c.num_latents
        self.input = linear(d, d, rngs=rngs)
        self.latent_positions = nnx.Param(normal(rngs.params(), (c.num_latents, d)))
        self.queries = nnx.Param(normal(rngs.params(), (c.num_tokens, d)))
        self.blocks = stack(
            lambda rngs: PerceiverBlock(d, c.head_dim, c.ffn_multiple, c.decoder_depth, rngs=rngs),
            c.decoder_depth,
            rngs,
        )
        self.norm = RMSNorm(d)
        self.output = linear(d, c.hidden_dim, rngs=rngs)

    def __call__(self, z: Float[Array, "b k d"]) -> Float[Array, "b t dh"]:
        context = self.input(rms_norm(z)) + self.latent_positions[...].astype(z.dtype)
        queries = jnp.broadcast_to(self.queries[...].astype(z.dtype), (z.shape[0], *self.queries.shape))
        if self.positional_path:
            queries = queries + jnp.repeat(context, self.repeat, axis=1)
        x = run_stack(self.blocks, queries, context, None, walk=self.walk)
        return self.output(self.norm(x))
