"""How far packed weights move the hidden states: each layer's relative error against the same model in bfloat16.

Errors are over all valid tokens: |packed - reference| / |reference| in the Euclidean norm; beside them stands the error of
bfloat16 itself against float32, which says what is lost to arithmetic anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from weights_port.encoder import HiddenStateEncoder, load_encoder
from weights_port.loading import blocks, quiet

if TYPE_CHECKING:
    import torch

PACKED = ("int8", "nf4")


@dataclasses.dataclass(frozen=True)
class PackingError:
    """Relative errors at each layer from 1 up to the one that the encoder reads."""

    name: str
    arithmetic: list[float]
    """bfloat16 against float32."""
    packed: dict[str, list[float]]
    """By kind of weights, against bfloat16."""

    def table(self) -> str:
        """Markdown."""
        kinds = list(self.packed)
        lines = [
            f"| {self.name}, layer | bfloat16 to float32 | {' | '.join(f'{kind} to bfloat16' for kind in kinds)} |"
        ]
        lines.append("|---:" * (len(kinds) + 2) + "|")
        for at, own in enumerate(self.arithmetic):
            errors = " | ".join(f"{self.packed[kind][at]:.2e}" for kind in kinds)
            lines.append(f"| {at + 1} | {own:.2e} | {errors} |")
        return "\n".join(lines)


def packing_error(
    name: str | Path,
    ids: Int[np.ndarray, "b t"],
    lengths: Int[np.ndarray, " b"],
    *,
    layer: int = -3,
    device: str = "auto",
    kinds: Sequence[str] = PACKED,
) -> PackingError:
    """Run the model once in float32, once in bfloat16, and once for each kind of packed weights; one at a time in memory."""

    def states(dtype: str, weights: str) -> list[torch.Tensor]:
        encoder = load_encoder(str(name), layer=layer, device=device, dtype=dtype, weights=weights)
        return states_by_layer(encoder, ids, lengths)

    exact, reference = states("float32", "auto"), states("bfloat16", "auto")
    packed = {kind: relative_errors(states("bfloat16", kind), reference) for kind in kinds}
    return PackingError(Path(name).name, relative_errors(reference, exact), packed)


def states_by_layer(
    encoder: HiddenStateEncoder, ids: Int[np.ndarray, "b t"], lengths: Int[np.ndarray, " b"]
) -> list[Float[torch.Tensor, "n d"]]:
    """hidden_states[1], [2], ... up to the encoder's own layer at all valid tokens, in float32 on the CPU."""
    import torch

    valid = torch.from_numpy(np.arange(ids.shape[1])[None] < lengths[:, None])
    caught: list[torch.Tensor] = []

    def catch(module: torch.nn.Module, args: tuple, output: torch.Tensor | tuple) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        caught.append(hidden.float().cpu()[valid])

    hooks = [block.register_forward_hook(catch) for block in blocks(encoder._model)]
    try:
        with torch.inference_mode(), quiet():
            tokens = torch.from_numpy(ids.astype(np.int64)).to(encoder.device)
            encoder._model(input_ids=tokens, attention_mask=valid.long().to(encoder.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def relative_errors(states: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(states, reference, strict=True)]
