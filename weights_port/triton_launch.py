"""Triton kernels launched on PyTorch tensors: in the interpreter on a CPU, or on a GPU where every output can be poisoned.

jdllm itself launches its kernels through jax-triton, which hands them uninitialised memory and one stream.  For checking,
more control is wanted: outputs full of NaN, several streams, and a CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
    """Start one program for every one of `constants["PROGRAMS"]` on the current stream; does not wait.

    On a CPU the interpreter runs them, a thread each, and this returns when they are through.
    """
    if not next(iter(outputs.values())).is_cuda:
        return _launch_interpreted(kernel, inputs, outputs, constants)
    kernel[(constants["PROGRAMS"],)](*inputs, *outputs.values(), **constants, **options)


def _launch_interpreted(
    kernel: Any, inputs: Sequence[Any], outputs: Mapping[str, torch.Tensor], constants: Mapping[str, Any]
) -> None:
    """A thread for each program: the interpreter alone runs one after another, and the first would wait for ever."""
    errors: list[BaseException] = []

    def program(index: int) -> None:
        this_thread.program = index
        try:
            kernel[(1,)](*inputs, *outputs.values(), **constants)
        except BaseException as error:
            errors.append(error)

    this_thread = threading.local()
    threads = [threading.Thread(target=program, args=(i,), daemon=True) for i in range(constants["PROGRAMS"])]
    with _threaded_interpreter(this_thread):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not errors:  # who waits for a failed one waits for ever
            for thread in threads:
                thread.join(0.02)
    if errors:
        raise errors[0]


@contextmanager
def _threaded_interpreter(this_thread: threading.local) -> Iterator[None]:
    """The interpreter's program_id is `this_thread.program`, and Triton's language stays patched until all are through."""
    import triton.language as tl
    from triton.runtime import interpreter

    scopes: dict[int, Any] = {}
    patch, rewrite, lock = interpreter._patch_lang, interpreter.InterpretedFunction.rewrite, threading.RLock()
    builder = interpreter.InterpreterBuilder
    add, dot = builder.create_atomic_rmw, builder.create_dot

    def patch_once(fn: Any) -> Any:
        with lock:
            if id(fn.__globals__) not in scopes:
                scopes[id(fn.__globals__)] = patch(fn)
        return mock.Mock()

    def rewrite_alone(function: Any) -> Any:
        with lock:
            return rewrite(function)

    def add_or_sleep(self: Any, operation: Any, at: Any, value: Any, *rest: Any) -> Any:
        if not value.data.any():  # a program that waits, and would keep the others from the processor
            time.sleep(1e-3)
        return add(self, operation, at, value, *rest)

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter keeps bfloat16 as 16 bits, and would multiply those."""
        wide = [self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    place = property(lambda _: (this_thread.program, 0, 0), lambda *_: None)
    with (
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.InterpretedFunction, "rewrite", rewrite_alone),
        mock.patch.object(builder, "grid_idx", place, create=True),
        mock.patch.object(builder, "create_atomic_rmw", add_or_sleep),
        mock.patch.object(builder, "create_dot", dot_of_numbers),
    ):
        yield
    for scope in reversed(scopes.values()):
        scope.restore()


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
        for name in COUNTERS:
            outputs[name].zero_()
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
