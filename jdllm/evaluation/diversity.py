"""How varied and how repetitive token sequences are, by counting; no model takes part.

Every function takes a matrix of token ids and the number of tokens of each row that count.  `text_lengths` gives that
number for text that stops at its first end-of-sequence token, which itself is not counted.  The figures mean something
only beside the same figures of human text with the same lengths and the same number of rows, since all of them depend on
both; `cut_to_lengths_of` makes that text.

Left out: what needs embeddings (mauve.py), self-BLEU (quadratic, and distinct-n says it sooner).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def text_lengths(ids: Int[np.ndarray, "n t"], eos_id: int) -> Int[np.ndarray, " n"]:
    """Tokens before the first end-of-sequence token, or all t of them when there is none."""
    is_end = np.asarray(ids) == eos_id
    return np.where(is_end.any(axis=1), is_end.argmax(axis=1), ids.shape[1]).astype(np.int64)


def unigram_entropy(ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Entropy of each row's own token frequencies, in nats; an empty row has 0.

    A row of m different tokens reaches its greatest value, ln m; one token repeated gives 0.  It is the collapse meter of
    Dieleman et al. 2022 (CDCD, arXiv 2211.15089), which reads low perplexity as good only at the entropy of human text.
    """
    entropies = np.zeros(len(ids))
    for row, (tokens, length) in enumerate(zip(ids, lengths)):
        if length:
            frequencies = np.unique(tokens[:length], return_counts=True)[1] / length
            entropies[row] = -(frequencies * np.log(frequencies)).sum()
    return entropies


def distinct(ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"], order: int) -> float:
    """Different n-grams over all n-grams of all rows together, in [0, 1]; nan when there is no n-gram at all.

    distinct-n of Li et al. 2016 (arXiv 1510.03055).  It falls as text grows, so compare equal amounts only.
    """
    grams = [_ngrams(tokens[:length], order) for tokens, length in zip(ids, lengths)]
    pooled = np.concatenate(grams) if grams else np.empty((0, order))
    return len(np.unique(pooled, axis=0)) / len(pooled) if len(pooled) else float("nan")


def repetition(ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"], order: int = 4) -> float:
    """Share of a row's n-grams that it has said before, averaged over the rows that have any, in [0, 1); nan without.

    seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319): 1 - different n-grams / n-grams.
    """
    shares = repetition_by_row(ids, lengths, order)
    return float(np.nanmean(shares)) if np.isfinite(shares).any() else float("nan")


def repetition_by_row(
    ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"], order: int = 4
) -> Float[np.ndarray, " n"]:
    """The same of each row; nan where it is too short to have any."""
    shares = np.full(len(ids), np.nan)
    for row, (tokens, length) in enumerate(zip(ids, lengths)):
        grams = _ngrams(tokens[:length], order)
        if len(grams):
            shares[row] = 1.0 - len(np.unique(grams, axis=0)) / len(grams)
    return shares


def sample_figures(ids: Int[np.ndarray, "n t"], eos_id: int) -> dict[str, float]:
    """The figures of a set of texts that training logs beside its samples."""
    lengths = text_lengths(ids, eos_id)
    return {
        "entropy": float(unigram_entropy(ids, lengths).mean()),
        "distinct_2": distinct(ids, lengths, 2),
        "repetition_4": repetition(ids, lengths, 4),
        "sample_tokens": float(lengths.mean()),
    }


def cut_to_lengths_of(
    lengths: Int[np.ndarray, " n"], other: Int[np.ndarray, " m"]
) -> tuple[Int[np.ndarray, " r"], Int[np.ndarray, " r"]]:
    """Which of the m rows of another text to take, and how much of each, so that it is as long as the n rows of the first.

    Returns r = min(n, m) row numbers into `other` (in rising order) and the length to which each is cut.  Long rows meet
    long rows, so that as little as possible is too short; a row is never made longer than it is.
    """
    rows = min(len(lengths), len(other))
    wanted, chosen = np.asarray(lengths)[:rows], np.arange(rows)
    by_length = chosen[np.argsort(-np.asarray(other)[:rows], kind="stable")]
    cut = np.empty(rows, dtype=np.int64)
    cut[by_length] = np.minimum(np.sort(wanted)[::-1], np.asarray(other)[by_length])
    return chosen, cut


def _ngrams(tokens: Int[np.ndarray, " t"], order: int) -> Int[np.ndarray, "g order"]:
    if len(tokens) < order:
        return np.empty((0, order), dtype=np.asarray(tokens).dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, order)
