"""A run whose weights are quantised, as a folder of its own: what `jdllm quantize` writes.

The folder is a run like any other to `jdllm generate` and `jdllm eval`: the same config, tokenizer and held-out windows, one
checkpoint without optimiser, read back as strictly as others.  data.json says what it holds (`weights`, `quantized_from`,
`quantized_step`), and training on it is refused.  A frozen head lies quantised in the checkpoint, not in a file beside it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax

from jdllm.config import Config, ConfigError
from jdllm.kernels.quantize import Weights, quantize_params
from jdllm.model.ldlm import Model
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.folders import check_target, written_whole
from jdllm.training.run import chosen_step, load_frozen, read_record, stored_state


def quantize_run(run_dir: Path, out: Path, weights: Weights, *, checkpoint: int | None = None) -> int:
    """Write `out` from the averaged weights of a run; returns the bytes of its matrices and all else that generation reads.

    ConfigError when `out` is not empty, the run cannot be loaded, or it is quantised already.
    """
    check_target(out, "--out")
    record = read_record(run_dir)
    if "weights" in record:
        raise ConfigError(
            f"{run_dir} holds {record['weights']} weights already; quantise {record['quantized_from']}, which it was made from"
        )
    config = Config.load(run_dir / "config.json")
    if config.model.kind != "ldlm":
        raise ConfigError(f"{run_dir} holds a baseline (model.kind={config.model.kind}); only an LDLM can be quantised")
    model, checkpoints = Model(config), Checkpoints(run_dir / "checkpoints")
    step = chosen_step(checkpoints, checkpoint)
    like = stored_state(model, None)
    state, extra = checkpoints.restore_partial(step, like, tuple(like))
    convert = jax.jit(quantize_params, static_argnums=1)
    state["ema_params"] = convert(state["ema_params"], weights)
    state["frozen"] = convert(load_frozen(run_dir, model), weights)
    origin = {"weights": weights, "quantized_from": str(run_dir), "quantized_step": step}
    with written_whole(out) as folder:
        writer = Checkpoints(folder / "checkpoints", keep=1)
        writer.save(step, state, {**extra, **origin})
        writer.close()
        for name in ("config.json", "tokenizer.json", "valid_windows.npz"):
            if (run_dir / name).is_file():
                shutil.copy(run_dir / name, folder / name)
        (folder / "data.json").write_text(json.dumps({**record, **origin}, indent=2) + "\n")
    parts = {name: tree for name, tree in state["ema_params"].items() if name != "encoder"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves((parts, state["frozen"])))
