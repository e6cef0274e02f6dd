"""The benchmark at toy size: rows, reasons of missing ones, baselines from outside, and the order of its plan."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jdllm.config import ConfigError, preset
from jdllm.evaluation import speed
from jdllm.evaluation.benchmark import Benchmark, Point, check
from jdllm.model.ldlm import Model
from jdllm.model.random_weights import random_weights

ABOUT = {
    "device": "CPU", "backend": "cpu", "read_bandwidth_tb_s": 0.01, "matmul_tflop_s": 0.1, "matmul": "products", "commit": "abc",
    "command": "x", "date": "2026-12-01", "versions": [], "clocks": {}, "compiled_side_by_side": 1, "torch_threads": 1, "l2_bytes": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(tiny):
    """Widths that int4 divides, but for the frozen head, whose model is 12 wide."""
    return tiny.replace(model__latent_dim=64, model__head_dim=32)


@pytest.fixture(scope="module")
def found(wide, tmp_path_factory):
    """One point with our implementations in two formats, a baseline that works and one that fails."""
    out = tmp_path_factory.mktemp("bench")

    def twin(config, weights, name, key, batch, *, dynamic):
        assert config == wide and weights[0]["denoiser"]["norm"]["gain"].shape == (64,) and not dynamic
        tokens = np.arange(batch * 8).reshape(batch, 8)
        return lambda steps: (lambda: None, tokens)

    def broken(*arguments, **options):
        raise RuntimeError("no card\nand a long trace")

    bench = Benchmark(
        dict(ABOUT), out, minutes=5, seconds=0.02, threads=1, baselines={"torch-eager": twin, "torch-graph": broken}
    )
    names = (
        ("xla", "fp32"),
        ("xla", "int4"),
        ("triton", "fp32"),
        speed.TORCH_EAGER,
        speed.TORCH_GRAPH,
    )
    bench.run([Point("main", wide, 2, (2, 3), names)])
    return bench


def test_rows_are_what_could_be_run(found):
    ran = [(row.implementation, row.weights, row.steps) for row in found.rows]
    assert ran == [(way, "fp32", steps) for way in ("xla", "torch-eager") for steps in (2, 3)]
    assert [row.cold_start_s is None for row in found.rows] == [False, True] * 2
    assert found.rows[2].equal_to_xla < 1 and found.rows[0].equal_to_xla is None
    assert all(0 < row.ms_median <= row.ms_p90 and row.repeats >= 5 for row in found.rows)


def test_every_missing_row_has_its_reason(found):
    reasons = {(m.implementation, m.weights): m.reason for m in found.missing}
    assert len(found.missing) == 6
    assert "multiple of 64, and one here has 12" in reasons["xla", "int4"]
    assert "triton cannot run here" in reasons["triton", "fp32"]
    assert reasons[speed.TORCH_GRAPH] == "RuntimeError: no card"


def test_everything_is_on_disk(found):
    summary = json.loads((found.out / "summary.json").read_text())
    assert len(summary["rows"]) == 4 and summary["rows"][0]["ratio_torch_eager_fp32"] > 0
    assert "CPU timings" in (found.out / "README.md").read_text()


def test_nothing_is_begun_when_the_time_is_over(wide, tmp_path):
    bench = Benchmark(dict(ABOUT), tmp_path, minutes=-1, seconds=0.1, threads=1, baselines={})
    bench.run([Point("main", wide, 1, (2, 4), (("xla", "fp32"),))])
    assert not bench.rows and {m.reason for m in bench.missing} == {"-1 minutes were over"}
    assert (tmp_path / "summary.json").is_file()


def test_weights_that_say_nothing_are_not_timed(wide):
    model = Model(wide)
    params, frozen = random_weights(model, 0, "float32")
    check(model, params, frozen, "float32")
    zeros = jax.tree.map(np.zeros_like, params)
    with pytest.raises(ConfigError, match="do not vary"):
        check(model, zeros, frozen, "float32")


# The experiment


@pytest.fixture(scope="module")
def experiment():
    path = Path(__file__).parents[2] / "experiments" / "benchmark_generation.py"
    spec = importlib.util.spec_from_file_location("benchmark_generation", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_answers_the_main_question_first_and_covers_the_sweeps(experiment):
    points = list(experiment.plan(experiment.Options(), "gpu"))
    first = points[0]
    assert first.config == preset("qwen3.6-35b-a3b") and first.steps == (4, 10) and first.batch == 1
    assert {("xla", "bf16"), ("triton", "fp8"), speed.TORCH_EAGER, speed.TORCH_GRAPH} <= set(first.names)
    ours = [point for point in points if ("xla", "bf16") in point.names]
    assert [p.batch for p in ours if p.table == "batch"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    latents = [p.config.model.num_latents for p in ours if p.table == "latents"]
    assert latents == [16, 32, 64, 128, 256, 512, 1024]
    assert [p.steps for p in ours if p.table == "steps"] == [(1, 2, 4, 8, 16, 32, 64)]
    main = {p.config.preset for p in ours if p.table == "main"}
    assert main == {p.config.preset for p in points if speed.TORCH_GRAPH in p.names and p.table == "main"}
    assert main == set(experiment.PRESETS["gpu"])


def test_on_a_cpu_small_presets_in_float32_and_no_graphs(experiment):
    points = list(experiment.plan(experiment.Options(sweeps=False), "cpu"))
    assert [p.config.preset for p in points] == ["quickstart", "books", "smoke"]
    assert all(("xla", "fp32") in p.names and speed.TORCH_GRAPH not in p.names for p in points)


def test_it_refuses_to_run_beside_another_job(experiment, monkeypatch, capsys):
    monkeypatch.setattr(experiment.card, "other_jobs", lambda: ["4242, train, 9000 MiB"])
    assert experiment.main([]) == 2
    assert "another job is on the card" in capsys.readouterr().err


def test_names_of_result_folders(experiment):
    names = [experiment.short_name(name) for name in ("NVIDIA H200", "NVIDIA GeForce RTX 5090", "CPU (2 cores)")]
    assert names == ["h200", "geforce-rtx-5090", "cpu"]
