"""From noise to latents in a few steps.  Knows a denoiser only as a function, so an oracle can stand in for it.

All samplers walk a grid of times from 1 down, carry the last estimate as self-conditioning, and return the estimate x0 of
the last step, never a half-noisy state: the decoder is trained to read clean latents and says so with every argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.diffusion.schedule import TangentSchedule
from jdllm.diffusion.timesteps import warp

Denoise = Callable[[Float[Array, "b k d"], Any, Float[Array, "b k d"]], Float[Array, "b k d"]]
"""(z_tau, tau or what was given in its place, previous estimate) -> estimate of z."""

SAMPLERS = ("ddim", "sde", "early_stop", "dpmpp")
EARLY_STOP_SHARE = 0.75
"""`early_stop` walks only this part of its grid in u: its steps are finer, and the last noise levels are left out."""
GRIDS = ("u", "tau", "u_late")
LATE = 0.25
"""The grid `u_late` makes its last estimate this part of a step before the end, instead of a whole one."""


def time_grid(
    edges: Float[Array, " n+1"], steps: int, *, grid: str = "u", sampler: str = "ddim"
) -> Float[Array, " s+1"]:
    """`steps` times to visit, falling from 1, and the time after the last; uniform in the warped u or in tau itself.

    `u_late` has larger steps, the last but one of which ends nearly clean: what to do with the last step is a choice of
    where the estimate that is returned is made.
    """
    end = 1.0 - EARLY_STOP_SHARE if sampler == "early_stop" else 0.0
    u = jnp.linspace(1.0, end, steps + 1)
    if grid == "u_late":
        u = jnp.append(jnp.linspace(1.0, end + LATE * (1.0 - end) / steps, steps), end)
    return u if grid == "tau" else warp(edges, u)


def step(
    z: Float[Array, "b k d"],
    x0: Float[Array, "b k d"],
    noise: Float[Array, "b k d"],
    tau: Float[Array, ""],
    tau_next: Float[Array, ""],
    schedule: TangentSchedule,
    sampler: str,
) -> Float[Array, "b k d"]:
    """The state at `tau_next` given the state and the estimate at `tau`.

    DDIM (arXiv 2010.02502, eta = 0) keeps the noise that the estimate implies.  `sde` draws from the Gaussian posterior
    q(z_next | z, x0), which is the reverse SDE solved exactly for a constant estimate (arXiv 2107.00630, eq. 26).
    """
    (alpha, sigma), (alpha_next, sigma_next) = schedule.alpha_sigma(tau), schedule.alpha_sigma(tau_next)
    if sampler == "sde":
        # sigma_{t|s}^2 of the forward step from tau_next to tau, through ratios that stay finite at tau = 1
        ratio = alpha / jnp.maximum(alpha_next, 1e-6)
        added = jnp.maximum(sigma**2 - ratio**2 * sigma_next**2, 0.0)
        mean = (ratio * sigma_next**2 * z + alpha_next * added * x0) / sigma**2
        return mean + sigma_next * jnp.sqrt(added) / sigma * noise
    return alpha_next * x0 + sigma_next * (z - alpha * x0) / sigma


def ahead(
    x0: Float[Array, "b k d"],
    previous: Float[Array, "b k d"],
    times: Float[Array, " s+1"],
    index: Int[Array, ""] | int,
    schedule: TangentSchedule,
    sampler: str,
) -> Float[Array, "b k d"]:
    """The estimate that step `index` makes for: the newest, or with `dpmpp` where it will be in the middle of the step.

    That is DPM-Solver++(2M) (arXiv 2211.01095): a line through the last two estimates in log(alpha / sigma), then DDIM's step.
    Where the line has no slope, because there is no estimate before or a step is infinite, the newest estimate is taken.
    """
    if sampler != "dpmpp":
        return x0
    alpha, sigma = schedule.alpha_sigma(times[jnp.array([jnp.maximum(index - 1, 0), index, index + 1])])
    before, here, there = jnp.log(alpha / sigma)
    weight = 0.5 * (there - here) / (here - before)
    return x0 + jnp.where(jnp.isfinite(weight), weight, 0.0) * (x0 - previous)


def sample(
    key: jax.Array,
    denoise: Denoise,
    shape: tuple[int, int, int],
    schedule: TangentSchedule,
    times: Float[Array, " s+1"],
    *,
    steps: Int[Array, ""] | int | None = None,
    sampler: str = "ddim",
    temperature: float | Float[Array, ""] = 1.0,
    conditions: Any = None,
) -> Float[Array, "b k d"]:
    """Latents of the given shape (b, k, d) after one evaluation of `denoise` at each of the first `steps` of `times`.

    `times` holds at least steps + 1 values; by default steps = len(times) - 1.  A traced `steps` lets one program serve
    every step count.  `temperature` scales the initial noise (and the fresh noise of `sde`).  `conditions` is what `denoise`
    is given instead of the time: a pytree whose leaves have a row for each of `times`.
    """
    conditions = times if conditions is None else conditions
    first, later = jax.random.split(key)
    z = temperature * jax.random.normal(first, shape)

    def body(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        z, previous = carry
        x0 = denoise(z, jax.tree.map(lambda rows: rows[index], conditions), previous)
        noise = temperature * jax.random.normal(jax.random.fold_in(later, index), shape) if sampler == "sde" else z
        heading = ahead(x0, previous, times, index, schedule, sampler)
        return step(z, heading, noise, times[index], times[index + 1], schedule, sampler), x0

    steps = times.shape[0] - 1 if steps is None else steps
    return jax.lax.fori_loop(0, steps, body, (z, jnp.zeros(shape)))[1]
