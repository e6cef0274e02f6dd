"""The whole latent diffusion language model: four modules side by side.

Train with all of them; generate with `denoiser`, `decoder` and `token_decoder` alone.  Modules define parameters and
forward passes; what crosses a jit boundary is a plain nested dict of arrays, made by `init` and put back by `merge`.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jdllm.config import Config, ModelConfig
from jdllm.model.denoiser import Denoiser
from jdllm.model.layers import Frozen, Walk
from jdllm.model.perceiver import LatentDecoder, LatentEncoder
from jdllm.model.placement import gather_outside_blocks
from jdllm.model.token_decoder import TokenDecoder

Params = dict[str, Any]
"""Nested dict of arrays; the keys are attribute names, e.g. params["denoiser"]["blocks"]["ffn"]["up"]["kernel"]."""


class LDLM(nnx.Module):
    """Latent encoder, denoiser, latent decoder, token decoder."""

    def __init__(self, config: ModelConfig, *, walk: Walk = "scan", rngs: nnx.Rngs):
        self.encoder = LatentEncoder(config, walk=walk, rngs=rngs)
        self.denoiser = Denoiser(config, walk=walk, rngs=rngs)
        self.decoder = LatentDecoder(config, walk=walk, rngs=rngs)
        self.token_decoder = TokenDecoder(config, walk=walk, rngs=rngs)


class Model:
    """Structure of an LDLM without its weights: hashable, so it can be a static argument of jit."""

    def __init__(self, config: Config, walk: Walk = "scan"):
        self.config, self.walk = config, walk
        self._hash = hash((config, walk))  # asked for at every call of a jitted function
        abstract = nnx.eval_shape(lambda: LDLM(config.model, walk=walk, rngs=nnx.Rngs(0)))
        self.graphdef, params, frozen = nnx.split(abstract, nnx.Param, Frozen)
        self.param_shapes: Params = nnx.to_pure_dict(params)
        self.frozen_shapes: Params = nnx.to_pure_dict(frozen)

    def init(self, key: jax.Array) -> Params:
        """Fresh trained weights in float32."""
        module = LDLM(self.config.model, rngs=nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.split(module, nnx.Param, Frozen)[1])

    def merge(self, params: Params, frozen: Params) -> LDLM:
        """Modules that read `params` and the frozen weights (an empty dict when the head is trained)."""
        return nnx.merge(self.graphdef, gather_outside_blocks(params), frozen)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        same = self is other
        return same or (isinstance(other, Model) and (self.config, self.walk) == (other.config, other.walk))
