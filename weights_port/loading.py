"""The lower layers of a checkpoint as a running PyTorch model, loaded strictly.

transformers converts key names and fuses experts; whatever it reports as missing, unexpected or misshapen, and whatever is
not finite, is collected into one error here.  Tensors of upper layers, heads and other modalities are never read, nor is
the final norm when the layer that is read lies below it: in a large checkpoint it lies in the last of many files.

The model is built without memory (torch's meta device) and each tensor goes straight to its device and dtype: a bfloat16
checkpoint that stays on the CPU in bfloat16 is not copied at all but mapped from its file.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from weights_port.checkpoints import HEAD_KEYS, Checkpoint, EncoderError, bare_name, block_index
from weights_port.placement import Placement

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# Parts of a checkpoint that the hidden states of the text model do not depend on.
_OTHER_PARTS = ("visual.", "vision_", "mtp.", "audio_", "multi_modal_projector.", "embed_vision.", "embed_audio.")
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
"""What base models call the norm behind their last block."""
# Elements looked at together: sums and comparisons of a whole embedding would need several times its memory.
_CHUNK = 2**22


def needed_keys(keys: Iterable[str], num_layers: int, total_layers: int) -> list[str]:
    """The tensors that hidden_states[num_layers] of the text model depends on, out of all names in a checkpoint."""

    def needed(key: str) -> bool:
        bare = bare_name(key)
        if key in HEAD_KEYS or bare == "lm_head.bias" or any(f".{part}" in f".{bare}" for part in _OTHER_PARTS):
            return False
        if num_layers < total_layers and bare.rpartition(".")[0] in FINAL_NORMS:
            return False
        return block_index(bare) is None or block_index(bare) < num_layers

    return [key for key in keys if needed(key)]


def truncated(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """The config of the same model with fewer layers; per-layer lists are cut with it."""
    full, config = config.num_hidden_layers, copy.deepcopy(config)
    for key, value in vars(config).items():
        if isinstance(value, list) and len(value) == full and key != "architectures":
            setattr(config, key, value[:num_layers])
    config.num_hidden_layers = num_layers
    config.use_cache = False
    return config


def text_model_class(checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """transformers' base model for the text part of a checkpoint, or the remote code's."""
    from transformers import AutoModel

    if checkpoint.model_class is not None:
        return checkpoint.model_class
    if type(checkpoint.config) not in AutoModel._model_mapping:
        raise EncoderError(
            f"encoder {checkpoint.name!r}: transformers has no text model for {type(checkpoint.config).__name__}"
        )
    return AutoModel._model_mapping[type(checkpoint.config)]


def skeleton(checkpoint: Checkpoint, num_layers: int) -> PreTrainedModel:
    """The text model with its first layers, all shapes and no memory."""
    import torch

    config = truncated(checkpoint.config, num_layers)
    with quiet(), torch.device("meta"):
        return text_model_class(checkpoint)(config).eval()


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


def load_strict(
    checkpoint: Checkpoint, num_layers: int, placement: Placement, dtype: torch.dtype, weights: str = "auto"
) -> torch.nn.Module:
    """The base model with its first layers; transformers does the key conversions, nothing it reports is let pass."""
    total = checkpoint.config.num_hidden_layers
    wanted = needed_keys(checkpoint.tensors, num_layers, total)
    checkpoint.fetch(wanted)
    options = placement.options() | packing_options(checkpoint.name, weights)
    try:
        with quiet():
            model, report = text_model_class(checkpoint).from_pretrained(
                None,
                config=truncated(checkpoint.config, num_layers),
                state_dict={bare_name(key): checkpoint.tensors[key] for key in wanted},
                dtype=dtype,
                ignore_mismatched_sizes=True,  # so that all of them are reported together, below
                output_loading_info=True,
                **options,
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise EncoderError(f"encoder {checkpoint.name!r} cannot be loaded: {error}") from error
    except ImportError as error:
        raise EncoderError(f"encoder {checkpoint.name!r} needs a package that is not installed: {error}") from error
    if num_layers < total:
        _drop_final_norm(model, report)
    problems = [f"missing: {key}" for key in sorted(report["missing_keys"])]
    problems += [f"unexpected: {key}" for key in sorted(report["unexpected_keys"])]
    problems += [f"wrong shape: {key} is {tuple(a)}, not {tuple(b)}" for key, a, b in sorted(report["mismatched_keys"])]
    problems += [str(message) for message in report.get("error_msgs", [])]
    lost = {key for key, *_ in report["mismatched_keys"]} | set(report["missing_keys"])
    damaged = list(model.hf_quantizer.damaged) if weights != "auto" else []
    damaged += [key for key, value in weights_of(model) if key not in lost and not all_finite(value)]
    problems += [f"not finite: {key}" for key in sorted(set(damaged))]
    if problems:
        shown = "\n  ".join(problems[:40] + ([f"... and {len(problems) - 40} more"] if len(problems) > 40 else []))
        raise EncoderError(
            f"encoder {checkpoint.name!r} does not fit its own config ({len(problems)} problems); download it again, or "
            f"check that config.json belongs to these weights:\n  {shown}"
        )
    return model.requires_grad_(False).eval()


def packing_options(name: str, weights: str) -> dict[str, Any]:
    """from_pretrained's argument for packed weights; none for weights as they are."""
    if weights == "auto":
        return {}
    try:
        from weights_port.quantized import PackedConfig
    except ImportError as error:
        raise EncoderError(
            f"encoder {name!r}: encoder_weights={weights} needs the package bitsandbytes ({error}); install it with "
            "`uv sync --extra packed` or `pip install bitsandbytes`, or use encoder_weights=auto"
        ) from error
    return {"quantization_config": PackedConfig(weights)}


def _drop_final_norm(model: torch.nn.Module, report: dict[str, Any]) -> None:
    """Take the norm out that a model cut below it never runs and that was not read."""
    import torch

    for name in FINAL_NORMS:
        if hasattr(model, name):
            setattr(model, name, torch.nn.Identity())
    report["missing_keys"] = {key for key in report["missing_keys"] if key.rpartition(".")[0] not in FINAL_NORMS}


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


def weights_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every parameter, also of those that accelerate keeps on the CPU until they are used."""
    import torch
    from accelerate.utils import align_module_device

    for prefix, module in model.named_modules():
        offloaded = any(value.is_meta for value in module.parameters(recurse=False))
        device = align_module_device(module, torch.device("cpu")) if offloaded else contextlib.nullcontext()
        with device:
            for name, value in module.named_parameters(prefix, recurse=False):
                yield name, value.detach()


def all_finite(value: torch.Tensor) -> bool:
    return not value.is_floating_point() or all(bool(part.isfinite().all()) for part in value.reshape(-1).split(_CHUNK))


def fingerprint(model: torch.nn.Module, num_layers: int | None = None) -> str:
    """Digest of the weights of the first layers: names, shapes, exact sum over all bits, and a sample that sees order."""
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    cut = num_layers is not None and num_layers < model.config.num_hidden_layers
    entries: dict[str, bytes] = {}
    for name, value in weights_of(model):
        if cut and ((block_index(name) or 0) >= num_layers or name.rpartition(".")[0] in FINAL_NORMS):
            continue
        bits = value.reshape(-1).view(words[value.element_size()])
        sample = bits[:: max(1, bits.numel() // 4096)]
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_CHUNK))
        entries[name] = f"{name} {tuple(value.shape)} {total} ".encode() + sample.cpu().numpy().tobytes()
    return hashlib.sha256(b"".join(entries[name] for name in sorted(entries))).hexdigest()


def missing_kernels(config: PretrainedConfig, num_layers: int) -> str | None:
    """One line on what would make the linear-attention layers faster on a GPU; None where nothing is missing.

    transformers (5.17 and later) uses these packages when they can be imported and runs plain PyTorch otherwise.
    """
    linear = sum(kind == "linear_attention" for kind in (getattr(config, "layer_types", None) or [])[:num_layers])
    packages = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
    absent = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    if not linear or not absent:
        return None
    return (
        f"encoder: {' and '.join(absent)} not installed, so {linear} linear-attention layers run in plain PyTorch, "
        f"which is right but slower (pip install {' '.join(absent)})"
    )
