"""The LDLM in PyTorch, with the parameters and the arithmetic of jdllm/model: parity oracle, baseline, and a way out.

    import weights_port.torch_ldlm as twin
    generator = twin.load("exported")               # a folder that `jdllm export` wrote; no jax is imported
    print(generator.generate(num=4, steps=10, seed=0))

Names are those of the JAX modules (convert.py holds the table), so each class is explained there.  As there, weights are in
the arithmetic of the step and normalisations, rotations and the sampler's loop in float32.  Left out: training and its
initialisation; sharded files.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jdllm.config import Config, ConfigError, ModelConfig, SamplingConfig
from weights_port import convert

if TYPE_CHECKING:
    import tokenizers
    from jaxtyping import Float, Int

EPSILON = 1e-6
STANDARDIZE_EPSILON = 1e-5
ROPE_BASE = 10_000.0
TIME_FEATURES = 256
TIME_SCALE = 1000.0
HEAD_CHUNK = 8192
LOGITS_AT_ONCE = 2**26
"""As in jdllm/kernels/cross_entropy.py: all logits of few positions at once, of many in chunks of the vocabulary."""
BATCH = 256
"""Sequences generated at once; more are generated in turn."""
SAMPLERS = ("ddim", "sde", "early_stop", "dpmpp")
EARLY_STOP_SHARE = 0.75
GRIDS = ("u", "tau", "u_late")
LATE = 0.25


# --- Layers (jdllm/model/layers.py)


def linear(d_in: int, d_out: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(d_in, d_out, bias=bias)


def rms_norm(x: Float[Tensor, "*n d"], gain: Float[Tensor, " d"] | None = None) -> Float[Tensor, "*n d"]:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPSILON)
    return (y if gain is None else y * gain.float()).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        return rms_norm(x, self.gain)


class FeedForward(nn.Module):
    """GELU by its tanh approximation, which is what jax.nn.gelu computes."""

    def __init__(self, dim: int, multiple: int):
        super().__init__()
        self.up = linear(dim, multiple * dim, bias=True)
        self.down = linear(multiple * dim, dim, bias=True)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def rotary(x: Float[Tensor, "b n h c"]) -> Float[Tensor, "b n h c"]:
    half = x.shape[-1] // 2
    frequency = ROPE_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def attend(
    q: Float[Tensor, "b n h c"],
    k: Float[Tensor, "b m h c"],
    v: Float[Tensor, "b m h c"],
    kv_lengths: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, "b n hc"]:
    mask = None
    if kv_lengths is not None:
        mask = (torch.arange(k.shape[1], device=k.device) < kv_lengths[:, None])[:, None, None, :]
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    return y.transpose(1, 2).flatten(2)


def split_heads(x: Float[Tensor, "b n hc"], head_dim: int) -> Float[Tensor, "b n h c"]:
    return x.unflatten(-1, (-1, head_dim))


class SelfAttention(nn.Module):
    def __init__(self, dim: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.qkv = linear(dim, 3 * dim)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.out = linear(dim, dim)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        q, k, v = (split_heads(part, self.head_dim) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(attend(rotary(self.q_norm(q)), rotary(self.k_norm(k)), v))


# --- Latent encoder and decoder (jdllm/model/perceiver.py, standardize.py)


class PerceiverBlock(nn.Module):
    def __init__(self, dim: int, head_dim: int, ffn_multiple: int):
        super().__init__()
        self.head_dim = head_dim
        self.query_input_norm = RMSNorm(dim)
        self.context_input_norm = RMSNorm(dim)
        self.query = linear(dim, dim)
        self.query_kv = linear(dim, 2 * dim)
        self.context_kv = linear(dim, 2 * dim)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)
        self.out = linear(dim, dim)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = FeedForward(dim, ffn_multiple)

    def forward(
        self, x: Float[Tensor, "b n d"], context: Float[Tensor, "b m d"], context_lengths: Int[Tensor, " b"] | None
    ) -> Float[Tensor, "b n d"]:
        y = self.query_input_norm(x)
        own_k, own_v = self.query_kv(y).chunk(2, dim=-1)
        context_k, context_v = self.context_kv(self.context_input_norm(context)).chunk(2, dim=-1)
        q = split_heads(self.query(y), self.head_dim)
        k = split_heads(torch.cat([own_k, context_k], dim=1), self.head_dim)
        v = split_heads(torch.cat([own_v, context_v], dim=1), self.head_dim)
        kv_lengths = None if context_lengths is None else x.shape[1] + context_lengths
        x = x + self.out(attend(self.q_norm(q), self.k_norm(k), v, kv_lengths))
        return x + self.ffn(self.ffn_norm(x))


class LatentEncoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        c, d = config, config.latent_dim
        self.positional_path = c.positional_path
        self.num_latents = c.num_latents
        self.input = linear(c.hidden_dim, d)
        self.token_positions = nn.Parameter(torch.zeros(c.num_tokens, d))
        self.queries = nn.Parameter(torch.zeros(c.num_latents, d))
        self.blocks = nn.ModuleList(PerceiverBlock(d, c.head_dim, c.ffn_multiple) for _ in range(c.encoder_depth))
        self.output = linear(d, d)

    def forward(self, hidden: Float[Tensor, "b t dh"], lengths: Int[Tensor, " b"]) -> Float[Tensor, "b k d"]:
        """Raw latents in float32; what stands behind `lengths` is never read."""
        b, t, _ = hidden.shape
        valid = (torch.arange(t, device=hidden.device) < lengths[:, None])[:, :, None]
        context = self.input(hidden.masked_fill(~valid, 0)) + self.token_positions
        context = context.masked_fill(~valid, 0)
        queries = self.queries.expand(b, -1, -1)
        if self.positional_path:
            groups = t // self.num_latents
            pooled = context.reshape(b, self.num_latents, groups, -1).sum(2)
            counts = valid.reshape(b, self.num_latents, groups, 1).sum(2)
            queries = queries + pooled / counts.clamp(min=1).to(hidden.dtype)
        for block in self.blocks:
            queries = block(queries, context, lengths)
        return F.linear(rms_norm(queries).float(), self.output.weight.float())


def standardize(
    raw: Float[Tensor, "b k d"], mean: Float[Tensor, "k d"], variance: Float[Tensor, "k d"], weight: Tensor, mode: str
) -> Float[Tensor, "b k d"]:
    """By running statistics; `weight` corrects the bias of their start."""
    raw = raw.float()
    if mode == "rmsnorm":
        return rms_norm(raw)
    weight = weight.clamp(min=1e-8)
    return (raw - mean / weight) * torch.rsqrt(variance / weight + STANDARDIZE_EPSILON)


class LatentDecoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        c, d = config, config.latent_dim
        self.positional_path = c.positional_path
        self.repeat = c.num_tokens // c.num_latents
        self.input = linear(d, d)
        self.latent_positions = nn.Parameter(torch.zeros(c.num_latents, d))
        self.queries = nn.Parameter(torch.zeros(c.num_tokens, d))
        self.blocks = nn.ModuleList(PerceiverBlock(d, c.head_dim, c.ffn_multiple) for _ in range(c.decoder_depth))
        self.norm = RMSNorm(d)
        self.output = linear(d, c.hidden_dim)

    def forward(self, z: Float[Tensor, "b k d"]) -> Float[Tensor, "b t dh"]:
        context = self.input(rms_norm(z)) + self.latent_positions
        x = self.queries.expand(z.shape[0], -1, -1)
        if self.positional_path:
            x = x + context.repeat_interleave(self.repeat, dim=1)
        for block in self.blocks:
            x = block(x, context, None)
        return self.output(self.norm(x))


# --- Token decoder (jdllm/model/token_decoder.py)


class TokenBlock(nn.Module):
    def __init__(self, dim: int, head_dim: int, ffn_multiple: int):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = SelfAttention(dim, head_dim)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = FeedForward(dim, ffn_multiple)

    def forward(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b t d"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


def head_logits(states: Float[Tensor, "n w"], weight: Float[Tensor, "v w"]) -> Float[Tensor, "n v"]:
    """Products in the dtype of `states`, added up and kept in float32: bfloat16 logits would be full of ties."""
    weight = weight.to(states.dtype)
    if states.is_cuda and states.dtype != torch.float32:
        return torch.mm(states, weight.T, out_dtype=torch.float32)
    return states.float() @ weight.float().T


class TokenDecoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        c, d = config, config.latent_dim
        self.input = linear(c.hidden_dim, d)
        self.blocks = nn.ModuleList(TokenBlock(d, c.head_dim, c.ffn_multiple) for _ in range(c.token_decoder_depth))
        self.head_kind = c.head
        if c.head == "encoder":
            self.output = linear(d, c.hidden_dim)
        else:
            self.norm = RMSNorm(d)
        self.head = linear(c.hidden_dim if c.head == "encoder" else d, c.vocab_size)

    def states(self, hidden: Float[Tensor, "b t dh"]) -> Float[Tensor, "b t w"]:
        """Inputs of the head."""
        x = self.input(hidden)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) if self.head_kind == "trained" else rms_norm(self.output(x))

    def logits(self, hidden: Float[Tensor, "b t dh"]) -> Float[Tensor, "b t v"]:
        """All logits in float32."""
        states = self.states(hidden)
        return head_logits(states.flatten(0, 1), self.head.weight).unflatten(0, states.shape[:2])

    def tokens(self, hidden: Float[Tensor, "b t dh"]) -> Int[Tensor, "b t"]:
        """The most likely token of each position, chunk by chunk of the vocabulary; the lowest id wins a tie."""
        states = self.states(hidden)
        flat, high, best = states.flatten(0, 1), None, None
        chunk = max(HEAD_CHUNK, LOGITS_AT_ONCE // len(flat))
        for index, weight in enumerate(self.head.weight.split(chunk)):
            top, token = head_logits(flat, weight).max(-1)
            token = token + index * chunk
            best = token if best is None else torch.where(top > high, token, best)
            high = top if high is None else torch.maximum(top, high)
        return best.unflatten(0, states.shape[:2])


# --- Denoiser (jdllm/model/denoiser.py)


def time_features(tau: Float[Tensor, " b"]) -> Float[Tensor, "b f"]:
    half = TIME_FEATURES // 2
    frequency = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float32, device=tau.device) / half)
    angle = TIME_SCALE * tau.float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


class DenoiserBlock(nn.Module):
    def __init__(self, dim: int, head_dim: int, ffn_multiple: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, dim))
        self.attention_norm = RMSNorm(dim)
        self.attention = SelfAttention(dim, head_dim)
        self.ffn_norm = RMSNorm(dim)
        self.ffn = FeedForward(dim, ffn_multiple)

    def forward(self, x: Float[Tensor, "b k d"], shared: Float[Tensor, "b 6 d"]) -> Float[Tensor, "b k d"]:
        m = (shared + self.table)[:, :, None, :]
        shift, scale, gate = m[:, 0], 1 + m[:, 1], 1 + m[:, 2]
        x = x + gate * self.attention(self.attention_norm(x) * scale + shift)
        shift, scale, gate = m[:, 3], 1 + m[:, 4], 1 + m[:, 5]
        return x + gate * self.ffn(self.ffn_norm(x) * scale + shift)


class Denoiser(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        c, d = config, config.latent_dim
        self.input = linear(2 * d, d)
        self.time_up = linear(TIME_FEATURES, d, bias=True)
        self.time_down = linear(d, d, bias=True)
        self.time_modulation = linear(d, 6 * d, bias=True)
        self.blocks = nn.ModuleList(DenoiserBlock(d, c.head_dim, c.ffn_multiple) for _ in range(c.denoiser_depth))
        self.norm = RMSNorm(d)
        self.output = linear(d, d)

    def modulation(self, tau: Float[Tensor, " b"]) -> Float[Tensor, "b 6 d"]:
        features = time_features(tau).to(self.time_up.weight.dtype)
        hidden = F.silu(self.time_down(F.silu(self.time_up(features))))
        return self.time_modulation(hidden).unflatten(-1, (6, -1))

    def forward(
        self, z_tau: Float[Tensor, "b k d"], modulation: Float[Tensor, "b 6 d"], previous: Float[Tensor, "b k d"]
    ) -> Float[Tensor, "b k d"]:
        """`modulation` has one row for each of z_tau, or one for all of them."""
        x = self.input(torch.cat([z_tau, previous], dim=-1))
        for block in self.blocks:
            x = block(x, modulation)
        return self.output(self.norm(x))


class LDLM(nn.Module):
    """Latent encoder, denoiser, latent decoder, token decoder."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.encoder = LatentEncoder(config)
        self.denoiser = Denoiser(config)
        self.decoder = LatentDecoder(config)
        self.token_decoder = TokenDecoder(config)

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic; a frozen head may be stored in another."""
        return self.denoiser.input.weight.dtype

    def logits(self, z: Float[Tensor, "b k d"]) -> Float[Tensor, "b t v"]:
        """Logits of latents, in float32."""
        return self.token_decoder.logits(self.decoder(z.to(self.dtype)))

    def tokens(self, z: Float[Tensor, "b k d"]) -> Int[Tensor, "b t"]:
        """Tokens of latents."""
        return self.token_decoder.tokens(self.decoder(z.to(self.dtype)))

    def estimate(
        self, z: Float[Tensor, "b k d"], tau: Float[Tensor, ""], previous: Float[Tensor, "b k d"], guidance: float = 0.0
    ) -> Float[Tensor, "b k d"]:
        """The denoiser at one time for all rows, float32 in and out, with self-conditioning guidance (generate.py)."""
        inputs = (z, previous)
        if guidance:
            inputs = (torch.cat([z, z]), torch.cat([previous, torch.zeros_like(previous)]))
        z_tau, previous = (x.to(self.dtype) for x in inputs)
        x0 = self.denoiser(z_tau, self.denoiser.modulation(tau[None]), previous).float()
        if guidance:
            with_previous, without = x0.chunk(2)
            x0 = with_previous + guidance * (with_previous - without)
        return x0


# --- Diffusion (jdllm/diffusion)


@dataclasses.dataclass(frozen=True)
class TangentSchedule:
    d: float = 3.0

    def alpha_sigma(self, tau: Float[Tensor, "*b"]) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        signal = torch.where(tau >= 1.0, 0.0, torch.cos(0.5 * math.pi * tau))
        noise = self.d * torch.sin(0.5 * math.pi * tau)
        scale = torch.rsqrt(signal * signal + noise * noise)
        return signal * scale, noise * scale


def warp(edges: Float[Tensor, " n+1"], u: Float[Tensor, " s"]) -> Float[Tensor, " s"]:
    """tau = F^-1(u), linear inside a bin."""
    bins = edges.shape[0] - 1
    values = torch.arange(bins + 1, dtype=torch.float32, device=edges.device) / bins
    right = torch.searchsorted(edges, u, right=True).clamp(1, bins)
    width = edges[right] - edges[right - 1]
    share = torch.where(width > 0, (u - edges[right - 1]) / width.clamp(min=1e-30), 0.0)
    return values[right - 1] + share.clamp(0, 1) * (values[right] - values[right - 1])


def time_grid(
    edges: Float[Tensor, " n+1"], steps: int, *, grid: str = "u", sampler: str = "ddim"
) -> Float[Tensor, " s+1"]:
    """`steps` times to visit, falling from 1, and the time after the last."""
    end = 1.0 - EARLY_STOP_SHARE if sampler == "early_stop" else 0.0
    share = torch.arange(steps + 1, dtype=torch.float32, device=edges.device) / steps
    u = (1.0 - share) + end * share
    if grid == "u_late":
        last = end + LATE * (1.0 - end) / steps
        share = torch.arange(steps, dtype=torch.float32, device=edges.device) / max(steps - 1, 1)
        u = torch.cat([(1.0 - share) + last * share, u[-1:]])
    return u if grid == "tau" else warp(edges, u)


def step(
    z: Float[Tensor, "b k d"],
    x0: Float[Tensor, "b k d"],
    noise: Float[Tensor, "b k d"] | None,
    tau: Float[Tensor, ""],
    tau_next: Float[Tensor, ""],
    schedule: TangentSchedule,
    sampler: str,
) -> Float[Tensor, "b k d"]:
    """The state at `tau_next`; `noise` is read by `sde` only."""
    (alpha, sigma), (alpha_next, sigma_next) = schedule.alpha_sigma(tau), schedule.alpha_sigma(tau_next)
    if sampler == "sde":
        ratio = alpha / alpha_next.clamp(min=1e-6)
        added = (sigma**2 - ratio**2 * sigma_next**2).clamp(min=0.0)
        mean = (ratio * sigma_next**2 * z + alpha_next * added * x0) / sigma**2
        return mean + sigma_next * added.sqrt() / sigma * noise
    return alpha_next * x0 + sigma_next * (z - alpha * x0) / sigma


def ahead(
    x0: Float[Tensor, "b k d"],
    previous: Float[Tensor, "b k d"],
    times: Float[Tensor, " s+1"],
    index: int,
    schedule: TangentSchedule,
    sampler: str,
) -> Float[Tensor, "b k d"]:
    """The estimate that step `index` makes for: the newest, or with `dpmpp` a line through the last two, where it is finite."""
    if sampler != "dpmpp":
        return x0
    alpha, sigma = schedule.alpha_sigma(times[[max(index - 1, 0), index, index + 1]])
    before, here, there = torch.log(alpha / sigma)
    weight = 0.5 * (there - here) / (here - before)
    return x0 + torch.where(torch.isfinite(weight), weight, 0.0) * (x0 - previous)


# --- A run, ready to write text (jdllm/generation/generator.py)


class Generator:
    """Weights of an exported run and what is needed to turn noise into text with them."""

    def __init__(
        self,
        config: Config,
        model: LDLM,
        statistics: dict[str, Tensor],
        tokenizer: tokenizers.Tokenizer | None = None,
        eos_id: int = 0,
    ):
        """`statistics` are the float32 tensors of convert.py's table that are no weights, such as timesteps.edges."""
        self.config, self.model, self.tokenizer, self.eos_id = config, model, tokenizer, eos_id
        self.statistics = {name: tensor.to(self.device) for name, tensor in statistics.items()}
        self.schedule = TangentSchedule(config.diffusion.schedule_d)

    @property
    def device(self) -> torch.device:
        return self.model.denoiser.input.weight.device

    def sampling(self, **options: Any) -> SamplingConfig:
        """The run's sampling defaults with `options` in their place; ConfigError on an impossible one."""
        known = [field.name for field in dataclasses.fields(SamplingConfig)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ConfigError(f"no sampling option {unknown[0]!r}; there are: {', '.join(known)}")
        chosen = dataclasses.replace(self.config.sampling, **{k: v for k, v in options.items() if v is not None})
        if chosen.sampler not in SAMPLERS:
            raise ConfigError(f"sampler={chosen.sampler!r} is not one of {', '.join(SAMPLERS)}")
        if chosen.grid not in GRIDS:
            raise ConfigError(f"grid={chosen.grid!r} is not one of {', '.join(GRIDS)}")
        if chosen.steps < 1 or chosen.num < 1:
            raise ConfigError(f"steps={chosen.steps} and num={chosen.num} must be at least 1")
        return chosen

    @torch.inference_mode()
    def sample(
        self,
        noise: Float[Tensor, "b k d"],
        options: SamplingConfig,
        fresh_noise: Float[Tensor, "s b k d"] | None = None,
        random: torch.Generator | None = None,
    ) -> Float[Tensor, "b k d"]:
        """Latents from unit noise.  `sde` adds `fresh_noise`, one entry a step, or draws it from `random`."""
        times = time_grid(self.statistics["timesteps.edges"], options.steps, grid=options.grid, sampler=options.sampler)
        z = options.temperature * noise.to(self.device, torch.float32)
        x0, added = torch.zeros_like(z), None
        for index in range(options.steps):
            previous = x0
            x0 = self.model.estimate(z, times[index], previous, options.guidance)
            if index + 1 == options.steps:
                break  # the estimate is the result, never a half-noisy state
            if options.sampler == "sde":
                drawn = torch.randn(z.shape, generator=random) if fresh_noise is None else fresh_noise[index]
                added = options.temperature * drawn.to(z)
            heading = ahead(x0, previous, times, index, self.schedule, options.sampler)
            z = step(z, heading, added, times[index], times[index + 1], self.schedule, options.sampler)
        return x0

    def generate_tokens(
        self,
        *,
        noise: Float[Tensor, "num k d"] | None = None,
        fresh_noise: Float[Tensor, "s num k d"] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Int[Tensor, "num t"]:
        """Tokens of `num` windows, EOS and what follows it included; options are those of SamplingConfig.

        Without `noise` (unit normal) it is drawn on the CPU from `seed`.  JAX draws other numbers from the same seed: to
        compare the two, pass the same noise, and for the sampler `sde` the noise of each step as `fresh_noise`.
        """
        m = self.config.model
        s = self.sampling(**(options if noise is None else options | {"num": len(noise)}))
        random = torch.Generator().manual_seed(seed)
        if noise is None:
            noise = torch.randn(s.num, m.num_latents, m.latent_dim, generator=random)
        if noise.shape[1:] != (m.num_latents, m.latent_dim):
            raise ConfigError(f"noise has shape {tuple(noise.shape)}; (num, {m.num_latents}, {m.latent_dim}) is wanted")
        wanted = (s.steps, *noise.shape)
        if fresh_noise is not None and tuple(fresh_noise.shape) != wanted:
            raise ConfigError(f"fresh_noise has shape {tuple(fresh_noise.shape)}; {wanted} is wanted")
        done = []
        for first in range(0, len(noise), BATCH):
            rows = slice(first, first + BATCH)
            fresh = None if fresh_noise is None else fresh_noise[:, rows]
            done.append(self.tokens(self.sample(noise[rows], s, fresh, random)))
        return torch.cat(done)

    def generate(self, **options: Any) -> list[str]:
        """Texts, each up to its first end-of-sequence token; see `generate_tokens`."""
        return self.decode(self.generate_tokens(**options))

    def decode(self, tokens: Int[Tensor, "n t"]) -> list[str]:
        """Text of each row up to its first end-of-sequence token."""
        if self.tokenizer is None:
            raise ConfigError("this generator was made without a tokenizer; use generate_tokens, or load() a folder")
        cut = [row[: row.index(self.eos_id)] if self.eos_id in row else row for row in tokens.tolist()]
        return self.tokenizer.decode_batch(cut)

    @torch.inference_mode()
    def encode(self, hidden: Float[Tensor, "b t dh"], lengths: Int[Tensor, " b"]) -> Float[Tensor, "b k d"]:
        """Standardised latents of raw hidden states of the frozen model."""
        s, clip = self.statistics, self.config.feed.clip
        hidden = (hidden.to(self.device, torch.float32) - s["hidden_mean"]) / s["hidden_std"]
        raw = self.model.encoder(hidden.clamp(-clip, clip).to(self.model.dtype), lengths.to(self.device))
        stats = (s[f"latent_stats.{name}"] for name in ("mean", "variance", "weight"))
        return standardize(raw, *stats, self.config.model.standardize)

    @torch.inference_mode()
    def tokens(self, z: Float[Tensor, "b k d"]) -> Int[Tensor, "b t"]:
        """Tokens of latents."""
        return self.model.tokens(z.to(self.device))


def from_tensors(
    config: Config,
    tensors: dict[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tokenizer: tokenizers.Tokenizer | None = None,
    eos_id: int = 0,
) -> Generator:
    """A generator of tensors by the names of convert.py, weights in `dtype` (by default as they are)."""
    with torch.device("meta"):
        model = LDLM(config.model)
    names = set(model.state_dict())
    frozen = {"token_decoder.head.weight"} if config.model.head == "encoder" else set()
    weights = {name: tensors[name].to(device, None if name in frozen else dtype) for name in names}
    model.load_state_dict(weights, assign=True)
    statistics = {name: tensor for name, tensor in tensors.items() if name not in names}
    return Generator(config, model.eval().requires_grad_(False), statistics, tokenizer, eos_id)


def load(folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Generator:
    """A generator out of a folder that `jdllm export` wrote; weights in `dtype`, by default as they lie there.

    ConversionError names everything that does not fit; only safetensors are read, never a pickle.
    """
    folder = Path(folder)
    path = convert.weights_file(folder)
    about = convert.read_about(folder)
    tensors = convert.read_tensors(path, about.config, about.dtype, "pt", str(device))
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return from_tensors(about.config, tensors, dtype=dtype, device=device, tokenizer=tokenizer, eos_id=about.eos_id)
