"""From a config to what the loop trains on: prepared once, found again, and never mixed up."""

import json
import shutil

import numpy as np
import pytest

from jdllm.config import Config, ConfigError, preset
from jdllm.data.text import DataError
from weights_port import pipeline
from weights_port.head import folded_head


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"word{i % 97} and {i}," for i in range(3000)))
    return path


@pytest.fixture(scope="module")
def encoder():
    from weights_port.encoder import load_encoder

    return load_encoder("tiny-llama", device="cpu")


@pytest.fixture
def loads(monkeypatch, encoder):
    """How often the encoder was loaded."""
    calls = []
    monkeypatch.setattr(pipeline, "load", lambda config: calls.append(config) or encoder)
    return calls


@pytest.fixture
def config(text, tmp_path):
    return preset("smoke").replace(
        data=str(text), encoder="tiny-llama", feed__cache_dir=str(tmp_path / "cache"), feed__max_tokens=3000,
        feed__valid_windows=8, model__hidden_dim=1, model__vocab_size=2,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def trained(run_dir):
    """As if training had saved a checkpoint."""
    (run_dir / "checkpoints" / "100").mkdir(parents=True)


def test_the_encoders_width_and_vocabulary_replace_those_of_the_config(config, run_dir, loads, encoder):
    prepared = pipeline.prepare(config, run_dir)
    model = prepared.config.model
    assert (model.hidden_dim, model.vocab_size) == (encoder.info.hidden_dim, encoder.info.vocab_size)
    assert Config.load(run_dir / "config.json") == prepared.config
    assert prepared.train_source.hidden_dim == encoder.info.hidden_dim


def test_the_run_folder_names_caches_tokenizer_and_held_out_text(config, run_dir, loads, encoder):
    prepared = pipeline.prepare(config, run_dir)
    data = json.loads((run_dir / "data.json").read_text())
    assert data["eos_id"] == encoder.info.eos_id and data["encoder"]["name"] == "tiny-llama"
    assert data["valid"]["key"] == prepared.valid_source.key
    assert (run_dir / "tokenizer.json").read_text() == encoder.tokenizer_json
    with np.load(run_dir / "valid_windows.npz") as stored:
        np.testing.assert_array_equal(stored["ids"], prepared.valid_source.ids)
        np.testing.assert_array_equal(stored["lengths"], prepared.valid_source.lengths)


def test_the_second_time_nothing_is_loaded_and_all_is_the_same(config, run_dir, loads):
    first = pipeline.prepare(config, run_dir)
    again = pipeline.prepare(config, run_dir)
    assert len(loads) == 1
    assert (again.config, again.info, again.tokenizer_json, again.train_hash) == (
        first.config, first.info, first.tokenizer_json, first.train_hash,
    )  # fmt: skip
    assert again.train_source.hash == first.train_source.hash
    provenance = [pipeline.training_data(prepared).provenance for prepared in (first, again)]
    assert provenance[0] == provenance[1] == json.loads(json.dumps(provenance[0]))


def test_a_cache_that_is_gone_is_made_again(config, run_dir, loads):
    first = pipeline.prepare(config, run_dir)
    before = first.train_source.gather([0, 5])
    shutil.rmtree(first.train_source.path)
    again = pipeline.prepare(config, run_dir)
    assert len(loads) == 2
    np.testing.assert_array_equal(again.train_source.gather([0, 5])["hidden"], before["hidden"])


def test_a_trained_run_whose_text_changed_is_left_alone(config, run_dir, loads, tmp_path):
    own = tmp_path / "own.txt"
    shutil.copy(config.data, own)
    config = config.replace(data=str(own))
    first = pipeline.prepare(config, run_dir)
    trained(run_dir)
    own.write_text(own.read_text().replace("and", "or"))
    pipeline.prepare(config, run_dir)  # the caches are there, so the run goes on with its own data
    shutil.rmtree(first.train_source.path)
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"trained on something else: train\.data.*--name"):
        pipeline.prepare(config, run_dir)
    assert before == {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}


def test_another_tokenizer_in_the_run_folder_is_refused(config, run_dir, loads, encoder):
    pipeline.prepare(config, run_dir)
    (run_dir / "tokenizer.json").write_text(encoder.tokenizer_json + " ")
    with pytest.raises(DataError, match="not the tokenizer"):
        pipeline.prepare(config, run_dir)


def test_the_encoders_head_is_kept_with_its_gain(config, run_dir, loads, encoder):
    from jdllm.model.ldlm import Model
    from jdllm.training.run import load_frozen

    prepared = pipeline.prepare(config.replace(model__head="encoder"), run_dir)
    head = load_frozen(run_dir, Model(prepared.config))["token_decoder"]["head"]
    np.testing.assert_array_equal(np.asarray(head), folded_head(encoder.checkpoint))
    pipeline.prepare(config.replace(model__head="encoder"), run_dir)
    assert len(loads) == 1


def test_an_online_feed_gives_the_same_states_as_a_cache_without_one(config, run_dir, loads, tmp_path):
    cached = pipeline.training_data(pipeline.prepare(config, run_dir))
    prepared = pipeline.prepare(config.replace(feed__feed="online"), tmp_path / "online")
    online = pipeline.training_data(prepared)
    assert online.provenance == cached.provenance
    np.testing.assert_array_equal(online.hidden_mean, cached.hidden_mean)  # few windows: the sample is all of them
    batch, source = next(online.loader), prepared.train_source
    online.loader.close()
    cached.loader.close()
    row = next(i for i in range(len(source)) if (source.ids[i] == batch["ids"][0]).all())
    found, expected = (np.asarray(x, np.float32) for x in (batch["hidden"][0], source[row]["hidden"]))
    np.testing.assert_allclose(found, expected, atol=2e-2)


# Resuming


@pytest.mark.parametrize(
    "changes",
    [
        {"training__steps": 999}, {"training__minutes": 2.0}, {"training__log_every": 3}, {"training__wandb": "disabled"},
        {"training__keep_checkpoints": 5}, {"sampling__steps": 4}, {"feed__cache_dir": "elsewhere"},
        {"model__hidden_dim": 576, "model__vocab_size": 49152},
    ],
)  # fmt: skip
def test_what_does_not_shape_the_weights_may_change(config, run_dir, changes):
    trained(run_dir)
    config.save(run_dir / "config.json")
    pipeline.check_resume(config.replace(**changes), run_dir)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"model__latent_dim": 96}, "model.latent_dim: 64 there, 96 here"),
        ({"training__batch_size": 8}, "training.batch_size: 64 there, 8 here"),
        ({"training__probe_every": 7}, "training.probe_every: 50 there, 7 here"),  # probes steer gamma
        ({"encoder": "gpt2"}, "encoder: 'tiny-llama' there, 'gpt2' here"),
    ],
)
def test_what_shapes_the_weights_may_not(config, run_dir, changes, words):
    trained(run_dir)
    config.save(run_dir / "config.json")
    with pytest.raises(ConfigError) as caught:
        pipeline.check_resume(config.replace(**changes), run_dir)
    assert words in str(caught.value) and "--name" in str(caught.value)


def test_a_run_without_a_checkpoint_may_start_again_with_anything(config, run_dir):
    run_dir.mkdir()
    config.save(run_dir / "config.json")
    pipeline.check_resume(config.replace(seed=1), run_dir)


def test_a_file_in_the_place_of_the_run(config, run_dir):
    run_dir.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        pipeline.check_resume(config, run_dir)


def test_the_newest_samples_are_shown_when_training_ends(run_dir, capsys):
    samples = run_dir / "samples"
    samples.mkdir(parents=True)
    (samples / "step-000900.txt").write_text("--- 1\nolder\n")
    (samples / "step-1000000.txt").write_text("--- 1\nfirst\nline two\n--- 2\n\n--- 3\nthird\n--- 4\nfourth\n")
    pipeline.show_samples(run_dir)
    shown = capsys.readouterr().out
    assert shown.splitlines() == ["  | first", "  | line two", "", "  | ", "", "  | third", ""]


def test_a_run_without_samples_shows_none(run_dir, capsys):
    pipeline.show_samples(run_dir)
    assert capsys.readouterr().out == ""


class Card:
    """As much of a JAX device as the pipeline asks for."""

    def __init__(self, platform, number):
        self.platform, self.local_hardware_id = platform, number


@pytest.mark.parametrize(
    ("device", "distributed", "card", "expected"),
    [
        ("auto", True, Card("gpu", 3), "cuda:3"),
        ("auto", True, Card("cpu", 0), "auto"),
        ("auto", False, Card("gpu", 3), "auto"),
        ("cuda:1", True, Card("gpu", 3), "cuda:1"),
    ],
)
def test_processes_on_one_host_encode_on_the_cards_they_train_on(device, distributed, card, expected, monkeypatch):
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: distributed)
    monkeypatch.setattr("jax.local_devices", lambda: [card])
    assert pipeline.own_card(device) == expected


@pytest.mark.parametrize(
    ("feed", "device", "cards", "left"),
    [
        ("online", "cuda:1", 3, "0,2"),
        ("online", "cuda:0", 1, None),  # the only card is shared
        ("online", "auto", 2, None),
        ("cache", "cuda:1", 2, None),
    ],
)
def test_a_card_given_to_an_online_encoder_is_not_trained_on(feed, device, cards, left, config, monkeypatch):
    updates = {}
    monkeypatch.setattr("torch.cuda.device_count", lambda: cards)
    monkeypatch.setattr("jax.config.update", updates.__setitem__)
    pipeline.leave_card_to_encoder(config.replace(feed__feed=feed, feed__encoder_device=device))
    assert updates == ({"jax_cuda_visible_devices": left} if left else {})
