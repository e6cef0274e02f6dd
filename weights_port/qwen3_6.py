"""The published shapes of Qwen3.6-27B and Qwen3.6-35B-A3B, without their weights: for plans, and for tests of names.

What is known, and from where (none of it was read from the files themselves, which nobody here has):
* Text model: the tables of the two model cards, repeated in many places and in agreement with transformers' own defaults
  for the 35B: 64 layers of width 5120 with FFN 17,408, 24 query and 4 key heads of 256, 48 value and 16 key heads of 128 in
  the linear layers; 40 layers of width 2048 with 256 experts of 512, 8 of them active and a shared one, 16 / 2 and 32 / 16
  heads.  Three linear-attention layers, then a full one; vocabulary 248,320; head not tied.  That the shared expert is 512
  wide too is transformers' default, the card does not say.
* Names: `Qwen3_5ForConditionalGeneration`, `Qwen3_5MoeForConditionalGeneration` (model_type qwen3_5, qwen3_5_moe), so
  `model.language_model.layers.N...`, `model.visual...`, `lm_head.weight`; experts fused (`experts.gate_up_proj`), in the
  MTP block too, which has 19 tensors in the 35B (github.com/alibaba/ROLL/pull/480, NVIDIA-NeMo/Automodel/pull/2595).
* Size: index of the 27B: 55.56 GB in 15 files (eadst.com/blog/325).
* Vision tower: transformers' defaults, 27 blocks of width 1152; 333 tensors are reported for the 35B.  Not needed here.
Not known: which file holds which tensor, and the inner shapes of the MTP block, which is taken to be a full-attention layer
like the others behind a projection of [embedding, state].  With it the 27B comes to the published 55.56 GB, and the 35B's
MTP block and vision tower to 19 and 333 tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from weights_port.checkpoints import EncoderError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAMES = ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B")
Shapes = dict[str, tuple[int, ...]]


def published_config(name: str) -> PretrainedConfig:
    """Config of the whole multimodal model; `.get_text_config()` is the text model's."""
    import transformers

    common = dict(
        vocab_size=248_320, head_dim=256, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        max_position_embeddings=262_144, rms_norm_eps=1e-6, tie_word_embeddings=False, dtype="bfloat16",
        rope_parameters={
            "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
        },
    )  # fmt: skip
    if name == "Qwen/Qwen3.6-27B":
        text = dict(
            hidden_size=5120, num_hidden_layers=64, intermediate_size=17_408, num_attention_heads=24, num_key_value_heads=4,
            linear_num_value_heads=48,
        )  # fmt: skip
        return transformers.Qwen3_5Config(
            text_config={**common, **text}, vision_config={"out_hidden_size": 5120}, tie_word_embeddings=False
        )
    if name == "Qwen/Qwen3.6-35B-A3B":
        text = dict(
            hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32,
            num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        )  # fmt: skip
        return transformers.Qwen3_5MoeConfig(
            text_config={**common, **text}, vision_config={"out_hidden_size": 2048}, tie_word_embeddings=False
        )
    raise EncoderError(f"the shapes of {name!r} are not known here; there are {', '.join(NAMES)}")


def checkpoint_shapes(name: str) -> Shapes:
    """Names and shapes of all tensors as the checkpoint should have them, MTP block included; no memory is used."""
    config = published_config(name)
    shapes = _shapes(config)
    return shapes | _mtp_shapes(shapes, config.get_text_config())


def _shapes(config: PretrainedConfig) -> Shapes:
    import torch
    import transformers

    from weights_port.loading import quiet

    kind = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[config.model_type]
    with quiet(), torch.device("meta"):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _mtp_shapes(shapes: Shapes, text: PretrainedConfig) -> Shapes:
    """The multi-token prediction block, for which transformers has no module."""
    full, width = text.layer_types.index("full_attention"), text.hidden_size
    layer = f"model.language_model.layers.{full}."
    block = {key.replace(layer, "mtp.layers.0."): shape for key, shape in shapes.items() if key.startswith(layer)}
    norms = {f"mtp.{norm}.weight": (width,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return {**block, **norms, "mtp.fc.weight": (width, 2 * width)}


def save_random(config: PretrainedConfig, folder: Path, device: str = "cpu") -> None:
    """Write random weights of the text model and head of a multimodal config in bfloat16, one file for each layer.

    For measurements at full width, where the numbers in the weights do not matter but their size does.
    """
    import torch
    from safetensors.torch import save_file

    from weights_port.checkpoints import block_index
    from weights_port.tiny import save_tokenizer

    generator = torch.Generator(device).manual_seed(0)

    def value(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        if key.endswith("A_log"):
            return torch.empty(shape, device=device).uniform_(1, 16, generator=generator).log()
        if len(shape) == 1:  # gains are stored less one, but for the norm inside linear attention
            return torch.full(shape, float("dt_bias" in key or "linear_attn.norm" in key), device=device)
        return 0.02 * torch.randn(shape, generator=generator, device=device)

    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in _shapes(config).items():
        if "visual." not in key:
            layer = block_index(key.removeprefix("model.language_model."))
            name = key.split(".")[-2] if layer is None else f"layer-{layer:02d}"
            files.setdefault(f"{name}.safetensors", {})[key] = shape
    folder.mkdir(parents=True, exist_ok=True)
    for file, shapes in files.items():
        weights = {key: value(key, shape).to("cpu", torch.bfloat16) for key, shape in shapes.items()}
        save_file(weights, folder / file)
    weight_map = {key: file for file, shapes in files.items() for key in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)
    save_tokenizer(folder)
