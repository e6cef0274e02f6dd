"""The frozen encoder against transformers' own output_hidden_states, and what it says to bad checkpoints."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from weights_port.checkpoints import EncoderError
from weights_port.encoder import load_encoder
from weights_port.tiny import EOS_ID, save_tiny

IDS = np.random.default_rng(0).integers(0, 256, (3, 19)).astype(np.int32)
FULL, PADDED = np.array([19, 19, 19]), np.array([19, 7, 1])


def reference(model, layer, lengths):
    mask = torch.arange(IDS.shape[1])[None] < torch.from_numpy(lengths)[:, None]
    with torch.no_grad():
        output = model(torch.from_numpy(IDS).long(), attention_mask=mask.long(), output_hidden_states=True)
    return output.hidden_states[layer], mask


@pytest.mark.parametrize("lengths", [FULL, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("layer", [0, 1, -3, -2, -1])
def test_states_equal_transformers(saved, layer, lengths):
    folder, model = saved
    encoder = load_encoder(str(folder), layer=layer, device="cpu")
    expected, mask = reference(model, layer, lengths)
    states = encoder.states(IDS, lengths)
    torch.testing.assert_close(states[mask], expected[mask], atol=1e-6, rtol=1e-5)
    assert (states[~mask] == 0).all()
    hidden = encoder.encode(IDS, lengths)
    assert hidden.shape == (3, 19, 64) and hidden.dtype.name == "bfloat16"
    np.testing.assert_array_equal(hidden.astype(np.float32), states.to(torch.bfloat16).float().numpy())


def test_padding_and_batch_company_change_nothing(saved):
    encoder = load_encoder(str(saved[0]), device="cpu")
    alone = encoder.states(IDS[1:2, :7], np.array([7]))
    other = IDS.copy()
    other[1, 7:] = 3
    for ids in (IDS, other):
        torch.testing.assert_close(encoder.states(ids, PADDED)[1:2, :7], alone, atol=1e-6, rtol=1e-5)


def test_upper_layers_are_neither_built_nor_read(saved, tmp_path):
    folder, _ = saved
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        if "layers.2." in name or "layers.3." in name:
            weights[name] = torch.full_like(weights[name], torch.nan)
    copy_with(folder, tmp_path, weights)
    encoder = load_encoder(str(tmp_path), layer=-3, device="cpu")
    assert encoder.info.layer == 2 and encoder.info.num_layers == 4
    assert encoder.info.identity["weights"] == load_encoder(str(folder), device="cpu").info.identity["weights"]
    with pytest.raises(EncoderError, match="not finite: layers.2"):
        load_encoder(str(tmp_path), layer=3, device="cpu")


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_text_part_of_a_multimodal_checkpoint(kind, tmp_path):
    model = save_tiny(kind, tmp_path / "text")
    weights = load_file(tmp_path / "text" / "model.safetensors")
    weights = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    weights |= {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2, 2), "mtp.layers.0.norm.weight": torch.ones(2)}
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    config = {"model_type": kind, "text_config": text, "tie_word_embeddings": False}
    config["architectures"] = [{"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind] + "ForConditionalGeneration"]
    copy_with(tmp_path / "text", tmp_path / "whole", weights)
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(str(tmp_path / "whole"), device="cpu")
    expected, mask = reference(model, -3, PADDED)
    torch.testing.assert_close(encoder.states(IDS, PADDED)[mask], expected[mask], atol=1e-6, rtol=1e-5)


def test_fused_experts_are_read_like_separate_ones(tmp_path):
    model = save_tiny("qwen3_5_moe", tmp_path / "separate")
    fused = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in fused)
    copy_with(tmp_path / "separate", tmp_path / "fused", fused)
    one, other = (load_encoder(str(tmp_path / name), device="cpu") for name in ("separate", "fused"))
    assert one.info.identity["weights"] == other.info.identity["weights"]


def test_sharded_checkpoint_opens_only_the_shards_it_needs(llama):
    folder, _ = llama
    whole = load_encoder(str(folder), device="cpu").info.identity["weights"]
    weights = load_file(folder / "model.safetensors")
    upper = {name for name in weights if "layers.2." in name or "layers.3." in name or "lm_head" in name}
    save_file({name: weights[name] for name in weights.keys() - upper}, folder / "a.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: "b.safetensors" if name in upper else "a.safetensors" for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_encoder(str(folder), device="cpu").info.identity["weights"] == whole  # b.safetensors does not exist
    with pytest.raises(EncoderError, match="b.safetensors is missing"):
        load_encoder(str(folder), layer=-1, device="cpu")


def test_every_problem_of_the_weights_is_in_one_error(llama):
    folder, _ = llama
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    weights["model.layers.1.extra.weight"] = torch.ones(3)
    weights["model.layers.1.self_attn.q_proj.weight"] = torch.ones(5, 64)
    weights["model.embed_tokens.weight"][7, 3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(EncoderError) as caught:
        load_encoder(str(folder), device="cpu")
    for part in (
        "missing: layers.0.mlp.up_proj.weight",
        "unexpected: layers.1.extra.weight",
        "wrong shape: layers.1.self_attn.q_proj.weight",
        "not finite: embed_tokens.weight",
    ):
        assert part in str(caught.value)


def test_identity_sees_one_changed_weight_layer_dtype_and_tokenizer(llama):
    folder, _ = llama
    first = load_encoder(str(folder), device="cpu").info
    assert load_encoder(str(folder), device="cpu").info == first and first.eos_id == EOS_ID and first.max_length == 512
    assert load_encoder(str(folder), device="cpu", dtype="bfloat16").info.identity != first.identity
    assert load_encoder(str(folder), device="cpu", layer=1).info.identity != first.identity
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5, 5] += 1e-3
    save_file(weights, folder / "model.safetensors")
    assert load_encoder(str(folder), device="cpu").info.identity["weights"] != first.identity["weights"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_encoder(str(folder), device="cpu").info.identity["tokenizer"] != first.identity["tokenizer"]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "only pickled weights"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]), "truncated"),
        (lambda f: add_token(f), "belongs to another model"),
        (lambda f: (f / "config.json").write_text('{"model_type": "no_such_model"}'), "cannot read its config"),
        (lambda f: edit(f, auto_map={"AutoModel": "m.M"}, model_type="own"), "trust_remote_code=true"),
        (lambda f: edit(f, quantization_config={"quant_method": "fp8"}), "is quantised"),
    ],
)
def test_bad_folder_gets_a_sentence(llama, spoil, sentence):
    folder, _ = llama
    spoil(folder)
    with pytest.raises(EncoderError, match=sentence):
        load_encoder(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("./nowhere", "no such folder"),
        ("tiny-gpt5", "allowed: tiny-qwen3_5"),
        ("some/where/else", "no such folder"),
        ("nobody/nothing.gguf", "no such file"),
        ("nobody/no-such-model", "check the network"),
    ],
)
def test_unknown_name_gets_a_sentence(name, sentence, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EncoderError, match=sentence):
        load_encoder(name, device="cpu")


def test_bad_arguments_get_a_sentence():
    with pytest.raises(EncoderError, match="encoder_layer=9 does not exist"):
        load_encoder("tiny-llama", layer=9, device="cpu")
    with pytest.raises(EncoderError, match="dtype='int8'"):
        load_encoder("tiny-llama", dtype="int8", device="cpu")
    with pytest.raises(EncoderError, match="device='gpu'"):
        load_encoder("tiny-llama", device="gpu")
    encoder = load_encoder("tiny-llama", device="cpu")
    with pytest.raises(EncoderError, match="over the 512 tokens"):
        encoder.encode(np.zeros((1, 513), np.int32), np.array([513]))
    with pytest.raises(EncoderError, match="knows 0 to 259"):
        encoder.encode(np.full((1, 4), 260, np.int32), np.array([4]))
    with pytest.raises(EncoderError, match="lengths must lie in"):
        encoder.encode(np.zeros((1, 4), np.int32), np.array([5]))


def copy_with(source, target, weights):
    target.mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (target / file).write_bytes((source / file).read_bytes())
    save_file(weights, target / "model.safetensors")


def add_token(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["one more"])
    tokenizer.save(str(folder / "tokenizer.json"))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
