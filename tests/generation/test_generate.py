"""Generation as pure functions: order of latents, guidance, one program for all step counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.generation import generate

Z = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8, 16)), jnp.float32)


def arguments(generator):
    return generator.model, generator.params, generator.frozen


def test_permuting_latents_changes_the_text_and_does_not_just_permute_it(generator):
    order = jnp.array([1, 0, 2, 3, 7, 5, 6, 4])
    mixed = generate.decode(*arguments(generator), Z[:, order], dtype="float32")
    plain = generate.decode(*arguments(generator), Z, dtype="float32")
    assert (mixed != plain).mean() > 0.1 and (mixed != plain[:, order]).mean() > 0.1


def test_tokens_are_the_most_likely_ones_of_the_decoded_latents(generator):
    module = generator.model.merge(generator.params, {})
    logits = module.token_decoder.logits(module.decoder(Z))
    np.testing.assert_array_equal(generate.decode(*arguments(generator), Z, dtype="float32"), logits.argmax(-1))


def estimate(generator, guidance, guided):
    inputs = (Z, jnp.float32(0.6), Z[::-1], guidance)
    return generate.estimate_and_read(*arguments(generator), *inputs, guided=guided, dtype="float32")[0]


def test_guidance_of_zero_equals_none(generator):
    np.testing.assert_allclose(estimate(generator, 0.0, True), estimate(generator, 0.0, False), atol=1e-5)


def test_guidance_moves_the_estimate_away_from_the_one_without_memory(generator):
    denoiser = generator.model.merge(generator.params, {}).denoiser
    modulation = denoiser.modulation(jnp.full(6, 0.6))
    with_previous, without = denoiser(Z, modulation, Z[::-1]), denoiser(Z, modulation, jnp.zeros_like(Z))
    wanted = with_previous + 1.5 * (with_previous - without)
    np.testing.assert_allclose(estimate(generator, 1.5, True), wanted, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 5])
def test_one_program_serves_every_step_count(generator, steps):
    """Nothing is compiled anew when only the number of steps, guidance or temperature changes."""
    generator.generate_tokens(num=4, steps=3)
    before = generate.generate._cache_size()
    generator.generate_tokens(num=4, steps=steps, temperature=0.9)
    assert generate.generate._cache_size() == before


def test_encoding_uses_running_statistics_and_never_reads_padding(generator, tiny, make_batch, refill):
    batch = make_batch(tiny, 6)
    z = generator.encode(batch)
    np.testing.assert_array_equal(generator.encode(refill(batch)), z)
    one = {name: value[:1] for name, value in batch.items()}
    np.testing.assert_allclose(generator.encode(one), z[:1], atol=1e-5)  # the other rows have no say


def test_bfloat16_generates(make_generator, tiny):
    tokens = make_generator(tiny, dtype="bfloat16").generate_tokens(num=4)
    assert tokens.shape == (4, 8) and jax.dtypes.issubdtype(tokens.dtype, np.integer)
