"""A trained run ready to write text: weights, tokenizer and defaults held together for people and for `jdllm generate`.

`jdllm.load(run_dir)` makes one from a run on disk (training/run.py); everything numerical is in generate.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array, Float, Int

from jdllm.config import Config, ConfigError, SamplingConfig
from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.generation import generate
from jdllm.generation.baselines import TokenProgram
from jdllm.kernels.quantize import cast
from jdllm.model.ldlm import Model, Params
from jdllm.model.standardize import LatentStats

OnStep = Callable[[int, int, Int[np.ndarray, "n t"]], None]
OPTIONS = {
    "ldlm": ("num", "steps", "sampler", "grid", "guidance", "temperature"),
    "autoregressive": ("num", "temperature", "top_p"),
    "masked": ("num", "steps", "order", "temperature", "top_p"),
}
"""Fields of SamplingConfig that mean something, by model.kind."""
BATCH = 256
"""Sequences generated in one program; more are generated in several calls, so that memory does not grow with `num`."""
PROGRAMS = 4
"""Programs kept; a fused one holds a packed copy of the denoiser."""


@dataclasses.dataclass
class Generator:
    """Averaged weights of a run and what is needed to turn noise into text with them."""

    config: Config
    params: Params
    """In the arithmetic of `dtype`; matrices may be quantised."""
    frozen: Params
    edges: Float[Array, " n+1"]
    """The timestep warp that the run had learned."""
    latent_stats: LatentStats
    hidden_mean: Float[Array, " dh"]
    hidden_std: Float[Array, " dh"]
    tokenizer: tokenizers.Tokenizer
    eos_id: int
    dtype: str = "float32"
    step: int = 0
    """Optimiser steps behind these weights."""
    implementation: str = "auto"
    """Of the denoising loop: `auto` or one of kernels.op.IMPLEMENTATIONS."""

    def __post_init__(self) -> None:
        self._programs: dict[tuple, generate.Program | TokenProgram] = {}
        self.model = Model(self.config)
        self.params = cast(self.params, self.dtype)

    def sampling(self, **options: Any) -> SamplingConfig:
        """The run's sampling defaults with `options` in their place; ConfigError on an impossible one."""
        kind, given = self.config.model.kind, {k: v for k, v in options.items() if v is not None}
        for name in given:
            if kind == "autoregressive" and name == "steps" and given["steps"] == self.config.model.num_tokens:
                continue  # what it takes anyway
            if name not in OPTIONS[kind]:
                why = ", which takes one step a token" if (kind, name) == ("autoregressive", "steps") else ""
                raise ConfigError(
                    f"no sampling option '{name}' for model.kind={kind}{why}; there are: {', '.join(OPTIONS[kind])}"
                )
        chosen = dataclasses.replace(self.config.sampling, **given)
        if kind == "autoregressive":
            chosen = dataclasses.replace(chosen, steps=self.config.model.num_tokens)
        if chosen.sampler not in samplers.SAMPLERS:
            raise ConfigError(f"sampler={chosen.sampler!r} is not one of {', '.join(samplers.SAMPLERS)}")
        if chosen.grid not in samplers.GRIDS:
            raise ConfigError(f"grid={chosen.grid!r} is not one of {', '.join(samplers.GRIDS)}")
        if chosen.order not in ("confidence", "entropy", "random"):
            raise ConfigError(f"order={chosen.order!r} is not one of confidence, entropy, random")
        if not 0.0 < chosen.top_p <= 1.0:
            raise ConfigError(f"top_p={chosen.top_p} is outside (0, 1]; 1 draws from all tokens")
        if chosen.steps < 1 or chosen.num < 1:
            raise ConfigError(f"steps={chosen.steps} and num={chosen.num} must be at least 1")
        return chosen

    def generate_tokens(
        self, *, seed: int = 0, on_step: OnStep | None = None, **options: Any
    ) -> Int[np.ndarray, "num t"]:
        """Tokens of `num` windows, as they come from the model, EOS and what follows it included.

        Options are those of SamplingConfig: num, steps, sampler, grid, guidance, temperature, or of a baseline what OPTIONS
        names.  The same seed and options give the same tokens.  `on_step(step, total, tokens)` is called after every
        denoising step with the text as it then reads; steps are separate programs in that case, and slower.
        """
        s = self.sampling(**options)
        key = jax.random.key(seed)
        if on_step is not None and self.config.model.kind != "ldlm":
            raise ConfigError(
                f"only latents can be watched; model.kind={self.config.model.kind} generates without --watch"
            )
        if on_step is not None:
            return self._watched(key, s, on_step)
        done = []
        for index, first in enumerate(range(0, s.num, BATCH)):
            program = self.program(s, min(BATCH, s.num - first))
            done.append(program(jax.random.fold_in(key, index), s.temperature, s.guidance))
        return np.concatenate([np.asarray(tokens) for tokens in done])

    def program(self, s: SamplingConfig, num: int) -> generate.Program | TokenProgram:
        """The program for `num` sequences at once; those of the last few settings are kept."""
        guided = s.guidance != 0.0
        wanted = (num, s.steps, s.sampler, s.grid, guided, s.order, s.top_p, self.implementation)
        if wanted not in self._programs:
            while len(self._programs) >= PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            if self.config.model.kind == "ldlm":
                made = generate.Program(
                    self.model, self.params, self.frozen, self.edges, num=num, steps=s.steps, sampler=s.sampler,
                    grid=s.grid, guided=guided, dtype=self.dtype, implementation=self.implementation,
                )  # fmt: skip
            else:
                arguments = (self.model, self.params, self.frozen, s)
                made = TokenProgram(*arguments, num=num, implementation=self.implementation)
            self._programs[wanted] = made
        return self._programs[wanted]

    def taken(self) -> str:
        """Which implementation generated last, and why."""
        choice = list(self._programs.values())[-1].choice
        return f"{choice.implementation} ({choice.reason})"

    def generate(self, *, seed: int = 0, on_step: OnStep | None = None, **options: Any) -> list[str]:
        """Texts, each up to its first end-of-sequence token; see `generate_tokens`."""
        return self.decode(self.generate_tokens(seed=seed, on_step=on_step, **options))

    def decode(self, tokens: Int[np.ndarray, "n t"]) -> list[str]:
        """Text of each row up to its first end-of-sequence token."""
        cut = [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in np.asarray(tokens).tolist()]
        return self.tokenizer.decode_batch(cut)

    def reconstruct(
        self, batch: Mapping[str, np.ndarray], *, decoder_noise: float = 0.0, seed: int = 0
    ) -> Int[np.ndarray, "b t"]:
        """Hidden states -> latents -> tokens, with noise of that standard deviation on the latents in between."""
        z = self.encode(batch)
        z = z + decoder_noise * jax.random.normal(jax.random.key(seed), z.shape)
        return np.asarray(generate.decode(self.model, self.params, self.frozen, z, dtype=self.dtype))

    def encode(self, batch: Mapping[str, np.ndarray]) -> Float[Array, "b k d"]:
        """Standardised latents of a batch of raw hidden states."""
        clip = self.config.feed.clip
        hidden = (jnp.asarray(batch["hidden"]).astype(jnp.float32) - self.hidden_mean) / self.hidden_std
        return generate.encode(
            self.model, self.params, self.frozen, self.latent_stats, jnp.clip(hidden, -clip, clip),
            jnp.asarray(batch["lengths"]), dtype=self.dtype,
        )  # fmt: skip

    def denoising_loss(
        self, z: Float[Array, "b k d"], tau: Float[np.ndarray, " b"], *, seed: int = 0
    ) -> Float[np.ndarray, " b"]:
        """Mean squared error per row of one denoiser estimate at tau, without self-conditioning."""
        noise = jax.random.normal(jax.random.key(seed), z.shape)
        return np.asarray(_denoising_loss(self.model, self.params, self.frozen, z, jnp.asarray(tau), noise, self.dtype))

    def _watched(self, key: Array, s: SamplingConfig, on_step: OnStep) -> Int[np.ndarray, "num t"]:
        """The loop of samplers.sample in Python: same noise, same updates, a callback in between."""
        schedule = TangentSchedule(self.config.diffusion.schedule_d)
        times = samplers.time_grid(self.edges, s.steps, grid=s.grid, sampler=s.sampler)
        counts = [min(BATCH, s.num - first) for first in range(0, s.num, BATCH)]
        keys = [jax.random.split(jax.random.fold_in(key, index)) for index in range(len(counts))]
        shape = (self.config.model.num_latents, self.config.model.latent_dim)

        def normal(keys: list[Array]) -> Float[Array, "num k d"]:
            parts = [jax.random.normal(key, (count, *shape)) for key, count in zip(keys, counts)]
            return s.temperature * jnp.concatenate(parts)

        z = normal([first for first, _ in keys])
        x0 = jnp.zeros_like(z)
        for index in range(s.steps):
            previous = x0
            x0, tokens = generate.estimate_and_read(
                self.model, self.params, self.frozen, z, times[index], previous, s.guidance,
                guided=s.guidance != 0.0, dtype=self.dtype,
            )  # fmt: skip
            on_step(index + 1, s.steps, np.asarray(tokens))
            noise = normal([jax.random.fold_in(later, index) for _, later in keys])
            heading = samplers.ahead(x0, previous, times, index, schedule, s.sampler)
            z = samplers.step(z, heading, noise, times[index], times[index + 1], schedule, s.sampler)
        return np.asarray(tokens)


def _loss(
    model: Model, params: Params, frozen: Params, z: Array, tau: Array, noise: Array, dtype: str
) -> Float[Array, " b"]:
    module, schedule = model.merge(params, frozen), TangentSchedule(model.config.diffusion.schedule_d)
    z_tau = schedule.add_noise(z, tau, noise).astype(dtype)
    estimate = module.denoiser(z_tau, module.denoiser.modulation(tau), jnp.zeros_like(z_tau))
    return jnp.square(estimate.astype(jnp.float32) - z).mean((1, 2))


_denoising_loss = jax.jit(_loss, static_argnames=("model", "dtype"))
