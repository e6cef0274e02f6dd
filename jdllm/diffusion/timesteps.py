"""Where training and sampling spend their noise levels: a warp u -> tau in which the denoising loss grows linearly.

The density of tau is proportional to dL/dtau, L being a running estimate of the loss per bin (LDLM, docs/design.md
section 3; the idea is CDCD's time warping, arXiv 2211.15089).  Traps that a public prototype fell into and that are
closed here: bins start unvisited, not at zero; the average is corrected for its start; a part of the mass always stays
uniform, so no bin starves; noise in the estimate cannot make the warp fold back, because the best
nondecreasing fit is taken (a running maximum would be too high wherever the loss is flat).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.config import DiffusionConfig

READY_WEIGHT = 8.0
"""Visits that every bin needs (counted with decay) before the warp leaves the uniform start."""


class TimestepState(NamedTuple):
    """Decayed sums per bin of tau; their quotient is the loss estimate."""

    loss_sum: Float[Array, " n"]
    weight: Float[Array, " n"]


def init_timesteps(config: DiffusionConfig) -> TimestepState:
    """No bin visited."""
    zeros = jnp.zeros((config.timestep_bins,), jnp.float32)
    return TimestepState(zeros, zeros)


def update_timesteps(
    state: TimestepState, tau: Float[Array, " b"], loss: Float[Array, " b"], decay: float
) -> TimestepState:
    """Account the losses of one batch, each to the bin of its own tau."""
    bins = state.weight.shape[0]
    index = jnp.clip((tau * bins).astype(jnp.int32), 0, bins - 1)
    return TimestepState(
        (decay * state.loss_sum).at[index].add(loss.astype(jnp.float32)), (decay * state.weight).at[index].add(1.0)
    )


def loss_by_bin(state: TimestepState) -> Float[Array, " n"]:
    """Running mean loss per bin of tau; NaN where no sample has been."""
    return jnp.where(state.weight > 0, state.loss_sum / jnp.maximum(state.weight, 1e-12), jnp.nan)


def nondecreasing(values: Float[Array, " n"], weight: Float[Array, " n"]) -> Float[Array, " n"]:
    """Isotonic regression: the nondecreasing sequence nearest to `values` in weighted squares.

    By the min-max formula, max over j <= i of the min over k >= i of the weighted mean of j..k (Robertson, Wright and
    Dykstra, Order Restricted Statistical Inference, 1988), which is a few (n, n) arrays and compiles.
    """
    count = jnp.concatenate([jnp.zeros(1), jnp.cumsum(weight)])
    total = jnp.concatenate([jnp.zeros(1), jnp.cumsum(weight * values)])
    mean = (total[None, 1:] - total[:-1, None]) / jnp.maximum(count[None, 1:] - count[:-1, None], 1e-12)  # [j, k]
    j, k = jnp.indices(mean.shape)
    least = jax.lax.cummin(jnp.where(j <= k, mean, jnp.inf), axis=1, reverse=True)  # [j, i]: over k >= max(i, j)
    return jnp.max(jnp.where(j <= k, least, -jnp.inf), axis=0)


def cumulative(state: TimestepState, config: DiffusionConfig) -> Float[Array, " n+1"]:
    """F at the bin edges of tau: increasing from 0 to 1; the identity until every bin has been visited often enough."""
    bins = config.timestep_bins
    uniform = jnp.linspace(0.0, 1.0, bins + 1)
    if config.timesteps == "uniform":
        return uniform
    centre = nondecreasing(jnp.nan_to_num(loss_by_bin(state)), state.weight)
    first, last = 1.5 * centre[0] - 0.5 * centre[1], 1.5 * centre[-1] - 0.5 * centre[-2]
    edges = jnp.concatenate([first[None], 0.5 * (centre[1:] + centre[:-1]), last[None]])
    growth = jnp.maximum(jnp.diff(edges), 0.0)
    share = growth / jnp.maximum(growth.sum(), 1e-12)
    mass = config.timestep_uniform_mass
    density = mass / bins + (1.0 - mass) * share
    warped = jnp.concatenate([jnp.zeros(1), jnp.cumsum(density)])
    ready = (state.weight.min() >= READY_WEIGHT) & (growth.sum() > 1e-5 * centre.max())  # more than rounding
    return jnp.where(ready, warped / warped[-1], uniform)


def warp(edges: Float[Array, " n+1"], u: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """tau = F^-1(u), linear inside a bin."""
    return jnp.interp(u, edges, jnp.linspace(0.0, 1.0, edges.shape[0]))


def draw_u(key: jax.Array, batch: int) -> Float[Array, " b"]:
    """One u in each of `batch` equal intervals of (0, 1), in random order: low discrepancy, and independent of the row."""
    offset, order = jax.random.split(key)
    u = (jnp.arange(batch) + jax.random.uniform(offset, (batch,))) / batch
    return jax.random.permutation(order, u)
