"""Triton kernels launched on PyTorch tensors: in the interpreter on a CPU, or on a GPU where every output can be poisoned.

jdllm itself launches its kernels through jax-triton, which hands them uninitialised memory and one stream.  For checking,
more control is wanted: outputs full of NaN, several streams, and a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch

from weights_port.triton_interpreter import launch_interpreted


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
    """Memory for the outputs: NaN everywhere, integers zero, since those are counters."""
    kinds = {name: getattr(torch, shape.dtype.name) for name, shape in outputs.items()}
    return {
        name: torch.full(
            shape.shape, float("nan") if kinds[name].is_floating_point else 0, dtype=kinds[name], device=device
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
    """Start one program for every one of `constants["PROGRAMS"]` on the current stream; does not wait.

    On a CPU the interpreter runs them, a thread each, and this returns when they are through.
    """
    if not next(iter(outputs.values())).is_cuda:
        return launch_interpreted(kernel, inputs, outputs, constants)
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


def median_ms(
    kernel: Any, inputs: Sequence[Any], outputs: Mapping[str, torch.Tensor], constants: Mapping[str, Any],
    repeats: int = 30, **options: Any,
) -> float:  # fmt: skip
    """Median milliseconds of a launch by the GPU's clock, without the work of the host."""
    taken = []
    for _ in range(repeats):
        for memory in outputs.values():
            if not memory.is_floating_point():
                memory.zero_()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        launch(kernel, inputs, outputs, constants, **options)
        ended.record()
        taken.append((begun, ended))
    torch.cuda.synchronize()
    return float(np.median([begun.elapsed_time(ended) for begun, ended in taken[repeats // 3 :]]))


def compile_ahead(
    kernel: Any, capability: int, inputs: Sequence[str | int], outputs: Sequence[str], constants: Mapping[str, Any],
    **options: int,
) -> None:  # fmt: skip
    """Put into Triton's cache what `launch` with arrays of these kinds would compile on a card that need not be here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    card = mock.Mock()
    card.get_current_device.return_value = card.get_current_stream.return_value = 0
    card.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    driver.set_active(card)
    arrays = [
        x if isinstance(x, int) else torch.empty(16, dtype=getattr(torch, x)) for x in (*inputs, *outputs)
    ]  # a kind and an alignment of 16 bytes are all that the compiler sees of an array
    kernel.warmup(*arrays, grid=(constants["PROGRAMS"],), **constants, **options)
