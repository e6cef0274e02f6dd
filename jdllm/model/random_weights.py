"""Random weights that behave: made on the device, quickly, for timing and for tests.

A fresh model (`Model.init`) is no good for either: its denoiser says almost nothing yet, and it is made in float32 on the
host.  Here every product keeps the size of its input, so that activations are like a trained model's, outputs vary, and
nothing overflows in bfloat16.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jdllm.model.ldlm import Model, Params

RESIDUAL = ("out", "down")
"""Projections that end in the residual stream; they are scaled down by its depth."""
SMALL = 0.1
"""Standard deviation of biases, tables, positions, and of gains around 1."""


def random_weights(model: Model, seed: int, dtype: Any) -> tuple[Params, Params]:
    """Trained and frozen weights for `model` in `dtype`; the same seed gives the same ones on the same kind of device."""
    key = jax.random.key(seed, impl="rbg")  # several times faster than the default, to compile and to run
    paths, tree = jax.tree_util.tree_flatten_with_path((model.param_shapes, model.frozen_shapes))
    leaves = []
    for index, (path, leaf) in enumerate(paths):
        names = [str(part.key) for part in path if hasattr(part, "key")]
        mean, scale = spread(names, leaf.shape)
        leaves.append(_normal(jax.random.fold_in(key, index), mean, scale, leaf.shape, jnp.dtype(dtype)))
    return tree.unflatten(leaves)


def spread(names: list[str], shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a weight, by its place in the model."""
    if names[-1] not in ("kernel", "head"):
        return float(names[-1] == "gain"), SMALL
    scale = shape[-2] ** -0.5
    if names[-2] in RESIDUAL and "blocks" in names:
        scale *= (2 * shape[0]) ** -0.5
    return 0.0, SMALL * scale if "time_modulation" in names else scale


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: Array, mean: float, scale: float, shape: tuple[int, ...], dtype: Any) -> Array:
    flat = jax.random.normal(key, (math.prod(shape),), jnp.float32)
    return (mean + scale * flat).astype(dtype).reshape(shape)
