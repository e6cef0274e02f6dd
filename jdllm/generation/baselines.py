"""Text from the baselines, each in one program: token by token with a cache, or by filling in masked places.

Masked diffusion starts from masks alone and commits t / s tokens a step, those that `order` names: drawn with the highest
probability (MaskGIT, arXiv 2202.04200), from the distribution of the lowest entropy, or at random, which is MDLM's
ancestral sampler with the expected number of tokens a step in the place of a drawn one.  A committed token stays.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jdllm.config import ConfigError, SamplingConfig
from jdllm.generation.draw import draw
from jdllm.kernels.op import Choice
from jdllm.model.ldlm import Model, Params
from jdllm.model.token_transformer import NONE, TokenTransformer


@functools.partial(jax.jit, static_argnames=("model", "num", "nucleus"))
def write_in_order(
    model: Model,
    params: Params,
    frozen: Params,
    key: Array,
    temperature: Float[Array, ""] | float,
    top_p: Float[Array, ""] | float,
    *,
    num: int,
    nucleus: bool,
) -> Int[Array, "num t"]:
    """Autoregressive: each token is drawn given all before it, whose keys and values are kept in a preallocated cache."""
    module, t = model.merge(params, frozen), model.config.model.num_tokens
    blocks, table, head = module.blocks(), module.table(), module.token_decoder.head[...]

    def step(carry: tuple, position: Int[Array, ""]) -> tuple[tuple, Int[Array, " num"]]:
        last, cache = carry
        states, cache = module.advance(blocks, table, last, position, cache)
        tokens = draw(jax.random.fold_in(key, position), states, head, temperature, top_p, nucleus=nucleus).tokens
        return (tokens, cache), tokens

    start = jnp.full(num, NONE, jnp.int32), module.empty_cache(num, t)
    return jax.lax.scan(step, start, jnp.arange(t))[1].T


@functools.partial(jax.jit, static_argnames=("model", "num", "order", "nucleus"))
def fill_in(
    model: Model,
    params: Params,
    frozen: Params,
    key: Array,
    steps: Int[Array, ""] | int,
    temperature: Float[Array, ""] | float,
    top_p: Float[Array, ""] | float,
    *,
    num: int,
    order: str,
    nucleus: bool,
) -> Int[Array, "num t"]:
    """Masked diffusion in `steps` steps, one program for any number of them; more than t are no better than t."""
    module, t = model.merge(params, frozen), model.config.model.num_tokens

    def step(index: Int[Array, ""], ids: Int[Array, "num t"]) -> Int[Array, "num t"]:
        own, count = jax.random.fold_in(key, index), t * (index + 1) // steps - t * index // steps
        return commit(module, own, ids, count, temperature, top_p, order=order, nucleus=nucleus)

    return jax.lax.fori_loop(0, steps, step, jnp.full((num, t), NONE, jnp.int32))


def commit(
    module: TokenTransformer,
    key: Array,
    ids: Int[Array, "num t"],
    count: Int[Array, ""] | int,
    temperature: Float[Array, ""] | float,
    top_p: Float[Array, ""] | float,
    *,
    order: str,
    nucleus: bool,
) -> Int[Array, "num t"]:
    """One step of masked diffusion: `count` of the places that hold NONE get their token, the first ones by `order`."""
    states = module.states(ids)
    flat = states.reshape(ids.size, -1)
    drawn = draw(key, flat, module.token_decoder.head[...], temperature, top_p, nucleus=nucleus)
    if order == "confidence":
        score = drawn.log_probability
    elif order == "entropy":
        score = -drawn.entropy
    else:
        score = jax.random.uniform(jax.random.fold_in(key, ids.size), (ids.size,))
    masked = ids == NONE
    score = jnp.where(masked, score.reshape(ids.shape), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-score, axis=1), axis=1)
    return jnp.where(masked & (rank < count), drawn.tokens.reshape(ids.shape), ids)


class TokenProgram:
    """`num` windows of tokens from a baseline; what generate.Program is for an LDLM."""

    def __init__(
        self,
        model: Model,
        params: Params,
        frozen: Params,
        sampling: SamplingConfig,
        *,
        num: int,
        implementation: str = "auto",
    ):
        if implementation not in ("auto", "xla"):
            raise ConfigError(
                f"implementation={implementation} is for latents; model.kind={model.config.model.kind} generates with xla"
            )
        self.choice = Choice("xla", "a baseline has no other")
        arguments, options = (model, params, frozen), {"num": num, "nucleus": sampling.top_p < 1.0}
        if model.config.model.kind == "autoregressive":
            self._call = lambda key, temperature: write_in_order(
                *arguments, key, temperature, sampling.top_p, **options
            )
        else:
            steps = min(sampling.steps, model.config.model.num_tokens)
            self._call = lambda key, temperature: fill_in(
                *arguments, key, steps, temperature, sampling.top_p, order=sampling.order, **options
            )

    def __call__(self, key: Array, temperature: float = 1.0, guidance: float = 0.0) -> Int[Array, "num t"]:
        """Tokens that `key` draws; there is no guidance here, and it is not read."""
        return self._call(key, temperature)
