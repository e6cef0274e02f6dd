"""The online feed gives what the encoder gives, in an order that follows from seed and position alone."""

import json
import threading
import time

import jax
import numpy as np
import pytest
import torch

from jdllm.data.text import DataError
from jdllm.data.windows import Windows
from jdllm.training.throughput import FeedClock
from weights_port.checkpoints import EncoderError
from weights_port.encoder import load_encoder
from weights_port.online import OnlineFeed
from weights_port.tiny import EOS_ID


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny-llama", device="cpu")


@pytest.fixture(scope="module")
def windows():
    ids = np.random.default_rng(0).integers(0, 256, (10, 8)).astype(np.int32)
    lengths = np.arange(10, dtype=np.int32) % 7 + 2
    ids[np.arange(8)[None] >= lengths[:, None]] = EOS_ID
    ids[:, 0] = np.arange(10)  # names the window
    return Windows(ids, lengths)


def take(feed, count):
    return [next(feed) for _ in range(count)]


def test_batches_are_the_encoders_states(encoder, windows):
    with OnlineFeed(encoder, windows, 4, seed=0) as feed:
        for batch in take(feed, 3):
            assert batch["hidden"].shape == (4, 8, 64) and batch["hidden"].dtype.name == "bfloat16"
            np.testing.assert_array_equal(batch["hidden"], encoder.encode(batch["ids"], batch["lengths"]))
            np.testing.assert_array_equal(batch["lengths"], windows.lengths[batch["ids"][:, 0]])


def test_processes_share_the_batches_of_one(encoder, windows):
    with OnlineFeed(encoder, windows, 4, seed=0) as whole:
        batches = take(whole, 3)
    for rows in (slice(0, 2), slice(2, 4)):
        with OnlineFeed(encoder, windows, 4, seed=0, own_rows=rows) as feed:
            for found, batch in zip(take(feed, 3), batches):
                np.testing.assert_array_equal(found["ids"], batch["ids"][rows])
                np.testing.assert_allclose(
                    found["hidden"].astype(np.float32), batch["hidden"][rows].astype(np.float32), rtol=2e-2, atol=1e-2
                )
            whole.set_state(feed.get_state())


def test_hidden_states_survive_dlpack_both_ways(encoder, windows):
    hidden = encoder.encode_torch(windows.ids[:4], windows.lengths[:4])
    array = jax.dlpack.from_dlpack(hidden)
    assert array.dtype == "bfloat16" and array.shape == (4, 8, 64)
    assert torch.equal(torch.from_dlpack(array), hidden)


@pytest.mark.parametrize(("step", "share"), [(0.01, 0.75), (0.12, 0.0)])
def test_share_of_time_waiting_for_a_slow_encoder(encoder, windows, monkeypatch, step, share):
    """An encoder of 40 ms: steps of 10 ms wait for 30 of 40, steps of 120 ms never."""
    real = type(encoder).encode_torch
    monkeypatch.setattr(type(encoder), "encode_torch", lambda *a: time.sleep(0.04) or real(*a))
    clock = FeedClock()
    with OnlineFeed(encoder, windows, 3, seed=0) as feed:
        for index in range(11):
            if index == 1:
                began, clock.waited = time.perf_counter(), 0.0
            clock.take(feed)
            time.sleep(step)
            clock.started(())
    clock.close()
    assert clock.waited / (time.perf_counter() - began) == pytest.approx(share, abs=0.2)


def test_every_epoch_shows_each_window_once_in_a_new_order(encoder, windows):
    with OnlineFeed(encoder, windows, 4, seed=0) as feed:
        seen = np.concatenate([batch["ids"][:, 0] for batch in take(feed, 5)]).reshape(2, 10)
    assert (np.sort(seen) == np.arange(10)).all() and (seen[0] != seen[1]).any()
    with OnlineFeed(encoder, windows, 4, seed=1) as feed:
        assert (np.concatenate([batch["ids"][:, 0] for batch in take(feed, 5)]) != seen.ravel()).any()


def test_position_round_trips_whatever_was_computed_ahead(encoder, windows):
    with OnlineFeed(encoder, windows, 3, seed=5, prefetch=4) as feed:
        take(feed, 2)
        state = json.loads(json.dumps(feed.get_state()))
        expected = take(feed, 4)
        feed.set_state(state)
        again = take(feed, 4)
    with OnlineFeed(encoder, windows, 3, seed=5) as other:
        other.set_state(state)
        fresh = take(other, 4)
    for one, two, three in zip(expected, again, fresh):
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
            np.testing.assert_array_equal(one[name], three[name])


def test_state_of_another_feed_is_refused(encoder, windows):
    feed = OnlineFeed(encoder, windows, 3, seed=5)
    for name, value in {"seed": 6, "batch_size": 4, "windows": "other"}.items():
        with pytest.raises(DataError, match=f"saved with {name}="):
            feed.set_state({**feed.get_state(), name: value})


def test_error_in_the_thread_reaches_the_consumer_and_nothing_is_skipped(encoder, windows, monkeypatch):
    real, calls = type(encoder).encode_torch, []

    def failing(self, ids, lengths):
        calls.append(ids)
        if len(calls) == 2:
            raise EncoderError("the GPU is gone")
        return real(self, ids, lengths)

    with OnlineFeed(encoder, windows, 3, seed=0) as feed:
        expected = [feed.rows(position) for position in range(2)]
        monkeypatch.setattr(type(encoder), "encode_torch", failing)
        first = next(feed)
        with pytest.raises(EncoderError, match="the GPU is gone"):
            next(feed)
        second = next(feed)
    for batch, rows in zip((first, second), expected):
        np.testing.assert_array_equal(batch["ids"][:, 0], rows)


def test_close_ends_the_thread_and_the_queue_is_bounded(encoder, windows, monkeypatch):
    real, calls = type(encoder).encode_torch, []
    monkeypatch.setattr(type(encoder), "encode_torch", lambda *a: calls.append(1) or real(*a))
    feed = OnlineFeed(encoder, windows, 3, seed=0, prefetch=2)
    next(feed)
    threading.Event().wait(0.5)
    assert 3 <= len(calls) <= 4  # taken, two waiting, one in hand
    feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "online-encoder"]


def test_window_over_the_limit_and_no_windows_are_sentences(encoder):
    long = Windows(np.zeros((1, 513), np.int32), np.array([513], np.int32))
    with pytest.raises(EncoderError, match="over the 512 tokens"):
        OnlineFeed(encoder, long, 1, seed=0)
    with pytest.raises(DataError, match="no windows"):
        OnlineFeed(encoder, Windows(np.zeros((0, 8), np.int32), np.zeros(0, np.int32)), 1, seed=0)
