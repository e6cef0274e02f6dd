"""Configs are strict, survive a round trip, and the presets are the ones of docs/design.md, section 7."""

import ast
import inspect
import json
import math

import jax
import pytest

import jdllm.config
from jdllm.config import PRESETS, Config, ConfigError, preset
from jdllm.model.ldlm import Model

NAMES = sorted(PRESETS)

# docs/design.md, section 7: encoder, d_h, d, t = k, depths (encoder, decoder, token decoder, denoiser)
TABLE = {
    "smoke": ("tiny-qwen3_5", 64, 64, 32, (2, 2, 1, 2)),
    "quickstart": ("smollm2", 576, 256, 64, (2, 2, 1, 4)),
    "books": ("smollm2", 576, 576, 128, (6, 6, 3, 12)),
    "gpt2-paper": ("openai-community/gpt2", 768, 768, 128, (6, 6, 3, 12)),
    "qwen3.6-35b-a3b": ("Qwen/Qwen3.6-35B-A3B", 2048, 2048, 64, (4, 4, 3, 4)),
    "qwen3.6-27b": ("Qwen/Qwen3.6-27B", 5120, 5120, 64, (4, 4, 3, 4)),
    "qwen3.6-27b-5090": ("Qwen/Qwen3.6-27B", 5120, 1024, 128, (6, 6, 3, 12)),
}


def test_the_presets_are_those_of_the_design():
    assert set(PRESETS) == set(TABLE)


@pytest.mark.parametrize("name", NAMES)
def test_preset_has_the_numbers_of_the_design(name):
    config, m = preset(name), preset(name).model
    depths = (m.encoder_depth, m.decoder_depth, m.token_decoder_depth, m.denoiser_depth)
    assert config.preset == name
    assert m.num_tokens == m.num_latents
    assert (config.encoder, m.hidden_dim, m.latent_dim, m.num_tokens, depths) == TABLE[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_config_survives_json(name, tmp_path):
    config = preset(name).replace(training__minutes=1.5, feed__max_tokens=7, seed=3)
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json") == config


def hand_counted(config: Config) -> int:
    """Trained weights of the shapes in docs/design.md, section 2, counted on paper."""
    m = config.model
    d, c, f, d_h, t, k, v = (
        m.latent_dim, m.head_dim, m.ffn_multiple, m.hidden_dim, m.num_tokens, m.num_latents, m.vocab_size,
    )  # fmt: skip
    norms_of_heads = 2 * c
    ffn = d * f * d + f * d + f * d * d + d
    # query; keys and values of queries; keys and values of the context; output; two input norms and one before the ffn
    perceiver = d * d + 2 * d * d + 2 * d * d + d * d + 3 * d + norms_of_heads + ffn
    self_attention = 3 * d * d + d * d + norms_of_heads
    encoder = d_h * d + t * d + k * d + m.encoder_depth * perceiver + d * d
    decoder = d * d + k * d + t * d + m.decoder_depth * perceiver + d + d * d_h
    time = (256 * d + d) + (d * d + d) + (d * 6 * d + 6 * d)
    denoiser = 2 * d * d + time + m.denoiser_depth * (6 * d + 2 * d + self_attention + ffn) + d + d * d
    token_decoder = d_h * d + m.token_decoder_depth * (2 * d + self_attention + ffn)
    token_decoder += d * d_h if m.head == "encoder" else d + d * v
    return encoder + decoder + denoiser + token_decoder


@pytest.mark.parametrize("name", NAMES)
def test_parameter_count_equals_the_hand_written_formula(name):
    model = Model(preset(name))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.param_shapes)) == hand_counted(preset(name))


def edited(path: str, value: object) -> dict:
    values = preset("smoke").to_dict()
    *groups, key = path.split(".")
    table = values
    for group in groups:
        table = table[group]
    table[key] = value
    return values


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("modl", 1, ["'modl'", "'model'"]),
        ("model.latnt_dim", 64, ["'model.latnt_dim'", "'model.latent_dim'"]),
        ("training.step", 64, ["'training.step'", "'training.steps'"]),
        ("model.head", "frozen", ["model.head='frozen'", "trained, encoder"]),
        ("model.latent_dim", "64", ["model.latent_dim='64'", "int"]),
        ("model.latent_dim", 64.5, ["model.latent_dim=64.5", "int"]),
        ("training.steps", True, ["training.steps=True", "int"]),
        ("training.minutes", "ten", ["training.minutes='ten'", "float or none"]),
        ("training", 3, ["training", "TrainingConfig"]),
        ("optimizer.learning_rate", None, ["optimizer.learning_rate=None", "float"]),
    ],
)
def test_a_key_or_value_that_does_not_fit_is_named(path, value, words):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(edited(path, value))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_key_without_default_is_named():
    values = preset("smoke").to_dict()
    del values["model"]["num_tokens"]
    with pytest.raises(ConfigError, match=r"missing key 'model\.num_tokens'"):
        Config.from_dict(values)


def test_keys_with_defaults_may_be_left_out():
    config = preset("gpt2-paper")
    values = config.to_dict()
    del values["feed"], values["sampling"]["steps"]
    assert Config.from_dict(values) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__latent_dim": 48}, ["latent_dim=48", "head_dim=32"]),
        ({"model__head_dim": 1, "model__latent_dim": 3}, ["head_dim=1", "even"]),
        ({"model__num_latents": 5}, ["num_tokens=32", "num_latents=5", "divides"]),
        ({"model__num_latents": 0}, ["num_latents=0"]),
        ({"model__num_latents": 64}, ["num_tokens=32", "num_latents=64"]),
        ({"training__batch_size": 10, "training__accumulate": 3}, ["batch_size=10", "accumulate=3"]),
        ({"training__steps": 0}, ["training.steps=0", "least is 1"]),
        ({"optimizer__learning_rate": 0.0}, ["learning_rate=0.0", "positive"]),
        ({"objective__decoder_noise": -1.0}, ["decoder_noise=-1.0", "negative"]),
        ({"model__kind": "masked", "objective__frozen_after": 0.5}, ["frozen_after=0.5", "kind=masked", "use 1"]),
        ({"objective__gamma_max": 1.5}, ["gamma_max=1.5", "[0, 1]"]),
        ({"diffusion__schedule_d": 0.0}, ["schedule_d=0.0", "positive"]),
    ],
)
def test_contradictory_values_are_named(changes, words):
    with pytest.raises(ConfigError) as caught:
        preset("smoke").replace(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        preset("smoke").replace(model__latent_dim=48, training__steps=0, objective__decoder_noise=-1.0)
    assert len(str(caught.value).splitlines()) == 3


def test_replace_reaches_into_groups_and_leaves_the_original_alone():
    config = preset("smoke")
    changed = config.replace(seed=7, model__latent_dim=96, model__denoiser_depth=3)
    assert (changed.seed, changed.model.latent_dim, changed.model.denoiser_depth) == (7, 96, 3)
    assert changed.model.num_tokens == config.model.num_tokens
    assert config == PRESETS["smoke"] and config != changed


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        preset("quickstrt")


def test_broken_json_says_which_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset("smoke").to_dict())[:100])
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        Config.load(path)


def test_every_field_has_help_text():
    """The command line shows the docstring under a field; a field without one is a bare flag."""
    for cls in ast.parse(inspect.getsource(jdllm.config)).body:
        if isinstance(cls, ast.ClassDef) and cls.name.endswith("Config"):
            for field, below in zip(cls.body, [*cls.body[1:], None]):
                if isinstance(field, ast.AnnAssign):
                    documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                    assert documented, f"{cls.name}.{field.target.id} has no docstring"
