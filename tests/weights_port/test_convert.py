"""The table of names against both models at every preset's real size, and what it says of weights that do not fit."""

import jax
import numpy as np
import pytest
import torch

from jdllm.config import PRESETS
from jdllm.model.ldlm import Model
from weights_port import convert, torch_ldlm

PARTS = {"latent_stats", "timesteps", "hidden_mean", "hidden_std"}


@pytest.fixture
def arrays(tiny):
    rng = np.random.default_rng(0)
    arrays = {"params": {}, "frozen": {}}
    for row in convert.key_table(tiny):
        *path, last = row.jax.split("/")
        place = arrays
        for name in path:
            place = place.setdefault(name, {})
        place[last] = rng.normal(size=row.jax_shape).astype(np.float32)
    return arrays


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_shapes_are_those_of_both_models(preset):
    """Without a single weight: shapes of JAX by tracing, of PyTorch on its meta device."""
    config = PRESETS[preset]
    model = Model(config)
    shapes = convert.flatten({"params": model.param_shapes, "frozen": model.frozen_shapes})
    shapes = {name: (leaf.shape, leaf.dtype.name) for name, leaf in shapes.items()}
    rows = [row for row in convert.key_table(config) if row.jax.split("/")[0] not in PARTS]
    assert {row.jax: (row.jax_shape, row.dtype or "float32") for row in rows} == shapes
    with torch.device("meta"):
        twin = torch_ldlm.LDLM(config.model)
    assert {name: row.torch_shape for row in rows for name in row.torch_names} == {
        name: tuple(tensor.shape) for name, tensor in twin.state_dict().items()
    }


def test_there_and_back_is_exact(tiny, arrays):
    back = convert.from_torch(convert.to_torch(arrays, tiny), tiny)
    jax.tree.map(np.testing.assert_array_equal, back, arrays)


def test_blocks_are_split_and_kernels_transposed(tiny, arrays):
    tensors = convert.to_torch(arrays, tiny)
    kernel = arrays["params"]["decoder"]["blocks"]["ffn"]["up"]["kernel"]
    np.testing.assert_array_equal(tensors["decoder.blocks.1.ffn.up.weight"], kernel[1].T)
    assert all(tensor.flags["C_CONTIGUOUS"] for tensor in tensors.values())


def test_bfloat16_rounds_the_weights_and_nothing_else(tiny, arrays):
    tensors = convert.to_torch(arrays, tiny, "bfloat16")
    assert {name for name, tensor in tensors.items() if tensor.dtype == np.float32} == {
        name for row in convert.key_table(tiny) if row.dtype for name in row.torch_names
    }
    back = convert.from_torch(tensors, tiny, "bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(back)} == {"float32"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), back, arrays)


@pytest.mark.parametrize("direction", ["to_torch", "from_torch"])
def test_all_that_does_not_fit_is_said_at_once(tiny, arrays, direction):
    if direction == "to_torch":
        changed, names = arrays["params"]["denoiser"], ["output/kernel", "norm/gain", "input/kernel", "stranger"]
        shape = changed["norm"]["gain"] = changed["norm"]["gain"][:3]
        del changed["output"]
        changed["input"]["kernel"] = changed["input"]["kernel"].astype(np.float16)
        changed["stranger"] = shape
    else:
        changed = convert.to_torch(arrays, tiny)
        names = ["denoiser.output.weight", "denoiser.norm.gain", "denoiser.input.weight", "denoiser.stranger"]
        shape = changed[names[1]] = changed[names[1]][:3]
        del changed[names[0]]
        changed[names[2]] = changed[names[2]].astype(np.float16)
        changed[names[3]] = shape
    with pytest.raises(convert.ConversionError) as error:
        getattr(convert, direction)(arrays if direction == "to_torch" else changed, tiny)
    said = str(error.value)
    for name, words in zip(names, ["is missing", "has shape (3,), the config wants (16,)", "float16", "is unexpected"]):
        assert any(name in line and words in line for line in said.splitlines()), (name, words, said)
