"""The table of encoder sizes against transformers' own modules of the same shapes, without a single weight."""

import pytest
import torch
import transformers

from jdllm.config import PRESETS, ConfigError, preset
from jdllm.training.encoder_size import ENCODERS, EncoderSize, encoder_bytes
from weights_port.tiny import VOCAB_SIZE

SHAPES = {  # config.json of each checkpoint; Qwen3.6: model cards of 27B and 35B-A3B (heads of linear attention 16/48, 16/32)
    "Qwen/Qwen3.6-27B": transformers.Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        linear_num_value_heads=48,
    ),
    "Qwen/Qwen3.6-35B-A3B": transformers.Qwen3_5MoeTextConfig(),
    "openai-community/gpt2": transformers.GPT2Config(),
    "smollm2": transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    ),
    "tiny-qwen3_5": transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_sizes_are_those_of_transformers_modules(name):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(SHAPES[name])
    blocks = model.layers if hasattr(model, "layers") else model.h
    counts = [sum(p.numel() for p in block.parameters()) for block in blocks]
    final = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("norm.", "ln_f.")))
    embedding = sum(p.numel() for p in model.parameters()) - sum(counts) - final
    size = ENCODERS[name]
    assert (len(counts), embedding) == (size.layers, size.embedding)
    for layer in (1, 4, -3, size.layers):
        count = layer if layer > 0 else size.layers + 1 + layer
        assert size.weights(layer) == (embedding, sum(counts[:count]))


def test_every_presets_encoder_is_in_the_table():
    assert all(encoder_bytes(config) for config in PRESETS.values())


def test_bytes_follow_layer_and_packing():
    config = preset("qwen3.6-27b")
    whole = encoder_bytes(config)
    assert 49e9 < whole < 50e9  # the checkpoint has 55.6 GB with vision tower, head and two more layers
    half = encoder_bytes(config.replace(feed__encoder_weights="int8"))
    quarter = encoder_bytes(config.replace(feed__encoder_weights="nf4"))
    assert quarter < 0.35 * whole < half < 0.56 * whole
    assert encoder_bytes(config.replace(feed__layer=0)) < encoder_bytes(config.replace(feed__layer=5)) < whole / 7
    assert encoder_bytes(config.replace(encoder="somebody/else")) is None
    with pytest.raises(ConfigError, match="feed.layer=70 does not exist"):
        EncoderSize(64, 1, 1, 1).weights(70)
