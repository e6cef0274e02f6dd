"""The loader shows every window once an epoch, in an order that follows from the seed, and resumes exactly."""

import itertools
import json
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from jdllm.data.cache import CacheWriter, HiddenStateCache
from jdllm.data.loader import BatchLoader
from jdllm.data.text import DataError
from jdllm.data.windows import Windows


def make_cache(root, n, key="x"):
    """Window i holds i everywhere."""
    value = np.arange(n)
    windows = Windows(np.tile(value[:, None], 4).astype(np.int32), np.full(n, 4, np.int32))
    hidden = np.broadcast_to(value[:, None, None], (n, 4, 2)).astype(ml_dtypes.bfloat16)
    with CacheWriter(root, {"data": key}, windows, 2, shard_bytes=64) as writer:
        writer.append(hidden)
        return HiddenStateCache.open(writer.finish())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("cache"), 40)


def order(loader, batches):
    with loader:
        return [batch["ids"][:, 0].tolist() for batch in itertools.islice(loader, batches)]


@pytest.mark.parametrize("batch_size", [8, 7, 40])
def test_each_epoch_shows_every_window_once_in_a_new_order(cache, batch_size):
    batches = order(BatchLoader(cache, batch_size, 0), 25)
    assert all(len(batch) == batch_size for batch in batches)
    flat = sum(batches, [])
    epochs = [flat[i : i + 40] for i in range(0, len(flat) - 39, 40)]
    assert len(epochs) >= 4 and all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs) and list(range(40)) not in epochs


def test_the_seed_decides_the_order_and_prefetching_does_not(cache):
    reference = order(BatchLoader(cache, 8, 3, prefetch=1), 12)
    assert order(BatchLoader(cache, 8, 3, prefetch=8), 12) == reference
    other = order(BatchLoader(cache, 8, 4), 12)
    assert other[:5] != reference[:5] and other[:5] != reference[5:10]  # nor is a seed another's second epoch


def test_processes_share_the_batches_of_one(cache):
    whole = order(BatchLoader(cache, 8, 3), 12)
    halves = [order(BatchLoader(cache, 8, 3, own_rows=rows), 12) for rows in (slice(0, 4), slice(4, 8))]
    assert [one + two for one, two in zip(*halves)] == whole
    with BatchLoader(cache, 8, 3, own_rows=slice(4, 8)) as half, BatchLoader(cache, 8, 3) as alone:
        for _ in range(6):
            next(half)
        alone.set_state(half.get_state())  # the place in the data is the same, however many share it
        assert next(alone)["ids"][:, 0].tolist() == whole[6]


def test_a_cache_smaller_than_a_batch_repeats(tmp_path):
    batches = order(BatchLoader(make_cache(tmp_path, 3), 8, 0), 6)
    assert all(len(batch) == 8 for batch in batches)
    assert np.bincount(sum(batches, [])).tolist() == [16, 16, 16]


def test_fields_of_a_window_stay_together(cache):
    with BatchLoader(cache, 8, 0) as loader:
        batch = next(loader)
    assert batch["hidden"].dtype == ml_dtypes.bfloat16 and batch["hidden"].shape == (8, 4, 2)
    np.testing.assert_array_equal(batch["hidden"][:, :, 0].astype(np.int32), batch["ids"])
    np.testing.assert_array_equal(batch["lengths"], np.full(8, 4))


@pytest.mark.parametrize("before", [0, 1, 4, 5, 13])
def test_resumed_equals_continued(cache, before):
    reference = order(BatchLoader(cache, 8, 1), 20)
    with BatchLoader(cache, 8, 1) as loader:
        for _ in range(before):
            next(loader)
        state = json.loads(json.dumps(loader.get_state()))
    resumed = BatchLoader(cache, 8, 1, prefetch=2)
    next(resumed)  # prefetched batches are forgotten
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert order(resumed, 20 - before) == reference[before:]


def test_a_position_of_other_settings_is_refused(cache, tmp_path):
    with BatchLoader(cache, 8, 1) as loader:
        state = loader.get_state()
    others = {"batch_size": (cache, 4, 1), "seed": (cache, 8, 2), "cache": (make_cache(tmp_path, 40, "y"), 8, 1)}
    for name, arguments in others.items():
        with BatchLoader(*arguments) as other, pytest.raises(DataError, match=name):
            other.set_state(state)
    with pytest.raises(DataError, match="batch_size=0"):
        BatchLoader(cache, 0, 1)


def test_closing_frees_the_threads(cache):
    before = threading.active_count()
    loader = BatchLoader(cache, 8, 0, prefetch=4)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    loader.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
