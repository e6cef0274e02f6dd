"""Intervals cover what they promise, and match theory where there is one."""

import numpy as np
import pytest

from jdllm.evaluation.intervals import bootstrap, of_mean, of_perplexity, of_ratio

RNG = np.random.default_rng(0)


def test_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = RNG.normal(size=400)
    low, high = of_mean(values, resamples=4000)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)


def test_it_covers_the_true_mean_about_as_often_as_it_says():
    hits = [low <= 1.0 <= high for low, high in (of_mean(RNG.exponential(size=80), resamples=200) for _ in range(200))]
    assert 0.88 <= np.mean(hits) <= 0.99


def test_a_ratio_is_the_general_bootstrap_of_it():
    above, below = RNG.normal(size=50) + 5, RNG.uniform(1, 2, 50)
    expected = bootstrap(lambda rows: above[rows].sum() / below[rows].sum(), 50)
    assert of_ratio(above, below) == pytest.approx(expected)


def test_perplexity_weighs_texts_by_their_tokens():
    nll, predicted = np.array([10.0, 1.0]), np.array([10, 1])  # one nat a token in both: no doubt at all
    assert of_perplexity(nll, predicted) == pytest.approx((np.e, np.e))
    low, high = of_perplexity(np.array([1.0, 30.0]), np.array([1, 10]), resamples=200)
    assert (low, high) == pytest.approx((np.e, np.exp(3.0)))


def test_equal_texts_leave_no_doubt_and_one_text_says_nothing():
    assert of_mean(np.full(9, 2.5)) == pytest.approx((2.5, 2.5))
    assert np.isnan(of_mean(np.ones(1))).all()


def test_centred_resamples_lie_around_the_value():
    values = RNG.integers(0, 30, 60)

    def different(rows):
        return float(len(np.unique(values[rows])))

    plain, moved = bootstrap(different, 60), bootstrap(different, 60, centred=True)
    whole = different(np.arange(60))
    assert plain[1] < whole and moved[0] <= whole <= moved[1]


def test_the_seed_decides():
    values = RNG.normal(size=30)
    assert of_mean(values) == of_mean(values) != of_mean(values, seed=1)
