"""Hidden states of all windows, computed once and handed to the cache in order.

Windows are cut into chunks that follow from `batch_tokens` alone; inside a chunk they run in batches sorted by length, and a
chunk is appended in its own order.  So an extraction that was killed and goes on makes the same batches as one that was
not, and the cache comes out the same.  Computing, copying to the host and writing overlap: the GPU fills one chunk while
the one before travels over a second stream into pinned memory and the one before that is written by a thread.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jdllm.data.cache import CacheKey, CacheWriter, make_key
from jdllm.data.windows import Windows
from weights_port.checkpoints import EncoderError
from weights_port.encoder import EncoderInfo, HiddenStateEncoder, check_length

if TYPE_CHECKING:
    import torch

BATCHES_PER_CHUNK = 4
_BUFFERS = 2
CPU_BATCH_TOKENS = 1024
"""More at once is no faster on a CPU: activations then leave its caches."""


def cache_key(info: EncoderInfo, data_hash: str, num_tokens: int) -> CacheKey:
    """The key under which `extract_to_cache` files the hidden states of windows of num_tokens tokens."""
    return make_key(info.identity, tokenizer=info.identity["tokenizer"], layer=info.layer, data=data_hash, t=num_tokens)


def extract_to_cache(
    encoder: HiddenStateEncoder,
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
            report = _Progress(windows, writer.position, encoder) if progress else None
            with report or contextlib.nullcontext():
                _fill(writer, encoder, windows, max(1, batch_tokens // num_tokens), report)
        return writer.finish()


def _fill(
    writer: CacheWriter, encoder: HiddenStateEncoder, windows: Windows, batch: int, report: _Progress | None
) -> None:
    """Append the hidden states of all windows from writer.position on."""
    import torch

    chunk = batch * BATCHES_PER_CHUNK
    start = writer.position
    shape = (min(chunk, len(windows)), windows.ids.shape[1], encoder.info.hidden_dim)
    cuda = encoder.device.type == "cuda"
    free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(torch.empty(shape, dtype=torch.bfloat16, pin_memory=cuda))
    copies = torch.cuda.Stream(encoder.device) if cuda else None
    with _Appender(writer, free) as appender:
        for first in range(start - start % chunk, len(windows), chunk):
            rows = np.arange(first, min(first + chunk, len(windows)))
            rows = rows[np.argsort(-windows.lengths[rows], kind="stable")]
            host = appender.next_buffer()
            target = torch.empty((len(rows), *shape[1:]), dtype=torch.bfloat16, device=encoder.device) if cuda else host
            for at in range(0, len(rows), batch):
                part = rows[at : at + batch]
                _encode_into(target, part - first, encoder, windows.ids[part], windows.lengths[part])
                if report is not None:
                    report.advance(int(windows.lengths[part[part >= start]].sum()))
            ready = None
            if copies is not None:
                copies.wait_stream(torch.cuda.current_stream(encoder.device))
                with torch.cuda.stream(copies):
                    host[: len(rows)].copy_(target, non_blocking=True)
                    ready = torch.cuda.Event()
                    ready.record(copies)
                target.record_stream(copies)
            appender.put(host, max(start - first, 0), len(rows), ready)


def _encode_into(
    target: torch.Tensor, places: np.ndarray, encoder: HiddenStateEncoder, ids: np.ndarray, lengths: np.ndarray
) -> None:
    """target[places] = hidden states."""
    import torch

    try:
        hidden = encoder.encode_torch(ids, lengths)
        target.index_copy_(0, torch.from_numpy(places).to(target.device, non_blocking=True), hidden)
    except torch.OutOfMemoryError as error:
        raise EncoderError(
            f"{ids.size} tokens at once do not fit on {encoder.device}: lower feed.encoder_batch_tokens, or free the GPU"
        ) from error


class _Appender:
    """Appends finished chunks in a thread; what fails there is raised by the next call here."""

    def __init__(self, writer: CacheWriter, free: queue.SimpleQueue):
        self._writer, self._free = writer, free
        self._full: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="append-hidden-states", daemon=True)

    def next_buffer(self) -> torch.Tensor:
        buffer = self._free.get()
        self._raise()
        return buffer

    def put(self, buffer: torch.Tensor, start: int, stop: int, ready: torch.cuda.Event | None) -> None:
        self._full.put((buffer, start, stop, ready))

    def _work(self) -> None:
        import torch

        while (item := self._full.get()) is not None:
            buffer, start, stop, ready = item
            try:
                if ready is not None:
                    ready.synchronize()
                if self._failure is None and not self._abandoned:
                    hidden = buffer[start:stop].view(torch.int16).numpy().view(ml_dtypes.bfloat16)
                    self._writer.append(hidden)
            except Exception as error:
                self._failure = error
            self._free.put(buffer)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> _Appender:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self._abandoned = kind is not None
        self._full.put(None)
        self._thread.join()
        if kind is None:
            self._raise()


class _Progress:
    """Tokens done, tokens/s and time left: a bar in a terminal, a line every ten seconds elsewhere."""

    def __init__(self, windows: Windows, position: int, encoder: HiddenStateEncoder):
        self._total = int(windows.lengths.sum())
        self._before = self._done = int(windows.lengths[:position].sum())
        self._name, self._device = encoder.info.name, encoder.device
        self._begin = self._last = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._advance = lambda tokens: None

    def __enter__(self) -> _Progress:
        resumed = f", {self._done:,} of them done before" if self._done else ""
        print(f"hidden states of {self._total:,} tokens{resumed}: {self._name} on {self._device}", flush=True)
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
