"""Everything a run has to remember between two steps, as one pytree, and the optimiser that changes it."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jdllm.config import Config, OptimizerConfig
from jdllm.diffusion.timesteps import TimestepState, init_timesteps
from jdllm.model.ldlm import Model, Params
from jdllm.model.standardize import LatentStats, init_stats


@flax.struct.dataclass
class TrainState:
    """Float32 masters and their companions.  Random keys are not in it: they are fold_in(key(seed), step)."""

    step: Int[Array, ""]
    params: Params
    ema_params: Params
    opt_state: Any
    latent_stats: LatentStats
    """Running statistics of the latent encoder's output, with the decay of `ema_params`, which they belong to."""
    timesteps: TimestepState
    gamma_progress: Float[Array, ""]
    """Steps by which gamma has risen so far."""
    gate_open: Bool[Array, ""]
    """Whether gamma rises or falls; set by the held-out probe."""
    hidden_mean: Float[Array, " dh"]
    hidden_std: Float[Array, " dh"]


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], progress: Float[Array, ""]) -> Float[Array, ""]:
    """Linear warm-up in steps, constant, then a linear fall to a tenth over the last `decay_fraction` of the run.

    `progress` in [0, 1] is how much of the run is over.  It is an argument because a run may end by the clock.
    """
    warm = jnp.minimum(1.0, (step + 1.0) / max(config.warmup_steps, 1))
    left = (1.0 - progress) / max(config.decay_fraction, 1e-9)
    return config.learning_rate * warm * jnp.clip(0.1 + 0.9 * left, 0.1, 1.0)


def is_matrix(params: Params) -> Params:
    """True for the weights of linear layers, which decay; false for gains, biases, tables, positions."""
    return jax.tree_util.tree_map_with_path(lambda path, x: path[-1].key in ("kernel", "head"), params)


def _muon_dimensions(params: Params) -> Params:
    """Muon orthogonalises kernels (stacked blocks one by one); head, positions and vectors stay with AdamW."""

    def dimensions(path: tuple, x: Array) -> Any:
        if path[-1].key != "kernel":
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=x.ndim - 2, output_axis=x.ndim - 1)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _factored_adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW with Adafactor's second moment (arXiv 1804.04235): means of squares by row and by column of a matrix.

    Stacked blocks are factored one by one; vectors keep one number a weight, and there the second moment is AdamW's,
    bias correction included.  As in Adafactor and its use with momentum (arXiv 2106.04560) the gradient is scaled before
    it is averaged, and one update's root mean square is at most 1, since a rank-one estimate can be far too small.
    """

    def decay(step: Array, beta2: float) -> Array:
        return beta2 * (1.0 - beta2**step) / (1.0 - beta2 ** (step + 1.0))

    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=config.beta2, decay_rate_fn=decay),
        optax.clip_by_block_rms(1.0),
        optax.ema(config.beta1, accumulator_dtype=config.first_moment),
        optax.add_decayed_weights(config.weight_decay, is_matrix),
        optax.scale(-1.0),
    )


def _products_in_bfloat16(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule with its matrix products in bfloat16, added up in float32, as Muon's author runs them.

    Muon's products for `books` are 1.6 TFLOP a step; a CPU computes them in float32 all the same.
    """

    def update(*arguments: Any) -> Any:
        with jax.default_matmul_precision("BF16_BF16_F32"):
            return rule.update(*arguments)

    return optax.GradientTransformation(rule.init, update)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW or Muon, at learning rate 1: the step multiplies the update by `learning_rate`.

    Muon's updates are scaled to AdamW's size (arXiv 2502.16982).  There is no 8-bit state: neither optax nor another
    library that is kept has one for JAX.
    """
    if config.name == "muon":
        muon = optax.contrib.muon(
            1.0, consistent_rms=0.2, weight_decay=config.weight_decay, weight_decay_mask=is_matrix,
            adam_b1=config.beta1, adam_b2=config.beta2, adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_muon_dimensions, mu_dtype=config.first_moment,
        )  # fmt: skip
        rule = _products_in_bfloat16(muon)
    elif config.second_moment == "factored":
        rule = _factored_adamw(config)
    else:
        rule = optax.adamw(
            1.0, b1=config.beta1, b2=config.beta2, mu_dtype=config.first_moment,
            weight_decay=config.weight_decay, mask=is_matrix,
        )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    hidden_mean: Float[Array, " dh"],
    hidden_std: Float[Array, " dh"],
) -> TrainState:
    """State before the first step, from the config's seed."""
    config: Config = model.config
    params = model.init(jax.random.fold_in(jax.random.key(config.seed), 0))
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        ema_params=params,
        opt_state=optimizer.init(params),
        latent_stats=init_stats(config.model),
        timesteps=init_timesteps(config.diffusion),
        gamma_progress=jnp.zeros((), jnp.float32),
        gate_open=jnp.asarray(config.objective.gamma_gate <= 0.0),
        hidden_mean=jnp.asarray(hidden_mean, jnp.float32),
        hidden_std=jnp.asarray(hidden_std, jnp.float32),
    )
    return jax.tree.map(jnp.copy, state)  # every leaf its own buffer, since the step gives them all away
