"""Confidence intervals over texts: how far a figure would move if other samples had been drawn.

The percentile bootstrap (Efron 1979) draws texts with replacement, whole texts, since the tokens of one text depend on each
other.  It says nothing about other training seeds, which the ablation repeats for that, nor about another scorer.  Not for
counts of different things (distinct-n, distinct texts): a resample says everything twice, so they only ever fall.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Interval = tuple[float, float]
LEVEL = 0.95
RESAMPLES = 1000


def bootstrap(
    statistic: Callable[[Int[np.ndarray, " n"]], float],
    n: int,
    *,
    centred: bool = False,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Interval that holds `level` of the values of `statistic` over resampled row numbers 0..n-1.

    `centred` moves it so that its resamples lie around the value of the sample itself, for a statistic that resampling
    alone makes worse (MAUVE sees a resample as less varied than the text).  (nan, nan) for fewer than two rows.
    """
    if n < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    values = np.array([statistic(rng.integers(0, n, n)) for _ in range(resamples)])
    if centred:
        values += statistic(np.arange(n)) - values.mean()
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def of_mean(values: Float[np.ndarray, " n"], **options: float) -> Interval:
    """Interval of a mean over texts."""
    return of_ratio(values, np.ones(len(values)), **options)


def of_ratio(
    above: Float[np.ndarray, " n"],
    below: Float[np.ndarray, " n"],
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """`bootstrap` of sum(above) / sum(below), all resamples at once."""
    n = len(above)
    if n < 2:
        return float("nan"), float("nan")
    rows = np.random.default_rng(seed).integers(0, n, (resamples, n))
    low, high = np.quantile(above[rows].sum(1) / below[rows].sum(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def of_perplexity(nll: Float[np.ndarray, " n"], predicted: Int[np.ndarray, " n"], **options: float) -> Interval:
    """Interval of exp(sum of nll / number of predicted tokens), given both sums for each text."""
    low, high = of_ratio(nll, predicted, **options)
    return float(np.exp(low)), float(np.exp(high))
