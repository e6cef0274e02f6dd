"""One table of names between a jdllm run and the PyTorch twin, and safetensors in and out.

Left are the paths of the nested dict that JAX holds ("params/denoiser/blocks/ffn/up/kernel"), right the names of
weights_port/torch_ldlm.py ("denoiser.blocks.0.ffn.up.weight").  Three things differ: JAX stacks equal blocks along a
leading axis, PyTorch lists them; a JAX kernel is (in, out), a PyTorch weight (out, in); and what is not a weight of the
model (latent statistics, warp, moments of the hidden states) is float32 whatever the weights are.

Shapes in the table come from the config, so that both sides are held against a third.  Everything that does not fit is
reported in one error.  NumPy only: neither jax nor torch is imported.  Left out: files in several shards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jdllm.config import Config, ConfigError

WEIGHTS = "model.safetensors"
FORMAT = "jdllm-ldlm-1"
NESTED = "jdllm"
"""Where our own values stand in the config.json of a folder for transformers."""
DTYPES = ("float32", "bfloat16")
_SAFETENSORS_DTYPE = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
}  # fmt: skip
_SHOWN = 12  # problems named in one message

Arrays = dict[str, Any]
"""Nested dict of arrays, with the entries params, frozen, latent_stats, timesteps, hidden_mean, hidden_std."""
Kind = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor."""


class ConversionError(ConfigError):
    """Weights that do not fit the config; the message lists all of them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of JAX and the tensor, or the tensors of all blocks, that it is in PyTorch."""

    jax: str
    torch: str
    """With {} for the number of the block where there is a stack."""
    shape: tuple[int, ...]
    """In JAX, without the axis of the stack."""
    depth: int | None = None
    """Blocks in the stack."""
    transpose: bool = False
    dtype: str | None = None
    """Of what is not in the arithmetic of the weights."""

    @property
    def jax_shape(self) -> tuple[int, ...]:
        return self.shape if self.depth is None else (self.depth, *self.shape)

    @property
    def torch_names(self) -> list[str]:
        return [self.torch] if self.depth is None else [self.torch.format(i) for i in range(self.depth)]

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transpose else self.shape


def key_table(config: Config) -> list[Row]:
    """Every array that generation needs."""
    c, d, h, t = config.model, config.model.latent_dim, config.model.hidden_dim, config.model.num_tokens
    k, f, bins = c.num_latents, config.model.ffn_multiple * config.model.latent_dim, config.diffusion.timestep_bins

    def linear(name: str, d_in: int, d_out: int, bias: bool = False) -> Iterator[tuple[str, str, tuple, bool]]:
        yield f"{name}/kernel", f"{name}/weight", (d_in, d_out), True
        if bias:
            yield f"{name}/bias", f"{name}/bias", (d_out,), False

    def plain(name: str, *shape: int) -> Iterator[tuple[str, str, tuple, bool]]:
        yield name, name, shape, False

    ffn = [*linear("ffn/up", d, f, bias=True), *linear("ffn/down", f, d, bias=True)]
    qk_norm = [*plain("q_norm/gain", c.head_dim), *plain("k_norm/gain", c.head_dim)]
    self_attention = [*linear("qkv", d, 3 * d), *qk_norm, *linear("out", d, d)]
    token_block = [
        *plain("attention_norm/gain", d), *plain("ffn_norm/gain", d), *ffn,
        *((f"attention/{jax}", f"attention/{torch}", *rest) for jax, torch, *rest in self_attention),
    ]  # fmt: skip
    denoiser_block = [*plain("table", 6, d), *token_block]
    perceiver_block = [
        *plain("query_input_norm/gain", d), *plain("context_input_norm/gain", d), *linear("query", d, d),
        *linear("query_kv", d, 2 * d), *linear("context_kv", d, 2 * d), *qk_norm, *linear("out", d, d),
        *plain("ffn_norm/gain", d), *ffn,
    ]  # fmt: skip
    single = {
        "encoder": [*linear("input", h, d), *plain("token_positions", t, d), *plain("queries", k, d), *linear("output", d, d)],
        "denoiser": [
            *linear("input", 2 * d, d), *linear("time_up", 256, d, bias=True), *linear("time_down", d, d, bias=True),
            *linear("time_modulation", d, 6 * d, bias=True), *plain("norm/gain", d), *linear("output", d, d),
        ],
        "decoder": [
            *linear("input", d, d), *plain("latent_positions", k, d), *plain("queries", t, d), *plain("norm/gain", d),
            *linear("output", d, h),
        ],
        "token_decoder": [*linear("input", h, d), *(linear("output", d, h) if c.head == "encoder" else plain("norm/gain", d))],
    }  # fmt: skip
    stacked = {
        "encoder": (c.encoder_depth, perceiver_block),
        "denoiser": (c.denoiser_depth, denoiser_block),
        "decoder": (c.decoder_depth, perceiver_block),
        "token_decoder": (c.token_decoder_depth, token_block if c.token_decoder_depth else []),
    }
    rows = []
    for part, entries in single.items():
        for jax, torch, shape, transpose in entries:
            name = f"{part}/{torch}".replace("/", ".")
            rows.append(Row(f"params/{part}/{jax}", name, shape, transpose=transpose))
        depth, entries = stacked[part]
        for jax, torch, shape, transpose in entries:
            name = f"{part}/blocks/{{}}/{torch}".replace("/", ".")
            rows.append(Row(f"params/{part}/blocks/{jax}", name, shape, depth, transpose))
    if c.head == "encoder":  # the frozen model's own, in the precision in which jdllm keeps it
        shape, path, dtype = (h, c.vocab_size), "frozen/token_decoder/head", "bfloat16"
    else:
        shape, path, dtype = (d, c.vocab_size), "params/token_decoder/head", None
    rows.append(Row(path, "token_decoder.head.weight", shape, transpose=True, dtype=dtype))
    for name, shape in (
        ("latent_stats/mean", (k, d)), ("latent_stats/variance", (k, d)), ("latent_stats/weight", ()),
        ("timesteps/edges", (bins + 1,)), ("timesteps/loss_sum", (bins,)), ("timesteps/weight", (bins,)),
        ("hidden_mean", (h,)), ("hidden_std", (h,)),
    ):  # fmt: skip
        rows.append(Row(name, name.replace("/", "."), shape, dtype="float32"))
    return rows


def torch_kinds(config: Config, dtype: str) -> dict[str, Kind]:
    """Shape and dtype of every tensor of an exported file whose weights are in `dtype`."""
    return {name: (row.torch_shape, row.dtype or dtype) for row in key_table(config) for name in row.torch_names}


def check(found: Mapping[str, Kind], wanted: Mapping[str, Kind], where: str | Path) -> None:
    """ConversionError that lists every missing, unexpected, wrongly shaped and wrongly typed tensor."""
    problems = []
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            problems.append(f"{name} is missing; it should be {dtype}{shape}")
            continue
        if found[name][0] != shape:
            problems.append(f"{name} has shape {found[name][0]}, the config wants {shape}")
        if found[name][1] != dtype:
            problems.append(f"{name} is {found[name][1]}, {dtype} is wanted")
    problems += [f"{name} is unexpected" for name in found if name not in wanted]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConversionError(f"{where} does not fit the config:\n  " + "\n  ".join([*problems[:_SHOWN], *more]))


def to_torch(arrays: Arrays, config: Config, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Arrays of a run (float32 weights) -> tensors by their PyTorch name, weights in `dtype`."""
    flat = flatten(arrays)
    found = {name: (tuple(np.shape(leaf)), np.dtype(leaf.dtype).name) for name, leaf in flat.items()}
    check(found, {row.jax: (row.jax_shape, row.dtype or "float32") for row in key_table(config)}, "the run")
    tensors = {}
    for row in key_table(config):
        array = np.asarray(flat.pop(row.jax))
        for name, part in zip(row.torch_names, [array] if row.depth is None else array):
            part = part.T if row.transpose else part
            tensors[name] = np.ascontiguousarray(part.astype(_dtype(row.dtype or dtype), copy=False)).reshape(
                part.shape
            )
    return tensors


def from_torch(tensors: Mapping[str, np.ndarray], config: Config, dtype: str = "float32") -> Arrays:
    """The inverse of `to_torch`: nested arrays, weights widened to float32."""
    found = {name: (tuple(tensor.shape), tensor.dtype.name) for name, tensor in tensors.items()}
    check(found, torch_kinds(config, dtype), "the file")
    arrays: Arrays = {"params": {}, "frozen": {}}
    for row in key_table(config):
        parts = [tensors[name].T if row.transpose else tensors[name] for name in row.torch_names]
        array = parts[0] if row.depth is None else np.stack(parts)
        *path, last = row.jax.split("/")
        place = arrays
        for name in path:
            place = place.setdefault(name, {})
        place[last] = array.astype(_dtype(row.dtype or "float32"), copy=False)
    return arrays


def flatten(arrays: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} -> {"a/b": x}."""
    flat = {}
    for key, value in arrays.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


@dataclasses.dataclass(frozen=True)
class About:
    """What config.json of an exported folder says beside the shapes."""

    config: Config
    dtype: str
    """Of the weights in the file."""
    step: int
    """Optimiser steps behind the weights."""
    eos_id: int
    encoder: dict[str, Any] | None
    """Identity of the frozen language model, as the run's data.json has it."""


def write_about(folder: Path, about: About) -> None:
    """config.json of an exported folder."""
    values = {"format": FORMAT, **dataclasses.asdict(about)}
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_about(folder: Path) -> About:
    """What `write_about` wrote; ConfigError when it is something else."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(f"{folder} holds no config.json; pass a folder that `jdllm export` wrote")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path} is not valid JSON ({error}); copy it again") from None
    if isinstance(values, dict):
        values = values.get(NESTED, values)
    wanted = {"format", *(field.name for field in dataclasses.fields(About))}
    if not isinstance(values, dict) or values.get("format") != FORMAT or set(values) != wanted:
        hint = "; this is a run, export it first" if isinstance(values, dict) and "preset" in values else ""
        raise ConversionError(f"{path} was not written by this version of `jdllm export`{hint}")
    if values["dtype"] not in DTYPES:
        raise ConversionError(f"{path}: dtype={values['dtype']!r} is not one of {', '.join(DTYPES)}")
    del values["format"]
    return About(**values | {"config": Config.from_dict(values["config"])})


def weights_file(folder: Path) -> Path:
    """The safetensors file of an exported folder; ConversionError where there is none, and for a pickle."""
    path = folder / WEIGHTS
    if path.is_file():
        return path
    pickles = [file.name for file in folder.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl")]
    if pickles:
        raise ConversionError(
            f"{folder} holds {pickles[0]} and no {WEIGHTS}; a pickle can run code when opened and is never read, "
            "ask for the weights as safetensors"
        )
    raise ConversionError(f"{folder} holds no {WEIGHTS}; pass a folder that `jdllm export` wrote")


def read_tensors(path: Path, config: Config, dtype: str, framework: str = "np", device: str = "cpu") -> dict[str, Any]:
    """All tensors of a file, as NumPy arrays or ("pt") PyTorch tensors; names, shapes and dtypes are checked first.

    ConversionError on what does not fit and on a file that is damaged or no safetensors at all.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework=framework, device=device) as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            found = {
                name: (tuple(part.get_shape()), _SAFETENSORS_DTYPE.get(part.get_dtype(), part.get_dtype()))
                for name, part in slices.items()
            }
            check(found, torch_kinds(config, dtype), path)
            return {name: file.get_tensor(name) for name in found}
    except safetensors.SafetensorError as error:
        raise ConversionError(
            f"{path} is damaged or no safetensors file ({error}); nothing in it was executed.  Copy it again"
        ) from None


def _dtype(name: str) -> np.dtype:
    if name == "bfloat16":
        import ml_dtypes  # comes with jax; the twin, which reads with PyTorch, does not need it

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
