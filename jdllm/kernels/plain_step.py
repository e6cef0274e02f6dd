"""What the arrays of the fused loop hold after one step, computed one after another: to find where a launch goes wrong.

The same packed weights and tables as the kernel's, the same phases, but no tiles, no programs, and float32 throughout.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jdllm.config import ModelConfig
from jdllm.kernels.fused import FusedWeights
from jdllm.kernels.packing import unpack
from jdllm.kernels.tables import StepTables
from jdllm.kernels.tiling import Product, Tiling
from jdllm.model.layers import EPSILON, attend, rms_norm, rotary, split_heads

TOLERANCE = 0.25
"""Of an array's root mean square: far beyond what bfloat16 rounds away in one step, far below what a wrong tile holds."""


def arrays_after_one_step(
    weights: FusedWeights, tables: StepTables, model: ModelConfig, cut: Tiling, noise: Float[Array, "rows d"] | None,
    start: Float[Array, "rows d"], depth: int,
) -> dict[str, Array]:  # fmt: skip
    """The kernel's scratch arrays by name after one step through the first `depth` blocks, in the order of their writing."""
    factor, gate, update = tables.factor[0], tables.gate[0], tables.update[0]
    found: dict[str, Array] = {}

    def product(name: str, block: int, x: Float[Array, "rows k"]) -> Float[Array, "rows n"]:
        matrix, n = weights.matrices[name], cut.products[name].n
        values = unpack(matrix.values[block : block + 1].astype(jnp.float32), n)[0] * matrix.scale[block]
        return jnp.matmul(x, values, precision="highest")

    def inverse_rms(x: Float[Array, "rows d"]) -> Float[Array, "rows 1"]:
        return jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPSILON)

    x = product("input", 0, jnp.concatenate([start, jnp.zeros_like(start)], axis=1))
    for block in range(depth):
        qkv = product("qkv", block, x * factor[2 * block]) * inverse_rms(x) + tables.bias_qkv[0, block]
        mixed = _attention(qkv, weights.q_gain[block], weights.k_gain[block], model)
        x = x + gate[2 * block] * product("out", block, mixed)
        hidden = jax.nn.gelu(
            product("up", block, x * factor[2 * block + 1]) * inverse_rms(x) + tables.bias_up[0, block]
        )
        x = x + gate[2 * block + 1] * (product("down", block, hidden) + weights.down_bias[block])
        found |= {"qkv": qkv, "hidden": hidden}
    a = x * factor[2 * depth]
    writer = cut.down if depth else cut.input
    parts = jnp.pad(x * x, ((0, 0), (0, -x.shape[1] % writer.block_n))).reshape(len(x), -1, writer.block_n).sum(-1).T
    parts = jnp.pad(parts, ((0, cut.parts - len(parts)), (0, 0)))
    estimate = product("output", 0, a) * inverse_rms(x)
    z = update[0] * start + update[1] * estimate + (0.0 if noise is None else update[2] * noise)
    return found | {
        "x": x, "a": a, "squares": parts, "estimate": estimate, "z": z, "pair": jnp.concatenate([z, estimate], axis=1)
    }  # fmt: skip


def _attention(
    qkv: Float[Array, "rows 3d"], q_gain: Float[Array, " c"], k_gain: Float[Array, " c"], model: ModelConfig
) -> Float[Array, "rows d"]:
    parts = jnp.split(qkv.reshape(-1, model.num_latents, 3 * model.latent_dim), 3, axis=-1)
    q, k, v = (split_heads(part, model.head_dim) for part in parts)
    with jax.default_matmul_precision("highest"):
        mixed = attend(rotary(rms_norm(q, q_gain)), rotary(rms_norm(k, k_gain)), v)
    return mixed.reshape(len(qkv), -1)


def difference(name: str, found: np.ndarray, wanted: np.ndarray, cut: Tiling, depth: int) -> str | None:
    """Where an array is wrong, in words: its share, rows, columns, and the programs whose work it is; None when it is right."""
    wrong = ~(np.abs(found - wanted) <= TOLERANCE * np.sqrt(np.mean(wanted**2)))
    if not wrong.any():
        return None
    rows, columns = np.nonzero(wrong.T if name == "squares" else wrong)
    programs = sorted(set(_programs(name, rows, columns, cut, depth)))
    shown = ", ".join(map(str, programs[:8])) + (", ..." if len(programs) > 8 else "")
    return (
        f"{name} is wrong in {wrong.mean():.2%} ({np.isnan(found).mean():.2%} NaN), rows {rows.min()} to {rows.max()}, "
        f"columns {columns.min()} to {columns.max()}, written by {len(programs)} of {cut.programs} programs: {shown}"
    )


def _programs(name: str, rows: np.ndarray, columns: np.ndarray, cut: Tiling, depth: int) -> np.ndarray:
    """Who writes these elements, as triton.py shares out tiles and, where products are split, pieces of them."""
    row_tile = rows // cut.block_m
    if name in ("qkv", "hidden"):
        product = cut.qkv if name == "qkv" else cut.up
        return (columns // product.block_n * cut.row_tiles + row_tile) % cut.programs
    if name == "pair":
        columns = columns % cut.output.n
    last: Product = cut.output if name in ("estimate", "z", "pair") else cut.down if depth else cut.input
    tile = np.minimum(columns, last.tiles - 1) if name == "squares" else columns // last.block_n
    groups, group = cut.block_m // cut.add_rows(last), rows % cut.block_m // cut.add_rows(last)
    return ((tile * cut.row_tiles + row_tile) * groups + group) % cut.programs
