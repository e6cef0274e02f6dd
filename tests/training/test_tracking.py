"""The record of a run: nothing written is lost, nothing later than the resumed step stays, and W&B never gets in the way."""

import io
import json
import math
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from jdllm.training import progress as progress_module
from jdllm.training.plots import plots
from jdllm.training.tracking import Progress, Tracker, TrackingError, read_metrics


def test_every_line_is_valid_json_and_reads_back(tmp_path):
    with Tracker(tmp_path, {}, "disabled") as tracker:
        tracker.log(
            1, {"loss": jnp.float32(0.5), "bins": [1.0, None, math.nan], "count": np.int64(3), "bad": -math.inf}
        )
        tracker.log(
            2, {"array": np.arange(2.0), "gate_open": True, "half": jnp.bfloat16(1.5), "reason": "done"}, "probe"
        )
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # on disk before close

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    assert [list(json.loads(line, parse_constant=refuse))[:2] for line in lines] == [["step", "kind"]] * 2
    one, two = read_metrics(tmp_path)
    assert math.isnan(one.pop("bins")[2])
    assert one == {"step": 1, "kind": "train", "loss": 0.5, "count": 3, "bad": -math.inf}
    assert two == {"step": 2, "kind": "probe", "array": [0.0, 1.0], "gate_open": True, "half": 1.5, "reason": "done"}


def test_resuming_drops_later_lines_and_goes_on(tmp_path):
    with Tracker(tmp_path, {}, "disabled") as tracker:
        for step in range(5):
            tracker.log(step, {"loss": step})
            tracker.log(step, {"reconstruction": 0.5}, "probe")
    with Tracker(tmp_path, {}, "disabled") as tracker:
        tracker.truncate_after(2)
        tracker.log(3, {"loss": 30})
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 0, 1, 1, 2, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_torn_last_line_is_dropped_and_a_torn_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 1, "kind": "train", "loss": 1.0}\n'
    path.write_text(whole + '{"step": 2, "kind": "tra')
    assert [record["step"] for record in read_metrics(path)] == [1]
    with Tracker(tmp_path, {}, "disabled") as tracker:
        tracker.log(2, {"loss": 2.0})
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    path.write_text(whole + '{"step": 2, "kind\n' + whole)
    with pytest.raises(TrackingError, match="metrics.jsonl, line 2"):
        read_metrics(path)


def test_a_crash_while_truncating_keeps_the_old_file(tmp_path, monkeypatch):
    with Tracker(tmp_path, {}, "disabled") as tracker:
        for step in range(3):
            tracker.log(step, {"loss": step})
        before = (tmp_path / "metrics.jsonl").read_bytes()

        def interrupted(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tracker.truncate_after(1)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_samples_are_files_that_never_end_a_run(tmp_path, capsys):
    with Tracker(tmp_path, {}, "disabled") as tracker:
        tracker.samples(500, ["one\nline", "two"])
        assert (tmp_path / "samples" / "step-000500.txt").read_text() == "--- 1\none\nline\n--- 2\ntwo\n"
        (tmp_path / "samples" / "step-000600.txt.tmp").mkdir()
        tracker.samples(600, ["three"])
    assert "samples of step 600 were not written" in capsys.readouterr().err


def test_wandb_offline_keeps_its_id_its_files_in_the_run_and_its_mouth_shut(tmp_path):
    code = (
        "import sys; from jdllm.training.tracking import Tracker\n"
        "with Tracker(sys.argv[1], {'model': {'latent_dim': 4}}) as tracker:\n"
        "    tracker.log(int(sys.argv[2]), {'loss': 1.0, 'bad': float('nan'), 'bins': [1.0, None]})\n"
        "    tracker.samples(1, ['<text>'])\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | {"HOME": str(home)}
    run = tmp_path / "run"
    ids = []
    for step in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code, run, step], env=env, capture_output=True, text=True, timeout=120
        )
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        ids.append((run / "wandb_id").read_text().strip())
    assert ids[0] == ids[1]
    assert len(list((run / "wandb").glob(f"offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))) == 2
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_wandb_online_without_a_key_is_a_sentence_at_the_start(tmp_path):
    code = (
        "import sys; from jdllm.training.tracking import Tracker, TrackingError\n"
        "try:\n    Tracker(sys.argv[1], {}, 'online')\n"
        "except TrackingError as error:\n    print(error)\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    command = [sys.executable, "-c", code, tmp_path / "run"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert "did not start" in result.stdout and "set WANDB_API_KEY, or use --training.wandb offline" in result.stdout


def test_a_missing_wandb_is_a_sentence_and_a_dying_one_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    class Dying:
        def log(self, values):
            raise BrokenPipeError("gone")

    with Tracker(tmp_path, {}, "disabled") as tracker:
        tracker._wandb, tracker._wandb_errors = Dying(), (OSError,)
        tracker.log(1, {"loss": 1.0})
        tracker.log(2, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 2
    assert capsys.readouterr().err.count("stopped taking data") == 1
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackingError, match="pip install wandb"):
        Tracker(tmp_path, {})


def test_plain_progress_prints_the_first_and_last_step_and_seldom_between(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(100, start=40, console=rich.console.Console(file=out, width=40)) as progress:
        for step in range(41, 101):
            now[0] += 1.0
            progress.update(
                step, {"loss": 3.0, "loss_token": 2.5, "reconstruction": 0.451, "tokens_per_second": 12_345.0}
            )
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["41/100", "56/100", "71/100", "86/100", "100/100"]
    assert lines[1] == "train 56/100  loss 3 (token 2.5)  reconstruction 45.1%  12.3k tok/s  0:16 gone, 0:44 left"


def test_live_progress_shows_the_numbers_under_the_bar():
    out = io.StringIO()
    console = rich.console.Console(file=out, width=80, force_terminal=True)
    with Progress(10, console=console) as progress:
        progress.update(4, {"loss": 3.25})
        progress.note("step 4: [samples] written")
    assert "4/10" in out.getvalue() and "loss 3.25" in out.getvalue() and "[samples]" in out.getvalue()


def test_plots_come_from_the_record_whatever_is_missing(tmp_path):
    with Tracker(tmp_path, {}, "disabled") as tracker:
        assert plots(tmp_path) == []
        tracker.log(0, {"loss": 3.0, "gamma": math.nan})
        assert [path.name for path in plots(tmp_path)] == ["losses.png"]
        for step in range(1, 4):
            tracker.log(
                step, {"loss": 3.0 / step, "gamma": 0.1 * step, "gradient_share_hidden": 0.9, "latent_variance": 1.0}
            )
            tracker.log(step, {"reconstruction": 0.3 * step, "loss_diffusion_bins": [None, 0.1, 0.9]}, "probe")
        tracker.log(3, {"loss_diffusion_bins": None}, "probe")
    written = plots(tmp_path)
    assert [path.name for path in written] == ["losses.png", "course.png", "gradients.png", "loss_by_tau.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
