"""Token cross-entropy that never holds all logits: it walks over the vocabulary in chunks, forward and backward.

Qwen3.6 has 248,320 tokens; the logits of 16,384 positions would be 16 GB in float32.  The forward pass keeps a running
log-sum-exp and the best token, the backward pass recomputes each chunk's logits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.kernels.quantize import QuantizedMatrix
from jdllm.model.placement import gather_columns, scatter_columns

CHUNK = 8192
LOGITS_AT_ONCE = 2**26
"""Logits that generation holds at once: 256 MB in float32."""


def _chunks(head: Float[Array, "w v"], chunk: int) -> tuple[Float[Array, "c w chunk"], Int[Array, " c"]]:
    """The head cut along the vocabulary, zero-padded to whole chunks, and the first token of each."""
    width, vocab = head.shape
    count = -(-vocab // chunk)
    padded = jnp.pad(head, ((0, 0), (0, count * chunk - vocab)))
    return padded.reshape(width, count, chunk).transpose(1, 0, 2), jnp.arange(count) * chunk


def _logits(states: Array, weights: Array, first: Array, vocab: int) -> Float[Array, "n chunk"]:
    logits = jnp.einsum("nw,wc->nc", states, weights, preferred_element_type=jnp.float32)
    return jnp.where(first + jnp.arange(weights.shape[1]) < vocab, logits, -jnp.inf)


def _forward(states: Array, head: Array, ids: Array, chunk: int) -> tuple[Array, Array, Array]:
    vocab, n = head.shape[1], states.shape[0]

    def body(carry: tuple[Array, ...], inputs: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        high, total, own, best = carry
        weights, first = gather_columns(inputs[0].astype(states.dtype)), inputs[1]
        logits = _logits(states, weights, first, vocab)
        local = ids - first
        inside = (local >= 0) & (local < chunk)
        picked = jnp.take_along_axis(logits, jnp.clip(local, 0, chunk - 1)[:, None], axis=1)[:, 0]
        top = logits.max(1)
        new_high = jnp.maximum(high, top)
        total = total * jnp.exp(high - new_high) + jnp.exp(logits - new_high[:, None]).sum(1)
        best = jnp.where(top > high, first + logits.argmax(1).astype(jnp.int32), best)
        return (new_high, total, jnp.where(inside, picked, own), best), None

    start = (jnp.full(n, -jnp.inf), jnp.zeros(n), jnp.zeros(n), jnp.zeros(n, jnp.int32))
    (high, total, own, best), _ = jax.lax.scan(body, start, _chunks(head, chunk))
    log_sum = high + jnp.log(total)
    return log_sum - own, best, log_sum


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    states: Float[Array, "n w"], head: Float[Array, "w v"], ids: Int[Array, " n"], chunk: int = CHUNK
) -> tuple[Float[Array, " n"], Int[Array, " n"]]:
    """Negative log-likelihood in nats of each id under softmax(states @ head), and the most likely id."""
    nll, best, _ = _forward(states, head, ids, min(chunk, head.shape[1]))
    return nll, best


def _cross_entropy_fwd(
    states: Array, head: Array, ids: Array, chunk: int
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    nll, best, log_sum = _forward(states, head, ids, min(chunk, head.shape[1]))
    return (nll, best), (states, head, ids, log_sum)


def _cross_entropy_bwd(
    chunk: int, saved: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None]:
    states, head, ids, log_sum = saved
    chunk = min(chunk, head.shape[1])
    weight = cotangents[0][:, None]

    def body(d_states: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        weights, first = gather_columns(inputs[0].astype(states.dtype)), inputs[1]
        probability = jnp.exp(_logits(states, weights, first, head.shape[1]) - log_sum[:, None])
        hit = (ids - first)[:, None] == jnp.arange(chunk)
        d_logits = ((probability - hit) * weight).astype(states.dtype)
        d_states = d_states + jnp.einsum("nc,wc->nw", d_logits, weights, preferred_element_type=jnp.float32)
        d_weights = jnp.einsum("nw,nc->wc", states, d_logits, preferred_element_type=jnp.float32)
        return d_states, scatter_columns(d_weights)

    d_states, d_head = jax.lax.scan(body, jnp.zeros(states.shape, jnp.float32), _chunks(head, chunk))
    d_head = d_head.transpose(1, 0, 2).reshape(head.shape[0], -1)[:, : head.shape[1]]
    return d_states.astype(states.dtype), d_head.astype(head.dtype), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def most_likely_tokens(
    states: Float[Array, "b t w"], head: Float[Array, "w v"] | QuantizedMatrix, chunk: int | None = None
) -> Int[Array, "b t"]:
    """argmax over the vocabulary of states @ head; the lowest id wins a tie.

    All logits at once where they are few, so that the head is read once and never copied; otherwise `chunk` columns at a
    time, of which the last ones overlap the ones before.
    """
    flat, vocab = states.reshape(-1, states.shape[-1]), head.shape[1]
    chunk = min(vocab, chunk or max(CHUNK, LOGITS_AT_ONCE // len(flat)))

    def body(carry: tuple[Array, Array], first: Array) -> tuple[tuple[Array, Array], None]:
        high, best = carry
        logits = _product(flat, _columns(head, first, chunk))
        top = logits.max(1)
        return (jnp.maximum(high, top), jnp.where(top > high, first + logits.argmax(1).astype(jnp.int32), best)), None

    if chunk == vocab:
        best = _product(flat, head).argmax(1).astype(jnp.int32)
    else:
        firsts = jnp.minimum(jnp.arange(-(-vocab // chunk)) * chunk, vocab - chunk).astype(jnp.int32)
        (_, best), _ = jax.lax.scan(body, (jnp.full(len(flat), -jnp.inf), jnp.zeros(len(flat), jnp.int32)), firsts)
    return best.reshape(states.shape[:2])


def _columns(head: Array | QuantizedMatrix, first: Array, count: int) -> Array | QuantizedMatrix:
    if isinstance(head, QuantizedMatrix):
        return head.columns(first, count)
    return jax.lax.dynamic_slice_in_dim(head, first, count, axis=1)


def _product(states: Array, head: Array | QuantizedMatrix) -> Float[Array, "n c"]:
    """Logits in float32."""
    if isinstance(head, QuantizedMatrix):
        return head.product(states, jnp.float32)
    return jnp.matmul(states, head.astype(states.dtype), preferred_element_type=jnp.float32)
