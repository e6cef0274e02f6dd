"""The twin against JAX: each kind of block, the whole chain of every kind of config, samplers, and the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jdllm.config import PRESETS, ConfigError
from jdllm.diffusion import samplers
from jdllm.diffusion.schedule import TangentSchedule
from jdllm.diffusion.timesteps import TimestepState, cumulative
from jdllm.generation.generate import latents_to_tokens, make_denoise
from jdllm.generation.generator import Generator
from jdllm.model import denoiser, layers, perceiver, token_decoder
from jdllm.model.ldlm import Model
from jdllm.model.standardize import LatentStats
from weights_port import convert
from weights_port import torch_ldlm as twin

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
DTYPES = list(TOLERANCE)


def small(preset):
    """A preset of few and narrow blocks: what is equal stays equal, what is narrower stays narrower."""
    m = PRESETS[preset].model
    d = 32 if m.latent_dim == m.hidden_dim else 16
    depth = {name: min(getattr(m, name), 2) for name in ("encoder_depth", "decoder_depth", "denoiser_depth")}
    model = dataclasses.replace(
        m, hidden_dim=32, latent_dim=d, vocab_size=37, num_tokens=8, num_latents=8 * m.num_latents // m.num_tokens,
        head_dim=16 if m.head_dim == 128 else 8, token_decoder_depth=1, **depth,
    )  # fmt: skip
    return PRESETS[preset].replace(model=model, diffusion__timestep_bins=10)


CONFIGS = {name: small(name) for name in ("books", "quickstart", "qwen3.6-27b", "qwen3.6-27b-5090")} | {
    "compressed": small("quickstart").replace(
        model__num_latents=4, model__standardize="dimension", model__token_decoder_depth=2
    ),
    "compressed-frozen-head": small("qwen3.6-27b-5090").replace(model__num_latents=2, model__standardize="rmsnorm"),
    "ablated": small("books").replace(model__positional_path=False, model__token_decoder_depth=0),
}


def test_every_preset_is_of_a_kind_that_is_compared():
    """Equal up to names and figures that are no shapes."""
    assert {small(name).model for name in PRESETS} <= {config.model for config in CONFIGS.values()}


def distance(ours, theirs):
    """Norm of the difference over the norm."""
    ours, theirs = as_array(ours), as_array(theirs)
    assert ours.shape == theirs.shape
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def as_array(x):
    return (x.detach().float().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float32)).astype(np.float64)


def as_torch(x):
    x = np.asarray(x)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(x))


@pytest.fixture(scope="module")
def make(shaken):
    """make(config, dtype): a JAX generator with random weights and a warp that is no identity, and its twin."""

    def pair(config, dtype="float32", scale=0.1):
        m, rng = config.model, np.random.default_rng(5)
        model, shape = Model(config), (m.num_latents, m.latent_dim)
        params = shaken(model.init(jax.random.key(0)), scale)
        # a fresh denoiser says almost nothing, and all texts would be alike
        params["denoiser"]["output"]["kernel"] *= 30.0
        frozen = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.bfloat16), model.frozen_shapes)
        bins = config.diffusion.timestep_bins
        timesteps = TimestepState(10.0 * jnp.linspace(0.1, 1.0, bins) ** 2, jnp.full(bins, 10.0))
        stats = LatentStats(
            jnp.asarray(rng.normal(size=shape), jnp.float32), jnp.asarray(rng.uniform(0.3, 0.6, shape), jnp.float32),
            jnp.float32(0.5),
        )  # fmt: skip
        mean, std = (jnp.asarray(rng.uniform(0.5, 1.5, m.hidden_dim), jnp.float32) for _ in range(2))
        ours = Generator(
            config=config, params=params, frozen=frozen, edges=cumulative(timesteps, config.diffusion),
            latent_stats=stats, hidden_mean=mean, hidden_std=std, tokenizer=None, eos_id=0, dtype=dtype,
        )  # fmt: skip
        arrays = {
            "params": params, "frozen": frozen, "latent_stats": stats._asdict(), "hidden_mean": mean, "hidden_std": std,
            "timesteps": {"edges": ours.edges, **timesteps._asdict()},
        }  # fmt: skip
        tensors = {name: as_torch(tensor) for name, tensor in convert.to_torch(arrays, config).items()}
        return ours, twin.from_tensors(config, tensors, dtype=getattr(torch, dtype))

    return pair


@pytest.fixture(scope="module")
def generators(make):
    """Little shaken: what all texts share is then small, and noise decides."""
    return make(CONFIGS["compressed"], scale=0.02)


# Blocks

D, HEAD = 32, 8


def block_cases():
    options = {"out_scale": 1.0, "rngs": nnx.Rngs(0)}
    rngs = {"rngs": nnx.Rngs(1)}
    return {
        "RMSNorm": (layers.RMSNorm(D), twin.RMSNorm(D), ["x"]),
        "FeedForward": (layers.FeedForward(D, 4, **options), twin.FeedForward(D, 4), ["x"]),
        "SelfAttention": (layers.SelfAttention(D, HEAD, **options), twin.SelfAttention(D, HEAD), ["x"]),
        "TokenBlock": (token_decoder.TokenBlock(D, HEAD, 4, 2, **rngs), twin.TokenBlock(D, HEAD, 4), ["x"]),
        "DenoiserBlock": (denoiser.DenoiserBlock(D, HEAD, 4, 2, **rngs), twin.DenoiserBlock(D, HEAD, 4), ["x", "m"]),
        "PerceiverBlock": (
            perceiver.PerceiverBlock(D, HEAD, 4, 2, **rngs), twin.PerceiverBlock(D, HEAD, 4), ["x", "context", None],
        ),
        "PerceiverBlock, padded": (
            perceiver.PerceiverBlock(D, HEAD, 4, 2, **rngs), twin.PerceiverBlock(D, HEAD, 4), ["x", "context", "lengths"],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", block_cases())
def test_blocks_agree(name, dtype, shaken):
    ours, theirs, arguments = block_cases()[name]
    graphdef, params = nnx.split(ours)
    params = jax.tree.map(lambda x: x.astype(dtype), shaken(nnx.to_pure_dict(params)))
    state = {}
    for path, leaf in convert.flatten(params).items():
        tensor = as_torch(leaf)
        state[path.replace("/", ".").replace("kernel", "weight")] = tensor.T if path.endswith("kernel") else tensor
    theirs.to(getattr(torch, dtype)).load_state_dict(state)
    rng = np.random.default_rng(3)
    given = {
        "x": jnp.asarray(rng.normal(size=(3, 6, D)), dtype), "context": jnp.asarray(rng.normal(size=(3, 10, D)), dtype),
        "m": jnp.asarray(rng.normal(size=(3, 6, D)), dtype), "lengths": jnp.array([10, 4, 1]), None: None,
    }  # fmt: skip
    call = [given[argument] for argument in arguments]
    wanted = jax.jit(lambda params, *call: nnx.merge(graphdef, params)(*call))(params, *call)
    found = theirs(*(None if x is None else as_torch(x) for x in call))
    assert found.dtype == getattr(torch, dtype)
    assert distance(found, wanted) <= TOLERANCE[dtype]


def test_gelu_is_the_tanh_approximation_of_jax():
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    found = torch.nn.functional.gelu(torch.from_numpy(x), approximate="tanh")
    np.testing.assert_allclose(found, jax.nn.gelu(x), atol=1e-6)


# The whole chain


def torch_stages(theirs, z, previous, tau):
    """Modulation, estimate, hidden states and logits of `z`, logits of the estimate."""
    model, z, previous, tau = theirs.model, *(torch.from_numpy(x) for x in (z, previous, tau))
    with torch.inference_mode():
        modulation = model.denoiser.modulation(tau)
        estimate = model.denoiser(z.to(model.dtype), modulation, previous.to(model.dtype))
        return modulation, estimate, model.decoder(z.to(model.dtype)), model.logits(z), model.logits(estimate)


def jax_stages(ours, z, previous, tau):
    """The same."""

    @jax.jit
    def stages(params, z, previous, tau):
        module = ours.model.merge(params, ours.frozen)
        modulation = module.denoiser.modulation(tau)
        estimate = module.denoiser(z.astype(ours.dtype), modulation, previous.astype(ours.dtype))
        hidden, logits = module.decoder(z.astype(ours.dtype)), module.token_decoder.logits
        return modulation, estimate, hidden, logits(hidden), logits(module.decoder(estimate))

    return stages(ours.params, z, previous, tau)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_whole_models_agree(name, dtype, make, make_batch):
    """Encoder, denoiser, decoders: each from the same input; then denoiser and decoders in a row."""
    config = CONFIGS[name]
    (ours, theirs), batch, rng = make(config, dtype), make_batch(config, 4), np.random.default_rng(1)
    shape = (4, config.model.num_latents, config.model.latent_dim)
    inputs = (*rng.normal(size=(2, *shape)).astype(np.float32), np.array([0.0, 0.3, 0.8, 1.0], np.float32))
    *found, found_row = torch_stages(theirs, *inputs)
    *wanted, wanted_row = jax_stages(ours, *inputs)
    hidden = torch.from_numpy(np.asarray(batch["hidden"], np.float32))
    errors = {"latents": distance(theirs.encode(hidden, as_torch(batch["lengths"])), ours.encode(batch))}
    errors |= {k: distance(a, b) for k, a, b in zip(("modulation", "estimate", "hidden", "logits"), found, wanted)}
    print(
        name,
        dtype,
        {stage: f"{error:.1e}" for stage, error in errors.items()},
        f"{distance(found_row, wanted_row):.1e}",
    )
    assert max(errors.values()) <= TOLERANCE[dtype], errors
    if dtype == "float32":
        assert distance(found_row, wanted_row) <= TOLERANCE[dtype]
    else:  # roundings of the whole row add up, in JAX as well: the twin may be no further from float32 than JAX is
        exact = torch_stages(make(config, "float32")[1], *inputs)[-1]
        assert distance(found_row, exact) <= 1.25 * distance(wanted_row, exact)


def test_padding_is_never_read(generators, make_batch, refill):
    _, theirs = generators
    batch = make_batch(theirs.config, 6)
    texts = (torch.from_numpy(np.asarray(b["hidden"], np.float32)) for b in (batch, refill(batch)))
    one, other = (theirs.encode(hidden, as_torch(batch["lengths"])) for hidden in texts)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


# Diffusion


def test_the_schedule_is_the_same_and_exact_at_its_ends():
    tau = np.linspace(0, 1, 101, dtype=np.float32)
    for ours, theirs in zip(
        TangentSchedule(3.0).alpha_sigma(tau), twin.TangentSchedule(3.0).alpha_sigma(torch.from_numpy(tau))
    ):
        np.testing.assert_allclose(theirs, ours, atol=1e-6)
        assert {float(theirs[0]), float(theirs[-1])} == {0.0, 1.0}


@pytest.mark.parametrize("sampler", samplers.SAMPLERS)
@pytest.mark.parametrize("grid", samplers.GRIDS)
def test_times_are_the_same(sampler, grid, generators):
    edges = generators[0].edges
    assert (twin.SAMPLERS, twin.GRIDS) == (samplers.SAMPLERS, samplers.GRIDS)
    for steps in (1, 2, 7, 10, 64):
        ours = samplers.time_grid(edges, steps, grid=grid, sampler=sampler)
        theirs = twin.time_grid(as_torch(edges), steps, grid=grid, sampler=sampler)
        np.testing.assert_allclose(theirs, ours, atol=1e-6)  # float32 rounding
        assert theirs[0] == 1.0


def noise_of(ours, num, steps, seed):
    """The noise that JAX draws for a seed: of the start, and of every step."""
    shape = (num, ours.config.model.num_latents, ours.config.model.latent_dim)
    first, later = jax.random.split(jax.random.fold_in(jax.random.key(seed), 0))
    fresh = [jax.random.normal(jax.random.fold_in(later, index), shape) for index in range(steps)]
    return as_torch(jax.random.normal(first, shape)), torch.stack([as_torch(x) for x in fresh])


OPTIONS = [{"sampler": sampler} for sampler in samplers.SAMPLERS] + [
    {"guidance": 0.7}, {"grid": "tau", "temperature": 0.7}, {"sampler": "sde", "temperature": 0.8, "steps": 6}, {"steps": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_noise_gives_the_same_tokens(options, generators):
    ours, theirs = generators
    options = {"steps": 4} | options
    noise, fresh = noise_of(ours, 16, options["steps"], seed=3)
    wanted = ours.generate_tokens(seed=3, num=16, **options)
    found = theirs.generate_tokens(noise=noise, fresh_noise=fresh, **options)
    np.testing.assert_array_equal(found, wanted)
    assert len({tuple(row) for row in wanted}) > 2 and len(np.unique(wanted)) > 2  # so that equality says something


@pytest.mark.parametrize("name", ["qwen3.6-27b-5090", "ablated"])
def test_the_same_noise_gives_the_same_tokens_of_other_configs(name, make):
    ours, theirs = make(CONFIGS[name])
    noise, _ = noise_of(ours, 6, 4, seed=1)
    np.testing.assert_array_equal(
        theirs.generate_tokens(noise=noise, steps=4), ours.generate_tokens(seed=1, num=6, steps=4)
    )


@pytest.mark.parametrize("sampler", samplers.SAMPLERS)
def test_latents_after_several_steps_agree(sampler, generators):
    """Errors are carried along, and one of rounding in tau turns the fastest sine by 6e-5: hence not the limit of a step."""
    ours, theirs = generators
    noise, fresh = noise_of(ours, 4, 5, seed=2)
    times = samplers.time_grid(ours.edges, 5, sampler=sampler)
    module = ours.model.merge(ours.params, ours.frozen)
    key = jax.random.fold_in(jax.random.key(2), 0)
    wanted = samplers.sample(
        key,
        make_denoise(module, 0.0, False, jnp.float32),
        noise.shape,
        TangentSchedule(ours.config.diffusion.schedule_d),
        times,
        sampler=sampler,
        conditions=module.denoiser.modulation(times),
    )
    found = theirs.sample(noise, theirs.sampling(sampler=sampler, steps=5), fresh)
    print(sampler, f"{distance(found, wanted):.1e}")
    assert distance(found, wanted) <= 1e-4
    np.testing.assert_array_equal(theirs.tokens(found), latents_to_tokens(module, wanted, jnp.float32))


def test_the_vocabulary_may_be_walked_in_chunks(generators, monkeypatch):
    _, theirs = generators
    z = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(0))
    whole = theirs.tokens(z)
    torch.testing.assert_close(whole, theirs.model.logits(z).argmax(-1))
    monkeypatch.setattr(twin, "HEAD_CHUNK", 10)
    monkeypatch.setattr(twin, "LOGITS_AT_ONCE", 0)
    torch.testing.assert_close(theirs.tokens(z), whole)


# What a person holds


def test_tokens_follow_from_the_seed_and_come_in_parts(generators, monkeypatch):
    _, theirs = generators
    first = theirs.generate_tokens(num=5, seed=1)
    assert first.shape == (5, 8)
    torch.testing.assert_close(theirs.generate_tokens(num=5, seed=1), first)
    assert (theirs.generate_tokens(num=5, seed=2) != first).any()
    monkeypatch.setattr(twin, "BATCH", 2)
    torch.testing.assert_close(theirs.generate_tokens(num=5, seed=1), first)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stpes": 3}, "stpes"), ({"sampler": "ddpm"}, "ddim, sde, early_stop"), ({"grid": "x"}, "u, tau"),
        ({"steps": 0}, "at least 1"), ({"noise": torch.zeros(2, 3, 4)}, r"\(num, 4, 16\)"),
        ({"noise": torch.zeros(2, 4, 16), "fresh_noise": torch.zeros(2, 4, 16)}, "fresh_noise"),
    ],
)  # fmt: skip
def test_impossible_options_are_sentences(generators, options, words):
    with pytest.raises(ConfigError, match=words):
        generators[1].generate_tokens(**options)
