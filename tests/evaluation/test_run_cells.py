"""Cells run once, go on after a kill, and are never dropped; with small programs in the place of training."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jdllm.config import ConfigError, preset
from jdllm.evaluation import cells
from jdllm.evaluation.run_cells import Job, Runner, last_figures, verdict

# Five steps, each noted in `steps` when done; SIGTERM ends it with 130 as Ctrl-C ends `jdllm train`.
TRAIN = """
import json, os, signal, sys, time
run, pause, ending = sys.argv[1:]
os.makedirs(run, exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
open(run + "/env", "w").write(" ".join(os.environ[k] for k in ("WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "JAX_COMPILATION_CACHE_DIR")))
done = os.path.exists(run + "/steps") and len(open(run + "/steps").read()) or 0
with open(run + "/metrics.jsonl", "a") as metrics:
    for step in range(done + 1, 6):
        time.sleep(float(pause))
        open(run + "/steps", "a").write(str(step))
        loss = "nan" if ending == "diverge" and step == 5 else 1.0
        metrics.write(json.dumps({"step": step, "kind": "train", "loss": loss, "gamma": 0.1}) + "\\n")
if ending == "diverge":
    sys.exit("error: step 5: loss became NaN or infinite.")
if ending == "collapse":
    print("error: step 5: latents hardly depend on their input any more", file=sys.stderr)
    sys.exit(2)
if ending == "crash":
    sys.exit("Traceback: out of memory")
"""
EVALUATE = """
import json, os, sys
run, perplexity = sys.argv[1:]
open(run + "/evaluated", "a").write("x")
figures = {"perplexity": float(perplexity), "entropy": 3.0, "mauve": 0.5, "repetition_4": 0.01}
human = {"perplexity": 50.0, "entropy": 3.0, "mauve": 0.9, "repetition_4": 0.0}
os.makedirs(run + "/samples", exist_ok=True)
open(run + "/samples/steps-4.txt", "w").write("--- 1 ---\\nfirst\\n--- 2 ---\\nsecond\\n")
samples = {"4": {"samples": figures, "human": human}}
found = {"samples": samples, "reconstruction": {"0": 0.9}, "minutes": 1.5, "scorer": "x", "scorer_is_encoder": True}
json.dump(found, open(run + "/eval.json", "w"))
"""


def job(name="full", seed=0):
    return Job(name, seed, "third", "5 steps", "what it asks", preset("smoke").replace(seed=seed))


def runner(folder, pause=0.0, endings=None, **options):
    """A runner whose training takes five pauses and ends as `endings` says by name of the cell."""

    def commands(job):
        run, python = str(folder / "runs" / job.run_name), [sys.executable, "-S", "-c"]
        ending = (endings or {}).get(job.name, "well")
        return [[*python, TRAIN, run, str(pause), ending], [*python, EVALUATE, run, str(100 + job.seed)]]

    return Runner(folder / "out", folder / "runs", {"title": "ablation-x", "text": "t"}, commands, **options)


def go(runner, jobs, same=lambda before, config: True):
    return runner.run(runner.open_jobs(jobs, same))


def traces(folder, name):
    """Steps done and evaluations made of a cell."""
    paths = [folder / "runs" / job(name).run_name / file for file in ("steps", "evaluated")]
    return [path.read_text() if path.exists() else "" for path in paths]


def test_a_finished_cell_never_runs_again(tmp_path):
    for _ in range(2):
        assert go(runner(tmp_path), [job("full"), job("other")]) == 0
    assert traces(tmp_path, "full") == traces(tmp_path, "other") == ["12345", "x"]
    (record, _) = cells.read(tmp_path / "out" / "cells.json")
    assert record["status"] == "done" and record["train"]["recon"] == 0.9 and record["gpu_minutes"] == 1.5
    assert record["samples"]["4"]["perplexity"] == 100 and record["texts"] == ["first\n", "second\n"]
    assert record["scorer_is_encoder"] and record["commit"] and record["command"]


def test_all_cells_share_a_group_and_a_compilation_cache(tmp_path):
    go(runner(tmp_path), [job("full"), job("other")])
    found = [(tmp_path / "runs" / job(name).run_name / "env").read_text().split() for name in ("full", "other")]
    compiled = str(tmp_path / "runs" / "compiled")
    assert found == [["ablation-x", "full", compiled], ["ablation-x", "other", compiled]]


def test_time_that_is_up_stops_a_cell_between_two_steps_and_the_next_call_goes_on(tmp_path, capsys):
    first = runner(tmp_path, pause=0.25, deadline=time.monotonic() + 0.7)
    assert go(first, [job("full"), job("other")]) == 0
    steps, evaluated = traces(tmp_path, "full")
    assert 1 <= len(steps) < 5 and not evaluated and traces(tmp_path, "other") == ["", ""]
    assert not (tmp_path / "out" / "cells.json").exists() and "2 cells are open" in capsys.readouterr().out
    assert go(runner(tmp_path), [job("full")]) == 0
    assert traces(tmp_path, "full") == ["12345", "x"], "no step twice, none left out"


def test_a_process_that_is_killed_fails_the_cell_which_then_goes_on_from_its_checkpoint(tmp_path):
    running = runner(tmp_path, pause=0.2)
    wait = running.wait

    def kill(process):
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGKILL)
        return wait(process)

    running.wait = kill
    assert go(running, [job("full")]) == 1
    (record,) = cells.read(tmp_path / "out" / "cells.json")
    assert record["status"] == "failed" and "-9" in record["reason"]
    assert go(runner(tmp_path), [job("full")]) == 0
    assert traces(tmp_path, "full") == ["12345", "x"]
    assert [r["status"] for r in cells.read(tmp_path / "out" / "cells.json")] == ["done"]


def test_when_the_runner_itself_is_killed_its_cell_is_not_run_twice_at_a_time(tmp_path, capsys):
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; import test_run_cells as t; "
        "t.go(t.runner(Path(sys.argv[1]), pause=0.5), [t.job()])"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    first = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), *paths])
    while not traces(tmp_path, "full")[0]:
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert go(runner(tmp_path), [job()]) == 0
    assert "still works on it" in capsys.readouterr().out
    while len(traces(tmp_path, "full")[0]) < 5 or go(runner(tmp_path), [job()]) or not traces(tmp_path, "full")[1]:
        time.sleep(0.1)
    assert traces(tmp_path, "full") == ["12345", "x"]


@pytest.mark.parametrize("ending, status", [("diverge", "diverged"), ("collapse", "collapsed")])
def test_a_cell_that_ends_itself_is_reported_with_its_reason_and_not_run_again(tmp_path, ending, status):
    for _ in range(2):
        assert go(runner(tmp_path, endings={"bad": ending}), [job("full"), job("bad")]) == 0
    assert traces(tmp_path, "bad") == ["12345", ""]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    (row,) = [row for row in summary if row["name"] == "bad"]
    assert row["status"] == status and row["reason"].startswith("step 5:") and row["gen_ppl"] is None
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"| `bad` | 1 {status} |" in readme and "step 5:" in readme


def test_a_crash_is_no_result_and_is_tried_again(tmp_path):
    assert go(runner(tmp_path, endings={"bad": "crash"}), [job("bad"), job("full")]) == 1
    assert "out of memory" in (tmp_path / "out" / "README.md").read_text()
    assert go(runner(tmp_path), [job("bad"), job("full")]) == 0
    assert traces(tmp_path, "full") == ["12345", "x"] and traces(tmp_path, "bad")[1] == "x"


def test_cells_run_side_by_side(tmp_path):
    jobs = [job("full", seed) for seed in range(3)]
    assert go(runner(tmp_path, pause=0.1, side_by_side=3), jobs) == 0
    records = cells.read(tmp_path / "out" / "cells.json")
    assert sorted(r["seed"] for r in records) == [0, 1, 2] and {r["side_by_side"] for r in records} == {3}


def test_results_of_another_recipe_are_not_taken_for_this_one(tmp_path):
    go(runner(tmp_path), [job()])
    with pytest.raises(ConfigError, match="another recipe"):
        go(runner(tmp_path), [job()], same=lambda before, config: False)


def test_verdict_reads_the_record_before_the_exit_code():
    nan = [{"step": 7, "kind": "train", "loss": math.nan}]
    assert verdict(nan, 2, "")[0] == "diverged" and "loss" in verdict(nan, 2, "")[1]
    assert verdict([], 0, "") == ("done", None)
    assert verdict([], 2, "x\nerror: step 9: too few words\n") == ("collapsed", "step 9: too few words")
    assert verdict([], 2, "error: there is no folder")[0] == "failed"


def test_last_figures_are_the_latest_of_each():
    metrics = [
        {"step": 1, "kind": "train", "gamma": 0.1}, {"step": 1, "kind": "probe", "reconstruction": 0.5},
        {"step": 2, "kind": "train", "gamma": 0.2},
    ]  # fmt: skip
    assert last_figures(metrics) == {"step": 2, "gamma": 0.2, "recon": 0.5}
