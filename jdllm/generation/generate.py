"""Noise -> latents -> hidden states -> tokens, as pure functions; the frozen language model has no part in it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.kernels import fused, op
from jdllm.kernels.cross_entropy import most_likely_tokens
from jdllm.kernels.quantize import quantized_weights
from jdllm.kernels.tables import StepTables, step_tables
from jdllm.kernels.tiling import Tiling, tiling
from jdllm.model.ldlm import LDLM, Model, Params
from jdllm.model.standardize import LatentStats, standardize


def latents_to_tokens(module: LDLM, z: Float[Array, "b k d"], dtype: jnp.dtype) -> Int[Array, "b t"]:
    """Latent decoder, token decoder, argmax."""
    states = module.token_decoder.states(module.decoder(z.astype(dtype)))
    return most_likely_tokens(states, module.token_decoder.head[...])


def make_denoise(module: LDLM, guidance: float | Array, guided: bool, dtype: jnp.dtype) -> samplers.Denoise:
    """The trained denoiser as the samplers want it: one modulation (6, d) for the whole batch, float32 in and out.

    Self-conditioning guidance moves the estimate further along x(previous) - x(no previous); both are computed as one
    batch of twice the size.
    """

    def denoise(z: Array, modulation: Float[Array, "6 d"], previous: Array) -> Array:
        inputs = (z, previous)
        if guided:
            inputs = (jnp.concatenate([z, z]), jnp.concatenate([previous, jnp.zeros_like(previous)]))
        modulation = jnp.broadcast_to(modulation, (len(inputs[0]), *modulation.shape))
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
        conditions=module.denoiser.modulation(
            times
        ),  # all at once: these weights are read once a call, not once a step
    )
    return latents_to_tokens(module, z, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames=("model", "sampler", "dtype", "tiling", "launch"))
def generate_fused(
    model: Model,
    params: Params,
    frozen: Params,
    weights: fused.FusedWeights,
    tables: StepTables,
    key: Array,
    temperature: float,
    *,
    sampler: str,
    dtype: str,
    tiling: Tiling,
    launch: fused.Launch,
) -> Int[Array, "num t"]:
    """The same with the denoising loop as one launch; `weights` and `tables` hold what does not depend on the noise."""
    z = fused.denoise_fused(
        weights,
        tables,
        key,
        temperature,
        model.config.model,
        tiling=tiling,
        launch=launch,
        sampler=sampler,
        dtype=dtype,
    )
    return latents_to_tokens(model.merge(params, frozen), z, jnp.dtype(dtype))


_fused_weights = jax.jit(fused.fused_weights, static_argnames=("tiling", "dtype"))


@functools.partial(jax.jit, static_argnames=("model", "sampler"))
def _fused_tables(model: Model, params: Params, frozen: Params, times: Array, *, sampler: str) -> StepTables:
    modulation = model.merge(params, frozen).denoiser.modulation(times[:-1])
    schedule = TangentSchedule(model.config.diffusion.schedule_d)
    return step_tables(params["denoiser"], modulation, times, schedule, sampler)


PROGRAM_STEPS = 128
"""The plain loop is compiled for multiples of this many steps, so that trying step counts costs no compilation."""


class Program:
    """`num` windows of tokens in `steps` steps by one implementation; what does not depend on the noise is done here.

    `edges` is the timestep warp; `implementation` is `auto` or one of op.IMPLEMENTATIONS.  ConfigError when that one cannot
    run here.  Calling it does not wait for the device.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        frozen: Params,
        edges: Float[Array, " n+1"],
        *,
        num: int,
        steps: int,
        sampler: str = "ddim",
        grid: str = "u",
        guided: bool = False,
        dtype: str,
        implementation: str = "auto",
    ):
        shapes, weights = model.config.model, quantized_weights(params)
        self.choice = op.choose(
            implementation, shapes, num=num, guided=guided, sampler=sampler, dtype=dtype, weights=weights
        )
        times = samplers.time_grid(edges, steps, grid=grid, sampler=sampler)
        if self.choice.implementation == "triton":
            cut = tiling(shapes, num, op.programs())
            packed = _fused_weights(params["denoiser"], tiling=cut, dtype=dtype)
            tables = _fused_tables(model, params, frozen, times, sampler=sampler)
            options = {"sampler": sampler, "dtype": dtype, "tiling": cut, "launch": op.launch_options()}
            self._call = lambda key, temperature, guidance: generate_fused(
                model, params, frozen, packed, tables, key, temperature, **options
            )
        else:
            times = jnp.pad(times, (0, -len(times) % PROGRAM_STEPS))
            options = {"num": num, "sampler": sampler, "guided": guided, "dtype": dtype}
            self._call = lambda key, temperature, guidance: generate(
                model, params, frozen, key, times, steps, temperature, guidance, **options
            )

    def __call__(self, key: Array, temperature: float = 1.0, guidance: float = 0.0) -> Int[Array, "num t"]:
        """Tokens of the noise that `key` draws; `guidance` is read where the program is guided."""
        return self._call(key, temperature, guidance)


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
    modulation = module.denoiser.modulation(tau[None])[0]
    x0 = make_denoise(module, guidance, guided, jnp.dtype(dtype))(z, modulation, previous)
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
