"""Weights of the frozen model in 8 or 4 bits, packed while they are read: a 27B encoder on a 32 GB card.

bitsandbytes does the arithmetic, on CUDA and on the CPU: blocks of 64 weights share a scale, their largest magnitude;
`int8` has 255 equal steps between -scale and scale, `nf4` the 16 levels of NormalFloat4 (QLoRA, arXiv 2305.14314).
Packed are the matrices of linear layers and the stacked experts.  Embeddings, norms, convolutions, and the small
matrices that decide (routers of experts, gates of the recurrence) stay as they are.

A weight is unpacked each time it is used, into the arithmetic of the model.  With thousands of tokens in a batch, as in
extraction, that costs little beside the product; for one token at a time it would be the wrong way.
Left out: quantised activations, checkpoints that come quantised, saving.
"""

from __future__ import annotations

import functools
from typing import Any

import bitsandbytes.functional as bnb
import torch
from jaxtyping import Float, Float32, UInt8
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "jdllm_packed"
BLOCK = 64
EXPERTS = ("gate_up_proj", "down_proj")
DECIDING = ("gate", "shared_expert_gate", "in_proj_a", "in_proj_b")


def levels(kind: str, device: torch.device | str = "cpu") -> Float32[torch.Tensor, " n"]:
    """The values between -1 and 1 that a weight, divided by its block's scale, is rounded to; sorted."""
    return _levels(kind, torch.device(device))


@functools.cache
def _levels(kind: str, device: torch.device) -> torch.Tensor:
    if kind == "int8":
        return bnb.create_linear_map(signed=True, total_bits=8).to(device)
    return bnb.get_4bit_type("nf4", device=device)


class Packed(torch.nn.Module):
    """The parametrization of one weight: stored as packed integers and scales, read as the weight."""

    def __init__(self, kind: str, shape: torch.Size, dtype: torch.dtype):
        super().__init__()
        self.kind, self.shape, self.dtype = kind, shape, dtype
        self.keep = False
        self._kept: torch.Tensor | None = None

    def right_inverse(self, weight: Float[torch.Tensor, "*s"]) -> tuple[UInt8[torch.Tensor, "*s"], torch.Tensor]:
        """Pack; the scales are float32, one for each block of the flattened weight."""
        weight = weight.reshape(-1, BLOCK)  # with shorter rows, bitsandbytes 0.50.2 unpacks 4 bits wrongly on a CPU
        if self.kind == "int8":
            packed, state = bnb.quantize_blockwise(weight, code=levels("int8", weight.device), blocksize=BLOCK)
        else:
            packed, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        return packed, state.absmax

    def forward(self, packed: UInt8[torch.Tensor, "*s"], scales: Float32[torch.Tensor, " n"]) -> torch.Tensor:
        if self._kept is not None:
            return self._kept
        state = bnb.QuantState(
            absmax=scales, shape=torch.Size((self.shape.numel() // BLOCK, BLOCK)), code=levels(self.kind, packed.device), blocksize=BLOCK, dtype=self.dtype,
            quant_type=None if self.kind == "int8" else "nf4",
        )  # fmt: skip
        unpack = bnb.dequantize_blockwise if self.kind == "int8" else bnb.dequantize_4bit
        weight = unpack(packed, state).view(self.shape)
        if self.keep:
            self._kept = weight
        return weight

    def release(self) -> None:
        self.keep, self._kept = False, None


def pack(module: torch.nn.Module, name: str, weight: torch.Tensor, kind: str) -> None:
    """Replace a module's parameter by its packed form; within one forward pass it is unpacked once."""
    module._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    packed = Packed(kind, weight.shape, weight.dtype)
    parametrize.register_parametrization(module, name, packed, unsafe=True)  # unsafe: stored and read dtypes differ

    def begin(*args: Any) -> None:
        packed.keep = True  # experts read their stack once for each expert

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(lambda *args: packed.release(), always_call=True)


def packable(model: PreTrainedModel, name: str) -> bool:
    """Whether the parameter of that name is one of the large matrices."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if path.rpartition(".")[2] in DECIDING or getattr(module, leaf).numel() % BLOCK:
        return False
    if isinstance(module, torch.nn.Linear):
        return leaf == "weight"
    return leaf in EXPERTS and isinstance(getattr(module, leaf), torch.nn.Parameter) and getattr(module, leaf).ndim == 3


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Asks transformers' loading for packed weights of one kind."""

    def __init__(self, kind: str):
        self.quant_method = METHOD
        self.kind = kind


@register_quantizer(METHOD)
class PackingQuantizer(HfQuantizer):
    """Packs each weight when transformers has read and converted it, so one unpacked weight is in memory at a time."""

    requires_calibration = False

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.misshapen: set[str] = set()
        self.damaged: list[str] = []
        """Weights with values that are not finite; once packed that could not be seen."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return param_name not in self.misshapen and packable(model, param_name)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes of one weight, by which transformers sets memory aside."""
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        return {"int8": 1.0, "nf4": 0.5}[self.quantization_config.kind] + 4 / BLOCK

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


class _Pack(ConversionOps):
    """The last step of reading one weight."""

    def __init__(self, quantizer: PackingQuantizer):
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        model: PreTrainedModel,
        full_layer_name: str,
        missing_keys: set[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        from weights_port.loading import all_finite

        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        path, _, leaf = full_layer_name.rpartition(".")
        module = model.get_submodule(path)
        if value.shape != getattr(module, leaf).shape:
            self.quantizer.misshapen.add(full_layer_name)  # transformers then reports it
            return {full_layer_name: value}
        if not all_finite(value):
            self.quantizer.damaged.append(full_layer_name)
        pack(module, leaf, value, self.quantizer.quantization_config.kind)
        module._is_hf_initialized = True
        missing_keys.discard(full_layer_name)
        return {}


def largest_step(kind: str) -> float:
    """The largest distance between neighbouring levels, in units of a block's scale."""
    return float(levels(kind).sort().values.diff().max())
