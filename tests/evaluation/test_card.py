"""nvidia-smi, played by a script: other jobs, samples, reasons for low clocks."""

import os
import time

import pytest

from jdllm.evaluation import card


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """nvidia_smi(lines): what the program of that name prints from now on."""

    def play(text):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return play


def test_without_nvidia_smi_there_is_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert card.other_jobs() == []
    with card.Watch() as watch:
        pass
    assert watch.summary() == {"samples": 0, "complaint": None}


def test_other_jobs_are_all_but_this_process(nvidia_smi):
    nvidia_smi(f"{os.getpid()}, python, 500 MiB\n4242, train, 9000 MiB")
    assert card.other_jobs() == ["4242, train, 9000 MiB"]
    nvidia_smi("")
    assert card.other_jobs() == []


def test_samples_and_what_held_the_clocks_down(nvidia_smi):
    nvidia_smi("1980, 3201, 600.5, 61, 0x0000000000000004\n345, 3201, 90.0, 31, 0x0000000000000001")
    with card.Watch() as watch:
        for _ in range(100):
            if len(watch.samples) == 2:
                break
            time.sleep(0.05)
    assert watch.summary() == {
        "samples": 2, "sm_mhz": [345, 1980], "memory_mhz": [3201, 3201], "watts": [90.0, 600.5], "celsius": [31, 61],
        "throttled_by": ["power cap"],
    }  # fmt: skip
    assert watch.since(time.monotonic()) == [] and watch.since(0) == ["power cap"]


def test_a_complaint_of_nvidia_smi_is_kept(nvidia_smi):
    nvidia_smi('Field "clocks.sm" is not a valid field to query.')
    with card.Watch() as watch:
        for _ in range(100):
            if watch.complaint:
                break
            time.sleep(0.05)
    assert "not a valid field" in watch.summary()["complaint"]
