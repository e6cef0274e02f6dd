"""Samplers with a denoiser that knows the answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.diffusion.samplers import SAMPLERS, sample, step, time_grid
from jdllm.diffusion.schedule import TangentSchedule

SCHEDULE = TangentSchedule()
SHAPE = (2, 5, 8)
STEPS = (1, 2, 4, 10, 50)
Z, WRONG = (np.asarray(jax.random.normal(jax.random.key(seed), SHAPE)) for seed in (1, 2))
GRIDS = {"uniform": np.linspace(0.0, 1.0, 101), "warped": np.linspace(0.0, 1.0, 101) ** 4}


def oracle(z_tau, tau, previous):
    return jnp.asarray(Z)


def errs_with_the_noise(z_tau, tau, previous):
    return Z + 0.3 * SCHEDULE.alpha_sigma(tau)[1] * WRONG


def lets_noise_through(z_tau, tau, previous):
    """The error depends on the state, so it is carried along the whole walk."""
    alpha, sigma = SCHEDULE.alpha_sigma(tau)
    return Z + 0.3 * sigma * (z_tau - alpha * Z)


def counts(z_tau, tau, previous):
    return previous + 1.0


def returns_the_state(z_tau, tau, previous):
    return z_tau


def mixes(z_tau, tau, previous):
    return 0.8 * z_tau + 0.1 * previous + tau


one_program = functools.partial(jax.jit, static_argnames=("denoise", "sampler", "shape"))


@one_program
def padded(times, steps, denoise, sampler, seed=0, temperature=1.0, shape=SHAPE):
    key = jax.random.key(seed)
    return sample(key, denoise, shape, SCHEDULE, times, steps=steps, sampler=sampler, temperature=temperature)


def walk(denoise, steps, *, sampler="ddim", grid="uniform", **options):
    """`sample` on the grid of that many steps; one program for every step count, as generation does it."""
    times = time_grid(jnp.asarray(GRIDS[grid]), steps, sampler=sampler)
    return padded(jnp.pad(times, (0, 64 - len(times))), steps, denoise, sampler, **options)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_oracle_denoiser_recovers_z_at_any_step_count(sampler, grid):
    for steps in STEPS:
        np.testing.assert_array_equal(walk(oracle, steps, sampler=sampler, grid=grid), Z)


@pytest.mark.parametrize(
    ("denoise", "sampler", "grid"),
    [(errs_with_the_noise, sampler, grid) for sampler in SAMPLERS for grid in GRIDS]
    + [(lets_noise_through, "ddim", "uniform")],
)
def test_more_steps_never_raise_the_error_of_a_slightly_wrong_oracle(denoise, sampler, grid):
    errors = [float(np.sqrt(np.square(walk(denoise, steps, sampler=sampler, grid=grid) - Z).mean())) for steps in STEPS]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0], errors


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("tau", "tau_next"), [(1.0, 0.9), (1.0, 0.4), (0.7, 0.65), (0.5, 0.1), (0.2, 0.0)])
def test_a_step_from_the_marginal_ends_in_the_marginal(sampler, tau, tau_next):
    """z_tau ~ N(alpha z, sigma^2) goes to N(alpha_next z, sigma_next^2) when the estimate is right; by Monte Carlo."""
    n, z = 40_000, 1.7
    noise, fresh = np.random.default_rng(0).normal(size=(2, n, 1, 1)).astype(np.float32)
    alpha, sigma = SCHEDULE.alpha_sigma(jnp.array(tau))
    x0 = jnp.full((n, 1, 1), z)
    out = step(alpha * z + sigma * noise, x0, fresh, jnp.array(tau), jnp.array(tau_next), SCHEDULE, sampler)
    alpha_next, sigma_next = SCHEDULE.alpha_sigma(jnp.array(tau_next))
    assert abs(out.mean() - alpha_next * z) < 5 * sigma_next / n**0.5 + 1e-5
    assert abs(out.var() - sigma_next**2) < 5 * sigma_next**2 * (2 / n) ** 0.5 + 1e-6


@pytest.mark.parametrize(("tau", "tau_next"), [(0.9, 0.6), (0.5, 0.1)])
def test_an_sde_step_has_the_moments_of_the_gaussian_posterior(tau, tau_next):
    """q(z_next | z_tau, x0) by Bayes' rule in float64: prior N(a_s x0, s_s^2), likelihood N(r z_next, s_t^2 - r^2 s_s^2)."""
    bar_t, bar_s = (1 / (1 + 9 * np.tan(0.5 * np.pi * t) ** 2) for t in (tau, tau_next))
    ratio, x0, z = (bar_t / bar_s) ** 0.5, -0.8, 1.3
    added = (1 - bar_t) - ratio**2 * (1 - bar_s)
    variance = 1 / (1 / (1 - bar_s) + ratio**2 / added)
    mean = variance * (bar_s**0.5 * x0 / (1 - bar_s) + ratio * z / added)

    def at(noise):
        whole = (jnp.full((1, 1, 1), value) for value in (z, x0, noise))
        return step(*whole, jnp.array(tau), jnp.array(tau_next), SCHEDULE, "sde").item()

    np.testing.assert_allclose(at(0.0), mean, rtol=1e-4)
    np.testing.assert_allclose(at(1.0) - at(0.0), variance**0.5, rtol=1e-4)


def test_dpmpp_is_of_second_order_and_ddim_of_first():
    """Scalars from N(0, s^2), whose estimate and whose path from any noise are known in closed form."""
    spread = 0.5**2

    def variance(tau):
        alpha, sigma = SCHEDULE.alpha_sigma(tau)
        return alpha**2 * spread + sigma**2

    def gaussian(z_tau, tau, previous):
        return SCHEDULE.alpha_sigma(tau)[0] * spread * z_tau / variance(tau)

    def error(steps, sampler):
        times = jnp.linspace(0.9, 0.1, steps)
        found = sample(jax.random.key(0), gaussian, SHAPE, SCHEDULE, jnp.append(times, 0.0), sampler=sampler)
        start = jax.random.normal(jax.random.split(jax.random.key(0))[0], SHAPE)
        last = times[-1]
        exact = gaussian(start * jnp.sqrt(variance(last) / variance(times[0])), last, None)
        return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))

    errors = {sampler: [error(steps, sampler) for steps in (11, 21, 41)] for sampler in ("ddim", "dpmpp")}
    print(errors)
    for sampler, order in (("ddim", 1), ("dpmpp", 2)):
        coarse, finer, finest = errors[sampler]
        assert 0.7 * 2**order < coarse / finer and 0.7 * 2**order < finer / finest, errors
    assert errors["dpmpp"][0] < 0.3 * errors["ddim"][0]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_result_is_the_last_estimate_and_each_estimate_sees_the_one_before(sampler):
    np.testing.assert_array_equal(walk(counts, 7, sampler=sampler), 7.0)


def test_the_walk_starts_in_unit_noise_times_the_temperature():
    noise = walk(returns_the_state, 1, shape=(8, 40, 50))
    assert abs(noise.mean()) < 0.04 and abs(noise.var() - 1) < 0.06
    cold = walk(returns_the_state, 1, shape=(8, 40, 50), temperature=0.5)
    np.testing.assert_allclose(cold, 0.5 * noise, rtol=1e-6)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_padding_of_the_grid_is_never_visited(sampler):
    """A program for all step counts does what one made for exactly this grid does."""
    times = time_grid(jnp.asarray(GRIDS["warped"]), 9, sampler=sampler)
    exact = jax.jit(lambda times: sample(jax.random.key(0), mixes, SHAPE, SCHEDULE, times, sampler=sampler))
    np.testing.assert_allclose(walk(mixes, 9, sampler=sampler, grid="warped"), exact(times), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_key_gives_the_same_walk(sampler):
    np.testing.assert_array_equal(walk(mixes, 5, sampler=sampler, seed=3), walk(mixes, 5, sampler=sampler, seed=3))
    assert not np.allclose(walk(mixes, 5, sampler=sampler, seed=3), walk(mixes, 5, sampler=sampler, seed=4))


def test_the_grid_follows_the_warp_or_tau():
    edges = jnp.asarray(GRIDS["warped"])
    np.testing.assert_allclose(time_grid(edges, 4, grid="tau"), [1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    warped = time_grid(edges, 4)
    np.testing.assert_allclose(np.interp(warped, GRIDS["uniform"], edges), [1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    assert warped[0] == 1 and warped[-1] == 0


def test_a_late_grid_takes_larger_steps_and_estimates_nearly_at_the_end():
    edges = jnp.asarray(GRIDS["uniform"])
    np.testing.assert_allclose(time_grid(edges, 4, grid="u_late"), np.append(np.linspace(1, 1 / 16, 4), 0), atol=1e-6)
    np.testing.assert_allclose(time_grid(edges, 1, grid="u_late"), [1, 0])
    early = time_grid(edges, 4, grid="u_late", sampler="early_stop")
    assert early[-1] == pytest.approx(0.25) and early[-2] > early[-1]


def test_early_stop_walks_finer_and_leaves_out_the_last_noise_levels():
    edges = jnp.asarray(GRIDS["uniform"])
    whole, early = time_grid(edges, 10), time_grid(edges, 10, sampler="early_stop")
    assert early[0] == 1 and early[-1] == pytest.approx(0.25) and jnp.diff(early)[0] > jnp.diff(whole)[0]
