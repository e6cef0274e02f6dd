"""The fused denoising loop as a JAX function: packed weights and tables in, the last estimate out.

`launch_arguments` says what the kernel of triton.py is called with, and `scratch` which arrays it needs; both are shared by
the launch through jax-triton here and by the test that runs the same source in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jdllm.config import ModelConfig
from jdllm.kernels.packing import PackedMatrix, pack_denoiser
from jdllm.kernels.quantize import QuantizedMatrix
from jdllm.kernels.tables import StepTables, rotary_tables
from jdllm.kernels.tiling import Tiling, power_of_two
from jdllm.model.ldlm import Params

ORDER = ("input", "qkv", "out", "up", "down", "output")
"""Of the matrices among the kernel's arguments."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """What is tuned on a device rather than derived from a shape."""

    num_warps: int = 8
    stages: int = 4
    """Pieces of the weights in flight in the loop of a product."""
    prefetch: int = 64 * 1024
    """Bytes of the next phase's weights that each program asks for before it waits; needs sm_90 or later, or 0."""
    stagger: int = 1
    """Pieces along k by which the beginnings of neighbouring programs' products differ, or 0."""


@flax.struct.dataclass
class FusedWeights:
    """The denoiser as the kernel wants it."""

    matrices: dict[str, PackedMatrix]
    q_gain: Float[Array, "l c"]
    k_gain: Float[Array, "l c"]
    down_bias: Float[Array, "l d"]
    quantised: bool = flax.struct.field(pytree_node=False, default=False)


def fused_weights(denoiser: Params, tiling: Tiling, dtype: str) -> FusedWeights:
    """Pack the parameters of a denoiser."""
    blocks = denoiser["blocks"]
    return FusedWeights(
        matrices=pack_denoiser(denoiser, tiling, dtype),
        q_gain=blocks["attention"]["q_norm"]["gain"].astype(jnp.float32),
        k_gain=blocks["attention"]["k_norm"]["gain"].astype(jnp.float32),
        down_bias=blocks["ffn"]["down"]["bias"].astype(jnp.float32),
        quantised=isinstance(denoiser["input"]["kernel"], QuantizedMatrix),
    )


def constants(
    model: ModelConfig, tiling: Tiling, launch: Launch, *, fresh_noise: bool, quantised: bool, profile: bool = False
) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    t = tiling
    split = (t.input, t.out, t.down, t.output)
    return {
        "ROWS": t.rows, "LATENTS": model.num_latents, "D": model.latent_dim,
        "FFN": model.ffn_multiple * model.latent_dim, "DEPTH": model.denoiser_depth, "HEAD_DIM": model.head_dim,
        "INPUT_N": t.input.block_n, "INPUT_SPLIT": t.input.split, "QKV_N": t.qkv.block_n,
        "OUT_N": t.out.block_n, "OUT_SPLIT": t.out.split, "UP_N": t.up.block_n,
        "DOWN_N": t.down.block_n, "DOWN_SPLIT": t.down.split,
        "OUTPUT_N": t.output.block_n, "OUTPUT_SPLIT": t.output.split,
        "CELLS": max(product.tiles for product in split) * t.row_tiles,
        "PROGRAMS": t.programs, "BLOCK_M": t.block_m, "BLOCK_K": t.block_k,
        "BLOCK_KEYS": min(64, max(16, power_of_two(model.num_latents))), "PARTS": t.parts,
        "INPUT_ADD_M": t.add_rows(t.input), "OUT_ADD_M": t.add_rows(t.out), "DOWN_ADD_M": t.add_rows(t.down),
        "OUTPUT_ADD_M": t.add_rows(t.output),
        "STAGES": launch.stages, "PREFETCH": launch.prefetch, "STAGGER": launch.stagger,
        "FRESH_NOISE": fresh_noise, "QUANTISED": quantised, "PROFILE": profile,
    }  # fmt: skip


def scratch(model: ModelConfig, tiling: Tiling, dtype: Any, phases: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
    """The kernel's outputs in order: the estimate, then memory it works in; `everyone` and `done` must start at zero.

    `phases` is how many are timed, when the kernel is profiled.
    """
    t, d, rows = tiling, model.latent_dim, tiling.rows
    split = (t.input, t.out, t.down, t.output)
    cells = max(product.tiles for product in split) * t.row_tiles

    def array(kind: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind)

    return {
        "estimate": array(jnp.float32, rows, d), "z": array(jnp.float32, rows, d), "pair": array(dtype, rows, 2 * d),
        "x": array(jnp.float32, rows, d), "a": array(dtype, rows, d),
        "squares": array(jnp.float32, t.parts, rows), "qkv": array(dtype, rows, 3 * d),
        "hidden": array(dtype, rows, model.ffn_multiple * d),
        "partial": array(jnp.float32, max(product.split for product in split), rows, d),
        "everyone": array(jnp.int32, 1), "done": array(jnp.int32, 4, cells),
        "clock": array(jnp.int32, phases + 1, t.programs, 3),
    }  # fmt: skip


def launch_arguments(
    weights: FusedWeights, tables: StepTables, model: ModelConfig, noise: Float[Array, "s rows d"] | None,
    start: Float[Array, "rows d"], steps: int,
) -> list[Any]:  # fmt: skip
    """The kernel's inputs in order."""
    matrices = [weights.matrices[name] for name in ORDER]  # a dict that has passed through jit is sorted by name
    cos, sin = rotary_tables(model.num_latents, model.head_dim)
    return [
        *(matrix.values for matrix in matrices), *(matrix.scale for matrix in matrices),
        weights.q_gain, weights.k_gain, weights.down_bias, cos, sin, tables.factor, tables.gate, tables.bias_qkv,
        tables.bias_up, tables.update, start if noise is None else noise, start, steps,
    ]  # fmt: skip


def _triton_call() -> Callable[..., Any]:
    """jax_triton.triton_call, without what the import of jax-triton 0.3 does to every other user of Triton."""
    cache = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    # 0.3 leaves the variable empty, and then a launch through PyTorch ends with "could not create or locate cache dir"
    if cache:
        os.environ["TRITON_CACHE_DIR"] = cache
    else:
        os.environ.pop("TRITON_CACHE_DIR", None)
    return jax_triton.triton_call


def denoise_fused(
    weights: FusedWeights,
    tables: StepTables,
    key: jax.Array,
    temperature: float | Array,
    model: ModelConfig,
    *,
    tiling: Tiling,
    launch: Launch,
    sampler: str,
    dtype: str,
) -> Float[Array, "b k d"]:
    """samplers.sample with the trained denoiser and the same noise for the same key, in one launch; for use inside jit."""
    from jdllm.kernels.triton import denoise_loop

    call = _triton_call()
    steps, rows = tables.update.shape[0], tiling.rows
    shape = (rows // model.num_latents, model.num_latents, model.latent_dim)
    first, later = jax.random.split(key)
    start = temperature * jax.random.normal(first, shape)
    noise = None
    if sampler == "sde":
        draw = jax.vmap(lambda index: jax.random.normal(jax.random.fold_in(later, index), shape))
        noise = (temperature * draw(jnp.arange(steps))).reshape(steps, rows, -1)
    outputs = scratch(model, tiling, dtype)
    # jax-triton 0.4 calls this out_type, and 0.3, the last for Python 3.11, out_shape
    out = "out_type" if "out_type" in inspect.signature(call).parameters else "out_shape"
    found = call(
        *launch_arguments(weights, tables, model, noise, start.reshape(rows, -1), steps),
        kernel=denoise_loop,
        **{out: list(outputs.values())},
        grid=(tiling.programs,),
        num_warps=launch.num_warps,
        num_stages=launch.stages,
        zeroed_outputs=tuple(index for index, name in enumerate(outputs) if name in ("everyone", "done")),
        **constants(model, tiling, launch, fresh_noise=noise is not None, quantised=weights.quantised),
    )
    return found[0].reshape(shape)
