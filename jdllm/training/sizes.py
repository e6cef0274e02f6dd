"""LDLM and baselines of one config side by side: trained weights, and arithmetic for each token trained on and written.

Depths of the baselines follow from the LDLM's weights (model/ldlm.py); that their arithmetic is not the same cannot be
helped, so it is said.  The frozen encoder is counted nowhere: its hidden states come from the disk, and writing needs none.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from jdllm.config import Config
from jdllm.model.ldlm import Model, trunk_depth
from jdllm.training.throughput import flops_per_window, forward_flops

KINDS = ("ldlm", "autoregressive", "masked")


@dataclasses.dataclass(frozen=True)
class Size:
    """One model."""

    kind: str
    blocks: int
    """Of all stacks together."""
    weights: int
    """Trained."""
    training_flops: float
    """Forward and backward, for each token of a window."""
    steps: int
    """Of the generation below: one a token for an autoregressive model."""
    generation_flops: float
    """For each token written in so many steps."""


def sizes(config: Config, steps: int | None = None) -> list[Size]:
    """The three kinds at this config's shapes; `steps` of generation are by default sampling.steps.

    A trunk_depth counts for the baselines alone.
    """
    steps = steps or config.sampling.steps
    found = []
    for kind in KINDS:
        depth = None if kind == "ldlm" else config.model.trunk_depth
        model = Model(config.replace(model__kind=kind, model__trunk_depth=depth))
        m, forward = model.config.model, forward_flops(model)
        if kind == "ldlm":
            blocks = m.encoder_depth + m.decoder_depth + m.token_decoder_depth + m.denoiser_depth
            taken, once = steps, forward["decoder"] + forward["token_decoder"]
            writing = taken * forward["denoiser"] + once
        else:
            blocks = trunk_depth(m)
            taken = m.num_tokens if kind == "autoregressive" else min(steps, m.num_tokens)
            # With its cache an autoregressive model computes each position once, as in training.
            writing = forward["trunk"] * (1 if kind == "autoregressive" else taken)
        weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.param_shapes))
        per_token = flops_per_window(model) / m.num_tokens
        found.append(Size(kind, blocks, weights, per_token, taken, writing / m.num_tokens))
    return found


def table(config: Config, steps: int | None = None) -> str:
    """The same as Markdown."""
    lines = [
        "| model | blocks | trained weights (M) | training (MFLOPs/token) | written in | writing (MFLOPs/token) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for size in sizes(config, steps):
        lines.append(
            f"| {size.kind} | {size.blocks} | {size.weights / 1e6:,.2f} | {size.training_flops / 1e6:,.1f} "
            f"| {size.steps} steps | {size.generation_flops / 1e6:,.1f} |"
        )
    return "\n".join(lines) + "\n"
