"""Token decoder and its two kinds of head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.kernels.cross_entropy import most_likely_tokens
from jdllm.model.layers import rms_norm
from jdllm.model.ldlm import Model

HIDDEN = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 12)), jnp.float32)


@pytest.fixture(scope="module", params=["trained", "encoder"])
def decoder(request, tiny, shaken):
    model = Model(tiny.replace(model__head=request.param))
    head = jnp.asarray(np.random.default_rng(1).normal(size=(12, 37)), jnp.bfloat16)
    frozen = {"token_decoder": {"head": head}} if request.param == "encoder" else {}
    return model, model.merge(shaken(model.init(jax.random.key(0))), frozen).token_decoder


def test_tokens_are_those_of_the_largest_logits(decoder):
    _, decoder = decoder
    logits = decoder.logits(HIDDEN)
    assert logits.shape == (3, 8, 37) and logits.dtype == jnp.float32
    tokens = most_likely_tokens(decoder.states(HIDDEN), decoder.head[...], 16)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_it_looks_at_the_whole_sequence_and_at_its_order(decoder):
    _, decoder = decoder
    moved = decoder.logits(HIDDEN.at[:, 0].add(1.0)) - decoder.logits(HIDDEN)
    assert (np.abs(moved).max((0, 2)) > 1e-4).all()
    order = jnp.array([1, 0, 2, 3, 7, 5, 6, 4])
    assert np.abs(decoder.logits(HIDDEN[:, order]) - decoder.logits(HIDDEN)[:, order]).max() > 1e-3


def test_the_frozen_head_is_no_weight_of_ours(tiny):
    model = Model(tiny.replace(model__head="encoder"))
    assert "head" not in model.param_shapes["token_decoder"]
    assert model.frozen_shapes["token_decoder"]["head"].shape == (12, 37)
    assert not jax.tree.leaves(Model(tiny).frozen_shapes)


def test_the_frozen_head_reads_normalised_states(tiny, decoder):
    """As in the language model itself, whose final norm has its gain folded into the head."""
    model, decoder = decoder
    if model.config.model.head == "encoder":
        states = decoder.states(HIDDEN)
        assert states.shape == (3, 8, 12)
        np.testing.assert_allclose(states, rms_norm(states), atol=1e-3)


def test_depth_zero_is_a_head_alone(tiny):
    model = Model(tiny.replace(model__token_decoder_depth=0))
    decoder = model.merge(model.init(jax.random.key(0)), {}).token_decoder
    moved = decoder.logits(HIDDEN.at[:, 0].add(1.0)) - decoder.logits(HIDDEN)
    assert np.abs(moved[:, 0]).max() > 1e-4 and np.abs(moved[:, 1:]).max() == 0
