"""Diversity figures of texts whose figures are known."""

import numpy as np
import pytest

from jdllm.evaluation import diversity

EOS = 9


def test_text_ends_before_the_first_eos():
    ids = np.array([[1, 2, EOS, EOS], [1, EOS, 3, EOS], [1, 2, 3, 4], [EOS, 1, 1, 1]])
    np.testing.assert_array_equal(diversity.text_lengths(ids, EOS), [2, 1, 4, 0])


@pytest.mark.parametrize("m", [1, 2, 7, 32])
def test_entropy_of_m_equally_frequent_tokens_is_log_m(m):
    ids = np.tile(np.arange(m), (3, 2))
    np.testing.assert_allclose(diversity.unigram_entropy(ids, np.full(3, 2 * m)), np.log(m), atol=1e-12)


def test_entropy_of_a_skewed_text_equals_its_definition():
    ids = np.array([[5, 5, 5, 8]])
    expected = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    np.testing.assert_allclose(diversity.unigram_entropy(ids, np.array([4])), expected)


def test_tokens_after_the_end_never_count():
    rng = np.random.default_rng(0)
    ids, lengths = rng.integers(0, 5, (6, 20)), np.array([0, 1, 3, 4, 10, 19])
    other = ids.copy()
    for row, length in enumerate(lengths):
        other[row, length:] = rng.integers(100, 200, 20 - length)
    for measure in (
        lambda x: diversity.unigram_entropy(x, lengths),
        lambda x: diversity.distinct(x, lengths, 2),
        lambda x: diversity.repetition(x, lengths, 2),
    ):
        np.testing.assert_array_equal(measure(ids), measure(other))


def test_an_empty_text_has_no_entropy_and_no_ngrams():
    ids, lengths = np.zeros((2, 4), int), np.zeros(2, int)
    np.testing.assert_array_equal(diversity.unigram_entropy(ids, lengths), [0, 0])
    assert np.isnan(diversity.distinct(ids, lengths, 2)) and np.isnan(diversity.repetition(ids, lengths))


def test_distinct_pools_all_rows():
    # bigrams: (1 2) (2 3) in either row: two different ones of four
    ids = np.array([[1, 2, 3], [1, 2, 3]])
    assert diversity.distinct(ids, np.array([3, 3]), 2) == 0.5
    assert diversity.distinct(ids, np.array([3, 3]), 3) == 0.5
    assert diversity.distinct(ids[:1], np.array([3]), 2) == 1.0


def test_repetition_of_one_token_and_of_none():
    # "a a a a a a a": four 4-grams, all the same, so three quarters were said before
    assert diversity.repetition(np.full((1, 7), 3), np.array([7]), 4) == 0.75
    assert diversity.repetition(np.full((1, 4), 3), np.array([4]), 1) == 0.75
    assert diversity.repetition(np.arange(7)[None], np.array([7]), 4) == 0.0


def test_repetition_of_a_a_a():
    assert diversity.repetition(np.full((1, 3), 3), np.array([3]), 1) == pytest.approx(2 / 3)
    assert diversity.repetition(np.full((1, 3), 3), np.array([3]), 2) == 0.5


def test_rows_without_ngrams_do_not_count_in_the_mean_repetition():
    ids = np.array([[3, 3, 3, 3], [1, 2, 3, 4]])
    by_row = diversity.repetition_by_row(ids, np.array([4, 1]), 2)
    assert by_row[0] == pytest.approx(2 / 3) and np.isnan(by_row[1])
    assert diversity.repetition(ids, np.array([4, 1]), 2) == by_row[0]


def test_repetition_is_within_rows_only():
    ids = np.tile(np.arange(8), (5, 1))
    assert diversity.repetition(ids, np.full(5, 8), 2) == 0.0
    assert diversity.distinct(ids, np.full(5, 8), 2) == 0.2


def test_cut_text_has_the_lengths_asked_for_when_it_is_long_enough():
    lengths, other = np.array([3, 10, 7, 1]), np.array([10, 10, 10, 10, 10])
    rows, cut = diversity.cut_to_lengths_of(lengths, other)
    np.testing.assert_array_equal(rows, [0, 1, 2, 3])
    np.testing.assert_array_equal(np.sort(cut), np.sort(lengths))


def test_cut_text_is_never_longer_than_it_was_and_long_meets_long():
    lengths, other = np.array([3, 10, 7, 1]), np.array([2, 8, 4, 10])
    _, cut = diversity.cut_to_lengths_of(lengths, other)
    np.testing.assert_array_equal(cut, [1, 7, 3, 10])
