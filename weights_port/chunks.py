"""Hidden states chunk by chunk: computing, copying to the host and handing on overlap.

The GPU fills one chunk while the one before travels over a second stream into pinned memory, and the one before that is
handed on by a thread.  Inside a chunk, windows run in batches sorted by length, so that little padding is computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Int

from jdllm.data.windows import Windows
from weights_port.checkpoints import EncoderError
from weights_port.encoder import HiddenStateEncoder

if TYPE_CHECKING:
    import torch

BATCHES_PER_CHUNK = 4
_BUFFERS = 2
Chunk = tuple[int, Int[np.ndarray, "m t"], Int[np.ndarray, " m"]]
"""Number of its first window, ids, lengths."""


def chunks_from(windows: Windows, start: int, rows: int) -> Iterator[Chunk]:
    """All chunks of that many windows, from the one that holds window `start` on."""
    for first in range(start - start % rows, len(windows), rows):
        yield first, windows.ids[first : first + rows], windows.lengths[first : first + rows]


def compute_chunks(
    chunks: Iterable[Chunk],
    encoder: HiddenStateEncoder,
    shape: tuple[int, int],
    batch: int,
    put: Callable[[int, BFloat16[np.ndarray, "m t d"]], None],
    done: Callable[[int, Int[np.ndarray, " b"], Int[np.ndarray, " b"]], None] = lambda *batch: None,
) -> None:
    """Hand the hidden states of each chunk to `put`, in a thread, while the next chunk is computed.

    shape: most windows in a chunk, and tokens in each.  done: told of each batch, by chunk, places in it, and lengths.
    """
    import torch

    shape = (*shape, encoder.info.hidden_dim)
    cuda = encoder.device.type == "cuda"
    free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(torch.empty(shape, dtype=torch.bfloat16, pin_memory=cuda))
    copies = torch.cuda.Stream(encoder.device) if cuda else None
    with _Putter(put, free) as putter:
        for first, ids, lengths in chunks:
            order = np.argsort(-lengths, kind="stable")
            host = putter.next_buffer()
            target = torch.empty((len(ids), *shape[1:]), dtype=torch.bfloat16, device=encoder.device) if cuda else host
            for at in range(0, len(ids), batch):
                places = order[at : at + batch]
                _encode_into(target, places, encoder, ids[places], lengths[places])
                done(first, places, lengths[places])
            ready = None
            if copies is not None:
                copies.wait_stream(torch.cuda.current_stream(encoder.device))
                with torch.cuda.stream(copies):
                    host[: len(ids)].copy_(target, non_blocking=True)
                    ready = torch.cuda.Event()
                    ready.record(copies)
                target.record_stream(copies)
            putter.put(host, first, len(ids), ready)


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


class _Putter:
    """Hands finished chunks on in a thread; what fails there is raised by the next call here."""

    def __init__(self, put: Callable[[int, np.ndarray], None], free: queue.SimpleQueue):
        self._put, self._free = put, free
        self._full: queue.SimpleQueue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="put-hidden-states", daemon=True)

    def next_buffer(self) -> torch.Tensor:
        buffer = self._free.get()
        self._raise()
        return buffer

    def put(self, buffer: torch.Tensor, first: int, count: int, ready: torch.cuda.Event | None) -> None:
        self._full.put((buffer, first, count, ready))

    def _work(self) -> None:
        import torch

        while (item := self._full.get()) is not None:
            buffer, first, count, ready = item
            try:
                if ready is not None:
                    ready.synchronize()
                if self._failure is None and not self._abandoned:
                    self._put(first, buffer[:count].view(torch.int16).numpy().view(ml_dtypes.bfloat16))
            except Exception as error:
                self._failure = error
            self._free.put(buffer)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> _Putter:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self._abandoned = kind is not None
        self._full.put(None)
        self._thread.join()
        if kind is None:
            self._raise()
