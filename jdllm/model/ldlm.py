"""The whole latent diffusion language model, four modules side by side, or a baseline of the same size in its place.

Train with all of them; generate with `denoiser`, `decoder` and `token_decoder` alone.  Modules define parameters and
forward passes; what crosses a jit boundary is a plain nested dict of arrays, made by `init` and put back by `merge`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jdllm.config import Config, ModelConfig
from jdllm.model.denoiser import Denoiser
from jdllm.model.layers import Frozen, Walk
from jdllm.model.perceiver import LatentDecoder, LatentEncoder
from jdllm.model.placement import gather_outside_blocks
from jdllm.model.token_decoder import TokenDecoder
from jdllm.model.token_transformer import TokenTransformer

Params = dict[str, Any]
"""Nested dict of arrays; the keys are attribute names, e.g. params["denoiser"]["blocks"]["ffn"]["up"]["kernel"]."""


class LDLM(nnx.Module):
    """Latent encoder, denoiser, latent decoder, token decoder."""

    def __init__(self, config: ModelConfig, *, walk: Walk = "scan", rngs: nnx.Rngs):
        self.encoder = LatentEncoder(config, walk=walk, rngs=rngs)
        self.denoiser = Denoiser(config, walk=walk, rngs=rngs)
        self.decoder = LatentDecoder(config, walk=walk, rngs=rngs)
        self.token_decoder = TokenDecoder(config, walk=walk, rngs=rngs)


def build(config: ModelConfig, *, walk: Walk = "scan", rngs: nnx.Rngs) -> LDLM | TokenTransformer:
    """The model of `config.kind`."""
    if config.kind == "ldlm":
        return LDLM(config, walk=walk, rngs=rngs)
    return TokenTransformer(config, trunk_depth(config), causal=config.kind == "autoregressive", walk=walk, rngs=rngs)


def trunk_depth(config: ModelConfig) -> int:
    """Blocks of a baseline: those asked for, or the number that brings its trained weights nearest to the LDLM's."""
    return config.trunk_depth or _matched_depth(dataclasses.replace(config, kind="ldlm"))


@functools.lru_cache(maxsize=64)
def _matched_depth(config: ModelConfig) -> int:
    def count(make: Callable[[], nnx.Module]) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(make), nnx.Param)))

    def baseline(depth: int) -> TokenTransformer:
        return TokenTransformer(config, depth, causal=False, walk="scan", rngs=nnx.Rngs(0))

    ldlm = count(lambda: LDLM(config, rngs=nnx.Rngs(0)))
    one, two = (count(functools.partial(baseline, depth)) for depth in (1, 2))
    return max(1, 1 + round((ldlm - one) / (two - one)))


class Model:
    """Structure of a model without its weights: hashable, so it can be a static argument of jit."""

    def __init__(self, config: Config, walk: Walk = "scan"):
        self.config, self.walk = config, walk
        self._hash = hash((config, walk))  # asked for at every call of a jitted function
        abstract = nnx.eval_shape(lambda: build(config.model, walk=walk, rngs=nnx.Rngs(0)))
        self.graphdef, params, frozen = nnx.split(abstract, nnx.Param, Frozen)
        self.param_shapes: Params = nnx.to_pure_dict(params)
        self.frozen_shapes: Params = nnx.to_pure_dict(frozen)

    def init(self, key: jax.Array) -> Params:
        """Fresh trained weights in float32."""
        module = build(self.config.model, rngs=nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.split(module, nnx.Param, Frozen)[1])

    def merge(self, params: Params, frozen: Params) -> LDLM | TokenTransformer:
        """Modules that read `params` and the frozen weights (an empty dict when the head is trained)."""
        return nnx.merge(self.graphdef, gather_outside_blocks(params), frozen)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        same = self is other
        return same or (isinstance(other, Model) and (self.config, self.walk) == (other.config, other.walk))
