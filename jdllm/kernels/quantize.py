"""Weights in 8 or 4 bits, for generation: the matrices of denoiser, latent decoder, token decoder and its head.

At batch 1 a step takes the time that its weights take to be read, so bytes are what is saved here, not arithmetic: products
stay in the dtype of the activations.  Norms, tables, positions and biases stay as they are, and so does the latent encoder,
which generation does not use.

    int8   one scale per output channel; a step of max|w| / 127
    fp8    float8_e4m3fn, one scale per output channel that brings max|w| to 448: coarser than int8 where weights are spread
           evenly, and what tensor cores multiply without converting
    int4   integers -7..7, one bfloat16 scale for GROUP rows of an output channel, two in a byte: 4.5 bits a weight

Why int4 in groups and no 4-bit float: Hopper's tensor cores know none, so a kernel has to decode either, and an integer is
decoded in fewer instructions.  On normal weights the relative error is 9.7% for int4 in groups of 32, 11.5% for MXFP4
(groups of 32, scales powers of two) and 9.5% for NVFP4 (groups of 16): tests/kernels/test_quantize.py measures all three.

A byte of int4 holds row r of the matrix in its low half and row r + in/2 in its high half.  A kernel then multiplies the
low halves with a contiguous piece of x and the high halves with another, and never has to interleave rows.

Why our own container and not qwix.QArray: its 4-bit values are jnp.int4, one to a byte in a checkpoint and with a layout
that XLA chooses on the device, where the Triton kernel needs bytes that it can address; its products are meant for
quantised activations as well; and it is one more package to carry for thirty lines.  Left out: zero points (our weights
are symmetric), calibration on data, quantised activations.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from jdllm.config import ConfigError
from jdllm.model.ldlm import Params

Weights = Literal["int8", "fp8", "int4"]
FORMATS: tuple[Weights, ...] = typing.get_args(Weights)
GROUP = 32
"""Rows of an int4 matrix that share a scale."""
PARTS = ("denoiser", "decoder", "token_decoder")
MATRICES = ("kernel", "head")
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_STORED = {jnp.dtype("int8"): "int8", jnp.dtype("float8_e4m3fn"): "fp8", jnp.dtype("uint8"): "int4"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (in, out), or a stack of them, in few bits.  `x @ matrix` works as with an array.

    A pytree of two arrays, so that scanning over a stack slices both and only one block's weights are converted at a time.
    """

    values: Shaped[Array, "*n rows out"]
    """int8 or float8_e4m3fn with `in` rows, or uint8 with in/2 rows of two int4 each, stored as value + 8."""
    scale: Float[Array, "*n g out"]
    """float32 with g = 1, or bfloat16 with g = in / GROUP: what a value is multiplied by."""

    @property
    def weights(self) -> Weights:
        """Name of the format."""
        return _STORED[jnp.dtype(self.values.dtype)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that this stands for."""
        *lead, rows, out = self.values.shape
        return (*lead, 2 * rows if self.weights == "int4" else rows, out)

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "*n in out"]:
        """The matrix as numbers."""
        if self.weights != "int4":
            return (self.values.astype(jnp.float32) * self.scale).astype(dtype)
        rows = jnp.concatenate(unpack(self.values), axis=-2)
        *lead, n, out = rows.shape
        groups = rows.reshape(*lead, n // GROUP, GROUP, out).astype(jnp.float32)
        return (groups * self.scale[..., :, None, :].astype(jnp.float32)).reshape(rows.shape).astype(dtype)

    def product(self, x: Float[Array, "*b in"], dtype: Any) -> Float[Array, "*b out"]:
        """x @ matrix in `dtype`, added up in float32.

        A scale per channel is applied to the result, so that nothing but a conversion stands between the stored bytes and
        the product, which is what XLA's matrix products can take in (whether they do is what the benchmark shows); bfloat16
        holds int8 and e4m3 values exactly.
        """
        if self.weights == "int4":
            y = jnp.matmul(x, self.dequantize(x.dtype), preferred_element_type=jnp.float32)
        else:
            y = jnp.matmul(x, self.values.astype(x.dtype), preferred_element_type=jnp.float32) * self.scale[..., 0, :]
        return y.astype(dtype)

    def __rmatmul__(self, x: Float[Array, "*b in"]) -> Float[Array, "*b out"]:
        return self.product(x, x.dtype)

    def __getitem__(self, index: Any) -> QuantizedMatrix:
        """`matrix[...]` is the matrix, as modules read their weights; there is no other way to index it."""
        if index is not Ellipsis:
            raise TypeError(f"a quantised matrix cannot be indexed by {index!r}; dequantize() it first")
        return self

    def columns(self, first: Array | int, count: int) -> QuantizedMatrix:
        """`count` output channels from `first` on."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, axis=-1), self)


def unpack(values: Shaped[Array, "*n half out"]) -> tuple[Shaped[Array, "*n half out"], Shaped[Array, "*n half out"]]:
    """Bytes of int4 -> rows of the first half of the matrix and rows of the second, as int8."""
    low, high = values & 15, values >> 4
    return low.astype(jnp.int8) - 8, high.astype(jnp.int8) - 8


def pack(rows: Shaped[Array, "*n in out"]) -> Shaped[Array, "*n in/2 out"]:
    """The inverse of `unpack`, of integers in -8..7."""
    low, high = jnp.split((rows + 8).astype(jnp.uint8), 2, axis=-2)
    return low | (high << 4)


def quantize(matrix: Float[Array, "*n in out"], weights: Weights) -> QuantizedMatrix:
    """The nearest quantised matrix.  A channel (or group) of zeros stays zero.

    |error| <= scale / 2 for the integers; for fp8 <= max(|w| / 16, scale / 1024): half of the step that its 3 bits of mantissa
    leave, and below the smallest normal number half of the fixed step 2^-9.  ConfigError when int4 does not divide the rows.
    """
    w = matrix.astype(jnp.float32)
    *lead, rows, out = w.shape
    if weights not in FORMATS:
        raise ConfigError(f"weights={weights!r} is not one of {', '.join(FORMATS)}")
    if weights == "int4" and rows % (2 * GROUP):
        raise ConfigError(
            f"int4 needs matrices whose input width is a multiple of {2 * GROUP}, and one here has {rows}; use int8 or fp8"
        )
    size = GROUP if weights == "int4" else rows
    groups = w.reshape(*lead, rows // size, size, out)
    largest = _LARGEST[weights]
    scale = jnp.abs(groups).max(-2, keepdims=True) / largest
    if weights == "int4":
        scale = scale.astype(jnp.bfloat16)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, jnp.ones_like(scale), scale)
    units = jnp.clip(groups / scale.astype(jnp.float32), -largest, largest).reshape(w.shape)
    if weights == "fp8":
        values = units.astype(jnp.float8_e4m3fn)
    else:
        values = jnp.round(units).astype(jnp.int8)
    return QuantizedMatrix(pack(values) if weights == "int4" else values, scale.squeeze(-2))


def is_quantized(leaf: Any) -> bool:
    """For jax.tree functions that should see a quantised matrix whole."""
    return isinstance(leaf, QuantizedMatrix)


def quantize_params(params: Params, weights: Weights) -> Params:
    """All matrices that generation reads, quantised; works on `Model.frozen_shapes`' tree as well, and under eval_shape."""

    def one(path: tuple[Any, ...], leaf: Array) -> Array | QuantizedMatrix:
        chosen = path[0].key in PARTS and path[-1].key in MATRICES
        return quantize(leaf, weights) if chosen else leaf

    if quantized_weights(params):
        raise ConfigError(
            f"these weights are {quantized_weights(params)} already; quantise the run they were made from"
        )
    return jax.tree_util.tree_map_with_path(one, params)


def quantized_weights(params: Params) -> Weights | None:
    """Format of the quantised matrices in a tree, None where there is none."""
    found = {leaf.weights for leaf in jax.tree.leaves(params, is_leaf=is_quantized) if is_quantized(leaf)}
    if len(found) > 1:
        raise ConfigError(f"quantised weights of several formats in one model: {', '.join(sorted(found))}")
    return found.pop() if found else None


def cast(params: Params, dtype: Any) -> Params:
    """All arrays in `dtype`; quantised matrices as they are, since their products follow the activations."""
    return jax.tree.map(
        lambda leaf: leaf if is_quantized(leaf) else jnp.asarray(leaf, dtype), params, is_leaf=is_quantized
    )


def dequantize_params(params: Params, dtype: Any = jnp.float32) -> Params:
    """Plain arrays everywhere."""
    return jax.tree.map(
        lambda leaf: leaf.dequantize(dtype) if is_quantized(leaf) else jnp.asarray(leaf, dtype),
        params,
        is_leaf=is_quantized,
    )
