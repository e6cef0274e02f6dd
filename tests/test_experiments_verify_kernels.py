"""experiments/verify_kernels.py: what it says when a launch is wrong or fails, in Triton's interpreter."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PATH = Path(__file__).parents[1] / "experiments" / "verify_kernels.py"
SPEC = importlib.util.spec_from_file_location("verify_kernels", PATH)
experiment = importlib.util.module_from_spec(SPEC)
sys.modules["verify_kernels"] = experiment
SPEC.loader.exec_module(experiment)

SMALL = experiment.shape(64, 16, depth=1, head_dim=32, ffn_multiple=2)
LAUNCH = experiment.fused.Launch(prefetch=0)


@pytest.mark.parametrize("wrong", ["hidden", None])
def test_the_first_wrong_array_is_named_with_its_place_and_its_writer(wrong):
    kind = "float32" if wrong else "bfloat16"  # where nothing is wrong, rounding does not count as wrong either
    bench = experiment.Bench(experiment.Case("small", SMALL, steps=1, dtype=kind), 0, 2, LAUNCH)
    if wrong:
        bench.tensors[3][0, 1] *= 2  # the second tile of the up product
    *programs, none, one = experiment.diagnose(bench, bench.reference())
    assert all("bit for bit the same" in finding for finding in programs) and len(programs) == 2
    assert none == "one step, 0 blocks: every array is right"
    if wrong:
        assert "hidden is wrong" in one and "columns 64 to 127, written by 1 of 2 programs: 1" in one
    else:
        assert one == "one step, 1 blocks: every array is right"


def test_a_case_that_raises_is_a_row_and_what_it_found_before_is_on_the_disk(tmp_path, monkeypatch, capsys):
    def breaks(*_):
        written = json.loads((tmp_path / "verify.json").read_text())["rows"][-1]
        assert written["error_poisoned"] > 0, "the error is recorded before the diagnosis begins"
        raise RuntimeError("no such thing\nand more")

    record = experiment.Record(tmp_path, "verify", {})
    monkeypatch.setattr(experiment, "diagnose", breaks)
    monkeypatch.setattr(experiment, "allowed", lambda *_: 0.0)
    experiment.check(experiment.Case("small", SMALL, steps=1, dtype="float32"), 0, 1, LAUNCH, record)
    assert record.failed == ["small"] and record.rows[-1]["failed"] == "no such thing"
    assert len(record.rows) == 1 and "Traceback" in capsys.readouterr().err
