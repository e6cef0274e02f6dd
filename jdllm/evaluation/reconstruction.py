"""What a trained run makes of held-out hidden states: tokens that come back, and how well each noise level is denoised.

Both use the averaged weights and running statistics, as generation does.  Reconstruction bounds the quality of samples from
above; with noise on the latents it shows how far off a sampled latent may be before its tokens are lost.  Left out: the
training losses themselves, which metrics.jsonl has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

from jdllm.generation.generator import Generator

Batch = Mapping[str, np.ndarray]
BATCH = 64


class Source(Protocol):
    """Held-out windows, such as jdllm.data.cache.HiddenStateCache."""

    def __len__(self) -> int: ...

    def gather(self, indices: Int[np.ndarray, " b"]) -> Batch:
        """hidden (b, t, d_h), ids (b, t), lengths (b,)."""


def batches(source: Source, size: int = BATCH) -> Iterator[tuple[Batch, Bool[np.ndarray, " b"]]]:
    """All windows in order, in batches of one size; rows whose mask is False fill up the last one and do not count."""
    size = min(size, len(source))
    for first in range(0, len(source), size):
        rows = first + np.arange(size)
        yield source.gather(np.minimum(rows, len(source) - 1)), rows < len(source)


def reconstruction_accuracy(
    generator: Generator, source: Source, *, decoder_noise: float = 0.0, seed: int = 0
) -> float:
    """Share of valid tokens, EOS included, that encoding and decoding gives back, in [0, 1].

    `decoder_noise` is the standard deviation of Gaussian noise on the latents, whose own is 1.
    """
    right = total = 0
    for number, (batch, counts) in enumerate(batches(source)):
        tokens = generator.reconstruct(batch, decoder_noise=decoder_noise, seed=seed + number)
        valid = (np.arange(tokens.shape[1]) < batch["lengths"][:, None]) & counts[:, None]
        right += int(((tokens == batch["ids"]) & valid).sum())
        total += int(valid.sum())
    return right / total


def denoising_loss_by_tau(
    generator: Generator, source: Source, *, bins: int = 10, seed: int = 0
) -> Float[np.ndarray, " n"]:
    """Mean squared error of one estimate without self-conditioning, in `bins` equal intervals of tau from 0 to 1.

    Every window is noised once in each bin, at a tau drawn uniformly from it.  A latent's variance is 1, so guessing the
    mean costs 1; latents in which a window says nothing of another cannot do better at tau = 1.
    """
    rng = np.random.default_rng(seed)
    sums, total = np.zeros(bins), 0
    for number, (batch, counts) in enumerate(batches(source)):
        z = generator.encode(batch)
        for index in range(bins):
            tau = ((index + rng.random(len(counts))) / bins).astype(np.float32)
            sums[index] += generator.denoising_loss(z, tau, seed=seed + number * bins + index)[counts].sum()
        total += int(counts.sum())
    return sums / total
