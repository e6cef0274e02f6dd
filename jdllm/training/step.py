"""One optimiser step: (state, batch) -> (state, metrics), a pure function to be jitted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jdllm.config import Config
from jdllm.diffusion.timesteps import cumulative, update_timesteps
from jdllm.model.ldlm import Model, Params
from jdllm.model.standardize import LatentStats, standardize_batch, update_stats
from jdllm.training import autoregressive, masked
from jdllm.training.objective import Terms, decoder_noise_bound, gamma_at, losses
from jdllm.training.state import TrainState, learning_rate

Batch = dict[str, Array]
"""hidden (b, t, d_h) bfloat16 as the frozen model gave it, ids (b, t) int32, lengths (b,) int32."""
Metrics = dict[str, Array]
DECODERS_LOOKED_AT = 1 / 16
"""Share of a batch on which the losses of decoders that are no longer trained are still logged."""
BASELINES = {"autoregressive": autoregressive, "masked": masked}
"""Objectives on tokens alone, by model.kind; they read no hidden states."""


def cast(params: Params, dtype: str) -> Params:
    """Weights in the arithmetic of the step; the masters stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def standardize_hidden(
    hidden: Float[Array, "b t dh"], mean: Float[Array, " dh"], std: Float[Array, " dh"], clip: float, dtype: str
) -> tuple[Float[Array, "b t dh"], Float[Array, ""]]:
    """Hidden states with zero mean and unit variance per dimension, clipped, and the share of values that were."""
    x = (hidden.astype(jnp.float32) - mean) / std
    return jnp.clip(x, -clip, clip).astype(dtype), (jnp.abs(x) > clip).mean()


def effective_rank(z: Float[Array, "b k d"]) -> Float[Array, ""]:
    """Participation ratio tr(C)^2 / tr(C^2) of the latents' covariance: how many directions carry them, 1 to d."""
    x = z.reshape(-1, z.shape[-1])
    x = x - x.mean(0)
    covariance = x.T @ x / len(x)
    return jnp.square(jnp.trace(covariance)) / jnp.maximum(jnp.square(covariance).sum(), 1e-12)


def gradients(
    model: Model,
    params: Params,
    frozen: Params,
    state: TrainState,
    batch: Batch,
    key: Array,
    *,
    denoiser_alone: bool = False,
) -> tuple[Params, tuple[LatentStats, Terms, Metrics]]:
    """Gradient of one (micro-)batch.  The encoder's is gamma times that of L_diff plus that of the decoder's losses.

    With `denoiser_alone` all but the denoiser's is zero and not computed, the second of two stages; the decoders, which
    stand still there, are then only looked at on a few rows.
    """
    config = model.config
    if denoiser_alone:
        share = min(config.objective.decoder_share, max(DECODERS_LOOKED_AT, 1 / len(batch["ids"])))
        config = config.replace(objective__decoder_share=share)
    dtype = config.training.compute_dtype
    gamma = gamma_at(state.gamma_progress, config.objective)
    bound = decoder_noise_bound(state.step, config.objective)
    edges = cumulative(state.timesteps, config.diffusion)
    hidden, clipped = standardize_hidden(batch["hidden"], state.hidden_mean, state.hidden_std, config.feed.clip, dtype)

    def encode(params: Params) -> tuple[Array, tuple[LatentStats, Array]]:
        raw = model.merge(cast(params, dtype), frozen).encoder(hidden, batch["lengths"]).astype(jnp.float32)
        z, stats = standardize_batch(raw, config.model.standardize)
        share = stats.variance.mean() / jnp.maximum(jnp.square(raw).mean(), 1e-12)
        return z, (stats, share)

    def loss(params: Params, z_diffusion: Array, z_decoder: Array) -> tuple[Array, Terms]:
        return losses(
            model.merge(cast(params, dtype), frozen), z_diffusion, z_decoder, hidden, batch["ids"], batch["lengths"],
            key, bound, edges, config,
        )  # fmt: skip

    if denoiser_alone:
        z, (stats, variance_share) = encode(params)

        def denoiser_loss(denoiser: Params) -> tuple[Array, Terms]:
            return loss({**params, "denoiser": denoiser}, z, z)

        (total, terms), own = jax.value_and_grad(denoiser_loss, has_aux=True)(params["denoiser"])
        grads = {**jax.tree.map(jnp.zeros_like, params), "denoiser": own}
        by_diffusion = by_decoder = jnp.zeros(())
    else:
        z, pull_back, (stats, variance_share) = jax.vjp(encode, params, has_aux=True)
        (total, terms), (grads, by_diffusion, by_decoder) = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
            params, z, z
        )
        by_diffusion = gamma * by_diffusion
        (through_encoder,) = pull_back(by_diffusion + by_decoder)
        grads = jax.tree.map(jnp.add, grads, through_encoder)

    push, hold = jnp.linalg.norm(by_diffusion.ravel()), jnp.linalg.norm(by_decoder.ravel())
    metrics = {
        "loss": total,
        "loss_diffusion": terms.loss_diffusion,
        "loss_hidden": terms.loss_hidden,
        "loss_token": terms.loss_token,
        "token_accuracy": terms.token_accuracy,
        "gamma": gamma,
        "decoder_noise": bound,
        "gradient_share_diffusion": push / (push + hold + 1e-20),
        "gradient_share_hidden": hold / (push + hold + 1e-20),
        "latent_variance": z.var(0).mean(),
        "raw_variance_share": variance_share,
        "effective_rank": effective_rank(z),
        "clipped_fraction": clipped,
    }
    return grads, (stats, terms, metrics)


def token_gradients(
    model: Model, params: Params, frozen: Params, state: TrainState, batch: Batch, key: Array
) -> tuple[Params, tuple[None, None, Metrics]]:
    """The same of a baseline, which keeps no statistics of latents and has no terms to adapt to."""
    config = model.config

    def loss(params: Params) -> tuple[Array, Metrics]:
        module = model.merge(cast(params, config.training.compute_dtype), frozen)
        return BASELINES[config.model.kind].losses(module, batch["ids"], batch["lengths"], key)

    (total, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return grads, (None, None, {"loss": total, **metrics})


def of_this_stage(first: Bool[Array, ""], moved: Params, averaged: Params) -> Params:
    """What was moved, in the first of two stages; in the second all but the denoiser stands still at its running average.

    The average, since it is what generation uses and what a falling learning rate would have led to.
    """
    return {
        part: tree if part == "denoiser" else jax.tree.map(lambda *x: jnp.where(first, *x), tree, averaged[part])
        for part, tree in moved.items()
    }


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Params, Batch, Float[Array, ""]], tuple[TrainState, Metrics]]:
    """`train_step(state, frozen, batch, progress)`; frozen holds the language model's head, or nothing.

    `progress` is how much of the run is over, 0 to 1, for the learning rate.
    """
    config: Config = model.config
    decay, pieces = config.optimizer.ema_decay, config.training.accumulate
    two_stages = config.objective.frozen_after < 1

    def train_step(
        state: TrainState, frozen: Params, batch: Batch, progress: Float[Array, ""]
    ) -> tuple[TrainState, Metrics]:
        first_stage = progress < config.objective.frozen_after

        def gradient(*arguments: Any) -> tuple[Params, Any]:
            if config.model.kind != "ldlm":
                return token_gradients(*arguments)
            if not two_stages:
                return gradients(*arguments)
            both = (functools.partial(gradients, *arguments, denoiser_alone=alone) for alone in (False, True))
            return jax.lax.cond(first_stage, *both)

        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), state.step)

        def piece(grads: Params, inputs: tuple[Batch, Array]) -> tuple[Params, Any]:
            new, rest = gradient(model, state.params, frozen, state, inputs[0], jax.random.fold_in(key, inputs[1]))
            return jax.tree.map(jnp.add, grads, new), rest

        if pieces == 1:
            grads, (stats, terms, metrics) = gradient(model, state.params, frozen, state, batch, key)
        else:
            # Every pieces-th row, so that each device finds its share of a piece among the rows it has.
            split = jax.tree.map(lambda x: x.reshape(-1, pieces, *x.shape[1:]).swapaxes(0, 1), batch)
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            grads, (stats, terms, metrics) = jax.lax.scan(piece, zeros, (split, jnp.arange(pieces)))
            grads = jax.tree.map(lambda g: g / pieces, grads)
            stats, metrics = jax.tree.map(lambda x: x.mean(0), (stats, metrics))

        rate = learning_rate(config.optimizer, state.step, progress)
        metrics |= {"gradient_norm": optax.global_norm(grads), "learning_rate": rate}
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda update: rate * update, updates)
        params = optax.apply_updates(state.params, updates)
        keep = jnp.minimum(decay, (1.0 + state.step) / (10.0 + state.step))  # a short memory while everything is new
        ema_params = jax.tree.map(lambda e, p: keep * e + (1.0 - keep) * p, state.ema_params, params)
        if two_stages:
            params = of_this_stage(first_stage, params, state.ema_params)
            ema_params = of_this_stage(first_stage, ema_params, state.ema_params)
        state = state.replace(step=state.step + 1, params=params, ema_params=ema_params, opt_state=opt_state)
        if config.model.kind != "ldlm":  # statistics, timesteps and gamma stay as they were made
            return state, metrics
        gamma_progress = state.gamma_progress + jnp.where(state.gate_open, 1.0, -1.0)
        state = state.replace(
            latent_stats=update_stats(state.latent_stats, stats, keep),
            timesteps=update_timesteps(
                state.timesteps, terms.tau.ravel(), terms.loss_by_row.ravel(), config.diffusion.timestep_decay
            ),
            gamma_progress=jnp.clip(gamma_progress, 0.0, config.objective.gamma_warmup_steps),
        )
        return state, metrics

    return train_step
