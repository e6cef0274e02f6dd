"""Extraction fills the cache with what the encoder gives, and a killed one ends up the same."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from jdllm.data.cache import HiddenStateCache, cache_path
from jdllm.data.windows import Windows
from weights_port.checkpoints import EncoderError
from weights_port.encoder import EncoderInfo, load_encoder
from weights_port.extract import cache_key, extract_to_cache
from weights_port.tiny import EOS_ID


def make_windows(n=90, t=16, seed=0):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 256, (n, t)).astype(np.int32)
    lengths = generator.integers(2, t + 1, n).astype(np.int32)
    lengths[::3] = t
    ids[np.arange(t)[None] >= lengths[:, None]] = EOS_ID
    return Windows(ids, lengths)


@pytest.fixture(scope="module")
def encoder():
    return load_encoder("tiny-qwen3_5", device="cpu")


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
def test_cache_holds_the_encoders_states(encoder, tmp_path, batch_tokens):
    windows = make_windows()
    path = extract_to_cache(
        encoder, windows, tmp_path, batch_tokens=batch_tokens, data_hash=windows.hash, progress=False
    )
    key = cache_key(encoder.info, windows.hash, 16)
    assert path == cache_path(tmp_path, key)
    batch = HiddenStateCache.open(path, expect=key, verify=True).gather(range(len(windows)))
    expected = encoder.encode(windows.ids, windows.lengths).astype(np.float32)
    # Other batches round differently in the last bit of bfloat16.
    np.testing.assert_allclose(batch["hidden"].astype(np.float32), expected, rtol=2**-7, atol=1e-6)
    padding = np.arange(16)[None] >= windows.lengths[:, None]
    assert (batch["hidden"][padding] == 0).all()


def test_finished_cache_is_not_computed_again(encoder, tmp_path, monkeypatch):
    windows = make_windows()
    first = extract_to_cache(encoder, windows, tmp_path, batch_tokens=64, data_hash=windows.hash, progress=False)
    monkeypatch.setattr(type(encoder), "encode_torch", lambda *args: pytest.fail("computed again"))
    assert extract_to_cache(encoder, windows, tmp_path, batch_tokens=64, data_hash=windows.hash) == first


def test_failure_in_the_middle_then_again_gives_the_same_bytes(encoder, tmp_path, monkeypatch):
    windows = make_windows(2400)  # about 5 MB: several shards
    arguments = dict(batch_tokens=320, data_hash=windows.hash, progress=False)
    whole = extract_to_cache(encoder, windows, tmp_path / "whole", **arguments)
    calls, real = [], type(encoder).encode_torch

    def failing(self, ids, lengths):
        calls.append(len(ids))
        if len(calls) == 70:
            raise KeyboardInterrupt
        return real(self, ids, lengths)

    with monkeypatch.context() as patch:
        patch.setattr(type(encoder), "encode_torch", failing)
        with pytest.raises(KeyboardInterrupt):
            extract_to_cache(encoder, windows, tmp_path / "broken", **arguments)
    calls.clear()
    monkeypatch.setattr(type(encoder), "encode_torch", lambda *a: calls.append(1) or real(*a))
    again = extract_to_cache(encoder, windows, tmp_path / "broken", **arguments)
    assert 0 < len(calls) < 120, "it did not go on from what was written"
    assert contents(again) == contents(whole)


class StandIn:
    """An encoder whose states are a function of the ids alone, so that a second process starts quickly."""

    device = torch.device("cpu")
    info = EncoderInfo("stand-in", 32, 260, EOS_ID, 512, 1, 2, {"name": "stand-in", "tokenizer": ""})

    def __init__(self, pause=0.0):
        self.pause = pause

    def encode_torch(self, ids, lengths):
        time.sleep(self.pause)
        states = torch.from_numpy(np.sin(ids[:, :, None] * (1.0 + np.arange(32)))).to(torch.bfloat16)
        return states.masked_fill(torch.from_numpy(np.arange(ids.shape[1])[None] >= lengths[:, None])[:, :, None], 0)


def extract_slowly(root):
    """What the process that is killed runs."""
    windows = make_windows(4800)
    extract_to_cache(StandIn(0.02), windows, root, batch_tokens=320, data_hash=windows.hash, progress=False)


def test_kill_9_in_the_middle_then_again_gives_the_same_bytes(tmp_path):
    windows = make_windows(4800)
    arguments = dict(batch_tokens=320, data_hash=windows.hash, progress=False)
    whole = extract_to_cache(StandIn(), windows, tmp_path / "whole", **arguments)
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    program = f"import sys; sys.path[:0] = {folders}; import test_extract as t; t.extract_slowly(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "killed")])
    unfinished = cache_path(tmp_path / "killed", cache_key(StandIn.info, windows.hash, 16))
    deadline = time.monotonic() + 60
    while not list(unfinished.glob("shard-00001.bf16")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert (unfinished / "shard-00000.bf16").exists() and not (unfinished / "DONE").exists()
    again = extract_to_cache(StandIn(), windows, tmp_path / "killed", **arguments)
    assert contents(again) == contents(whole)


def test_writers_error_reaches_the_caller(encoder, tmp_path, monkeypatch):
    def full(self, hidden):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jdllm.data.cache.CacheWriter.append", full)
    windows = make_windows()
    with pytest.raises(OSError, match="No space left"):
        extract_to_cache(encoder, windows, tmp_path, batch_tokens=16, data_hash=windows.hash, progress=False)


def test_window_over_the_encoders_limit_gets_a_sentence(encoder, tmp_path):
    windows = make_windows(2, 513)
    with pytest.raises(EncoderError, match="num_tokens=513 is over the 512 tokens"):
        extract_to_cache(encoder, windows, tmp_path, batch_tokens=64, data_hash=windows.hash)


def test_progress_says_tokens_per_second_and_time_left(encoder, tmp_path, capsys):
    windows = make_windows()
    extract_to_cache(encoder, windows, tmp_path, batch_tokens=64, data_hash=windows.hash)
    total = f"{windows.lengths.sum():,}"
    assert f"{total} / {total} tokens" in (out := capsys.readouterr().out) and "tok/s, 0:00 left" in out


def contents(path):
    names = sorted(file.name for file in path.iterdir() if file.name not in ("lock", "verified"))
    return {name: (path / name).read_bytes() for name in names}
