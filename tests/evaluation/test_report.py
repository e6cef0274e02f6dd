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


def counting(ids, lengths):
    """A scorer to which token j costs j / 10 nats; its features are the counts of all tokens."""
    seen = np.arange(ids.shape[1]) < lengths[:, None]
    counts = np.stack([((ids == token) & seen).sum(1) for token in range(20)], 1)
    return reporting.Scores((ids[:, 1:] * seen[:, 1:]).sum(1) / 10, lengths - 1, counts.astype(float))


def certain(ids, lengths):
    """A deterministic language model: every token follows the last one with probability 1."""
    return reporting.Scores(np.zeros(len(ids)), lengths - 1, np.ones((len(ids), 2)))


def test_text_beside_itself_has_the_same_figures(rng):
    ids = windows(rng, 20, rng.integers(3, T + 1, 20))
    own, human = reporting.beside_human(ids, ids, EOS, counting)
    assert own == human


def test_perplexity_of_a_deterministic_model_is_one_and_of_a_uniform_one_its_vocabulary(rng):
    ids = windows(rng, 6, T)

    def uniform(ids, lengths):
        return reporting.Scores((lengths - 1) * np.log(20), lengths - 1, np.ones((len(ids), 2)))

    for score, expected in ((certain, 1.0), (uniform, 20.0)):
        figures = reporting.text_figures(ids, np.full(6, T), score(ids, np.full(6, T)))
        assert figures.perplexity == pytest.approx(expected)
        assert figures.intervals["perplexity"] == pytest.approx((expected, expected))


def test_mauve_tells_text_from_the_same_words_shuffled_over_texts(rng):
    # Each text is about one of four topics of five words; shuffling mixes them and keeps all word counts.
    def topical(n):
        return 5 * rng.integers(0, 4, (n, 1)) + rng.integers(0, 5, (n, T))

    human, like = topical(400), topical(200)
    mixed = rng.permutation(like.ravel()).reshape(like.shape)
    own, beside = reporting.beside_human(like, human, EOS, counting)
    shuffled, _ = reporting.beside_human(mixed, human, EOS, counting)
    assert own.mauve > 0.8 and beside.mauve > 0.8 and shuffled.mauve < 0.3
    assert own.intervals["mauve"][0] > shuffled.intervals["mauve"][1]


def test_human_text_is_taken_from_all_books(rng):
    # Held-out windows lie in the order of their books; the first ones would be one author's.
    human = np.repeat(np.arange(10), 30)[:, None] * np.ones((1, T), int)
    _, beside = reporting.beside_human(windows(rng, 50, T), human, EOS, None)
    assert beside.texts == 100
    seen = []
    reporting.beside_human(
        windows(rng, 50, T), human, EOS, lambda ids, lengths: seen.append(ids) or counting(ids, lengths)
    )
    np.testing.assert_array_equal(np.unique(seen[1], return_counts=True)[1], np.full(10, 10 * T))


def test_human_text_is_cut_to_the_lengths_of_the_samples(rng):
    own, human = reporting.beside_human(windows(rng, 30, 5), windows(rng, 40, T), EOS, None)
    assert own.tokens == human.tokens == 5
    assert (own.texts, human.texts) == (30, 40)
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
        return certain(ids, lengths)

    assert reporting.scores_of(windows(rng, 6, [0, 1, 2, 3, 4, 5]), np.arange(6), score) is not None
    assert seen == [(4, 2)]


def test_empty_samples_give_no_perplexity_and_no_crash(rng):
    own, human = reporting.beside_human(np.full((4, T), EOS), windows(rng, 4, T), EOS, certain)
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
    assert "| 4 steps | 30.0 | 1.50 | 3.000 | -6.2% | – |" in table
    assert "scorer is the encoder" in table and "91.0%" in table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert all(line.count("|") in (3, 12) for line in rows)


def test_intervals_stand_behind_their_figures():
    values = example()
    values["samples"]["4"]["samples"] = {**values["samples"]["4"]["samples"], "intervals": {"perplexity": (28.0, 32.5)}}
    table = reporting.markdown(values)
    assert "| 4 steps | 30.0 [28.0, 32.5] | 1.50 | 3.000 |" in table and "another training seed" in table


def test_table_without_scorer_and_without_cache_has_dashes():
    values = {**example(perplexity=None), "reconstruction": None, "denoising_loss": None, "notes": []}
    table = reporting.markdown(values)
    assert "| 4 steps | – | – |" in table and "reconstructed" not in table and "tau" not in table


def test_summary_has_the_keys_that_programs_read():
    assert reporting.summary(example()) == {
        "gen_ppl": {"4": 30.0, "32": 30.0}, "entropy": {"4": 3.0, "32": 3.0}, "mauve": {"4": None, "32": None},
        "human_ppl": 20.0, "human_entropy": 3.2, "human_mauve": None, "recon": 0.91, "gpu_minutes": 3.0, "scorer": "smollm2", "command": "jdllm eval", "commit": "abc",
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
