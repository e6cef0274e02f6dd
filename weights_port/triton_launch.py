"""Triton kernels launched on PyTorch tensors: in the interpreter on a CPU, or on a GPU where every output can be poisoned.

jdllm itself launches its kernels through jax-triton, which hands them uninitialised memory and one stream.  For checking,
more control is wanted: outputs full of NaN, several streams, and a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

COUNTERS = ("everyone", "done")
"""Outputs that a kernel counts in; they start at zero."""


def tensor(x: Any, device: str) -> Any:
    """A tensor with the same numbers; ints as they are."""
    if isinstance(x, int):
        return x
    x = np.asarray(x)
    if x.dtype.name in ("bfloat16", "float8_e4m3fn"):
        kind = getattr(torch, x.dtype.name)
        bits = {2: np.int16, 1: np.int8}[x.dtype.itemsize]
        return torch.from_numpy(x.view(bits).copy()).view(kind).to(device)
    return torch.from_numpy(x.copy()).to(device)


def poisoned(outputs: Mapping[str, jax.ShapeDtypeStruct], device: str) -> dict[str, torch.Tensor]:
    """Memory for the outputs: NaN everywhere, counters zero."""
    return {
        name: torch.full(
            shape.shape, 0 if name in COUNTERS else float("nan"), dtype=getattr(torch, shape.dtype.name), device=device
        )
        for name, shape in outputs.items()
    }


def launch(
    kernel: Any,
    inputs: Sequence[Any],
    outputs: Mapping[str, torch.Tensor],
    constants: Mapping[str, Any],
    **options: Any,
) -> None:
    """Start one program for every one of `constants["PROGRAMS"]` on the current stream; does not wait."""
    kernel[(constants["PROGRAMS"],)](*inputs, *outputs.values(), **constants, **options)


def launch_on_streams(
    kernel: Any, inputs: Sequence[Any], memories: Sequence[Mapping[str, torch.Tensor]], constants: Mapping[str, Any],
    **options: Any,
) -> None:  # fmt: skip
    """One launch for each of `memories`, each on a stream of its own; waits for all."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in memories]
    for stream, memory in zip(streams, memories):
        with torch.cuda.stream(stream):
            launch(kernel, inputs, memory, constants, **options)
    torch.cuda.synchronize()
