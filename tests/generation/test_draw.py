"""Drawing tokens: the distribution is the one asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.generation import draw as module
from jdllm.generation.draw import draw, in_nucleus

LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


def drawn(temperature=1.0, top_p=1.0, rows=4000):
    states = jnp.tile(jnp.asarray(LOGITS, jnp.float32), (rows, 1))
    return draw(jax.random.key(0), states, jnp.eye(4), temperature, top_p, nucleus=top_p < 1)


def shares(found):
    return np.bincount(np.asarray(found.tokens), minlength=4) / len(found.tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature):
    p = np.exp(LOGITS / temperature)
    np.testing.assert_allclose(shares(drawn(temperature)), p / p.sum(), atol=0.03)


def test_temperature_zero_takes_the_likeliest():
    assert (drawn(0.0).tokens == 0).all() and (drawn(0.0, 0.5).tokens == 0).all()


@pytest.mark.parametrize(("top_p", "kept"), [(0.3, 1), (0.41, 2), (0.69, 2), (0.71, 3), (1.0, 4)])
def test_the_nucleus_is_the_fewest_likeliest_tokens(top_p, kept):
    np.testing.assert_array_equal(in_nucleus(jnp.asarray(LOGITS)[None], 1.0, top_p)[0], np.arange(4) < kept)


def test_top_p_draws_from_the_nucleus_in_proportion():
    np.testing.assert_allclose(shares(drawn(top_p=0.65)), [4 / 7, 3 / 7, 0, 0], atol=0.03)


def test_certainty_is_that_of_the_model_whatever_is_drawn():
    found = drawn(0.5, 0.95)
    np.testing.assert_allclose(found.log_probability, LOGITS[np.asarray(found.tokens)], rtol=1e-5)
    np.testing.assert_allclose(found.entropy, -(np.exp(LOGITS) * LOGITS).sum(), rtol=1e-5)


def test_many_rows_are_drawn_in_groups_each_its_own(monkeypatch):
    whole = drawn(rows=10)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 12)
    grouped = drawn(rows=1000)
    assert whole.tokens.shape == (10,) and grouped.tokens.shape == (1000,)
    np.testing.assert_allclose(shares(grouped), np.exp(LOGITS), atol=0.05)
