"""The PyTorch twin beside the JAX model, stage by stage, from the same weights and inputs: how far apart are they?

Every stage gets its own random input, so that an error shows where it arises; `row` is denoiser and decoders one after the
other, where roundings add up.  Used by the tests at tiny size and by experiments/verify_port.py at full width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jaxtyping import Float, Int

from jdllm.config import Config, ModelConfig
from jdllm.generation.generator import Generator
from jdllm.model.ldlm import Model
from jdllm.model.random_weights import random_weights
from jdllm.model.standardize import init_stats
from weights_port import torch_baseline, torch_ldlm

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative error of a stage that issue 4 allows."""


class Inputs(NamedTuple):
    """Random inputs of all stages."""

    hidden: Float[np.ndarray, "b t dh"]
    lengths: Int[np.ndarray, " b"]
    z: Float[np.ndarray, "b k d"]
    previous: Float[np.ndarray, "b k d"]
    tau: Float[np.ndarray, " b"]


def random_inputs(model: ModelConfig, rows: int, seed: int) -> Inputs:
    """Texts of several lengths, times from clean to noise."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, model.num_tokens + 1, rows)
    valid = np.arange(model.num_tokens) < lengths[:, None]
    hidden = rng.normal(size=(*valid.shape, model.hidden_dim)) * valid[..., None]
    z, previous = rng.normal(size=(2, rows, model.num_latents, model.latent_dim)).astype(np.float32)
    # bfloat16 holds the hidden states exactly, as it does those of a cache
    hidden = hidden.astype(ml_dtypes.bfloat16).astype(np.float32)
    return Inputs(hidden, lengths.astype(np.int32), z, previous, np.linspace(0.0, 1.0, rows, dtype=np.float32))


def jax_stages(ours: Generator, inputs: Inputs) -> dict[str, jax.Array]:
    """Raw latents, modulation, estimate, hidden states, logits; `row`: logits of the estimate."""

    @jax.jit
    def stages(params: Any, frozen: Any, x: Inputs) -> dict[str, jax.Array]:
        module, dtype = ours.model.merge(params, frozen), ours.dtype
        modulation, z = module.denoiser.modulation(x.tau), x.z.astype(dtype)
        estimate = module.denoiser(z, modulation, x.previous.astype(dtype))
        hidden, logits = module.decoder(z), module.token_decoder.logits
        return {
            "latents": module.encoder(x.hidden.astype(dtype), x.lengths), "modulation": modulation, "estimate": estimate,
            "hidden": hidden, "logits": logits(hidden), "row": logits(module.decoder(estimate)),
        }  # fmt: skip

    with jax.default_matmul_precision("highest" if ours.dtype == "float32" else "default"):
        return stages(ours.params, ours.frozen, Inputs(*map(jnp.asarray, inputs)))


@torch.inference_mode()
def torch_stages(theirs: torch_ldlm.Generator, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same of the twin."""
    x = Inputs(*(torch.from_numpy(array).to(theirs.device) for array in inputs))
    model = theirs.model
    modulation, z = model.denoiser.modulation(x.tau), x.z.to(model.dtype)
    estimate = model.denoiser(z, modulation, x.previous.to(model.dtype))
    return {
        "latents": model.encoder(x.hidden.to(model.dtype), x.lengths), "modulation": modulation, "estimate": estimate,
        "hidden": model.decoder(z), "logits": model.logits(x.z), "row": model.logits(estimate),
    }  # fmt: skip


def distance(found: Any, wanted: Any) -> float:
    """Norm of the difference over the norm, in float64."""
    found, wanted = as_array(found), as_array(wanted)
    if found.shape != wanted.shape:
        raise ValueError(f"shapes differ: {found.shape} and {wanted.shape}")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def as_array(x: Any) -> Float[np.ndarray, "*n"]:
    """A tensor of either side in float64 on the host."""
    return (x.detach().float().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float32)).astype(
        np.float64
    )


def random_pair(config: Config, dtype: str, seed: int) -> tuple[Generator, torch_ldlm.Generator]:
    """A JAX generator with random weights in `dtype`, and its twin, on the same device."""
    model, width = Model(config), config.model.hidden_dim
    params, frozen = random_weights(model, seed, jnp.dtype(dtype))
    ours = Generator(
        config=config, params=params, frozen=frozen, edges=jnp.linspace(0.0, 1.0, config.diffusion.timestep_bins + 1),
        latent_stats=init_stats(config.model), hidden_mean=jnp.zeros(width), hidden_std=jnp.ones(width),
        tokenizer=None, eos_id=0, dtype=dtype, implementation="xla",
    )  # fmt: skip
    return ours, torch_baseline.twin(config, ours.params, ours.frozen, dtype)
