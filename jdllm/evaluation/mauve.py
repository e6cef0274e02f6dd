"""MAUVE: how much of human text a model covers, and how much of what it writes is like human text, in one number.

Pillutla et al. 2021 (arXiv 2102.01454).  Features of both sets of texts are clustered together, so each set becomes a
histogram over clusters; the curve of exp(-c KL(q | r)) against exp(-c KL(p | r)) for mixtures r of the two is traced, and
the area under it is the score: 1 for equal histograms, near 0 for disjoint ones.  Perplexity is low for "the the the"; this
is not, and entropy is blind to nonsense; this is not.

Choices as in the authors' package mauve-text 0.4 (last release 2024; it needs faiss and scikit-learn, hence these few
lines): features of length 1, PCA to 90% of the variance, a tenth as many clusters as texts in the smaller set, c = 5, 25
mixtures.  Two are others.  The score is the mean over 5 runs of k-means instead of that of the best one: with 120 texts of
books on either side, human text scored 0.76 to 0.92 by the best of 5, and 0.89 to 0.93 by the mean (four seeds each).  And
features are the mean of SmolLM2's last hidden states instead of GPT-2 large's last one, so **values are comparable with each
other, not with those of papers**.  They also depend on the number of texts; compare equal numbers only, beside the score of
human text against human text.
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
CLUSTERINGS = 5
LEAST_TEXTS = 20
"""In each set; below, there is no score."""


def mauve(
    human: Float[np.ndarray, "n f"], samples: Float[np.ndarray, "m f"], *, seed: int = 0, resamples: int = 200
) -> tuple[float, Interval]:
    """Score of `samples` against `human`, and its interval over resampled samples (clusters held); nan below 20 texts."""
    if min(len(human), len(samples)) < LEAST_TEXTS:
        return float("nan"), (float("nan"), float("nan"))
    labels = clusterings(human, samples, seed=seed)
    count = int(labels.max()) + 1
    p = histograms(labels[:, : len(human)], count)

    def score(rows: Int[np.ndarray, " m"]) -> float:
        return float(area(p, histograms(labels[:, len(human) :][:, rows], count)).mean())

    low, high = bootstrap(score, len(samples), centred=True, resamples=resamples, seed=seed)
    return score(np.arange(len(samples))), (max(low, 0.0), min(high, 1.0))


def area(p: Float[np.ndarray, "*r k"], q: Float[np.ndarray, "*r k"], scale: float = SCALE) -> Float[np.ndarray, "*r"]:
    """Area under the divergence curves of histograms, in (0, 1]; symmetric in p and q."""
    weights = np.linspace(1 - 1e-6, 1e-6, MIXTURES).reshape(-1, *(1,) * p.ndim)
    r = weights * p + (1 - weights) * q
    x, y = np.exp(-scale * kl(q, r)), np.exp(-scale * kl(p, r))  # x rises and y falls as r goes from p to q
    zero, one = np.zeros((1, *x.shape[1:])), np.ones((1, *x.shape[1:]))
    return np.minimum(np.trapezoid(np.concatenate([one, y, zero]), np.concatenate([zero, x, one]), axis=0), 1.0)


def kl(p: Float[np.ndarray, "*r k"], r: Float[np.ndarray, "*s k"]) -> Float[np.ndarray, "*s"]:
    """KL divergences in nats; r has no zero where p has none."""
    return np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0) / np.where(r > 0, r, 1.0)), 0.0).sum(-1)


def histograms(labels: Int[np.ndarray, "c n"], count: int) -> Float[np.ndarray, "c k"]:
    """Share of each of `count` clusters, by clustering."""
    return np.stack([np.bincount(row, minlength=count) for row in labels]) / labels.shape[1]


def clusterings(
    human: Float[np.ndarray, "n f"], samples: Float[np.ndarray, "m f"], *, seed: int = 0
) -> Int[np.ndarray, "c n+m"]:
    """Cluster numbers of all texts, human ones first, by runs of k-means that begin at different places."""
    x = np.concatenate([human, samples]).astype(np.float64)
    x = principal_components(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))
    different = len(np.unique(x.round(6), axis=0))  # collapsed samples may be fewer than the clusters
    count = min(max(2, round(min(len(human), len(samples)) / TEXTS_A_CLUSTER)), different)
    if count < 2:
        return np.zeros((CLUSTERINGS, len(x)), int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty cluster does no harm
        generators = [np.random.default_rng([seed, run]) for run in range(CLUSTERINGS)]
        return np.stack([kmeans2(x, count, minit="++", iter=50, rng=rng)[1] for rng in generators])


def principal_components(x: Float[np.ndarray, "n f"], variance: float = VARIANCE) -> Float[np.ndarray, "n g"]:
    """Projection on as many directions as hold this share of the variance."""
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    held = np.cumsum(s**2) / max((s**2).sum(), 1e-300)
    keep = int(np.searchsorted(held, variance)) + 1
    return u[:, :keep] * s[:keep]
