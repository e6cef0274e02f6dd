"""How large the frozen language models of our presets are, without loading or importing any of them.

Counts of weights by block kind, of the text model alone: no vision tower, no multi-token prediction, no head.
tests/weights_port/test_encoder_size.py holds them against transformers' own modules of the same shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jdllm.config import Config, ConfigError

BYTES_A_WEIGHT = {"auto": 2.0, "int8": 1.0 + 4 / 64, "nf4": 0.5 + 4 / 64}
"""In bfloat16, or packed with one float32 scale for 64 weights (weights_port/quantized.py)."""


@dataclasses.dataclass(frozen=True)
class EncoderSize:
    """Weights of a language model of equal blocks, some of which are full attention."""

    layers: int
    embedding: int
    block: int
    """Weights of a block; of Qwen3.6, of one with linear attention."""
    full_block: int
    """Weights of a block with full attention, which is every `period`-th."""
    period: int = 4

    def weights(self, layer: int) -> tuple[int, int]:
        """Weights of the embedding, and of the blocks under hidden_states[layer]; ConfigError when there is no such layer."""
        count = layer if layer >= 0 else self.layers + 1 + layer
        if not 0 <= count <= self.layers:
            raise ConfigError(
                f"feed.layer={layer} does not exist: the encoder has {self.layers} layers, so use 0 to {self.layers} or count from the end"
            )
        count, full = max(count, 1), max(count, 1) // self.period
        return self.embedding, (count - full) * self.block + full * self.full_block


ENCODERS = {
    "Qwen/Qwen3.6-27B": EncoderSize(64, 1_271_398_400, 383_273_184, 372_255_232),
    "Qwen/Qwen3.6-35B-A3B": EncoderSize(40, 508_559_360, 842_700_992, 836_246_016),
    "openai-community/gpt2": EncoderSize(12, 39_383_808, 7_087_872, 7_087_872),
    "smollm2": EncoderSize(30, 28_311_552, 3_540_096, 3_540_096),
    "tiny-qwen3_5": EncoderSize(4, 16_640, 42_136, 41_120),
}


def encoder_bytes(config: Config, device: Literal["gpu", "cpu"] = "gpu") -> int | None:
    """Bytes of the layers of the frozen model that are loaded; None for a model that is not in the table.

    What packing leaves as it is (norms, routers: under 1% of a block) is counted as packed.
    """
    feed = config.feed
    size = ENCODERS.get(config.encoder)
    if size is None:
        return None
    embedding, blocks = size.weights(feed.layer)
    plain = {"float32": 4, "bfloat16": 2, "auto": 2 if device == "gpu" else 4}[feed.encoder_dtype]
    packed = plain if feed.encoder_weights == "auto" else BYTES_A_WEIGHT[feed.encoder_weights]
    return int(embedding * plain + blocks * packed)
