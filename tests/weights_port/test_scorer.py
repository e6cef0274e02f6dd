"""Perplexity equals what transformers' own loss says, whatever the padding, batching and tokenizer."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from weights_port import scorer as scoring
from weights_port.checkpoints import EncoderError
from weights_port.encoder import load_encoder
from weights_port.tiny import KINDS, byte_tokenizer_json, save_tiny, tiny_model

IDS = np.random.default_rng(1).integers(0, 256, (5, 21)).astype(np.int32)
LENGTHS = np.array([21, 4, 1, 13, 2], np.int32)


@pytest.fixture(scope="module")
def scorer():
    return scoring.Scorer("tiny-qwen3_5", device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_likelihoods_are_those_of_the_full_model(kind):
    model = tiny_model(kind)
    found = scoring.Scorer(f"tiny-{kind}", device="cpu").negative_log_likelihoods(IDS, LENGTHS)
    for row, ids, length in zip(found, IDS, LENGTHS):
        tokens = torch.from_numpy(ids[:length]).long()[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        np.testing.assert_allclose(row[: length - 1], expected.numpy(), atol=2e-5)
        assert (row[length - 1 :] == 0).all()


def test_features_are_means_of_the_last_states_of_all_tokens_but_the_first(scorer):
    model = tiny_model("qwen3_5")
    found = scorer.read(IDS, LENGTHS)[1]
    for row, ids, length in zip(found, IDS, LENGTHS):
        if length < 2:
            assert (row == 0).all()
            continue
        with torch.no_grad():
            states = model(torch.from_numpy(ids[:length]).long()[None], output_hidden_states=True).hidden_states[-1]
        np.testing.assert_allclose(row, states[0, 1:].mean(0).numpy(), atol=2e-5)


def test_perplexity_is_over_all_predicted_tokens(scorer):
    total = scorer.negative_log_likelihoods(IDS, LENGTHS).sum(dtype=np.float64)
    assert scorer.perplexity_of_ids(IDS, LENGTHS) == pytest.approx(np.exp(total / (20 + 3 + 0 + 12 + 1)))


def test_batching_changes_nothing(scorer, monkeypatch):
    whole = scorer.negative_log_likelihoods(IDS, LENGTHS)
    monkeypatch.setattr(scoring, "_BATCH_TOKENS", {"cpu": 1})
    monkeypatch.setattr(scoring, "_HEAD_TOKENS", {"cpu": 3})
    np.testing.assert_allclose(scorer.negative_log_likelihoods(IDS, LENGTHS), whole, atol=1e-5)


def test_uniform_model_has_the_vocabulary_as_perplexity(scorer, monkeypatch):
    monkeypatch.setattr(scorer, "_head", torch.zeros_like(scorer._head))
    assert scorer.perplexity(["any text", "another"]) == pytest.approx(260, rel=1e-5)


def test_texts_and_their_ids_agree(scorer):
    texts = ["A short text.", "x", "", "Ein längerer Text, größer."]
    rows = [list(scorer.tokenizer.encode(text).ids) for text in texts]
    ids = np.zeros((4, max(map(len, rows))), np.int32)
    for row, tokens in zip(ids, rows):
        row[: len(tokens)] = tokens
    assert scorer.perplexity(texts) == pytest.approx(scorer.perplexity_of_ids(ids, np.array(list(map(len, rows)))))
    with pytest.raises(EncoderError, match="none of 2 texts"):
        scorer.perplexity(["", "x"])


def test_it_knows_when_it_is_the_encoder(tmp_path):
    save_tiny("llama", tmp_path / "one")
    save_tiny("llama", tmp_path / "two", seed=1)
    scorer = scoring.Scorer(str(tmp_path / "one"), device="cpu")
    assert scorer.is_model_of(load_encoder(str(tmp_path / "one"), device="cpu").info)
    assert scorer.is_model_of(load_encoder("tiny-llama", device="cpu").info), "the same weights under another name"
    assert not scorer.is_model_of(load_encoder(str(tmp_path / "two"), device="cpu").info)
    assert not scorer.is_model_of(load_encoder("tiny-qwen3_5", device="cpu").info)


def test_ids_of_another_tokenizer_are_tokenised_again(scorer, tmp_path, monkeypatch):
    info = load_encoder("tiny-llama", device="cpu").info
    (tmp_path / "data.json").write_text(json.dumps({"encoder": vars(info)}))
    monkeypatch.setattr(scoring, "Scorer", lambda name: scorer)
    own = Tokenizer.from_str(byte_tokenizer_json())
    other = Tokenizer.from_str(byte_tokenizer_json())
    other.add_tokens(["great"])
    texts = ["a great text", "and another"]
    for tokenizer in (own, other):
        rows = [tokenizer.encode(text).ids for text in texts]
        ids = np.zeros((2, max(map(len, rows))), np.int32)
        for row, tokens in zip(ids, rows):
            row[: len(tokens)] = tokens
        found = scoring.scorer_for_run("any", tmp_path, SimpleNamespace(tokenizer=tokenizer))
        scores = found.score(ids, np.array(list(map(len, rows))))
        assert np.exp(scores.nll.sum() / scores.predicted.sum()) == pytest.approx(scorer.perplexity(texts), rel=1e-5)
        np.testing.assert_allclose(scores.features, scorer.read(*scorer.encode(texts))[1], atol=1e-5)
        assert found.name == "tiny-qwen3_5" and not found.is_encoder
