"""The PyTorch twin as a baseline for speed: the same weights, timed as others would run it.

    eager fp32   plain PyTorch, full float32 products: the method of the public RTX 5090 benchmark
    graph bf16   torch.compile'd denoiser and decoders in bfloat16, the whole generation captured in one CUDA graph: what
                 PyTorch does best with the means at hand

Weights are handed over on the device (DLPack).  Left out: max-autotune, which compiles for minutes and gained 7% over a graph
of plain kernels on an H200 (4.40 -> 4.10 ms, research of 2026-11-30).
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jdllm.config import Config, ConfigError, SamplingConfig
from jdllm.model.ldlm import Params
from weights_port import convert, torch_ldlm


def twin(config: Config, params: Params, frozen: Params, dtype: str) -> torch_ldlm.Generator:
    """The twin with the weights of a JAX model, on its device, time not warped."""
    flat = convert.flatten({"params": params, "frozen": frozen})
    tensors: dict[str, torch.Tensor] = {}
    for row in convert.key_table(config):
        if row.jax not in flat:
            continue  # statistics of a run, which generation does not read
        array = torch.from_dlpack(flat[row.jax])
        for name, part in zip(row.torch_names, [array] if row.depth is None else array):
            tensors[name] = (part.T if row.transpose else part).to(getattr(torch, dtype)).contiguous()
    device = next(iter(tensors.values())).device
    tensors["timesteps.edges"] = torch.linspace(0, 1, config.diffusion.timestep_bins + 1, device=device)
    return torch_ldlm.from_tensors(config, tensors, device=device)


def noise(config: Config, key: jax.Array, batch: int) -> torch.Tensor:
    """The initial noise that jdllm's sampler draws from this key, so that both write the same tokens."""
    shape = (batch, config.model.num_latents, config.model.latent_dim)
    return torch.from_dlpack(jax.random.normal(jax.random.split(key)[0], shape, jnp.float32))


def eager(generator: torch_ldlm.Generator, noise: torch.Tensor, steps: int) -> Callable[[], torch.Tensor]:
    """A call that generates from the noise and returns when the tokens are there."""
    options = SamplingConfig(steps=steps)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        tokens = generator.tokens(generator.sample(noise, options))
        synchronize(tokens)
        return tokens

    return call


Estimate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The parts of a generation that are compiled once and captured for every step count."""

    generator: torch_ldlm.Generator
    estimate: Estimate
    """(state, modulation, previous estimate) -> estimate, float32 in and out."""
    tokens: Callable[[torch.Tensor], torch.Tensor]


def prepared(generator: torch_ldlm.Generator, *, compile: bool = True, dynamic: bool = False) -> Prepared:
    """Denoiser and decoders under torch.compile; `dynamic` compiles them for all batch sizes at once."""
    model = generator.model

    def estimate(z: torch.Tensor, modulation: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return model.denoiser(z.to(model.dtype), modulation, previous.to(model.dtype)).float()

    def tokens(z: torch.Tensor) -> torch.Tensor:
        return model.tokens(z)

    if compile:
        return Prepared(generator, torch.compile(estimate, dynamic=dynamic), torch.compile(tokens, dynamic=dynamic))
    return Prepared(generator, estimate, tokens)


def lean(parts: Prepared, noise: torch.Tensor, steps: int) -> Callable[[], torch.Tensor]:
    """DDIM with what is known beforehand taken out of the loop: the noise levels, and modulation computed once a call."""
    generator = parts.generator
    times = torch_ldlm.time_grid(generator.statistics["timesteps.edges"], steps)
    levels = [generator.schedule.alpha_sigma(time) for time in times]

    @torch.no_grad()
    def run() -> torch.Tensor:
        modulation = generator.model.denoiser.modulation(times[:-1])
        z, x0 = noise, torch.zeros_like(noise)
        for index in range(steps):
            x0 = parts.estimate(z, modulation[index : index + 1], x0)
            (alpha, sigma), (alpha_next, sigma_next) = levels[index], levels[index + 1]
            z = alpha_next * x0 + sigma_next * (z - alpha * x0) / sigma
        return parts.tokens(x0)

    return run


def graph(parts: Prepared, noise: torch.Tensor, steps: int) -> Callable[[], torch.Tensor]:
    """A call that replays the whole generation from one CUDA graph; ConfigError where there is no CUDA device."""
    if not noise.is_cuda:
        raise ConfigError("a CUDA graph needs a CUDA device")
    run = lean(parts, noise, steps)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and lets libraries make their handles outside of the capture
            run()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        tokens = run()

    def call() -> torch.Tensor:
        captured.replay()
        synchronize(tokens)
        return tokens

    return call


class Twins:
    """The baselines of jdllm/evaluation/benchmark.py by their names there; the last twin is kept for other batch sizes."""

    def __init__(self) -> None:
        self._held: tuple[Any, Any, torch_ldlm.Generator | Prepared] | None = None

    def __call__(
        self,
        config: Config,
        weights: tuple[Params, Params],
        name: tuple[str, str],
        key: jax.Array,
        batch: int,
        *,
        dynamic: bool,
    ) -> Callable[[int], tuple[Callable[[], torch.Tensor], np.ndarray]]:
        """Calls by their number of steps, with the tokens that they write."""
        in_graph, dtype = name[0] == "torch-graph", {"fp32": "float32", "bf16": "bfloat16"}[name[1]]
        wanted = (config, name, dynamic)
        if self._held is None or self._held[0] != wanted or self._held[1] is not weights[0]:
            self._held = None
            release()
            generator = twin(config, *weights, dtype)
            parts = prepared(generator, dynamic=dynamic) if in_graph else generator
            self._held = (wanted, weights[0], parts)
        parts, start = self._held[2], noise(config, key, batch)

        def ready(steps: int) -> tuple[Callable[[], torch.Tensor], np.ndarray]:
            call = (graph if in_graph else eager)(parts, start, steps)
            return call, call().cpu().numpy()

        return ready


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the device that the tensor is on."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def release() -> None:
    """Give unused memory back to the card."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def l2_bytes() -> int:
    """Size of the first card's L2 cache."""
    return torch.cuda.get_device_properties(0).L2_cache_size


def threads() -> int:
    """Threads that PyTorch uses on a CPU."""
    return torch.get_num_threads()
