"""A cache gives back what was put in, survives kill -9 at any moment byte for byte, and is never reused for something else."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import zlib

import ml_dtypes
import numpy as np
import pytest

from jdllm.data import cache as module
from jdllm.data import shards
from jdllm.data.cache import CacheWriter, HiddenStateCache, cache_path, key_hash, make_key
from jdllm.data.text import DataError
from jdllm.data.windows import Windows

N, T, D = 41, 6, 8
SHARD = 5 * T * D * 2  # 9 shards, the last with a single window
KEY = make_key({"name": "tiny", "revision": "1"}, tokenizer="tok", layer=2, data="text", t=T)


def inputs(n=N, t=T, d=D):
    """Windows of all lengths and hidden states with a large mean, huge at position 0, zero at padding."""
    rng = np.random.default_rng(0)
    lengths = (2 + np.arange(n) % (t - 1)).astype(np.int32)
    ids = rng.integers(0, 100, (n, t)).astype(np.int32)
    hidden = 30.0 + rng.standard_normal((n, t, d)) * np.linspace(0.001, 3, d)
    hidden[:, 0] = 1e4
    hidden[np.arange(t) >= lengths[:, None]] = 0
    return Windows(ids, lengths), hidden.astype(ml_dtypes.bfloat16)


def fill(root, key=KEY, step=7, stop=N, shard_bytes=SHARD):
    """Append up to window `stop`; finish if that is all of them."""
    windows, hidden = inputs()
    with CacheWriter(root, key, windows, D, shard_bytes=shard_bytes) as writer:
        while writer.position < stop:
            writer.append(hidden[writer.position : min(writer.position + step, stop)])
        return writer.finish() if stop == N else writer.path


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name not in ("lock", "verified")}


def assert_whole(path):
    windows, hidden = inputs()
    batch = HiddenStateCache.open(path, KEY, verify=True).gather(np.arange(N))
    np.testing.assert_array_equal(batch["hidden"].view(np.uint16), hidden.view(np.uint16))
    np.testing.assert_array_equal(batch["ids"], windows.ids)
    np.testing.assert_array_equal(batch["lengths"], windows.lengths)


def test_what_was_written_is_read(tmp_path):
    windows, hidden = inputs()
    cache = HiddenStateCache.open(fill(tmp_path), KEY)
    assert_whole(cache.path)
    assert len(cache) == N and cache.key == KEY and cache.hash == key_hash(KEY)
    rows = [40, 3, 3, 17]
    batch = cache.gather(rows)
    assert {name: (value.dtype, value.shape) for name, value in batch.items()} == {
        "hidden": (ml_dtypes.bfloat16, (4, T, D)), "ids": (np.int32, (4, T)), "lengths": (np.int32, (4,)),
    }  # fmt: skip
    np.testing.assert_array_equal(batch["hidden"], hidden[rows])
    one = cache[17]
    np.testing.assert_array_equal(one["hidden"], hidden[17])
    np.testing.assert_array_equal(one["ids"], windows.ids[17])
    assert one["lengths"] == windows.lengths[17]
    for bad in (-1, N):
        with pytest.raises(IndexError):
            cache[bad]


def test_statistics_equal_float64_without_padding_and_position_0(tmp_path):
    windows, hidden = inputs()
    cache = HiddenStateCache.open(fill(tmp_path))
    counted = np.arange(T) < windows.lengths[:, None]
    counted[:, 0] = False
    rows = hidden.astype(np.float64)[counted]
    assert cache.mean.dtype == cache.std.dtype == np.float32
    np.testing.assert_allclose(cache.mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(cache.std, np.maximum(rows.std(0), 0.01), rtol=1e-5)
    assert cache.std[0] == np.float32(0.01)  # the first dimension hardly varies


@pytest.mark.parametrize("blocks", [1, 100])
def test_statistics_over_many_blocks(monkeypatch, blocks):
    rng = np.random.default_rng(1)
    hidden = (200 + rng.standard_normal((300, 20, 16))).astype(ml_dtypes.bfloat16)
    monkeypatch.setattr(shards, "_BLOCK_ELEMENTS", blocks * 20 * 16)
    lengths = np.full(300, 20)
    parts = shards.statistics_of(hidden.view(np.uint16), lengths, shards.blocks_of(300, 20, 16), 0)
    count, mean, deviation = shards.merge(*list(zip(*parts))[1:])
    rows = hidden[:, 1:].reshape(-1, 16).astype(np.float64)
    assert count == len(rows)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-7)
    np.testing.assert_allclose(deviation / count, rows.var(0), rtol=1e-5)


def test_bytes_do_not_depend_on_how_states_are_handed_over(tmp_path):
    reference = content(fill(tmp_path / "a", step=N))
    assert len([name for name in reference if name.endswith(".bf16")]) == 9 and "DONE" in reference
    for step in (1, 5, 16):
        assert content(fill(tmp_path / f"b{step}", step=step)) == reference


@pytest.mark.parametrize("stop", [0, 4, 5, 23, 40])
def test_an_interrupted_writer_goes_on_at_its_last_full_shard(tmp_path, stop):
    reference = content(fill(tmp_path / "a"))
    path = fill(tmp_path / "b", step=3, stop=stop)
    with pytest.raises(DataError, match="unfinished"):
        HiddenStateCache.open(path)
    windows, _ = inputs()
    with CacheWriter(tmp_path / "b", KEY, windows, D, shard_bytes=SHARD) as writer:
        assert writer.position == stop // 5 * 5 and not writer.complete
    assert content(fill(tmp_path / "b", step=4)) == reference


# Dies by SIGKILL at the n-th rename of a file, just before or just after it.
DYING = """
import itertools, os, signal, sys
sys.path[:0] = sys.argv[1:3]
import test_cache
calls, limit, after, replace = itertools.count(1), int(sys.argv[4]), sys.argv[5] == "after", os.replace
def dying(*paths):
    call = next(calls)  # of this thread: another one may rename, and count, while this one does
    if call == limit and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
    if call == limit and after:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = dying
test_cache.fill(sys.argv[3], step=2)
"""


@pytest.mark.parametrize("lives, moment", [([2, 5, 7], "before"), ([1, 6, 8], "after")])
def test_kill_9_and_resume_equals_uninterrupted(tmp_path, lives, moment):
    reference = content(fill(tmp_path / "a"))
    arguments = [os.path.dirname(__file__), os.getcwd(), str(tmp_path / "b")]
    for limit in lives:
        life = subprocess.run(
            [sys.executable, "-c", DYING, *arguments, str(limit), moment], capture_output=True, timeout=60
        )
        assert life.returncode == -signal.SIGKILL, life.stderr.decode()
        assert not (cache_path(tmp_path / "b", KEY) / "DONE").exists()
    path = fill(tmp_path / "b")
    assert content(path) == reference
    assert_whole(path)


SLOW = """
import sys, time
sys.path[:0] = sys.argv[1:3]
import test_cache
from jdllm.data.cache import CacheWriter
windows, hidden = test_cache.inputs()
with CacheWriter(sys.argv[3], test_cache.KEY, windows, test_cache.D, shard_bytes=test_cache.SHARD) as writer:
    for i in range(writer.position, len(hidden)):
        writer.append(hidden[i:i + 1])
        print(i, flush=True)
        time.sleep(0.02)
"""


def test_one_writer_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    arguments = [os.path.dirname(__file__), os.getcwd(), str(tmp_path / "b")]
    child = subprocess.Popen([sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        while child.stdout.readline().strip() != "13":
            assert child.poll() is None
        with pytest.raises(DataError, match=f"process {child.pid} is writing"):
            fill(tmp_path / "b")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    windows, _ = inputs()
    with CacheWriter(tmp_path / "b", KEY, windows, D, shard_bytes=SHARD) as writer:
        assert writer.position in (5, 10, 15)
    assert content(fill(tmp_path / "b")) == content(fill(tmp_path / "a"))


def test_a_finished_cache_is_not_written_again(tmp_path):
    path = fill(tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    windows, _ = inputs()
    with CacheWriter(tmp_path, KEY, windows, D) as writer:
        assert writer.complete and writer.position == N and writer.finish() == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before


OTHER_KEYS = [
    ("encoder.revision", {**KEY, "encoder": {"name": "tiny", "revision": "2"}}),
    ("encoder.dtype", {**KEY, "encoder": {**KEY["encoder"], "dtype": "bfloat16"}}),
    ("tokenizer", {**KEY, "tokenizer": "other"}),
    ("layer", {**KEY, "layer": 3}),
    ("data", {**KEY, "data": "other"}),
    ("t", {**KEY, "t": 7}),
]


@pytest.mark.parametrize("field, other", OTHER_KEYS)
def test_another_key_is_another_folder_and_opening_names_the_field(tmp_path, field, other):
    path = fill(tmp_path)
    assert cache_path(tmp_path, other) != path
    assert cache_path(tmp_path, dict(reversed(KEY.items()))) == path  # the order of fields says nothing
    with pytest.raises(DataError) as error:
        HiddenStateCache.open(path, other)
    named = str(error.value).split("something else: ")[1]
    assert named.startswith(f"{field} is ") and named.count(" is ") == 1


def test_other_windows_under_the_same_key_are_refused(tmp_path):
    fill(tmp_path, stop=20)
    windows, _ = inputs()
    other = Windows(windows.ids + 1, windows.lengths)
    with pytest.raises(DataError, match="other windows"):
        CacheWriter(tmp_path, KEY, other, D, shard_bytes=SHARD)
    with pytest.raises(DataError, match="other windows"):
        CacheWriter(tmp_path, KEY, windows, D + 1, shard_bytes=SHARD)
    fill(tmp_path)  # the refusals broke nothing and hold no lock


def damage(path, name, how):
    file = path / name
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[:-3])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["shard-00003.bf16", "ids.npy", "lengths.npy"])
@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, name, how):
    path = fill(tmp_path)
    HiddenStateCache.open(path, verify=True)
    damage(path, name, how)
    os.utime(path, None)
    with pytest.raises(DataError, match=f"{name} .*delete that folder"):
        HiddenStateCache.open(path, verify=how == "flipped")


@pytest.mark.parametrize("name", ["index.json", "stats.json", "key.json"])
def test_damaged_bookkeeping(tmp_path, name):
    path = fill(tmp_path)
    (path / name).write_text("{")
    with pytest.raises(DataError, match=f"{name} .*delete that folder"):
        HiddenStateCache.open(path)


def test_verification_is_remembered_for_the_very_files(tmp_path, monkeypatch):
    path = fill(tmp_path)
    HiddenStateCache.open(path, verify=True)
    monkeypatch.setattr(zlib, "crc32", lambda *_: pytest.fail("read again"))
    HiddenStateCache.open(path, verify=True)


def test_a_cut_off_shard_of_an_unfinished_cache_is_made_again(tmp_path):
    path = fill(tmp_path / "b", stop=30)
    damage(path, "shard-00002.bf16", "cut")
    windows, _ = inputs()
    with CacheWriter(tmp_path / "b", KEY, windows, D, shard_bytes=SHARD) as writer:
        assert writer.position == 10
    assert content(fill(tmp_path / "b")) == content(fill(tmp_path / "a"))


def test_no_space_for_what_is_missing_is_said_at_once(tmp_path, monkeypatch):
    fill(tmp_path, stop=20)
    usage = module.shutil.disk_usage(tmp_path)._replace(free=(N - 20) * T * D * 2 - 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match="no space left .*feed.cache_dir"):
        fill(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=usage.free + 1))
    fill(tmp_path)


def test_a_full_disk_keeps_finished_shards(tmp_path, monkeypatch):
    real = module.write_shard

    def full(path, words):
        if path.name == "shard-00004.bf16":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, words)

    monkeypatch.setattr(module, "write_shard", full)
    with pytest.raises(DataError, match="no space left .*run the same command again"):
        fill(tmp_path / "b")
    monkeypatch.undo()
    windows, _ = inputs()
    with CacheWriter(tmp_path / "b", KEY, windows, D, shard_bytes=SHARD) as writer:
        assert writer.position == 20
    assert content(fill(tmp_path / "b")) == content(fill(tmp_path / "a"))


def test_a_file_that_cannot_grow_leaves_no_rubbish(tmp_path):
    """The real thing: the kernel refuses to write (a limit on file size stands in for a full disk)."""
    windows, _ = inputs()
    hidden = np.ones((N, T, D * 100), ml_dtypes.bfloat16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CacheWriter(tmp_path, KEY, windows, D * 100, shard_bytes=SHARD * 100) as writer:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (SHARD * 50, hard))
            with pytest.raises(DataError, match="no space left"):
                writer.append(hidden)
                writer.finish()
            for again in (writer.finish, lambda: writer.append(hidden[:0])):
                with pytest.raises(DataError, match="no space left"):
                    again()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(writer.path.glob("*.tmp")) and not list(writer.path.glob("*.bf16"))


def test_nan_from_the_encoder_is_found(tmp_path):
    windows, hidden = inputs()
    hidden[17, 0, 3] = np.nan  # position 0 too, which is in no statistics
    with CacheWriter(tmp_path, KEY, windows, D, shard_bytes=SHARD) as writer:
        with pytest.raises(DataError, match="NaN or infinite hidden states in windows 15 to 19"):
            writer.append(hidden)
            writer.finish()


def test_wrong_use_is_refused(tmp_path):
    windows, hidden = inputs()
    with pytest.raises(DataError, match="at least two tokens"):
        CacheWriter(tmp_path, KEY, windows[:0], D)
    with CacheWriter(tmp_path, KEY, windows, D) as writer:
        for bad in (hidden.astype(np.float32), hidden[:, :3], np.concatenate([hidden, hidden])):
            with pytest.raises(ValueError, match="append takes"):
                writer.append(bad)
        writer.append(hidden[:7])
        with pytest.raises(ValueError, match="only 7 of 41"):
            writer.finish()
    with pytest.raises(DataError, match="not a hidden-state cache"):
        HiddenStateCache.open(tmp_path)
    with CacheWriter(tmp_path, KEY, windows, D) as writer:
        writer.append(hidden)
    with pytest.raises(ValueError, match="closed"):
        writer.finish()
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="cannot be written"):
        CacheWriter(tmp_path / "file", KEY, windows, D)


def test_shards_are_neither_too_few_nor_too_many():
    megabyte, window = 2**20, 128 * 576 * 2
    for n in (1, 8, 700, 10**4, 3 * 10**5, 10**7):
        size = shards.windows_per_shard(n, window, None)
        count = -(-n // size)
        assert size >= 1 and count <= 512
        if n * window > 64 * megabyte:
            assert count >= 32
        assert size * window <= 256 * megabyte or count > 256


@pytest.mark.parametrize("t, d", [(128, 576)])
def test_writing_and_reading_keep_up(tmp_path, t, d):
    """A tenth of the target of a 16-core machine, so that a Python loop per window or element cannot creep in unseen."""
    n = 1500
    hidden = np.ones((n, t, d), ml_dtypes.bfloat16)
    windows = Windows(np.zeros((n, t), np.int32), np.full(n, t, np.int32))
    start = time.perf_counter()
    with CacheWriter(tmp_path, KEY, windows, d) as writer:
        writer.append(hidden)
        path = writer.finish()
    written = time.perf_counter()
    cache = HiddenStateCache.open(path)
    for _ in range(4):
        cache.gather(np.arange(0, n, 6))
    assert hidden.nbytes / (written - start) > 50e6
    assert 4 * 250 * t * d * 2 / (time.perf_counter() - written) > 100e6
