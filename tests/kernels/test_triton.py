"""The source of the fused loop, run by Triton's interpreter at tiny sizes, against the plain JAX loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jdllm.config import preset
from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.generation.generate import make_denoise
from jdllm.kernels import fused
from jdllm.kernels.tables import step_tables
from jdllm.kernels.tiling import tiling
from jdllm.model.ldlm import Model

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


def run_interpreted(kernel, inputs, outputs, constants):
    """Launch one program; memory that the kernel does not write before reading it holds NaN."""

    def given(x):
        return x if isinstance(x, int) else torch.from_numpy(np.array(x))

    def empty(name, shape):
        kind = getattr(torch, shape.dtype.name)
        return torch.full(shape.shape, 0 if name in ("everyone", "done") else float("nan"), dtype=kind)

    memory = {name: empty(name, shape) for name, shape in outputs.items()}
    kernel[(1,)](*map(given, inputs), *memory.values(), **constants)
    return memory


def fused_and_plain(model, params, module, num, sampler, seed=1, programs=1, **changed):
    """Estimates of the kernel, of the plain loop."""
    from jdllm.kernels.triton import denoise_loop

    m, schedule = model.config.model, TangentSchedule(model.config.diffusion.schedule_d)
    cut = dataclasses.replace(tiling(m, num, programs), **changed)
    key, steps, shape = jax.random.key(seed), len(TIMES) - 1, (num, m.num_latents, m.latent_dim)
    first, later = jax.random.split(key)
    noise = jnp.stack([jax.random.normal(jax.random.fold_in(later, i), shape) for i in range(steps)])
    tables = step_tables(params["denoiser"], module.denoiser.modulation(TIMES[:-1]), TIMES, schedule, sampler)
    weights = fused.fused_weights(params["denoiser"], cut, "float32")
    launch = fused.Launch(prefetch=False)
    fresh = noise.reshape(steps, cut.rows, -1) if sampler == "sde" else None
    start = jax.random.normal(first, shape).reshape(cut.rows, -1)
    inputs = fused.launch_arguments(weights, tables, m, fresh, start, steps)
    memory = run_interpreted(
        denoise_loop, inputs, fused.scratch(m, cut, jnp.float32),
        fused.constants(m, cut, launch, fresh_noise=fresh is not None, quantised=weights.quantised) | {"PROGRAMS": 1},
    )  # fmt: skip
    denoise = make_denoise(module, 0.0, False, jnp.float32)
    wanted = samplers.sample(key, denoise, shape, schedule, TIMES, sampler=sampler)
    return memory["estimate"].numpy().reshape(shape), np.asarray(wanted)


def distance(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


CASES = {
    "one sequence": ({}, 1),
    "several sequences in one tile of rows": ({"latents": 8}, 3),
    "sequences over several tiles, rows to spare": ({"latents": 24}, 4),
    "three heads, tiles that end beyond the width": ({"d": 96, "ffn": 4, "depth": 1}, 1),
    "latents no power of two": ({"latents": 20, "depth": 1}, 2),
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
    """As they are where programs would otherwise have nothing to do."""
    model, params, module = trained(make_config(depth=1))
    cut = tiling(model.config.model, 1, 16)
    changed = {
        name: dataclasses.replace(getattr(cut, name), split=split)
        for name, split in (("input", 4), ("out", 2), ("down", 2), ("output", 2))
    }
    found, wanted = fused_and_plain(model, params, module, 1, "ddim", programs=16, block_k=32, **changed)
    assert distance(found, wanted) < 1e-5
