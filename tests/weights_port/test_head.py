"""The output head, read from the checkpoint alone, gives the model's own logits."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from weights_port import head
from weights_port.checkpoints import EncoderError, open_checkpoint
from weights_port.encoder import load_encoder

IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 9)))


def before_the_norm(model):
    """The last block's output, and the logits."""
    outputs = []
    hook = model.model.layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    with torch.no_grad():
        logits = model(IDS).logits
    hook.remove()
    return outputs[0], logits


def test_gain_and_matrix_give_the_models_logits(saved):
    folder, model = saved
    checkpoint = open_checkpoint(str(folder))
    x, logits = before_the_norm(model)
    gain, eps = head.norm_gain(checkpoint)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    weight = torch.from_numpy(head.head_matrix(checkpoint))
    torch.testing.assert_close((normed * gain) @ weight.T, logits, atol=1e-4, rtol=1e-4)


def test_folded_head_gives_the_same_in_bfloat16(saved):
    folder, model = saved
    x, logits = before_the_norm(model)
    folded = torch.from_numpy(head.folded_head(open_checkpoint(str(folder))).astype(np.float32))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    # Each product is off by at most the rounding of one bfloat16 weight, 2**-8 of it.
    bound = 2.0**-8 * (normed.abs() @ folded.abs()) + 1e-4
    assert ((normed @ folded - logits).abs() <= bound).all()


def test_rows_come_a_few_at_a_time_and_the_model_is_not_loaded(saved, monkeypatch):
    folder, model = saved
    checkpoint = open_checkpoint(str(folder))
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    parts = list(head.head_rows(checkpoint, rows=100))
    assert [len(part) for part in parts] == [100, 100, 60]
    torch.testing.assert_close(torch.cat(parts), model.lm_head.weight.detach(), atol=0, rtol=0)
    whole = head.folded_head(checkpoint)
    monkeypatch.setattr(head, "ROWS", 7)
    np.testing.assert_array_equal(head.folded_head(checkpoint), whole)


def test_only_head_and_norm_are_read(saved):
    checkpoint = open_checkpoint(str(saved[0]))
    read = []
    for key, tensor in checkpoint.tensors.items():
        tensor._read = lambda key=key, inner=tensor._read: read.append(key) or inner()
    head.folded_head(checkpoint)
    assert sorted(read) == ["lm_head.weight", "model.norm.weight"]


def test_tied_head_is_the_embedding(llama):
    folder, model = llama
    edit(folder, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    np.testing.assert_array_equal(head.head_matrix(checkpoint), model.model.embed_tokens.weight.detach().numpy())


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda w: w.pop("lm_head.weight"), "no output head under a known name; use head=trained"),
        (lambda w: w.pop("model.norm.weight"), "lacks norm.weight"),
        (lambda w: w.update({"lm_head.weight": torch.ones(3, 64)}), r"is \(3, 64\), not \(260, 64\)"),
        (lambda w: w["lm_head.weight"][5, 5].fill_(torch.nan), "head lm_head.weight is not finite"),
        (lambda w: w["model.norm.weight"][5].fill_(torch.inf), "not .64,. finite numbers"),
    ],
)
def test_a_bad_head_gets_a_sentence_and_does_not_hinder_extraction(llama, spoil, sentence):
    folder, _ = llama
    weights = load_file(folder / "model.safetensors")
    spoil(weights)
    save_file(weights, folder / "model.safetensors")
    load_encoder(str(folder), device="cpu")
    with pytest.raises(EncoderError, match=sentence):
        head.folded_head(open_checkpoint(str(folder)))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
