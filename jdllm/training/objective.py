"""L = L_diff + L_h + L_w, and the schedules that decide what each part may do to the encoder (docs/design.md, section 3).

The latents enter twice, as `z_diffusion` and `z_decoder`, so that a caller can take the gradient through each path and
weigh them: the encoder is to feel gamma(s) of L_diff, while the denoiser feels all of it.  That is the same as putting
sg(z) + gamma (z - sg(z)) into L_diff, and it gives the two gradient norms for the log without a second backward pass.
Stop-gradients: L_w never reaches latents or latent decoder unless `decoder_loss` is "ce"; the first pass of
self-conditioning is detached.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jdllm.config import Config, ObjectiveConfig
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.diffusion.timesteps import draw_u, warp
from jdllm.kernels.cross_entropy import cross_entropy
from jdllm.model.ldlm import LDLM

GAMMA_STEEPNESS, GAMMA_CENTRE = 10.0, 0.8  # LDLM, eq. 29-30, by way of research/ldlm.md section 7


class Terms(NamedTuple):
    """What one evaluation of the losses reports; scalars unless said otherwise."""

    loss_diffusion: Float[Array, ""]
    loss_hidden: Float[Array, ""]
    loss_token: Float[Array, ""]
    token_accuracy: Float[Array, ""]
    """Share of valid tokens that come back through the noisy decoder."""
    tau: Float[Array, " b"]
    loss_by_row: Float[Array, " b"]
    """Denoising loss of each row at its tau."""


def gamma_at(progress: Float[Array, ""], config: ObjectiveConfig) -> Float[Array, ""]:
    """Share of the diffusion gradient that reaches the encoder after `progress` steps of an open gate."""

    def sigmoid(x: Array | float) -> Array:
        return jax.nn.sigmoid(GAMMA_STEEPNESS * (x - GAMMA_CENTRE))

    x = jnp.clip(progress / config.gamma_warmup_steps, 0.0, 1.0)
    rise = (sigmoid(x) - sigmoid(0.0)) / (sigmoid(1.0) - sigmoid(0.0))
    low = min(config.gamma_min, config.gamma_max)
    return low + (config.gamma_max - low) * rise


def decoder_noise_bound(step: Int[Array, ""], config: ObjectiveConfig) -> Float[Array, ""]:
    """Largest standard deviation of the decoder's noise at this step: a tenth of it at first, then a linear ramp."""
    ramp = max(config.decoder_noise_ramp_steps, 1)
    return config.decoder_noise * jnp.minimum(1.0, 0.1 + 0.9 * step / ramp)


def decoder_sigma(key: jax.Array, batch: int, bound: Float[Array, ""], law: str) -> Float[Array, "b 1 1"]:
    """Noise level of each example."""
    unit = jax.random.uniform(key, (batch, 1, 1)) if law == "uniform" else jnp.ones((batch, 1, 1))
    return bound * unit


def masked_mean(x: Float[Array, "b t"], mask: Bool[Array, "b t"]) -> Float[Array, ""]:
    """Mean over the valid positions of the whole batch."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(mask.sum(), 1)


def spread_rows(batch: int, share: float) -> Int[np.ndarray, " r"]:
    """The `share` of a batch's rows that lies evenly over it; rows are in random order already, so none need be drawn."""
    return np.flatnonzero(np.diff(np.floor(np.arange(batch + 1) * share + 1e-9)))


def token_cross_entropy(
    states: Float[Array, "b t w"], head: Float[Array, "w v"], ids: Int[Array, "b t"]
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Negative log-likelihood in nats of each token, and 1 where it is the most likely one."""
    nll, best = cross_entropy(states.reshape(-1, states.shape[-1]), head, ids.reshape(-1))
    return nll.reshape(ids.shape), (best.reshape(ids.shape) == ids).astype(jnp.float32)


def denoise_with_self_conditioning(
    model: LDLM,
    z_tau: Float[Array, "b k d"],
    tau: Float[Array, " b"],
    probability: float,
    dtype: jnp.dtype,
) -> Float[Array, "b k d"]:
    """The estimate that L_diff judges.  A share `probability` of the rows first makes a detached estimate from zeros.

    The first pass runs on those rows only.
    """
    z_tau = z_tau.astype(dtype)
    modulation = model.denoiser.modulation(tau)
    previous = jnp.zeros_like(z_tau)
    rows = spread_rows(len(z_tau), probability)
    if len(rows):
        first = model.denoiser(z_tau[rows], modulation[rows], previous[rows])
        previous = previous.at[rows].set(jax.lax.stop_gradient(first))
    return model.denoiser(z_tau, modulation, previous).astype(jnp.float32)


def losses(
    model: LDLM,
    z_diffusion: Float[Array, "b k d"],
    z_decoder: Float[Array, "b k d"],
    hidden: Float[Array, "b t dh"],
    ids: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    key: jax.Array,
    noise_bound: Float[Array, ""],
    edges: Float[Array, " n+1"],
    config: Config,
) -> tuple[Float[Array, ""], Terms]:
    """Total loss and its terms.  `hidden` is standardised; `edges` is the timestep warp at the bin edges of tau."""
    o, schedule = config.objective, TangentSchedule(config.diffusion.schedule_d)
    dtype = jnp.dtype(config.training.compute_dtype)
    keys = jax.random.split(key, 4)

    tau = warp(edges, draw_u(keys[0], len(ids)))
    z_tau = schedule.add_noise(z_diffusion, tau, jax.random.normal(keys[1], z_diffusion.shape))
    estimate = denoise_with_self_conditioning(model, z_tau, tau, o.self_conditioning, dtype)
    loss_by_row = jnp.square(estimate - z_diffusion).mean((1, 2))
    loss_diffusion = loss_by_row.mean()

    if o.decoder_share < 1:
        rows = spread_rows(len(ids), o.decoder_share)
        z_decoder, hidden, ids, lengths = z_decoder[rows], hidden[rows], ids[rows], lengths[rows]
    mask = jnp.arange(ids.shape[1]) < lengths[:, None]
    sigma = decoder_sigma(keys[2], len(ids), noise_bound, o.decoder_noise_law)
    noisy = z_decoder + sigma * jax.random.normal(keys[3], z_decoder.shape)
    predicted = model.decoder(noisy.astype(dtype))
    error = jnp.square(predicted.astype(jnp.float32) - hidden.astype(jnp.float32)).mean(-1)
    loss_hidden = masked_mean(error, mask)

    read = jax.lax.stop_gradient(predicted) if o.decoder_loss == "mse" else predicted
    states = model.token_decoder.states(read)
    nll, right = token_cross_entropy(states, model.token_decoder.head[...], ids)
    loss_token, accuracy = masked_mean(nll, mask), masked_mean(right, mask)

    total = loss_diffusion + loss_token + (loss_hidden if o.decoder_loss == "mse" else 0.0)
    terms = Terms(loss_diffusion, loss_hidden, loss_token, accuracy, tau, jax.lax.stop_gradient(loss_by_row))
    return total, terms
