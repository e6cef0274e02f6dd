"""The command line as a person meets it: a subprocess, its exit code, and what it says when something is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jdllm import cli
from jdllm.config import ConfigError, preset

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    **os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "WANDB_MODE": "offline",
}  # fmt: skip
ENVIRONMENT.pop("JDLLM_DEBUG", None)


def jdllm(*arguments, cwd, **environment):
    """`jdllm …` in `cwd`; the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "jdllm.cli", *map(str, arguments)],
        cwd=cwd, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def refused(process, *words):
    """The command ended with exit code 2 and said all these words, without a traceback; returns stderr."""
    said = " ".join(process.stderr.split())
    assert process.returncode == 2, (process.returncode, process.stdout, process.stderr)
    assert "Traceback" not in said
    missing = [word for word in words if word not in said]
    assert not missing, f"{missing} not in: {process.stderr}"
    return said


# Parsing


def test_preset_sets_the_defaults_and_flags_change_single_fields():
    command = cli.parse(
        ["train", "--preset", "smoke", "--training.steps", "7", "--model.latent-dim", "128", "--seed", "3"]
    )
    assert command.config == preset("smoke").replace(training__steps=7, model__latent_dim=128, seed=3)
    assert command.name is None


@pytest.mark.parametrize("arguments", [["--preset", "books"], ["--preset=books"], ["--seed", "0", "--preset", "books"]])
def test_preset_may_stand_anywhere(arguments):
    assert cli.parse(["train", *arguments]).config == preset("books")


def test_without_a_preset_it_is_quickstart():
    assert cli.parse(["train"]).config == preset("quickstart")


def test_the_script_takes_the_options_of_train():
    command = cli.parse(["--preset", "smoke", "--name", "a"], prog="train_ldlm.py", command="train")
    assert command == cli.parse(["train", "--preset", "smoke", "--name", "a"])


def test_switches_and_optional_values():
    config = cli.parse(
        ["train", "--model.no-positional-path", "--training.minutes", "1.5", "--valid-data", "x.txt"]
    ).config
    assert (config.model.positional_path, config.training.minutes, config.valid_data) == (False, 1.5, "x.txt")


@pytest.mark.parametrize(("text", "steps"), [("4", (4,)), ("32,4,10", (4, 10, 32)), ("4, 4", (4,))])
def test_step_lists(text, steps):
    assert cli.step_list(text) == steps


@pytest.mark.parametrize("text", ["", "4,x", "0,4", "4.5", "-1"])
def test_step_lists_that_are_none(text):
    with pytest.raises(ConfigError, match="--steps"):
        cli.step_list(text)


# Help


def test_help_lists_the_commands_and_loads_nothing_heavy(tmp_path):
    code = "import sys; from jdllm import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('jax', 'torch', 'transformers', 'flax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in ("train", "generate", "eval"))


def test_help_of_train_shows_fields_with_their_meaning_and_the_defaults_of_the_preset(tmp_path):
    shown = " ".join(jdllm("train", "--preset", "smoke", "--help", cwd=tmp_path).stdout.split())
    assert "--model.latent-dim INT" in shown and "Width d of the latents" in shown
    assert "--preset STR" in shown and "(default: smoke)" in shown and "(default: 300)" in shown


# Bad input that needs no training


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["trian", "train, generate, eval"]),
        (["train", "--preset", "smok"], ["no preset 'smok'", "did you mean 'smoke'"]),
        (["train", "--model.latnt-dim", "64"], ["--model.latnt-dim", "--model.latent-dim"]),
        (["train", "--model.head", "frozen"], ["'frozen'", "--model.head", "trained", "encoder"]),
        (["train", "--model.latent-dim", "wide"], ["--model.latent-dim", "wide"]),
        (["train", "--preset", "smoke", "--model.latent-dim", "48"], ["model.latent_dim=48", "model.head_dim=32"]),
        (["train", "--preset", "smoke", "--model.num-latents", "5"], ["num_tokens=32", "num_latents=5"]),
        (["train", "--training.batch-size", "0"], ["training.batch_size=0", "least is 1"]),
        (["generate"], ["--run"]),
        (["generate", "--run", "runs/nothing"], ["there is no run at runs/nothing", "jdllm train"]),
        (["eval", "--run", "runs/nothing"], ["there is no run at runs/nothing"]),
        (["generate", "--run", ".", "--sampler", "ddpm"], ["ddpm", "ddim", "sde", "early_stop"]),
    ],
)
def test_options_that_do_not_fit_are_named_and_nothing_is_written(arguments, words, tmp_path):
    refused(jdllm(*arguments, cwd=tmp_path), *words)
    assert not list(tmp_path.iterdir())


def smoke(*arguments, cwd, **environment):
    return jdllm("train", "--preset", "smoke", *arguments, cwd=cwd, **environment)


def test_a_text_file_that_does_not_exist(tmp_path):
    refused(smoke("--data", "missing.txt", cwd=tmp_path), "error:", "missing.txt")


def test_an_empty_text_file(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    refused(smoke("--data", "empty.txt", cwd=tmp_path), "error:", "empty.txt")


def test_a_binary_file(tmp_path):
    (tmp_path / "picture.txt").write_bytes(bytes(range(256)) * 64)
    refused(smoke("--data", "picture.txt", cwd=tmp_path), "error:", "picture.txt")


def test_a_folder_with_nothing_in_it(tmp_path):
    (tmp_path / "texts").mkdir()
    refused(smoke("--data", "texts", cwd=tmp_path), "error:", "texts")


def test_held_out_text_is_checked_as_well(tmp_path):
    (tmp_path / "good.txt").write_text("All work and no play. " * 1000)
    (tmp_path / "empty.txt").write_text("")
    refused(smoke("--data", "good.txt", "--valid-data", "empty.txt", cwd=tmp_path), "error:", "empty.txt")


def test_an_encoder_that_does_not_exist(tmp_path):
    (tmp_path / "good.txt").write_text("All work and no play. " * 1000)
    refused(smoke("--data", "good.txt", "--encoder", "./no-such-model", cwd=tmp_path), "error:", "no-such-model")


def test_a_sequence_over_the_limit_of_the_encoder(tmp_path):
    (tmp_path / "good.txt").write_text("All work and no play. " * 1000)
    arguments = ["--data", "good.txt", "--model.num-tokens", 1 << 20, "--model.num-latents", 1 << 20]
    refused(smoke(*arguments, cwd=tmp_path), "error:", "num_tokens=1048576")


def test_a_missing_package_says_how_to_get_it(tmp_path):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "zstandard.py").write_text("raise ModuleNotFoundError(name='zstandard')")
    (tmp_path / "text.jsonl.zst").write_bytes(b"")
    process = smoke("--data", "text.jsonl.zst", cwd=tmp_path, PYTHONPATH=str(tmp_path / "blocked"))
    refused(process, "error:", "zstandard", "pip install 'jdllm[zstd]'")


def test_a_folder_that_is_no_run_is_never_written_into(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "thesis.txt").write_text("precious")
    refused(smoke("--name", "mine", cwd=tmp_path), "runs/mine", "not a run", "--name")
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == ["thesis.txt"]


def test_a_folder_that_is_no_run_cannot_generate(tmp_path):
    (tmp_path / "runs" / "good").mkdir(parents=True)
    (tmp_path / "runs" / "good" / "config.json").write_text("{}")
    (tmp_path / "runs" / "other").mkdir()
    refused(jdllm("generate", "--run", "runs/other", cwd=tmp_path), "runs/other is not a run", "there are: runs/good")


def test_a_config_with_an_unknown_key_cannot_generate(tmp_path):
    run = tmp_path / "runs" / "old"
    run.mkdir(parents=True)
    values = preset("smoke").to_dict()
    values["model"]["latent_dmi"] = values["model"].pop("latent_dim")
    (run / "config.json").write_text(json.dumps(values))
    refused(jdllm("generate", "--run", "runs/old", cwd=tmp_path), "'model.latent_dmi'", "'model.latent_dim'")


def test_a_run_that_has_no_checkpoint_yet_cannot_generate(tmp_path):
    run = tmp_path / "runs" / "new"
    run.mkdir(parents=True)
    preset("smoke").save(run / "config.json")
    refused(jdllm("generate", "--run", "runs/new", cwd=tmp_path), "error:", "checkpoint")


def test_resuming_with_another_config_lists_what_differs(tmp_path):
    run = tmp_path / "runs" / "smoke"
    (run / "checkpoints" / "100").mkdir(parents=True)
    preset("smoke").save(run / "config.json")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = refused(
        smoke("--model.denoiser-depth", 3, "--optimizer.learning-rate", 0.1, "--training.steps", 999, cwd=tmp_path),
        "runs/smoke", "model.denoiser_depth: 2 there, 3 here", "optimizer.learning_rate: 0.001 there, 0.1 here", "--name",
    )  # fmt: skip
    assert "training.steps" not in said  # more steps are a reason to resume
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


# Errors inside a command


def raising(error, monkeypatch):
    def command(self):
        raise error

    monkeypatch.setattr(cli.Generate, "__call__", command)
    return cli.main(["generate", "--run", "x"])


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys):
    assert raising(KeyboardInterrupt(), monkeypatch) == 130
    assert "interrupted; run the same command to go on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("a=1 is odd"), "error: a=1 is odd"),
        (OSError(28, "No space left on device", "/data/x"), "no space left on the disk for /data/x; make room"),
        (PermissionError(13, "Permission denied", "/root/x"), "no permission to write or read /root/x"),
        (ModuleNotFoundError("No module named 'zstandard'", name="zstandard"), "pip install zstandard"),
    ],
)
def test_errors_that_a_person_can_mend_are_sentences(error, words, monkeypatch, capsys):
    monkeypatch.delenv("JDLLM_DEBUG", raising=False)
    assert raising(error, monkeypatch) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ValueError("ours"), OSError(5, "Input/output error"), ModuleNotFoundError("x", name="jdllm.x")]
)
def test_our_own_faults_keep_their_traceback(error, monkeypatch):
    with pytest.raises(type(error)):
        raising(error, monkeypatch)


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("JDLLM_DEBUG", "1")
    with pytest.raises(ConfigError):
        raising(ConfigError("a=1 is odd"), monkeypatch)


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path):
    code = "import sys; from jdllm import cli\n"
    code += "cli.Generate.__call__ = lambda self: [print('x' * 1000) for _ in range(1000)] and 0\n"
    code += "code = cli.main(['generate', '--run', 'x']); sys.exit(code)"
    done = subprocess.run(
        f"{sys.executable} -c \"{code}\" | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", env=ENVIRONMENT, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "0" and not done.stderr
