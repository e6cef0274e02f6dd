"""The least that one generation must read, write and compute, and the times that follow from it.

Counted: the denoiser's weights once a step; the MLP that turns times into modulation once a call, since the times are known
beforehand; both decoders and the head once.  Of activations only what has to outlive a step, the state and the estimate in
float32, and the tokens: everything inside a step can stay on the chip.  Operations are those of matrix products and attention
scores, 2 for a multiply-add.

The memory floor holds while weights come from device memory.  Those of a small denoiser stay in the L2 cache from one step to
the next, and then a generation can be faster than it; `Work.step_weights` over the size of the cache says whether that is so.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Literal

import jax
import jax.numpy as jnp

from jdllm.config import Config
from jdllm.kernels import quantize
from jdllm.model.denoiser import TIME_FEATURES
from jdllm.model.ldlm import Model, Params

Stored = Literal["fp32", "bf16", "int8", "fp8", "int4"]
STORED: tuple[Stored, ...] = typing.get_args(Stored)
"""How weights lie in memory; what is no matrix stays in bfloat16 beside quantised ones."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes and operations of one generation, noise to tokens."""

    step_weights: int
    """Bytes of weights that every step reads."""
    once_weights: int
    """Bytes of weights that are read once a call."""
    activations: int
    """Bytes of state, estimate and tokens, over all steps."""
    flops: int
    steps: int

    @property
    def bytes(self) -> int:
        """All traffic with device memory."""
        return self.steps * self.step_weights + self.once_weights + self.activations

    def memory_ms(self, bandwidth: float) -> float:
        """Memory floor at `bandwidth` bytes a second."""
        return 1e3 * self.bytes / bandwidth

    def arithmetic_ms(self, peak: float) -> float:
        """Arithmetic floor at `peak` operations a second."""
        return 1e3 * self.flops / peak


@dataclasses.dataclass(frozen=True)
class Device:
    """A card that is projected to, not measured."""

    name: str
    bandwidth: float
    """Bytes a second."""
    peak: float
    """Dense bfloat16 operations a second, added up in float32."""
    memory: float
    """Bytes."""
    l2: float
    """Bytes."""


RTX_5090 = Device("RTX 5090", bandwidth=1.79e12, peak=209.5e12, memory=32e9, l2=96e6)
"""Vendor's bandwidth, cache and memory; the peak is a quarter of its sparse half-precision figure (838 TFLOP/s), because
GeForce cards halve the rate when they add up in float32."""


def project(work: Work, device: Device, fraction: float) -> float | None:
    """Milliseconds on `device` if `fraction` of the larger of its two floors is reached.

    None where the weights alone do not fit.  An extrapolation: neither launch costs nor caches are in it.
    """
    if work.step_weights + work.once_weights > device.memory:
        return None
    return max(work.memory_ms(device.bandwidth), work.arithmetic_ms(device.peak)) / fraction


def generation_work(config: Config, *, batch: int, steps: int, weights: Stored = "bf16") -> Work:
    """Of `batch` windows in `steps` steps, of the numbers of latents and tokens that the config has."""
    m = config.model
    step, once = weight_bytes(config, weights)
    state = 4 * batch * m.num_latents * m.latent_dim
    return Work(
        step_weights=step,
        once_weights=once,
        activations=steps * 4 * state + 4 * batch * m.num_tokens,  # read and write both state and estimate
        flops=batch * (steps * denoiser_flops(config) + decoder_flops(config)) + steps * modulation_flops(config),
        steps=steps,
    )


@functools.cache
def weight_bytes(config: Config, weights: Stored) -> tuple[int, int]:
    """Bytes of weights that every step reads, and of those that a call reads once."""
    model = Model(config)
    dtype = jnp.float32 if weights == "fp32" else jnp.bfloat16

    def stored(tree: Params) -> Params:
        if weights in quantize.FORMATS:
            tree = quantize.quantize_params(tree, weights)
        return quantize.cast(tree, dtype)

    def size(tree: Params) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    params, frozen = (jax.eval_shape(stored, tree) for tree in (model.param_shapes, model.frozen_shapes))
    times = sum(size(tree) for name, tree in params["denoiser"].items() if name.startswith("time_"))
    once = times + size(params["decoder"]) + size(params["token_decoder"]) + size(frozen)
    return size(params["denoiser"]) - times, once


def denoiser_flops(config: Config) -> int:
    """One denoiser evaluation for one window, without the modulation."""
    m = config.model
    k, d = m.num_latents, m.latent_dim
    block = 2 * k * (4 + 2 * m.ffn_multiple) * d * d + 4 * k * k * d
    return 2 * k * (2 * d * d + d * d) + m.denoiser_depth * block


def modulation_flops(config: Config) -> int:
    """Modulation of one time, for any number of windows."""
    d = config.model.latent_dim
    return 2 * (TIME_FEATURES * d + d * d + 6 * d * d)


def decoder_flops(config: Config) -> int:
    """Latents to logits for one window."""
    m = config.model
    k, t, d, h = m.num_latents, m.num_tokens, m.latent_dim, m.hidden_dim
    perceiver_block = 2 * d * d * (t * (4 + 2 * m.ffn_multiple) + 2 * k) + 4 * t * (t + k) * d
    token_block = 2 * t * (4 + 2 * m.ffn_multiple) * d * d + 4 * t * t * d
    head = d * h + h * m.vocab_size if m.head == "encoder" else d * m.vocab_size
    latent_decoder = 2 * k * d * d + m.decoder_depth * perceiver_block + 2 * t * d * h
    return latent_decoder + 2 * t * h * d + m.token_decoder_depth * token_block + 2 * t * head
