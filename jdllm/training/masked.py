"""The masked diffusion baseline's objective (MDLM, arXiv 2406.07524): tokens are masked, the model fills them in.

At time t each token is masked with probability t (the linear schedule alpha_t = 1 - t), and the bound on the negative
log-likelihood is the integral over t of 1/t times the cross-entropy of the masked tokens (eq. 11 with that schedule).  SUBS
parameterisation: the model never predicts a mask, since the head has no such token, and tokens that can be seen are
carried over, so they cost nothing.

What stands behind the end of a text is always masked and never judged: it tells the model nothing, and the bound is one
for the valid tokens, EOS included, alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jdllm.diffusion.timesteps import draw_u
from jdllm.model.token_transformer import NONE, TokenTransformer
from jdllm.training.objective import masked_mean, token_cross_entropy

LEAST_TIME = 1e-3
"""Training times are from [LEAST_TIME, 1], as in MDLM's code: below, a masked token is rare and its weight huge."""
DRAWS = 4
"""Maskings of each held-out window in a probe."""


def valid_places(ids: Int[Array, "b t"], lengths: Int[Array, " b"]) -> Bool[Array, "b t"]:
    """The tokens of each text."""
    return jnp.arange(ids.shape[1]) < lengths[:, None]


def mask_at(key: jax.Array, t: Float[Array, " b"], valid: Bool[Array, "b t"]) -> Bool[Array, "b t"]:
    """Which places are masked at time t of each row."""
    return valid & (jax.random.uniform(key, valid.shape) < t[:, None])


def mask_count(key: jax.Array, count: Int[Array, " b"], valid: Bool[Array, "b t"]) -> Bool[Array, "b t"]:
    """`count` valid places of each row, chosen at random."""
    order = jnp.where(valid, jax.random.uniform(key, valid.shape), jnp.inf)
    return valid & (jnp.argsort(jnp.argsort(order, axis=1), axis=1) < count[:, None])


def weighted_nll(
    nll: Float[Array, "b t"], masked: Bool[Array, "b t"], weight: Float[Array, " b"], valid: Bool[Array, "b t"]
) -> Float[Array, ""]:
    """One draw of the bound, in nats per valid token: cross-entropy of the masked tokens, each row with its weight."""
    return jnp.sum(jnp.where(masked, nll, 0.0) * weight[:, None]) / jnp.maximum(valid.sum(), 1)


def fill(
    module: TokenTransformer, ids: Int[Array, "b t"], masked: Bool[Array, "b t"], valid: Bool[Array, "b t"]
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Negative log-likelihood of every token where `masked` and the places behind the end are hidden; 1 where it is right."""
    states = module.states(jnp.where(masked | ~valid, NONE, ids))
    return token_cross_entropy(states, module.token_decoder.head[...], ids)


def losses(
    module: TokenTransformer, ids: Int[Array, "b t"], lengths: Int[Array, " b"], key: jax.Array
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The bound in nats per valid token at one time a row, spread evenly over the batch, and accuracy at masked places."""
    keys, valid = jax.random.split(key), valid_places(ids, lengths)
    t = LEAST_TIME + (1.0 - LEAST_TIME) * draw_u(keys[0], len(ids))
    masked = mask_at(keys[1], t, valid)
    nll, right = fill(module, ids, masked, valid)
    return weighted_nll(nll, masked, 1.0 / t, valid), {"token_accuracy": masked_mean(right, masked)}


def held_out(
    module: TokenTransformer,
    ids: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    key: jax.Array,
    draws: int = DRAWS,
) -> dict[str, Array]:
    """`nll`, the same bound by Monte Carlo with less noise, and accuracy at masked places; means of `draws` maskings.

    A number m of masked tokens is drawn evenly from 1 to the length L instead of a time, and the weight is L / m: the same
    expectation (LLaDA, arXiv 2502.09992, eq. 6), without the least time and without the noise of how many are masked.
    """
    valid = valid_places(ids, lengths)

    def once(key: jax.Array) -> dict[str, Array]:
        keys = jax.random.split(key)
        count = 1 + jnp.minimum((draw_u(keys[0], len(ids)) * lengths).astype(jnp.int32), lengths - 1)
        masked = mask_count(keys[1], count, valid)
        nll, right = fill(module, ids, masked, valid)
        return {
            "nll": weighted_nll(nll, masked, lengths / count, valid),
            "token_accuracy": masked_mean(right, masked),
        }

    return jax.tree.map(lambda x: x.mean(0), jax.lax.map(once, jax.random.split(key, draws)))
