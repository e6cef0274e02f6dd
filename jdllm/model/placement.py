"""Weights in slices: which axis is cut over devices, and how a block gets its whole weight back for as long as it needs it.

Fully sharded data parallelism (ZeRO stage 3, arXiv 1910.02054): a device keeps one slice of each large array; `gather` puts a
weight together where it is used, and the gradient goes back as a sum of slices.  Left to itself XLA's partitioner mixes
this with tensor parallelism and moves activations about, so places are pinned: weights whole inside a block, rows of the
batch on the device that has them.  All of it happens on a mesh with axes (data, fsdp), entered by training/sharding.py;
without one (generation, evaluation, a single device) these functions return what they were given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

SMALL = 2**14
"""Arrays with fewer elements are whole on every device: they are not worth a gather."""
WHOLE = -1
"""In place of an axis: not cut."""


def axis_to_shard(names: Sequence[str], shape: Sequence[int], parts: int) -> int:
    """The axis of the array at the path `names` that is cut into `parts`, or WHOLE.

    It is the longest one that can be cut, with two exceptions.  Stacked blocks are never cut along their depth: a device
    would own whole blocks, and walking over the stack would gather all of them at once.  Heads (w, v) are cut along w: the
    cross-entropy walks over v in chunks, and a chunk is then an even share of every device's slice.
    """
    if parts == 1 or math.prod(shape) < SMALL:
        return WHOLE
    first = 1 if "blocks" in names and len(shape) > 1 else 0
    axes = [axis for axis in range(first, len(shape)) if shape[axis] % parts == 0]
    if "head" in names and 0 in axes:
        return 0
    return max(axes, key=lambda axis: shape[axis], default=WHOLE)


def spec(axis: int) -> PartitionSpec:
    """The partition of an array that is cut along `axis`."""
    return PartitionSpec() if axis == WHOLE else PartitionSpec(*(None,) * axis, "fsdp")


def names_of(path: tuple[Any, ...]) -> list[str]:
    """Keys and attributes on a path of jax.tree_util; places in a sequence are left out."""
    found = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return [name for name in found if isinstance(name, str)]


def shards() -> int:
    """Into how many slices weights are cut here; 0 without a mesh."""
    return jax.sharding.get_abstract_mesh().shape.get("fsdp", 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(weight: Array, axis: int) -> Array:
    """A weight that is cut along `axis`, whole; its gradient is cut again."""
    if axis == WHOLE:
        return weight
    weight = jax.lax.with_sharding_constraint(
        weight, spec(axis)
    )  # or XLA would gather masters and cast them afterwards
    return jax.lax.with_sharding_constraint(weight, PartitionSpec())


def _gather_bwd(axis: int, _: None, gradient: Array) -> tuple[Array]:
    return (gradient if axis == WHOLE else scatter(gradient, axis),)


def scatter(gradient: Array, axis: int) -> Array:
    """The sum over devices of a gradient, cut along `axis`.

    Summed whole and then cut, which XLA turns into a reduce-scatter on GPUs; asked for slices at once, its partitioner may
    gather the activations of all devices instead.
    """
    gradient = jax.lax.with_sharding_constraint(gradient, PartitionSpec())
    return jax.lax.with_sharding_constraint(gradient, spec(axis))


gather.defvjp(lambda weight, axis: (gather(weight, axis), None), _gather_bwd)


def axes_in_block(weights: Any) -> Any:
    """For stacked weights, the axis of each leaf that is cut, counted without the depth; None when nothing is cut."""
    parts = shards()
    if parts <= 1:
        return None
    return jax.tree.map(lambda leaf: max(axis_to_shard(["blocks"], leaf.shape, parts) - 1, WHOLE), weights)


def gather_block(weights: Any, axes: Any) -> Any:
    """All weights of one block, whole."""
    return weights if axes is None else jax.tree.map(gather, weights, axes)


def gather_outside_blocks(params: Any) -> Any:
    """Parameters with everything whole that is neither in a stack, which is gathered block by block, nor a head."""
    parts = shards()
    if parts <= 1:
        return params

    def whole(path: tuple[Any, ...], leaf: Array) -> Array:
        names = names_of(path)
        walked = "blocks" in names or "head" in names
        return leaf if walked else gather(leaf, axis_to_shard(names, leaf.shape, parts))

    return jax.tree_util.tree_map_with_path(whole, params)


def gather_columns(columns: Float[Array, "w c"]) -> Float[Array, "w c"]:
    """Some columns of a head (w, v), whole."""
    return jax.lax.with_sharding_constraint(columns, PartitionSpec()) if shards() > 1 else columns


def scatter_columns(gradient: Float[Array, "w c"]) -> Float[Array, "w c"]:
    """The gradient of some columns of a head, cut as the head is."""
    parts = shards()
    cut = parts > 1 and gradient.shape[0] % parts == 0
    return scatter(gradient, 0) if cut else gradient


def rows(x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """Activations with each row on the device that holds it in the batch."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or x.shape[0] % mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(("data", "fsdp")))
