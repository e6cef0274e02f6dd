"""Tokens drawn from the states that a token head reads, a bounded number of logits at a time."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdllm.kernels.cross_entropy import LOGITS_AT_ONCE


class Drawn(NamedTuple):
    """A token for each state, and how sure the model is, which neither temperature nor top_p changes."""

    tokens: Int[Array, " n"]
    log_probability: Float[Array, " n"]
    """Of the token, in nats."""
    entropy: Float[Array, " n"]
    """Of all tokens, in nats."""


def draw(
    key: jax.Array,
    states: Float[Array, "n w"],
    head: Float[Array, "w v"],
    temperature: Float[Array, ""] | float,
    top_p: Float[Array, ""] | float,
    *,
    nucleus: bool,
) -> Drawn:
    """One token a state from softmax(states @ head / temperature); 0 takes the likeliest, the lowest id in a tie.

    With `nucleus` from the likeliest tokens alone that together have probability `top_p` (arXiv 1904.09751); it sorts the
    vocabulary, so `top_p` is not read without.
    """
    rows, vocab = states.shape[0], head.shape[1]
    size = min(rows, max(1, LOGITS_AT_ONCE // vocab))
    groups = -(-rows // size)

    def some(group: tuple[Array, Array]) -> Drawn:
        index, states = group
        logits = jnp.matmul(states, head.astype(states.dtype), preferred_element_type=jnp.float32)
        log_p = jax.nn.log_softmax(logits)
        noise = jax.random.gumbel(jax.random.fold_in(key, index), logits.shape)
        allowed = jnp.where(in_nucleus(logits, temperature, top_p), logits, -jnp.inf) if nucleus else logits
        tokens = jnp.argmax(allowed + temperature * noise, axis=1).astype(jnp.int32)
        own = jnp.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0]
        return Drawn(tokens, own, -(jnp.exp(log_p) * log_p).sum(1))

    padded = jnp.pad(states, ((0, groups * size - rows), (0, 0))).reshape(groups, size, -1)
    found = jax.lax.map(some, (jnp.arange(groups), padded))
    return Drawn(*(x.reshape(-1)[:rows] for x in found))


def in_nucleus(
    logits: Float[Array, "n v"], temperature: Float[Array, ""] | float, top_p: Float[Array, ""] | float
) -> Bool[Array, "n v"]:
    """The fewest tokens whose probability at this temperature adds up to `top_p` or more; at least one, and all in a tie."""
    p = jax.nn.softmax(logits / jnp.maximum(temperature, 1e-6))
    falling = -jnp.sort(-p, axis=1)
    before = jnp.cumsum(falling, axis=1) - falling
    least = jnp.min(jnp.where(before < top_p, falling, jnp.inf), axis=1, keepdims=True)
    return p >= least
