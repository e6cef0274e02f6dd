"""A generator with random weights; what it writes is nonsense, how it writes it is not."""

import jax
import jax.numpy as jnp
import pytest
import tokenizers

from jdllm.diffusion.timesteps import cumulative, init_timesteps
from jdllm.generation.generator import Generator
from jdllm.model.ldlm import Model
from jdllm.model.standardize import LatentStats

EOS = 0


@pytest.fixture(scope="session")
def make_generator():
    """make_generator(config, **fields)."""

    def make(config, **fields):
        words = {"<eos>": EOS} | {f"w{i}": i for i in range(1, config.model.vocab_size)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
        shape = (config.model.num_latents, config.model.latent_dim)
        params = fields.get("params") or Model(config).init(jax.random.key(1))
        if "denoiser" in params:
            params["denoiser"]["output"]["kernel"] *= (
                30.0  # a fresh denoiser says almost nothing, and all texts are alike
            )
        values = {
            "params": params, "frozen": {},
            "edges": cumulative(init_timesteps(config.diffusion), config.diffusion),
            "latent_stats": LatentStats(jnp.zeros(shape), 0.5 * jnp.ones(shape), jnp.float32(0.5)),
            "hidden_mean": jnp.full(12, 0.1), "hidden_std": jnp.full(12, 1.2), "tokenizer": tokenizer, "eos_id": EOS,
        }  # fmt: skip
        return Generator(config=config, **(values | fields))

    return make


@pytest.fixture(scope="session")
def generator(make_generator, tiny):
    return make_generator(tiny)
