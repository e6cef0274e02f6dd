"""A run, exported and read back: by a Python without jax, by jdllm again, and refused where it does not fit."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import jdllm
from jdllm import cli
from jdllm.config import ConfigError
from jdllm.diffusion.timesteps import TimestepState
from jdllm.model.ldlm import Model
from jdllm.model.standardize import LatentStats
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.run import save_frozen
from weights_port import convert, torch_ldlm
from weights_port.export import export_run, import_run

STEP = 120


@pytest.fixture(scope="module")
def run(tiny, shaken, tmp_path_factory):
    """A folder as training leaves it, weights random: half as many latents as tokens, the head frozen."""
    config, rng = tiny.replace(model__num_latents=4, model__head="encoder"), np.random.default_rng(0)
    run_dir, model, bins = tmp_path_factory.mktemp("runs") / "run", Model(config), config.diffusion.timestep_bins
    run_dir.mkdir()
    params = shaken(model.init(jax.random.key(0)), 0.02)
    params["denoiser"]["output"]["kernel"] *= 30.0
    state = {
        "ema_params": params,
        "params": {"not": jnp.zeros(3)},
        "latent_stats": LatentStats(*(jnp.asarray(rng.uniform(0.1, 1, (4, 16)), jnp.float32) for _ in "mv"), jnp.float32(0.7)),
        "timesteps": TimestepState(10.0 * jnp.linspace(0.1, 1.0, bins) ** 2, jnp.full(bins, 10.0)),
        "hidden_mean": jnp.asarray(rng.normal(size=12), jnp.float32), "hidden_std": jnp.full(12, 1.5),
    }  # fmt: skip
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=2)
    checkpoints.save(STEP, state, {"config": config.to_dict(), "seconds": 1.0})
    checkpoints.close()
    save_frozen(run_dir, rng.normal(size=(12, 37)).astype(ml_dtypes.bfloat16))
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, 37)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1")).save(str(run_dir / "tokenizer.json"))
    (run_dir / "data.json").write_text(json.dumps({"eos_id": 0, "encoder": {"name": "tiny"}}))
    config.save(run_dir / "config.json")
    return run_dir


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "folder"
    export_run(run, out)
    return out


@pytest.fixture
def copied(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "copy")
    return tmp_path / "copy"


def change(folder, edit):
    """The weights of a folder, changed by edit(tensors)."""
    tensors = safetensors.numpy.load_file(folder / convert.WEIGHTS)
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / convert.WEIGHTS)


WITHOUT_JAX = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "orbax", "optax", "jaxtyping", "ml_dtypes", "transformers"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
try:
    import jax
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("jax was not blocked")

import weights_port.torch_ldlm

generator = weights_port.torch_ldlm.load(sys.argv[1])

import numpy as np
import torch

noise = torch.from_numpy(np.load(sys.argv[2]))
tokens = generator.generate_tokens(noise=noise, steps=4)
np.savez(
    sys.argv[3], tokens=tokens, logits=generator.model.logits(noise), texts=generator.generate(noise=noise, steps=4),
    latents=generator.encode(torch.ones(2, 8, 12), torch.tensor([8, 3])),
)
assert "jax" not in sys.modules and "transformers" not in sys.modules
"""


def test_a_python_without_jax_gives_the_same_logits_latents_tokens_and_texts(run, exported, tmp_path):
    ours = jdllm.load(run)
    first, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), 0))
    noise = jax.random.normal(first, (5, 4, 16))
    np.save(tmp_path / "noise.npy", noise)
    subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, exported, tmp_path / "noise.npy", tmp_path / "found.npz"],
        check=True, timeout=120, cwd=Path(jdllm.__file__).parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = np.load(tmp_path / "found.npz")
    tokens = ours.generate_tokens(seed=0, num=5, steps=4)
    assert len(np.unique(tokens)) > 2
    np.testing.assert_array_equal(found["tokens"], tokens)
    assert found["texts"].tolist() == ours.decode(tokens)
    module = ours.model.merge(ours.params, ours.frozen)
    logits = np.asarray(jax.jit(lambda z: module.token_decoder.logits(module.decoder(z)))(noise))
    assert np.linalg.norm(found["logits"] - logits) <= 1e-5 * np.linalg.norm(logits)
    latents = np.asarray(ours.encode({"hidden": jnp.ones((2, 8, 12)), "lengths": jnp.array([8, 3])}))
    assert np.linalg.norm(found["latents"] - latents) <= 1e-5 * np.linalg.norm(latents)


WITH_TRANSFORMERS_ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "jaxtyping", "jdllm", "weights_port"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
import numpy as np
import torch
import transformers

model = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
noise = torch.from_numpy(np.load(sys.argv[2]))
half = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.bfloat16)
assert half.ldlm.denoiser.input.weight.dtype == torch.bfloat16
np.savez(sys.argv[3], tokens=model.generate_tokens(noise=noise, steps=4), texts=model.generate(noise=noise, steps=4))
"""


def test_transformers_alone_loads_the_hf_format_and_import_reads_it_back(run, tmp_path):
    ours, folder = jdllm.load(run), tmp_path / "folder"
    export_run(run, folder, format="hf")
    noise = jax.random.normal(jax.random.split(jax.random.fold_in(jax.random.key(0), 0))[0], (5, 4, 16))
    np.save(tmp_path / "noise.npy", noise)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run(
        [sys.executable, "-c", WITH_TRANSFORMERS_ALONE, folder, tmp_path / "noise.npy", tmp_path / "found.npz"],
        check=True, timeout=120, cwd=tmp_path, env=environment,
    )  # fmt: skip
    found, tokens = np.load(tmp_path / "found.npz"), ours.generate_tokens(seed=0, num=5, steps=4)
    np.testing.assert_array_equal(found["tokens"], tokens)
    assert found["texts"].tolist() == ours.decode(tokens)
    assert "AutoModel.from_pretrained" in (folder / "README.md").read_text()
    import_run(folder, tmp_path / "again")
    np.testing.assert_array_equal(jdllm.load(tmp_path / "again").generate_tokens(seed=0, num=5, steps=4), tokens)


def test_the_bare_format_holds_nothing_else(run, tmp_path):
    export_run(run, tmp_path / "bare", format="safetensors")
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert torch_ldlm.load(tmp_path / "bare").generate_tokens(num=2, steps=2).shape == (2, 8)


def test_what_comes_back_is_what_went(run, exported, tmp_path):
    import_run(exported, tmp_path / "again")
    ours, again = jdllm.load(run), jdllm.load(tmp_path / "again")
    for name in ("params", "frozen", "latent_stats", "edges", "hidden_mean", "hidden_std"):
        jax.tree.map(np.testing.assert_array_equal, getattr(again, name), getattr(ours, name))
    assert (again.step, again.eos_id, again.config) == (STEP, 0, ours.config)
    np.testing.assert_array_equal(again.generate_tokens(num=4, seed=5), ours.generate_tokens(num=4, seed=5))


def test_bfloat16_and_the_second_journey(run, tmp_path, capsys):
    """Rounded once, the weights stay as they are; through the command line."""
    for arguments in (
        ["export", "--run", run, "--out", tmp_path / "one", "--dtype", "bfloat16"],
        ["import", "--folder", tmp_path / "one", "--run", tmp_path / "again"],
        ["export", "--run", tmp_path / "again", "--out", tmp_path / "two", "--dtype", "bfloat16"],
    ):
        assert cli.main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    one, two = (safetensors.numpy.load_file(tmp_path / name / convert.WEIGHTS) for name in ("one", "two"))
    assert one["denoiser.output.weight"].dtype == ml_dtypes.bfloat16
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert torch_ldlm.load(tmp_path / "one").generate_tokens(num=2).shape == (2, 8)


def test_the_folder_holds_what_it_should_and_nothing_half_written(run, exported):
    assert {path.name for path in exported.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    }
    assert [path.name for path in exported.parent.iterdir()] == ["folder"]
    card = (exported / "README.md").read_text()
    assert "step 120" in card and "Not evaluated" in card and "licence of that model applies" in card
    trained = sum(leaf.size for leaf in jax.tree.leaves(jdllm.load(run).params))
    assert f"| {trained:,} in float32" in card


@pytest.mark.parametrize(
    ("measured", "words"), [(STEP, "By `jdllm eval`"), (60, "Measured at step 60, not at the step")]
)
def test_the_card_shows_the_table_and_says_when_it_belongs_to_other_weights(run, tmp_path, measured, words):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/eval.md").write_text("| text | perplexity |\n|---|---:|\n| 4 steps | 99.5 |\n")
    (tmp_path / "run/eval.json").write_text(json.dumps({"checkpoint": measured}))
    export_run(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert words in card and "| 4 steps | 99.5 |" in card and ("Measured at" in card) == (measured != STEP)


# What is refused


def refused(folder, tmp_path, *words):
    """Both readers say these words, and no run is left behind."""
    for read in (torch_ldlm.load, lambda folder: import_run(folder, tmp_path / "new")):
        with pytest.raises(ConfigError) as error:
            read(folder)
        assert all(word in str(error.value) for word in words), str(error.value)
    assert not list(tmp_path.glob("new*"))


def test_all_that_does_not_fit_is_said_at_once(copied, tmp_path):
    def edit(tensors):
        del tensors["encoder.queries"]
        tensors["mtp.0.weight"] = np.zeros(2, np.float32)
        tensors["denoiser.norm.gain"] = np.zeros(17, np.float32)
        tensors["hidden_mean"] = tensors["hidden_mean"].astype(np.float16)

    change(copied, edit)
    refused(
        copied, tmp_path, "encoder.queries is missing", "mtp.0.weight is unexpected",
        "denoiser.norm.gain has shape (17,), the config wants (16,)", "hidden_mean is float16, float32 is wanted",
    )  # fmt: skip


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path(os.environ["BOMB"]),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", convert.WEIGHTS])
def test_a_pickle_is_refused_and_never_opened(copied, tmp_path, monkeypatch, name):
    monkeypatch.setenv("BOMB", str(tmp_path / "went off"))
    (copied / convert.WEIGHTS).unlink()
    (copied / name).write_bytes(pickle.dumps(Bomb()))
    refused(copied, tmp_path, "no safetensors file" if name == convert.WEIGHTS else "pickle")
    assert not (tmp_path / "went off").exists()


def test_a_truncated_file(copied, tmp_path):
    whole = (copied / convert.WEIGHTS).read_bytes()
    (copied / convert.WEIGHTS).write_bytes(whole[: len(whole) // 2])
    refused(copied, tmp_path, "damaged")


def test_a_folder_without_weights_and_one_that_is_a_run(copied, run, tmp_path):
    shutil.copy(run / "config.json", copied / "config.json")
    refused(copied, tmp_path, "this is a run, export it first")
    (copied / "config.json").write_text("{")
    refused(copied, tmp_path, "not valid JSON")
    (copied / convert.WEIGHTS).unlink()
    refused(copied, tmp_path, "holds no model.safetensors")


def test_nothing_is_overwritten(run, exported, tmp_path, capsys):
    with pytest.raises(ConfigError, match="exists already; choose another --out"):
        export_run(run, exported)
    with pytest.raises(ConfigError, match="exists already; choose another --run"):
        import_run(exported, run)
    assert cli.main(["import", "--folder", str(tmp_path / "none"), "--run", "x"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_training_does_not_go_on_with_an_imported_run(exported, tmp_path):
    """Its optimiser is gone, and so is the data; said before anything in the run is touched."""
    from weights_port.pipeline import check_same_data

    import_run(exported, tmp_path / "again")
    keys = {"train": {"encoder": "a", "data": "b"}, "valid": {"encoder": "a", "data": "c"}}
    with pytest.raises(ConfigError, match="was trained on something else"):
        check_same_data(tmp_path / "again", keys)
