"""The command line as a person meets it: a subprocess, its exit code, and what it says when something is wrong."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import rich.console
import tokenizers

from jdllm import cli
from jdllm.config import ConfigError, preset
from jdllm.training.run import load

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


def test_several_processes_join_before_anything_else(monkeypatch):
    called = []
    monkeypatch.setattr("jdllm.training.processes.join", lambda *given: called.append(given))
    monkeypatch.setattr("weights_port.pipeline.run", lambda config, run_dir: called.append("run") or 0)
    explicit = ["--coordinator", "host0:1234", "--num-processes", "2", "--process-id", "1"]
    for arguments in ([], ["--distributed"], explicit):
        assert cli.main(["train", *arguments]) == 0
    assert called == ["run", (None, None, None), "run", ("host0:1234", 2, 1), "run"]


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


def test_resuming_with_another_config_lists_what_differs(tmp_path):
    run = tmp_path / "runs" / "smoke"
    (run / "checkpoints" / "100").mkdir(parents=True)
    preset("smoke").save(run / "config.json")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    said = refused(
        smoke("--model.denoiser-depth", 3, "--optimizer.learning-rate", 0.1, "--training.steps", 999, "--objective.frozen-after", 0.5, cwd=tmp_path),
        "runs/smoke", "model.denoiser_depth: 2 there, 3 here", "optimizer.learning_rate: 0.001 there, 0.1 here", "--name",
    )  # fmt: skip
    assert "training.steps" not in said  # more steps are a reason to resume
    assert "frozen_after" not in said  # and so is a second stage
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
        (PermissionError(13, "Permission denied", "/data/x"), "no permission to write or read /data/x"),
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


# One small run, trained once


TRAIN = [
    "--preset", "smoke", "--data", "text.txt", "--model.latent-dim", 32, "--training.steps", 24, "--training.batch-size", 8,
    "--training.log-every", 4, "--training.probe-every", 8, "--training.sample-every", 12, "--training.checkpoint-every", 8,
    "--feed.max-tokens", 4000, "--feed.valid-windows", 12, "--training.wandb", "disabled", "--sampling.steps", 3,
]  # fmt: skip


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Environment in which a program that was compiled once is not compiled again."""
    folder = tmp_path_factory.mktemp("compiled")
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def write_text(folder):
    rng = np.random.default_rng(0)
    words = ["the", "people", "of", "this", "house", "have", "made", "a", "law", "and", "kept", "it", "for", "long"]
    (folder / "text.txt").write_text(" ".join(rng.choice(words, 4000)) + ".")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, compiled):
    """A folder with text.txt, cache/ and runs/smoke."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    done = jdllm("train", *TRAIN, cwd=folder, **compiled)
    assert done.returncode == 0, done.stderr
    assert "run: runs/smoke" in done.stderr and "held-out tokens reconstructed" in done.stderr
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    """The trained folder again, to be spoilt; its data.json still names the first one's caches."""
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def in_process(capsys, *arguments):
    """Exit code, stdout and stderr of a command run here, which spares the start of another Python."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def metrics(run):
    timings = ("tokens_per_second", "mfu", "wait_share")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timings} for line in lines]


def test_a_run_leaves_all_that_the_design_lists(trained):
    run = trained / "runs" / "smoke"
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "tokenizer.json", "data.json", "valid_windows.npz", "metrics.jsonl", "checkpoints"} <= names
    assert list((run / "plots").glob("*.png")) and len(list((run / "samples").iterdir())) == 2
    assert {line["kind"] for line in metrics(run)} == {"train", "probe", "eval"}


def test_generate_writes_the_texts_asked_for_and_timings_elsewhere(trained, capsys):
    code, out, err = in_process(capsys, "generate", "--run", trained / "runs/smoke", "--num", 3, "--steps", 2)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        "--- 1/3 ---",
        "--- 2/3 ---",
        "--- 3/3 ---",
    ]
    assert "3 texts of 32 tokens" in err and "compilation" in err


def test_json_lines_hold_text_and_tokens_and_repeat_with_the_seed(trained, capsys):
    def generate(seed):
        arguments = ("generate", "--run", trained / "runs/smoke", "--num", 4, "--jsonl", "--seed", seed)
        return [json.loads(line) for line in in_process(capsys, *arguments)[1].splitlines()]

    first, again, other = generate(0), generate(0), generate(1)
    assert first == again and first != other
    tokenizer = tokenizers.Tokenizer.from_file(str(trained / "runs/smoke/tokenizer.json"))
    assert [line["index"] for line in first] == [0, 1, 2, 3] and {line["seed"] for line in other} == {1}
    assert all(tokenizer.decode(line["tokens"]) == line["text"] for line in first)


def test_watching_shows_every_step_and_ends_with_the_same_text(trained, capsys):
    arguments = ("generate", "--run", trained / "runs/smoke", "--num", 2, "--steps", 4)
    _, plain, _ = in_process(capsys, *arguments)
    code, out, err = in_process(capsys, *arguments, "--watch")
    assert code == 0 and out == plain
    assert [line for line in err.splitlines() if line.startswith("step ")] == [f"step {i}/4" for i in (1, 2, 3, 4)]


def test_watching_in_a_terminal_redraws_in_place(trained):
    from jdllm.generation.show import Watch

    tokenizer = tokenizers.Tokenizer.from_file(str(trained / "runs/smoke/tokenizer.json"))
    file = io.StringIO()
    console = rich.console.Console(file=file, force_terminal=True, width=80, height=20)
    ids = np.array([tokenizer.encode("some words here").ids, tokenizer.encode("some other one!").ids])
    with Watch(tokenizer, 256, console) as view:
        view(1, 2, ids)
        view(2, 2, ids[::-1])
    shown = file.getvalue()
    assert "step 1/2" in shown and "step 2/2" in shown and "\x1b[" in shown


@pytest.mark.parametrize("text", ["plain words", "naïve café – 漢字 🙂", ""])
def test_pieces_of_a_text_are_the_whole_text_up_to_its_end(trained, text):
    from jdllm.generation.show import pieces

    tokenizer = tokenizers.Tokenizer.from_file(str(trained / "runs/smoke/tokenizer.json"))
    ids = np.array([*tokenizer.encode(text).ids, 256, *tokenizer.encode("unseen").ids])
    found = pieces(tokenizer, ids, 256)
    assert "".join(piece for piece, _ in found) == text
    assert [position for _, position in found] == sorted({position for _, position in found})


def test_generate_never_needs_torch(trained, tmp_path, compiled):
    for name in ("torch", "transformers", "weights_port"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} must not be imported')")
    run = trained / "runs/smoke"
    done = jdllm("generate", "--run", run, "--num", 1, "--steps", 2, cwd=trained, PYTHONPATH=str(tmp_path), **compiled)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--- 1/1 ---")


def test_eval_writes_json_table_and_samples(trained, tmp_path, capsys):
    out = tmp_path / "figures" / "eval.json"
    arguments = ("--steps", "4,2", "--num", 16, "--scorer", "none", "--out", out)
    code, table, _ = in_process(capsys, "eval", "--run", trained / "runs/smoke", *arguments)
    assert code == 0 and table == out.with_suffix(".md").read_text()
    values = json.loads(out.read_text())
    assert list(values["samples"]) == ["2", "4"] and values["samples"]["2"]["samples"]["texts"] == 16
    assert values["samples"]["2"]["human"]["texts"] == 12 and any("12 held-out" in note for note in values["notes"])
    assert set(values["reconstruction"]) == {"0", "1", "3"} and len(values["denoising_loss"]) == 10
    assert values["checkpoint"] == 24 and values["summary"]["recon"] == values["reconstruction"]["0"]
    assert (out.parent / "samples" / "steps-2.txt").read_text().count("--- ") == 16


def test_eval_scores_samples_and_human_text_and_says_when_scorer_and_encoder_are_one(trained, tmp_path, capsys):
    out = tmp_path / "eval.json"
    arguments = ("--steps", 2, "--num", 8, "--scorer", "tiny-qwen3_5", "--temperatures", "0.5,1,2", "--out", out)
    code, table, _ = in_process(capsys, "eval", "--run", trained / "runs/smoke", *arguments)
    values = json.loads(out.read_text())
    assert code == 0 and "the scorer tiny-qwen3_5 is also the encoder" in table
    row = values["samples"]["2"]
    assert 100 < row["human"]["perplexity"] < 700  # a random model over 260 tokens
    assert values["summary"]["gen_ppl"] == {"2": row["samples"]["perplexity"]}
    assert values["summary"]["human_ppl"] == row["human"]["perplexity"]
    assert list(values["by_temperature"]) == ["0.5", "1", "2"]
    assert values["by_temperature"]["1"]["perplexity"] == row["samples"]["perplexity"]
    assert values["by_temperature"]["2"]["entropy"] != row["samples"]["entropy"]
    assert "perplexity_at_human_entropy" in row["samples"] and "At the entropy of human text" in table


def test_eval_without_the_cache_still_judges_text_and_says_what_is_missing(copied, tmp_path, capsys):
    record = copied / "runs/smoke/data.json"
    record.write_text(record.read_text().replace("/cache/", "/gone/"))
    out = tmp_path / "eval.json"
    arguments = ("--steps", "2", "--num", 8, "--scorer", "none", "--out", out)
    code, table, _ = in_process(capsys, "eval", "--run", copied / "runs/smoke", *arguments)
    values = json.loads(out.read_text())
    assert code == 0 and values["reconstruction"] is None and values["samples"]["2"]["human"]["entropy"] > 0
    assert "held-out hidden states are gone" in table and "makes them again" in table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--checkpoint", 7], ["no checkpoint of step 7", "there are: 16, 24"]),
        (["generate", "--num", 0], ["--num 0", "least is 1"]),
        (["generate", "--temperature", -1], ["--temperature -1.0 is negative"]),
        (["eval", "--steps", "4,x"], ["--steps '4,x'"]),
        (["eval", "--num", 1], ["--num 1"]),
        (["eval", "--temperatures", "0.9;1"], ["--temperatures '0.9;1'", "0.8,0.9"]),
        (["eval", "--temperatures", "-1"], ["--temperatures '-1'", "negative"]),
    ],
)
def test_options_that_do_not_fit_the_run(trained, arguments, words, capsys):
    code, _, err = in_process(capsys, *arguments, "--run", trained / "runs/smoke")
    assert code == 2 and all(word in err for word in words), err


def test_a_checkpoint_of_another_config_names_what_does_not_fit(copied, capsys):
    path = copied / "runs/smoke/config.json"
    config = cli.Config.load(path)
    config.replace(model__denoiser_depth=3).save(path)
    code, _, err = in_process(capsys, "generate", "--run", copied / "runs/smoke")
    assert code == 2 and "does not fit" in err and "denoiser" in err, err


def test_a_config_with_an_unknown_key_cannot_generate(copied, capsys):
    path = copied / "runs/smoke/config.json"
    path.write_text(path.read_text().replace('"latent_dim"', '"latent_dmi"'))
    code, _, err = in_process(capsys, "generate", "--run", copied / "runs/smoke")
    assert code == 2 and "'model.latent_dmi'" in err and "'model.latent_dim'" in err, err


def test_a_run_that_has_no_checkpoint_yet_cannot_generate(copied, capsys):
    shutil.rmtree(copied / "runs/smoke/checkpoints")
    code, _, err = in_process(capsys, "generate", "--run", copied / "runs/smoke")
    assert code == 2 and "no checkpoint yet" in err, err


def test_a_finished_run_is_not_trained_again(trained, compiled):
    before = metrics(trained / "runs/smoke")
    done = jdllm("train", *TRAIN, cwd=trained, **compiled)
    assert done.returncode == 0 and "encoder: loading" not in done.stderr, done.stderr
    assert metrics(trained / "runs/smoke")[: len(before)] == before


def test_a_truncated_shard_is_named_and_nothing_is_trained_on_it(copied):
    record = json.loads((copied / "runs/smoke/data.json").read_text())
    cache = copied / "cache" / record["train"]["path"].rpartition("/")[2]
    for part in ("train", "valid"):
        record[part]["path"] = record[part]["path"].replace(record[part]["path"].rpartition("/cache/")[0], str(copied))
    (copied / "runs/smoke/data.json").write_text(json.dumps(record))
    shard = sorted(cache.glob("shard-*.bf16"))[0]
    os.truncate(shard, shard.stat().st_size // 2)
    refused(
        jdllm("train", *TRAIN, "--training.steps", 48, cwd=copied),
        "error:",
        shard.name,
        cache.name,
        "run the same command",
    )


def test_a_tokenizer_that_does_not_belong_to_the_cache(copied):
    path = copied / "runs/smoke/tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["jdllm"])
    tokenizer.save(str(path))
    refused(jdllm("train", *TRAIN, "--training.steps", 48, cwd=copied), "error:", "tokenizer.json", "was made with")


@pytest.mark.parametrize(("number", "after"), [(signal.SIGINT, 8), (signal.SIGKILL, 12)], ids=["ctrl-c", "kill -9"])
def test_a_run_that_is_stopped_anywhere_loses_nothing(number, after, trained, tmp_path, compiled):
    """Stopped in the middle and started again, a run ends with the figures and weights of one that was left alone."""
    write_text(tmp_path)
    command = [sys.executable, "-m", "jdllm.cli", "train", *map(str, TRAIN)]
    environment = {**ENVIRONMENT, **compiled}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    record = tmp_path / "runs/smoke/metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (record.exists() and f'"step": {after}' in record.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    stderr = process.communicate(timeout=120)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130 and "interrupted; run the same command to go on" in stderr, stderr
        assert "Traceback" not in stderr
    else:
        assert process.returncode == -signal.SIGKILL
    done = jdllm("train", *TRAIN, cwd=tmp_path, **compiled)
    assert done.returncode == 0, done.stderr

    def by_step(run):
        return {(line["step"], line["kind"]): line for line in metrics(run) if line["step"] % 4 == 0}

    def weights(run):
        leaves = jax.tree_util.tree_leaves_with_path(load(run).params)
        return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}

    assert by_step(tmp_path / "runs/smoke") == by_step(trained / "runs/smoke")
    assert weights(tmp_path / "runs/smoke") == weights(trained / "runs/smoke")


def test_a_full_disk_says_so_and_keeps_what_was_written(tmp_path, compiled):
    """A limit on the size of files stands in for a full disk."""
    write_text(tmp_path)
    limited = [
        "bash",
        "-c",
        'ulimit -f 64; exec "$@"',
        "-",
        sys.executable,
        "-m",
        "jdllm.cli",
        "train",
        *map(str, TRAIN),
    ]
    process = subprocess.run(limited, cwd=tmp_path, env={**ENVIRONMENT, **compiled}, capture_output=True, text=True)
    refused(process, "error:", "no space left")
