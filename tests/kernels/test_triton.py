"""The source of the fused loop, run by Triton's interpreter at tiny sizes, against the plain JAX loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import PRESETS, ConfigError, preset
from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.generation.generate import make_denoise
from jdllm.kernels import fused, op, packing
from jdllm.kernels.quantize import quantize_params
from jdllm.kernels.tables import step_tables
from jdllm.kernels.tiling import tiling
from jdllm.model.ldlm import Model
from weights_port import triton_launch

triton = pytest.importorskip("triton")
TIMES = jnp.array([1.0, 0.8, 0.45, 0.0])


def make_config(d=64, latents=16, head_dim=32, depth=2, ffn=2):
    model = dataclasses.replace(
        preset("smoke").model, hidden_dim=d, latent_dim=d, head_dim=head_dim, num_tokens=latents, num_latents=latents,
        denoiser_depth=depth, encoder_depth=1, decoder_depth=1, ffn_multiple=ffn, vocab_size=20,
    )  # fmt: skip
    return preset("smoke").replace(model=model)


@pytest.fixture(scope="module")
def trained(shaken):
    """trained(config): a model, weights that are far from their start, and its modules."""

    def make(config):
        model = Model(config)
        params = shaken(model.init(jax.random.key(0)), 0.05)
        params["denoiser"]["output"]["kernel"] *= 30.0
        return model, params, model.merge(params, model.frozen_shapes)

    return make


def fused_and_plain(model, params, module, num, sampler, seed=1, programs=1, launched=1, **changed):
    """Estimates of the kernel, cut for `programs` and launched with `launched`, and of the plain loop."""
    from jdllm.kernels.triton import denoise_loop

    m, schedule = model.config.model, TangentSchedule(model.config.diffusion.schedule_d)
    cut = dataclasses.replace(tiling(m, num, programs), **changed)
    key, steps, shape = jax.random.key(seed), len(TIMES) - 1, (num, m.num_latents, m.latent_dim)
    first, later = jax.random.split(key)
    noise = jnp.stack([jax.random.normal(jax.random.fold_in(later, i), shape) for i in range(steps)])
    tables = step_tables(params["denoiser"], module.denoiser.modulation(TIMES[:-1]), TIMES, schedule, sampler)
    weights = jax.jit(fused.fused_weights, static_argnums=(1, 2))(params["denoiser"], cut, "float32")
    launch = fused.Launch(prefetch=0)
    fresh = noise.reshape(steps, cut.rows, -1) if sampler == "sde" else None
    start = jax.random.normal(first, shape).reshape(cut.rows, -1)
    inputs = fused.launch_arguments(weights, tables, m, fresh, start, steps)
    constants = fused.constants(m, cut, launch, fresh_noise=fresh is not None, quantised=weights.quantised)
    memory = triton_launch.poisoned(fused.scratch(m, cut, jnp.float32), "cpu")
    tensors = [triton_launch.tensor(x, "cpu") for x in inputs]
    triton_launch.launch(denoise_loop, tensors, memory, constants | {"PROGRAMS": launched})
    denoise = make_denoise(module, 0.0, False, jnp.float32)
    modulation = module.denoiser.modulation(TIMES)
    wanted = samplers.sample(key, denoise, shape, schedule, TIMES, sampler=sampler, conditions=modulation)
    return memory["estimate"].numpy().reshape(shape), np.asarray(wanted)


def distance(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


CASES = {
    "one sequence": ({}, 1),
    "several sequences in one tile of rows": ({"latents": 8}, 3),
    "sequences over several tiles, rows to spare": ({"latents": 24}, 4),
    "three heads, tiles that end beyond the width": ({"d": 96, "ffn": 4, "depth": 1}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loop_is_the_plain_loop(case, trained):
    changes, num = CASES[case]
    found, wanted = fused_and_plain(*trained(make_config(**changes)), num, "ddim")
    assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("sampler", ["sde", "early_stop"])
def test_samplers_draw_the_noise_of_the_plain_loop(sampler, trained):
    found, wanted = fused_and_plain(*trained(make_config(depth=1)), 1, sampler)
    assert distance(found, wanted) < 1e-5


def test_products_may_be_split_along_k(trained):
    """As they are where programs would otherwise have nothing to do; three programs share the parts, and wait for each other."""
    model, params, module = trained(make_config(depth=1))
    cut = tiling(model.config.model, 1, 16)
    changed = {
        name: dataclasses.replace(getattr(cut, name), split=split)
        for name, split in (("input", 4), ("out", 2), ("down", 2), ("output", 2))
    }
    found, wanted = fused_and_plain(model, params, module, 1, "ddim", programs=16, launched=3, block_k=32, **changed)
    assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("widths", [(64, 64, 64, 64), (16, 64, 32, 16), (32, 16, 64, 32)])
def test_writers_of_the_residual_stream_may_be_cut_differently(widths, trained):
    """Tiles of 96 columns, some beyond them, in two tiles of rows, added up a few rows at a time; each leaves its own sums."""
    model, params, module = trained(make_config(d=96, depth=1))
    cut = tiling(model.config.model, 8, 32)
    changed = {
        name: dataclasses.replace(getattr(cut, name), block_n=block_n)
        for name, block_n in zip(("input", "out", "down", "output"), widths)
    }
    assert cut.row_tiles == 2 and dataclasses.replace(cut, **changed).add_rows(changed["out"]) < cut.block_m
    found, wanted = fused_and_plain(model, params, module, 8, "ddim", programs=32, launched=2, **changed)
    assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_quantised_weights_are_multiplied_as_by_xla(weights, trained):
    model, params, _ = trained(make_config())
    params = quantize_params(params, weights)
    module = model.merge(params, model.frozen_shapes)
    found, wanted = fused_and_plain(model, params, module, 1, "ddim")
    assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_cut_without_a_rest(name):
    """Every column has a tile, every part of k is whole, and what is added up lies within one tile."""
    for num, programs in ((1, 132), (16, 132), (1, 170), (3, 78)):
        cut = tiling(preset(name).model, num, programs)
        assert cut.row_tiles * cut.block_m >= cut.rows
        for product in cut.products.values():
            assert product.tiles * product.block_n >= product.n
            assert product.k % product.split == 0 and product.k // product.split % cut.block_k == 0
        for product in (cut.input, cut.out, cut.down, cut.output):
            assert cut.block_m % cut.add_rows(product) == 0


@pytest.mark.parametrize("n", [16, 40, 64])
def test_packing_there_and_back(n):
    matrix = jax.random.normal(jax.random.key(0), (2, 8, n))
    packed = packing.pack(matrix, 16)
    assert packed.shape == (2, -(-n // 16), 8, 16)
    np.testing.assert_array_equal(packing.unpack(packed, n), matrix)
    np.testing.assert_array_equal(packed[1, 0, 3], matrix[1, 3, :16])  # one row of a tile lies in one piece


def test_what_the_fused_loop_does_not_know_is_said_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(op, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(op.importlib.util, "find_spec", lambda name: object())
    model = preset("books").model

    def obstacle(**changes):
        return op.obstacle(
            model, **({"guided": False, "sampler": "ddim", "dtype": "bfloat16", "weights": None} | changes)
        )

    assert obstacle() is None and obstacle(sampler="sde", weights="int8") is None
    for changes, words in (
        ({"sampler": "dpmpp"}, "needs the last two"), ({"guided": True}, "no guidance"), ({"dtype": "float32"}, "bfloat16"),
        ({"weights": "int4"}, "int8 and fp8"),
    ):  # fmt: skip
        assert words in obstacle(**changes)


def test_what_cannot_run_here_says_why():
    model = preset("books").model
    options = {"num": 1, "guided": False, "sampler": "ddim", "dtype": "bfloat16", "weights": None}
    assert op.choose("auto", model, **options).implementation == "xla"
    with pytest.raises(ConfigError, match="NVIDIA GPU"):
        op.choose("triton", model, **options)
    with pytest.raises(ConfigError, match="auto, xla, triton"):
        op.choose("cuda", model, **options)
