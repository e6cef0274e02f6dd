"""An exported LDLM as transformers loads it: the module that `jdllm export --format hf` puts into the folder.

    from transformers import AutoModel
    model = AutoModel.from_pretrained("exported", trust_remote_code=True)
    print(model.generate(num=4, steps=10, seed=0))

Nothing of jdllm has to be installed: its PyTorch twin lies in the folder beside this file (hub.py copies both).  transformers
makes the class and finds the files; weights are read by the twin, as strictly as ever.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from weights_port import torch_ldlm


class LDLMConfig(PretrainedConfig):
    """config.json of the folder; `jdllm` in it is what `jdllm export` writes in any format."""

    model_type = "jdllm_ldlm"


class LDLMModel(PreTrainedModel):
    """Noise to text in a few denoising steps; no prompt, no past key values."""

    config_class = LDLMConfig

    def __init__(self, config: LDLMConfig, generator: torch_ldlm.Generator):
        super().__init__(config)
        self.ldlm = generator.model
        self._generator = generator

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike, *_: Any, config: Any = None, **options: Any) -> LDLMModel:
        """A folder, or an id of a hub; `dtype` and `device_map` (one device) are read, sharding and quantising are not."""
        folder = Path(name)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(str(name), revision=options.get("revision")))
        dtype = options.get("dtype", options.get("torch_dtype"))
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        dtype = None if dtype == "auto" else dtype
        device = options.get("device_map")
        device = device.get("", "cpu") if isinstance(device, dict) else device or "cpu"
        generator = torch_ldlm.load(folder, device="cuda" if device == "auto" else device, dtype=dtype)
        return cls(config or LDLMConfig.from_pretrained(folder), generator).eval()

    def generate(self, **options: Any) -> list[str]:
        """Texts; num, steps, sampler, seed, temperature, guidance, grid, or `noise` (num, k, d)."""
        return self._here().generate(**options)

    def generate_tokens(self, **options: Any) -> torch.Tensor:
        """The same as token ids (num, t)."""
        return self._here().generate_tokens(**options)

    def _here(self) -> torch_ldlm.Generator:
        """The generator, its statistics where `to` has put the weights."""
        generator = self._generator
        generator.statistics = {name: x.to(generator.device) for name, x in generator.statistics.items()}
        return generator
