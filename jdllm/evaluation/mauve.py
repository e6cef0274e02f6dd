"""MAUVE: how much of human text a model covers, and how much of what it writes is like human text, in one number.

Pillutla et al. 2021 (arXiv 2102.01454).  Features of both sets of texts are clustered together, so each set becomes a
histogram over clusters; the curve of exp(-c KL(q | r)) against exp(-c KL(p | r)) for mixtures r of the two is traced, and
the area under it is the score: 1 for equal histograms, near 0 for disjoint ones.  Perplexity is low for "the the the"; this
is not, and entropy is blind to nonsense; this is not.

Choices as in the authors' package mauve-text 0.4 (last release 2024; it needs faiss and scikit-learn, hence these few
lines): features of length 1, PCA to 90% of the variance, a tenth as many clusters as texts in the smaller set, the best of 5
runs of k-means, c = 5, 25 mixtures.  The features are another: the mean of SmolLM2's last hidden states instead of GPT-2
large's last one, so **values are comparable with each other, not with those of papers**.  They also depend on the number of
texts; compare equal numbers only, beside the score of human text against human text.
"""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2

from jdllm.evaluation.intervals import Interval, bootstrap

SCALE = 5.0
MIXTURES = 25
VARIANCE = 0.9
TEXTS_A_CLUSTER = 10
RESTARTS = 5
LEAST_TEXTS = 20
"""In each set; below, there is no score."""


def mauve(
    human: Float[np.ndarray, "n f"], samples: Float[np.ndarray, "m f"], *, seed: int = 0, resamples: int = 200
) -> tuple[float, Interval]:
    """Score of `samples` against `human`, and its interval over resampled samples (clusters held); nan below 20 texts."""
    if min(len(human), len(samples)) < LEAST_TEXTS:
        return float("nan"), (float("nan"), float("nan"))
    of_human, of_samples = clusters(human, samples, seed=seed)
    count = int(max(of_human.max(), of_samples.max())) + 1
    p = histogram(of_human, count)

    def score(rows: Int[np.ndarray, " m"]) -> float:
        return area(p, histogram(of_samples[rows], count))

    interval = bootstrap(score, len(samples), centred=True, resamples=resamples, seed=seed)
    return score(np.arange(len(samples))), (max(interval[0], 0.0), min(interval[1], 1.0))


def area(p: Float[np.ndarray, " k"], q: Float[np.ndarray, " k"], scale: float = SCALE) -> float:
    """Area under the divergence curve of two histograms, in (0, 1]; symmetric in them."""
    points = [(0.0, 1.0)]
    for weight in np.linspace(1e-6, 1 - 1e-6, MIXTURES):
        r = weight * p + (1 - weight) * q
        points.append((np.exp(-scale * kl(q, r)), np.exp(-scale * kl(p, r))))
    x, y = np.array([*points, (1.0, 0.0)]).T
    both = [np.trapezoid(b[order], a[order]) for a, b in ((x, y), (y, x)) for order in [np.lexsort((-b, a))]]
    return float(min(np.mean(both), 1.0))


def kl(p: Float[np.ndarray, " k"], r: Float[np.ndarray, " k"]) -> float:
    """KL divergence in nats; r has no zero where p has none."""
    seen = p > 0
    return float((p[seen] * np.log(p[seen] / r[seen])).sum())


def histogram(labels: Int[np.ndarray, " n"], count: int) -> Float[np.ndarray, " k"]:
    """Share of each of `count` clusters."""
    return np.bincount(labels, minlength=count) / len(labels)


def clusters(
    human: Float[np.ndarray, "n f"], samples: Float[np.ndarray, "m f"], *, seed: int = 0
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]]:
    """Cluster number of each text; both sets are clustered as one."""
    x = np.concatenate([human, samples]).astype(np.float64)
    x = principal_components(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
    different = len(np.unique(x.round(6), axis=0))  # collapsed samples may be fewer than the clusters
    count = min(max(2, round(min(len(human), len(samples)) / TEXTS_A_CLUSTER)), different)
    best, least = np.zeros(len(x), int), np.inf
    for restart in range(RESTARTS if count > 1 else 0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty cluster does no harm
            centres, labels = kmeans2(x, count, minit="++", iter=50, rng=np.random.default_rng([seed, restart]))
        loss = np.square(x - centres[labels]).sum()
        if loss < least:
            best, least = labels, loss
    return best[: len(human)], best[len(human) :]


def principal_components(x: Float[np.ndarray, "n f"], variance: float = VARIANCE) -> Float[np.ndarray, "n g"]:
    """Projection on as many directions as hold this share of the variance."""
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    held = np.cumsum(s**2) / max((s**2).sum(), 1e-300)
    keep = int(np.searchsorted(held, variance)) + 1
    return u[:, :keep] * s[:keep]
