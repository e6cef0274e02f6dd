"""`jdllm plan`: does a run fit on a device, and which switches to turn if it does not.

Switches are tried in order of least harm: first what leaves the result as it is, then what changes the numbers a little,
then what makes another model.  Each is kept only if it lowers the peak; at the end those that turned out not to be needed
are taken back.  Memory itself is counted in memory.py.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from json import dumps
from typing import Any

import jax

from jdllm.config import PRESETS, Config, ConfigError
from jdllm.training.encoder_size import encoder_bytes
from jdllm.training.memory import Compiled, Device, Memory, ask_xla, memory

FREE = 1 / 16
"""Share of a device left for CUDA's context, libraries' workspaces and gaps between arrays: 30 of 32 GB are planned."""
PREALLOCATED = 0.75
"""Share of a GPU that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""
ROWS = 16
"""Latents are standardised over the rows of a micro-batch; fewer than these and the statistics are noise."""


@dataclasses.dataclass(frozen=True)
class Switch:
    """One way to need less memory."""

    turn: Callable[[Config], dict[str, Any]]
    """Changes for `Config.replace`; empty where there is nothing more to turn."""
    cost: str


def _accumulate(config: Config, devices: int) -> dict[str, Any]:
    t = config.training
    pieces = 2 * t.accumulate
    enough = t.batch_size % (pieces * devices) == 0 and t.batch_size // pieces // devices >= ROWS
    return {"training__accumulate": pieces} if enough else {}


def _shard(config: Config, devices: int) -> dict[str, Any]:
    fsdp = 2 * config.training.fsdp
    return {"training__fsdp": fsdp} if devices % fsdp == 0 else {}


def _narrower(config: Config) -> dict[str, Any]:
    m = config.model
    half = m.latent_dim // 2 // m.head_dim * m.head_dim
    return {"model__latent_dim": half} if half >= 256 else {}


def switches(devices: int) -> tuple[Switch, ...]:
    """All of them, the least harmful first; one that can be turned further may be turned again."""
    return (
        Switch(
            lambda c: {"feed__feed": "cache"} if c.feed.feed == "online" else {},
            "hidden states are made before training and take room on the disk; the result is the same",
        ),
        Switch(
            lambda c: _shard(c, devices),
            "weights are sent between devices at every use; the result is the same but for the order of sums",
        ),
        Switch(
            lambda c: {} if c.training.remat else {"training__remat": True},
            "blocks are computed twice, about a third more arithmetic; the result is the same",
        ),
        Switch(
            lambda c: {"feed__valid_windows": 128} if c.feed.valid_windows > 128 else {},
            "held-out measures are noisier, also the one that opens gamma's gate",
        ),
        Switch(
            lambda c: _accumulate(c, devices),
            "latents are standardised over fewer rows at a time, and small products use a GPU less well",
        ),
        Switch(
            lambda c: {} if c.optimizer.first_moment == "bfloat16" else {"optimizer__first_moment": "bfloat16"},
            "the first moment is rounded to three digits",
        ),
        Switch(
            lambda c: (
                {"optimizer__second_moment": "factored"}
                if (c.optimizer.name, c.optimizer.second_moment) == ("adamw", "full")
                else {}
            ),
            "a second moment by rows and columns: another optimiser, whose rate has not been tuned here",
        ),
        Switch(
            lambda c: {} if c.model.head == "encoder" else {"model__head": "encoder"},
            "the frozen head learns to be read more slowly at first (docs/decisions.md, the quickstart)",
        ),
        Switch(_narrower, "half the latent width: another, weaker model"),
    )


@dataclasses.dataclass(frozen=True)
class Turned:
    """A switch that was turned."""

    changes: dict[str, Any]
    saves: int
    """Bytes off the peak, on top of the switches before it."""
    cost: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs and what to do about it; sizes in bytes, for each of `devices` devices."""

    config: Config
    device: Device
    devices: int
    room: int
    """What may be used of a device."""
    memory: Memory
    turned: tuple[Turned, ...]
    fitting: Config | None
    """The config that fits: the given one when nothing had to be turned, None when all switches are not enough."""
    least: int
    """Peak with the switches turned."""
    encoder: int | None
    """The frozen model while hidden states are made, before training; None where its size is not known."""
    encoder_weights: str | None
    """The first of auto, int8, nf4 with which that fits; None when none does or the size is not known."""
    token_bytes: int
    """Bytes of the cache on disk for each token."""
    compiled: dict[str, Compiled] = dataclasses.field(default_factory=dict)
    """XLA's own account of step and probe of the fitting config (of the given one, when none fits), where it was asked."""

    @property
    def command(self) -> str | None:
        """The `jdllm train` that fits, with packed weights of the frozen model where these alone fit; None without one."""
        if self.fitting is None:
            return None
        weights = self.encoder_weights or self.config.feed.encoder_weights
        return command_line(self.fitting.replace(feed__encoder_weights=weights))


def make_plan(config: Config, device_memory: float, *, device: Device = "gpu", devices: int | None = None) -> Plan:
    """Plan for devices of `device_memory` GB (10^9 bytes); ConfigError on sizes and counts that make no sense."""
    if device_memory <= 0:
        raise ConfigError(
            f"--device-memory {device_memory:g} is not positive; give the memory of one device in GB, such as 32"
        )
    devices = config.training.fsdp if devices is None else devices
    rows = config.training.batch_size // config.training.accumulate
    if devices < 1 or devices % config.training.fsdp or rows % devices:
        raise ConfigError(
            f"--devices {devices} does not fit: it has to be a multiple of training.fsdp={config.training.fsdp} and divide the "
            f"{rows} rows of training.batch_size / training.accumulate"
        )
    room = int(1e9 * device_memory * (1 - FREE))
    needed = memory(config, device, devices)
    turned, fitting, least = fit(config, room, device, devices)
    encoder, kind = _encoder(config, room, device)
    return Plan(
        config, device, devices, room, needed, turned, fitting, least, encoder, kind, 2 * config.model.hidden_dim + 4
    )


def fit(config: Config, room: int, device: Device, devices: int) -> tuple[tuple[Turned, ...], Config | None, int]:
    """Switches that make the config fit, the config with them (None if they do not suffice), and its peak."""
    turned: list[Turned] = []
    now, peak = config, memory(config, device, devices).peak
    for switch in switches(devices):
        while peak > room and (changes := switch.turn(now)):
            lower = memory(now.replace(**changes), device, devices).peak
            if lower > 0.99 * peak:
                break
            turned.append(Turned(changes, peak - lower, switch.cost))
            now, peak = now.replace(**changes), lower
    if peak > room:
        return tuple(turned), None, peak
    for one in turned[-2::-1]:  # the last one is needed, or it would not have been turned
        without = [other for other in turned if other is not one]
        if memory(_apply(config, without), device, devices).peak <= room:
            turned = without
    kept, now, peak = [], config, memory(config, device, devices).peak
    for one in turned:
        now = now.replace(**one.changes)
        lower = memory(now, device, devices).peak
        kept.append(dataclasses.replace(one, saves=peak - lower))
        peak = lower
    return tuple(kept), now, peak


def _apply(config: Config, turned: list[Turned]) -> Config:
    for one in turned:
        config = config.replace(**one.changes)
    return config


def _encoder(config: Config, room: int, device: Device) -> tuple[int | None, str | None]:
    """Bytes of the frozen model as configured, and the weights with which it fits while nothing else is there."""
    whole, kinds = encoder_bytes(config, device), ("auto", "int8", "nf4")
    if whole is None:
        return None, None
    for kind in kinds[kinds.index(config.feed.encoder_weights) :]:
        found = encoder_bytes(config.replace(feed__encoder_weights=kind), device)
        if found is not None and found <= room:
            return whole, kind
    return whole, None


def with_xla(plan: Plan) -> Plan:
    """The same with XLA's own account of step and probe for the devices at hand; compiles, and runs nothing."""
    backend = jax.default_backend()
    if backend != plan.device:
        raise ConfigError(f"--compile asks XLA for a {backend}, the device at hand; give --device {backend} with it")
    if jax.device_count() != plan.devices:
        raise ConfigError(
            f"--compile needs the {plan.devices} devices of the plan, and {jax.device_count()} are at hand"
        )
    found = {what: ask_xla(plan.fitting or plan.config, what) for what in ("step", "probe")}
    return dataclasses.replace(plan, compiled=found)


def command_line(config: Config) -> str:
    """The `jdllm train` that makes this config out of its preset."""
    base = PRESETS[config.preset].to_dict()
    words = ["jdllm", "train", "--preset", config.preset]

    def compare(there: dict[str, Any], here: dict[str, Any], prefix: str) -> None:
        for key, value in here.items():
            name = prefix + key.replace("_", "-")
            if isinstance(value, dict):
                compare(there[key], value, f"{name}.")
            elif value != there[key] and isinstance(value, bool):
                words.append(f"--{name}" if value else f"--{prefix}no-{key.replace('_', '-')}")
            elif value != there[key]:
                words.extend((f"--{name}", str(value)))

    compare(base, config.to_dict(), "")
    return shlex.join(words)


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs: sizes in bytes."""
    return {
        "preset": plan.config.preset,
        "device": plan.device,
        "devices": plan.devices,
        "room": plan.room,
        "peak": plan.memory.peak,
        "fits": plan.memory.peak <= plan.room,
        "parts": [dataclasses.asdict(part) for part in plan.memory.parts],
        "switches": [dataclasses.asdict(one) for one in plan.turned],
        "peak_with_switches": plan.least,
        "command": plan.command,
        "encoder": plan.encoder,
        "encoder_weights": plan.encoder_weights,
        "cache_bytes_per_token": plan.token_bytes,
        "xla": {name: dataclasses.asdict(one) | {"peak": one.peak} for name, one in plan.compiled.items()},
    }


WHEN = {
    "always": "all the time", "step": "in a step", "logits": "while tokens are read", "backward": "in the backward pass",
    "probe": "in a held-out probe",
}  # fmt: skip


def show(plan: Plan, *, tokens: int | None = None, json: bool = False) -> str:
    """As a table, or as JSON."""
    return dumps(to_dict(plan), indent=1) + "\n" if json else table(plan, tokens)


def table(plan: Plan, tokens: int | None = None) -> str:
    """The plan for people."""
    each = "" if plan.devices == 1 else f" on each of {plan.devices} devices"
    lines = [f"{plan.config.preset}: memory of training{each}, in GB (10^9 bytes); ~ is an estimate", ""]
    for part in sorted(plan.memory.parts, key=lambda part: list(WHEN).index(part.when)):
        mark = " " if part.exact else "~"
        lines.append(f"  {_gb(part.size)} {mark} {part.name:<40} {WHEN[part.when]}")
    total = plan.memory.total
    lines += [
        "",
        f"  {_gb(total('always') + plan.memory.step)} ~ peak of a step",
        f"  {_gb(total('always') + total('probe'))} ~ peak of a probe",
    ]
    for name, found in plan.compiled.items():
        lines.append(f"  {_gb(found.peak)}   peak of a {name} as it is proposed, by XLA's own account")
    lines += ["", *_verdict(plan), *_before(plan, tokens)]
    return "\n".join(lines) + "\n"


def _verdict(plan: Plan) -> list[str]:
    have = f"{_short(plan.room)} (a sixteenth of the device is left free)"
    if plan.fitting is not None and not plan.turned:
        lines = [f"It fits: {_short(plan.memory.peak)} of {have}.", f"  {plan.command}"]
    else:
        lines = [f"It does not fit: {_short(plan.memory.peak)}, there are {have}.  In order of least harm:"]
        for one in plan.turned:
            names = ", ".join(f"{key.replace('__', '.')}={value}" for key, value in one.changes.items())
            lines.append(f"  {names}: saves {_short(max(one.saves, 0))}; {one.cost}")
        if plan.fitting is not None:
            lines += [f"Then it fits, with {_short(plan.least)}:", f"  {plan.command}"]
        else:
            lines.append(
                f"Even so it needs {_short(plan.least)}.  Use a larger device, several (--training.fsdp N shards weights), "
                "or a smaller preset"
            )
    taken = plan.room / (1 - FREE) * PREALLOCATED
    if plan.device == "gpu" and plan.fitting is not None and plan.least > taken:
        lines.append(
            f"JAX takes {PREALLOCATED:.0%} of a GPU unless told otherwise; set XLA_PYTHON_CLIENT_MEM_FRACTION={1 - FREE:.2f}"
        )
    return lines


def _before(plan: Plan, tokens: int | None) -> list[str]:
    """The frozen model and the disk."""
    feed = plan.config.feed
    lines = []
    if plan.encoder is None:
        lines.append(f"The size of the encoder {plan.config.encoder} is not known here and not counted.")
    else:
        kinds = "" if feed.encoder_weights == "auto" else f" in {feed.encoder_weights}"
        lines.append(f"The frozen encoder's weights{kinds} take {_short(plan.encoder)} while hidden states are made.")
        if plan.encoder_weights is None:
            lines[-1] += (
                "  Those do not fit; --feed.encoder-device spread puts layers on all GPUs and the rest in CPU memory."
            )
        elif plan.encoder_weights != feed.encoder_weights:
            lines[-1] += (
                f"  Those do not fit; in {plan.encoder_weights} they do, which changes hidden states a little.  "
                "What the encoder needs beside its weights grows with --feed.encoder-batch-tokens and is not counted."
            )
    if (plan.fitting or plan.config).feed.feed == "cache":
        tokens = tokens or feed.max_tokens
        count, what = (tokens, f"{tokens:,} tokens") if tokens else (1_000_000, "each million tokens")
        lines.append(f"The cache takes {_short(count * plan.token_bytes)} on the disk for {what}.")
    return lines


def _gb(size: int) -> str:
    return f"{size / 1e9:8.3f}"


def _short(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e9:.3f} GB"
