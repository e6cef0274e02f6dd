"""The frozen language model: text tokens in, the hidden states of one layer out.

Any causal LM that transformers knows, Qwen3.6 (`qwen3_5`, `qwen3_5_moe`) first.  Only the layers under the one that is
read are built, loaded and run.  The state is taken from the block itself by a hook, because the model's own last entry of
`hidden_states` has passed the final norm, and a shortened model would put that norm where the full one has none.
Loading is strict (weights_port/loading.py).
Left out: generation, quantised weights, and models spread over several GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float, Int

from weights_port.checkpoints import HEAD_KEYS, Checkpoint, EncoderError, bare_name, open_checkpoint
from weights_port.loading import blocks, fingerprint, load_strict, norm_gain, quiet

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


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


@dataclasses.dataclass(frozen=True)
class EncoderHead:
    """The frozen model's own way from its last block to logits: `rmsnorm(h, eps) * norm_weight @ weight.T`."""

    weight: Float[np.ndarray, "v d"]
    norm_weight: Float[np.ndarray, " d"]
    """The gain as it is multiplied, also where the checkpoint stores gain - 1 (Qwen3.5, Gemma)."""
    norm_eps: float


class HiddenStateEncoder:
    """A frozen causal LM cut off above one layer."""

    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint, info: EncoderInfo, device: torch.device):
        self.info = info
        self.tokenizer_json = checkpoint.tokenizer_json
        self.device = device
        self._model = model
        self._checkpoint = checkpoint
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
        # On a CPU the plain PyTorch paths are meant to be used; transformers would advise CUDA kernels.
        silence = quiet() if self.device.type == "cpu" else contextlib.nullcontext()
        with self._running, torch.inference_mode(), silence:
            hidden = _run(self._model, self.info, tokens, None if mask is None else mask.long())
            return hidden if mask is None else hidden.masked_fill(~mask[:, :, None], 0)

    def head_weight(self) -> EncoderHead:
        """Output head and final norm in float32, read from the checkpoint; the upper layers stay unread."""
        gain, eps = norm_gain(self.info.name, self._model)
        return EncoderHead(self.head_matrix(), gain, eps)

    def head_matrix(self) -> Float[np.ndarray, "v d"]:
        """Weight of the output head in float32; the embedding where the two are tied."""
        checkpoint = self._checkpoint
        key = next((key for key in HEAD_KEYS if key in checkpoint.tensors), None)
        if key is None or checkpoint.config.tie_word_embeddings:
            embedding = self._model.get_input_embeddings().weight
            own = next(name for name, parameter in self._model.named_parameters() if parameter is embedding)
            key = next((key for key in checkpoint.tensors if bare_name(key) == own), None)
        if key is None:
            raise EncoderError(f"encoder {self.info.name!r} has no output head under a known name; use head=trained")
        checkpoint.fetch([key])
        weight = checkpoint.tensors[key][...].float().numpy()
        if weight.shape != (self.info.vocab_size, self.info.hidden_dim):
            raise EncoderError(
                f"encoder {self.info.name!r}: its head {key} is {weight.shape}, not "
                f"{(self.info.vocab_size, self.info.hidden_dim)}; use head=trained"
            )
        return weight

    def head_bias(self) -> Float[np.ndarray, " v"] | None:
        """Bias of the output head, which few models have."""
        if "lm_head.bias" not in self._checkpoint.tensors:
            return None
        self._checkpoint.fetch(["lm_head.bias"])
        return self._checkpoint.tensors["lm_head.bias"][...].float().numpy()

    @property
    def config(self) -> PretrainedConfig:
        """The full text model's config."""
        return self._checkpoint.config

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
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: str | Path | None = None,
) -> HiddenStateEncoder:
    """Load a frozen encoder.

    name: a Hugging Face id, a folder, a .gguf of SmolLM2, "smollm2", "tiny-qwen3_5", "tiny-qwen3_5_moe" or "tiny-llama".
    layer: index into transformers' `hidden_states`, negative from the end.
    dtype: "auto" is bfloat16 on CUDA and float32 on the CPU.
    """
    target = resolve_device(device)
    checkpoint = open_checkpoint(name, revision=revision, trust_remote_code=trust_remote_code, cache_dir=cache_dir)
    return encoder_from(checkpoint, layer=layer, device=target, dtype=resolve_dtype(dtype, target))


def encoder_from(checkpoint: Checkpoint, *, layer: int, device: torch.device, dtype: torch.dtype) -> HiddenStateEncoder:
    """Build the lower layers of a checkpoint that is already open."""
    num_layers = checkpoint.config.num_hidden_layers
    index = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= index <= num_layers:
        raise EncoderError(
            f"encoder_layer={layer} does not exist: {checkpoint.name!r} has {num_layers} layers, so use 0 (the embedding) to "
            f"{num_layers}, or -1 to {-num_layers - 1}"
        )
    model = load_strict(checkpoint, max(index, 1), device, dtype)
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
    return HiddenStateEncoder(model, checkpoint, info, device)


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is one."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise EncoderError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:N") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise EncoderError(f"device={device!r}: PyTorch {torch.__version__} sees no GPU here; use device=cpu or auto")
    return target


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
