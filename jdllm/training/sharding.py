"""Where arrays live: a (data, fsdp) mesh, the batch over both axes, every large array of the state over fsdp.

Fully sharded data parallelism: a device keeps a slice of each weight, of its average and of the optimiser's moments.  One
rule by name and shape (model/placement.py) for parameters, average, optimiser and frozen head alike; what is traced
through `on_mesh` gathers weights block by block and sends gradients back to their slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jdllm.config import Config, ConfigError
from jdllm.model.placement import axis_to_shard, names_of, spec


def make_mesh(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices, or those given, as (data, fsdp); ConfigError when they do not divide."""
    devices = list(jax.devices() if devices is None else devices)
    count, fsdp = len(devices), config.training.fsdp
    if count % fsdp:
        raise ConfigError(f"training.fsdp={fsdp} does not divide the {count} devices; use a divisor")
    rows = config.training.batch_size // config.training.accumulate
    if rows % count:
        raise ConfigError(
            f"training.batch_size / training.accumulate = {rows} rows cannot be shared by {count} devices; use a multiple"
        )
    axes = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((count // fsdp, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices)


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """The sharding of each leaf of a state, of parameters or of frozen weights (arrays or shapes)."""

    def rule(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(axis_to_shard(names_of(path), leaf.shape, mesh.shape["fsdp"])))

    return jax.tree_util.tree_map_with_path(rule, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device: metrics, samples, and what a few rows of evaluation are worth."""
    return NamedSharding(mesh, PartitionSpec())


def own_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of each batch that this process has to load: those of its devices."""
    places = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    bounds = sorted({place[0].indices(batch_size)[:2] for place in places})
    if any(one[1] != two[0] for one, two in zip(bounds, bounds[1:])):
        raise ConfigError(
            f"the rows {bounds} of this process's devices do not follow each other; start one process per device or per host"
        )
    return slice(bounds[0][0], bounds[-1][1])


def on_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, to be jitted, with model/placement.py at work in it when there is more than one device."""
    if mesh.size == 1:
        return function

    @functools.wraps(function)
    def placed(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return placed


def to_devices(batch: Any, sharding: NamedSharding) -> Any:
    """A batch of this process's own rows as one array over the devices of all processes."""
    return jax.make_array_from_process_local_data(sharding, batch)


def spread(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, Array]:
    """A batch that every process has in full, over all devices; whole on each when its rows do not divide."""
    sharding = replicated(mesh) if len(batch["ids"]) % mesh.size else batch_sharding(mesh)
    return {k: jax.make_array_from_callback(v.shape, sharding, v.__getitem__) for k, v in batch.items()}


def whole(mesh: Mesh, tree: Any) -> Any:
    """Arrays that lie in slices, put together on the first device of each process.  All processes have to call it."""
    if mesh.size == 1:
        return tree
    gathered = jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(lambda x: x.addressable_data(0), gathered)
