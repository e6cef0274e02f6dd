"""The table of timings: ratios between rows of one size, the fixed keys of the summary, what is said of missing rows."""

import dataclasses
import json

import pytest

from jdllm.evaluation import speed
from jdllm.evaluation.speed import NotRun, Row

ROW = Row(
    table="main", preset="smoke", steps=10, batch=1, latents=64, tokens=64, implementation="triton", weights="bf16",
    ms_median=2.0, ms_p90=2.5, repeats=50, bytes=10**9, flops=10**12, floor_fraction=0.5, peak_fraction=0.25, in_cache=False,
    quality="random weights",
)  # fmt: skip
ABOUT = {
    "device": "NVIDIA X", "backend": "gpu", "read_bandwidth_tb_s": 4.3, "matmul_tflop_s": 780.0, "matmul": "products",
    "commit": "abc", "command": "benchmark_generation.py", "date": "2026-12-01", "versions": ["jax 1"], "clocks": {"samples": 0},
    "compiled_side_by_side": 4, "torch_threads": 1,
}  # fmt: skip


def row(**changes):
    return dataclasses.replace(ROW, **changes)


def rows():
    return [
        row(implementation="xla", ms_median=4.0, equal_to_xla=None),
        row(equal_to_xla=0.995),
        row(weights="fp8", ms_median=1.0, projected_5090_ms=3.5),
        row(implementation="torch-eager", weights="fp32", ms_median=20.0),
        row(implementation="torch-graph", ms_median=4.4),
        row(steps=4, ms_median=1.5),
        row(table="batch", batch=2),
        row(table="batch", batch=4, ms_median=3.0),
    ]


def test_ratios_are_between_rows_of_one_size_only():
    full = speed.with_ratios(rows())
    names = ("ratio_torch_eager_fp32", "ratio_torch_graph", "ratio_xla")
    assert [full[1][name] for name in names] == pytest.approx([10.0, 2.2, 2.0])
    assert [full[2][name] for name in names] == pytest.approx([20.0, 4.4, 4.0])
    assert all(full[5][name] is None and full[6][name] is None for name in names)
    assert full[1]["tok_s"] == pytest.approx(32_000) and full[7]["tok_s"] == pytest.approx(4 * 64 / 3e-3)


def test_a_size_that_is_in_two_tables_is_compared_within_its_own():
    twice = [*rows(), row(table="steps", implementation="xla", ms_median=6.0), row(table="steps", ms_median=2.0)]
    assert speed.with_ratios(twice)[-1]["ratio_xla"] == pytest.approx(3.0)
    assert speed.with_ratios(twice)[1]["ratio_xla"] == pytest.approx(2.0)


def test_the_summary_has_exactly_the_keys_that_were_agreed(tmp_path):
    speed.write(tmp_path, ABOUT, rows(), [])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["device", "read_bandwidth_tb_s", "commit", "command", "rows"]
    assert list(summary["rows"][0]) == [
        "preset", "steps", "batch", "latents", "implementation", "weights", "ms_median", "ms_p90", "tok_s", "floor_fraction",
        "ratio_torch_eager_fp32", "ratio_torch_graph", "ratio_xla", "quality",
    ]  # fmt: skip
    details = json.loads((tmp_path / "details.json").read_text())
    assert details["matmul_tflop_s"] == 780.0 and details["rows"][2]["projected_5090_ms"] == 3.5


def test_the_page_labels_projections_cpu_timings_throttling_and_what_is_missing(tmp_path):
    missing = [NotRun("smoke", steps, 1, 64, "pallas", "bf16", "it needs a TPU") for steps in (4, 10)]
    speed.write(tmp_path, ABOUT, [*rows(), row(table="steps", throttled=("power cap",))], missing)
    page = (tmp_path / "README.md").read_text()
    assert "a projection, not a measurement" in page and "1.79 TB/s" in page and "CPU timings" not in page
    assert "2.000*" in page
    assert "* smoke, pallas (weights bf16; batch 1; latents 64; steps 4, 10): it needs a TPU" in page
    on_cpu = speed.markdown(ABOUT | {"backend": "cpu"}, speed.with_ratios(rows()[:1]), [])
    assert "**These are CPU timings.**" in on_cpu and "RTX 5090" not in on_cpu


def test_columns_that_nobody_measured_are_left_out():
    header = speed.table(speed.with_ratios(rows()[:1])).splitlines()[0]
    assert "vs XLA" in header and "cold start" not in header and "vs torch graph" not in header


def test_clocks_in_words():
    clocks = {
        "samples": 3,
        "sm_mhz": [345, 1980],
        "watts": [90, 600],
        "celsius": [30, 60],
        "throttled_by": ["power cap"],
    }
    assert "held down at times by: power cap" in speed.clock_line(clocks)
    assert "never held down" in speed.clock_line(clocks | {"throttled_by": []})
    assert speed.clock_line({"samples": 0, "complaint": "no such field"}) == "Clocks were not read (no such field)."


def test_quality_is_what_eval_found(tmp_path):
    assert speed.quality(None, 10) == "random weights"
    assert speed.quality(tmp_path, 10) == "not evaluated"
    figures = {"perplexity": 348.4, "entropy": 4.27}
    found = {
        "reconstruction": {"0": 0.966},
        "samples": {"10": {"samples": figures, "human": {"perplexity": 59.7, "entropy": 4.25}}},
    }
    (tmp_path / "eval.json").write_text(json.dumps(found))
    assert speed.quality(tmp_path, 10) == "reconstruction 96.6%, perplexity 348 (text 60), entropy 4.27 (text 4.25)"
    assert "samples of 4 steps not evaluated" in speed.quality(tmp_path, 4)


def test_plots_are_drawn_where_there_is_something_to_draw(tmp_path):
    drawn = speed.plot(tmp_path, ABOUT, rows())
    assert drawn == {"throughput_by_batch": True, "throughput_by_latents": False, "roofline": True}
    assert {path.name for path in tmp_path.iterdir()} == {"throughput_by_batch.png", "roofline.png"}
