"""What a training run keeps in the memory of one device, part by part, and what XLA says about the same step.

State, average, optimiser, frozen head and batch are exact: their shapes come from the code that makes them.  What the
backward pass keeps is an estimate (`SAVED`), since it is the compiler that decides which arrays it stores and which it
computes twice.  `ask_xla` gives the compiler's own answer for the device at hand, at the price of a compilation.

The estimate was set beside XLA's answer for float32 steps on a CPU (jax 0.10.2): -10 to +11% over the 14 small shapes that
its constants were chosen on, 0 to +21% over four steps and -1 to +20% over three probes of whole presets, with a look at
which two of the counts were corrected (so that is no clean hold-out).
Such a list is printed by `experiments/measure_memory.py --toy --grid`.  On a GPU, where attention is fused and fewer arrays
are stored, the estimate follows from the blocks alone until that script has been run there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jdllm.config import Config, DataConfig, TrainingConfig
from jdllm.kernels.cross_entropy import CHUNK, LOGITS_AT_ONCE
from jdllm.model.ldlm import Model, Params
from jdllm.model.placement import WHOLE, axis_to_shard, names_of
from jdllm.training.encoder_size import encoder_bytes
from jdllm.training.probe import WINDOWS, make_probe
from jdllm.training.sharding import batch_sharding, make_mesh, on_mesh, state_sharding
from jdllm.training.state import TrainState, init_state, make_optimizer
from jdllm.training.step import make_train_step

Device = Literal["gpu", "cpu"]
Moment = Literal["always", "step", "logits", "backward", "probe"]
"""All the time; throughout a training step; while its tokens are read and the cross-entropy walks over the vocabulary; in
the backward pass of the other modules; in a held-out probe between two steps.  The third and fourth take turns, in an order
that XLA chooses, so gradients of the other modules may be there already while tokens are read."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """Arrays that one block keeps for its backward pass, counted by their size; n queries, m of context, width d."""

    queries: float
    """Of (n, d), in the arithmetic of the step, as are the next three."""
    keys: float
    """Of (n + m, d)."""
    context: float
    """Of (m, d)."""
    ffn: float
    """Of (n, ffn_multiple * d)."""
    scores: float
    """Of (heads, n, keys), float32."""


SAVED: dict[Device, dict[str, Saved]] = {
    # Operands and results of products and of the fused attention, and the residual stream.  A Perceiver block (encoder,
    # decoder): x, its norm, q before and after its norm, attention, x again, its norm; keys before and after their norm,
    # values; the context's norm; the feed-forward layer before and after GELU.  Self-attention: the same with q, k, v in
    # one and rotated q, k.  A denoiser block also keeps what its two gates multiply.
    "gpu": {
        "encoder": Saved(queries=7, keys=3, context=1, ffn=2, scores=0),
        "decoder": Saved(queries=7, keys=3, context=1, ffn=2, scores=0),
        "denoiser": Saved(queries=12, keys=0, context=0, ffn=2, scores=0),
        "token": Saved(queries=10, keys=0, context=0, ffn=2, scores=0),
    },
    # Counted in XLA's own lists of live buffers of float32 steps on a CPU (jax 0.10.2) and rounded up: GELU's tanh is
    # stored as well, keys and values in two layouts, and scores, as attention is not fused; with lengths also masked ones.
    "cpu": {
        "encoder": Saved(queries=11, keys=4, context=1, ffn=3, scores=3),
        "decoder": Saved(queries=11, keys=3, context=1, ffn=3, scores=2),
        "denoiser": Saved(queries=10, keys=0, context=0, ffn=3, scores=2),
        "token": Saved(queries=9, keys=0, context=0, ffn=3, scores=2),
    },
}
LOGITS = {"gpu": 1.5, "cpu": 2.5}
"""Float32 arrays of (positions, chunk) at once in the cross-entropy: logits, and their gradient in the step's arithmetic."""
HEADS = {("gpu", "trained"): 1, ("gpu", "encoder"): 1, ("cpu", "trained"): 1, ("cpu", "encoder"): 2}
"""Copies of the head in the step's arithmetic: cut into chunks, and on a CPU the frozen one converted as well."""
WITH_GRADIENTS = 1.6
"""A block in its backward pass, over what it keeps for it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Memory of one purpose, in bytes on one device."""

    name: str
    size: int
    exact: bool
    """From shapes, not an estimate."""
    when: Moment = "always"
    """At which moment it is there."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """All parts of one config on one device."""

    parts: tuple[Part, ...]

    def total(self, *when: Moment) -> int:
        """Bytes of the parts of these moments."""
        return sum(part.size for part in self.parts if part.when in when)

    @property
    def step(self) -> int:
        """Peak of a training step without what is held all the time."""
        return self.total("step") + max(self.total("logits"), self.total("backward"))

    @property
    def peak(self) -> int:
        """Peak of the run: that of a step or of a probe."""
        return self.total("always") + max(self.step, self.total("probe"))


def memory(config: Config, device: Device = "gpu", devices: int | None = None) -> Memory:
    """What training takes on each of `devices` devices; by default as many as weights are sharded over."""
    t, m = config.training, config.model
    devices = devices or t.fsdp
    state = state_shapes(config)
    rows = max(t.batch_size // t.accumulate // devices, 1)
    windows = min(config.feed.valid_windows, WINDOWS)

    def held(tree: Any) -> int:
        return held_bytes(tree, t.fsdp)

    masters = held(state.params)
    small = held(state.replace(params=None, ema_params=None, opt_state=None))
    batch = held(batch_shapes(config, t.batch_size // devices))
    size = jnp.dtype(t.compute_dtype).itemsize
    head = m.vocab_size * (m.latent_dim if m.head == "trained" else m.hidden_dim)
    copies = HEADS[device, m.head] * head * size + (4 * head if m.head == "trained" else 0)
    logits = LOGITS[device] * 4 * rows * m.num_tokens * min(CHUNK, m.vocab_size)
    weights = 0 if size == 4 else held(state.params) * size // 4
    saved = activations(config, rows, device)
    parts = (
        Part("weights, float32 masters", masters, True),
        Part("running average of the weights", held(state.ema_params), True),
        Part("optimiser moments", held(state.opt_state), True),
        Part("frozen head", held(frozen_shapes(config)), True),
        Part("statistics and counters", small, True),
        Part("batches, one at work and one on its way", 2 * batch, True),
        Part("frozen encoder, beside the trainer", encoder_beside(config, device), True),
        Part("held-out windows", held(batch_shapes(config, windows)), True),
        Part(f"weights in {t.compute_dtype}", weights, True, "step"),
        Part("gradients of the micro-batches before", masters if t.accumulate > 1 else 0, True, "step"),
        Part("activations, encoder and decoder", saved["encoder"] + saved["decoder"], False, "step"),
        Part("arrays between the modules", saved["between"], False, "step"),
        Part("gradients of the other modules", masters - held(state.params["token_decoder"]), True, "logits"),
        Part("activations, token decoder", saved["token"], False, "logits"),
        Part("logits, one chunk", int(logits), False, "logits"),
        Part("head cut into chunks", copies, False, "logits"),
        Part("activations, denoiser", saved["denoiser"], False, "backward"),
        Part("a block computed again", saved["again"], False, "backward"),
        Part("gradients", masters, True, "backward"),
        Part("held-out probe", weights + probe(config, windows, device), False, "probe"),
    )
    return Memory(tuple(part for part in parts if part.size))


def encoder_beside(config: Config, device: Device) -> int:
    """Bytes of the frozen model where it shares the trainer's device; 0 with a cache, and for one of unknown size."""
    shares = config.feed.feed == "online" and config.feed.encoder_device in ("auto", "cuda", "cuda:0")
    return (encoder_bytes(config, device) or 0) if shares else 0


def state_shapes(config: Config) -> TrainState:
    """Shapes of everything a run remembers, from the function that makes it."""
    return _shapes(config.replace(training=TrainingConfig(), feed=DataConfig()))[0]


def frozen_shapes(config: Config) -> Params:
    """Shapes of the frozen head, or nothing."""
    return _shapes(config.replace(training=TrainingConfig(), feed=DataConfig()))[1]


@functools.lru_cache(maxsize=64)
def _shapes(config: Config) -> tuple[TrainState, Params]:
    """Of a config whose fields that change no shape have their defaults: planning asks for the same ones again and again."""
    model, width = Model(config), jax.ShapeDtypeStruct((config.model.hidden_dim,), jnp.float32)
    init = functools.partial(init_state, model, make_optimizer(config.optimizer))
    return jax.eval_shape(init, width, width), model.frozen_shapes


def batch_shapes(config: Config, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of so many windows as the loader gives them."""
    t = config.model.num_tokens
    return {
        "hidden": jax.ShapeDtypeStruct((rows, t, config.model.hidden_dim), jnp.bfloat16),
        "ids": jax.ShapeDtypeStruct((rows, t), jnp.int32),
        "lengths": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def held_bytes(tree: Any, parts: int = 1) -> int:
    """Bytes of the arrays of a tree on one device, when those that can be are cut into `parts`."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        cut = axis_to_shard(names_of(path), leaf.shape, parts) != WHOLE
        total += math.prod(leaf.shape) * leaf.dtype.itemsize // (parts if cut else 1)
    return total


def block_bytes(config: Config, stack: str, rows: int, n: int, m: int, device: Device) -> float:
    """What one block of a stack keeps for `rows` windows of n queries and m of context."""
    c, saved = config.model, SAVED[device][stack]
    size = jnp.dtype(config.training.compute_dtype).itemsize
    values = saved.queries * n + saved.keys * (n + m) + saved.context * m + saved.ffn * c.ffn_multiple * n
    scores = saved.scores * c.latent_dim // c.head_dim * n * (n + m)
    return rows * (values * c.latent_dim * size + 4 * scores)


def activations(config: Config, rows: int, device: Device) -> dict[str, int]:
    """What the backward pass of one micro-batch of `rows` windows finds stored, by module, and `between` modules.

    With rematerialisation a block keeps its input alone, and one block at a time is there `again`, with its gradients.
    """
    c, remat = config.model, config.training.remat
    size = jnp.dtype(config.training.compute_dtype).itemsize
    t, k, d = c.num_tokens, c.num_latents, c.latent_dim
    stacks = {  # depth, queries, context
        "encoder": (c.encoder_depth, k, t),
        "decoder": (c.decoder_depth, t, k),
        "denoiser": (c.denoiser_depth, k, 0),
        "token": (c.token_decoder_depth, t, 0),
    }
    found, again = {}, 0.0
    for name, (depth, n, m) in stacks.items():
        block = block_bytes(config, name, rows, n, m, device)
        found[name] = int(depth * (rows * n * d * size if remat else block))
        again = max(again, WITH_GRADIENTS * block if remat else 0.0)
    # Hidden states as the model sees them and as it predicts them, each with a float32 companion in the loss; inputs of the
    # head and their gradient; and latents: raw, standardised, noised twice, two noises, the estimate, its error.
    width = d if c.head == "trained" else c.hidden_dim
    between = t * c.hidden_dim * (2 * size + 8) + t * width * (size + 8) + 8 * k * d * 4
    return found | {"again": int(again), "between": rows * between}


def probe(config: Config, windows: int, device: Device) -> int:
    """A forward pass over the held-out windows: hidden states and latents, and a block (half of what its backward pass would
    need) or, after the blocks, predicted states and a chunk of logits.  A CPU converts a frozen head as a whole."""
    c = config.model
    size = jnp.dtype(config.training.compute_dtype).itemsize
    positions = windows * c.num_tokens
    frozen = c.head == "encoder"
    block = 0.5 * max(
        block_bytes(config, "encoder", windows, c.num_latents, c.num_tokens, device),
        block_bytes(config, "decoder", windows, c.num_tokens, c.num_latents, device),
    )
    chunk = min(c.vocab_size, max(CHUNK, LOGITS_AT_ONCE // positions))
    reading = positions * (size * (c.hidden_dim + (c.hidden_dim if frozen else c.latent_dim)) + 4 * chunk)
    converted = 4 * c.hidden_dim * c.vocab_size if frozen and device == "cpu" else 0
    held = positions * c.hidden_dim * size + 2 * windows * c.num_latents * c.latent_dim * 4
    return int(held + converted + max(block, reading))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """XLA's own account of a compiled function on one device, in bytes."""

    arguments: int
    outputs: int
    donated: int
    """Of the outputs: bytes that take the place of arguments."""
    temporary: int

    @property
    def peak(self) -> int:
        """Arguments, temporary arrays, and outputs that found no place among the arguments."""
        return self.arguments + self.temporary + self.outputs - self.donated


def ask_xla(config: Config, what: Literal["step", "probe"] = "step") -> Compiled:
    """Compile the training step, or the probe, for the devices at hand and read the compiler's account; runs nothing."""
    mesh, state = make_mesh(config), state_shapes(config)
    shardings = state_sharding(mesh, state)

    def placed(tree: Any, places: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places)

    model = Model(config, "remat" if config.training.remat else "unroll")
    frozen = placed(model.frozen_shapes, state_sharding(mesh, model.frozen_shapes))
    rows = batch_sharding(mesh)
    if what == "step":
        step = on_mesh(mesh, make_train_step(model, make_optimizer(config.optimizer)))
        run = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        batch = batch_shapes(config, config.training.batch_size)
        arguments = (placed(state, shardings), frozen, placed(batch, {k: rows for k in batch}), 0.0)
    else:
        run = jax.jit(on_mesh(mesh, make_probe(Model(config))), keep_unused=True)
        batch = batch_shapes(config, min(config.feed.valid_windows, WINDOWS))
        arguments = (placed(state, shardings), frozen, placed(batch, {k: rows for k in batch}))
    found = run.lower(*arguments).compile().memory_analysis()
    return Compiled(
        found.argument_size_in_bytes, found.output_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes
    )
