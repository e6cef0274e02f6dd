"""A model small enough to compile in seconds, and batches for it."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: kernels run on the CPU

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ModelConfig, preset

jax.config.update("jax_disable_most_optimizations", True)  # tiny programs run once: most of their time is compilation


@pytest.fixture(scope="session")
def tiny():
    """Eight tokens, eight latents of width 16, float32."""
    model = ModelConfig(
        hidden_dim=12, vocab_size=37, num_tokens=8, num_latents=8, latent_dim=16, head_dim=8,
        encoder_depth=2, decoder_depth=2, token_decoder_depth=1, denoiser_depth=2,
    )  # fmt: skip
    return preset("smoke").replace(model=model, training__batch_size=8, diffusion__timestep_bins=10, sampling__steps=3)


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(config, rows, seed=0, full=False): random hidden states, ids and lengths, as a loader gives them."""

    def make(config, rows, seed=0, full=False):
        m, rng = config.model, np.random.default_rng(seed)
        lengths = np.full(rows, m.num_tokens) if full else rng.integers(2, m.num_tokens + 1, rows)
        valid = np.arange(m.num_tokens) < lengths[:, None]
        return {
            "hidden": jnp.asarray(rng.normal(size=(*valid.shape, m.hidden_dim)) * valid[..., None], jnp.bfloat16),
            "ids": jnp.asarray(rng.integers(0, m.vocab_size, valid.shape) * valid, jnp.int32),
            "lengths": jnp.asarray(lengths, jnp.int32),
        }

    return make


@pytest.fixture(scope="session")
def refill():
    """refill(batch): the same text with other values behind its end."""

    def refill(batch):
        rng = np.random.default_rng(99)
        padding = np.arange(batch["ids"].shape[1]) >= np.asarray(batch["lengths"])[:, None]
        assert padding.any()
        other = rng.normal(size=batch["hidden"].shape) * 5
        return batch | {
            "hidden": jnp.where(padding[..., None], other, batch["hidden"]).astype(jnp.bfloat16),
            "ids": jnp.where(padding, rng.integers(0, 7, padding.shape), batch["ids"]),
        }

    return refill


@pytest.fixture(scope="session")
def shaken():
    """shaken(params): every weight moved by a random bit, so that nothing is zero or one only because it starts so."""

    def shake(params, scale=0.1):
        leaves, structure = jax.tree.flatten(params)
        rng = np.random.default_rng(7)
        return structure.unflatten([leaf + scale * rng.normal(size=leaf.shape).astype(leaf.dtype) for leaf in leaves])

    return shake
