"""Tiny random checkpoints of real architectures, made on the spot: for tests and for the `smoke` preset.

They have the layers, shapes and key names of the models they stand for (Qwen3.6 is `qwen3_5` and `qwen3_5_moe` in
transformers), a byte-level tokenizer of 260 tokens, and random weights from a fixed seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from weights_port.checkpoints import Checkpoint, EncoderError, LazyTensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

KINDS = ("qwen3_5", "qwen3_5_moe", "llama")
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 256
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def byte_tokenizer_json() -> str:
    """A tokenizer with one token for each byte (ids 0..255) and four special tokens; 256 ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer.to_str()


def tiny_model(kind: str, *, hidden_dim: int = 64, num_layers: int = 4, seed: int = 0) -> PreTrainedModel:
    """A random causal LM of the given architecture, fp32 on the CPU; the global random state is left as it was."""
    import transformers

    config = text_config(kind, hidden_dim, num_layers)
    model_class = {
        "llama": transformers.LlamaForCausalLM,
        "qwen3_5": transformers.Qwen3_5ForCausalLM,
        "qwen3_5_moe": transformers.Qwen3_5MoeForCausalLM,
    }[kind]
    return _random(lambda: model_class(config), seed)


def text_config(kind: str, hidden_dim: int = 64, num_layers: int = 4) -> PretrainedConfig:
    """Config of the text model of that architecture."""
    import transformers

    if kind not in KINDS:
        raise EncoderError(f"encoder='tiny-{kind}' is unknown; allowed: {', '.join('tiny-' + kind for kind in KINDS)}")
    common = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_dim,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=EOS_ID,
        pad_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    if kind == "llama":
        return transformers.LlamaConfig(**common, intermediate_size=2 * hidden_dim)
    if kind == "qwen3_5":
        return transformers.Qwen3_5TextConfig(**common, **linear, intermediate_size=2 * hidden_dim)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    return transformers.Qwen3_5MoeTextConfig(**common, **linear, **experts)


def _random(make: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """The model with weights that follow from the seed alone."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        # Norm weights start at a constant; a random gain lets a test tell a norm that was applied from one that was not.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.float()


def tiny_checkpoint(kind: str, **shape: int) -> Checkpoint:
    """The same in memory, ready for load_encoder."""
    model = tiny_model(kind, **shape)
    tensors = {name: LazyTensor(lambda tensor=tensor: tensor) for name, tensor in model.state_dict().items()}
    return Checkpoint(f"tiny-{kind}", "packaged", model.config, tensors, byte_tokenizer_json(), EOS_ID)


def save_tiny(kind: str, folder: Path, **shape: int) -> PreTrainedModel:
    """The same as a folder in Hugging Face's layout; returns the full model it was written from."""
    model = tiny_model(kind, **shape)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """The byte tokenizer, as a folder in Hugging Face's layout has it."""
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL_TOKENS[0]}))


def save_tiny_multimodal(kind: str, folder: Path) -> PreTrainedModel:
    """A tiny Qwen3_5(Moe)ForConditionalGeneration in five files with an index, with vision tower and MTP block.

    Names and grouping are those of the published Qwen3.6 checkpoints: fused experts, layers in order, the head last.  The
    MTP tensors, which transformers has no module for, are made up.  Returns the full model.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    text = text_config(kind).to_dict()
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16
    )
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = _random(lambda: getattr(transformers, f"{name}ForConditionalGeneration")(config), 0)
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    weights |= {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.input_layernorm.weight": torch.ones(64)}

    def file_of(key: str) -> int:
        if key.startswith(("mtp.", "lm_head.")):
            return 5
        if key.startswith("model.visual."):
            return 2 if ".blocks." in key else 4
        layer = next((int(part) for part in key.split(".") if part.isdigit()), 3 if "norm" in key else 0)
        return min(layer, 2) + 1

    folder.mkdir(exist_ok=True)
    weight_map = {key: f"model-{file_of(key):05d}-of-00005.safetensors" for key in weights}
    for file in set(weight_map.values()):
        save_file({key: value for key, value in weights.items() if weight_map[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return model
