"""Several programs of a Triton kernel at once in Triton's interpreter, so that a CPU can run a kernel whose programs wait for each other.

The interpreter alone runs one program after another.  Here each has a thread, and what the interpreter keeps once for all of
them (which program runs, its patches of Triton's language) is made safe for that.  Written against Triton 3.9.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def launch_interpreted(
    kernel: Any, inputs: Sequence[Any], outputs: Mapping[str, torch.Tensor], constants: Mapping[str, Any]
) -> None:
    """One program for every one of `constants["PROGRAMS"]`; returns when all are through, raises what the first of them raised."""
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
