"""Random weights for timing: outputs are finite, of unit size, differ between positions and between draws of noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.generation.generate import generate
from jdllm.model.ldlm import Model
from jdllm.model.random_weights import random_weights, spread


@pytest.fixture(scope="module")
def model(tiny):
    return Model(tiny.replace(model__latent_dim=64, model__hidden_dim=64, model__head_dim=32, model__head="encoder"))


def test_every_leaf_has_its_shape_and_none_is_constant(model):
    trees, shapes = random_weights(model, 0, "bfloat16"), (model.param_shapes, model.frozen_shapes)
    for leaf, wanted in zip(jax.tree.leaves(trees), jax.tree.leaves(shapes), strict=True):
        assert leaf.shape == wanted.shape and leaf.dtype == jnp.bfloat16
        assert float(leaf.astype(jnp.float32).std()) > 0
    assert jax.tree.structure(trees) == jax.tree.structure(shapes)


def test_spread_by_place():
    assert spread(["denoiser", "blocks", "ffn", "down", "kernel"], (2, 256, 64)) == (0.0, 256**-0.5 / 2)
    assert spread(["denoiser", "output", "kernel"], (64, 64)) == (0.0, 64**-0.5)
    assert spread(["decoder", "norm", "gain"], (64,)) == (1.0, 0.1)


def test_outputs_are_finite_of_unit_size_and_vary(model):
    params, frozen = random_weights(model, 0, "float32")

    @jax.jit
    def outputs(z):
        module = model.merge(params, frozen)
        x0 = module.denoiser(z, module.denoiser.modulation(jnp.array([0.9])), jnp.zeros_like(z))
        return x0, module.decoder(z)

    for out in outputs(jax.random.normal(jax.random.key(0), (2, 8, 64))):
        assert 0.3 < float(out.std()) < 3
    tokens = [
        generate(
            model, params, frozen, jax.random.key(seed), jnp.linspace(1.0, 0.0, 4), 3, 1.0, 0.0,
            num=4, sampler="ddim", guided=False, dtype="float32",
        )
        for seed in (0, 1)
    ]  # fmt: skip
    assert len(np.unique(tokens[0])) > 8 and (tokens[0] != tokens[1]).mean() > 0.3
