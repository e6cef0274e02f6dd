"""Where the time of a training step goes: the whole step and its parts, each compiled alone and timed on random inputs.

    python experiments/profile_step.py --preset books --out results/profile-h200.json

Parts are forward and backward passes of one module at the size that the step runs it at, so their sum says what is left
over; variants of a part (attention by XLA instead of cuDNN, unrolled stacks, ...) stand beside it.  Hidden states are
random normal numbers: no encoder and no data are needed.  Medians of a few runs after a warm-up, device time synchronised.
Compilation runs side by side, timing does not.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jdllm.config import preset
from jdllm.kernels.cross_entropy import cross_entropy
from jdllm.model import layers
from jdllm.model.ldlm import Model
from jdllm.training.state import init_state, make_optimizer
from jdllm.training.step import cast, gradients, make_train_step
from jdllm.training.throughput import flops_per_window, peak_flops


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    preset: str = "books"
    """Preset whose shapes are used."""
    batch_size: int = 0
    """Windows in a step; 0 takes the preset's."""
    repeat: int = 7
    """Timed runs of each part."""
    out: Path | None = None
    """Where the JSON goes."""


def main() -> int:
    options = tyro.cli(Options)
    config = preset(options.preset)
    if options.batch_size:
        config = config.replace(training__batch_size=options.batch_size)
    m, dtype = config.model, jnp.dtype(config.training.compute_dtype)
    b, t, k, d, v = config.training.batch_size, m.num_tokens, m.num_latents, m.latent_dim, m.vocab_size
    model, optimizer = Model(config, "unroll"), make_optimizer(config.optimizer)
    state = jax.jit(lambda: init_state(model, optimizer, jnp.zeros(m.hidden_dim), jnp.ones(m.hidden_dim)))()
    weights = jax.jit(lambda p: cast(p, dtype))(state.params)
    frozen = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), model.frozen_shapes)
    key = jax.random.key(0)
    draw = jax.jit(
        lambda i, shape: jax.random.normal(jax.random.fold_in(key, i), shape).astype(dtype), static_argnums=1
    )
    hidden, z, tokens = draw(0, (b, t, m.hidden_dim)), draw(1, (b, k, d)), draw(2, (b * t, d))
    ids = jax.random.randint(key, (b, t), 0, v)
    lengths = jnp.full(b, t, jnp.int32)
    batch = {"hidden": hidden.astype(jnp.bfloat16), "ids": ids, "lengths": lengths}
    tau = jnp.linspace(0.01, 0.99, b)

    def both(function: Callable[..., jax.Array], *arguments: Any) -> Callable[..., Any]:
        """Forward and backward with respect to all floating-point arguments."""
        places = tuple(
            i for i, x in enumerate(arguments) if all(jnp.issubdtype(y.dtype, jnp.floating) for y in jax.tree.leaves(x))
        )
        return jax.grad(lambda *a: function(*a).astype(jnp.float32).sum(), argnums=places)

    def encoder(w: Any, h: jax.Array) -> jax.Array:
        return model.merge(w, frozen).encoder(h, lengths)

    def denoiser(w: Any, z: jax.Array) -> jax.Array:
        module = model.merge(w, frozen).denoiser
        return module(z, module.modulation(tau[: len(z)]), z)

    def decoder(w: Any, z: jax.Array) -> jax.Array:
        return model.merge(w, frozen).decoder(z)

    def token_states(w: Any, h: jax.Array) -> jax.Array:
        return model.merge(w, frozen).token_decoder.states(h)

    def head(w: Any, x: jax.Array) -> jax.Array:
        return cross_entropy(x, w, ids.ravel())[0]

    def update(state: Any) -> Any:
        return optimizer.update(state.params, state.opt_state, state.params)

    def stack(w: Any, z: jax.Array, walk: layers.Walk) -> jax.Array:
        """The denoiser's blocks alone."""
        module = model.merge(w, frozen).denoiser
        return layers.run_stack(module.blocks, z, module.modulation(tau), walk=walk)

    def product(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    wide = draw(3, (d, 4 * d))
    q = draw(4, (b, t, d // m.head_dim, m.head_dim))
    parts: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "train step": (make_train_step(model, optimizer), (state, frozen, batch, 0.0)),
        "gradients": (lambda s, x: gradients(model, s.params, frozen, s, x, key)[0], (state, batch)),
        "encoder": (both(encoder, weights, hidden), (weights, hidden)),
        "encoder, forward": (encoder, (weights, hidden)),
        "denoiser": (both(denoiser, weights, z), (weights, z)),
        "denoiser, forward, half the rows": (denoiser, (weights, z[: b // 2])),
        "decoder": (both(decoder, weights, z), (weights, z)),
        "token decoder": (both(token_states, weights, hidden), (weights, hidden)),
        "head and cross-entropy": (both(head, weights["token_decoder"]["head"], tokens), (weights["token_decoder"]["head"], tokens)),
        "head and cross-entropy, forward": (head, (weights["token_decoder"]["head"], tokens)),
        "optimizer": (update, (state,)),
        "product d x 4d": (product, (wide, tokens)),
        "product d x 4d, backward too": (both(product, wide, tokens), (wide, tokens)),
    }  # fmt: skip
    for implementation in ("cudnn", "xla") if jax.default_backend() == "gpu" else ("xla",):
        attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
        parts[f"one attention, {implementation}"] = (attend, (q, q, q))
        parts[f"one attention, {implementation}, backward too"] = (both(attend, q, q, q), (q, q, q))
    for walk in ("scan", "unroll", "remat"):
        parts[f"denoiser blocks, {walk}"] = (both(functools.partial(stack, walk=walk), weights, z), (weights, z))

    began = time.perf_counter()
    with ThreadPoolExecutor(1 if jax.default_backend() == "cpu" else 12) as pool:
        lowered = {name: jax.jit(function).lower(*arguments) for name, (function, arguments) in parts.items()}
        compiled = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values())))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    rows = {}
    for name, (_, arguments) in parts.items():
        run = compiled[name]
        jax.block_until_ready(run(*arguments))
        times = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times.append(1e3 * (time.perf_counter() - start))
        cost = run.cost_analysis() or {}
        rows[name] = {"ms": statistics.median(times), "gb": cost.get("bytes accessed", np.nan) / 1e9}
        print(f"{rows[name]['ms']:9.2f} ms  {name}", flush=True)
    step = rows["train step"]["ms"] / 1e3
    peak = peak_flops()
    found = {
        "device": jax.devices()[0].device_kind, "preset": options.preset, "batch_size": b, "rows": rows,
        "tokens_per_second": b * t / step, "mfu": b * flops_per_window(model) / step / peak if peak else None,
    }  # fmt: skip
    print(f"{found['tokens_per_second']:,.0f} tokens/s, MFU {found['mfu']}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
