"""Arithmetic of a step; waiting for data counts only while the devices have nothing else to do."""

import time

import pytest

from jdllm.config import preset
from jdllm.model.ldlm import Model
from jdllm.training.throughput import FeedClock, flops_per_window, forward_flops


class Busy:
    """The output of a step that ends at a moment to come."""

    def __init__(self, seconds):
        self.end = time.perf_counter() + seconds

    def block_until_ready(self):
        time.sleep(max(0.0, self.end - time.perf_counter()))


def loader(seconds):
    while True:
        time.sleep(seconds)
        yield "batch"


@pytest.mark.parametrize(
    ("batch", "step", "waited"), [(0.1, 0.0, 0.1), (0.1, 0.06, 0.04), (0.05, 0.2, 0.0), (0.0, 0.0, 0.0)]
)
def test_time_from_the_end_of_the_step_to_the_batch(batch, step, waited):
    clock, batches = FeedClock(), loader(batch)
    clock.take(batches)
    clock.waited = 0.0
    for _ in range(3):
        clock.started(Busy(step))
        assert clock.take(batches) == "batch"
        time.sleep(max(0.0, step - batch))  # until the devices are done, as reading metrics does
    clock.close()
    assert clock.waited == pytest.approx(3 * waited, abs=0.04)


def test_a_step_that_fails_is_heard_of():
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("out of memory")

    clock = FeedClock()
    clock.started(Broken())
    time.sleep(0.05)
    with pytest.raises(RuntimeError, match="out of memory"):
        clock.take(loader(0.0))
    clock.close()


def test_a_step_of_the_second_stage_is_the_encoder_forward_and_the_denoiser():
    model = Model(preset("smoke").replace(objective__self_conditioning=0.5))
    forward = forward_flops(model)
    whole, alone = flops_per_window(model), flops_per_window(model, denoiser_alone=True)
    assert whole == 3 * sum(forward.values()) + forward["denoiser"] / 2
    assert alone == forward["encoder"] + 3.5 * forward["denoiser"]
