"""The autoregressive baseline's objective: cross-entropy of each token given those before it, which is exact.

The first token of a window is predicted from nothing, since windows start in the middle of a text.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.model.token_transformer import TokenTransformer, shifted
from jdllm.training.objective import masked_mean, token_cross_entropy


def losses(
    module: TokenTransformer, ids: Int[Array, "b t"], lengths: Int[Array, " b"], key: jax.Array
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Nats per valid token, EOS included, and the share of tokens whose prediction is right.  `key` is not read."""
    mask = jnp.arange(ids.shape[1]) < lengths[:, None]
    nll, right = token_cross_entropy(module.states(shifted(ids)), module.token_decoder.head[...], ids)
    loss = masked_mean(nll, mask)
    return loss, {"token_accuracy": masked_mean(right, mask)}


def held_out(
    module: TokenTransformer, ids: Int[Array, "b t"], lengths: Int[Array, " b"], key: jax.Array
) -> dict[str, Array]:
    """`nll`, the negative log-likelihood in nats per token, and token_accuracy."""
    loss, metrics = losses(module, ids, lengths, key)
    return {"nll": loss, **metrics}
