"""What a hidden-state cache is made of: the layout and statistics of shards, files written whole or not at all, a lock.

Used by cache.py alone, whose docstring describes the folder.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int, UInt16

from jdllm.data.text import DataError

VARIANCE_FLOOR = 1e-4
SHARD_BYTES = 256 * 2**20
# An interrupted slow machine loses 1/32 of the work or 1 MB, and the shards of a huge cache can all be open at once.
_LEAST_SHARD_BYTES, _LEAST_SHARDS, _MOST_SHARDS = 2**20, 32, 512
# Elements of a block of statistics: 1 MB of float32, which stays in the processor's cache.
_BLOCK_ELEMENTS = 2**18
REBUILD = "delete that folder ({}) and run the same command again, which builds it anew"


def windows_per_shard(n: int, window_bytes: int, shard_bytes: int | None) -> int:
    """Windows in a shard, from the shapes alone."""
    wanted = max(_LEAST_SHARD_BYTES, -(-n * window_bytes // _LEAST_SHARDS))
    size = min(wanted, SHARD_BYTES) // window_bytes if shard_bytes is None else shard_bytes // window_bytes
    return max(1, size, -(-n // _MOST_SHARDS))


def write_shard(path: Path, words: UInt16[np.ndarray, "m t d_h"]) -> dict[str, Any]:
    """Write a shard and return its entry in the index."""
    data = memoryview(words).cast("B")
    checksum = zlib.crc32(data)
    write(path, data)
    return {"name": path.name, "bytes": len(data), "crc32": checksum}


def sums_name(shard: str) -> str:
    """The file with a shard's statistics."""
    return shard.replace(".bf16", ".npy")


def blocks_of(m: int, t: int, d: int) -> list[tuple[int, int]]:
    """Ranges of windows of a shard over which statistics are computed at a time."""
    size = max(1, _BLOCK_ELEMENTS // (t * d))
    return [(start, min(start + size, m)) for start in range(0, m, size)]


def statistics_of(
    words: UInt16[np.ndarray, "m t d_h"], lengths: Int[np.ndarray, " m"], blocks: list[tuple[int, int]], first: int
) -> list[tuple[int, int, Float64[np.ndarray, " d_h"], Float64[np.ndarray, " d_h"]]]:
    """(start, count, mean, sum of squared deviations) of each block; two passes, so a large mean costs no digits."""
    position, results = np.arange(words.shape[1]), []
    for start, stop in blocks:
        block = words[start:stop]
        if ((block & 0x7FFF) >= 0x7F80).any():  # exponent all ones
            raise DataError(
                f"the encoder gave NaN or infinite hidden states in windows {first + start} to {first + stop - 1}; "
                f"set feed.encoder_dtype=float32, or check the encoder's weights"
            )
        counted = (position >= 1) & (position < lengths[start:stop, None])
        x = (block[counted].astype(np.uint32) << 16).view(np.float32)
        mean = x.sum(0) / np.float32(len(x))
        x -= mean
        rest = x.sum(0).astype(np.float64)  # what rounding the mean to float32 left
        x *= x
        deviation = x.sum(0).astype(np.float64) - rest**2 / len(x)
        results.append((start, len(x), mean + rest / len(x), deviation))
    return results


def merge(
    counts: Sequence[int],
    means: Sequence[Float64[np.ndarray, " d_h"]],
    deviations: Sequence[Float64[np.ndarray, " d_h"]],
) -> tuple[float, Float64[np.ndarray, " d_h"], Float64[np.ndarray, " d_h"]]:
    """Join the statistics of disjoint sets (Chan, Golub and LeVeque 1983)."""
    weights, means = np.array(counts, np.float64)[:, None], np.stack(means)
    mean = (weights * means).sum(0) / weights.sum()
    return weights.sum(), mean, np.stack(deviations).sum(0) + (weights * (means - mean) ** 2).sum(0)


def total_statistics(path: Path, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """What stats.json holds."""
    sums = [np.load(path / sums_name(shard["name"])) for shard in shards]
    count, mean, deviation = merge([shard["counted"] for shard in shards], [s[0] for s in sums], [s[1] for s in sums])
    std = np.sqrt(np.maximum(deviation / count, VARIANCE_FLOOR))
    return {
        "counted_tokens": int(count), "windows": sum(shard["windows"] for shard in shards),
        "mean": mean.tolist(), "std": std.tolist(),
    }  # fmt: skip


def take_lock(path: Path) -> int:
    """Hold `lock` in the folder; the kernel lets go of it when the process dies, so it is never stale."""
    while True:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 64).decode(errors="replace").strip() or "?"
            os.close(lock)
            raise DataError(
                f"process {owner} is writing the cache {path} right now; wait until it is done, or end it, and run again"
            ) from None
        if size_of(path / "lock") is not None and os.path.samestat(os.fstat(lock), os.stat(path / "lock")):
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            return lock
        os.close(lock)  # the last owner removed it between our two steps


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with open(partial, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def to_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def to_npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((path / name).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{name} of the cache {path} cannot be read ({error}); {REBUILD.format(path)}") from None


def size_of(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None
