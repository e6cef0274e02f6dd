"""Bytes and operations of a generation: against sums written by hand, parameter counts, and the traced program."""

import math

import jax
import jax.extend
import jax.numpy as jnp
import pytest

from jdllm.config import preset
from jdllm.generation.generate import latents_to_tokens
from jdllm.kernels import roofline
from jdllm.model.ldlm import Model

QWEN = preset("qwen3.6-35b-a3b")


def test_bytes_of_the_public_benchmark_by_hand():
    """Width 2048, 4 + 4 + 3 blocks, a frozen head of 248,320 tokens, all in bfloat16."""
    d, f, v = 2048, 8192, 248_320
    ffn = 2 * d * f + f + d
    block = 3 * d * d + d * d + ffn + 2 * d + 2 * 128
    denoiser = 3 * d * d + d + 4 * (block + 6 * d)
    times = (256 + 1) * d + (d + 1) * d + (d + 1) * 6 * d
    perceiver = 6 * d * d + ffn + 3 * d + 2 * 128
    decoder = 2 * d * d + 2 * 64 * d + d + 4 * perceiver
    head = 2 * d * d + 3 * block + d * v  # input, output, blocks, the head itself
    work = roofline.generation_work(QWEN, batch=1, steps=10)
    assert work.step_weights == 2 * denoiser
    assert work.once_weights == 2 * (times + decoder + head)
    assert work.activations == 10 * 4 * 64 * d * 4 + 64 * 4
    assert work.bytes == 10 * work.step_weights + work.once_weights + work.activations


@pytest.mark.parametrize("name", ["smoke", "books", "qwen3.6-27b", "qwen3.6-27b-5090"])
@pytest.mark.parametrize(("weights", "size"), [("fp32", 4), ("bf16", 2)])
def test_every_parameter_but_the_encoders_is_read(name, weights, size):
    config = preset(name)
    model = Model(config)
    count = {part: sum(math.prod(x.shape) for x in jax.tree.leaves(tree)) for part, tree in model.param_shapes.items()}
    frozen = sum(math.prod(x.shape) for x in jax.tree.leaves(model.frozen_shapes))
    step, once = roofline.weight_bytes(config, weights)
    assert step + once == size * (count["denoiser"] + count["decoder"] + count["token_decoder"] + frozen)


def test_quantised_bytes_by_hand():
    """Of the 35B-A3B denoiser: 4 blocks of four matrices, input and output; what is no matrix stays in bfloat16."""
    d, f = 2048, 8192
    matrices = 3 * d * d + 4 * (4 * d * d + 2 * d * f)
    channels = 2 * d + 4 * (3 * d + d + f + d)
    rest = 2 * (d + 4 * (6 * d + 2 * d + 2 * 128 + f + d))
    assert roofline.weight_bytes(QWEN, "int8")[0] == matrices + 4 * channels + rest
    assert roofline.weight_bytes(QWEN, "fp8")[0] == matrices + 4 * channels + rest
    assert roofline.weight_bytes(QWEN, "int4")[0] == matrices // 2 + 2 * matrices // 32 + rest


def products(jaxpr):
    """Operations of all dot_general in a traced program, loops of known length unrolled."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contract)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += times * sum(products(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params))
    return total


@pytest.mark.parametrize("head", ["trained", "encoder"])
@pytest.mark.parametrize("latents", [4, 8])
def test_operations_are_those_of_the_traced_model(tiny, head, latents):
    config = tiny.replace(model__num_latents=latents, model__head=head)
    model, m = Model(config), config.model

    def generation(params, frozen, z):
        module = model.merge(params, frozen)
        modulation = module.denoiser.modulation(jnp.zeros(1))
        return latents_to_tokens(module, module.denoiser(z, modulation, z), jnp.float32)

    z = jax.ShapeDtypeStruct((1, m.num_latents, m.latent_dim), jnp.float32)
    traced = jax.make_jaxpr(generation)(model.param_shapes, model.frozen_shapes, z)
    assert roofline.generation_work(config, batch=1, steps=1).flops == products(traced.jaxpr)


def test_operations_grow_with_batch_and_steps_as_they_should():
    one = roofline.generation_work(QWEN, batch=1, steps=1)
    two = roofline.generation_work(QWEN, batch=2, steps=1)
    more = roofline.generation_work(QWEN, batch=1, steps=5)
    modulation = roofline.modulation_flops(QWEN)
    assert two.flops - modulation == 2 * (one.flops - modulation) and two.step_weights == one.step_weights
    assert more.flops - one.flops == 4 * (roofline.denoiser_flops(QWEN) + modulation)
    assert more.bytes - one.bytes == 4 * (one.step_weights + 16 * 64 * 2048)


def test_floors_and_projection():
    work = roofline.Work(step_weights=10**9, once_weights=5 * 10**8, activations=0, flops=2 * 10**12, steps=2)
    assert work.memory_ms(1e12) == pytest.approx(2.5) and work.arithmetic_ms(1e15) == pytest.approx(2.0)
    card = roofline.Device("card", bandwidth=1e12, peak=1e15, memory=2e9, l2=1e6)
    assert roofline.project(work, card, 0.5) == pytest.approx(5.0)
    assert roofline.project(work, roofline.Device("slow", 1e12, 1e14, 2e9, 1e6), 0.5) == pytest.approx(40.0)
    assert roofline.project(work, roofline.Device("small", 1e12, 1e15, 1e9, 1e6), 0.5) is None


def test_floor_of_the_public_benchmark():
    """research anchors: 201 M denoiser weights, 911 M with decoders and head of 2 blocks; 3 blocks here."""
    work = roofline.generation_work(QWEN, batch=1, steps=10)
    assert 400e6 < work.step_weights < 450e6
    assert work.memory_ms(4.31e12) == pytest.approx(1.35, rel=0.1)
