"""Writing with the baselines: the cache changes nothing, and a step commits what it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError
from jdllm.generation.baselines import commit, fill_in, write_in_order
from jdllm.generation.draw import draw
from jdllm.model.ldlm import Model
from jdllm.model.token_transformer import NONE, shifted

KEY, T, NUM = jax.random.key(4), 8, 6


@pytest.fixture(scope="module")
def make(tiny, shaken):
    """make(kind): a model of two blocks and weights that let it say different things."""

    def make(kind):
        model = Model(tiny.replace(model__kind=kind, model__trunk_depth=2))
        return model, shaken(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.param_shapes), 0.3)

    return make


@pytest.fixture(scope="module")
def written(make):
    """written(temperature, top_p): texts by the cache, and by reading the whole text so far for every token."""
    model, params = make("autoregressive")

    @jax.jit
    def without(temperature, top_p):
        module, ids = model.merge(params, {}), jnp.zeros((NUM, T), jnp.int32)
        for position in range(T):
            states, key = module.states(shifted(ids))[:, position], jax.random.fold_in(KEY, position)
            tokens = draw(key, states, module.token_decoder.head[...], temperature, top_p, nucleus=True).tokens
            ids = ids.at[:, position].set(tokens)
        return ids

    def both(*options):
        return write_in_order(model, params, {}, KEY, *options, num=NUM, nucleus=True), without(*options)

    return both


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.8, 0.7)])
def test_with_the_cache_and_without_the_same_tokens_come(written, temperature, top_p):
    found, expected = written(temperature, top_p)
    np.testing.assert_array_equal(found, expected)
    assert len({tuple(row) for row in np.asarray(found).tolist()}) == (1 if temperature == 0 else NUM)


@pytest.fixture(scope="module")
def filled(make):
    """filled(order, steps): the texts (steps + 1, n, t) after 0, 1, … steps of one program, put together from its steps."""
    model, params = make("masked")
    step = jax.jit(
        lambda params, *arguments, order: commit(
            model.merge(params, {}), *arguments, 1.0, 1.0, order=order, nucleus=False
        ),
        static_argnames="order",
    )

    def run(order, steps):
        seen = [jnp.full((NUM, T), NONE, jnp.int32)]
        for index in range(steps):
            count = T * (index + 1) // steps - T * index // steps
            seen.append(step(params, jax.random.fold_in(KEY, index), seen[-1], count, order=order))
        whole = fill_in(model, params, {}, KEY, steps, 1.0, 1.0, num=NUM, order=order, nucleus=False)
        np.testing.assert_array_equal(whole, seen[-1])
        return np.stack(seen)

    return run


@pytest.mark.parametrize("order", ["confidence", "entropy", "random"])
def test_every_step_commits_its_share_and_nothing_is_taken_back(filled, order):
    for steps, committed in ((T, [1] * T), (1, [T]), (3, [2, 3, 3]), (4, [2] * 4)):
        texts = filled(order, steps)
        assert (texts[-1] != NONE).all()
        left = (texts == NONE).sum(2)
        np.testing.assert_array_equal(-np.diff(left, axis=0), np.repeat(np.array(committed)[:, None], NUM, 1))
        for before, after in zip(texts, texts[1:]):
            np.testing.assert_array_equal(after[before != NONE], before[before != NONE])


def test_each_order_takes_its_own_places_first(make, filled):
    model, params = make("masked")
    logits = jax.jit(lambda ids: model.merge(params, {}).logits(ids))(jnp.full((NUM, T), NONE))
    p = np.asarray(jax.nn.softmax(logits))[0]
    entropy = -(p * np.log(p)).sum(1)
    first = {order: filled(order, T)[1] != NONE for order in ("entropy", "confidence", "random")}
    np.testing.assert_array_equal(first["entropy"], np.eye(T, dtype=bool)[[entropy.argmin()] * NUM])
    tokens = filled("confidence", 1)[1]  # the same first draw, kept whole
    sure = np.log(p)[np.arange(T), tokens].argmax(1)
    np.testing.assert_array_equal(first["confidence"], np.eye(T, dtype=bool)[sure])
    assert len(set(first["random"].argmax(1))) > 1


@pytest.fixture(scope="module")
def generators(tiny, make, make_generator):
    return {
        kind: make_generator(tiny.replace(model__kind=kind, model__trunk_depth=2), params=make(kind)[1])
        for kind in ("autoregressive", "masked")
    }


def test_the_generator_writes_with_either(generators):
    for kind, generator in generators.items():
        first = generator.generate_tokens(seed=3, num=NUM)
        assert first.shape == (NUM, T) and first.min() >= 0 and first.max() < 37
        np.testing.assert_array_equal(generator.generate_tokens(seed=3, num=NUM), first)
        assert (generator.generate_tokens(seed=4, num=NUM) != first).any()
        assert generator.generate(seed=3, num=NUM) == generator.decode(first)
        assert generator.taken().startswith("xla"), kind


def test_more_steps_than_tokens_are_no_more(generators):
    masked = generators["masked"]
    np.testing.assert_array_equal(masked.generate_tokens(steps=50, num=2), masked.generate_tokens(steps=T, num=2))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("autoregressive", {"steps": 4}, "'steps' for model.kind=autoregressive, which takes one step a token"),
        ("autoregressive", {"order": "random"}, "no sampling option 'order'.*num, temperature, top_p"),
        ("masked", {"guidance": 1.0}, "no sampling option 'guidance' for model.kind=masked"),
        ("masked", {"order": "left"}, "order='left' is not one of confidence, entropy, random"),
        ("masked", {"top_p": 0.0}, "top_p=0.0 is outside"),
    ],
)
def test_options_of_another_kind_are_refused(generators, kind, options, words):
    with pytest.raises(ConfigError, match=words):
        generators[kind].generate_tokens(**options)


def test_what_only_latents_can_do_is_refused(generators, generator):
    with pytest.raises(ConfigError, match="only latents can be watched"):
        generators["masked"].generate_tokens(on_step=lambda *_: None)
    with pytest.raises(ConfigError, match="no sampling option 'order' for model.kind=ldlm"):
        generator.generate_tokens(order="random")
