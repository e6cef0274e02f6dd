"""The held-out probe, and the gate that it moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.model.ldlm import Model
from jdllm.training.probe import BINS, make_probe, move_gate
from jdllm.training.state import init_state, make_optimizer


@pytest.fixture(scope="module")
def probe(tiny, shaken):
    model = Model(tiny)
    state = init_state(model, make_optimizer(tiny.optimizer), jnp.zeros(12), jnp.ones(12))
    state = state.replace(params=shaken(state.params))
    run = jax.jit(make_probe(model))
    return lambda batch: run(state, {}, batch)


def test_figures_and_their_ranges(probe, tiny, make_batch):
    found = probe(make_batch(tiny, 40))
    assert 0 <= found["reconstruction"] <= 1 and 0 <= found["reconstruction_noisy"] <= 1
    assert 1 <= found["effective_rank"] <= 16
    assert found["loss_diffusion_bins"].shape == (BINS,) and (found["loss_diffusion_bins"] > 0).all()


def test_it_says_the_same_twice(probe, tiny, make_batch):
    batch = make_batch(tiny, 40)
    jax.tree.map(np.testing.assert_array_equal, probe(batch), probe(batch))


def test_padding_changes_nothing(probe, tiny, make_batch, refill):
    batch = make_batch(tiny, 40)
    jax.tree.map(np.testing.assert_array_equal, probe(refill(batch)), probe(batch))


@pytest.mark.parametrize(
    ("reconstruction", "rank", "was", "becomes"),
    [
        (0.95, 8.0, False, True),  # good enough: open
        (0.89, 8.0, True, True),  # within the margin: as it was
        (0.89, 8.0, False, False),
        (0.84, 8.0, True, False),  # lost: closed
        (0.99, 1.0, True, False),  # readable, but collapsed to few directions: closed
        (0.99, 1.0, False, False),
    ],
)
def test_the_gate_opens_on_reconstruction_and_closes_on_loss_or_collapse(tiny, reconstruction, rank, was, becomes):
    config = tiny.replace(objective__gamma_gate=0.9, objective__gamma_gate_margin=0.05, objective__gamma_rank=0.1)
    state = init_state(Model(config), make_optimizer(config.optimizer), jnp.zeros(12), jnp.ones(12))
    moved = move_gate(state.replace(gate_open=jnp.asarray(was)), reconstruction, rank, config)
    assert bool(moved.gate_open) is becomes


def test_without_a_gate_gamma_follows_the_clock(tiny):
    config = tiny.replace(objective__gamma_gate=0.0)
    state = init_state(Model(config), make_optimizer(config.optimizer), jnp.zeros(12), jnp.ones(12))
    assert bool(state.gate_open) and bool(move_gate(state, 0.0, 0.0, config).gate_open)
