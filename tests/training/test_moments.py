"""Smaller optimiser states: they still train, a checkpoint keeps them bit for bit, and they are as small as they say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdllm.config import ConfigError
from jdllm.kernels.cross_entropy import cross_entropy
from jdllm.model.ldlm import Model
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.state import make_optimizer

OPTIONS = {
    "bfloat16": {"optimizer__first_moment": "bfloat16"},
    "factored": {"optimizer__second_moment": "factored"},
    "factored, bfloat16": {"optimizer__second_moment": "factored", "optimizer__first_moment": "bfloat16"},
    "muon, bfloat16": {"optimizer__name": "muon", "optimizer__first_moment": "bfloat16"},
}


def moments_bytes(config):
    """Bytes of the optimiser's state, from shapes alone."""
    shapes = jax.eval_shape(make_optimizer(config.optimizer).init, Model(config).param_shapes)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


@pytest.fixture(scope="module")
def reading(tiny, make_batch):
    """Weights, and loss with gradients of reading the tokens of one batch; the rest of the model gets no gradient."""
    model = Model(tiny)
    batch = make_batch(tiny, 8, full=True)

    def loss(params):
        states = model.merge(params, {}).token_decoder.states(batch["hidden"].astype(jnp.float32))
        return cross_entropy(states.reshape(64, -1), params["token_decoder"]["head"], batch["ids"].ravel())[0].mean()

    return model.init(jax.random.key(0)), jax.jit(jax.value_and_grad(loss))


@pytest.fixture(scope="module", params=[name for name in OPTIONS if name != "factored"])
def trained(request, tiny, reading):
    """State of the optimiser after 40 steps on one batch, and the losses on the way."""
    optimizer = make_optimizer(tiny.replace(**OPTIONS[request.param]).optimizer)
    params, pull = reading
    opt_state, update, losses = optimizer.init(params), jax.jit(optimizer.update), []
    for _ in range(40):
        loss, grads = pull(params)
        updates, opt_state = update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p + 1e-2 * u, params, updates)
        losses.append(loss)
    return opt_state, np.array(losses)


def test_losses_fall_with_every_kind_of_moments(trained):
    losses = trained[1]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.5 * losses[0], losses[[0, -1]]


def test_a_checkpoint_keeps_the_moments_bit_for_bit(trained, tmp_path):
    opt_state = trained[0]
    writer = Checkpoints(tmp_path, keep=1)
    writer.save(40, {"opt_state": opt_state}, {})
    writer.close()
    found, _ = Checkpoints(tmp_path).restore(40, {"opt_state": jax.eval_shape(lambda: opt_state)})
    for one, two in zip(jax.tree.leaves(found["opt_state"]), jax.tree.leaves(opt_state), strict=True):
        assert one.dtype == two.dtype and np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_moments_are_as_small_as_they_say(tiny):
    """At a width where matrices are worth factoring.  Bytes a weight: 8 in full, 6 with bfloat16, 4 and 2 when factored."""
    config = tiny.replace(model__latent_dim=128, model__hidden_dim=128, model__vocab_size=256)
    weights = sum(leaf.size for leaf in jax.tree.leaves(Model(config).param_shapes))
    wanted = {"": 8, "bfloat16": 6, "factored": 4, "factored, bfloat16": 2}
    for name, each in wanted.items():
        found = moments_bytes(config.replace(**OPTIONS.get(name, {}))) / weights
        assert each <= found < each + 0.15, (name, found)
    assert moments_bytes(config.replace(optimizer__name="muon")) < 6 * weights


def test_a_factored_second_moment_is_adams_on_vectors_and_exact_on_rank_one_matrices(tiny):
    """Without momentum and decay: where squared gradients are an outer product, nothing is lost by factoring."""
    options = {"optimizer__beta1": 0.0, "optimizer__weight_decay": 0.0, "optimizer__clip_norm": 1e9}
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.zeros((3, 130, 140)), "gain": jnp.zeros(50)}
    row, column = np.abs(rng.normal(size=(3, 130, 1))) + 0.1, np.abs(rng.normal(size=(3, 1, 140))) + 0.1
    signs = rng.choice([-1.0, 1.0], size=(3, 130, 140))
    grads = {
        "kernel": jnp.asarray(row * column * signs, jnp.float32),
        "gain": jnp.asarray(rng.normal(size=50), jnp.float32),
    }
    full, factored = (
        make_optimizer(tiny.replace(optimizer__second_moment=kind, **options).optimizer)
        for kind in ("full", "factored")
    )
    states, updates = [rule.init(params) for rule in (full, factored)], [jax.jit(r.update) for r in (full, factored)]
    for scale in (1.0, 0.8, 0.5):  # never growing, so that no update's root mean square is over 1
        scaled = jax.tree.map(lambda g, s=scale: s * g, grads)
        (one, states[0]), (two, states[1]) = (run(scaled, state, params) for run, state in zip(updates, states))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
            np.testing.assert_allclose(a, b, rtol=2e-4)


def test_muon_with_a_factored_second_moment_is_refused_in_words(tiny):
    with pytest.raises(ConfigError, match="second_moment=factored is for adamw"):
        tiny.replace(optimizer__name="muon", optimizer__second_moment="factored")


def test_an_average_of_weights_in_bfloat16_would_stand_still():
    """Why `ema_params` has no such option: at a decay of 0.999 a step is less than half of the last bit."""
    target, exact, rounded = 1.5, jnp.float32(1.0), jnp.bfloat16(1.0)
    for _ in range(1000):
        exact = 0.999 * exact + 0.001 * target
        rounded = jnp.bfloat16(0.999 * jnp.float32(rounded) + 0.001 * target)
    assert rounded == 1.0 and exact > 1.3


def test_bfloat16_momentum_follows_float32(tiny):
    """At a decay of 0.9 each step changes far more than the last bit, so rounding does not pile up."""
    rng, params = np.random.default_rng(0), {"kernel": jnp.zeros((64, 64))}
    rules = [make_optimizer(tiny.replace(optimizer__first_moment=kind).optimizer) for kind in ("float32", "bfloat16")]
    states = [rule.init(params) for rule in rules]
    update = [jax.jit(rule.update) for rule in rules]
    for _ in range(50):
        grads = {"kernel": jnp.asarray(0.1 + rng.normal(size=(64, 64)), jnp.float32)}
        updates = [run(grads, state, params) for run, state in zip(update, states)]
        states = [state for _, state in updates]
    one, two = (updates[i][0]["kernel"] for i in (0, 1))
    assert optax.tree.norm(one - two) < 0.02 * optax.tree.norm(one)
