"""Packed weights: the error of one weight, of a layer, of hidden states; what stays as it is; and what the cache knows."""

import sys

import numpy as np
import pytest
import torch

from weights_port.checkpoints import EncoderError, open_checkpoint
from weights_port.encoder import load_encoder
from weights_port.tiny import tiny_model

pytest.importorskip("bitsandbytes")
from weights_port.packing_error import packing_error
from weights_port.quantized import BLOCK, Packed, largest_step, levels, pack, packable

IDS = np.random.default_rng(0).integers(0, 256, (4, 32)).astype(np.int32)
LENGTHS = np.array([32, 32, 20, 5])
KINDS = ("int8", "nf4")


def test_levels_are_those_of_the_papers():
    int8 = levels("int8").sort().values
    torch.testing.assert_close(
        int8[int8.abs() > 1e-6], torch.cat([-torch.arange(1, 128).flip(0), torch.arange(1, 128)]) / 127
    )
    nf4 = levels("nf4").sort().values  # QLoRA, arXiv 2305.14314, appendix E
    expected = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407]
    torch.testing.assert_close(nf4, torch.tensor([*expected, 0.5626, 0.7230, 1.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 128), (4, 24, 32), (8, 200)])
def test_a_weight_is_off_by_half_a_step_at_most(kind, shape):
    weight = torch.randn(shape, generator=torch.manual_seed(0)) * 0.02
    packed = Packed(kind, weight.shape, weight.dtype)
    error = (packed(*packed.right_inverse(weight)) - weight).abs().reshape(-1)
    scales = torch.stack([block.abs().max() for block in weight.reshape(-1).split(BLOCK)])
    bound = 0.5 * largest_step(kind) * scales.repeat_interleave(BLOCK)[: error.numel()]
    # bitsandbytes decides between two levels to about a hundredth of a step.
    assert (error <= bound * 1.01).all() and error.max() > 0.5 * bound.min()


def test_packing_saves_what_it_should():
    bytes_of = lambda module: sum(p.nbytes for p in module.parameters())  # noqa: E731
    layer = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    sizes = {"auto": bytes_of(layer)}
    for kind in KINDS:
        layer = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
        pack(layer, "weight", layer.weight.detach(), kind)
        sizes[kind] = bytes_of(layer)
    weights = 256 * 256
    assert sizes == {"auto": 2 * weights, "int8": weights + weights // 16, "nf4": weights // 2 + weights // 16}


def test_a_layer_unpacks_once_a_pass_and_keeps_nothing():
    layer, calls = torch.nn.Linear(64, 8, bias=False), []
    pack(layer, "weight", layer.weight.detach(), "int8")
    inner = layer.parametrizations.weight[0]
    layer.forward = lambda x: calls.append(layer.weight is layer.weight) or torch.nn.functional.linear(x, layer.weight)
    layer(torch.ones(1, 64))
    assert calls == [True] and inner._kept is None and layer.weight is not layer.weight
    layer.forward = lambda x: layer.weight @ torch.ones(3)  # a pass that fails releases it too
    with pytest.raises(RuntimeError):
        layer(torch.ones(1, 64))
    assert inner._kept is None


def test_large_matrices_are_packed_and_what_decides_is_not():
    model = tiny_model("qwen3_5_moe").model
    chosen = {name.split("layers.")[1] for name, _ in model.named_parameters() if packable(model, name)}
    linear, full = (
        {name.removeprefix(f"{at}.") for name in chosen if name.startswith(f"{at}.")} for at in (0, 3)
    )  # the first layer has linear attention, the last full attention
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    experts |= {f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert linear == experts | {f"linear_attn.{part}.weight" for part in ("in_proj_qkv", "in_proj_z", "out_proj")}
    assert full == experts | {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    assert not any(packable(model, name) for name, _ in model.named_parameters() if "embed" in name or "norm" in name)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_hidden_states_err_less_than_the_steps_allow(kind):
    """int8 errs less than nf4, and each less than the rounding of its steps explains.

    A weight is off by a uniform part of the step between its neighbouring levels, so by step / sqrt(12) of its block's scale
    on average; over the weights' own size that is the relative error of one product.  Products on the way to a layer add up
    in squares, since their roundings have nothing to do with each other, and a product may reach the state through a sum
    that it is only a part of: the bound is relative error x sqrt(number of packed matrices up to there).
    """
    model = tiny_model(kind).model
    result = packing_error(f"tiny-{kind}", IDS, LENGTHS, layer=3, device="cpu")
    for weights in KINDS:
        squares = 0.0
        for layer in range(3):
            for name, value in model.layers[layer].named_parameters(prefix=f"layers.{layer}"):
                if packable(model, name):
                    squares += expected_error(value.detach(), weights) ** 2
            arithmetic = result.arithmetic[layer]  # packed weights round anew in bfloat16
            assert result.packed[weights][layer] < squares**0.5 + arithmetic
    assert all(a < b for a, b in zip(result.packed["int8"], result.packed["nf4"], strict=True))
    assert all(error > 0.005 for error in result.packed["nf4"]), "nothing was packed"
    assert result.table().count("\n") == 4 and "nf4 to bfloat16" in result.table()


def expected_error(weight, kind):
    """Root mean square of rounding over that of the weights, from the steps between levels alone."""
    blocks = weight.reshape(-1, BLOCK)
    scales, steps = blocks.abs().amax(1, keepdim=True), levels(kind).sort().values
    between = torch.searchsorted(steps, (blocks / scales).contiguous()).clamp(1, len(steps) - 1)
    step = steps[between] - steps[between - 1]
    return float(((step * scales) ** 2).mean().sqrt() / 12**0.5 / blocks.square().mean().sqrt())


def test_fused_and_separate_experts_are_packed_alike(tmp_path):
    from weights_port.tiny import save_tiny, save_tiny_multimodal

    save_tiny("qwen3_5_moe", tmp_path / "separate")
    save_tiny_multimodal("qwen3_5_moe", tmp_path / "fused")
    for folder in ("separate", "fused"):
        encoder = load_encoder(str(tmp_path / folder), device="cpu", weights="nf4")
        experts = encoder._model.layers[0].mlp.experts
        assert experts.parametrizations.gate_up_proj.original0.dtype == torch.uint8
        plain = load_encoder(str(tmp_path / folder), device="cpu")
        error = (encoder.states(IDS, LENGTHS) - plain.states(IDS, LENGTHS)).norm() / plain.states(IDS, LENGTHS).norm()
        assert 0.005 < error < 0.2


def test_packed_weights_are_another_encoder_to_the_cache():
    infos = [load_encoder("tiny-qwen3_5", device="cpu", weights=weights).info for weights in ("auto", *KINDS)]
    assert [info.identity.get("packed") for info in infos] == [None, *KINDS]
    assert len({info.identity["weights"] for info in infos}) == 3
    again = load_encoder("tiny-qwen3_5", device="cpu", weights="nf4").info
    assert again == infos[2]


def test_without_bitsandbytes_there_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "weights_port.quantized", None)
    with pytest.raises(EncoderError, match="encoder_weights=nf4 needs the package bitsandbytes .*pip install"):
        load_encoder("tiny-llama", device="cpu", weights="nf4")
    assert load_encoder("tiny-llama", device="cpu").info.layer == 2


def test_an_unknown_kind_gets_a_sentence():
    with pytest.raises(EncoderError, match="encoder_weights='int3' is unknown; use auto, int8, nf4"):
        load_encoder("tiny-llama", device="cpu", weights="int3")
    assert open_checkpoint("tiny-llama").name == "tiny-llama"
