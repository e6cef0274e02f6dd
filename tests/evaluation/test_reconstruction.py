"""Counting what comes back, with stand-ins for the model whose answers are known, and once with a real one."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

from jdllm.config import preset
from jdllm.evaluation.evaluate import at_human_entropy
from jdllm.evaluation.reconstruction import BATCH, batches, denoising_loss_by_tau, reconstruction_accuracy
from jdllm.generation.generator import Generator
from jdllm.model.ldlm import Model
from jdllm.model.standardize import LatentStats

T = 8


class Windows:
    """n windows of random tokens, in memory."""

    def __init__(self, n, t=T, hidden_dim=4, vocab_size=50):
        rng = np.random.default_rng(n)
        self.values = {
            "hidden": rng.normal(size=(n, t, hidden_dim)).astype(ml_dtypes.bfloat16),
            "ids": rng.integers(0, vocab_size, (n, t)).astype(np.int32),
            "lengths": rng.integers(2, t + 1, n).astype(np.int32),
        }

    def __len__(self):
        return len(self.values["ids"])

    def gather(self, indices):
        return {name: values[indices] for name, values in self.values.items()}


class Wrong:
    """Gets the first `wrong` tokens of every window wrong, and everything in the padding."""

    def __init__(self, wrong):
        self.wrong = wrong

    def reconstruct(self, batch, *, decoder_noise, seed):
        tokens = batch["ids"].copy()
        position = np.arange(tokens.shape[1])
        tokens[(position < self.wrong) | (position >= batch["lengths"][:, None])] += 1
        return tokens

    def encode(self, batch):
        return batch["lengths"].astype(np.float64)

    def denoising_loss(self, z, tau, *, seed):
        return tau * z


@pytest.mark.parametrize("n", [1, 5, BATCH, BATCH + 1, 3 * BATCH - 7])
def test_every_window_counts_once(n):
    source = Windows(n)
    ids = np.concatenate([batch["ids"][counts] for batch, counts in batches(source)])
    np.testing.assert_array_equal(ids, source.values["ids"])
    assert len({len(counts) for _, counts in batches(source)}) == 1  # one shape, one compilation


@pytest.mark.parametrize("n", [1, 5, BATCH + 9])
def test_accuracy_is_over_valid_tokens_only(n):
    source = Windows(n)
    assert reconstruction_accuracy(Wrong(0), source) == 1.0
    lengths = source.values["lengths"]
    assert reconstruction_accuracy(Wrong(2), source) == pytest.approx(1 - 2 * n / lengths.sum())


def test_loss_by_tau_is_the_mean_of_each_bin():
    source = Windows(400)
    losses = denoising_loss_by_tau(Wrong(0), source, bins=5)
    middle = (np.arange(5) + 0.5) / 5
    np.testing.assert_allclose(losses, middle * source.values["lengths"].mean(), atol=0.15)
    assert (np.diff(losses) > 0).all()


@pytest.fixture(scope="module")
def generator():
    """An untrained model of the smallest size."""
    config = preset("smoke").replace(
        model__num_tokens=T, model__num_latents=T, model__hidden_dim=4, model__vocab_size=50, model__latent_dim=32,
    )  # fmt: skip
    model, d = Model(config), config.model.latent_dim
    stats = LatentStats(jnp.zeros((T, d)), jnp.ones((T, d)), jnp.ones(()))
    return Generator(
        config, model.init(jax.random.key(0)), model.frozen_shapes, jnp.linspace(0, 1, 101), stats, jnp.zeros(4), jnp.ones(4),
        tokenizers.Tokenizer(tokenizers.models.BPE()), eos_id=0,
    )  # fmt: skip


def test_padding_changes_neither_figure(generator):
    source = Windows(6)
    other = Windows(6)
    for row, length in enumerate(source.values["lengths"]):
        other.values["hidden"][row, length:] = 7.0
        other.values["ids"][row, length:] = 3
    for measure in (reconstruction_accuracy, lambda g, s: denoising_loss_by_tau(g, s, bins=3)):
        np.testing.assert_array_equal(measure(generator, source), measure(generator, other))


def test_figures_repeat_with_the_same_seed_and_noise_matters(generator):
    source = Windows(6)
    once, again, other = (denoising_loss_by_tau(generator, source, bins=3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once, again)
    assert (once != other).all() and np.isfinite(once).all()
    batch = source.gather(np.arange(6))
    clean, noisy = (generator.reconstruct(batch, decoder_noise=noise) for noise in (0.0, 3.0))
    assert (clean != noisy).any()


def test_perplexity_at_human_entropy_lies_between_the_temperatures_around_it():
    rows = {1.0: {"perplexity": 200.0, "entropy": 4.3}, 0.8: {"perplexity": 50.0, "entropy": 4.1}}
    assert at_human_entropy(rows, 4.2) == pytest.approx(100.0)  # half way in the logarithm
    assert at_human_entropy(rows, 4.0) is None and at_human_entropy({1.0: rows[1.0]}, 4.2) is None
    assert at_human_entropy({**rows, 0.9: {"perplexity": None, "entropy": 4.2}}, 4.2) == pytest.approx(100.0)
