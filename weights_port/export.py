"""A run as a folder that PyTorch loads without jax, and back: the composition behind `jdllm export` and `jdllm import`.

    config.json         the run's config, dtype of the weights, step, EOS id, identity of the encoder
    model.safetensors   averaged weights (and the frozen head, if any), latent statistics, moments of the hidden states,
                        timestep warp; names are those of convert.py
    tokenizer.json      the encoder's
    README.md           what the model is and how it was measured
    *.py                with --format hf: the twin, for transformers (hub.py)

Both directions write beside the target and rename at the end, so a folder that exists is complete.  What comes back is
enough to generate, not to go on training: an optimiser is not exported.  Left out: shards.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from jdllm.config import Config, ConfigError
from jdllm.training.folders import check_target, written_whole
from weights_port import convert
from weights_port.hub import write_code

Format = Literal["torch", "safetensors", "hf"]
"""With a card for PyTorch users; the bare files; with the code besides, so that transformers loads it."""
LOAD = {
    "torch": "weights_port.torch_ldlm.load({!r})",
    "hf": "transformers.AutoModel.from_pretrained({!r}, trust_remote_code=True)",
}
USE = {
    "torch": f"""import weights_port.torch_ldlm  # from the jdllm repository; needs torch, safetensors, tokenizers

generator = {LOAD["torch"].format("this folder")}""",
    "hf": f"""import transformers  # nothing of jdllm; the code that this runs lies in this folder

generator = {LOAD["hf"].format("this folder")}""",
}


def export_run(
    run_dir: Path, out: Path, *, checkpoint: int | None = None, dtype: str = "float32", format: Format = "torch"
) -> None:
    """Write the folder `out`; ConfigError when it is not empty or the run cannot be loaded."""
    import jax

    from jdllm.diffusion.timesteps import init_timesteps
    from jdllm.kernels.quantize import quantized_weights
    from jdllm.training.checkpoint import Checkpoints
    from jdllm.training.run import load

    check_target(out, "--out")
    generator = load(run_dir, checkpoint=checkpoint, dtype="float32")
    kind = generator.config.model.kind
    if kind != "ldlm":
        raise ConfigError(f"{run_dir} holds a baseline (model.kind={kind}); PyTorch's side knows the LDLM alone")
    if quantized_weights(generator.params):
        raise ConfigError(
            f"{run_dir} holds {quantized_weights(generator.params)} weights, which PyTorch's side does not read; export the "
            "run it was made from"
        )
    config, step = generator.config, generator.step
    like = {"timesteps": jax.eval_shape(lambda: init_timesteps(config.diffusion))}
    timesteps = Checkpoints(run_dir / "checkpoints").restore_partial(step, like, ("timesteps",))[0]["timesteps"]
    arrays = {
        "params": generator.params, "frozen": generator.frozen, "latent_stats": generator.latent_stats._asdict(),
        "timesteps": {"edges": generator.edges, **timesteps._asdict()},
        "hidden_mean": generator.hidden_mean, "hidden_std": generator.hidden_std,
    }  # fmt: skip
    tensors = convert.to_torch(arrays, config, dtype)
    data = json.loads((run_dir / "data.json").read_text())
    about = convert.About(config, dtype, step, generator.eos_id, data.get("encoder"))
    with written_whole(out) as folder:
        safetensors.numpy.save_file(tensors, folder / convert.WEIGHTS, metadata={"format": "pt"})
        convert.write_about(folder, about)
        shutil.copy(run_dir / "tokenizer.json", folder / "tokenizer.json")
        if format != "safetensors":
            card = model_card(about, tensors, *evaluation(run_dir), use=USE[format])
            (folder / "README.md").write_text(card, encoding="utf-8")
        if format == "hf":
            write_code(folder)
    size = sum(tensor.nbytes for tensor in tensors.values())
    load_it = LOAD["hf" if format == "hf" else "torch"].format(str(out))
    say(f"{out}: step {step:,}, {dtype}, {size / 1e6:,.1f} MB; load it with: {load_it}")


def import_run(folder: Path, run_dir: Path) -> None:
    """Make a run that `jdllm.load` can generate from; ConfigError when the target is not empty or the folder does not fit."""
    import jax
    import jax.numpy as jnp

    from jdllm.diffusion.timesteps import TimestepState, cumulative
    from jdllm.model.standardize import LatentStats
    from jdllm.training.checkpoint import Checkpoints
    from jdllm.training.run import save_frozen

    check_target(run_dir, "--run")
    path, about = convert.weights_file(folder), convert.read_about(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} holds no tokenizer.json; copy it again from where it was exported")
    tensors = convert.read_tensors(path, about.config, about.dtype)
    arrays = convert.from_torch(tensors, about.config, about.dtype)
    edges = arrays["timesteps"].pop("edges")
    timesteps = TimestepState(**arrays["timesteps"])
    if not np.allclose(edges, cumulative(jax.tree.map(jnp.asarray, timesteps), about.config.diffusion), atol=1e-5):
        say("note: this version of jdllm warps time otherwise than the one that exported; texts will differ a little")
    state = {
        "ema_params": arrays["params"], "latent_stats": LatentStats(**arrays["latent_stats"]), "timesteps": timesteps,
        "hidden_mean": arrays["hidden_mean"], "hidden_std": arrays["hidden_std"],
    }  # fmt: skip
    origin = {"imported": str(folder)}  # what stands in place of the data, so that training on it is refused in words
    data = {
        "eos_id": about.eos_id, "encoder": about.encoder, "train_windows": "imported",
        "train": {"path": "", "hash": "", "key": origin}, "valid": {"path": "", "hash": "", "key": origin},
    }  # fmt: skip
    with written_whole(run_dir) as run:
        checkpoints = Checkpoints(run / "checkpoints", keep=1)
        checkpoints.save(about.step, state, {"config": about.config.to_dict(), "seconds": 0.0, **origin})
        checkpoints.close()
        if arrays["frozen"]:
            save_frozen(run, arrays["frozen"]["token_decoder"]["head"])
        shutil.copy(folder / "tokenizer.json", run / "tokenizer.json")
        (run / "data.json").write_text(json.dumps(data, indent=2) + "\n")
        about.config.save(run / "config.json")
    say(f"{run_dir}: step {about.step:,}, to generate from: jdllm generate --run {run_dir}")


def evaluation(run_dir: Path) -> tuple[str | None, int | None]:
    """The table that `jdllm eval` left, and the step it was measured at."""
    table, report = run_dir / "eval.md", run_dir / "eval.json"
    if not table.is_file():
        return None, None
    measured = json.loads(report.read_text()).get("checkpoint") if report.is_file() else None
    return table.read_text(encoding="utf-8"), measured


def model_card(
    about: convert.About, tensors: dict[str, Any], table: str | None, measured: int | None, *, use: str
) -> str:
    """README.md of an exported folder; `use` is Python that loads it."""
    c: Config = about.config
    m, rows = c.model, convert.key_table(c)
    weights = sum(tensors[name].size for row in rows if row.jax.startswith("params/") for name in row.torch_names)
    head = (
        f"It contains the output head of {c.encoder} unchanged but for its norm gain; the licence of that model applies to it."
        if m.head == "encoder"
        else "The token head was trained with the rest."
    )
    if table is None:
        judged = "Not evaluated: `jdllm eval` was not run before the export."
    else:
        other = (
            f"Measured at step {measured:,}, not at the step of these weights.\n\n"
            if measured not in (None, about.step)
            else ""
        )
        judged = f"{other}By `jdllm eval`, samples from noise beside held-out human text:\n\n{table.strip()}"
    return f"""---
library_name: jdllm
tags: [diffusion, text-generation, ldlm]
---
# {c.preset}, step {about.step:,}

A latent diffusion language model (the recipe of LDLM, arXiv 2605.07933), trained with jdllm. It writes windows of {m.num_tokens} tokens
from noise, without a prompt. It does not chat, follow instructions or continue a text, and nothing was done to make what it
writes true or harmless.

| | |
|---|---|
| learned from the hidden states of | {c.encoder}, layer {c.feed.layer} (not needed to generate) |
| training text | {c.data} |
| trained weights | {weights:,} in {about.dtype}, running average |
| optimiser steps | {about.step:,} |
| latents | {m.num_latents} of width {m.latent_dim}; hidden states of width {m.hidden_dim} |
| blocks: encoder, decoder, token decoder, denoiser | {m.encoder_depth}, {m.decoder_depth}, {m.token_decoder_depth}, {m.denoiser_depth} |
| vocabulary | {m.vocab_size:,} |
| sampling by default | {c.sampling.sampler}, {c.sampling.steps} steps |

{head}

## Use
```python
{use}
print(generator.generate(num=4, steps={c.sampling.steps}, seed=0))
```
Back to JAX: `jdllm import --folder "this folder" --run runs/imported`.

## Evaluation
{judged}
"""


def say(message: str) -> None:
    """Progress for the person at the terminal."""
    print(message, file=sys.stderr, flush=True)
