"""The baseline computes what jdllm computes: same weights, same noise, same tokens, in both of its loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError
from jdllm.generation.generate import generate
from jdllm.model.ldlm import Model
from jdllm.model.random_weights import random_weights
from weights_port import torch_baseline as baseline


@pytest.fixture(scope="module")
def problem(tiny):
    """Config, weights, and the tokens that JAX writes in three steps."""
    config = tiny.replace(model__latent_dim=64, model__hidden_dim=64, model__head_dim=32, model__head="encoder")
    model, key = Model(config), jax.random.key(3)
    weights = random_weights(model, 0, "float32")
    options = {"num": 3, "sampler": "ddim", "guided": False, "dtype": "float32"}
    return config, weights, generate(model, *weights, key, jnp.linspace(1.0, 0.0, 4), 3, 1.0, 0.0, **options), key


def test_eager_and_lean_loops_write_the_tokens_of_jax(problem):
    config, weights, tokens, key = problem
    twin, noise = baseline.twin(config, *weights, "float32"), baseline.noise(config, key, 3)
    assert len(np.unique(tokens)) > 4
    np.testing.assert_array_equal(baseline.eager(twin, noise, 3)(), tokens)
    np.testing.assert_array_equal(baseline.lean(baseline.prepared(twin, compile=False), noise, 3)(), tokens)


def test_weights_are_in_the_arithmetic_asked_for(problem):
    config, weights, *_ = problem
    twin = baseline.twin(config, *weights, "bfloat16")
    assert {str(p.dtype) for p in twin.model.parameters()} == {"torch.bfloat16"}
    tokens = baseline.eager(twin, baseline.noise(config, jax.random.key(0), 2), 2)()
    assert tokens.shape == (2, 8)


def test_a_graph_needs_a_gpu(problem):
    config, weights, *_ = problem
    twin, noise = baseline.twin(config, *weights, "float32"), baseline.noise(config, jax.random.key(0), 1)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        baseline.graph(baseline.prepared(twin, compile=False), noise, 2)
