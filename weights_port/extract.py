"""Hidden states of all windows, computed once and handed to the cache in order.

Windows are cut into chunks that follow from `batch_tokens` alone; inside a chunk they run in batches sorted by length, and a
chunk is appended in its own order.  So an extraction that was killed and goes on makes the same batches as one that was
not, and the cache comes out the same: with one process or with several (weights_port/processes.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import BFloat16, Int

from jdllm.data.cache import CacheKey, CacheWriter, make_key
from jdllm.data.windows import Windows
from weights_port.checkpoints import EncoderError
from weights_port.chunks import BATCHES_PER_CHUNK, chunks_from, compute_chunks
from weights_port.encoder import EncoderInfo, HiddenStateEncoder, check_length
from weights_port.processes import EncoderProcesses

CPU_BATCH_TOKENS = 1024
"""More at once is no faster on a CPU: activations then leave its caches."""


def cache_key(info: EncoderInfo, data_hash: str, num_tokens: int) -> CacheKey:
    """The key under which `extract_to_cache` files the hidden states of windows of num_tokens tokens."""
    return make_key(info.identity, tokenizer=info.identity["tokenizer"], layer=info.layer, data=data_hash, t=num_tokens)


def extract_to_cache(
    encoder: HiddenStateEncoder | EncoderProcesses,
    windows: Windows,
    cache_root: str | Path,
    *,
    batch_tokens: int,
    data_hash: str,
    progress: bool = True,
) -> Path:
    """Fill the cache of these windows and return its folder; a finished one is returned at once, a partial one goes on.

    batch_tokens: tokens in one forward pass, padding included; at most CPU_BATCH_TOKENS on a CPU.
    """
    num_tokens = windows.ids.shape[1]
    check_length(encoder.info, num_tokens)
    if batch_tokens < 1:
        raise EncoderError(f"encoder_batch_tokens={batch_tokens} must be at least 1")
    if encoder.device.type == "cpu":
        batch_tokens = min(batch_tokens, CPU_BATCH_TOKENS)
    key = cache_key(encoder.info, data_hash, num_tokens)
    with CacheWriter(cache_root, key, windows, encoder.info.hidden_dim) as writer:
        if not writer.complete:
            several = isinstance(encoder, EncoderProcesses)
            fill, where = (EncoderProcesses.fill, encoder.where) if several else (_fill, str(encoder.device))
            report = Progress(windows, writer.position, encoder.info.name, where) if progress else None
            with report or contextlib.nullcontext():
                fill(
                    encoder, writer, windows, max(1, batch_tokens // num_tokens), report.advance if report else _unseen
                )
        return writer.finish()


def _unseen(tokens: int) -> None:
    """Progress that nobody looks at."""


def _fill(
    encoder: HiddenStateEncoder, writer: CacheWriter, windows: Windows, batch: int, advance: Callable[[int], None]
) -> None:
    """Append the hidden states of all windows from writer.position on."""
    start = writer.position
    chunks = chunks_from(windows, start, batch * BATCHES_PER_CHUNK)

    def append(first: int, hidden: BFloat16[np.ndarray, "m t d"]) -> None:
        writer.append(hidden[max(start - first, 0) :])

    def done(first: int, places: Int[np.ndarray, " b"], lengths: Int[np.ndarray, " b"]) -> None:
        advance(int(lengths[first + places >= start].sum()))

    rows = min(batch * BATCHES_PER_CHUNK, len(windows))
    compute_chunks(chunks, encoder, (rows, windows.ids.shape[1]), batch, append, done)


class Progress:
    """Tokens done, tokens/s and time left: a bar in a terminal, a line every ten seconds elsewhere."""

    def __init__(self, windows: Windows, position: int, name: str, where: str):
        self._total = int(windows.lengths.sum())
        self._before = self._done = int(windows.lengths[:position].sum())
        self._name, self._where = name, where
        self._begin = self._last = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._advance = lambda tokens: None

    def __enter__(self) -> Progress:
        resumed = f", {self._done:,} of them done before" if self._done else ""
        print(f"hidden states of {self._total:,} tokens{resumed}: {self._name} on {self._where}", flush=True)
        if sys.stdout.isatty():
            from rich import progress

            columns = [progress.BarColumn(), progress.TaskProgressColumn(), progress.TextColumn("{task.fields[speed]}")]
            bar = self._stack.enter_context(progress.Progress(*columns, progress.TimeRemainingColumn()))
            task = bar.add_task("hidden states", total=self._total, completed=self._done, speed="")
            self._advance = lambda tokens: bar.update(task, advance=tokens, speed=f"{self._speed():,.0f} tok/s")
        else:
            self._advance = lambda tokens: self._line()
        return self

    def advance(self, tokens: int) -> None:
        self._done += tokens
        self._advance(tokens)

    def _speed(self) -> float:
        return (self._done - self._before) / max(time.monotonic() - self._begin, 1e-6)

    def _line(self) -> None:
        if time.monotonic() - self._last > 10 or self._done == self._total:
            self._last = time.monotonic()
            left = int((self._total - self._done) / max(self._speed(), 1e-6))
            print(
                f"hidden states: {self._done:,} / {self._total:,} tokens, {self._speed():,.0f} tok/s, "
                f"{left // 60}:{left % 60:02d} left",
                flush=True,
            )

    def __exit__(self, *error: object) -> None:
        self._stack.close()
