"""Denoiser weights in the order in which the fused loop reads them: tile after tile, each tile one contiguous piece.

A matrix (k, n) becomes (tiles, k, block_n): a program that owns a tile walks through memory without a gap, whatever part of
k is its own, and can ask for all of it by address and length.  Columns beyond n are zero.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jdllm.kernels.quantize import QuantizedMatrix
from jdllm.kernels.tiling import Tiling
from jdllm.model.ldlm import Params


@flax.struct.dataclass
class PackedMatrix:
    """One matrix of every block."""

    values: Shaped[Array, "blocks tiles k block_n"]
    scale: Float[Array, "blocks n"]
    """What a column of a quantised matrix is multiplied by; ones otherwise."""


def pack(matrix: Shaped[Array, "blocks k n"], block_n: int) -> Shaped[Array, "blocks tiles k block_n"]:
    """Tile after tile, zero beyond n."""
    blocks, k, n = matrix.shape
    padded = jnp.pad(matrix, ((0, 0), (0, 0), (0, -n % block_n)))
    return padded.reshape(blocks, k, -1, block_n).transpose(0, 2, 1, 3)


def unpack(packed: Shaped[Array, "blocks tiles k block_n"], n: int) -> Shaped[Array, "blocks k n"]:
    """The inverse of `pack`."""
    blocks, _, k, _ = packed.shape
    return packed.transpose(0, 2, 1, 3).reshape(blocks, k, -1)[:, :, :n]


def denoiser_matrices(denoiser: Params) -> dict[str, Array | QuantizedMatrix]:
    """The matrices of a denoiser's parameters by the names of their products, each with a leading axis of blocks."""
    blocks = denoiser["blocks"]
    return {
        "input": jax.tree.map(lambda x: x[None], denoiser["input"]["kernel"]),
        "qkv": blocks["attention"]["qkv"]["kernel"],
        "out": blocks["attention"]["out"]["kernel"],
        "up": blocks["ffn"]["up"]["kernel"],
        "down": blocks["ffn"]["down"]["kernel"],
        "output": jax.tree.map(lambda x: x[None], denoiser["output"]["kernel"]),
    }


def pack_denoiser(denoiser: Params, tiling: Tiling, dtype: str) -> dict[str, PackedMatrix]:
    """All matrices, cut as `tiling` says: in `dtype`, or as they are stored when quantised with a scale per channel."""

    def one(matrix: Array | QuantizedMatrix, block_n: int) -> PackedMatrix:
        if isinstance(matrix, QuantizedMatrix):
            return PackedMatrix(pack(matrix.values, block_n), matrix.scale[:, 0].astype(jnp.float32))
        ones = jnp.ones((matrix.shape[0], matrix.shape[-1]), jnp.float32)
        return PackedMatrix(pack(matrix.astype(dtype), block_n), ones)

    matrices = denoiser_matrices(denoiser)
    return {name: one(matrices[name], product.block_n) for name, product in tiling.products.items()}
