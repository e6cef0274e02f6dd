"""The real configurations, shape only: the tensors we would read are those that transformers' text model has."""

import math

import numpy as np
import pytest
import transformers

from weights_port.checkpoints import Checkpoint, EncoderError, bare_name
from weights_port.encoder import load_encoder
from weights_port.head import folded_head, head_key
from weights_port.loading import FINAL_NORMS, needed_keys, skeleton
from weights_port.qwen3_6 import NAMES, checkpoint_shapes, published_config, save_random
from weights_port.tiny import text_config


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    """(name, text config, shapes of the whole checkpoint)"""
    return request.param, published_config(request.param).get_text_config(), checkpoint_shapes(request.param)


def opened(name, config, shapes):
    return Checkpoint(name, "none", config, shapes, "", 0)


def test_sizes_are_the_published_ones(model):
    name, config, shapes = model
    gigabytes = 2 * sum(map(math.prod, shapes.values())) / 1e9
    vision = [key for key in shapes if key.startswith("model.visual.")]
    mtp = [key for key in shapes if key.startswith("mtp.")]
    if name == "Qwen/Qwen3.6-27B":
        assert f"{gigabytes:.2f}" == "55.56"  # its index, as eadst.com/blog/325 quotes it
        assert config.layer_types.count("full_attention") == 16 and config.num_hidden_layers == 64
    else:
        assert len(mtp) == 19  # github.com/alibaba/ROLL/pull/480
        assert len(vision) == 333  # model card of JANGQ-AI/Qwen3.6-35B-A3B-JANGTQ
        assert config.layer_types.count("full_attention") == 10 and config.num_hidden_layers == 40
        assert shapes["model.language_model.layers.0.mlp.experts.gate_up_proj"] == (256, 1024, 2048)


@pytest.mark.parametrize("above", [0, 2])
def test_needed_tensors_are_those_of_the_text_model(model, above):
    """hidden_states[-1] needs all of it, hidden_states[-3] neither the two top layers nor the final norm."""
    name, config, shapes = model
    layers = config.num_hidden_layers - above
    wanted = {bare_name(key): shapes[key] for key in needed_keys(shapes, layers, config.num_hidden_layers)}
    own = {
        key: tuple(value.shape) for key, value in skeleton(opened(name, config, shapes), layers).state_dict().items()
    }
    if above:
        own = {key: shape for key, shape in own.items() if key.rpartition(".")[0] not in FINAL_NORMS}
        assert "norm.weight" not in wanted
    assert wanted == own


def test_the_head_is_found(model):
    name, config, shapes = model
    assert head_key(opened(name, config, shapes)) == "lm_head.weight"
    assert shapes["lm_head.weight"] == (248_320, config.hidden_size)


def test_another_model_gets_a_sentence():
    with pytest.raises(EncoderError, match="there are Qwen/Qwen3.6-27B, Qwen/Qwen3.6-35B-A3B"):
        published_config("Qwen/Qwen9")


def test_random_weights_can_be_loaded_and_stay_finite(tmp_path):
    text = text_config("qwen3_5_moe").to_dict()
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config={"depth": 1}, tie_word_embeddings=False)
    save_random(config, tmp_path)
    assert {"layer-00.safetensors", "layer-03.safetensors", "embed_tokens.safetensors"} < {
        p.name for p in tmp_path.iterdir()
    }
    encoder = load_encoder(str(tmp_path), device="cpu", layer=-1)
    states = encoder.states(np.arange(40, dtype=np.int32).reshape(2, 20), np.array([20, 20]))
    assert states.isfinite().all() and states.std() > 0.1
    assert folded_head(encoder.checkpoint).shape == (64, 260)
