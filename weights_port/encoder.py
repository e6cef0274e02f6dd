"""The frozen language model: text tokens in, the hidden states of one layer out.

Any causal LM that transformers knows, Qwen3.6 (`qwen3_5`, `qwen3_5_moe`) first.  Only the layers under the one that is
read are built, loaded and run.  The state is taken from the block itself by a hook, because the model's own last entry of
`hidden_states` has passed the final norm, and a shortened model would put that norm where the full one has none.
Loading is strict (weights_port/loading.py); the output head is read apart from the model (weights_port/head.py).
Left out: generation.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Int

from weights_port.checkpoints import Checkpoint, EncoderError, open_checkpoint
from weights_port.loading import blocks, fingerprint, load_strict, missing_kernels, quiet
from weights_port.placement import Placement, resolve_placement

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

WEIGHTS = ("auto", "int8", "nf4")


@dataclasses.dataclass(frozen=True)
class EncoderInfo:
    """What the rest of jdllm needs to know of an encoder without holding it."""

    name: str
    hidden_dim: int
    vocab_size: int
    """Rows of the embedding; the tokenizer may use fewer."""
    eos_id: int
    max_length: int
    layer: int
    """Index into transformers' hidden_states: 0 is the embedding, num_layers the normed output."""
    num_layers: int
    identity: dict[str, str]
    """Everything that changes hidden states; part of a cache's key."""


class HiddenStateEncoder:
    """A frozen causal LM cut off above one layer."""

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint, info: EncoderInfo, device: torch.device):
        self.info = info
        self.tokenizer_json = checkpoint.tokenizer_json
        self.device = device
        self.checkpoint = checkpoint
        self._model = model
        self._running = threading.Lock()  # the hook of `_run` would also catch what another thread computes

    def encode(self, ids: Int[np.ndarray, "b t"], lengths: Int[np.ndarray, " b"]) -> BFloat16[np.ndarray, "b t d"]:
        """Hidden states on the host, zero at positions >= length."""
        import torch

        hidden = self.encode_torch(ids, lengths).cpu()
        return hidden.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    def encode_torch(self, ids: Int[np.ndarray, "b t"], lengths: Int[np.ndarray, " b"]) -> torch.Tensor:
        """The same, (b, t, d) in bfloat16 on the encoder's device; does not wait for the device."""
        import torch

        ids, lengths = self._checked(ids, lengths)
        hidden = self.states(ids, lengths).to(torch.bfloat16)
        missing = ids.shape[1] - hidden.shape[1]
        return torch.nn.functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def states(self, ids: Int[np.ndarray, "b t"], lengths: Int[np.ndarray, " b"]) -> torch.Tensor:
        """(b, longest, d) in the encoder's own dtype, cut to the longest text of the batch; zero at padding."""
        import torch

        longest = max(int(lengths.max(initial=1)), 1)
        tokens = torch.from_numpy(ids[:, :longest].astype(np.int64)).to(self.device, non_blocking=True)
        if (lengths == longest).all():
            mask = None
        else:
            valid = np.arange(longest)[None, :] < lengths[:, None]
            mask = torch.from_numpy(valid).to(self.device, non_blocking=True)
        # transformers would advise kernels for the linear-attention layers; missing_kernels has, once.
        with self._running, torch.inference_mode(), quiet():
            hidden = _run(self._model, self.info, tokens, None if mask is None else mask.long()).to(self.device)
            return hidden if mask is None else hidden.masked_fill(~mask[:, :, None], 0)

    @property
    def config(self) -> PretrainedConfig:
        """The full text model's config."""
        return self.checkpoint.config

    def weights_digest(self, num_layers: int) -> str:
        """What info.identity["weights"] of an encoder cut after num_layers would be, in the same dtype."""
        return fingerprint(self._model, num_layers)

    def _checked(self, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = np.asarray(ids), np.asarray(lengths)
        if ids.ndim != 2 or lengths.shape != ids.shape[:1]:
            raise EncoderError(f"ids must be (b, t) and lengths (b,); got {ids.shape} and {lengths.shape}")
        check_length(self.info, ids.shape[1])
        if ids.size and (ids.min() < 0 or ids.max() >= self.info.vocab_size):
            raise EncoderError(
                f"token ids go from {ids.min()} to {ids.max()}, but encoder {self.info.name!r} knows 0 to "
                f"{self.info.vocab_size - 1}; were they made with its own tokenizer?"
            )
        if lengths.size and (lengths.min() < 0 or lengths.max() > ids.shape[1]):
            raise EncoderError(f"lengths must lie in 0..{ids.shape[1]}; got {lengths.min()} to {lengths.max()}")
        return ids, lengths


def check_length(info: EncoderInfo, num_tokens: int) -> None:
    """Raise if a window is longer than the encoder can read."""
    if num_tokens > info.max_length:
        raise EncoderError(
            f"num_tokens={num_tokens} is over the {info.max_length} tokens that encoder {info.name!r} can read; "
            f"use num_tokens={info.max_length} or less"
        )


def load_encoder(
    name: str,
    *,
    layer: int = -3,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    memory: float | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | Path | None = None,
) -> HiddenStateEncoder:
    """Load a frozen encoder.

    name: a Hugging Face id, a folder, a .gguf of SmolLM2, "smollm2", "tiny-qwen3_5", "tiny-qwen3_5_moe" or "tiny-llama".
    layer: index into transformers' `hidden_states`, negative from the end.
    device: "auto", "cpu", "cuda", "cuda:1", or "spread" over all GPUs and the CPU's memory.
    dtype: of the arithmetic; "auto" is bfloat16 on CUDA and float32 on the CPU.
    weights: "auto" keeps them in that dtype, "int8" and "nf4" pack the large matrices (weights_port/quantized.py).
    memory: GB of each GPU that "spread" may fill with weights.
    """
    placement = resolve_placement(device, memory)
    checkpoint = open_checkpoint(name, revision=revision, trust_remote_code=trust_remote_code, cache_dir=cache_dir)
    dtype = resolve_dtype(dtype, placement.device)
    return encoder_from(checkpoint, layer=layer, placement=placement, dtype=dtype, weights=weights)


def encoder_from(
    checkpoint: Checkpoint, *, layer: int, placement: Placement, dtype: torch.dtype, weights: str = "auto"
) -> HiddenStateEncoder:
    """Build the lower layers of a checkpoint that is already open."""
    if weights not in WEIGHTS:
        raise EncoderError(f"encoder_weights={weights!r} is unknown; use {', '.join(WEIGHTS)}")
    if weights != "auto" and placement.spread:
        raise EncoderError(
            f"encoder_weights={weights} cannot be spread over devices; use encoder_device=cuda, or auto weights"
        )
    num_layers = checkpoint.config.num_hidden_layers
    index = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= index <= num_layers:
        raise EncoderError(
            f"encoder_layer={layer} does not exist: {checkpoint.name!r} has {num_layers} layers, so use 0 (the embedding) to "
            f"{num_layers}, or -1 to {-num_layers - 1}"
        )
    model = load_strict(checkpoint, max(index, 1), placement, dtype, weights)
    if placement.device.type == "cuda" and (notice := missing_kernels(checkpoint.config, max(index, 1))):
        print(notice, file=sys.stderr, flush=True)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    used = _largest_token(checkpoint.tokenizer_json)
    if max(used, checkpoint.eos_id) >= vocab_size:
        raise EncoderError(
            f"encoder {checkpoint.name!r}: its tokenizer makes ids up to {max(used, checkpoint.eos_id)}, but its embedding has "
            f"{vocab_size} rows; the tokenizer belongs to another model"
        )
    identity = {
        "name": checkpoint.name,
        "revision": checkpoint.revision,
        "weights": fingerprint(model),
        "tokenizer": checkpoint.tokenizer_hash,
        "layer": str(index),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if weights != "auto":
        identity["packed"] = weights
    info = EncoderInfo(
        name=checkpoint.name,
        hidden_dim=checkpoint.config.hidden_size,
        vocab_size=vocab_size,
        eos_id=checkpoint.eos_id,
        max_length=getattr(checkpoint.config, "max_position_embeddings", None) or 1 << 30,
        layer=index,
        num_layers=num_layers,
        identity=identity,
    )
    return HiddenStateEncoder(model, checkpoint, info, placement.device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA, float32 elsewhere (bf16 is 3-4x slower on a CPU)."""
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in known:
        raise EncoderError(f"encoder dtype={dtype!r} is unknown; use auto, float32 or bfloat16")
    return known[dtype]


class _Reached(Exception):
    """The layer that is read has been computed; the rest of the model (its final norm) need not run."""


def _run(model: torch.nn.Module, info: EncoderInfo, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """hidden_states[info.layer] of the model."""
    if info.layer == info.num_layers:
        return model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
    caught: list[torch.Tensor] = []

    def catch(output: Any) -> None:
        caught.append(output[0] if isinstance(output, tuple) else output)
        raise _Reached

    if info.layer == 0:
        block = blocks(model)[0]
        hook = block.register_forward_pre_hook(
            lambda module, args, kwargs: catch(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    else:
        hook = blocks(model)[info.layer - 1].register_forward_hook(lambda module, args, output: catch(output))
    try:
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    except _Reached:
        return caught[0]
    finally:
        hook.remove()
    raise EncoderError(f"{type(model).__name__} never reached layer {info.layer}; this architecture is not supported")


def _largest_token(tokenizer_json: str) -> int:
    from tokenizers import Tokenizer

    return max(Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True).values(), default=-1)
