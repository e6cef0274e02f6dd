"""Held-out negative log-likelihood of a baseline, by its averaged weights, in nats per token.

Exact for an autoregressive model; of masked diffusion it is an upper bound, drawn by Monte Carlo.  Both are of whole windows,
whose first token nothing stands before, so the two may be compared with each other.  Latent diffusion has no such figure.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jdllm.generation.generator import Generator
from jdllm.model.ldlm import Model, Params
from jdllm.training.step import BASELINES

DRAWS = 16
"""Maskings of each window."""
BATCH = 64


def held_out_nll(
    generator: Generator, ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"], *, seed: int = 0
) -> dict[str, Any]:
    """`nll` in nats per token, EOS included; `bound`, whether it is an upper bound; of one, `draws` and `standard_error`.

    The standard error is that of the maskings alone: other windows would say something else again.
    """
    bound = generator.config.model.kind == "masked"
    draws = DRAWS if bound else 1
    sums = np.zeros(draws)
    for first in range(0, len(ids), BATCH):
        rows = slice(first, first + BATCH)
        for draw in range(draws):
            key = jax.random.fold_in(jax.random.key(seed), first * DRAWS + draw)
            found = _nll(generator.model, generator.params, generator.frozen, key, ids[rows], lengths[rows])
            sums[draw] += float(found) * int(lengths[rows].sum())
    nll = sums / int(lengths.sum())
    figures: dict[str, Any] = {"nll": float(nll.mean()), "bound": bound, "windows": len(ids)}
    if bound:
        figures |= {"draws": draws, "standard_error": float(nll.std(ddof=1) / draws**0.5)}
    return figures


@functools.partial(jax.jit, static_argnames="model")
def _nll(
    model: Model, params: Params, frozen: Params, key: Array, ids: Int[Array, "b t"], lengths: Int[Array, " b"]
) -> Float[Array, ""]:
    """Nats per token of one batch, one masking of each window."""
    module, (ids, lengths) = model.merge(params, frozen), (jnp.asarray(ids, jnp.int32), jnp.asarray(lengths, jnp.int32))
    if model.config.model.kind == "masked":
        return BASELINES["masked"].held_out(module, ids, lengths, key, draws=1)["nll"]
    return BASELINES["autoregressive"].held_out(module, ids, lengths, key)["nll"]
