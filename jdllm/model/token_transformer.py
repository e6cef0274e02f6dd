"""The baselines' model: a transformer that reads tokens and predicts tokens, causal or bidirectional.

It is the token decoder of the LDLM (same blocks, same head), deeper, on embedded tokens in the place of hidden states:
autoregressive when causal, the denoiser of masked diffusion when bidirectional.  Masked diffusion needs no time: how much
is masked can be seen (MDLM, arXiv 2406.07524, section 3.4 and its released configuration).

Embeddings are the columns of the head (tied, arXiv 1608.05859), since the LDLM to compare with has a head and no
embeddings.  One learned vector stands where there is no token: at a masked place, or before the first token.  Positions are
learned besides being rotary, as in the LDLM's Perceivers: among masks alone, rotary ones say nothing.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jdllm.config import ModelConfig
from jdllm.model.layers import Walk, rms_norm
from jdllm.model.perceiver import POSITION_SCALE
from jdllm.model.placement import axis_to_shard, gather, shards
from jdllm.model.token_decoder import TokenBlock, TokenDecoder

NONE = -1
"""In place of a token id: no token."""


class Cache(NamedTuple):
    """Keys and values of the tokens that one block has seen."""

    keys: Float[Array, "b t h c"]
    values: Float[Array, "b t h c"]


class TokenTransformer(nnx.Module):
    """Token ids, or NONE -> states that the head turns into logits."""

    def __init__(self, config: ModelConfig, depth: int, *, causal: bool, walk: Walk, rngs: nnx.Rngs):
        width = config.latent_dim if config.head == "trained" else config.hidden_dim
        shapes = dataclasses.replace(config, hidden_dim=width, token_decoder_depth=depth)
        self.none = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (width,)))
        self.positions = nnx.Param(nnx.initializers.normal(POSITION_SCALE)(rngs.params(), (config.num_tokens, width)))
        self.token_decoder = TokenDecoder(shapes, walk=walk, causal=causal, rngs=rngs)
        self.head_dim, self.width = config.head_dim, config.latent_dim

    def table(self) -> Float[Array, "v w"]:
        """The head as embeddings; in float32, since the gradient adds up thousands of places of the same token."""
        head = self.token_decoder.head[...]
        return gather(head, axis_to_shard(["head"], head.shape, max(shards(), 1))).T.astype(jnp.float32)

    def embed(
        self, ids: Int[Array, "b n"], table: Float[Array, "v w"], first: int | Int[Array, ""] = 0
    ) -> Float[Array, "b n w"]:
        """Rows of the table, or the vector of NONE, all of length sqrt(w), and the positions from `first` on."""
        found = jnp.take(table, jnp.maximum(ids, 0), axis=0)
        found = jnp.where((ids == NONE)[..., None], self.none[...].astype(jnp.float32), found)
        places = jax.lax.dynamic_slice_in_dim(self.positions[...], first, ids.shape[1])
        return rms_norm(found).astype(places.dtype) + places

    def states(self, ids: Int[Array, "b t"]) -> Float[Array, "b t w"]:
        """Inputs of the head at every position.

        Causal, position i has read ids 0..i, so shift them by one (`shifted`) to predict i; else it has read them all.
        """
        return self.token_decoder.states(self.embed(ids, self.table()))

    def logits(self, ids: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """All logits in float32; for short sequences and tests."""
        return self.token_decoder.logits(self.embed(ids, self.table()))

    def blocks(self) -> list[TokenBlock]:
        """The blocks one by one, for a loop that walks over them many times and should cut the stack only once."""
        graphdef, weights = nnx.split(self.token_decoder.blocks)
        cut = (jax.tree.map(operator.itemgetter(i), weights) for i in range(self.token_decoder.depth))
        return [nnx.merge(graphdef, block) for block in cut]

    def empty_cache(self, rows: int, length: int) -> list[Cache]:
        """Room for `length` tokens of each row, for every block."""
        shape = (rows, length, self.width // self.head_dim, self.head_dim)
        empty = jnp.zeros(shape, self.none[...].dtype)
        return [Cache(empty, empty) for _ in range(self.token_decoder.depth)]

    def advance(
        self,
        blocks: list[TokenBlock],
        table: Float[Array, "v w"],
        ids: Int[Array, " b"],
        position: Int[Array, ""],
        cache: list[Cache],
    ) -> tuple[Float[Array, "b w"], list[Cache]]:
        """One token further: the states at `position`, which reads `ids`, and the cache with it.

        `blocks` and `table` are this module's own, made once for all tokens.
        """
        x = self.token_decoder.input(self.embed(ids[:, None], table, position))
        grown = []
        for block, seen in zip(blocks, cache, strict=True):
            x, seen = _advance(block, x, position, seen)
            grown.append(seen)
        return self.token_decoder.read(x)[:, 0], grown


def shifted(ids: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """What a causal model reads to predict `ids`: no token, then all but the last."""
    return jnp.pad(ids[:, :-1], ((0, 0), (1, 0)), constant_values=NONE)


def _advance(
    block: TokenBlock, x: Float[Array, "b 1 d"], position: Int[Array, ""], cache: Cache
) -> tuple[Float[Array, "b 1 d"], Cache]:
    """TokenBlock.__call__ for one token whose predecessors are in the cache."""
    q, k, v = block.attention.queries_keys_values(block.attention_norm(x), position)
    cache = Cache(*(jax.lax.dynamic_update_slice_in_dim(old, new, position, 1) for old, new in zip(cache, (k, v))))
    scores = jnp.einsum("bhc,bmhc->bhm", q[:, 0], cache.keys, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(scores.shape[-1]) <= position, scores, -jnp.inf)
    share = jax.nn.softmax(scores).astype(x.dtype)
    read = jnp.einsum("bhm,bmhc->bhc", share, cache.values)
    x = x + block.attention.out(read.reshape(x.shape))
    return x + block.ffn(block.ffn_norm(x)), cache
