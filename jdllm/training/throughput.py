"""How much arithmetic a step is, and how much of the card it uses (model FLOPs utilisation, arXiv 2204.02311, app. B)."""

from __future__ import annotations

import jax

from jdllm.config import Config
from jdllm.model.ldlm import Model

PEAK_BF16_FLOPS = {
    "H200": 989e12,  # dense, with float32 accumulation, from the vendors' data sheets
    "H100": 989e12,
    "A100": 312e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
}
"""Peak rate by a part of the device's name; devices that are not here get no MFU."""


def flops_per_window(model: Model) -> float:
    """Forward and backward FLOPs of one window: 6 per weight and position, attention scores, self-conditioning's extra pass.

    Recomputation is not counted.
    """
    config: Config = model.config
    m = config.model
    weights = {
        part: sum(x.size for path, x in jax.tree_util.tree_leaves_with_path(tree) if path[-1].key in ("kernel", "head"))
        for part, tree in model.param_shapes.items()
    }
    t, k, d = m.num_tokens, m.num_latents, m.latent_dim
    forward = {
        "encoder": 2 * weights["encoder"] * max(t, k) + 4 * m.encoder_depth * k * (k + t) * d,
        "decoder": 2 * weights["decoder"] * max(t, k) + 4 * m.decoder_depth * t * (k + t) * d,
        "token_decoder": 2 * weights["token_decoder"] * t + 4 * m.token_decoder_depth * t * t * d,
        "denoiser": 2 * weights["denoiser"] * k + 4 * m.denoiser_depth * k * k * d,
    }
    if m.head == "encoder":
        forward["token_decoder"] += 2 * m.hidden_dim * m.vocab_size * t
    extra = config.objective.self_conditioning * forward["denoiser"]
    return 3.0 * sum(forward.values()) + extra


def peak_flops() -> float | None:
    """bf16 peak of all devices together; None when the kind is not known."""
    kind = jax.devices()[0].device_kind
    for name, rate in PEAK_BF16_FLOPS.items():
        if name in kind:
            return rate * jax.device_count()
    return None
