"""Plans: parts add up to what the code really makes, presets are judged, and what is recommended fits and can be typed."""

import json
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdllm import cli
from jdllm.config import PRESETS, ConfigError, preset
from jdllm.model.ldlm import Model
from jdllm.training.memory import held_bytes, memory, state_shapes
from jdllm.training.plan import make_plan, show, to_dict, with_xla
from jdllm.training.sharding import state_sharding
from jdllm.training.state import init_state, make_optimizer


def sizes(config, **options):
    """Bytes of each part by name."""
    return {part.name: part.size for part in memory(config, **options).parts}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_planned(name):
    plan = make_plan(preset(name), 32)
    found = to_dict(plan)
    assert found["peak"] == plan.memory.peak > 0 and found["fits"] == (not plan.turned)
    assert json.loads(show(plan, json=True)) == json.loads(json.dumps(found))
    text = show(plan)
    assert all(part.name in text for part in plan.memory.parts)
    assert plan.encoder is not None and "encoder's weights" in text and "on the disk" in text


def test_the_preset_for_a_32_gb_card_fits_into_30_as_it_is():
    plan = make_plan(preset("qwen3.6-27b-5090"), 32)
    assert plan.memory.peak <= 30e9 and not plan.turned and plan.fitting == plan.config
    assert plan.encoder_weights == "int8"  # the frozen model alone, before training, needs packed weights
    assert plan.command == "jdllm train --preset qwen3.6-27b-5090 --feed.encoder-weights int8"


def test_the_state_is_what_a_run_allocates(tiny):
    config = tiny.replace(optimizer__second_moment="factored")
    model, optimizer = Model(config), make_optimizer(config.optimizer)
    state, found = jax.jit(lambda: init_state(model, optimizer, jnp.zeros(12), jnp.ones(12)))(), sizes(config)
    assert found["optimiser moments"] == sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    assert found["weights, float32 masters"] == sum(x.nbytes for x in jax.tree.leaves(state.params))
    names = [part.name for part in memory(config).parts if part.when == "always" and "batches" not in part.name]
    names.remove("held-out windows")
    assert sum(found[name] for name in names) == sum(x.nbytes for x in jax.tree.leaves(state))


def test_options_save_what_they_say():
    config = preset("qwen3.6-27b-5090")
    weights = sum(x.size for x in jax.tree.leaves(Model(config).param_shapes))
    whole = sizes(config)
    assert whole["weights in bfloat16"] == 2 * weights and whole["gradients"] == 4 * weights
    rounded = sizes(config.replace(optimizer__first_moment="bfloat16"))
    factored = sizes(config.replace(optimizer__second_moment="factored"))
    assert whole["optimiser moments"] - rounded["optimiser moments"] == 2 * weights
    assert whole["optimiser moments"] - factored["optimiser moments"] == pytest.approx(4 * weights, rel=0.01)
    assert "weights in float32" not in sizes(config.replace(training__compute_dtype="float32"))
    accumulated = sizes(config.replace(training__accumulate=4))
    assert accumulated["logits, one chunk"] == whole["logits, one chunk"] / 4
    assert accumulated["gradients of the micro-batches before"] == 4 * weights
    assert "frozen encoder, beside the trainer" in sizes(config.replace(feed__feed="online"))


def test_sharded_parts_are_the_slices_of_one_device():
    config = preset("books").replace(training__fsdp=4)
    mesh = jax.sharding.AbstractMesh((1, 4), ("data", "fsdp"))
    shapes = state_shapes(config)
    slices = jax.tree.map(
        lambda x, s: np.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, state_sharding(mesh, shapes)
    )
    assert held_bytes(shapes, 4) == sum(jax.tree.leaves(slices)) < 0.26 * held_bytes(shapes)


def test_what_does_not_fit_gets_a_command_line_that_does():
    """And the command line, typed, gives just that config."""
    for name, room in (("qwen3.6-27b", 32), ("books", 12), ("gpt2-paper", 24)):
        plan = make_plan(preset(name), room)
        assert plan.memory.peak > plan.room >= plan.least and plan.turned
        assert plan.least == memory(plan.fitting).peak
        command = to_dict(plan)["command"]
        typed = cli.parse(shlex.split(command)[1:]).config
        assert typed == plan.fitting.replace(feed__encoder_weights=plan.encoder_weights)


def test_least_harm_comes_first():
    """More room never needs more switches, and remat is asked for before anything that changes numbers."""
    turned = [
        {key for one in make_plan(preset("gpt2-paper"), room).turned for key in one.changes}
        for room in (80, 40, 16, 10)
    ]
    assert turned[0] == set() and turned[1] == {"training__remat"}
    assert turned[1] <= turned[2] <= turned[3] and "model__latent_dim" not in turned[2]


def test_the_feed_beside_the_trainer_gives_way_to_the_cache():
    plan = make_plan(preset("qwen3.6-35b-a3b").replace(feed__feed="online"), 32)
    assert plan.turned[0].changes == {"feed__feed": "cache"} and plan.fitting.feed.feed == "cache"
    assert plan.turned[0].saves == plan.encoder


def test_what_cannot_be_made_to_fit_says_so(capsys):
    assert cli.main(["plan", "--preset", "qwen3.6-27b", "--device-memory", "4"]) == 2
    text = capsys.readouterr().out
    assert "Even so it needs" in text and "--training.fsdp" in text


def test_plan_from_the_command_line(capsys):
    arguments = ["plan", "--preset", "books", "--training.batch-size", "64", "--tokens", "2000000", "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["command"] == "jdllm train --preset books --training.batch-size 64"
    assert found["peak"] == memory(preset("books").replace(training__batch_size=64)).peak
    assert cli.main([*arguments[:-1]]) == 0
    assert "2.3 GB on the disk for 2,000,000 tokens" in capsys.readouterr().out


def test_sizes_that_make_no_sense_are_sentences():
    with pytest.raises(ConfigError, match="--device-memory 0 is not positive"):
        make_plan(preset("smoke"), 0)
    with pytest.raises(ConfigError, match="asks XLA for a cpu, the device at hand; give --device cpu"):
        with_xla(make_plan(preset("smoke"), 32))
    with pytest.raises(ConfigError, match="--devices 3 does not fit"):
        make_plan(preset("smoke"), 32, devices=3)


def test_several_devices_are_used_before_anything_is_made_worse():
    plan = make_plan(preset("qwen3.6-27b"), 80, devices=8)
    assert [one.changes for one in plan.turned] == [{"training__fsdp": 2}] and plan.least <= 75e9
