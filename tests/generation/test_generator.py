"""The Generator that people hold: seeds, watching, options, text."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError
from jdllm.diffusion.samplers import SAMPLERS
from jdllm.generation import generator as generator_module


def test_tokens_follow_from_seed_and_options(generator):
    first = generator.generate_tokens(seed=3, num=8)
    assert first.shape == (8, 8) and first.min() >= 0 and first.max() < 37
    np.testing.assert_array_equal(generator.generate_tokens(seed=3, num=8), first)
    assert (generator.generate_tokens(seed=4, num=8) != first).any()
    assert len({tuple(row) for row in first}) == 8


@pytest.mark.parametrize(
    "options",
    [{"sampler": sampler} for sampler in SAMPLERS] + [{"guidance": 0.7}, {"grid": "tau"}, {"temperature": 0.5}],
    ids=str,
)
def test_watched_generation_writes_the_same(generator, options):
    seen = []
    watched = generator.generate_tokens(
        seed=1, num=8, steps=4, on_step=lambda step, total, tokens: seen.append((step, total, tokens)), **options
    )
    np.testing.assert_array_equal(watched, generator.generate_tokens(seed=1, num=8, steps=4, **options))
    assert [entry[:2] for entry in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    np.testing.assert_array_equal(seen[-1][2], watched)


def test_many_texts_come_in_parts_and_watching_changes_nothing(generator, monkeypatch):
    monkeypatch.setattr(generator_module, "BATCH", 3)
    for sampler in ("ddim", "sde", "dpmpp"):
        many = generator.generate_tokens(num=8, sampler=sampler)
        assert many.shape == (8, 8) and len({tuple(row) for row in many}) == 8
        watched = generator.generate_tokens(num=8, sampler=sampler, on_step=lambda *_: None)
        np.testing.assert_array_equal(watched, many)


@pytest.mark.parametrize("k", [4, 1])
def test_fewer_latents_than_tokens(make_generator, tiny, k):
    generator = make_generator(tiny.replace(model__num_latents=k))
    assert generator.generate_tokens(num=2).shape == (2, 8)


def test_sampling_defaults_are_the_runs_and_none_means_default(generator, tiny):
    assert generator.sampling() == tiny.sampling == generator.sampling(steps=None, sampler=None)
    assert generator.sampling(steps=7).steps == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stpes": 3}, ["stpes", "steps"]), ({"sampler": "ddpm"}, ["ddpm", "ddim, sde, early_stop"]),
        ({"grid": "x"}, ["'x'", "u, tau"]), ({"steps": 0}, ["steps=0", "at least 1"]), ({"num": 0}, ["num=0"]),
    ],
)  # fmt: skip
def test_impossible_options_are_sentences(generator, options, words):
    with pytest.raises(ConfigError) as error:
        generator.generate_tokens(**options)
    assert all(word in str(error.value) for word in words)


def test_text_ends_at_the_first_end_of_sequence(generator):
    tokens = np.array([[5, 6, 0, 7, 0], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    assert generator.decode(tokens) == ["w5 w6", "", "w1 w2 w3 w4 w5"]
    assert generator.generate(num=3, seed=2) == generator.decode(generator.generate_tokens(num=3, seed=2))


def test_reconstruction_never_reads_padding_and_noise_is_seeded(generator, tiny, make_batch, refill):
    batch = make_batch(tiny, 6)
    clean = generator.reconstruct(batch)
    assert clean.shape == (6, 8)
    np.testing.assert_array_equal(generator.reconstruct(refill(batch)), clean)
    noisy = generator.reconstruct(batch, decoder_noise=3.0, seed=1)
    np.testing.assert_array_equal(generator.reconstruct(batch, decoder_noise=3.0, seed=1), noisy)
    assert (noisy != clean).any() and (generator.reconstruct(batch, decoder_noise=3.0, seed=2) != noisy).any()


def test_denoising_loss_is_the_error_of_one_estimate(generator):
    """At tau = 0 noise has no part in it, at tau = 1 the latents have none in the estimate."""
    z = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 16)), jnp.float32)
    clean = generator.denoising_loss(z, np.zeros(4), seed=1)
    np.testing.assert_allclose(clean, generator.denoising_loss(z, np.zeros(4), seed=2), rtol=1e-5)
    denoiser = generator.model.merge(generator.params, {}).denoiser
    estimate = denoiser(z, denoiser.modulation(jnp.zeros(4)), jnp.zeros_like(z))
    np.testing.assert_allclose(clean, jnp.square(estimate - z).mean((1, 2)), rtol=1e-4)
    assert (generator.denoising_loss(z, np.ones(4), seed=1) != generator.denoising_loss(z, np.ones(4), seed=2)).all()
