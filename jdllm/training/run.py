"""A run on disk, read back: `jdllm.load(run_dir)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from jdllm.config import Config, ConfigError
from jdllm.diffusion.timesteps import cumulative, init_timesteps
from jdllm.generation.generator import Generator
from jdllm.kernels.quantize import quantize_params
from jdllm.model.ldlm import Model, Params
from jdllm.model.standardize import init_stats
from jdllm.training.checkpoint import Checkpoints

FROZEN_HEAD = "frozen_head.safetensors"


def load(run_dir: str | Path, *, checkpoint: int | None = None, dtype: str | None = None) -> Generator:
    """The averaged weights of a run, ready to generate; the newest checkpoint unless its step is given.

    `dtype` defaults to the run's compute_dtype on a GPU and to float32 on a CPU.  ConfigError when the folder is no run.
    """
    run_dir = Path(run_dir)
    record = read_record(run_dir)
    weights = record.get("weights")
    model, checkpoints = Model(Config.load(run_dir / "config.json")), Checkpoints(run_dir / "checkpoints")
    config, step = model.config, chosen_step(checkpoints, checkpoint)
    like = stored_state(model, weights)
    state, _ = checkpoints.restore_partial(step, like, tuple(like))
    if dtype is None:
        dtype = config.training.compute_dtype if jax.default_backend() == "gpu" else "float32"
    return Generator(
        config=config,
        params=state["ema_params"],
        frozen=state["frozen"] if weights else load_frozen(run_dir, model),
        edges=cumulative(state["timesteps"], config.diffusion),
        latent_stats=state["latent_stats"],
        hidden_mean=state["hidden_mean"],
        hidden_std=state["hidden_std"],
        tokenizer=tokenizers.Tokenizer.from_file(str(run_dir / "tokenizer.json")),
        eos_id=int(record["eos_id"]),
        dtype=dtype,
        step=step,
    )


def read_record(run_dir: Path) -> dict[str, Any]:
    """The run's data.json; ConfigError when the folder is no run."""
    for name, what in (("config.json", "config"), ("tokenizer.json", "tokenizer"), ("data.json", "data record")):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{run_dir} holds no {name} ({what}); pass the folder of a run, such as runs/quickstart")
    return json.loads((run_dir / "data.json").read_text())


def chosen_step(checkpoints: Checkpoints, checkpoint: int | None) -> int:
    """The checkpoint asked for, or the newest; ConfigError when there is none."""
    step = checkpoints.latest() if checkpoint is None else checkpoint
    if step is None:
        run_dir = checkpoints.directory.parent
        raise ConfigError(f"{run_dir} has no checkpoint yet; train until training.checkpoint_every steps are done")
    return step


def stored_state(model: Model, weights: str | None) -> dict[str, Any]:
    """Shapes of what generation reads of a checkpoint; of one with quantised `weights` (training/quantized.py) as well."""
    config = model.config
    width = jax.ShapeDtypeStruct((config.model.hidden_dim,), jnp.float32)
    like = {
        "ema_params": model.param_shapes,
        "latent_stats": jax.eval_shape(lambda: init_stats(config.model)),
        "timesteps": jax.eval_shape(lambda: init_timesteps(config.diffusion)),
        "hidden_mean": width,
        "hidden_std": width,
    }
    if weights:
        for name, tree in (("ema_params", model.param_shapes), ("frozen", model.frozen_shapes)):
            like[name] = jax.eval_shape(lambda tree: quantize_params(tree, weights), tree)
    return like


def save_frozen(run_dir: Path, head: np.ndarray) -> None:
    """Keep the language model's head (d_h, v), norm gain folded in, with the run: generation needs nothing else of it."""
    safetensors.numpy.save_file({"head": np.ascontiguousarray(head)}, run_dir / FROZEN_HEAD)


def load_frozen(run_dir: Path, model: Model, shardings: Params | None = None) -> Params:
    """The frozen weights of a run as the model wants them: empty when the head is trained.

    With `shardings`, as `model.frozen_shapes` is built, each process reads the slices of its devices alone.
    """
    if not jax.tree.leaves(model.frozen_shapes):
        return model.frozen_shapes
    path = run_dir / FROZEN_HEAD
    if not path.is_file():
        raise ConfigError(f"{path} is missing, but model.head is 'encoder'; copy it from where the run was trained")
    wanted = model.frozen_shapes["token_decoder"]["head"].shape
    with safetensors.safe_open(path, framework="numpy") as file:
        head = file.get_slice("head")
        shape = tuple(head.get_shape())
        if shape != wanted:
            raise ConfigError(f"{path} has shape {shape}, the config wants {wanted}; it belongs to another run")
        if shardings is None:
            array = jnp.asarray(head[:], jnp.bfloat16)
        else:
            place = shardings["token_decoder"]["head"]
            array = jax.make_array_from_callback(shape, place, lambda at: head[at].astype(jnp.bfloat16))
    return {"token_decoder": {"head": array}}
