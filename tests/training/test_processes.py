"""Two processes train as one does: losses, stops, turns and files."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jdllm.config import ConfigError, ModelConfig, preset
from jdllm.data.loader import BatchLoader
from jdllm.training import loop
from jdllm.training.processes import exchange, first_then_others, join
from jdllm.training.sharding import make_mesh, own_rows

STOP = 6
"""Step at which a run is interrupted: the one asked at batch 5 stops at the next line of the log."""


def small_config(fsdp=2):
    model = ModelConfig(
        hidden_dim=12, vocab_size=37, num_tokens=8, num_latents=8, latent_dim=64, head_dim=32,
        encoder_depth=1, decoder_depth=1, token_decoder_depth=0, denoiser_depth=1,
    )  # fmt: skip
    return preset("smoke").replace(
        model=model, training__batch_size=8, training__fsdp=fsdp, training__wandb="disabled", training__steps=50,
        training__log_every=2, training__probe_every=3, training__sample_every=4, training__checkpoint_every=50,
        diffusion__timestep_bins=10, sampling__steps=2, objective__gamma_gate=0.01, objective__gamma_rank=0.0, objective__self_conditioning=0.0,
        optimizer__warmup_steps=1,
    )  # fmt: skip


class Windows:
    """Random windows, with as much of a HiddenStateCache as loop and loader want."""

    hash = "synthetic"

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.batch = {
            "hidden": rng.normal(size=(count, 8, 12)).astype("bfloat16"),
            "ids": rng.integers(0, 37, (count, 8)).astype(np.int32),
            "lengths": rng.integers(2, 9, count).astype(np.int32),
        }

    def __len__(self):
        return len(self.batch["ids"])

    def gather(self, indices):
        return {name: value[np.asarray(indices)] for name, value in self.batch.items()}


class Interrupted:
    """A loader during whose n-th batch somebody presses Ctrl-C."""

    def __init__(self, loader, at):
        self.loader, self.at, self.count = loader, at, 0

    def __next__(self):
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return next(self.loader)

    def __getattr__(self, name):
        return getattr(self.loader, name)


def train_until_interrupted(config, folder, at):
    """What one process does; `at` is the batch at which it is asked to stop, or 0."""
    loader = BatchLoader(Windows(20, 0), 8, config.seed, own_rows=own_rows(make_mesh(config), 8))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(37)}, unk_token="w0")
    data = loop.TrainingData(
        loader=Interrupted(loader, at), valid=Windows(6, 1), hidden_mean=np.zeros(12, np.float32),
        hidden_std=np.ones(12, np.float32), tokenizer=tokenizers.Tokenizer(words), eos_id=0, head=None, provenance={},
    )  # fmt: skip
    try:
        loop.train(config, folder, data, lambda tokens, eos_id: {"entropy": 3.0})
    except KeyboardInterrupt as interruption:
        return str(interruption)


def take_turns(folder, index):
    """Process 0 goes first; when it fails, the other one hears of it."""
    own, other = folder / f"turn-{index}", folder / f"turn-{1 - index}"
    first_then_others(lambda: own.write_text(str(other.exists())))

    def fail():
        raise OSError("a full disk")

    try:
        first_then_others(fail)
    except (OSError, ConfigError) as error:
        return {"turn": own.read_text(), "failure": str(error), "exchanged": exchange([index, 5.0]).tolist()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two processes, and beside it one of this process alone."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
    started = {}
    try:
        for index, name in enumerate(("first", "second")):
            started[name] = subprocess.Popen(
                [sys.executable, __file__, str(folder), str(index), str(port)], env=environment,
                stdout=(folder / f"{name}.txt").open("w"), stderr=subprocess.STDOUT,
            )  # fmt: skip
        train_until_interrupted(small_config(fsdp=1), folder / "alone", STOP)
        codes = {name: process.wait(timeout=420) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
    assert set(codes.values()) == {0}, "\n".join((folder / f"{name}.txt").read_text()[-3000:] for name in started)
    return folder


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_as_one_does(folder):
    one, two = records(folder / "alone"), records(folder / "together")
    assert [(line["step"], line["kind"]) for line in one] == [(line["step"], line["kind"]) for line in two]
    assert {line["kind"] for line in one} == {"train", "probe", "eval"}
    for expected, found in zip(one, two):
        assert expected.keys() == found.keys()
        for name in expected.keys() - {"kind", "tokens_per_second", "wait_share"}:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    samples = [(folder / run / "samples" / "step-000004.txt").read_text() for run in ("alone", "together")]
    assert samples[0] == samples[1]


def test_ctrl_c_in_one_process_stops_both_at_one_step_with_one_checkpoint(folder):
    outcomes = [json.loads((folder / f"outcome-{index}.json").read_text()) for index in (0, 1)]
    assert [outcome["stopped"] for outcome in outcomes] == [f"interrupted at step {STOP}; a checkpoint is written"] * 2
    assert [path.name for path in (folder / "together" / "checkpoints").iterdir()] == [str(STOP)]


def test_only_the_first_process_speaks(folder):
    assert "train 1/50" in (folder / "first.txt").read_text()
    second = (folder / "second.txt").read_text().splitlines()
    assert not [line for line in second if "train" in line or "loss" in line]


def test_the_first_goes_first_and_its_failure_is_everyones(folder):
    first, second = (json.loads((folder / f"outcome-{index}.json").read_text()) for index in (0, 1))
    assert first["turn"] == "False" and second["turn"] == "True"
    assert first["failure"] == "a full disk" and second["failure"].startswith("process 0 could not go on")
    assert first["exchanged"] == second["exchanged"] == [[0.0, 5.0], [1.0, 5.0]]


def test_incomplete_arguments_are_sentences():
    with pytest.raises(ConfigError, match="--num-processes, --process-id missing"):
        join("127.0.0.1:1")
    with pytest.raises(ConfigError, match="--process-id 2 is outside 0..1"):
        join("127.0.0.1:1", 2, 2)


def test_alone_there_is_nothing_to_agree_on():
    assert exchange([1.5, 2.0]).tolist() == [[1.5, 2.0]] and first_then_others(lambda: 7) == 7


if __name__ == "__main__":
    folder, index = Path(sys.argv[1]), int(sys.argv[2])
    join(f"127.0.0.1:{sys.argv[3]}", 2, index)
    loop.plots = lambda run_dir: None  # tested elsewhere, and Matplotlib takes seconds
    outcome = take_turns(folder, index)
    outcome["stopped"] = train_until_interrupted(small_config(), folder / "together", 5 if index else 0)
    (folder / f"outcome-{index}.json").write_text(json.dumps(outcome))
