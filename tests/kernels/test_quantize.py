"""Quantised matrices: bounds that follow from a format's step, products, packing, and what the model makes of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdllm.config import ConfigError
from jdllm.kernels import quantize as q
from jdllm.kernels.cross_entropy import most_likely_tokens
from jdllm.model.ldlm import Model
from jdllm.model.random_weights import random_weights

RNG = np.random.default_rng(0)
STACK = RNG.normal(size=(3, 128, 24)).astype(np.float32) * RNG.uniform(0.01, 10, (3, 1, 24)).astype(np.float32)


def bound(w, matrix):
    """The largest error that the format allows at each entry, from its step alone (float64)."""
    groups = matrix.scale.shape[-2]
    scale = np.repeat(np.asarray(matrix.scale, np.float64), w.shape[-2] // groups, axis=-2)
    slack = 1 + 1e-6  # the scale itself is rounded to float32
    if matrix.weights == "fp8":  # 3 bits of mantissa: half a step is 2^-4 of the value, or 2^-10 below 2^-6
        return slack * np.maximum(np.abs(w.astype(np.float64)) / 16, scale / 1024)
    return slack * scale / 2


@pytest.mark.parametrize("weights", q.FORMATS)
def test_error_is_within_half_a_step_and_the_largest_of_a_channel_is_reached(weights):
    matrix = q.quantize(jnp.asarray(STACK), weights)
    assert matrix.shape == STACK.shape and matrix.weights == weights
    error = np.abs(np.asarray(matrix.dequantize(), np.float64) - STACK)
    assert (error <= bound(STACK, matrix)).all()
    units = matrix.values if weights != "int4" else jnp.concatenate(q.unpack(matrix.values), -2)
    peak = np.abs(np.asarray(units, np.float32)).reshape(3, matrix.scale.shape[-2], -1, 24).max(2)
    np.testing.assert_array_equal(peak, {"int8": 127, "fp8": 448, "int4": 7}[weights])


@pytest.mark.parametrize("weights", q.FORMATS)
def test_what_lies_on_the_grid_comes_back_exactly(weights):
    """Quantising what was dequantised changes nothing, values, scale or numbers."""
    once = q.quantize(jnp.asarray(STACK), weights)
    numbers = once.dequantize()
    again = q.quantize(numbers, weights)
    np.testing.assert_array_equal(again.values.astype(jnp.float32), once.values.astype(jnp.float32))
    np.testing.assert_allclose(again.dequantize(), numbers, rtol=2e-7)


@pytest.mark.parametrize("weights", q.FORMATS)
def test_zero_tiny_and_huge_channels(weights):
    w = RNG.normal(size=(64, 5)).astype(np.float32)
    w[:, 0], w[:, 1], w[:, 2], w[:, 3] = 0, w[:, 1] * 1e30, w[:, 2] * 1e-30, w[:, 3] * 1e-42
    matrix = q.quantize(jnp.asarray(w), weights)
    back = np.asarray(matrix.dequantize())
    assert np.isfinite(back).all() and (back[:, 0] == 0).all()
    assert (np.abs(back.astype(np.float64) - w) <= bound(w, matrix))[:, [0, 1, 2, 4]].all()
    np.testing.assert_allclose(back[:, 3], w[:, 3], atol=1e-38)  # below the normal numbers of float32
    assert np.isfinite(np.asarray(jnp.ones((2, 64), jnp.bfloat16) @ matrix)).all()


def test_packing_puts_rows_of_the_two_halves_in_one_byte():
    rows = jnp.asarray(RNG.integers(-8, 8, (2, 6, 5)), jnp.int8)
    packed = q.pack(rows)
    assert packed.dtype == jnp.uint8 and packed.shape == (2, 3, 5)
    np.testing.assert_array_equal(packed[1, 2] & 15, rows[1, 2] + 8)
    np.testing.assert_array_equal(packed[1, 2] >> 4, rows[1, 5] + 8)
    np.testing.assert_array_equal(jnp.concatenate(q.unpack(packed), -2), rows)


@pytest.mark.parametrize("weights", q.FORMATS)
def test_the_product_is_that_of_the_dequantised_matrix(weights):
    matrix = q.quantize(jnp.asarray(STACK[0]), weights)
    x = RNG.normal(size=(2, 7, 128)).astype(np.float32)
    exact = x.astype(np.float64) @ np.asarray(matrix.dequantize(), np.float64)
    np.testing.assert_allclose(jnp.asarray(x) @ matrix, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
    low = jnp.asarray(x, jnp.bfloat16)
    exact = np.asarray(low, np.float64) @ np.asarray(matrix.dequantize(), np.float64)
    y = jax.jit(lambda x, m: x @ m)(low, matrix)
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact) < 2**-8


@pytest.mark.parametrize("weights", q.FORMATS)
@pytest.mark.parametrize("chunk", [None, 7, 24])
def test_tokens_of_a_quantised_head_are_those_of_its_numbers(weights, chunk):
    head = q.quantize(jnp.asarray(STACK[0]), weights)
    states = jnp.asarray(RNG.normal(size=(2, 5, 128)), jnp.float32)
    wanted = (states @ head.dequantize()).argmax(-1)
    np.testing.assert_array_equal(most_likely_tokens(states, head, chunk), wanted)


def test_bytes_a_weight():
    shape = jax.ShapeDtypeStruct((2048, 6144), jnp.float32)
    size = {w: jax.tree.leaves(jax.eval_shape(lambda m, w=w: q.quantize(m, w), shape)) for w in q.FORMATS}
    bits = {w: 8 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / shape.size for w, leaves in size.items()}
    assert bits == {"int8": 8 + 32 / 2048, "fp8": 8 + 32 / 2048, "int4": 4.5}


def fp4(x):
    return x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


def test_int4_in_groups_of_32_is_finer_than_mxfp4_and_about_as_fine_as_nvfp4():
    """The figures in the module's docstring, which chose the 4-bit format."""
    w = np.random.default_rng(1).normal(size=(1024, 128)).astype(np.float32)

    def relative(back):
        return float(np.linalg.norm(back.reshape(w.shape) - w) / np.linalg.norm(w))

    blocks = w.reshape(-1, 32, 128)
    scale = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)  # OCP MX 1.0, section 6.3
    mxfp4 = relative(fp4(np.clip(blocks / scale, -6, 6)) * scale)
    blocks = w.reshape(-1, 16, 128)
    whole = np.abs(w).max() / 6 / 448
    scale = (np.abs(blocks).max(1, keepdims=True) / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    nvfp4 = relative(fp4(np.clip(blocks / (scale * whole), -6, 6)) * scale * whole)
    ours = relative(np.asarray(q.quantize(jnp.asarray(w), "int4").dequantize()))
    np.testing.assert_allclose([ours, mxfp4, nvfp4], [0.097, 0.115, 0.095], atol=0.001)


# In the model

quantized = jax.jit(q.quantize_params, static_argnums=1)
dequantized = jax.jit(q.dequantize_params)


@pytest.fixture(scope="module")
def wide(tiny):
    """A model whose widths int4 divides, and weights for it, the token head trained."""
    model = Model(tiny.replace(model__latent_dim=64, model__hidden_dim=64, model__head_dim=32))
    return model, random_weights(model, 0, "float32")[0]


def test_only_matrices_that_generation_reads_are_quantised(wide):
    model, params = wide
    small = quantized(params, "int8")
    for path, leaf in jax.tree_util.tree_leaves_with_path(small, is_leaf=q.is_quantized):
        names = [key.key for key in path]
        assert q.is_quantized(leaf) == (names[0] != "encoder" and names[-1] in ("kernel", "head")), names
    assert q.quantized_weights(small) == "int8" and q.quantized_weights(params) is None
    unchanged = small["denoiser"]["blocks"]["table"], params["denoiser"]["blocks"]["table"]
    np.testing.assert_array_equal(*unchanged)
    matrix = small["denoiser"]["blocks"]["ffn"]["up"]["kernel"]
    assert matrix.shape == model.param_shapes["denoiser"]["blocks"]["ffn"]["up"]["kernel"].shape


@pytest.fixture(scope="module")
def outputs(wide):
    """outputs(params): the denoiser's estimate and the head's inputs for fixed latents."""
    model, _ = wide
    z, previous = (jax.random.normal(key, (2, 8, 64)) for key in jax.random.split(jax.random.key(1)))

    @jax.jit
    def run(params):
        module = model.merge(params, {})
        x0 = module.denoiser(z, module.denoiser.modulation(jnp.array([0.3, 0.9])), previous)
        return x0, module.token_decoder.states(module.decoder(z))

    return run


@pytest.mark.parametrize("weights", q.FORMATS)
def test_a_quantised_model_computes_what_its_numbers_compute(wide, outputs, weights):
    """Scanned blocks, slices and all: in float32 it equals the same model with the dequantised weights as plain arrays."""
    params = wide[1]
    small = quantized(params, weights)
    plain = outputs(dequantized(small))
    for got, wanted in zip(outputs(small), plain):
        np.testing.assert_allclose(got, wanted, atol=2e-4 * float(jnp.abs(wanted).max()))
    relative = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(plain, outputs(params))]
    # Errors of the 10 to 15 products in a row add up like independent ones, each of the format's size on normal weights.
    assert max(relative) < 5 * {"int8": 0.0083, "fp8": 0.0265, "int4": 0.097}[weights]
    assert min(relative) > 0


def test_casting_leaves_quantised_matrices_alone(wide):
    small = quantized(wide[1], "fp8")
    half = q.cast(small, "bfloat16")
    assert half["denoiser"]["norm"]["gain"].dtype == jnp.bfloat16
    assert half["denoiser"]["input"]["kernel"] is small["denoiser"]["input"]["kernel"]


def test_what_cannot_be_quantised_is_a_sentence(wide):
    with pytest.raises(ConfigError, match=r"int4 needs .* multiple of 64, and one here has 96"):
        q.quantize(jnp.ones((96, 8)), "int4")
    with pytest.raises(ConfigError, match="'int3' is not one of int8, fp8, int4"):
        q.quantize(jnp.ones((64, 8)), "int3")
    with pytest.raises(ConfigError, match="int8 already"):
        q.quantize_params(quantized(wide[1], "int8"), "fp8")
    with pytest.raises(TypeError, match="cannot be indexed"):
        q.quantize(jnp.ones((64, 8)), "int8")[0]
