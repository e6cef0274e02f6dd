"""The adaptive timestep distribution: where it goes, and what can never happen to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import DiffusionConfig
from jdllm.diffusion.timesteps import (
    TimestepState,
    cumulative,
    draw_u,
    init_timesteps,
    loss_by_bin,
    update_timesteps,
    warp,
)

CONFIG = DiffusionConfig()
CURVES = {
    "quadratic": lambda tau: 0.1 + 0.8 * tau**2,
    "step near noise": lambda tau: 1.0 / (1.0 + jnp.exp(-30.0 * (tau - 0.8))),
    "step near data": lambda tau: 1.0 / (1.0 + jnp.exp(-30.0 * (tau - 0.2))),
}


@functools.partial(jax.jit, static_argnames=("curve", "steps", "batch", "noise"))
def drive(curve, *, steps, batch, noise, seed=0):
    """The sampler fed with its own draws and a loss that is a known function of tau, times log-normal noise; all states'
    least weight and the last state."""

    def body(state, step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        tau = warp(cumulative(state, CONFIG), draw_u(key, batch))
        loss = curve(tau) * jnp.exp(noise * jax.random.normal(jax.random.fold_in(key, 1), (batch,)) - 0.5 * noise**2)
        state = update_timesteps(state, tau, loss, CONFIG.timestep_decay)
        return state, state.weight.min()

    return jax.lax.scan(body, init_timesteps(CONFIG), jnp.arange(steps))


@pytest.mark.parametrize("name", CURVES)
def test_converges_to_the_optimal_density_plus_the_uniform_share(name):
    """The optimum makes loss grow linearly in u: F(tau) = (L(tau) - L(0)) / (L(1) - L(0))."""
    curve = CURVES[name]
    state, _ = drive(curve, steps=4000, batch=256, noise=0.2)
    tau = np.linspace(0.0, 1.0, CONFIG.timestep_bins + 1)
    low, high = curve(0.0), curve(1.0)
    ideal = (np.asarray(curve(tau)) - low) / (high - low)
    mass = CONFIG.timestep_uniform_mass
    np.testing.assert_allclose(cumulative(state, CONFIG), (1 - mass) * ideal + mass * tau, atol=0.02)


@pytest.mark.parametrize("name", CURVES)
def test_no_bin_is_ever_starved(name):
    state, least = drive(CURVES[name], steps=6000, batch=32, noise=0.5)
    assert least[500:].min() > 0 and np.isfinite(loss_by_bin(state)).all()
    mass = jnp.diff(cumulative(state, CONFIG))
    assert mass.min() >= 0.99 * CONFIG.timestep_uniform_mass / CONFIG.timestep_bins


def test_uniform_until_every_bin_has_been_visited_often_enough():
    uniform = np.linspace(0.0, 1.0, CONFIG.timestep_bins + 1)
    state = init_timesteps(CONFIG)
    assert np.isnan(loss_by_bin(state)).all()  # unvisited, not zero
    np.testing.assert_allclose(cumulative(state, CONFIG), uniform, atol=1e-6)
    many = jnp.full(CONFIG.timestep_bins, 50.0)
    rising = jnp.linspace(0.0, 1.0, CONFIG.timestep_bins) ** 2
    one_missing = TimestepState(many * rising, many.at[37].set(1.0))
    np.testing.assert_allclose(cumulative(one_missing, CONFIG), uniform, atol=1e-6)
    assert np.abs(cumulative(TimestepState(many * rising, many), CONFIG) - uniform).max() > 0.1


def test_the_estimate_is_not_biased_by_its_start():
    """A single visit already gives that loss, not (1 - decay) times it."""
    state = update_timesteps(init_timesteps(CONFIG), jnp.array([0.005, 0.995]), jnp.array([2.0, 4.0]), 0.999)
    loss = loss_by_bin(state)
    assert loss[0] == 2.0 and loss[-1] == 4.0 and np.isnan(loss[1:-1]).all()


def test_every_loss_goes_to_the_bin_of_its_own_time():
    tau = jnp.array([0.0, 0.0999, 0.1, 0.55, 1.0])
    config = DiffusionConfig(timestep_bins=10)
    state = update_timesteps(init_timesteps(config), tau, jnp.arange(5.0), 0.9)
    assert state.weight.tolist() == [2, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert state.loss_sum.tolist() == [1, 2, 0, 0, 0, 3, 0, 0, 0, 4]


def test_the_warp_never_folds_back_whatever_the_estimate():
    for seed in range(20):
        loss = jax.random.uniform(jax.random.key(seed), (CONFIG.timestep_bins,)) ** (1 + seed)
        edges = cumulative(TimestepState(50 * loss, jnp.full(CONFIG.timestep_bins, 50.0)), CONFIG)
        assert (jnp.diff(edges) > 0).all() and edges[0] == 0 and edges[-1] == 1
        tau = warp(edges, jnp.linspace(0.0, 1.0, 1001))
        assert (jnp.diff(tau) >= 0).all() and tau[0] == 0 and tau[-1] == 1


@pytest.mark.parametrize("loss", [jnp.full(100, 0.5), jnp.linspace(1.0, 0.1, 100)])
def test_a_loss_that_does_not_grow_leaves_times_uniform(loss):
    edges = cumulative(TimestepState(50 * loss, jnp.full(100, 50.0)), CONFIG)
    np.testing.assert_allclose(edges, np.linspace(0, 1, 101), atol=1e-5)


def test_uniform_is_uniform_for_ever():
    state, _ = drive(CURVES["quadratic"], steps=4000, batch=64, noise=0.2)
    np.testing.assert_allclose(
        cumulative(state, DiffusionConfig(timesteps="uniform")), np.linspace(0, 1, 101), atol=1e-6
    )


def test_the_state_says_everything(tmp_path):
    """Written to disk and read back, the sampler goes on as if nothing had happened."""
    state, _ = drive(CURVES["quadratic"], steps=4000, batch=64, noise=0.2)
    np.savez(tmp_path / "state.npz", **state._asdict())
    with np.load(tmp_path / "state.npz") as file:
        again = TimestepState(**{name: jnp.asarray(file[name]) for name in file})
    np.testing.assert_array_equal(cumulative(again, CONFIG), cumulative(state, CONFIG))
    more = (jnp.array([0.31]), jnp.array([0.7]), 0.999)
    for a, b in zip(update_timesteps(again, *more), update_timesteps(state, *more)):
        np.testing.assert_array_equal(a, b)


def test_warp_inverts_the_cumulative():
    state, _ = drive(CURVES["step near noise"], steps=4000, batch=64, noise=0.2)
    edges = cumulative(state, CONFIG)
    np.testing.assert_allclose(warp(edges, edges), np.linspace(0, 1, 101), atol=1e-5)


def test_u_falls_once_into_each_interval_and_is_independent_of_the_row():
    draws = jax.jit(jax.vmap(lambda seed: draw_u(jax.random.key(seed), 16)))(jnp.arange(400))
    np.testing.assert_array_equal(jnp.sort(jnp.floor(draws * 16), axis=1), np.tile(np.arange(16), (400, 1)))
    assert (draws >= 0).all() and (draws < 1).all()
    np.testing.assert_allclose(draws.mean(0), 0.5, atol=0.07)  # 5 standard errors: 0.289 / sqrt(400) each
    assert len(np.unique(draws)) > 6000
