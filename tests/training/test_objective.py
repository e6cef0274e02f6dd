"""The objective: which loss may move which weights, and what never leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError, ObjectiveConfig
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.diffusion.timesteps import cumulative, draw_u, init_timesteps, warp
from jdllm.model.ldlm import Model
from jdllm.model.standardize import standardize_batch
from jdllm.training.objective import decoder_noise_bound, decoder_sigma, gamma_at, losses, masked_mean
from jdllm.training.state import init_state, make_optimizer
from jdllm.training.step import gradients, standardize_hidden

ROWS, KEY = 8, jax.random.key(5)


@pytest.fixture(scope="module")
def config(tiny):
    """Gamma follows gamma_progress alone: 0 of it is gamma 0, all of it is gamma 1."""
    return tiny.replace(objective__gamma_min=0.0, objective__gamma_max=1.0, objective__gamma_gate=0.0)


@pytest.fixture(scope="module")
def model(config):
    return Model(config)


@pytest.fixture(scope="module")
def state(model, config, shaken):
    state = init_state(model, make_optimizer(config.optimizer), jnp.full(12, 0.1), jnp.full(12, 1.2))
    return state.replace(step=jnp.int32(1000), params=shaken(state.params, 0.05))


@pytest.fixture(scope="module")
def batch(config, make_batch):
    return make_batch(config, ROWS)


@pytest.fixture(scope="module")
def ours(model, state):
    """ours(batch, progress): the step's gradient and metrics with gamma_progress at that share of its way."""

    @jax.jit
    def run(batch, progress):
        steps = progress * model.config.objective.gamma_warmup_steps
        grads, (_, _, metrics) = gradients(model, state.params, {}, state.replace(gamma_progress=steps), batch, KEY)
        return grads, metrics

    return run


def written_out(model, state, params, batch, gamma, parts):
    """The loss of docs/design.md, section 3, in one expression and without any of objective.losses."""
    module, schedule, config = model.merge(params, {}), TangentSchedule(), model.config
    hidden = jnp.clip((batch["hidden"].astype(jnp.float32) - state.hidden_mean) / state.hidden_std, -8, 8)
    raw = module.encoder(hidden, batch["lengths"])
    z = (raw - raw.mean(0)) / jnp.sqrt(raw.var(0) + 1e-5)
    stop = jax.lax.stop_gradient
    z_g = stop(z) + gamma * (z - stop(z))
    keys = jax.random.split(KEY, 4)
    tau = warp(cumulative(init_timesteps(config.diffusion), config.diffusion), draw_u(keys[0], ROWS))
    z_tau = schedule.add_noise(z_g, tau, jax.random.normal(keys[1], z.shape))
    modulation = module.denoiser.modulation(tau)
    first = stop(module.denoiser(z_tau, modulation, jnp.zeros_like(z)))
    half = (jnp.arange(ROWS) % 2 == 1)[:, None, None]
    estimate = module.denoiser(z_tau, modulation, jnp.where(half, first, 0.0))
    valid = jnp.arange(8) < batch["lengths"][:, None]
    sigma = 3.0 * jax.random.uniform(keys[2], (ROWS, 1, 1))
    predicted = module.decoder(z + sigma * jax.random.normal(keys[3], z.shape))
    log_p = jax.nn.log_softmax(module.token_decoder.logits(stop(predicted)))
    nll = -jnp.take_along_axis(log_p, batch["ids"][..., None], -1)[..., 0]
    terms = {
        "diffusion": jnp.square(estimate - z_g).mean(),
        "hidden": (jnp.square(predicted - hidden).mean(-1) * valid).sum() / valid.sum(),
        "token": (nll * valid).sum() / valid.sum(),
    }
    return sum(terms[part] for part in parts)


@pytest.fixture(scope="module")
def expected(model, state, batch):
    """expected(gamma, *parts): gradient of the loss as it is written in the design."""

    @functools.partial(jax.jit, static_argnames="parts")
    def grad(gamma, parts):
        return jax.grad(lambda params: written_out(model, state, params, batch, gamma, parts))(state.params)

    return lambda gamma, *parts: grad(gamma, parts)


def assert_close(one, two, rtol=1e-3):
    """Trees equal up to rounding, relative to the size of each leaf."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        scale = float(np.abs(b).max()) + 1e-7
        np.testing.assert_allclose(a, b, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))


def assert_bitwise(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


# Gamma


def test_gamma_zero_leaves_the_encoder_to_the_decoder_loss_alone(ours, expected, batch):
    grads, metrics = ours(batch, 0.0)
    assert metrics["gamma"] == 0
    assert_close(grads["encoder"], expected(0.0, "hidden")["encoder"])


def test_gamma_one_is_the_plain_sum(ours, expected, batch):
    grads, metrics = ours(batch, 1.0)
    assert metrics["gamma"] == pytest.approx(1.0)
    assert_close(grads, expected(1.0, "diffusion", "hidden", "token"))
    off = np.linalg.norm(grads["encoder"]["output"]["kernel"] - ours(batch, 0.0)[0]["encoder"]["output"]["kernel"])
    assert off > 0.01 * np.linalg.norm(grads["encoder"]["output"]["kernel"])


def test_gamma_in_between_is_the_straight_through_expression(ours, expected, batch):
    grads, metrics = ours(batch, 0.8)
    gamma = float(metrics["gamma"])
    assert 0.1 < gamma < 0.9
    assert_close(grads, expected(gamma, "diffusion", "hidden", "token"))


def test_the_denoiser_and_the_decoders_never_feel_gamma(ours, batch):
    low, high = ours(batch, 0.0)[0], ours(batch, 1.0)[0]
    for part in ("denoiser", "decoder", "token_decoder"):
        assert_bitwise(low[part], high[part])


def test_gradient_shares_are_those_of_the_two_paths(ours, batch):
    for progress in (0.0, 1.0):
        metrics = ours(batch, progress)[1]
        assert metrics["gradient_share_diffusion"] + metrics["gradient_share_hidden"] == pytest.approx(1.0)
        assert (metrics["gradient_share_diffusion"] > 0) == (progress > 0)


def test_gamma_rises_by_the_sigmoid_from_its_least_to_its_greatest():
    config = ObjectiveConfig(gamma_min=0.001, gamma_max=0.7, gamma_warmup_steps=200)
    gamma = np.array([gamma_at(jnp.float32(x), config) for x in (0, 50, 100, 160, 200, 400)])
    assert gamma[0] == pytest.approx(0.001) and gamma[-2:] == pytest.approx(0.7)
    assert (np.diff(gamma[:-1]) > 0).all() and gamma[2] < 0.1
    s = 1 / (1 + np.exp(-10 * (np.array([0.0, 0.25, 0.5, 0.8, 1.0]) - 0.8)))
    np.testing.assert_allclose(gamma[:-1], 0.001 + 0.699 * (s - s[0]) / (s[-1] - s[0]), rtol=1e-4)
    assert gamma_at(jnp.float32(0), ObjectiveConfig(gamma_max=0.0)) == 0  # gamma_min does not exceed gamma_max


# Which loss reaches what


@pytest.fixture(scope="module")
def term_gradient(tiny, state, batch):
    """term_gradient(term, decoder_loss): gradient of one term of objective.losses, through encoder and all."""

    @functools.partial(jax.jit, static_argnames=("term", "decoder_loss"))
    def grad(term, decoder_loss):
        config = tiny.replace(objective__decoder_loss=decoder_loss)
        model, edges = Model(config), cumulative(state.timesteps, config.diffusion)

        def value(params):
            module = model.merge(params, {})
            hidden, _ = standardize_hidden(batch["hidden"], state.hidden_mean, state.hidden_std, 8.0, "float32")
            z, _ = standardize_batch(module.encoder(hidden, batch["lengths"]), "index")
            args = (module, z, z, hidden, batch["ids"], batch["lengths"], KEY, 3.0, edges, config)
            total, terms = losses(*args)
            return total if term == "total" else getattr(terms, term)

        return jax.grad(value)(state.params)

    return grad


def norms(grads):
    return {part: float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(tree))) for part, tree in grads.items()}


def test_the_token_loss_moves_neither_latents_nor_latent_decoder(term_gradient):
    found = norms(term_gradient("loss_token", "mse"))
    assert found["encoder"] == found["decoder"] == found["denoiser"] == 0 < found["token_decoder"]


def test_with_ce_the_token_loss_moves_them_and_the_mse_counts_no_more(term_gradient):
    found = norms(term_gradient("loss_token", "ce"))
    assert min(found["encoder"], found["decoder"], found["token_decoder"]) > 0 == found["denoiser"]
    parts = [term_gradient(term, "ce") for term in ("loss_diffusion", "loss_token")]
    assert_close(term_gradient("total", "ce"), jax.tree.map(jnp.add, *parts))


def test_the_denoising_loss_moves_neither_decoder(term_gradient):
    found = norms(term_gradient("loss_diffusion", "mse"))
    assert found["decoder"] == found["token_decoder"] == 0 < min(found["denoiser"], found["encoder"])


def test_decoders_see_their_share_of_the_rows(tiny, state, batch):
    """As many rows as were asked for, spread over the batch, and the others' latents get nothing from the decoders."""
    config = tiny.replace(objective__decoder_share=0.25)
    module, edges = Model(config).merge(state.params, {}), cumulative(state.timesteps, config.diffusion)
    z = jax.random.normal(KEY, (ROWS, 8, 16))

    def value(z_decoder):
        hidden = batch["hidden"].astype(jnp.float32)
        return losses(module, z, z_decoder, hidden, batch["ids"], batch["lengths"], KEY, 3.0, edges, config)[0]

    felt = jnp.abs(jax.grad(value)(z)).sum((1, 2)) > 0
    np.testing.assert_array_equal(np.flatnonzero(felt), [3, 7])
    with pytest.raises(ConfigError, match="decoder_share=0.01 leaves the decoders no row of 8"):
        tiny.replace(objective__decoder_share=0.01)


def test_constants_are_no_way_to_please_any_loss(term_gradient):
    """A bias at the end of the encoder would get no gradient: its last product sees zero mean over the batch."""
    kernel = term_gradient("total", "mse")["encoder"]["output"]["kernel"]
    assert np.abs(kernel).max() > 1e-4  # while the weights do


# Padding


def test_padding_changes_no_loss_and_no_gradient(ours, batch, refill):
    grads, metrics = ours(batch, 1.0)
    other_grads, other = ours(refill(batch), 1.0)
    metrics.pop("clipped_fraction"), other.pop("clipped_fraction")
    assert_bitwise(other, metrics)
    assert_bitwise(other_grads, grads)


def test_masked_mean_counts_valid_positions():
    x, mask = jnp.array([[1.0, 2.0], [jnp.nan, 6.0]]), jnp.array([[True, True], [False, True]])
    assert masked_mean(x, mask) == 3.0
    assert masked_mean(x, jnp.zeros((2, 2), bool)) == 0.0


# Decoder noise


def test_decoder_noise_ramps_from_a_tenth_to_the_whole():
    config = ObjectiveConfig(decoder_noise=3.0, decoder_noise_ramp_steps=100)
    bounds = [float(decoder_noise_bound(jnp.int32(step), config)) for step in (0, 50, 100, 1000)]
    np.testing.assert_allclose(bounds, [0.3, 1.65, 3.0, 3.0], rtol=1e-6)
    assert decoder_noise_bound(jnp.int32(9), ObjectiveConfig(decoder_noise=0.0)) == 0


def test_decoder_noise_is_drawn_per_example_or_constant():
    drawn = decoder_sigma(KEY, 4000, jnp.float32(3.0), "uniform").ravel()
    assert drawn.min() >= 0 and drawn.max() <= 3 and abs(drawn.mean() - 1.5) < 0.07
    np.testing.assert_array_equal(decoder_sigma(KEY, 5, jnp.float32(2.0), "constant").ravel(), 2.0)


# Self-conditioning


@pytest.mark.parametrize(("probability", "rows"), [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_self_conditioning_touches_its_share_of_the_rows(probability, rows, model, state):
    from jdllm.training.objective import denoise_with_self_conditioning

    module = model.merge(state.params, {})
    z, tau = jax.random.normal(KEY, (ROWS, 8, 16)), jnp.linspace(0.1, 0.9, ROWS)
    plain = module.denoiser(z, module.denoiser.modulation(tau), jnp.zeros_like(z))
    out = denoise_with_self_conditioning(module, z, tau, probability, jnp.float32)
    assert int((np.abs(out - plain).max((1, 2)) > 1e-6).sum()) == rows
