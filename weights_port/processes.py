"""Several copies of the frozen model, each in its own process on its own device, that fill one cache.

The windows are cut into the same chunks as with one process (weights_port/extract.py), and a chunk is computed whole by one
process, in the same batches.  Chunks are handed out one after another, two to a process; this process alone writes,
in order.  So the cache has one writer, and comes out the same whoever computed what.

A process that dies (out of memory, kill -9) is named, and its chunks are given to the others; the work stops when none is
left.  When this process dies, the others see their pipe close and end.  Hidden states travel through the pipe: measured
on nothing larger than a test so far.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Int

from jdllm.data.cache import CacheWriter
from jdllm.data.windows import Windows
from weights_port.checkpoints import Checkpoint, EncoderError
from weights_port.chunks import BATCHES_PER_CHUNK, Chunk, chunks_from, compute_chunks
from weights_port.encoder import EncoderInfo, HiddenStateEncoder, load_encoder

if TYPE_CHECKING:
    import torch

_AHEAD = 2  # chunks a process has been given: the one it computes, and the next
Load = Callable[[str], HiddenStateEncoder]


class EncoderProcesses:
    """What `extract_to_cache` takes in the place of an encoder.  Use it in a `with`, or close it."""

    def __init__(self, checkpoint: Checkpoint, load: Load, devices: list[str]):
        """Start one process for each device and wait until each has loaded the model; `load` must be picklable."""
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.checkpoint, self.tokenizer_json = checkpoint, checkpoint.tokenizer_json
        self._workers: list[_Worker] = []
        try:
            for device in devices:
                self._workers.append(_Worker(context, load, device))
            infos = [worker.info() for worker in self._workers]
        except BaseException:
            self.close()
            raise
        different = [
            w.device for w, info in zip(self._workers, infos, strict=True) if info.identity != infos[0].identity
        ]
        if different:
            self.close()
            raise EncoderError(
                f"encoder {infos[0].name!r} is not the same on {', '.join(different)} as on {devices[0]}; use devices of one kind"
            )
        self.info: EncoderInfo = infos[0]

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self._workers[0].device.partition(":")[0])

    @property
    def where(self) -> str:
        """For the person at the terminal."""
        return f"{len(self._workers)} processes, {', '.join(dict.fromkeys(worker.device for worker in self._workers))}"

    def fill(self, writer: CacheWriter, windows: Windows, batch: int, advance: Callable[[int], None]) -> None:
        """Append the hidden states of all windows from writer.position on; `advance` is told how many tokens are done."""
        start, rows = writer.position, batch * BATCHES_PER_CHUNK
        todo = collections.deque(chunks_from(windows, start, rows))
        following = start - start % rows
        shape = (min(rows, len(windows)), windows.ids.shape[1], self.info.hidden_dim)
        done: dict[int, np.ndarray] = {}
        for worker in self._workers:
            worker.begin(shape[:2], batch)
        while following < len(windows):
            # A process that is slow, or whose chunk has to be done again, must not let the others fill the memory.
            latest = following + 2 * _AHEAD * len(self._workers) * rows
            for worker in self._workers:
                while len(worker.given) < _AHEAD and todo and todo[0][0] < latest:
                    worker.give(todo.popleft())
            for worker in self._ready():
                chunk = worker.receive()
                if chunk is None:
                    self._bury(worker, todo)
                    continue
                first, lengths, data = chunk
                done[first] = np.frombuffer(data, ml_dtypes.bfloat16).reshape(len(lengths), *shape[1:])
                advance(int(lengths[max(start - first, 0) :].sum()))
            while following in done:
                writer.append(done.pop(following)[max(start - following, 0) :])
                following += rows
        for worker in self._workers:
            worker.end()

    def _ready(self) -> list[_Worker]:
        """Processes that have sent something, or have died; waits for one."""
        ready = multiprocessing.connection.wait([worker.pipe for worker in self._workers])
        return [worker for worker in self._workers if worker.pipe in ready]

    def _bury(self, worker: _Worker, todo: collections.deque[Chunk]) -> None:
        """Give the chunks of a process that died to the others."""
        self._workers.remove(worker)
        code = worker.close()
        if not self._workers:
            raise EncoderError(
                f"the last encoder process, on {worker.device}, died ({code}); run the same command again, which goes on "
                "where it stopped, with fewer feed.encoder_processes or feed.encoder_batch_tokens if memory ran out"
            )
        print(
            f"encoder: the process on {worker.device} died ({code}); {len(self._workers)} left, which do its work",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        todo.extendleft(worker.given[first] for first in sorted(worker.given, reverse=True))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> EncoderProcesses:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def devices_for(device: str, count: int) -> list[str]:
    """One device for each of `count` processes."""
    import torch

    gpus = torch.cuda.device_count()
    kind = ("cuda" if gpus else "cpu") if device == "auto" else device
    if kind == "cpu":
        return ["cpu"] * count
    if kind != "cuda":
        raise EncoderError(
            f"feed.encoder_processes={count} takes the GPUs from the first on; use encoder_device=auto, cuda or cpu, not {device}"
        )
    if count > gpus:
        raise EncoderError(f"feed.encoder_processes={count}, but PyTorch sees {gpus} GPUs here; use {gpus} or fewer")
    return [f"cuda:{index}" for index in range(count)]


class _Worker:
    """This side of one process."""

    def __init__(self, context: multiprocessing.context.SpawnContext, load: Load, device: str):
        self.device = device
        self.given: dict[int, Chunk] = {}
        """Chunks that it has not sent back, by their first window."""
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(other, load, device), daemon=True)
        self.process.start()
        other.close()

    def info(self) -> EncoderInfo:
        """Waits until the model is loaded."""
        message = self._message()
        if message is None:
            raise EncoderError(
                f"the encoder process on {self.device} died while it loaded ({self.close()}); use fewer feed.encoder_processes "
                "if memory ran out"
            )
        return message

    def begin(self, shape: tuple[int, int], batch: int) -> None:
        self._send((shape, batch))

    def give(self, chunk: Chunk) -> None:
        """Ask for a chunk."""
        self.given[chunk[0]] = chunk
        self._send(chunk)

    def end(self) -> None:
        self._send(None)

    def receive(self) -> tuple[int, Int[np.ndarray, " m"], bytes] | None:
        """First window, lengths and states of a chunk; None if the process is gone."""
        first = self._message()
        if first is None:
            return None
        try:
            data = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None
        return first, self.given.pop(first)[2], data

    def _message(self) -> object:
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            return None
        if kind == "error":
            raise EncoderError(f"on {self.device}: {value}")
        return value

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # it has died, which _ready will see
            self.pipe.send(message)

    def close(self) -> str:
        """End the process; how it ended."""
        self.pipe.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _work(pipe: multiprocessing.connection.Connection, load: Load, device: str) -> None:
    """The process: loads the model, then computes the chunks that it is asked for until the pipe closes."""
    try:
        encoder = load(device)
        pipe.send(("info", encoder.info))
        while True:
            shape, batch = pipe.recv()
            compute_chunks(iter(pipe.recv, None), encoder, shape, batch, functools.partial(_send_chunk, pipe))
    except EncoderError as error:
        pipe.send(("error", str(error)))
    except (EOFError, ConnectionError):
        return  # the process that writes has gone, and with it the reason to go on
    except KeyboardInterrupt:
        return  # Ctrl-C reaches all processes; the one that writes says so


def _send_chunk(pipe: multiprocessing.connection.Connection, first: int, hidden: BFloat16[np.ndarray, "m t d"]) -> None:
    pipe.send(("chunk", first))
    pipe.send_bytes(memoryview(np.ascontiguousarray(hidden).view(np.uint8)).cast("B"))


def start(checkpoint: Checkpoint, count: int, name: str, device: str, **options: object) -> EncoderProcesses:
    """`count` processes that load the encoder of that name with load_encoder's options."""
    return EncoderProcesses(checkpoint, functools.partial(_load, name, count, options), devices_for(device, count))


def _load(name: str, count: int, options: dict[str, object], device: str) -> HiddenStateEncoder:
    import torch

    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    else:
        torch.cuda.set_device(device)  # kernels that do not look where their tensors are run on the current one
    return load_encoder(name, device=device, **options)
