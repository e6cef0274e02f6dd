"""Latent encoder and decoder: positions matter, padding does not, k may be smaller than t."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.model.ldlm import Model


@pytest.fixture(scope="module")
def encode(tiny, shaken):
    """encode(hidden, lengths, k=8): raw latents."""
    made = {}

    def encode(hidden, lengths, k=8, path=True):
        if (k, path) not in made:
            model = Model(tiny.replace(model__num_latents=k, model__positional_path=path))
            params = shaken(model.init(jax.random.key(0)))
            made[k, path] = jax.jit(lambda h, n: model.merge(params, {}).encoder(h, n)), params, model
        return made[k, path][0](hidden, lengths)

    return encode


@pytest.fixture(scope="module")
def decode(tiny, shaken):
    """decode(z): hidden states."""
    made = {}

    def decode(z, k=8, path=True):
        if (k, path) not in made:
            model = Model(tiny.replace(model__num_latents=k, model__positional_path=path))
            params = shaken(model.init(jax.random.key(0)))
            made[k, path] = jax.jit(lambda z: model.merge(params, {}).decoder(z))
        return made[k, path](z)

    return decode


def hidden_states(rows=3, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, 8, 12)), jnp.float32)


def latents(k=8, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, k, 16)), jnp.float32)


@pytest.mark.parametrize("k", [8, 4, 2, 1])
def test_latents_are_k_and_the_decoder_gives_t_back(k, encode, decode):
    z = encode(hidden_states(), jnp.array([8, 5, 1]), k)
    assert z.shape == (3, k, 16) and np.isfinite(z).all()
    assert decode(z, k).shape == (3, 8, 12)


@pytest.mark.parametrize("k", [8, 4])
def test_what_stands_behind_the_end_of_a_text_changes_no_latent(k, encode):
    lengths = jnp.array([8, 5, 1])
    padding = jnp.arange(8)[None, :, None] >= lengths[:, None, None]
    for value in (1e4, jnp.nan):
        spoilt = jnp.where(padding, value, hidden_states())
        np.testing.assert_array_equal(encode(spoilt, lengths, k), encode(hidden_states(), lengths, k))


def test_the_length_itself_matters(encode):
    assert not np.allclose(encode(hidden_states(), jnp.array([8, 8, 8])), encode(hidden_states(), jnp.array([7, 7, 7])))


@pytest.mark.parametrize("path", [True, False])
def test_order_of_tokens_matters(path, encode):
    """Latents of a permuted text are not a permutation of the latents."""
    order, lengths = jnp.array([1, 0, 2, 3, 7, 5, 6, 4]), jnp.full(3, 8)
    mixed, plain = (encode(h, lengths, path=path) for h in (hidden_states()[:, order], hidden_states()))
    assert np.abs(mixed - plain).max() > 1e-2 and np.abs(mixed - plain[:, order]).max() > 1e-2


@pytest.mark.parametrize("path", [True, False])
def test_order_of_latents_matters(path, decode):
    order = jnp.array([1, 0, 2, 3, 7, 5, 6, 4])
    mixed, plain = decode(latents()[:, order], path=path), decode(latents(), path=path)
    assert np.abs(mixed - plain).max() > 1e-2 and np.abs(mixed - plain[:, order]).max() > 1e-2


@pytest.mark.parametrize("k", [8, 4])
def test_each_query_starts_from_the_tokens_at_its_own_position(k, encode, tiny):
    """With the path a token moves its own latent most from the very start; without it, all alike."""

    def reach(path):
        def response(token):
            h = hidden_states()
            moved = encode(h.at[:, token].add(1.0), jnp.full(3, 8), k, path) - encode(h, jnp.full(3, 8), k, path)
            return jnp.square(moved).sum((0, 2))

        by_token = jnp.stack([response(token) for token in range(8)])
        own = by_token[jnp.arange(8), jnp.arange(8) // (8 // k)]
        return float((own / by_token.sum(1)).mean())

    assert reach(True) > 2.0 / k > 1.5 * reach(False)


def test_rows_do_not_see_each_other(encode, decode):
    h, lengths = hidden_states(), jnp.array([8, 5, 3])
    np.testing.assert_allclose(encode(h[::-1], lengths[::-1]), encode(h, lengths)[::-1], atol=1e-6)
    np.testing.assert_allclose(decode(latents()[::-1]), decode(latents())[::-1], atol=1e-6)


def test_the_decoder_ignores_the_scale_of_its_latents(decode):
    """Noise raises the norm of latents; what carries the text is their direction."""
    np.testing.assert_allclose(decode(3.0 * latents()), decode(latents()), atol=1e-4)
