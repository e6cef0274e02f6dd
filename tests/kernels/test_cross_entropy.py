"""Chunked cross-entropy against the plain one, which holds all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.kernels.cross_entropy import cross_entropy, most_likely_tokens

ROWS, WIDTH = 13, 16


def plain(states, head, ids):
    """Negative log-likelihoods and best tokens with all logits in float32."""
    logits = jnp.einsum("nw,wv->nv", states, head.astype(states.dtype), preferred_element_type=jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1)[:, 0], logits.argmax(-1)


def problem(vocab, dtype=jnp.float32, scale=1.0):
    keys = jax.random.split(jax.random.key(vocab), 3)
    states = scale * jax.random.normal(keys[0], (ROWS, WIDTH))
    ids = jax.random.randint(keys[2], (ROWS,), 0, vocab).at[0].set(0).at[1].set(vocab - 1)
    return states.astype(dtype), jax.random.normal(keys[1], (WIDTH, vocab)), ids


@pytest.mark.parametrize(("vocab", "chunk"), [(2, 1), (97, 8192), (101, 32), (256, 64)])
def test_values_best_tokens_and_gradients_equal_the_plain_ones(vocab, chunk):
    states, head, ids = problem(vocab)
    weights = jnp.linspace(-1.0, 2.0, ROWS)  # each row's own cotangent, zero and negative ones among them

    def total(loss, states, head):
        nll, best = loss(states, head, ids)
        return (weights * nll).sum(), (nll, best)

    def run(loss):
        return jax.jit(jax.value_and_grad(functools.partial(total, loss), (0, 1), has_aux=True))(states, head)

    (_, (nll, best)), grads = run(functools.partial(cross_entropy, chunk=chunk))
    (_, (want_nll, want_best)), want = run(plain)
    np.testing.assert_allclose(nll, want_nll, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(best, want_best)
    for got, expected in zip(grads, want):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_large_logits_stay_finite():
    states, head, ids = problem(61, scale=300.0)
    (nll, _), grads = (
        cross_entropy(states, head, ids, 16),
        jax.grad(lambda s: cross_entropy(s, head, ids, 16)[0].sum())(states),
    )
    np.testing.assert_allclose(nll, plain(states, head, ids)[0], rtol=1e-4, atol=1e-2)
    assert np.isfinite(grads).all()


def test_rows_of_very_negative_logits_keep_their_best_token():
    states, head, ids = problem(61)
    head, states = head.at[0].set(-64.0), states.at[:, 0].set(8.0)
    np.testing.assert_array_equal(cross_entropy(states, head, ids, 16)[1], plain(states, head, ids)[1])


def test_bfloat16_is_as_good_as_plain_bfloat16():
    states, head, ids = problem(101, jnp.bfloat16)

    def grads(loss, states, head):
        return jax.grad(lambda s, h: loss(s, h, ids)[0].mean(), (0, 1))(states, head)

    exact = grads(plain, states.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32))
    chunked = grads(functools.partial(cross_entropy, chunk=32), states, head)
    assert chunked[0].dtype == jnp.bfloat16 and chunked[1].dtype == jnp.float32
    nll = cross_entropy(states, head, ids, 32)[0]
    assert nll.dtype == jnp.float32
    np.testing.assert_allclose(nll, plain(states.astype(jnp.float32), head, ids)[0], rtol=0.02, atol=0.05)
    for got, want in zip(chunked, exact):
        error = np.linalg.norm(got.astype(np.float32) - want) / np.linalg.norm(want)
        assert error < 0.02, error


def test_most_likely_tokens_equals_argmax_and_the_lowest_id_wins_a_tie():
    states, head, _ = problem(101)
    head = head.at[:, 70].set(head[:, 3])  # a tie across two chunks, wherever token 3 is the best
    states = states.at[0].set(10 * head[:, 3])
    blocks = jnp.stack([states, -states])
    logits = jnp.einsum("btw,wv->btv", blocks, head)
    for chunk in (16, 101, 8192):
        found = most_likely_tokens(blocks, head, chunk)
        np.testing.assert_array_equal(found, logits.argmax(-1))
        assert found.shape == (2, ROWS) and found[0, 0] == 3


def test_it_holds_no_array_of_all_logits():
    """The largest array of the compiled program, forward and backward, is the head's size, not rows x vocabulary."""
    rows, vocab = 512, 4096
    shapes = (jax.ShapeDtypeStruct((rows, 8), jnp.float32), jax.ShapeDtypeStruct((8, vocab), jnp.float32))
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def peak(loss):
        grad = jax.jit(jax.grad(lambda s, h, i: loss(s, h, i)[0].mean(), (0, 1)))
        return grad.lower(*shapes, ids).compile().memory_analysis().temp_size_in_bytes

    assert peak(functools.partial(cross_entropy, chunk=128)) < rows * vocab < peak(plain)
