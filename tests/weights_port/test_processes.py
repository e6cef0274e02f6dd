"""Two processes fill one cache: the same bytes as one, whoever is killed on the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jdllm.config import ConfigError, preset
from jdllm.data.cache import HiddenStateCache
from jdllm.data.windows import Windows
from weights_port import extract, processes
from weights_port.checkpoints import EncoderError, open_checkpoint
from weights_port.encoder import load_encoder
from weights_port.tiny import EOS_ID

ROOT = Path(__file__).parents[2]
N, T = 230, 12


def make_windows(seed):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 256, (N, T)).astype(np.int32)
    lengths = generator.integers(2, T + 1, N).astype(np.int32)
    ids[np.arange(T)[None] >= lengths[:, None]] = EOS_ID
    return Windows(ids, lengths)


@pytest.fixture(scope="module")
def several():
    """Two processes with tiny-qwen3_5; tests use them up, in order."""
    with processes.start(open_checkpoint("tiny-qwen3_5"), 2, "tiny-qwen3_5", "cpu", layer=-3) as encoder:
        yield encoder


@pytest.fixture(scope="module")
def one():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # as many as each of two processes uses
    yield load_encoder("tiny-qwen3_5", device="cpu")
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr("jdllm.data.cache.windows_per_shard", lambda n, size, wanted: 25)


def fill(encoder, windows, root):
    return extract.extract_to_cache(encoder, windows, root, batch_tokens=48, data_hash=windows.hash, progress=False)


def contents(path):
    names = sorted(file.name for file in path.iterdir() if file.name not in ("lock", "verified"))
    return {name: (path / name).read_bytes() for name in names}


def kill_at(monkeypatch, encoder, tokens):
    """End the first process with signal 9 when so many tokens have come back."""
    seen = [0]

    def advance(count):
        seen[0] += count
        if seen[0] > tokens and seen[0] - count <= tokens:
            os.kill(encoder._workers[0].process.pid, signal.SIGKILL)

    monkeypatch.setattr(extract, "_unseen", advance)


def test_two_processes_make_the_cache_of_one(several, one, tmp_path):
    windows = make_windows(0)
    assert several.info == one.info and "2 processes, cpu" in several.where
    whole = fill(one, windows, tmp_path / "one")
    assert contents(fill(several, windows, tmp_path / "two")) == contents(whole)
    cache, other = HiddenStateCache.open(whole), HiddenStateCache.open(tmp_path / "two" / whole.name, verify=True)
    assert cache.hash == other.hash and len(cache) == N
    np.testing.assert_array_equal(cache.mean, other.mean)
    np.testing.assert_array_equal(cache.std, other.std)


def test_it_goes_on_where_one_process_was_interrupted(several, one, tmp_path, monkeypatch):
    windows = make_windows(1)
    calls, real = [], type(one).encode_torch

    def failing(self, ids, lengths):
        calls.append(1)
        if len(calls) > 25:
            raise KeyboardInterrupt
        return real(self, ids, lengths)

    with monkeypatch.context() as patch:
        patch.setattr(type(one), "encode_torch", failing)
        with pytest.raises(KeyboardInterrupt):
            fill(one, windows, tmp_path / "broken")
    tokens = []
    monkeypatch.setattr(extract, "_unseen", tokens.append)
    assert contents(fill(several, windows, tmp_path / "broken")) == contents(fill(one, windows, tmp_path / "whole"))
    assert 0 < sum(tokens[:-1]) < 2 * windows.lengths.sum() and tokens


def test_kill_9_of_one_leaves_its_work_to_the_other(several, one, tmp_path, monkeypatch, capsys):
    windows = make_windows(2)
    whole = contents(fill(one, windows, tmp_path / "one"))
    kill_at(monkeypatch, several, 300)
    assert contents(fill(several, windows, tmp_path / "two")) == whole
    assert "the process on cpu died (signal 9); 1 left, which do its work" in capsys.readouterr().err


def test_kill_9_of_the_last_keeps_what_is_written(several, one, tmp_path, monkeypatch):
    windows = make_windows(3)
    with monkeypatch.context() as patch:
        kill_at(patch, several, 500)
        with pytest.raises(
            EncoderError, match=r"the last encoder process, on cpu, died \(signal 9\); run the same command"
        ):
            fill(several, windows, tmp_path / "broken")
    (broken,) = (tmp_path / "broken").iterdir()
    assert (broken / "shard-00000.bf16").exists() and not (broken / "DONE").exists()
    assert contents(fill(one, windows, tmp_path / "broken")) == contents(fill(one, windows, tmp_path / "whole"))


def test_kill_9_of_the_writer_ends_the_others():
    program = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import time, types
from weights_port.encoder import EncoderInfo
from weights_port.processes import EncoderProcesses
if __name__ == "__main__":
    encoder = types.SimpleNamespace(info=EncoderInfo("stand-in", 8, 9, 1, 10, 1, 2, {{}}))
    several = EncoderProcesses(types.SimpleNamespace(tokenizer_json=""), {{"cpu": encoder}}.get, ["cpu", "cpu"])
    print(*[worker.process.pid for worker in several._workers], flush=True)
    time.sleep(60)
"""
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in writer.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    writer.kill()
    writer.wait()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_that_cannot_be_had_get_a_sentence(monkeypatch):
    assert processes.devices_for("cpu", 3) == ["cpu"] * 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert processes.devices_for("auto", 3) == processes.devices_for("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(EncoderError, match="feed.encoder_processes=5, but PyTorch sees 4 GPUs"):
        processes.devices_for("auto", 5)
    with pytest.raises(EncoderError, match="not cuda:1"):
        processes.devices_for("cuda:1", 2)
    for changes in ({"feed__feed": "online"}, {"feed__encoder_device": "spread"}):
        with pytest.raises(ConfigError, match="feed.encoder_processes=2 fill a cache"):
            preset("smoke").replace(feed__encoder_processes=2, **changes)
