"""Hidden states computed beside training: no cache on disk, no copy through the host.

A thread runs the frozen encoder ahead of the trainer into a bounded queue; on a GPU a batch is handed from PyTorch to JAX
by DLPack, so both see the same memory.  An encoder on another GPU than the trainer's copies it there first, on a stream of
its own, while it works on the next batch.  Which windows make batch i follows from seed and i alone, so the feed's place in
the data is one number, whatever the thread has computed ahead.  Of several processes each encodes the rows of its own devices.
"""

from __future__ import annotations

import collections
import queue
import threading
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jdllm.data.text import DataError
from jdllm.data.windows import Windows
from weights_port.encoder import HiddenStateEncoder, check_length

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]


class OnlineFeed:
    """Endless iterator of batches as BatchLoader gives them; on CUDA `hidden` is a JAX array on that GPU.

    get_state() after n batches, handed to set_state of a feed with the same arguments, makes it go on with batch n + 1.
    What fails in the thread is raised by the next batch.  Use it in a `with`, or close it.
    """

    def __init__(
        self,
        encoder: HiddenStateEncoder,
        windows: Windows,
        batch_size: int,
        seed: int,
        prefetch: int = 2,
        own_rows: slice = slice(None),
        device: str | None = None,
    ) -> None:
        """`own_rows` of each batch are computed; `device` is where the trainer wants them, in PyTorch's words."""
        check_length(encoder.info, windows.ids.shape[1])
        if batch_size < 1:
            raise DataError(f"training.batch_size={batch_size} is too small; the least is 1")
        if not len(windows):
            raise DataError("there are no windows of text to train on; give more text with --data")
        self._encoder, self._windows, self._batch_size, self._seed = encoder, windows, batch_size, seed
        self._prefetch, self._own_rows, self._courier = max(1, prefetch), own_rows, _Courier(device)
        self._identity = {
            "windows": windows.hash,
            "encoder": encoder.info.identity,
            "batch_size": batch_size,
            "seed": seed,
        }
        self._position = 0
        self._worker: _Worker | None = None
        # PyTorch must not give the memory of a batch to the encoder again while JAX, on its own stream, still reads it.
        self._lent: collections.deque[torch.Tensor] = collections.deque(maxlen=4)

    def __iter__(self) -> OnlineFeed:
        return self

    def __next__(self) -> Batch:
        if self._worker is None:
            self._worker = _Worker(self._compute, self._position, self._prefetch)
        try:
            batch = self._worker.take()
        except BaseException:
            self.close()  # the next call starts again at the batch that failed
            raise
        self._position += 1
        self._lent.append(batch["hidden"][0])
        return {**batch, "hidden": _hand_over(*batch["hidden"])}

    def rows(self, position: int) -> np.ndarray:
        """Windows of the batch at a position: each epoch is a new order, and batches go on over its end."""
        count, places = len(self._windows), position * self._batch_size + np.arange(self._batch_size)
        epochs = places // count
        orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(count) for epoch in np.unique(epochs)}
        return np.array([orders[epoch][place % count] for epoch, place in zip(epochs, places)])

    def _compute(self, position: int) -> Batch:
        rows = self.rows(position)[self._own_rows]
        ids, lengths = self._windows.ids[rows], self._windows.lengths[rows]
        return {"hidden": self._courier.send(self._encoder.encode_torch(ids, lengths)), "ids": ids, "lengths": lengths}

    def get_state(self) -> dict[str, Any]:
        """Position, the number of batches taken, as JSON-able values."""
        return {**self._identity, "position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to a position; DataError if it is one of other windows, another encoder, batch size or seed."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the data position was saved with {name}={state.get(name)!r}, but this run has {value!r}; "
                    f"resume with the settings of the run, or start a new one under another name"
                )
        self.close()
        self._position = int(state["position"])

    def close(self) -> None:
        """Stop the thread; batches computed ahead are dropped.  Taking another batch starts it again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def __enter__(self) -> OnlineFeed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Courier:
    """Takes hidden states to the trainer's device, beside what the encoder does next."""

    def __init__(self, device: str | None):
        self._device, self._stream = device, None

    def send(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The states on the trainer's device, and the event after which they are there."""
        import torch

        target = hidden.device if self._device is None else torch.device(self._device)
        if target.type == "cpu" or not hidden.is_cuda:
            return hidden.cpu(), None
        arrived, computed = torch.cuda.Event(), torch.cuda.current_stream(hidden.device)
        if target == hidden.device:
            arrived.record(computed)
            return hidden, arrived
        if self._stream is None:
            self._stream = torch.cuda.Stream(hidden.device)
        self._stream.wait_stream(computed)
        with torch.cuda.stream(self._stream):  # PyTorch copies between cards on a stream of the source
            copy = hidden.to(target, non_blocking=True)
        hidden.record_stream(self._stream)
        arrived.record(torch.cuda.current_stream(target))  # which PyTorch has made to wait for the copy
        return copy, arrived


def _hand_over(hidden: torch.Tensor, ready: torch.cuda.Event | None) -> Any:
    """To JAX without a copy on a GPU, to NumPy on a CPU (as the cache gives it)."""
    import torch

    if ready is None:
        return hidden.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    import jax

    ready.synchronize()  # JAX knows nothing of the thread's stream; the encoder is ahead, so this seldom waits
    return jax.dlpack.from_dlpack(hidden.contiguous())


class _Worker:
    """A thread that computes batches in order, at most `ahead` more than were taken."""

    def __init__(self, compute: Any, position: int, ahead: int):
        self._compute = compute
        self._done: queue.Queue = queue.Queue(ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(position,), name="online-encoder", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        batch = self._done.get()
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def _work(self, position: int) -> None:
        while not self._stopped.is_set():
            try:
                item = self._compute(position)
            except Exception as error:
                item = error
            self._put(item)
            if isinstance(item, BaseException):
                return
            position += 1

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._done.put(item, timeout=0.1)
            except queue.Full:
                continue

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
