"""Several processes that train one model: how they find each other, and what they have to agree on.

All of them run the same programs in the same order, so whatever decides what runs next (a clock, Ctrl-C, a checkpoint on
disk) has to be the same everywhere: it is exchanged here.  Files that people read are written by process 0 alone.
With one process nothing here does anything.  Left out: going on when a process is lost; JAX ends the others, and the same
command resumes from the last checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

from jdllm.config import ConfigError

Result = TypeVar("Result")

PATIENCE = 24 * 3600
"""Seconds that processes wait while the first one writes the hidden-state cache."""
_turns = itertools.count()


def join(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> None:
    """Become one of `count` processes; to be called before anything else of JAX.

    Without arguments JAX asks the cluster (SLURM, Open MPI, Kubernetes, TPU, or JAX_COORDINATOR_ADDRESS and its like).
    `coordinator` is host:port of process 0.  Waits until all are there; ConfigError when they do not come.
    """
    given = {"--coordinator": coordinator, "--num-processes": count, "--process-id": index}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ConfigError(
            f"{', '.join(missing)} missing; give --coordinator HOST:PORT, --num-processes N and --process-id 0..N-1 together, "
            "or --distributed alone on a cluster that JAX knows"
        )
    if count is not None and index is not None and not 0 <= index < count:
        raise ConfigError(f"--process-id {index} is outside 0..{count - 1}, which --num-processes {count} allows")
    try:
        jax.distributed.initialize(coordinator, count, index, shutdown_timeout_seconds=120)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes did not come together: {str(error).splitlines()[0][:200]}. Off a cluster that JAX knows, give each "
            "process --coordinator HOST:PORT (of process 0, reachable from all), --num-processes and its own --process-id"
        ) from error


def is_first() -> bool:
    """Whether this process writes what people read."""
    return jax.process_index() == 0


def exchange(values: Sequence[float]) -> Float[np.ndarray, "processes n"]:
    """The values of every process, by process, in float32 if there are several.  All have to call it at the same place."""
    if jax.process_count() == 1:
        return np.asarray([values], np.float64)
    own = np.asarray(values, np.float32)
    return np.asarray(multihost_utils.process_allgather(own)).reshape(jax.process_count(), -1)


class Bystander:
    """Tracker and progress of the processes that do not write."""

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _nothing(self, *arguments: Any) -> None:
        pass

    log = samples = truncate_after = update = close = _nothing


def first_then_others(action: Callable[[], Result]) -> Result:
    """The action's result, run by process 0 and, when that has succeeded, by the others, who find the files it wrote.

    ConfigError in the others when it failed in process 0.  Alone, it leaves JAX's devices untouched.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return action()
    name, done = f"jdllm-turn-{next(_turns)}", False
    if is_first():
        try:
            result = action()
            done = True
        finally:
            _wait_for_all(name)
            exchange([done])
        return result
    _wait_for_all(name)
    if not exchange([0.0])[0, 0]:
        raise ConfigError("process 0 could not go on; its message says why")
    return action()


def _wait_for_all(name: str) -> None:
    """A barrier that may take hours, by the coordinator instead of the devices, whose own waits end after minutes."""
    from orbax.checkpoint import multihost

    multihost.sync_global_processes(name, timeout=PATIENCE, processes=set(range(jax.process_count())))
