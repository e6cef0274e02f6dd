"""The loop: resumed equals uninterrupted, bit for bit; it stops in words, and side work cannot stop it."""

import json
import os
import signal

import jax
import numpy as np
import pytest
import tokenizers

import jdllm.training.loop as loop
from jdllm.config import ConfigError
from jdllm.data.loader import BatchLoader
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.loop import TrainingData, TrainingStopped, train
from jdllm.training.run import load


class Windows:
    """Random hidden states and ids, with as much of a HiddenStateCache as loop and loader want."""

    hash = "synthetic"

    def __init__(self, batch):
        self.batch = {name: np.asarray(value) for name, value in batch.items()}

    def __len__(self):
        return len(self.batch["ids"])

    def gather(self, indices):
        return {name: value[np.asarray(indices)] for name, value in self.batch.items()}


class Disturbed:
    """A loader to which something happens at its n-th batch."""

    def __init__(self, loader, at, event):
        self.loader, self.at, self.event, self.count = loader, at, event, 0

    def __next__(self):
        self.count += 1
        batch = next(self.loader)
        return self.event(batch) if self.count == self.at else batch

    def __getattr__(self, name):
        return getattr(self.loader, name)


class Crash(Exception):
    pass


pytestmark = pytest.mark.usefixtures("compiled_once")


def crash(batch):
    raise Crash


def ctrl_c(batch):
    os.kill(os.getpid(), signal.SIGINT)
    return batch


def no_numbers(batch):
    return batch | {"hidden": batch["hidden"] * np.float32("nan")}


def judge(tokens, eos_id):
    return {"entropy": 3.0}


@pytest.fixture(scope="module")
def config(tiny):
    return tiny.replace(
        training__steps=14, training__batch_size=8, training__log_every=3, training__probe_every=4,
        training__sample_every=6, training__checkpoint_every=5, training__keep_checkpoints=9, training__wandb="disabled",
        objective__gamma_gate=0.01, objective__gamma_gate_margin=0.01, objective__gamma_rank=0.0,
        objective__gamma_warmup_steps=6, objective__decoder_noise_ramp_steps=10, optimizer__warmup_steps=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def make_data(make_batch):
    """make_data(config, at=None, event=None): a fresh loader over the same 20 windows, disturbed at one batch."""

    def make(config, at=None, event=None):
        train_windows, valid = Windows(make_batch(config, 20)), Windows(make_batch(config, 12, seed=1))
        words = {f"w{i}": i for i in range(config.model.vocab_size)}
        loader = BatchLoader(train_windows, config.training.batch_size, config.seed)
        return TrainingData(
            loader=Disturbed(loader, at, event) if event else loader, valid=valid,
            hidden_mean=np.zeros(12, np.float32), hidden_std=np.ones(12, np.float32),
            tokenizer=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")), eos_id=0, head=None,
            provenance={"data": "synthetic"},
        )  # fmt: skip

    return make


def as_a_run(run, data):
    """The folder with what the pipeline would have put into it."""
    data.tokenizer.save(str(run / "tokenizer.json"))
    (run / "data.json").write_text(json.dumps({"eos_id": data.eos_id}))
    return run


def record(run):
    """metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("tokens_per_second", "mfu", "wait_share")}
        for line in lines
    ]


def checkpoint(run, step):
    """All arrays of a checkpoint, as they lie on the disk."""
    config = loop.Config.load(run / "config.json")
    model, optimizer = loop.Model(config), loop.make_optimizer(config.optimizer)
    like = jax.eval_shape(lambda m: loop.init_state(model, optimizer, m, m), jax.ShapeDtypeStruct((12,), "float32"))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like)
    checkpoints = Checkpoints(run / "checkpoints")
    state, _ = checkpoints.restore(step, like, config.to_dict())
    checkpoints.close()
    return state


def assert_same_run(one, two, step=14):
    for a, b in zip(*(jax.tree.leaves(checkpoint(run, step)) for run in (one, two)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert record(one) == record(two)
    names = sorted(path.name for path in (one / "samples").iterdir())
    assert names == sorted(path.name for path in (two / "samples").iterdir())
    for name in names:
        assert (one / "samples" / name).read_text() == (two / "samples" / name).read_text()


@pytest.fixture(scope="module")
def whole(config, make_data, tmp_path_factory):
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole")
    final = train(config, run, make_data(config), judge)
    assert final["step"] == 14
    return run


def test_everything_is_logged_at_its_step(whole):
    steps = {
        kind: [line["step"] for line in record(whole) if line["kind"] == kind] for kind in ("train", "probe", "eval")
    }
    assert steps == {"train": [1, 3, 6, 9, 12, 14], "probe": [4, 8, 12, 14], "eval": [6, 12, 14]}
    last = [line for line in record(whole) if line["kind"] == "train"][-1]
    assert {"loss_diffusion", "loss_hidden", "loss_token", "gamma", "latent_variance", "effective_rank"} <= set(last)
    assert last["gamma"] > record(whole)[0]["gamma"]  # the gate had opened: there was something to resume


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(whole, config, make_data, tmp_path):
    """Ctrl-C writes a checkpoint at the step at hand, between two lines of the log."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, make_data(config, 8, ctrl_c), judge)
    assert signal.getsignal(signal.SIGINT) is before
    train(config, tmp_path, make_data(config), judge)
    assert_same_run(tmp_path, whole)


def test_crashed_and_resumed_equals_uninterrupted_bit_for_bit(whole, config, make_data, tmp_path):
    """Nothing is written at a crash; lines after the last checkpoint are dropped and come again."""
    with pytest.raises(Crash):
        train(config, tmp_path, make_data(config, 10, crash), judge)
    assert [line["step"] for line in record(tmp_path)][-1] == 9
    train(config, tmp_path, make_data(config), judge)
    assert_same_run(tmp_path, whole)


def test_a_run_on_disk_generates(whole, config, make_data):
    generator = load(as_a_run(whole, make_data(config)))
    assert generator.step == 14 and generator.generate_tokens(num=2).shape == (2, 8)


def test_other_data_is_refused(whole, config, make_data):
    data = make_data(config)._replace(provenance={"data": "other"})
    with pytest.raises(ConfigError, match="trained with another data"):
        train(config.replace(training__steps=15), whole, data, judge)


def test_a_nan_stops_the_run_with_a_sentence_and_the_last_checkpoint_is_sound(config, make_data, tmp_path):
    with pytest.raises(TrainingStopped, match=r"step 9: .*became NaN or infinite.*learning_rate"):
        train(config, tmp_path, make_data(config, 7, no_numbers), judge)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(checkpoint(tmp_path, 5).params))


def test_collapsed_latents_stop_the_run_with_a_sentence(config, make_data, tmp_path):
    with pytest.raises(TrainingStopped, match="latents hardly depend on their input.*gamma_max"):
        train(config.replace(training__collapse_variance=1.5), tmp_path, make_data(config), judge)


def test_samples_of_a_few_words_stop_the_run_and_zero_switches_that_off(config, make_data, tmp_path):
    def of_samples_low(tokens, eos_id):
        return {"entropy": 3.0 if len(tokens) == 12 else 0.4}

    config = config.replace(training__sample_every=1)
    with pytest.raises(TrainingStopped, match="0.40 nats.*3.00.*collapsed to a few words"):
        train(config, tmp_path / "on", make_data(config), of_samples_low)
    config = config.replace(training__collapse_entropy=0.0)
    assert train(config, tmp_path / "off", make_data(config), of_samples_low)["step"] == 14


def test_a_failing_probe_or_sample_or_plot_does_not_end_the_run(config, make_data, tmp_path, monkeypatch, capsys):
    def broken(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop, "sample", broken)
    monkeypatch.setattr(loop, "make_probe", lambda model: broken)
    monkeypatch.setattr(loop, "plots", broken)
    monkeypatch.setattr(loop.jax, "jit", lambda f, **options: f if f is broken else jax_jit(f, **options))
    final = train(config, tmp_path, make_data(config), judge)
    assert final["step"] == 14 and {line["kind"] for line in record(tmp_path)} == {"train"}
    said = capsys.readouterr().out
    assert all(
        f"{what} failed and is skipped this time: RuntimeError" in said for what in ("probe", "sampling", "plotting")
    )


jax_jit = jax.jit


def test_the_clock_may_end_a_run(config, make_data, tmp_path):
    config = config.replace(training__steps=100_000, training__minutes=1e-6)
    final = train(config, tmp_path, make_data(config), judge)
    assert 1 < final["step"] < 20 and Checkpoints(tmp_path / "checkpoints").latest() == final["step"]
