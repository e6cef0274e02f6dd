"""jdllm: latent diffusion language models in JAX.

import jdllm
generator = jdllm.load("runs/quickstart")
print(generator.generate(num=4, steps=10, seed=0))
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "jdllm.config",
    "ConfigError": "jdllm.config",
    "preset": "jdllm.config",
    "Generator": "jdllm.generation.generator",
    "load": "jdllm.training.run",
    "train": "jdllm.training.loop",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `jdllm --help` does not wait for JAX."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jdllm' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
