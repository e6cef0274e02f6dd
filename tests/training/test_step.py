"""The optimiser step as a pure function: state in, state out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdllm.model.ldlm import Model
from jdllm.model.standardize import standardize_batch
from jdllm.training.state import init_state, is_matrix, learning_rate, make_optimizer
from jdllm.training.step import effective_rank, gradients, make_train_step, standardize_hidden

MEAN, STD = jnp.full(12, 0.1), jnp.full(12, 1.2)


def start(config):
    """Model, jitted step and first state."""
    model, optimizer = Model(config), make_optimizer(config.optimizer)
    return model, jax.jit(make_train_step(model, optimizer)), init_state(model, optimizer, MEAN, STD)


@pytest.fixture(scope="module")
def plain(tiny):
    return start(tiny)


def assert_close(one, two, atol=1e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-4, err_msg=jax.tree_util.keystr(path))


def test_a_step_is_a_function_of_state_and_batch(plain, tiny, make_batch):
    _, step, state = plain
    batch = make_batch(tiny, 8)
    (one, first), (two, second) = step(state, {}, batch, 0.0), step(state, {}, batch, 0.0)
    jax.tree.map(np.testing.assert_array_equal, (one, first), (two, second))
    assert int(one.step) == 1 and all(np.isfinite(value) for value in first.values())


def test_randomness_changes_with_the_step_and_the_seed(plain, tiny, make_batch):
    _, step, state = plain
    batch = make_batch(tiny, 8)
    first = step(state, {}, batch, 0.0)[1]
    later = step(state.replace(step=jnp.int32(1)), {}, batch, 0.0)[1]
    assert first["loss_diffusion"] != later["loss_diffusion"]


def test_losses_fall_on_one_batch(plain, tiny, make_batch):
    _, step, state = plain
    batch, history = make_batch(tiny, 8), []
    for _ in range(120):
        state, metrics = step(state, {}, batch, 0.0)
        history.append([float(metrics[name]) for name in ("loss_diffusion", "loss_hidden", "loss_token")])
    early, late = np.mean(history[:10], 0), np.mean(history[-10:], 0)
    assert (late < [1.0, 0.9, 0.9] * early).all(), (early, late)


def test_all_weights_move_and_the_average_follows(plain, tiny, make_batch):
    _, step, state = plain
    before = state
    for seed in range(4):
        state, _ = step(state, {}, make_batch(tiny, 8, seed), 0.0)
    still = [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(before.params))
        if np.array_equal(a, b)
    ]
    assert not still
    for new, average, old in zip(*(jax.tree.leaves(x) for x in (state.params, state.ema_params, before.params))):
        assert np.abs(average - old).max() <= np.abs(new - old).max() * 4 and not np.array_equal(average, new)


def test_running_statistics_are_those_of_the_latents(plain, tiny, make_batch):
    model, step, state = plain
    batch = make_batch(tiny, 8)
    hidden, _ = standardize_hidden(batch["hidden"], MEAN, STD, tiny.feed.clip, "float32")
    raw = model.merge(state.params, {}).encoder(hidden, batch["lengths"])
    _, wanted = standardize_batch(raw, "index")
    stats = step(state, {}, batch, 0.0)[0].latent_stats
    np.testing.assert_allclose(stats.mean / stats.weight, wanted.mean, atol=1e-5)
    np.testing.assert_allclose(stats.variance / stats.weight, wanted.variance, rtol=1e-3, atol=1e-6)


def test_timesteps_account_for_every_row(plain, tiny, make_batch):
    _, step, state = plain
    after = step(state, {}, make_batch(tiny, 8), 0.0)[0]
    assert after.timesteps.weight.sum() == 8 and after.timesteps.loss_sum.sum() > 0


def test_gamma_rises_while_the_gate_is_open_and_falls_while_it_is_closed(plain, tiny, make_batch):
    _, step, state = plain
    batch, most = make_batch(tiny, 8), tiny.objective.gamma_warmup_steps
    for is_open, before, after in ((True, 3, 4), (False, 3, 2), (False, 0, 0), (True, most, most)):
        moved = state.replace(gate_open=jnp.asarray(is_open), gamma_progress=jnp.float32(before))
        assert step(moved, {}, batch, 0.0)[0].gamma_progress == after


# Accumulation


@pytest.fixture(scope="module")
def accumulated(tiny, make_batch):
    """Two micro-batches of a config in which no loss of encoder and decoders depends on the batch or on noise: its start,
    its end, the metrics, and the gradients of both halves and of the whole batch."""
    config = tiny.replace(
        training__accumulate=2, model__standardize="rmsnorm", objective__decoder_noise=0.0, objective__gamma_max=0.0
    )
    model, step, state = start(config)
    batch = make_batch(config, 8, full=True)
    after, metrics = step(state, {}, batch, 0.3)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), 0)
    run = jax.jit(lambda rows, key: gradients(model, state.params, {}, state, rows, key)[0])
    halves = [run(jax.tree.map(lambda x, i=i: x[i::2], batch), jax.random.fold_in(key, i)) for i in (0, 1)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *halves)
    return config, state, after, metrics, mean, run(batch, key)


def test_accumulated_micro_batches_give_the_optimiser_their_mean_gradient(accumulated):
    config, state, after, metrics, mean, _ = accumulated
    assert metrics["gradient_norm"] == pytest.approx(float(optax.tree.norm(mean)), rel=1e-4)
    assert_close(after.opt_state, make_optimizer(config.optimizer).update(mean, state.opt_state, state.params)[1])
    assert after.timesteps.weight.sum() == 8 and int(after.step) == 1


def test_two_micro_batches_equal_one_batch_where_nothing_depends_on_the_batch(accumulated):
    *_, mean, whole = accumulated
    for part in ("encoder", "decoder", "token_decoder"):
        assert_close(mean[part], whole[part])


# Optimisers and schedule


def test_muon_turns_kernels_to_one_size_and_leaves_the_rest_to_adamw(plain, tiny):
    """Of each block of a stack by itself: a block with a tiny gradient moves as far as the others."""
    _, _, state = plain
    optimizer = make_optimizer(tiny.replace(optimizer__name="muon", optimizer__weight_decay=0.0).optimizer)
    leaves, structure = jax.tree.flatten(state.params)
    rng = np.random.default_rng(0)
    grads = structure.unflatten([jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves])
    grads["encoder"]["blocks"]["query"]["kernel"] = grads["encoder"]["blocks"]["query"]["kernel"].at[0].multiply(1e-2)
    update = jax.jit(optimizer.update).lower(grads, optimizer.init(state.params), state.params)
    products = [line for line in update.as_text().splitlines() if "dot_general" in line]
    assert products and all("lhs_precision_type = bf16" in line for line in products)  # where a device can
    updates, _ = update.compile()(grads, optimizer.init(state.params), state.params)
    assert all(leaf.any() for leaf in jax.tree.leaves(updates))
    moved = updates["encoder"]["blocks"]["query"]["kernel"]
    for block in moved:
        values = np.linalg.svd(block, compute_uv=False)
        assert values[-1] > 0.2 * values[0] and np.sqrt(np.square(block).mean()) == pytest.approx(0.2, rel=0.35)
    sizes = np.abs(updates["token_decoder"]["head"])  # Adam's first step: one size, whatever the gradient
    assert 0.9 < sizes.min() and sizes.max() < 1.01 * sizes.min()


def test_learning_rate_warms_up_holds_and_falls_to_a_tenth(tiny):
    config = tiny.replace(
        optimizer__learning_rate=1.0, optimizer__warmup_steps=10, optimizer__decay_fraction=0.2
    ).optimizer
    at = functools.partial(learning_rate, config)
    assert at(jnp.int32(0), 0.0) == pytest.approx(0.1) and at(jnp.int32(9), 0.1) == 1
    assert at(jnp.int32(500), 0.79) == 1 and at(jnp.int32(500), 0.9) == pytest.approx(0.55)
    assert at(jnp.int32(500), 1.0) == pytest.approx(0.1)
    constant = tiny.replace(optimizer__learning_rate=1.0, optimizer__decay_fraction=0.0).optimizer
    assert learning_rate(constant, jnp.int32(500), 0.99) == 1


def test_the_rate_of_the_step_is_the_schedules(plain, tiny, make_batch):
    """Ten times the rate, ten times the way: the optimiser itself runs at rate 1."""
    _, step, state = plain
    batch = make_batch(tiny, 8)
    full, tenth = (step(state.replace(step=jnp.int32(100)), {}, batch, p)[0].params for p in (0.0, 1.0))
    for a, b, old in zip(*(jax.tree.leaves(x) for x in (full, tenth, state.params))):
        np.testing.assert_allclose(b - old, 0.1 * (a - old), atol=2e-6)


def test_only_matrices_decay(plain):
    model, _, state = plain
    decays = {path[-1].key for path, flag in jax.tree_util.tree_leaves_with_path(is_matrix(state.params)) if flag}
    assert decays == {"kernel", "head"}


# Inputs and measures


def test_hidden_states_are_standardised_and_clipped():
    hidden = jnp.array([[[1.0, 5.0, -200.0]]])
    x, clipped = standardize_hidden(hidden, jnp.array([1.0, 3.0, 0.0]), jnp.array([1.0, 2.0, 1.0]), 8.0, "float32")
    np.testing.assert_allclose(x, [[[0.0, 1.0, -8.0]]])
    assert clipped == pytest.approx(1 / 3)


def test_effective_rank_counts_directions():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    for directions in (1, 4, 16):
        z = rng.normal(size=(4000, 1, directions)) @ basis[:directions] + 5.0
        assert effective_rank(jnp.asarray(z, jnp.float32)) == pytest.approx(directions, rel=0.03)


def test_bfloat16_compute_keeps_float32_masters(tiny, make_batch):
    config = tiny.replace(training__compute_dtype="bfloat16")
    _, step, state = start(config)
    after, _ = jax.eval_shape(step, state, {}, make_batch(config, 8), 0.0)
    kinds = jax.tree.map(lambda new, old: (new.shape, new.dtype) == (old.shape, old.dtype), after, state)
    assert all(jax.tree.leaves(kinds))
    assert {leaf.dtype for leaf in jax.tree.leaves((after.params, after.ema_params))} == {jnp.dtype("float32")}


def equal(one, other):
    """Whether two trees hold the same numbers."""
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other)))


def test_in_the_second_of_two_stages_the_denoiser_alone_moves(tiny, make_batch):
    """By the gradient it would have had in the first; the others are what their average was, and stay."""
    config = tiny.replace(
        objective__frozen_after=0.5, optimizer__warmup_steps=0, optimizer__decay_fraction=0.0, optimizer__clip_norm=1e9
    )
    model, optimizer, batch = Model(config), make_optimizer(config.optimizer), make_batch(config, 8)
    step = jax.jit(make_train_step(model, optimizer))
    state, _ = step(init_state(model, optimizer, MEAN, STD), {}, batch, jnp.float32(0.0))
    one, other = (step(state, {}, batch, jnp.float32(progress)) for progress in (0.4, 0.5))
    later, _ = step(other[0], {}, batch, jnp.float32(0.6))
    for part, average in state.ema_params.items():
        for after, moves in ((one[0], True), (other[0], part == "denoiser"), (later, part == "denoiser")):
            for params in (after.params, after.ema_params):
                assert (not equal(average, params[part])) == moves, part
    assert not equal(other[0].params["denoiser"], later.params["denoiser"])
    for name in ("loss_diffusion", "effective_rank"):
        np.testing.assert_allclose(one[1][name], other[1][name], rtol=1e-5)
    for name in ("loss_hidden", "loss_token"):  # on one row of eight
        assert 0 < abs(other[1][name] / one[1][name] - 1) < 0.5
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(near, one[0].params["denoiser"], other[0].params["denoiser"])
