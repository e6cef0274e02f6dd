"""A quantised run: what is read back is what was written, it writes and is judged like a run, and is never trained."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers

import jdllm
from jdllm import cli
from jdllm.config import ConfigError
from jdllm.diffusion.timesteps import TimestepState
from jdllm.kernels.quantize import FORMATS, is_quantized, quantize_params, quantized_weights
from jdllm.model.ldlm import Model
from jdllm.model.random_weights import random_weights
from jdllm.model.standardize import LatentStats
from jdllm.training.checkpoint import CheckpointError, Checkpoints
from jdllm.training.quantized import quantize_run
from jdllm.training.run import save_frozen
from weights_port.export import export_run
from weights_port.pipeline import check_resume

STEP = 70


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A folder as training leaves it, weights random, the head frozen."""
    config = tiny.replace(model__latent_dim=64, model__hidden_dim=64, model__head_dim=32, model__head="encoder")
    run_dir, model, rng = tmp_path_factory.mktemp("runs") / "run", Model(config), np.random.default_rng(0)
    run_dir.mkdir()
    bins, zeros = config.diffusion.timestep_bins, jnp.zeros((8, 64))
    params, frozen = random_weights(model, 0, "float32")
    state = {
        "ema_params": params, "params": {"not": jnp.zeros(3)}, "latent_stats": LatentStats(zeros, zeros + 1, jnp.float32(1)),
        "timesteps": TimestepState(10.0 * jnp.linspace(0.1, 1.0, bins) ** 2, jnp.full(bins, 10.0)),
        "hidden_mean": jnp.zeros(64), "hidden_std": jnp.ones(64),
    }  # fmt: skip
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=2)
    checkpoints.save(STEP, state, {"config": config.to_dict(), "seconds": 60.0})
    checkpoints.close()
    save_frozen(run_dir, np.asarray(frozen["token_decoder"]["head"]).astype(ml_dtypes.bfloat16))
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, 37)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1")).save(str(run_dir / "tokenizer.json"))
    np.savez(run_dir / "valid_windows.npz", ids=rng.integers(1, 37, (8, 8)), lengths=np.full(8, 8))
    source = {"path": str(run_dir / "gone"), "hash": "", "key": {}}
    (run_dir / "data.json").write_text(
        json.dumps({"eos_id": 0, "encoder": {"name": "x"}, "train": source, "valid": source})
    )
    config.save(run_dir / "config.json")
    return run_dir


@pytest.fixture(scope="module")
def small(run, tmp_path_factory):
    """The run in all formats."""
    folder = tmp_path_factory.mktemp("small")
    for weights in FORMATS:
        assert cli.main(["quantize", "--run", str(run), "--weights", weights, "--out", str(folder / weights)]) == 0
    return folder


@pytest.mark.parametrize("weights", FORMATS)
def test_what_is_read_back_is_what_was_quantised(run, small, weights):
    original, again = jdllm.load(run), jdllm.load(small / weights)
    convert = jax.jit(quantize_params, static_argnums=1)
    for tree, wanted in ((again.params, original.params), (again.frozen, original.frozen)):
        assert quantized_weights(tree) == weights
        jax.tree.map(np.testing.assert_array_equal, *map(bits, (tree, convert(wanted, weights))))
    np.testing.assert_array_equal(again.edges, original.edges)
    assert again.step == STEP and again.config == original.config
    tokens = again.generate_tokens(seed=1, num=4, steps=2)
    assert len(np.unique(tokens)) > 4 and again.generate(seed=1, num=4, steps=2) == again.decode(tokens)


def bits(tree):
    """fp8 as bytes, which NumPy can compare."""
    return jax.tree.map(lambda x: np.asarray(x).view(np.uint8) if x.dtype.itemsize == 1 else np.asarray(x), tree)


def test_the_folder_says_what_it_is_and_holds_no_frozen_head_in_16_bits(run, small):
    record = json.loads((small / "fp8" / "data.json").read_text())
    assert (record["weights"], record["quantized_from"], record["quantized_step"]) == ("fp8", str(run), STEP)
    names = {path.name for path in (small / "fp8").iterdir()}
    assert names == {"config.json", "tokenizer.json", "valid_windows.npz", "data.json", "checkpoints"}


def test_it_is_evaluated_like_a_run(small, capsys):
    options = ["--steps", "2", "--num", "4", "--scorer", "none"]
    assert cli.main(["eval", "--run", str(small / "int8"), *options]) == 0
    assert json.loads((small / "int8" / "eval.json").read_text())["samples"]["2"]["samples"]["texts"] == 4


def test_training_exporting_and_quantising_it_again_are_refused(run, small, tmp_path):
    config = jdllm.load(run).config
    with pytest.raises(ConfigError, match=f"int8 weights, which cannot be trained; go on with {run}"):
        check_resume(config, small / "int8")
    with pytest.raises(ConfigError, match=f"int8 weights already; quantise {run}"):
        quantize_run(small / "int8", tmp_path / "again", "fp8")
    with pytest.raises(ConfigError, match="int8 weights, which PyTorch's side does not read"):
        export_run(small / "int8", tmp_path / "exported")
    with pytest.raises(ConfigError, match=r"int8 exists already; choose another --out"):
        quantize_run(run, small / "int8", "fp8")
    assert not list(tmp_path.iterdir())


def test_a_record_that_does_not_fit_the_checkpoint_is_an_error(small, tmp_path):
    """int8 called fp8: the manifest tells them apart."""
    record = json.loads((small / "int8" / "data.json").read_text())
    for name in ("config.json", "tokenizer.json", "checkpoints"):
        (tmp_path / name).symlink_to(small / "int8" / name)
    (tmp_path / "data.json").write_text(json.dumps(record | {"weights": "fp8"}))
    with pytest.raises(CheckpointError, match=r"kernel/values is int8.* there, float8_e4m3fn"):
        jdllm.load(tmp_path)
    del record["weights"]
    (tmp_path / "data.json").write_text(json.dumps(record))
    with pytest.raises(
        CheckpointError, match="kernel/values is only in the checkpoint|kernel is not in the checkpoint"
    ):
        jdllm.load(tmp_path)


def test_only_the_encoder_and_what_is_no_matrix_keep_their_numbers(run, small):
    original, again = jdllm.load(run).params, jdllm.load(small / "int4").params
    kept = jax.tree.leaves_with_path(again, is_leaf=is_quantized)
    flat = dict(jax.tree.leaves_with_path(original))
    plain = {path: leaf for path, leaf in kept if not is_quantized(leaf)}
    assert 0 < len(plain) < len(flat)
    for path, leaf in plain.items():
        np.testing.assert_array_equal(leaf, flat[path])
