"""The noise schedule against its closed form in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.diffusion.schedule import TangentSchedule


@pytest.mark.parametrize("d", [0.5, 1.0, 3.0, 10.0])
def test_equals_the_closed_form(d):
    tau = np.linspace(0.0, 1.0, 1001)[:-1].astype(np.float32)
    alpha, sigma = TangentSchedule(d).alpha_sigma(jnp.asarray(tau))
    bar = 1.0 / (1.0 + d**2 * np.tan(0.5 * np.pi * tau.astype(np.float64)) ** 2)
    np.testing.assert_allclose(alpha, np.sqrt(bar), atol=1e-6)
    np.testing.assert_allclose(sigma, np.sqrt(1.0 - bar), atol=1e-6)


def test_d_of_one_is_the_cosine_schedule():
    tau = np.linspace(0.0, 1.0, 101)
    alpha, sigma = TangentSchedule(1.0).alpha_sigma(jnp.asarray(tau))
    np.testing.assert_allclose(alpha, np.cos(0.5 * np.pi * tau), atol=1e-6)
    np.testing.assert_allclose(sigma, np.sin(0.5 * np.pi * tau), atol=1e-6)


@pytest.mark.parametrize("d", [1.0, 3.0])
def test_end_points_are_exact(d):
    alpha, sigma = TangentSchedule(d).alpha_sigma(jnp.array([0.0, 1.0]))
    assert alpha.tolist() == [1.0, 0.0] and sigma.tolist() == [0.0, 1.0]


def test_variance_is_preserved_and_signal_only_falls():
    alpha, sigma = TangentSchedule().alpha_sigma(jnp.linspace(0.0, 1.0, 10_001))
    np.testing.assert_allclose(alpha**2 + sigma**2, 1.0, atol=1e-6)
    assert (jnp.diff(alpha) < 1e-6).all() and (jnp.diff(sigma) > -1e-6).all()


def test_each_row_gets_the_noise_of_its_own_time():
    z, epsilon = jnp.ones((3, 2, 4)), jnp.full((3, 2, 4), -2.0)
    noisy = TangentSchedule().add_noise(z, jnp.array([0.0, 1.0, 0.3]), epsilon)
    alpha, sigma = TangentSchedule().alpha_sigma(jnp.array(0.3))
    np.testing.assert_array_equal(noisy[0], z[0])
    np.testing.assert_array_equal(noisy[1], epsilon[1])
    np.testing.assert_allclose(noisy[2], alpha - 2 * sigma, rtol=1e-6)
