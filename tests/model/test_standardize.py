"""Latents have zero mean and unit variance, in training and in use, and constants cannot pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.model.standardize import batch_moments, init_stats, standardize, standardize_batch, update_stats

RNG = np.random.default_rng(0)
PLACE, SCALE = RNG.normal(size=(2, 8, 16)) * [[[3.0]], [[1.0]]] + [[[0.0]], [[2.0]]]
SCALE = np.abs(SCALE) + 0.1


def raw(rows, seed):
    """Encoder outputs with their own mean and scale at each latent index and dimension."""
    return jnp.asarray(PLACE + SCALE * np.random.default_rng(seed).normal(size=(rows, 8, 16)), jnp.float32)


def test_zero_mean_and_unit_variance_over_the_batch_per_index_and_dimension():
    z, _ = standardize_batch(raw(64, 1), "index")
    np.testing.assert_allclose(z.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(z.var(0), 1.0, atol=5e-3)


def test_per_dimension_pools_the_indices():
    z, _ = standardize_batch(raw(64, 1), "dimension")
    np.testing.assert_allclose(z.mean((0, 1)), 0.0, atol=1e-5)
    np.testing.assert_allclose(z.var((0, 1)), 1.0, atol=5e-3)
    assert np.abs(z.mean(0)).max() > 0.1  # the constant per index that `index` takes away


@pytest.mark.parametrize("mode", ["index", "dimension"])
def test_in_use_as_in_training(mode, tiny):
    stats = init_stats(tiny.model)
    for seed in range(300):
        stats = update_stats(stats, standardize_batch(raw(64, seed), mode)[1], 0.98)
    fresh = raw(20_000, 999)
    z = standardize(fresh, stats, mode)
    axes = (0,) if mode == "index" else (0, 1)
    np.testing.assert_allclose(z.mean(axes), 0.0, atol=0.08)
    np.testing.assert_allclose(z.var(axes), 1.0, atol=0.12)
    np.testing.assert_allclose(z, standardize_batch(fresh, mode)[0], atol=0.4)


def test_the_first_batch_alone_already_gives_right_statistics(tiny):
    """The running average is corrected for its start at zero."""
    x = raw(64, 1)
    z, batch = standardize_batch(x, "index")
    stats = update_stats(init_stats(tiny.model), batch, 0.999)
    np.testing.assert_allclose(standardize(x, stats, "index"), z, atol=1e-3)


@pytest.mark.parametrize("mode", ["index", "dimension"])
def test_adding_a_constant_or_a_scale_changes_nothing(mode):
    x = raw(32, 1)
    constant = jnp.asarray(RNG.normal(size=(8, 16) if mode == "index" else (1, 16)) * 5, jnp.float32)
    z = standardize_batch(x, mode)[0]
    np.testing.assert_allclose(standardize_batch(x + constant, mode)[0], z, atol=2e-5)
    np.testing.assert_allclose(standardize_batch(x * 7.0, mode)[0], z, atol=2e-3)


def test_no_gradient_pushes_a_constant():
    """The gradient of any loss through the batch's own statistics sums to zero over the batch: constants are free."""
    target = raw(32, 5)
    grad = jax.grad(lambda x: jnp.square(standardize_batch(x, "index")[0] - target).mean())(raw(32, 1))
    assert np.abs(grad).max() > 1e-5
    np.testing.assert_allclose(grad.sum(0), 0.0, atol=1e-6)


def test_statistics_that_are_kept_carry_no_gradient(tiny):
    def kept(x):
        stats = update_stats(init_stats(tiny.model), standardize_batch(x, "index")[1], 0.9)
        return stats.mean.sum() + stats.variance.sum()

    np.testing.assert_array_equal(jax.grad(kept)(raw(8, 1)), 0.0)


def test_rmsnorm_needs_no_batch(tiny):
    x = raw(4, 1)
    z, stats = standardize_batch(x, "rmsnorm")
    np.testing.assert_allclose(jnp.square(z).mean(-1), 1.0, rtol=1e-4)
    np.testing.assert_allclose(standardize_batch(x[:1], "rmsnorm")[0], z[:1], rtol=1e-5)
    np.testing.assert_array_equal(standardize(x, init_stats(tiny.model), "rmsnorm"), z)
    np.testing.assert_allclose(stats.mean, batch_moments(x, "index")[0])


def test_bfloat16_latents_are_standardised_in_float32():
    z, stats = standardize_batch(raw(64, 1).astype(jnp.bfloat16), "index")
    assert z.dtype == jnp.float32 and stats.variance.dtype == jnp.float32
    np.testing.assert_allclose(z.mean(0), 0.0, atol=1e-5)
