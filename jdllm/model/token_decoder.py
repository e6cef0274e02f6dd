"""Token decoder: predicted hidden states -> one logit per token of the vocabulary.

The head is kept apart from the blocks, because nobody wants its output at once: 248,320 logits for every position of a
training batch are gigabytes (training/objective.py and generation walk over the vocabulary in chunks).  It is either
trained, or the frozen language model's own, with that model's final normalisation gain folded into the weights.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jdllm.config import ModelConfig
from jdllm.model.layers import FeedForward, Frozen, RMSNorm, SelfAttention, Walk, linear, rms_norm, run_stack, stack

HEAD_SCALE = 0.02


class TokenBlock(nnx.Module):
    """Self-attention, then a feed-forward layer."""

    def __init__(self, dim: int, head_dim: int, ffn_multiple: int, depth: int, *, causal: bool = False, rngs: nnx.Rngs):
        out_scale = (2 * depth) ** -0.5
        self.attention_norm = RMSNorm(dim)
        self.attention = SelfAttention(dim, head_dim, out_scale=out_scale, causal=causal, rngs=rngs)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = FeedForward(dim, ffn_multiple, out_scale=out_scale, rngs=rngs)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class TokenDecoder(nnx.Module):
    """Standardised hidden states (b, t, d_h) -> states that the head turns into logits by one product."""

    def __init__(self, config: ModelConfig, *, walk: Walk, causal: bool = False, rngs: nnx.Rngs):
        c, d = config, config.latent_dim
        self.walk = walk
        self.input = linear(c.hidden_dim, d, rngs=rngs)
        self.depth = c.token_decoder_depth
        if self.depth:
            self.blocks = stack(
                lambda rngs: TokenBlock(d, c.head_dim, c.ffn_multiple, c.token_decoder_depth, causal=causal, rngs=rngs),
                self.depth,
                rngs,
            )
        if c.head == "encoder":
            self.output = linear(d, c.hidden_dim, rngs=rngs)
            self.head = Frozen(jnp.zeros((c.hidden_dim, c.vocab_size), jnp.bfloat16))
        else:
            self.norm = RMSNorm(d)
            self.head = nnx.Param(nnx.initializers.normal(HEAD_SCALE)(rngs.params(), (d, c.vocab_size)))
        self.head_kind = c.head

    def states(self, hidden: Float[Array, "b t dh"]) -> Float[Array, "b t w"]:
        """Inputs of the head; its width w is d when trained and d_h when the frozen model's."""
        x = self.input(hidden)
        if self.depth:
            x = run_stack(self.blocks, x, walk=self.walk)
        return self.read(x)

    def read(self, x: Float[Array, "b t d"]) -> Float[Array, "b t w"]:
        """What the last block leaves, as input of the head."""
        return self.norm(x) if self.head_kind == "trained" else rms_norm(self.output(x))

    def logits(self, hidden: Float[Array, "b t dh"]) -> Float[Array, "b t v"]:
        """All logits in float32; for short sequences and tests."""
        states = self.states(hidden)
        return jnp.einsum(
            "btw,wv->btv", states, self.head[...].astype(states.dtype), preferred_element_type=jnp.float32
        )
