"""The PyTorch twin as a baseline for speed: the same weights, timed as others would run it.

    eager fp32   plain PyTorch, full float32 products: the method of the public RTX 5090 benchmark
    graph bf16   torch.compile'd denoiser and decoders in bfloat16, the whole generation captured in one CUDA graph: what
                 PyTorch does best with the means at hand

Weights are handed over on the device (DLPack).  Left out: max-autotune, which compiles for minutes and gained 7% over a graph
of plain kernels on an H200 (4.40 -> 4.10 ms, research of 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jdllm.config import Config, ConfigError, SamplingConfig
from jdllm.model.ldlm import Params
from weights_port import convert, torch_ldlm


def twin(config: Config, params: Params, frozen: Params, dtype: torch.dtype) -> torch_ldlm.Generator:
    """The twin with the weights of a JAX model, on its device, time not warped."""
    flat = convert.flatten({"params": params, "frozen": frozen})
    tensors: dict[str, torch.Tensor] = {}
    for row in convert.key_table(config):
        if row.jax not in flat:
            continue  # statistics of a run, which generation does not read
        array = torch.from_dlpack(flat[row.jax])
        for name, part in zip(row.torch_names, [array] if row.depth is None else array):
            tensors[name] = (part.T if row.transpose else part).to(dtype).contiguous()
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


def compiled(generator: torch_ldlm.Generator, *, dynamic: bool = False) -> torch_ldlm.Generator:
    """The same generator with denoiser and decoders under torch.compile; `dynamic` compiles once for all batch sizes."""
    model: Any = generator.model
    model.estimate = torch.compile(model.estimate, dynamic=dynamic)
    model.tokens = torch.compile(model.tokens, dynamic=dynamic)
    return generator


def graph(generator: torch_ldlm.Generator, noise: torch.Tensor, steps: int) -> Callable[[], torch.Tensor]:
    """Like `eager`, replayed from a CUDA graph; ConfigError where there is no CUDA device."""
    if not noise.is_cuda:
        raise ConfigError("a CUDA graph needs a CUDA device")
    run = eager(generator, noise, steps)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and lets libraries make their handles outside of the capture
            run()
    torch.cuda.current_stream().wait_stream(side)
    captured, options = torch.cuda.CUDAGraph(), SamplingConfig(steps=steps)
    with torch.inference_mode(), torch.cuda.graph(captured):
        tokens = generator.tokens(generator.sample(noise, options))

    def call() -> torch.Tensor:
        captured.replay()
        synchronize(tokens)
        return tokens

    return call


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the device that the tensor is on."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def release() -> None:
    """Give unused memory back to the card."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
