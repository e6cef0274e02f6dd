"""How much arithmetic a step is, how much of the card it uses (model FLOPs utilisation, arXiv 2204.02311, app. B), and how
long the card waits for data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jdllm.config import Config
from jdllm.model.ldlm import Model, trunk_depth

PEAK_BF16_FLOPS = {
    "H200": 989e12,  # dense, with float32 accumulation, from the vendors' data sheets
    "H100": 989e12,
    "A100": 312e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
}
"""Peak rate by a part of the device's name; devices that are not here get no MFU."""


def flops_per_window(model: Model, *, denoiser_alone: bool = False) -> float:
    """Forward and backward FLOPs of one window: 6 per weight and position, attention scores, self-conditioning's extra pass.

    Recomputation is not counted.  With `denoiser_alone` the encoder runs forward only and the decoders count for nothing: the
    second of two stages.
    """
    config: Config = model.config
    forward = forward_flops(model)
    if config.model.kind != "ldlm":
        return 3.0 * forward["trunk"]
    for part in ("decoder", "token_decoder"):
        forward[part] *= config.objective.decoder_share
    extra = config.objective.self_conditioning * forward["denoiser"]
    if denoiser_alone:
        return forward["encoder"] + 3.0 * forward["denoiser"] + extra
    return 3.0 * sum(forward.values()) + extra


def forward_flops(model: Model) -> dict[str, float]:
    """FLOPs of one forward pass over one window, by module; a causal model computes only the scores that it looks at."""
    m = model.config.model
    weights = {
        part: sum(
            x.size
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
            if path and path[-1].key in ("kernel", "head")
        )
        for part, tree in model.param_shapes.items()
    }
    t, k, d = m.num_tokens, m.num_latents, m.latent_dim
    frozen_head = m.hidden_dim * m.vocab_size if m.head == "encoder" else 0
    if m.kind != "ldlm":
        seen = (t + 1) / 2 if m.kind == "autoregressive" else t
        return {"trunk": 2.0 * (weights["token_decoder"] + frozen_head) * t + 4.0 * trunk_depth(m) * t * seen * d}
    return {
        "encoder": 2 * weights["encoder"] * max(t, k) + 4 * m.encoder_depth * k * (k + t) * d,
        "decoder": 2 * weights["decoder"] * max(t, k) + 4 * m.decoder_depth * t * (k + t) * d,
        "token_decoder": 2 * (weights["token_decoder"] + frozen_head) * t + 4 * m.token_decoder_depth * t * t * d,
        "denoiser": 2 * weights["denoiser"] * k + 4 * m.denoiser_depth * k * k * d,
    }


def peak_flops() -> float | None:
    """bf16 peak of all devices together; None when the kind is not known."""
    kind = jax.devices()[0].device_kind
    for name, rate in PEAK_BF16_FLOPS.items():
        if name in kind:
            return rate * jax.device_count()
    return None


class FeedClock:
    """Seconds in which the devices stood idle because the next batch was not there.

    The host runs ahead of the devices, so waiting for the loader costs nothing while a step is still being computed.  What
    counts is the time from the end of that step, or from asking if that was later, until the batch comes.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._end: Future[float] | None = None
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="feed-clock")

    def take(self, loader: Iterator[Any]) -> Any:
        """The next batch."""
        asked = time.perf_counter()
        batch = next(loader)
        came = time.perf_counter()
        if self._end is None:
            self.waited += came - asked
        elif self._end.done():
            self.waited += max(0.0, came - max(asked, self._end.result()))
        return batch

    def started(self, outputs: Any) -> None:
        """A step is under way that will make `outputs`."""
        self._end = self._watcher.submit(_end_of, outputs)

    def close(self) -> None:
        """Let the watching thread go."""
        self._watcher.shutdown(wait=False)


def _end_of(outputs: Any) -> float:
    jax.block_until_ready(outputs)
    return time.perf_counter()
