"""The baselines in the same loop as the LDLM: what stays at rest, memorising, checkpoints, the run on disk."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jdllm.config import ConfigError, ModelConfig
from jdllm.data.loader import BatchLoader, TokensOnly
from jdllm.evaluation.likelihood import held_out_nll
from jdllm.generation.baselines import fill_in, write_in_order
from jdllm.model.ldlm import Model
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.loop import TrainingData, train
from jdllm.training.quantized import quantize_run
from jdllm.training.run import load
from jdllm.training.sizes import sizes
from jdllm.training.state import init_state, make_optimizer
from jdllm.training.step import make_train_step
from jdllm.training.throughput import flops_per_window

pytestmark = pytest.mark.usefixtures("compiled_once")

KINDS = ("autoregressive", "masked")
STEPS = {"autoregressive": 150, "masked": 400}
TEXTS = np.random.default_rng(3).integers(1, 37, (6, 8)).astype(np.int32)


@pytest.fixture(scope="module")
def config(tiny):
    """By kind: one block of width 32."""
    model = ModelConfig(
        hidden_dim=12, vocab_size=37, num_tokens=8, num_latents=8, latent_dim=32, head_dim=16, encoder_depth=1,
        decoder_depth=1, token_decoder_depth=1, denoiser_depth=1,
    )  # fmt: skip
    config = tiny.replace(
        model=model, training__batch_size=24, training__steps=6, training__log_every=2, training__probe_every=3,
        training__sample_every=6, training__checkpoint_every=99, training__wandb="disabled", optimizer__name="adamw",
        optimizer__learning_rate=1e-2, optimizer__warmup_steps=10, optimizer__decay_fraction=0.0, optimizer__ema_decay=0.95,
    )  # fmt: skip
    return {kind: config.replace(model__kind=kind, model__trunk_depth=1) for kind in KINDS}


@pytest.fixture
def optimised():
    """The other tests compile in haste; this one runs its programs hundreds of times."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)  # as in conftest.py


@pytest.fixture(scope="module")
def memorised(config):
    """memorised(kind): model, and state before and after training on six texts."""

    def run(kind):
        model, optimizer = Model(config[kind]), make_optimizer(config[kind].optimizer)
        state = init_state(model, optimizer, jnp.zeros(12), jnp.ones(12))
        step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
        batch = {"ids": jnp.asarray(np.tile(TEXTS, (16, 1))), "lengths": jnp.full(96, 8, jnp.int32)}
        before = jax.device_get(state)
        for _ in range(STEPS[kind]):
            state, _ = step(state, {}, batch, 0.0)
        return model, before, state

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_memorised_and_written_back(memorised, kind, optimised):
    """Of 64 samples at least 56 are one of the six, and all six appear; what belongs to latents has not moved.

    Masked diffusion without learned positions wrote 7: among masks alone it could not tell its places apart.
    """
    model, before, after = memorised(kind)
    key, options = jax.random.key(0), {"num": 64, "nucleus": False}
    if kind == "autoregressive":
        tokens = write_in_order(model, after.ema_params, {}, key, 1.0, 1.0, **options)
    else:
        tokens = fill_in(model, after.ema_params, {}, key, 8, 1.0, 1.0, order="random", **options)
    hits = (np.asarray(tokens)[:, None] == TEXTS[None]).all(-1)
    found = held_out_nll(
        types.SimpleNamespace(config=model.config, model=model, params=after.ema_params, frozen={}),
        TEXTS,
        np.full(6, 8),
    )
    print(kind, found, int(hits.any(1).sum()), hits.sum(0).tolist())
    assert hits.any(1).sum() >= 56 and hits.any(0).all()
    for name in ("latent_stats", "timesteps", "gamma_progress", "gate_open", "hidden_mean", "hidden_std"):
        jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))
    assert int(after.step) == STEPS[kind]
    least = np.log(6) / 8  # nats per token of one text in six
    low, high = (0.999, 1.02) if kind == "autoregressive" else (0.5, 1.5)  # of masked diffusion it is a noisy estimate
    assert low * least < found["nll"] < high * least
    assert found["bound"] == (kind == "masked")


# A run


class Windows:
    """Random texts, with as much of a HiddenStateCache as TokensOnly wants, and no hidden states to read."""

    hash = "synthetic"

    def __init__(self, rows, seed):
        rng = np.random.default_rng(seed)
        self.ids, self.lengths = rng.integers(1, 37, (rows, 8)).astype(np.int32), np.full(rows, 8, np.int32)
        self.lengths[::3] = 5
        self.ids[::3, 5:] = 0

    def __len__(self):
        return len(self.ids)


def judge(tokens, eos_id):
    return {"entropy": 3.0}


@pytest.fixture
def start(config):
    """start(kind, run, steps): train there, or go on, and return the last metrics."""

    def start(kind, run, steps):
        own = config[kind].replace(training__steps=steps)
        words = {f"w{i}": i for i in range(37)}
        data = TrainingData(
            loader=BatchLoader(TokensOnly(Windows(40, 0)), own.training.batch_size, own.seed),
            valid=TokensOnly(Windows(12, 1)), hidden_mean=np.zeros(12, np.float32), hidden_std=np.ones(12, np.float32),
            tokenizer=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")), eos_id=0, head=None,
            provenance={"data": "synthetic"},
        )  # fmt: skip
        final = train(own, run, data, judge)
        data.tokenizer.save(str(run / "tokenizer.json"))
        (run / "data.json").write_text(json.dumps({"eos_id": 0}))
        return final

    return start


def averaged(run, step):
    model = Model(load(run).config)
    checkpoints = Checkpoints(run / "checkpoints")
    return checkpoints.restore_partial(step, {"ema_params": model.param_shapes}, ("ema_params",))[0]["ema_params"]


def test_a_run_resumes_bit_for_bit_and_is_read_back(start, tmp_path):
    """Trained on ids and lengths alone; probes log nats per token, samples are written, nothing of latents is logged."""
    final = start("masked", tmp_path / "whole", 6)
    start("masked", tmp_path / "parts", 3)
    assert start("masked", tmp_path / "parts", 6)["loss"] == final["loss"]
    jax.tree.map(np.testing.assert_array_equal, *(averaged(tmp_path / name, 6) for name in ("whole", "parts")))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    logged = {kind: set().union(*(line for line in lines if line["kind"] == kind)) for kind in ("train", "probe")}
    assert {"loss", "token_accuracy", "gradient_norm", "learning_rate"} <= logged["train"]
    assert {"nll", "token_accuracy"} <= logged["probe"]
    assert not (logged["train"] | logged["probe"]) & {"gamma", "latent_variance", "reconstruction", "gate_open"}
    assert 2.0 < final["nll"] < 5.0 and (tmp_path / "whole" / "samples" / "step-000006.txt").is_file()
    generator = load(tmp_path / "whole")
    assert generator.step == 6 and generator.generate_tokens(num=2).shape == (2, 8)
    with pytest.raises(ConfigError, match=r"holds a baseline \(model.kind=masked\)"):
        quantize_run(tmp_path / "whole", tmp_path / "packed", "int8")


# Sizes


def test_sizes_stand_side_by_side(config):
    ldlm, causal, masked = sizes(config["masked"], steps=4)
    assert [size.kind for size in (ldlm, causal, masked)] == ["ldlm", *KINDS]
    assert causal.weights == masked.weights and (causal.blocks, masked.blocks, ldlm.blocks) == (1, 1, 4)
    d, t, v = 32, 8, 37
    matrices = d * d + (4 * d * d + 2 * 4 * d * d) + d * v
    assert masked.training_flops == pytest.approx(3 * (2 * matrices + 4 * t * d))
    assert causal.training_flops == pytest.approx(3 * (2 * matrices + 4 * (t + 1) / 2 * d))
    assert masked.generation_flops == pytest.approx(4 * masked.training_flops / 3)  # four forward passes
    assert causal.generation_flops == pytest.approx(causal.training_flops / 3) and causal.steps == t
    model = Model(config["masked"].replace(model__kind="ldlm", model__trunk_depth=None))
    assert ldlm.training_flops == pytest.approx(flops_per_window(model) / t)
