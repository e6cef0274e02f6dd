"""Where arrays live: a (data, fsdp) mesh, the batch over both axes, every large array of the state over fsdp.

One rule for parameters, average and optimiser alike, by shape: the longest axis that the fsdp axis divides is sharded,
small arrays are whole on every device.  On one device all of it is a no-op.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdllm.config import Config, ConfigError

SMALL = 2**14
"""Arrays with fewer elements are not worth a gather."""


def make_mesh(config: Config) -> Mesh:
    """All devices as (data, fsdp); ConfigError when they do not divide."""
    devices, fsdp = jax.device_count(), config.training.fsdp
    if devices % fsdp:
        raise ConfigError(f"training.fsdp={fsdp} does not divide the {devices} devices; use a divisor")
    rows = config.training.batch_size // config.training.accumulate
    if rows % devices:
        raise ConfigError(
            f"training.batch_size / training.accumulate = {rows} rows cannot be shared by {devices} devices; use a multiple"
        )
    return jax.make_mesh((devices // fsdp, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """The sharding of each leaf of a state (of arrays or shapes)."""
    parts = mesh.shape["fsdp"]

    def rule(leaf: Any) -> NamedSharding:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
        if parts == 1 or leaf.size < SMALL or not axes:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*(("fsdp" if axis == longest else None) for axis in range(leaf.ndim))))

    return jax.tree.map(rule, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
