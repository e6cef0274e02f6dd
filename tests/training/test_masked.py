"""Masked diffusion's loss is the bound, worked out by hand for three tokens; both objectives read valid tokens alone."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.model.ldlm import Model
from jdllm.model.token_transformer import NONE
from jdllm.training import autoregressive, masked

V = 5


class Table:
    """In the place of a TokenTransformer: states, and so logits, of its own for each set of masked places."""

    def __init__(self, seed=0):
        self.table = jnp.asarray(np.random.default_rng(seed).normal(size=(8, 3, V)), jnp.float32)
        self.token_decoder = type("Head", (), {"head": jnp.eye(V)})

    def states(self, ids):
        return self.table[(ids == NONE) @ jnp.array([4, 2, 1])]


def by_hand(model, row, length):
    """Nats of one text: sum over the sets M of masked places of the integral of t^(|M|-1) (1-t)^(n-|M|), times their cost."""
    log_p = np.log(np.exp(model.table) / np.exp(model.table).sum(-1, keepdims=True))
    total = 0.0
    for m in range(1, length + 1):
        weight = math.factorial(m - 1) * math.factorial(length - m) / math.factorial(length)
        for places in itertools.combinations(range(length), m):
            seen = sum((4, 2, 1)[i] for i in (*places, *range(length, 3)))  # padding is always masked
            total -= weight * sum(log_p[seen, i, row[i]] for i in places)
    return total


@pytest.mark.parametrize(("lengths", "exact"), [([3, 2], False), ([3, 2], True)])
def test_the_loss_is_the_bound_worked_out_by_hand(lengths, exact):
    model, rows = Table(), np.array([[1, 4, 2], [0, 3, 3]])
    expected = sum(by_hand(model, row, length) for row, length in zip(rows, lengths)) / sum(lengths)
    copies = 20_000
    ids, many = jnp.asarray(np.repeat(rows, copies, 0)), jnp.asarray(np.repeat(lengths, copies), jnp.int32)
    if exact:
        found = jax.jit(lambda key: masked.held_out(model, ids, many, key)["nll"])(jax.random.key(1))
    else:
        found = jax.jit(lambda key: masked.losses(model, ids, many, key)[0])(jax.random.key(1))
    assert found == pytest.approx(expected, rel=0.03 if not exact else 0.005)


def test_the_bound_of_a_model_that_knows_nothing_is_its_exact_likelihood():
    """Uniform predictions cost ln v a token, and the number of masked tokens adds no noise to that."""
    model = Table()
    model.table = jnp.zeros_like(model.table)
    ids, lengths = jnp.zeros((600, 3), jnp.int32), jnp.tile(jnp.array([3, 2], jnp.int32), 300)
    found = jax.jit(lambda key: masked.held_out(model, ids, lengths, key)["nll"])(jax.random.key(0))
    assert found == pytest.approx(np.log(V), rel=1e-5)


def test_the_weight_is_one_over_t_and_only_masked_tokens_count():
    nll = jnp.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    hidden = jnp.array([[True, False, True], [False, True, False]])
    valid = jnp.array([[True, True, True], [True, True, False]])
    found = masked.weighted_nll(nll, hidden, 1 / jnp.array([0.5, 0.25]), valid)
    assert found == pytest.approx((2 * (1 + 4) + 4 * 16) / 5)


def test_as_many_places_are_masked_as_asked_and_each_as_often():
    valid = jnp.arange(6) < jnp.array([6, 4, 1])[:, None]
    keys = jax.random.split(jax.random.key(0), 2000)
    found = np.asarray(jax.vmap(lambda key: masked.mask_count(key, jnp.array([2, 3, 1]), valid))(keys))
    assert (found.sum(2) == [2, 3, 1]).all() and not (found & ~np.asarray(valid)).any()
    np.testing.assert_allclose(found.mean(0)[:2], [[1 / 3] * 6, [3 / 4] * 4 + [0] * 2], atol=0.05)
    share = np.asarray(jax.vmap(lambda key: masked.mask_at(key, jnp.array([0.2, 0.7, 1.0]), valid))(keys)).mean(0)
    np.testing.assert_allclose(share[:, 0], [0.2, 0.7, 1.0], atol=0.05)


@pytest.mark.parametrize("objective", [autoregressive, masked])
def test_padding_changes_nothing(objective, tiny, make_batch, refill):
    kind = objective.__name__.rpartition(".")[2]
    model = Model(tiny.replace(model__kind=kind, model__trunk_depth=1))
    params = model.init(jax.random.key(0))
    batch = make_batch(tiny, 8)

    @jax.jit
    def losses(ids, lengths):
        return objective.losses(model.merge(params, {}), ids, lengths, jax.random.key(3))

    one, two = (losses(b["ids"], b["lengths"]) for b in (batch, refill(batch)))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert one[0] > 0


def test_autoregressive_loss_is_the_mean_over_valid_tokens_of_exact_nats(tiny, make_batch):
    model = Model(tiny.replace(model__kind="autoregressive", model__trunk_depth=1))
    module = model.merge(model.init(jax.random.key(0)), {})
    batch = make_batch(tiny, 4)
    found = jax.jit(lambda ids, lengths: autoregressive.losses(module, ids, lengths, jax.random.key(0))[0])
    before = jnp.pad(batch["ids"][:, :-1], ((0, 0), (1, 0)), constant_values=NONE)
    log_p = jax.jit(lambda ids: jax.nn.log_softmax(module.logits(ids)))(before)
    own = np.take_along_axis(np.asarray(log_p), np.asarray(batch["ids"])[..., None], 2)[..., 0]
    valid = np.arange(8) < np.asarray(batch["lengths"])[:, None]
    assert found(batch["ids"], batch["lengths"]) == pytest.approx(-own[valid].mean(), rel=1e-5)
