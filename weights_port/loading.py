"""The lower layers of a checkpoint as a running PyTorch model, loaded strictly.

transformers converts key names and fuses experts; whatever it reports as missing, unexpected or misshapen, and whatever is
not finite, is collected into one error here.  Tensors of upper layers, heads and other modalities are never read.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from weights_port.checkpoints import HEAD_KEYS, Checkpoint, EncoderError, bare_name, block_index

if TYPE_CHECKING:
    import torch

# Parts of a checkpoint that the hidden states of the text model do not depend on.
_OTHER_PARTS = ("visual.", "vision_", "mtp.", "audio_", "multi_modal_projector.", "embed_vision.", "embed_audio.")


def _truncated(config: Any, num_layers: int) -> Any:
    """The config of the same model with fewer layers; per-layer lists are cut with it."""
    full, config = config.num_hidden_layers, copy.deepcopy(config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == full and key != "architectures":
            setattr(config, key, value[:num_layers])
    config.num_hidden_layers = num_layers
    config.use_cache = False
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No loading bars and load reports of transformers: what matters in them is raised as an error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_strict(checkpoint: Checkpoint, num_layers: int, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The base model with its first layers; transformers does the key conversions, nothing it reports is let pass."""
    import torch
    from transformers import AutoModel

    wanted: dict[str, Any] = {}
    for key, tensor in checkpoint.tensors.items():
        bare = bare_name(key)
        other = key in HEAD_KEYS or bare == "lm_head.bias" or any(f".{part}" in f".{bare}" for part in _OTHER_PARTS)
        if not other and (block_index(bare) is None or block_index(bare) < num_layers):
            wanted[key] = tensor
    checkpoint.fetch(list(wanted))
    config = _truncated(checkpoint.config, num_layers)
    model_class = checkpoint.model_class
    if model_class is None:
        if type(config) not in AutoModel._model_mapping:
            raise EncoderError(
                f"encoder {checkpoint.name!r}: transformers has no text model for {type(config).__name__}"
            )
        model_class = AutoModel._model_mapping[type(config)]
    try:
        with quiet():
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict={bare_name(key): tensor for key, tensor in wanted.items()},
                dtype=dtype,
                device_map={"": device} if device.type != "cpu" else None,
                ignore_mismatched_sizes=True,  # so that all of them are reported together, below
                output_loading_info=True,
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise EncoderError(f"encoder {checkpoint.name!r} cannot be loaded: {error}") from error
    except ImportError as error:
        raise EncoderError(f"encoder {checkpoint.name!r} needs a package that is not installed: {error}") from error
    problems = [f"missing: {key}" for key in sorted(report["missing_keys"])]
    problems += [f"unexpected: {key}" for key in sorted(report["unexpected_keys"])]
    problems += [f"wrong shape: {key} is {tuple(a)}, not {tuple(b)}" for key, a, b in sorted(report["mismatched_keys"])]
    problems += [str(message) for message in report.get("error_msgs", [])]
    problems += [
        f"not finite: {key}" for key, value in model.named_parameters() if not bool(torch.isfinite(value).all())
    ]
    if problems:
        shown = "\n  ".join(problems[:40] + ([f"... and {len(problems) - 40} more"] if len(problems) > 40 else []))
        raise EncoderError(
            f"encoder {checkpoint.name!r} does not fit its own config ({len(problems)} problems); download it again, or "
            f"check that config.json belongs to these weights:\n  {shown}"
        )
    return model.requires_grad_(False).eval()


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    import torch

    lists = [
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == model.config.num_hidden_layers
    ]
    if not lists:
        raise EncoderError(
            f"{type(model).__name__} keeps its layers in no list that can be cut; this architecture is not supported"
        )
    return lists[0]


def norm_gain(name: str, model: torch.nn.Module) -> tuple[Float[np.ndarray, " d"], float]:
    """Gain and eps of the final RMSNorm, found by what it does to a known vector, whatever way it stores its gain."""
    import torch

    norm = next(
        (getattr(model, n) for n in ("norm", "final_layernorm", "final_layer_norm", "ln_f") if hasattr(model, n)), None
    )
    eps = next((float(getattr(norm, n)) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), 0.0)
    if norm is None or isinstance(norm, torch.nn.LayerNorm):
        raise EncoderError(f"head=encoder needs a model with a final RMSNorm, and {name!r} has none; use head=trained")
    norm = copy.deepcopy(norm).float().cpu()
    ones = torch.ones(model.config.hidden_size)
    gain = norm(ones) * (1.0 + eps) ** 0.5
    probe = torch.linspace(-1.0, 2.0, ones.numel())
    if not torch.allclose(norm(probe), gain * probe * (probe.square().mean() + eps).rsqrt(), atol=1e-4, rtol=1e-4):
        raise EncoderError(f"head=encoder: the final norm of {name!r} is no RMSNorm; use head=trained")
    return gain.numpy(), eps


def fingerprint(model: torch.nn.Module, num_layers: int | None = None) -> str:
    """Digest of the weights of the first layers: names, shapes, exact sum over all bits, and a sample that sees order."""
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(model.named_parameters(), key=lambda item: item[0]):
        if num_layers is not None and (block_index(name) or 0) >= num_layers:
            continue
        bits = value.detach().contiguous().view(-1).view(torch.int16 if value.element_size() == 2 else torch.int32)
        sample = bits[:: max(1, bits.numel() // 4096)]
        digest.update(f"{name} {tuple(value.shape)} {int(bits.sum(dtype=torch.int64))} ".encode())
        digest.update(sample.cpu().numpy().tobytes())
    return digest.hexdigest()
