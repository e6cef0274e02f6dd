"""MAUVE on histograms with known areas and on clouds of features that are alike, shifted or narrower."""

import numpy as np
import pytest

from jdllm.evaluation import mauve as measure
from jdllm.evaluation.mauve import area, mauve

RNG = np.random.default_rng(0)
SCALES = np.linspace(1.0, 0.02, 40)


def cloud(n=200, shift=0.0):
    return (RNG.normal(size=(n, 40)) + shift) * SCALES


def test_area_equals_that_of_mauve_text():
    # mauve-text 0.4.0: get_divergence_curve_for_multinomials with c = 5 and 25 mixtures, its area under the curve
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.2, 0.3, 0.4, 0.1])
    assert area(p, q) == pytest.approx(0.7323895036864557, rel=1e-12)
    assert area(q, p) == pytest.approx(area(p, q), rel=1e-12)


def test_area_of_equal_histograms_is_one_and_of_disjoint_ones_near_zero():
    p = np.array([0.5, 0.5, 0.0, 0.0])
    assert area(p, p) == pytest.approx(1.0)
    assert area(p, p[::-1]) < 0.01


def test_area_falls_as_mass_moves_away():
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.3, 0.6])
    areas = [area(p, (1 - share) * p + share * q) for share in (0.0, 0.25, 0.5, 1.0)]
    assert areas == sorted(areas, reverse=True) and areas[-1] < areas[0]


def test_a_set_against_itself_is_one_and_against_its_like_is_near_it():
    human = cloud()
    assert mauve(human, human)[0] == pytest.approx(1.0)
    assert mauve(human, cloud())[0] > 0.85


@pytest.mark.parametrize("kind", ["other texts", "the same few texts"])
def test_another_distribution_scores_clearly_lower(kind):
    human, like = cloud(), cloud()
    other = cloud(shift=1.0) if kind == "other texts" else np.repeat(human[:5], 40, axis=0) + 0.05 * cloud()
    assert mauve(human, other)[0] < mauve(human, like)[0] - 0.3


def test_it_is_nearly_the_same_the_other_way_round():
    one, other = cloud(), cloud(shift=0.2)
    assert mauve(one, other)[0] == pytest.approx(mauve(other, one)[0], abs=0.1)


def test_the_length_of_features_does_not_count():
    human, samples = cloud(60), cloud(60)
    scaled = samples * RNG.uniform(0.5, 2.0, (60, 1))
    assert mauve(human, scaled)[0] == pytest.approx(mauve(human, samples)[0])


def test_interval_holds_the_score_and_narrows_with_more_texts():
    few, many = (mauve(cloud(n), cloud(n, shift=0.1)) for n in (40, 400))
    for score, (low, high) in (few, many):
        assert 0 <= low <= score <= high <= 1
    assert np.diff(many[1]) < np.diff(few[1])


def test_too_few_texts_have_no_score():
    assert np.isnan(mauve(cloud(measure.LEAST_TEXTS - 1), cloud())[0])


def test_texts_that_are_all_the_same_have_a_score():
    human, same = cloud(), np.tile(cloud(1), (200, 1))
    assert mauve(human, same)[0] < 0.3 and mauve(same, same)[0] == 1.0
