"""The baselines' model: who sees whom, the cache, and its size beside the LDLM's."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError, preset
from jdllm.model.ldlm import Model, trunk_depth
from jdllm.model.token_transformer import NONE, shifted

ROWS, T, V = 3, 8, 37
IDS = np.random.default_rng(0).integers(0, V, (ROWS, T))


@pytest.fixture(scope="module")
def make(tiny, shaken):
    """make(kind, head="trained"): a model of two blocks, and weights that are not as they started."""

    def make(kind, head="trained"):
        model = Model(tiny.replace(model__kind=kind, model__trunk_depth=2, model__head=head))
        rng = np.random.default_rng(1)
        trees = (model.param_shapes, model.frozen_shapes)
        params, frozen = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trees)
        frozen = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), frozen)
        return model, shaken(params, 0.3), frozen

    return make


@pytest.mark.parametrize("kind", ["autoregressive", "masked"])
def test_who_reads_whom(make, kind):
    """Causal: later tokens never change earlier logits, all others do.  Bidirectional: all do."""
    model, params, frozen = make(kind)
    ids = np.concatenate([IDS[:1]] * (T + 3))
    for j in range(T):
        ids[j, j] = (ids[j, j] + 1) % V
    ids[T, 3], ids[T + 1, 3] = NONE, 0  # no token is a vector of its own, also beside token 0
    logits = jax.jit(lambda params, ids: model.merge(params, frozen).logits(ids))(params, ids)
    changed = np.abs(logits - logits[-1]).max(-1) > 0  # [j, i]: whether the logits at i change with the token at j
    expected = np.tri(T, dtype=bool).T if kind == "autoregressive" else np.ones((T, T), bool)
    np.testing.assert_array_equal(changed[:T], expected)
    assert changed[T, 3] and np.abs(logits[T] - logits[T + 1])[3].max() > 1e-3


def test_shifted_begins_with_nothing():
    np.testing.assert_array_equal(shifted(jnp.array([[5, 6, 7]])), [[NONE, 5, 6]])


def test_states_with_a_cache_are_those_without(make):
    """With the frozen head; generation has the trained one (tests/generation/test_baselines.py)."""
    model, params, frozen = make("autoregressive", "encoder")

    @jax.jit
    def both(params, ids):
        module, inputs = model.merge(params, frozen), shifted(ids)
        blocks, table = module.blocks(), module.table()

        def step(cache, position):
            states, cache = module.advance(blocks, table, inputs[:, position], position, cache)
            return cache, states

        found = jax.lax.scan(step, module.empty_cache(ROWS, T), jnp.arange(T))[1]
        return found.swapaxes(0, 1), module.states(inputs)

    np.testing.assert_allclose(*both(params, IDS), rtol=2e-4, atol=2e-5)


def test_embeddings_are_the_head_and_learn_with_it(make):
    model, params, _ = make("masked")

    def read(params):  # token 5 is read at one place and the logit of token 9 is what comes out
        ids = jnp.full((1, T), NONE).at[0, 2].set(5)
        return model.merge(params, {}).logits(ids)[0, 4, 9]

    grads = jax.jit(jax.grad(read))(params)
    moved = np.flatnonzero(np.abs(grads["token_decoder"]["head"]).max(0))
    np.testing.assert_array_equal(moved, [5, 9])
    assert np.abs(grads["none"]).max() > 0


def size(config):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(Model(config).param_shapes))


@pytest.mark.parametrize("name", ["smoke", "books", "qwen3.6-27b-5090"])
def test_as_many_blocks_as_bring_it_nearest_to_the_ldlm(name):
    config = preset(name)
    goal, depth = size(config), trunk_depth(config.model)
    masked = config.replace(model__kind="masked")
    assert size(masked) == size(config.replace(model__kind="autoregressive"))
    off = {n: abs(size(masked.replace(model__trunk_depth=n)) - goal) for n in (depth - 1, depth, depth + 1)}
    assert off[depth] == min(off.values()) == abs(size(masked) - goal)
    if name != "smoke":
        assert off[depth] < 0.02 * goal


def test_kind_and_depth_that_do_not_fit_are_sentences():
    for changes, words in (
        ({"model__trunk_depth": 3}, "for model.kind=autoregressive and masked alone"),
        ({"model__kind": "masked", "model__trunk_depth": 0}, "from 1"),
        ({"model__kind": "masked", "feed__feed": "online"}, "reads no hidden states"),
        ({"sampling__top_p": 0.0}, "outside \\(0, 1\\]"),
    ):
        with pytest.raises(ConfigError, match=words):
            preset("smoke").replace(**changes)


def test_a_config_from_before_there_were_kinds_loads():
    values = preset("smoke").to_dict()
    for key in ("kind", "trunk_depth"):
        del values["model"][key]
    for key in ("order", "top_p"):
        del values["sampling"][key]
    config = type(preset("smoke")).from_dict(values)
    assert config == preset("smoke") and dataclasses.asdict(config)["model"]["kind"] == "ldlm"
