"""What is measured on held-out text while training: reconstruction with and without noise, denoising loss by tau.

The probe uses the raw weights and the statistics of its own batch, since it also steers gamma's gate and averaged weights
lag behind; `jdllm eval` judges the averaged weights with running statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.config import Config
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.diffusion.timesteps import draw_u
from jdllm.generation.generate import latents_to_tokens
from jdllm.model.ldlm import Model, Params
from jdllm.model.standardize import standardize_batch
from jdllm.training.objective import masked_mean
from jdllm.training.state import TrainState
from jdllm.training.step import BASELINES, Batch, cast, effective_rank, standardize_hidden

BINS = 10
"""Intervals of tau in the logged curve."""
WINDOWS = 512
"""Most held-out windows in one probe."""


def make_probe(model: Model) -> Callable[[TrainState, Params, Batch], dict[str, Array]]:
    """`probe(state, frozen, batch)` -> reconstruction, reconstruction_noisy, effective_rank, loss_diffusion_bins (10,).

    Of a baseline: nll, in nats per token (exact, or masked diffusion's bound), and token_accuracy.
    """
    config: Config = model.config
    dtype = config.training.compute_dtype

    def probe(state: TrainState, frozen: Params, batch: Batch) -> dict[str, Array]:
        module = model.merge(cast(state.params, dtype), frozen)
        hidden, _ = standardize_hidden(batch["hidden"], state.hidden_mean, state.hidden_std, config.feed.clip, dtype)
        z, _ = standardize_batch(module.encoder(hidden, batch["lengths"]), config.model.standardize)
        key = jax.random.key(config.seed)
        mask = jnp.arange(batch["ids"].shape[1]) < batch["lengths"][:, None]

        def accuracy(z: Float[Array, "b k d"]) -> Float[Array, ""]:
            return masked_mean((latents_to_tokens(module, z, dtype) == batch["ids"]).astype(jnp.float32), mask)

        noise = jax.random.normal(jax.random.fold_in(key, 2), z.shape)
        tau = draw_u(jax.random.fold_in(key, 3), len(z))
        z_tau = TangentSchedule(config.diffusion.schedule_d).add_noise(z, tau, noise).astype(dtype)
        estimate = module.denoiser(z_tau, module.denoiser.modulation(tau), jnp.zeros_like(z_tau))
        loss = jnp.square(estimate.astype(jnp.float32) - z).mean((1, 2))
        bins = jax.nn.one_hot((tau * BINS).astype(jnp.int32), BINS)
        return {
            "reconstruction": accuracy(z),
            "reconstruction_noisy": accuracy(z + config.objective.decoder_noise * noise),
            "effective_rank": effective_rank(z),
            "loss_diffusion_bins": loss @ bins / jnp.maximum(bins.sum(0), 1),
        }

    def token_probe(state: TrainState, frozen: Params, batch: Batch) -> dict[str, Array]:
        module = model.merge(cast(state.params, dtype), frozen)
        key = jax.random.key(config.seed)
        return BASELINES[config.model.kind].held_out(module, batch["ids"], batch["lengths"], key)

    return probe if config.model.kind == "ldlm" else token_probe


def move_gate(state: TrainState, reconstruction: float, rank: float, config: Config) -> TrainState:
    """Open gamma's gate when held-out latents can be read well enough, close it when that is lost; else leave it.

    Clean reconstruction alone is blind to latents that shrink to a few directions, so their effective rank counts too.
    """
    o, floor = config.objective, config.objective.gamma_rank * config.model.latent_dim
    if o.gamma_gate <= 0:
        return state
    if reconstruction < o.gamma_gate - o.gamma_gate_margin or rank < floor:
        return state.replace(gate_open=jnp.zeros_like(state.gate_open))
    if reconstruction >= o.gamma_gate:
        return state.replace(gate_open=jnp.ones_like(state.gate_open))
    return state
