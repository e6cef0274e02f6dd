"""The plan of experiments/frontier.py: what is measured for each kind of model, and in which order."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jdllm.generation.generator import OPTIONS

PATH = Path(__file__).parents[1] / "experiments" / "frontier.py"
SPEC = importlib.util.spec_from_file_location("frontier_experiment", PATH)
experiment = importlib.util.module_from_spec(SPEC)
sys.modules["frontier_experiment"] = experiment
SPEC.loader.exec_module(experiment)


@pytest.mark.parametrize("kind", OPTIONS)
def test_settings_are_options_of_their_kind_and_each_is_a_row_of_its_own(kind):
    plan = [setting for stage in experiment.stages(kind, [4, 16], 64) for setting in stage]
    assert all(set(setting) <= {*OPTIONS[kind], "steps"} for setting in plan)
    keys = [(experiment.way(s), s["steps"], s["temperature"]) for s in plan]
    assert len(keys) == len(set(keys))


def test_baselines_are_measured_at_as_many_steps_as_tokens():
    assert {s["steps"] for s in experiment.stages("autoregressive", [4, 16], 64)[0]} == {64}
    assert {s["steps"] for s in experiment.stages("masked", [4, 16, 100], 64)[0]} == {4, 16, 64}
    assert {s["steps"] for s in experiment.stages("ldlm", [4, 16, 100], 64)[0]} == {4, 16, 100}


def test_temperature_one_of_the_first_ways_comes_first():
    first, second, third = experiment.stages("ldlm", [4], 64)
    assert {s["temperature"] for s in first} == {1.0} and 1.0 not in {s["temperature"] for s in second}
    assert {s["sampler"] for s in first} == {s["sampler"] for s in second} == {"ddim", "sde", "dpmpp"}
    chosen = experiment.stages("ldlm", [4], 64, [0.9, 0.8])
    assert {s["temperature"] for s in chosen[0]} == {0.9} and {s["temperature"] for s in chosen[1]} == {0.8}
    assert any("guidance" in s for s in third) and any(s["sampler"] == "early_stop" for s in third)


def test_ways_are_named_in_words():
    assert experiment.way({"sampler": "ddim", "guidance": 0.5, "steps": 4, "temperature": 0.9}) == "ddim guidance=0.5"
    assert experiment.way({"steps": 64, "temperature": 0.9}) == "plain"


def test_one_timing_serves_what_costs_the_same():
    base = {"sampler": "ddim", "steps": 4, "temperature": 1.0}
    for same in ({"temperature": 0.5}, {"sampler": "early_stop"}, {"grid": "tau"}):
        assert experiment.cost({**base, **same}) == experiment.cost(base)
    for other in ({"steps": 8}, {"sampler": "sde"}, {"guidance": 1.0}):
        assert experiment.cost({**base, **other}) != experiment.cost(base)
