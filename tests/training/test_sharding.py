"""Eight devices, however they are arranged, do what one does; each keeps its share, and weights are gathered block by block."""

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm.config import ConfigError, ModelConfig, preset
from jdllm.model.ldlm import Model
from jdllm.model.placement import SMALL, WHOLE, axis_to_shard, gather, spec
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.run import load_frozen, save_frozen
from jdllm.training.sharding import batch_sharding, make_mesh, on_mesh, own_rows, state_sharding, to_devices
from jdllm.training.state import init_state, make_optimizer
from jdllm.training.step import make_train_step

STEPS = 2


class Drawn(Model):
    """A model whose first weights take no compilation."""

    def init(self, key):
        rng = np.random.default_rng(0)
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype), self.param_shapes)


def small_config(fsdp=1):
    """Just large enough that stacked weights and the head are worth sharding."""
    model = ModelConfig(
        hidden_dim=12, vocab_size=264, num_tokens=8, num_latents=8, latent_dim=64, head_dim=32,
        encoder_depth=2, decoder_depth=2, token_decoder_depth=0, denoiser_depth=2,
    )  # fmt: skip
    return preset("smoke").replace(
        model=model, training__batch_size=16, training__fsdp=fsdp, diffusion__timestep_bins=10,
        objective__gamma_gate=0.0, objective__gamma_warmup_steps=2, optimizer__warmup_steps=1,
    )  # fmt: skip


class Arranged:
    """A step on some devices, and states for it."""

    def __init__(self, fsdp, devices=None):
        self.config = small_config(fsdp)
        self.mesh = make_mesh(self.config, devices)
        model, optimizer = Drawn(self.config, "remat"), make_optimizer(self.config.optimizer)
        self.init = functools.partial(init_state, model, optimizer, jnp.zeros(12), jnp.ones(12))
        self.shapes = jax.eval_shape(self.init)
        self.shardings = state_sharding(self.mesh, self.shapes)
        function = on_mesh(self.mesh, make_train_step(model, optimizer))
        self.step = jax.jit(function, donate_argnums=0, out_shardings=(self.shardings, None))

    def restored(self, folder):
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.shapes, self.shardings
        )
        return Checkpoints(folder / "checkpoints").restore(STEPS, like)[0]

    def batch(self, index):
        rng = np.random.default_rng(index)
        batch = {
            "hidden": rng.normal(size=(16, 8, 12)).astype(jnp.bfloat16),
            "ids": rng.integers(0, 264, (16, 8)).astype(np.int32),
            "lengths": rng.integers(3, 9, 16).astype(np.int32),
        }
        return to_devices(batch, batch_sharding(self.mesh))

    def run(self, state, *indices):
        """The state after some steps, and their metrics and the average's weights by name."""
        values = {}
        for index in indices:
            state, metrics = self.step(state, {}, self.batch(index), 0.0)
            values |= {f"{index}/{name}": np.asarray(value) for name, value in metrics.items()}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.ema_params):
            values["weight" + jax.tree_util.keystr(path)] = np.asarray(leaf)
        return state, values


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def shares(state):
    """The share of large arrays that one device holds: of parameters, average and optimiser."""
    found = {}
    for name in ("params", "ema_params", "opt_state"):
        large = [leaf for leaf in jax.tree.leaves(getattr(state, name)) if leaf.size >= SMALL]
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in large)
        found["held " + name] = held / sum(leaf.nbytes for leaf in large)
    return found


def collectives(hlo):
    """Collective operations of a partitioned program: (where, what, type, shape) -> how often."""
    found, where = Counter(), None
    for line in hlo.splitlines():
        if opening := re.match(r"(ENTRY )?%?[\w.\-]+ .*\{$", line):
            where = "entry" if opening[1] else "body"
        elif found_one := re.search(
            r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)\(", line
        ):
            kind, shape, what = found_one.groups()
            found[where, what, kind, tuple(int(size) for size in shape.split(",") if size)] += 1
    return found


def in_eight(folder):
    """What the process with eight devices leaves for the tests."""
    eight, dump = Arranged(8), {"xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
    state = jax.device_put(eight.init(), eight.shardings)
    program = eight.step.lower(state, {}, eight.batch(0), 0.0)
    eight.step = program.compile(compiler_options=dump | {"xla_dump_to": str(folder / "step")})
    state, values = eight.run(state, *range(STEPS))
    np.savez(folder / "eight.npz", **values, **shares(state))
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoints.save(STEPS, state, {})
    checkpoints.close()
    config = small_config(8).replace(model__head="encoder", model__hidden_dim=64)
    model, head = Model(config), np.random.default_rng(0).normal(size=(64, 264)).astype("bfloat16")
    save_frozen(folder, head)
    loaded = load_frozen(folder, model, state_sharding(eight.mesh, model.frozen_shapes))["token_decoder"]["head"]
    two, four = Arranged(2, jax.devices()[:2]), Arranged(2, jax.devices()[:4])
    same = {"two": bits(two.restored(folder)) == bits(state), "four": bits(four.restored(folder)) == bits(state)}
    np.savez(folder / "four.npz", **four.run(four.restored(folder), STEPS)[1])
    same["head"] = loaded.addressable_shards[0].data.shape == (8, 264) and bits(loaded) == [head.tobytes()]
    np.savez(folder / "same.npz", **same)

    def product(weight, x):
        return jnp.square(x @ gather(weight.astype(jnp.bfloat16), 1)).astype(jnp.float32).sum()

    cut = jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=jax.NamedSharding(eight.mesh, spec(1)))
    rows = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16, sharding=batch_sharding(eight.mesh))
    program = jax.jit(on_mesh(eight.mesh, jax.value_and_grad(product))).lower(cut, rows)
    program.compile(compiler_options=dump | {"xla_dump_to": str(folder / "product")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    done = subprocess.run([sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def one():
    """One device, its state after STEPS, and the values of those steps and of the next one."""
    assert jax.device_count() == 1
    one = Arranged(1)
    state, first = one.run(one.init(), *range(STEPS))
    _, then = one.run(state, STEPS)
    return one, first, then


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = {"atol": 1e-4} if name.startswith("weight") else {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(found[name], value, err_msg=name, **tolerance)


def test_eight_devices_equal_one_and_each_keeps_an_eighth(folder, one):
    found = dict(np.load(folder / "eight.npz"))
    for part in ("params", "ema_params", "opt_state"):
        assert found.pop(f"held {part}") == 1 / 8
    assert_close(found, one[1])


def test_a_checkpoint_of_eight_devices_is_the_same_on_one_two_and_four_and_training_goes_on(folder, one):
    arranged, _, then = one
    state, eight = arranged.restored(folder), dict(np.load(folder / "eight.npz"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.ema_params):
        assert np.asarray(leaf).tobytes() == eight["weight" + jax.tree_util.keystr(path)].tobytes()
    assert_close(arranged.run(state, STEPS)[1], then)
    same = {name: bool(value) for name, value in np.load(folder / "same.npz").items()}
    assert same == {"two": True, "four": True, "head": True}
    assert_close(dict(np.load(folder / "four.npz")), then)


def partitioned(folder):
    (path,) = folder.glob("*.after_spmd-partitioning*")
    return collectives(path.read_text())


def test_blocks_and_head_are_gathered_inside_their_loops_and_activations_stay(folder):
    found = partitioned(folder / "step")
    gathers = {(where, shape[-2:]) for where, what, _, shape in found if what == "all-gather"}
    for width in (128, 192, 256):  # keys and values, qkv, feed-forward
        assert ("body", (64, width)) in gathers and ("entry", (2, 64, width)) not in gathers
    assert ("body", (64, 264)) in gathers
    large = [key[3] for key in found if key[1] == "all-gather" and key[0] == "entry" and len(key[3]) > 2]
    assert set(large) <= {(8, 8, 64)}  # the rows of self-conditioning's first pass
    assert not [key for key in found if key[1] in ("all-to-all", "collective-permute")]


def test_weights_travel_in_the_arithmetic_of_the_step_and_gradients_end_in_slices(folder):
    found = partitioned(folder / "product")
    large = Counter((what, kind, np.prod(shape)) for _, what, kind, shape in found.elements() if shape)
    assert large == {("all-gather", "bf16", 128 * 256): 1, ("all-reduce", "bf16", 128 * 256): 1}


def test_arrangements_that_do_not_divide_are_sentences():
    with pytest.raises(ConfigError, match="training.fsdp=3 does not divide the 1 devices"):
        make_mesh(small_config(3))


def test_axis_that_is_cut():
    assert axis_to_shard(["blocks", "kernel"], (64, 32, 48), 8) == 2  # the longest but for the depth
    assert axis_to_shard(["blocks", "kernel"], (64, 1000, 7), 8) == 1
    assert axis_to_shard(["blocks", "kernel"], (64, 31, 33), 8) == WHOLE
    assert axis_to_shard(["token_decoder", "head"], (64, 4096), 8) == 0
    assert axis_to_shard(["kernel"], (64, 4096), 8) == 1
    assert axis_to_shard(["kernel"], (64, 31), 8) == axis_to_shard([], (), 8) == WHOLE  # small
    assert axis_to_shard(["kernel"], (64, 4096), 1) == WHOLE


def test_stacked_weights_and_their_moments_are_cut_alike():
    mesh = jax.sharding.AbstractMesh((1, 8), ("data", "fsdp"))
    state = state_sharding(mesh, Arranged(1).shapes)
    kernel = state.params["denoiser"]["blocks"]["ffn"]["up"]["kernel"].spec
    assert tuple(kernel) == (None, None, "fsdp")
    adam = state.opt_state[1][0]
    for tree in (state.ema_params, adam.mu, adam.nu):
        assert tree["denoiser"]["blocks"]["ffn"]["up"]["kernel"].spec == kernel


def test_one_process_loads_all_rows():
    assert own_rows(make_mesh(small_config()), 16) == slice(0, 16)


if __name__ == "__main__":
    in_eight(Path(sys.argv[1]))
