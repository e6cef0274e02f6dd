"""Checkpoints: what is read equals what was written, bit for bit, or is refused in words."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdllm.config import ConfigError
from jdllm.training.checkpoint import CheckpointError, Checkpoints, config_differences, named_leaves


class State(NamedTuple):
    step: jax.Array
    key: jax.Array
    params: Any
    ema_params: Any
    opt_state: Any
    empty: jax.Array


def make_state(width: int = 4, seed: int = 0) -> State:
    """A small state with everything that is awkward: optax nodes, bfloat16, raw PRNG keys, an empty array, NaN."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "denoiser": [{"kernel": jax.random.normal(keys[0], (width, 3)), "scale": jnp.float32(jnp.nan)}],
        "decoder": {"a.b": jax.random.normal(keys[1], (3,)).astype(jnp.bfloat16)},
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 1.0, 10), mu_dtype=jnp.bfloat16)
    )
    opt_state = optimizer.init(params)
    _, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    ema = jax.tree.map(lambda x: x * 0.5, params)
    return State(jnp.int32(seed), jax.random.key_data(keys[2]), params, ema, opt_state, jnp.zeros((0, 3)))


def assert_same(one: Any, two: Any) -> None:
    """Equal structure, dtype and bits (NaN included)."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A directory with checkpoints 10 and 20, and their states."""
    states = {10: make_state(seed=1), 20: make_state(seed=2)}
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step, state in states.items():
        checkpoints.save(
            step, state, {"config": {"model": {"latent_dim": 4}}, "data": {"position": step}, "note": None}
        )
    checkpoints.close()
    return tmp_path / "checkpoints", states


def test_round_trip_is_bit_for_bit(saved):
    directory, states = saved
    checkpoints = Checkpoints(directory)
    assert checkpoints.latest() == 20
    for like in (make_state(seed=9), jax.eval_shape(make_state)):
        state, extra = checkpoints.restore(20, like)
        assert_same(state, states[20])
    assert (
        extra
        == checkpoints.extra(20)
        == {"config": {"model": {"latent_dim": 4}}, "data": {"position": 20}, "note": None}
    )


def test_donated_buffers_may_be_overwritten_while_the_save_runs(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    x = jnp.ones(4_000_000)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": x}, {})
    overwrite(x).block_until_ready()
    checkpoints.wait()
    state, _ = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct((4_000_000,), jnp.float32)})
    assert float(state["x"].min()) == 1.0


def test_only_the_newest_are_kept_and_a_saved_step_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10, 10):
        checkpoints.save(step, {"x": jnp.full(3, step)}, {})
    checkpoints.close()
    assert checkpoints.steps() == [2, 10]
    assert Checkpoints(tmp_path, keep=2).latest() == 10


def test_partial_restore_reads_nothing_else(saved):
    directory, states = saved
    for entry in ("opt_state", "params"):
        shutil.rmtree(directory / "20" / entry)
    like = jax.eval_shape(make_state)
    partial, extra = Checkpoints(directory).restore_partial(20, like, ("ema_params", "key"))
    assert_same(partial, {"ema_params": states[20].ema_params, "key": states[20].key})
    assert extra["data"] == {"position": 20}
    with pytest.raises(CheckpointError, match=r"20 is damaged.*go on from step 10"):
        Checkpoints(directory).restore(20, like)


def test_mismatch_names_the_leaves_and_the_config(saved):
    directory, _ = saved
    with pytest.raises(ConfigError) as caught:
        Checkpoints(directory).restore(20, make_state(width=8), config={"model": {"latent_dim": 8}})
    message = str(caught.value)
    assert "params/denoiser/0/kernel is float32(4, 3) there, float32(8, 3) here" in message
    assert "model.latent_dim 4 there, 8 here" in message
    assert "another --name" in message

    state = make_state()
    grown = state._replace(
        params={**state.params, "extra": jnp.zeros(2)}, ema_params={"denoiser": state.ema_params["denoiser"]}
    )
    with pytest.raises(
        CheckpointError,
        match=r"params/extra is not in the checkpoint\n.*ema_params/decoder/a.b is only in the checkpoint",
    ):
        Checkpoints(directory).restore(20, grown)
    with pytest.raises(CheckpointError, match=r"step is int32\(\) there, float32\(\) here"):
        Checkpoints(directory).restore(20, state._replace(step=jnp.float32(0)))
    with pytest.raises(CheckpointError, match="no checkpoint of step 15 .* there are: 10, 20"):
        Checkpoints(directory).restore(15, state)


def _truncate_largest(path: Path) -> None:
    largest = max(
        (file for file in (path / "params").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
    )
    os.truncate(largest, largest.stat().st_size // 2)


def _flip_bytes(path: Path) -> None:
    for file in (path / "params").rglob("d/*"):
        data = bytearray(file.read_bytes())
        for position in range(len(data) // 4, len(data)):
            data[position] ^= 0x55
        file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate_largest,
        _flip_bytes,
        lambda path: (path / "_CHECKPOINT_METADATA").unlink(),
        lambda path: (path / "_CHECKPOINT_METADATA").write_text('{"custom'),
        lambda path: (path / "params" / "manifest.ocdbt").unlink(),
        lambda path: shutil.rmtree(path / "params"),
    ],
    ids=["truncated", "flipped", "no manifest", "torn manifest", "no index", "no entry"],
)
def test_damage_is_a_sentence_never_an_older_state(saved, damage):
    directory, states = saved
    damage(directory / "20")
    checkpoints = Checkpoints(directory, keep=3)
    assert checkpoints.latest() == 20
    with pytest.raises(CheckpointError, match="delete that directory to go on from step 10"):
        checkpoints.restore(20, make_state())
    shutil.rmtree(directory / "20")
    assert_same(checkpoints.restore(checkpoints.latest(), make_state())[0], states[10])


def run_python(code: str, **kwargs) -> subprocess.CompletedProcess:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **kwargs.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=120, **kwargs
    )


def test_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path):
    killed = run_python(
        f"""
        import os, pathlib, signal, time
        import jax.numpy as jnp
        from jdllm.training.checkpoint import Checkpoints
        directory = pathlib.Path({str(tmp_path)!r})
        checkpoints = Checkpoints(directory, keep=2)
        checkpoints.save(1, {{"x": jnp.arange(5), "y": {{"z": jnp.ones(3)}}}}, {{"position": 1}})
        checkpoints.wait()
        checkpoints.save(2, {{"x": jnp.zeros(5), "y": {{"z": jnp.ones(20_000_000)}}}}, {{}})
        while not any(directory.glob("2.*/*/*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(tmp_path.glob("2.*")), "the kill came too late to test anything"
    reader = Checkpoints(tmp_path)
    assert reader.latest() == 1
    assert any(tmp_path.glob("2.*")), "reading must not touch what a running save writes"
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert not any(tmp_path.glob("2.*"))
    like = {"x": jnp.zeros(5, jnp.int32), "y": {"z": jnp.zeros(3)}}
    state, extra = checkpoints.restore(checkpoints.latest(), like)
    assert_same(state, {"x": jnp.arange(5), "y": {"z": jnp.ones(3)}})
    assert extra == {"position": 1}
    checkpoints.save(2, like, {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]


def test_a_full_disk_is_a_sentence_and_the_run_can_go_on_saving(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True).returncode
    ):
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        result = run_python(
            f"""
            import jax, jax.numpy as jnp
            from jdllm.training.checkpoint import CheckpointError, Checkpoints
            checkpoints = Checkpoints({str(disk)!r} + "/checkpoints", keep=2)
            small = {{"x": jnp.arange(5.0)}}
            checkpoints.save(1, small, {{}})
            checkpoints.save(2, {{"x": jax.random.normal(jax.random.key(0), (3_000_000,))}}, {{}})
            try:
                checkpoints.wait()
            except CheckpointError as error:
                print(error)
            checkpoints.save(3, small, {{}})
            checkpoints.close()
            print(checkpoints.steps(), checkpoints.restore(1, small)[0]["x"])
            """
        )
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert result.returncode == 0, result.stderr
    sentence, rest = result.stdout.splitlines()
    assert sentence.startswith("no space left for checkpoint 2 in")
    assert "12.0 MB" in sentence and "checkpoint 1 is intact" in sentence
    assert rest == "[1, 3] [0. 1. 2. 3. 4.]"
    assert "Traceback" not in result.stderr


@functools.cache
def _eight_devices() -> str:
    return """
        import sys, jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from jdllm.training.checkpoint import Checkpoints
        count = len(jax.devices())
        mesh = jax.make_mesh((1, count), ("data", "fsdp"))
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        state = {"step": put(jnp.int32(5), P()), "params": {"w": put(jnp.arange(64.0).reshape(16, 4), P("fsdp")), "b": put(jnp.arange(4.0), P())}}
        checkpoints = Checkpoints(sys.argv[1], keep=1)
    """


@pytest.mark.parametrize("devices", [1, 2])
def test_eight_devices_restore_onto_fewer(tmp_path, devices):
    script = textwrap.dedent(_eight_devices())
    write = (
        script
        + 'checkpoints.save(5, state, {}); checkpoints.close(); assert count == 8 and len(state["params"]["w"].addressable_shards) == 8\n'
    )
    read = script + textwrap.dedent(
        """
        like = jax.tree.map(lambda x: x * 0, state)
        back, _ = checkpoints.restore(5, like)
        for name in ("w", "b"):
            assert back["params"][name].sharding == like["params"][name].sharding
            np.testing.assert_array_equal(back["params"][name], state["params"][name])
        assert int(back["step"]) == 5
        """
    )
    for code, count in ((write, 8), (read, devices)):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr


def test_names_are_readable_and_in_leaf_order():
    state = make_state()
    leaves = named_leaves(state)
    assert [*leaves.values()] == jax.tree.leaves(state) or all(
        a is b for a, b in zip(leaves.values(), jax.tree.leaves(state))
    )
    assert {"step", "params/denoiser/0/kernel", "opt_state/1/0/mu/decoder/a.b"} <= set(leaves)


def test_config_differences_are_dotted_paths():
    there = {"model": {"latent_dim": 64, "head": "trained"}, "seed": 0}
    here = {"model": {"latent_dim": 128, "head": "trained"}, "seed": 0, "new": [1]}
    assert config_differences(there, here) == ["model.latent_dim 64 there, 128 here", "new None there, [1] here"]
