"""The report puts samples beside human text of the same length, and says so in every format."""

import json
import math

import numpy as np
import pytest

from jdllm.evaluation import report as reporting

EOS, T = 99, 12


def windows(rng, n, lengths):
    ids = rng.integers(0, 20, (n, T))
    for row, length in enumerate(np.broadcast_to(lengths, n)):
        ids[row, length:] = EOS
    return ids


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_text_beside_itself_has_the_same_figures(rng):
    ids = windows(rng, 20, rng.integers(3, T + 1, 20))
    own, human = reporting.beside_human(ids, ids, EOS, lambda ids, lengths: float(lengths.sum()))
    assert own == human


def test_human_text_is_cut_to_the_lengths_of_the_samples(rng):
    own, human = reporting.beside_human(windows(rng, 30, 5), windows(rng, 40, T), EOS, None)
    assert own.tokens == human.tokens == 5
    assert own.texts == human.texts == 30
    assert own.perplexity is None


def test_few_human_texts_do_not_make_the_samples_look_less_distinct(rng):
    ids = windows(rng, 200, T)
    own, human = reporting.beside_human(ids, ids[:20], EOS, None)
    assert (own.texts, human.texts) == (200, 20)
    assert own.distinct_2 == human.distinct_2


def test_the_scorer_sees_only_texts_of_two_tokens_and_more(rng):
    seen = []

    def score(ids, lengths):
        seen.append((len(ids), lengths.min()))
        return 7.0

    ids = windows(rng, 6, [0, 1, 2, 3, 4, 5])
    figures = reporting.text_figures(ids, np.arange(6), score)
    assert figures.perplexity == 7.0
    assert seen == [(4, 2)]


def test_empty_samples_give_no_perplexity_and_no_crash(rng):
    own, human = reporting.beside_human(np.full((4, T), EOS), windows(rng, 4, T), EOS, lambda ids, lengths: 1.0)
    assert own.perplexity is None and own.entropy == 0.0 and human.tokens == 0


def example(perplexity=30.0):
    figures = {
        "perplexity": perplexity, "entropy": 3.0, "distinct_2": 0.5, "distinct_3": math.nan, "repetition_4": 0.01,
        "tokens": 12.0, "texts": 8,
    }  # fmt: skip
    human = {**figures, "perplexity": 20.0, "entropy": 3.2}
    return {
        "run": "runs/x", "checkpoint": 1000, "samples": {s: {"samples": figures, "human": human} for s in ("4", "32")},
        "reconstruction": {"0": 0.91, "3": 0.4}, "denoising_loss": [0.1] * 10, "notes": ["scorer is the encoder"],
        "minutes": 3.0, "scorer": "smollm2", "command": "jdllm eval", "commit": "abc",
    }  # fmt: skip


def test_table_has_ratio_and_change_against_human_text():
    table = reporting.markdown(example())
    assert "| 4 steps | 30.0 | 1.50 | 3.000 | -6.2% |" in table
    assert "scorer is the encoder" in table and "91.0%" in table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert all(line.count("|") in (3, 11, 12) for line in rows)


def test_table_without_scorer_and_without_cache_has_dashes():
    values = {**example(perplexity=None), "reconstruction": None, "denoising_loss": None, "notes": []}
    table = reporting.markdown(values)
    assert "| 4 steps | – | – |" in table and "reconstructed" not in table and "tau" not in table


def test_summary_has_the_keys_that_programs_read():
    assert reporting.summary(example()) == {
        "gen_ppl": {"4": 30.0, "32": 30.0}, "entropy": {"4": 3.0, "32": 3.0}, "human_ppl": 20.0, "human_entropy": 3.2,
        "recon": 0.91, "gpu_minutes": 3.0, "scorer": "smollm2", "command": "jdllm eval", "commit": "abc",
    }  # fmt: skip


def test_files_are_strict_json_a_table_and_the_first_samples(tmp_path):
    out = tmp_path / "new" / "eval.json"
    reporting.save(example(), {"4": [f"text {i}" for i in range(40)]}, out)
    values = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert values["samples"]["4"]["samples"]["distinct_3"] is None
    assert values["summary"]["recon"] == 0.91
    assert out.with_suffix(".md").read_text() == reporting.markdown(example())
    samples = (out.parent / "samples" / "steps-4.txt").read_text()
    assert samples.count("---\n") == 32 and "text 31" in samples and "text 32" not in samples
