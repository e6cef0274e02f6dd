"""The denoiser: time, previous estimate and order all reach the output, and rows stay apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.model.denoiser import time_features
from jdllm.model.ldlm import Model

Z, PREVIOUS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8, 16)), jnp.float32)
TAU = jnp.array([0.1, 0.5, 0.9])


@pytest.fixture(scope="module")
def denoise(tiny, shaken):
    model = Model(tiny)
    params = shaken(model.init(jax.random.key(0)))

    @jax.jit
    def denoise(z, tau, previous):
        denoiser = model.merge(params, {}).denoiser
        return denoiser(z, denoiser.modulation(tau), previous)

    return denoise


def test_every_input_matters_to_its_own_row_alone(denoise):
    out = denoise(Z, TAU, PREVIOUS)
    assert out.shape == Z.shape
    others = (
        denoise(Z.at[1].add(1), TAU, PREVIOUS),
        denoise(Z, TAU.at[1].add(0.1), PREVIOUS),
        denoise(Z, TAU, PREVIOUS.at[1].add(1)),
    )
    for other in others:
        assert np.abs(other - out)[1].max() > 1e-3
        np.testing.assert_allclose(other[::2], out[::2], atol=1e-6)


def test_order_of_latents_matters(denoise):
    order = jnp.array([1, 0, 2, 3, 7, 5, 6, 4])
    out = denoise(Z[:, order], TAU, PREVIOUS[:, order])
    assert np.abs(out - denoise(Z, TAU, PREVIOUS)[:, order]).max() > 1e-3


def test_one_modulation_serves_all_rows_of_one_time(denoise, tiny, shaken):
    """Generation computes it for one row and spreads it."""
    model = Model(tiny)
    denoiser = model.merge(shaken(model.init(jax.random.key(0))), {}).denoiser
    one, all_rows = denoiser.modulation(jnp.array([0.4])), denoiser.modulation(jnp.full(3, 0.4))
    assert one.shape == (1, 6, 16)
    np.testing.assert_allclose(jnp.broadcast_to(one, all_rows.shape), all_rows, atol=1e-6)


def test_times_that_differ_by_a_bin_are_told_apart():
    features = time_features(jnp.linspace(0.0, 1.0, 101))
    products = features @ features.T / 128
    assert np.isfinite(features).all() and products[np.triu_indices(101, 1)].max() < 0.95


def test_it_starts_near_zero_and_every_weight_learns(tiny, shaken):
    """Zero is the best guess of standardised latents; a weight without gradient would be dead."""
    model = Model(tiny)
    params = model.init(jax.random.key(0))

    def loss(params):
        denoiser = model.merge(params, {}).denoiser
        return jnp.square(denoiser(Z, denoiser.modulation(TAU), PREVIOUS) - 1.0).mean()

    fresh = model.merge(params, {}).denoiser
    assert np.abs(fresh(Z, fresh.modulation(TAU), PREVIOUS)).max() < 0.1
    grads = jax.jit(jax.grad(loss))(shaken(params))["denoiser"]
    dead = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(grads) if not leaf.any()]
    assert not dead
