"""The frozen model's own way from its last block to logits, read from the checkpoint; the model is not loaded.

    logits = rmsnorm(h, eps) * gain @ weight.T

The head is the checkpoint's lm_head or, where the two are tied, its embedding.  Rows are read a few thousand at a time: a
head of 248,320 x 5,120 is 2.5 GB in bfloat16, and a float32 copy of it would be twice that.  Which gain a norm multiplies
with is asked of transformers' own module, because Qwen3.5 and Gemma store gain - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float

from weights_port.checkpoints import HEAD_KEYS, Checkpoint, EncoderError, bare_name
from weights_port.loading import FINAL_NORMS, skeleton

if TYPE_CHECKING:
    import torch

ROWS = 8192
"""Read at a time: 168 MB in float32 at width 5120."""


def head_key(checkpoint: Checkpoint) -> str:
    """Name of the tensor that is the output head."""
    key = next((key for key in HEAD_KEYS if key in checkpoint.tensors), None)
    if checkpoint.config.tie_word_embeddings:
        model = skeleton(checkpoint, 1)
        embedding = model.get_input_embeddings().weight
        own = next(name for name, parameter in model.named_parameters() if parameter is embedding)
        key = next((key for key in checkpoint.tensors if bare_name(key) == own), None)
    if key is None:
        raise EncoderError(f"encoder {checkpoint.name!r} has no output head under a known name; use head=trained")
    return key


def head_rows(checkpoint: Checkpoint, rows: int | None = None) -> Iterator[Float[torch.Tensor, "r d"]]:
    """The output head (v, d), a few rows after another, as they are stored."""
    key = head_key(checkpoint)
    checkpoint.fetch([key])
    weight = checkpoint.tensors[key][...]  # of a safetensors file: mapped, not copied
    expected = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
    if tuple(weight.shape) != expected:
        raise EncoderError(
            f"encoder {checkpoint.name!r}: its head {key} is {tuple(weight.shape)}, not {expected}; use head=trained"
        )
    for part in weight.split(rows or ROWS):
        if not bool(part.isfinite().all()):
            raise EncoderError(f"encoder {checkpoint.name!r}: its head {key} is not finite; download it again")
        yield part


def folded_head(checkpoint: Checkpoint) -> BFloat16[np.ndarray, "d v"]:
    """The head with the norm's gain multiplied in: logits = rmsnorm(h) @ folded_head."""
    import torch

    gain, _ = norm_gain(checkpoint)
    folded = torch.empty(checkpoint.config.hidden_size, checkpoint.config.vocab_size, dtype=torch.bfloat16)
    at = 0
    for part in head_rows(checkpoint):
        folded[:, at : at + len(part)] = (part.float() * gain).T
        at += len(part)
    return folded.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def head_matrix(checkpoint: Checkpoint) -> Float[np.ndarray, "v d"]:
    """The head without the gain, in float32: for a scorer, whose likelihoods need the digits."""
    matrix, at = np.empty((checkpoint.config.vocab_size, checkpoint.config.hidden_size), np.float32), 0
    for part in head_rows(checkpoint):
        matrix[at : at + len(part)] = part.float().numpy()
        at += len(part)
    return matrix


def head_bias(checkpoint: Checkpoint) -> Float[np.ndarray, " v"] | None:
    """Bias of the output head, which few models have."""
    if "lm_head.bias" not in checkpoint.tensors:
        return None
    checkpoint.fetch(["lm_head.bias"])
    return checkpoint.tensors["lm_head.bias"][...].float().numpy()


def norm_gain(checkpoint: Checkpoint) -> tuple[Float[torch.Tensor, " d"], float]:
    """Gain and eps of the final RMSNorm, found by what transformers' module does to a known vector."""
    import torch

    model = skeleton(checkpoint, 1)
    name = next((name for name in FINAL_NORMS if hasattr(model, name)), None)
    norm = None if name is None else getattr(model, name)
    if norm is None or isinstance(norm, torch.nn.LayerNorm):
        raise EncoderError(
            f"head=encoder needs a model with a final RMSNorm, and {checkpoint.name!r} has none; use head=trained"
        )
    norm = norm.to_empty(device="cpu").float()
    width = checkpoint.config.hidden_size
    for own, parameter in norm.named_parameters():
        key = next((key for key in checkpoint.tensors if bare_name(key) == f"{name}.{own}"), None)
        if key is None:
            raise EncoderError(f"encoder {checkpoint.name!r} lacks {name}.{own}, its final norm; download it again")
        checkpoint.fetch([key])
        stored = checkpoint.tensors[key][...].float()
        if stored.shape != parameter.shape or not bool(stored.isfinite().all()):
            raise EncoderError(
                f"encoder {checkpoint.name!r}: its final norm {key} is not {tuple(parameter.shape)} finite numbers; download "
                "it again"
            )
        parameter.data = stored
    eps = next((float(getattr(norm, n)) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), 0.0)
    with torch.no_grad():
        gain = norm(torch.ones(width)) * (1.0 + eps) ** 0.5
        probe = torch.linspace(-1.0, 2.0, width)
        expected = gain * probe * (probe.square().mean() + eps).rsqrt()
        if not torch.allclose(norm(probe), expected, atol=1e-4, rtol=1e-4):
            raise EncoderError(f"head=encoder: the final norm of {checkpoint.name!r} is no RMSNorm; use head=trained")
    return gain, eps
