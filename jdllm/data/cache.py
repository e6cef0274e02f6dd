"""Hidden states on disk: written once by the frozen model, then read by every training run on the same text.

    <root>/<first 16 hex digits of sha256(key)>/
        key.json            everything that changes the content: encoder, tokenizer, layer, data, t
        ids.npy             (n, t) int32; padding repeats the EOS id
        lengths.npy         (n,)   int32; valid tokens of each window, EOS included
        shard-00000.bf16 …  (m, t, d_h) bfloat16, little endian, no header; whole windows, up to 256 MB
        shard-00000.npy …   (2, d_h) float64: mean, and sum of squared deviations, of the shard's counted tokens
        index.json          shapes, bytes and crc32 of ids and lengths; per finished shard the same and its counts
        stats.json          mean and std per dimension over all shards
        DONE                written last; a folder without it is unfinished
        lock, verified      the writer at work; what `verify` has read and found good.  Not part of the content

A shard is filled in memory, written to a temporary file, synced, renamed, and then listed in index.json, which is
itself replaced atomically.  A writer that was killed goes on after the last listed shard.  All that is computed,
statistics too, is computed in blocks that follow from the shapes alone, not from how the states were handed over: the
finished folder is, byte for byte, that of an uninterrupted run.

Statistics are over valid tokens without position 0, where large models put a huge activation (attention sink), and the
variance has a floor.  Another key is another folder, so nothing is reused silently.  Left out on purpose: compression
(bfloat16 states hardly compress) and several writers on one cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int

from jdllm.data.shards import (
    REBUILD,
    blocks_of,
    merge,
    read_json,
    size_of,
    statistics_of,
    sums_name,
    take_lock,
    to_json,
    to_npy,
    total_statistics,
    windows_per_shard,
    write,
    write_shard,
)  # fmt: skip
from jdllm.data.text import DataError
from jdllm.data.windows import Windows

FORMAT = 1
CacheKey = dict[str, Any]
Batch = dict[str, np.ndarray]


def make_key(encoder: Mapping[str, str], *, tokenizer: str, layer: int, data: str, t: int) -> CacheKey:
    """The key of a cache: the encoder's identity, tokenizer hash, layer, hash of the windows, tokens in a window."""
    return {"encoder": dict(encoder), "tokenizer": tokenizer, "layer": layer, "data": data, "t": t}


def key_hash(key: Mapping[str, Any]) -> str:
    """sha256 of the key as sorted JSON."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def cache_path(root: str | Path, key: Mapping[str, Any]) -> Path:
    """The folder of the cache with that key."""
    return Path(root) / key_hash(key)[:16]


class CacheWriter:
    """Writes one cache, windows in order; `position` is the next window that it wants.

        with CacheWriter(root, key, windows, hidden_dim) as writer:
            while writer.position < len(windows):
                writer.append(hidden_states_from(writer.position))
            path = writer.finish()

    On a finished cache `complete` is true, `position` is len(windows) and `finish` returns at once.  Shards are written
    in the background; what fails there (no space left) is raised by the next `append` or by `finish`.  Leaving the
    `with` early keeps every full shard.  For one thread at a time.
    """

    def __init__(
        self, root: str | Path, key: CacheKey, windows: Windows, hidden_dim: int, *, shard_bytes: int | None = None
    ) -> None:
        self.path, self.key, self.complete, self.position = cache_path(root, key), key, False, 0
        self._windows, self._shape = windows, (*windows.ids.shape, hidden_dim)
        self._pending: list[tuple[int, np.ndarray, list[concurrent.futures.Future]]] = []
        self._buffer: np.ndarray | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock: int | None = None
        self._failure: Exception | None = None
        if not len(windows) or windows.lengths.min() < 2:
            raise DataError("a cache needs windows of at least two tokens, and has none; give more text with --data")
        with self._disk_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / "DONE").exists():
                self._lock = take_lock(self.path)
            try:
                self._begin(shard_bytes)
            except BaseException:
                self.close()
                raise

    def append(self, hidden: np.ndarray) -> None:
        """Add the hidden states (m, t, d_h), ml_dtypes.bfloat16, of the next m windows; DataError as said above."""
        n, t, d = self._shape
        if hidden.dtype != ml_dtypes.bfloat16 or hidden.shape[1:] != (t, d) or self.position + len(hidden) > n:
            raise ValueError(
                f"append takes at most ({n - self.position}, {t}, {d}) bfloat16 at window {self.position} of {n}, "
                f"not {hidden.shape} {hidden.dtype}"
            )
        self._raise_failure()
        words = hidden.view(np.uint16)
        while len(words):
            if self._buffer is None:
                self._buffer = self._next_buffer()
            at = self.position % self._index["windows_per_shard"]
            count = min(len(words), len(self._buffer) - at)
            self._buffer[at : at + count] = words[:count]
            self.position += count
            words = words[count:]
            if at + count == len(self._buffer) or self.position == n:
                self._submit(self._buffer[: at + count])

    def finish(self) -> Path:
        """Complete the cache and return its folder."""
        if not self.complete:
            self._raise_failure()
            if self.position != len(self._windows) or self._pool is None:
                raise ValueError(
                    f"only {self.position} of {len(self._windows)} windows were appended, or the writer is closed"
                )
            with self._disk_errors():
                while self._pending:
                    self._collect()
                write(self.path / "stats.json", to_json(total_statistics(self.path, self._index["shards"])))
                write(self.path / "DONE", b"")
            self.complete = True
        self.close()
        return self.path

    def close(self) -> None:
        """Write out what is under way and release the lock; what is in no full shard is dropped."""
        with contextlib.suppress(DataError):  # it has been raised already, or another error is on its way up
            while self._pending:
                with self._disk_errors():
                    self._collect()
        if self._pool is not None:
            self._pool.shutdown()
        if self._lock is not None:
            (self.path / "lock").unlink(missing_ok=True)
            os.close(self._lock)
        self._pool = self._lock = self._buffer = None

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, shard_bytes: int | None) -> None:
        """Start a folder, or find the last good shard of one that was left unfinished."""
        if (self.path / "key.json").exists():
            _compare_keys(self.path, read_json(self.path, "key.json"), self.key)
        else:
            write(self.path / "key.json", to_json(self.key))
        if (self.path / "DONE").exists():
            self.complete, self.position = True, len(self._windows)
            return
        n, t, d = self._shape
        for left_over in self.path.glob("*.tmp"):
            left_over.unlink()
        arrays = {"ids.npy": self._windows.ids, "lengths.npy": self._windows.lengths}
        files = {name: to_npy(array.astype(np.int32)) for name, array in arrays.items()}
        fresh = {
            "format": FORMAT,
            "shape": [n, t, d],
            "windows_per_shard": windows_per_shard(n, 2 * t * d, shard_bytes),
            "files": {name: {"bytes": len(data), "crc32": zlib.crc32(data)} for name, data in files.items()},
            "shards": [],
        }
        if (self.path / "index.json").exists():
            self._index = read_json(self.path, "index.json")
            for field in ("format", "shape", "files"):
                if self._index.get(field) != fresh[field]:
                    raise DataError(
                        f"the unfinished cache {self.path} was begun with other windows ({field}: {self._index.get(field)} "
                        f"instead of {fresh[field]}); {REBUILD.format(self.path)}"
                    )
        else:
            for name, data in files.items():
                write(self.path / name, data)
            self._index = fresh
            write(self.path / "index.json", to_json(fresh))
        good = [
            size_of(self.path / shard["name"]) == shard["bytes"] and (self.path / sums_name(shard["name"])).exists()
            for shard in self._index["shards"]
        ]
        del self._index["shards"][(good + [False]).index(False) :]
        self.position = sum(shard["windows"] for shard in self._index["shards"])
        needed, free = (n - self.position) * t * d * 2, shutil.disk_usage(self.path).free
        if needed > free:
            raise DataError(
                _no_space(self.path, f"it needs {needed / 1e9:.3g} GB more and {free / 1e9:.3g} GB are free")
            )
        self._threads = min(8, os.cpu_count() or 1)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads + 1, "cache")

    def _next_buffer(self) -> np.ndarray:
        """Memory for one shard; at most two more are being written meanwhile."""
        if len(self._pending) < 2:
            n, t, d = self._shape
            return np.empty((min(self._index["windows_per_shard"], n), t, d), np.uint16)
        with self._disk_errors():
            return self._collect()

    def _submit(self, words: np.ndarray) -> None:
        """Hand a full shard to the background: one thread writes, the others compute statistics."""
        if self._pool is None:
            raise ValueError("this CacheWriter is closed")
        number = len(self._index["shards"]) + len(self._pending)
        first = number * self._index["windows_per_shard"]
        lengths = self._windows.lengths[first : first + len(words)]
        futures = [self._pool.submit(write_shard, self.path / f"shard-{number:05d}.bf16", words)]
        blocks = blocks_of(*words.shape)
        for part in range(self._threads):
            futures.append(self._pool.submit(statistics_of, words, lengths, blocks[part :: self._threads], first))
        self._pending.append((number, self._buffer, futures))
        self._buffer = None

    def _collect(self) -> np.ndarray:
        """Wait for the oldest shard under way, list it in the index, and give its buffer back.

        An interrupt in here leaves the shard pending, and `close` collects it again.
        """
        number, buffer, futures = self._pending[0]
        concurrent.futures.wait(futures)
        try:
            entry = futures[0].result()
            blocks = sorted(block for future in futures[1:] for block in future.result())
            count, mean, deviation = merge(*list(zip(*blocks))[1:])
            write(self.path / sums_name(entry["name"]), to_npy(np.stack([mean, deviation])))
            windows = entry["bytes"] // (2 * self._shape[1] * self._shape[2])
            self._index["shards"][number:] = [{**entry, "windows": windows, "counted": int(count)}]
            write(self.path / "index.json", to_json(self._index))
        except (OSError, DataError) as error:
            self._failure = error
            self._discard_pending()
            raise
        del self._pending[0]
        return buffer

    def _discard_pending(self) -> None:
        """A shard after a missing one is worth nothing: stop those under way and remove what they wrote."""
        for number, _, futures in self._pending:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            (self.path / f"shard-{number:05d}.bf16").unlink(missing_ok=True)
        self._pending.clear()

    def _raise_failure(self) -> None:
        """What went wrong once makes every later call fail too: the windows after it have nowhere to go."""
        if self._failure is not None:
            with self._disk_errors():
                raise self._failure

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn what the operating system says into a sentence."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                done = sum(shard["bytes"] for shard in getattr(self, "_index", {"shards": []})["shards"])
                raise DataError(_no_space(self.path, f"{done / 1e9:.3g} GB of finished shards stay")) from error
            raise DataError(
                f"the cache {self.path} cannot be written ({error}); set feed.cache_dir to a folder that can"
            ) from error


class HiddenStateCache:
    """A finished cache, memory-mapped: `cache[i]` is one window, `cache.gather(indices)` a batch.

    mean, std: (d_h,) float32 over valid tokens without position 0; std is at least 0.01.  ids (n, t) and lengths (n,)
    are there without a batch too.  Threads may share it.
    """

    def __init__(self, path: Path, key: CacheKey, index: Mapping[str, Any], statistics: Mapping[str, Any]) -> None:
        """Map the files of a folder that `open` has looked through."""
        self.path, self.key, self.hash = path, key, key_hash(key)
        self._windows_per_shard = index["windows_per_shard"]
        _, self.num_tokens, self.hidden_dim = index["shape"]
        self.mean: Float[np.ndarray, " d_h"] = np.array(statistics["mean"], np.float32)
        self.std: Float[np.ndarray, " d_h"] = np.array(statistics["std"], np.float32)
        self.ids: Int[np.ndarray, "n t"] = np.load(path / "ids.npy", mmap_mode="r")
        self.lengths: Int[np.ndarray, " n"] = np.load(path / "lengths.npy")
        self._shards = [
            np.memmap(path / shard["name"], np.uint16, "r", shape=(shard["windows"], self.num_tokens, self.hidden_dim))
            for shard in index["shards"]
        ]

    @classmethod
    def open(cls, path: str | Path, expect: CacheKey | None = None, *, verify: bool = False) -> HiddenStateCache:
        """Open the folder of a finished cache.

        expect: the key that it must have.  verify: read everything and compare checksums, once for each state of the
        files.  DataError when the folder is no finished cache, has another key, or has lost something.
        """
        path = Path(path)
        if not (path / "key.json").exists():
            raise DataError(
                f"{path} is not a hidden-state cache (it has no key.json); run the training command, which makes one"
            )
        key = read_json(path, "key.json")
        if expect is not None:
            _compare_keys(path, key, expect)
        if not (path / "DONE").exists():
            raise DataError(
                f"the cache {path} is unfinished; run the command that was making it again, it goes on where it stopped"
            )
        index, statistics = read_json(path, "index.json"), read_json(path, "stats.json")
        if index.get("format") != FORMAT:
            raise DataError(f"the cache {path} has format {index.get('format')}, not {FORMAT}; {REBUILD.format(path)}")
        files = {**index["files"], **{shard["name"]: shard for shard in index["shards"]}}
        for name, entry in files.items():
            size = size_of(path / name)
            if size != entry["bytes"]:
                what = "is missing" if size is None else f"has {size} bytes instead of {entry['bytes']}"
                raise DataError(f"{name} of the cache {path} {what}; {REBUILD.format(path)}")
        if verify:
            _verify(path, files)
        return cls(path, key, index, statistics)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Batch:
        """One window: hidden (t, d_h) bfloat16, ids (t,) int32, lengths () int32."""
        return {name: values[0] for name, values in self.gather([i]).items()}

    def gather(self, indices: Sequence[int] | Int[np.ndarray, " b"]) -> Batch:
        """A batch: hidden (b, t, d_h) bfloat16 as the encoder gave it, ids (b, t) int32, lengths (b,) int32."""
        rows = np.asarray(indices, np.int64)
        if len(rows) and not (0 <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"windows {rows.min()} to {rows.max()} asked of a cache with {len(self)}")
        words = np.empty((len(rows), self.num_tokens, self.hidden_dim), np.uint16)
        for to, (shard, at) in enumerate(zip(*(part.tolist() for part in np.divmod(rows, self._windows_per_shard)))):
            words[to] = self._shards[shard][at]
        return {"hidden": words.view(ml_dtypes.bfloat16), "ids": self.ids[rows], "lengths": self.lengths[rows]}


def _verify(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every checksum, unless `verified` says that these very files were compared before."""
    state = {name: [(path / name).stat().st_size, (path / name).stat().st_mtime_ns] for name in files}
    if (path / "verified").exists() and read_json(path, "verified") == state:
        return

    def checksum(name: str) -> int:
        value = 0
        with open(path / name, "rb") as file:
            while chunk := file.read(2**24):
                value = zlib.crc32(chunk, value)
        return value

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, value in zip(files, pool.map(checksum, files)):
            if value != files[name]["crc32"]:
                raise DataError(f"{name} of the cache {path} has changed since it was written; {REBUILD.format(path)}")
    with contextlib.suppress(OSError):  # a cache in a read-only folder is verified each time
        write(path / "verified", to_json(state))


def _compare_keys(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """DataError that names each field in which two keys differ."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for name, value in values.items():
            pairs |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
        return pairs

    a, b = flat(found), flat(expected)
    different = [
        f"{name} is {a.get(name)!r}, not {b.get(name)!r}" for name in sorted(a | b) if a.get(name) != b.get(name)
    ]
    if different:
        raise DataError(
            f"the cache {path} belongs to something else: {'; '.join(different)}; "
            f"use the settings it was made with, or let the training command make another"
        )


def _no_space(path: Path, detail: str) -> str:
    return (
        f"no space left for the cache {path}: {detail}. Free some space, set feed.cache_dir to a larger disk, or lower "
        f"feed.max_tokens, and run the same command again, which goes on from there"
    )
