"""Noise -> latents -> hidden states -> tokens, as pure functions; the frozen language model has no part in it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.kernels.cross_entropy import most_likely_tokens
from jdllm.model.ldlm import LDLM, Model, Params
from jdllm.model.standardize import LatentStats, standardize


def latents_to_tokens(module: LDLM, z: Float[Array, "b k d"], dtype: jnp.dtype) -> Int[Array, "b t"]:
    """Latent decoder, token decoder, argmax."""
    states = module.token_decoder.states(module.decoder(z.astype(dtype)))
    return most_likely_tokens(states, module.token_decoder.head[...])


def make_denoise(module: LDLM, guidance: float | Array, guided: bool, dtype: jnp.dtype) -> samplers.Denoise:
    """The trained denoiser as the samplers want it: one time for the whole batch, float32 in and out.

    Self-conditioning guidance moves the estimate further along x(previous) - x(no previous); both are computed as one
    batch of twice the size.
    """

    def denoise(z: Array, tau: Array, previous: Array) -> Array:
        inputs = (z, previous)
        if guided:
            inputs = (jnp.concatenate([z, z]), jnp.concatenate([previous, jnp.zeros_like(previous)]))
        rows = inputs[0].shape[0]
        modulation = jnp.broadcast_to(module.denoiser.modulation(tau[None]), (rows, 6, z.shape[-1]))
        x0 = module.denoiser(inputs[0].astype(dtype), modulation, inputs[1].astype(dtype)).astype(jnp.float32)
        if guided:
            with_previous, without = jnp.split(x0, 2)
            x0 = with_previous + guidance * (with_previous - without)
        return x0

    return denoise


@functools.partial(jax.jit, static_argnames=("model", "num", "sampler", "guided", "dtype"))
def generate(
    model: Model,
    params: Params,
    frozen: Params,
    key: Array,
    times: Float[Array, " m"],
    steps: int,
    temperature: float,
    guidance: float,
    *,
    num: int,
    sampler: str,
    guided: bool,
    dtype: str,
) -> Int[Array, "num t"]:
    """`num` windows of tokens from noise, in one program that serves every number of `steps` below len(times).

    `params` are in `dtype`; `times` comes from samplers.time_grid, padded; `guidance` is read where `guided`.
    """
    config, module = model.config, model.merge(params, frozen)
    z = samplers.sample(
        key,
        make_denoise(module, guidance, guided, jnp.dtype(dtype)),
        (num, config.model.num_latents, config.model.latent_dim),
        TangentSchedule(config.diffusion.schedule_d),
        times,
        steps=steps,
        sampler=sampler,
        temperature=temperature,
    )
    return latents_to_tokens(module, z, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("model", "dtype", "guided"))
def estimate_and_read(
    model: Model,
    params: Params,
    frozen: Params,
    z: Float[Array, "b k d"],
    tau: Float[Array, ""],
    previous: Float[Array, "b k d"],
    guidance: float,
    *,
    guided: bool,
    dtype: str,
) -> tuple[Float[Array, "b k d"], Int[Array, "b t"]]:
    """One denoising estimate and its tokens, for watching text form step by step."""
    module = model.merge(params, frozen)
    x0 = make_denoise(module, guidance, guided, jnp.dtype(dtype))(z, tau, previous)
    return x0, latents_to_tokens(module, x0, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def encode(
    model: Model,
    params: Params,
    frozen: Params,
    stats: LatentStats,
    hidden: Float[Array, "b t dh"],
    lengths: Int[Array, " b"],
    *,
    dtype: str,
) -> Float[Array, "b k d"]:
    """Standardised latents of standardised hidden states, by running statistics."""
    raw = model.merge(params, frozen).encoder(hidden.astype(dtype), lengths)
    return standardize(raw, stats, model.config.model.standardize)


@functools.partial(jax.jit, static_argnames=("model", "dtype"))
def decode(model: Model, params: Params, frozen: Params, z: Float[Array, "b k d"], *, dtype: str) -> Int[Array, "b t"]:
    """Tokens of latents."""
    return latents_to_tokens(model.merge(params, frozen), z, jnp.dtype(dtype))
