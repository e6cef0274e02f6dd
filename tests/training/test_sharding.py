"""Eight devices, however they are arranged, do what one does."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jdllm.config import ConfigError, ModelConfig, preset
from jdllm.training.sharding import SMALL, batch_sharding, make_mesh, state_sharding
from jdllm.training.state import init_state, make_optimizer

STEPS = 3
ARRANGEMENTS = (1, 2, 8)


def small_config(fsdp=1):
    """Just large enough that stacked weights are worth sharding."""
    model = ModelConfig(
        hidden_dim=12, vocab_size=37, num_tokens=8, num_latents=8, latent_dim=64, head_dim=32,
        encoder_depth=2, decoder_depth=2, token_decoder_depth=1, denoiser_depth=2,
    )  # fmt: skip
    return preset("smoke").replace(
        model=model, training__batch_size=16, training__fsdp=fsdp, diffusion__timestep_bins=10,
        objective__gamma_gate=0.0, objective__gamma_warmup_steps=2, optimizer__warmup_steps=1,
    )  # fmt: skip


def few_steps(fsdp):
    """Losses of a few steps, and the weights after them, on all devices there are."""
    import jax.numpy as jnp

    from jdllm.model.ldlm import Model
    from jdllm.training.step import make_train_step

    config = small_config(fsdp)
    model, mesh, optimizer = Model(config), make_mesh(config), make_optimizer(config.optimizer)
    moments = (jnp.zeros(12), jnp.ones(12))
    shapes = jax.eval_shape(lambda *m: init_state(model, optimizer, *m), *moments)
    shardings = state_sharding(mesh, shapes)
    state = jax.jit(lambda *m: init_state(model, optimizer, *m), out_shardings=shardings)(*moments)
    step = jax.jit(make_train_step(model, optimizer), donate_argnums=0, out_shardings=(shardings, None))
    rng, values = np.random.default_rng(0), {}
    for index in range(STEPS):
        batch = {
            "hidden": rng.normal(size=(16, 8, 12)).astype(jnp.bfloat16),
            "ids": rng.integers(0, 37, (16, 8)).astype(np.int32),
            "lengths": rng.integers(3, 9, 16).astype(np.int32),
        }
        state, metrics = step(state, {}, jax.device_put(batch, batch_sharding(mesh)), 0.0)
        values |= {f"{index}/{name}": np.asarray(value) for name, value in metrics.items()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.ema_params):
        values["weight" + jax.tree_util.keystr(path)] = np.asarray(leaf)
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards[:1])
    return values, held / sum(leaf.nbytes for leaf in jax.tree.leaves(state))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """few_steps of each arrangement in a process of eight virtual devices."""
    folder = tmp_path_factory.mktemp("eight")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    done = subprocess.run([sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {fsdp: dict(np.load(folder / f"{fsdp}.npz")) for fsdp in ARRANGEMENTS}


@pytest.fixture(scope="module")
def one():
    assert jax.device_count() == 1
    return few_steps(1)[0]


@pytest.mark.parametrize("fsdp", ARRANGEMENTS)
def test_eight_devices_equal_one(fsdp, eight, one):
    found = eight[fsdp]
    assert found.pop("held") <= {1: 1.0, 2: 0.75, 8: 0.5}[fsdp]  # a device keeps its share of the large arrays alone
    assert found.keys() == one.keys()
    for name, value in one.items():
        tolerance = {"atol": 1e-4} if name.startswith("weight") else {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)


def test_arrangements_that_do_not_divide_are_sentences():
    with pytest.raises(ConfigError, match="training.fsdp=3 does not divide the 1 devices"):
        make_mesh(small_config(3))


def test_large_arrays_are_split_along_their_longest_axis_and_small_ones_are_whole():
    mesh = jax.sharding.AbstractMesh((1, 8), ("data", "fsdp"))
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((2, 64, 512), (64, 31), (SMALL * 8 + 1,), ())]
    specs = [tuple(sharding.spec) for sharding in state_sharding(mesh, shapes)]
    assert specs == [(None, None, "fsdp"), (), (), ()]


if __name__ == "__main__":
    for arrangement in ARRANGEMENTS:
        results, share = few_steps(arrangement)
        np.savez(f"{sys.argv[1]}/{arrangement}.npz", held=share, **results)
