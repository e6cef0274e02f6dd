"""Timing of calls, and that the ceilings are of the right size."""

import time

import pytest

from jdllm.evaluation import measure


def test_timing_is_of_the_calls_alone_after_a_warm_up():
    pauses = iter([0.2, 0.2] + [0.01] * 8 + [0.03] * 2)
    timing = measure.time_calls(lambda: time.sleep(next(pauses)), seconds=0.0, least=10)
    assert timing.repeats == 10 and 9 < timing.median < 20 and 25 < timing.p90 < 60


def test_repetitions_end_with_the_time_or_their_number():
    assert measure.time_calls(lambda: None, seconds=10.0, most=7).repeats == 7
    assert measure.time_calls(lambda: time.sleep(0.02), seconds=0.1, least=2).repeats < 8


@pytest.mark.parametrize(
    ("ceiling", "arguments", "low", "high"), [("read_bandwidth", 2**22, 1e8, 1e14), ("matmul_peak", 256, 1e8, 1e16)]
)
def test_ceilings_are_plausible(ceiling, arguments, low, high):
    assert low < getattr(measure, ceiling)(arguments) < high
