"""How long a call takes, and what this device can do: read its memory, multiply matrices.

A call is timed by the host's clock from its start until its result is there, launch costs included, since that is what one
waits for.  The ceilings are means over calls that follow each other without a pause, since there nobody waits.  All on
random numbers: zeros run faster than real data does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

CALLS = 10


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated calls."""

    median: float
    p90: float
    repeats: int


def time_calls(call: Callable[[], object], *, seconds: float = 1.0, least: int = 5, most: int = 200) -> Timing:
    """Time `call`, which returns when its work is done: two calls to warm up, then about `seconds` of them."""
    call(), call()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < least or (len(taken) < most and time.perf_counter() - began < seconds):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return Timing(float(np.median(taken)), float(np.quantile(taken, 0.9)), len(taken))


def seconds_a_call(call: Callable[[], jax.Array], rounds: int = 3) -> float:
    """The best mean of CALLS calls in a row."""
    jax.block_until_ready(call())
    means = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready([call() for _ in range(CALLS)])
        means.append((time.perf_counter() - start) / CALLS)
    return min(means)


def read_bandwidth(elements: int | None = None) -> float:
    """Bytes a second that the device reads from its memory: the sum of a float32 array far larger than its caches."""
    elements = elements or (2**30 if jax.default_backend() == "gpu" else 2**26)
    key = jax.random.key(0, impl="rbg")
    numbers = jax.jit(lambda key: jax.random.normal(key, (elements // 2**14, 2**14)))(key)
    total = jax.jit(lambda x: x.sum(-1))
    return numbers.nbytes / seconds_a_call(lambda: total(numbers))


def matmul_peak(size: int | None = None) -> float:
    """Operations a second of a square matrix product, bfloat16 with float32 sums on a GPU and float32 on a CPU."""
    gpu = jax.default_backend() == "gpu"
    size = size or (8192 if gpu else 1024)
    dtype = jnp.bfloat16 if gpu else jnp.float32
    draw = jax.jit(lambda key: jax.random.normal(key, (size, size), jnp.float32).astype(dtype))
    a, b = (draw(jax.random.key(i, impl="rbg")) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2.0 * size**3 / seconds_a_call(lambda: product(a, b))
