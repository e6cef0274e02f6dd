"""Checkpoints of a run: atomic, asynchronous, rotated, and strict when they are read (docs/design.md, section 9).

Any pytree of arrays is stored under readable names ("opt_state/1/mu/denoiser/kernel"), through Orbax v1.  Every top-level
entry of the state is one Orbax checkpointable, so generation reads `ema_params` without touching the optimiser.  Beside
the arrays lies a manifest of names, shapes and dtypes together with `extra`, the caller's JSON.  Orbax writes into a
temporary directory and renames it at the end: a directory whose name is a number is complete.

Left out on purpose: falling back to an older checkpoint, casting, reshaping, and stores that are not file systems.  What
does not fit exactly is an error, because a run that quietly continues from something else is worse than one that stops.
Truncated or missing files are noticed; a bit that rots inside an array is not, since Orbax keeps no checksum of those.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdllm.config import ConfigError

try:
    from orbax.checkpoint import v1 as ocp
except ImportError:  # until 0.12 the same interface lives here
    from orbax.checkpoint.experimental import v1 as ocp

_TEMPORARY = "*.orbax-checkpoint-tmp*"
_LEAVES = "top_level_arrays"  # the checkpointable that holds entries of the state which are arrays themselves
_SHOWN = 6  # problems named in one message
# Orbax and TensorStore tell of I/O trouble, bad data and absent entries with all of these.
_STORE_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError)


class CheckpointError(ConfigError):
    """A checkpoint that could not be written or does not fit; the message says which leaves and what to do."""


class Checkpoints:
    """The checkpoints `directory/<step>` of one run.

    `keep` is the number of newest checkpoints that stay.  With keep=None the directory is only read, so that generation
    never disturbs a training run that is writing there; otherwise what an interrupted save left behind is removed.
    """

    def __init__(self, directory: str | Path, keep: int | None = None):
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._writer: Any = None
        self._pending: tuple[int, Any, int] | None = None  # step, Orbax response, bytes
        logging.getLogger("absl").addFilter(_without_orbax_tracebacks)
        if keep is not None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"cannot create {self.directory} ({error.strerror}); choose another place for the run"
                ) from None
            self._clean()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and path.is_dir())

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Start writing; a previous save is waited for, and its failure raised, first.

        The arrays are copied to the host before this returns, so the caller may donate them.  A step that is already
        there is left as it is.  CheckpointError if the disk is full; older checkpoints stay.
        """
        if self._keep is None:
            raise CheckpointError(f"{self.directory} was opened for reading; pass keep=N to write checkpoints")
        self.wait()
        if step in self.steps():
            return
        leaves = {name: jnp.asarray(leaf) for name, leaf in named_leaves(state).items()}
        groups: dict[str, dict[str, jax.Array]] = {}
        for name, leaf in leaves.items():
            if leaf.size:  # Orbax stores no empty arrays; the manifest is all there is to know about them
                groups.setdefault(_group(name), {})[name] = leaf
        manifest = {name: _describe(leaf) for name, leaf in leaves.items()}
        size = sum(leaf.nbytes for leaf in leaves.values())
        try:
            if self._writer is None:
                policy = ocp.training.preservation_policies.LatestN(self._keep)
                self._writer = ocp.training.Checkpointer(self.directory, preservation_policy=policy)
            response = self._writer.save_checkpointables_async(
                step, groups, force=True, custom_metadata={"manifest": manifest, "extra": dict(extra)}
            )
        except _STORE_ERRORS as error:
            raise self._write_failed(step, size, error) from error
        self._pending = (step, response, size)

    def wait(self) -> None:
        """Return when the last save is on disk; CheckpointError if it failed."""
        if self._pending is None:
            return
        step, response, size = self._pending
        self._pending = None
        try:
            response.result()
        except _STORE_ERRORS as error:
            raise self._write_failed(step, size, error) from error

    def close(self) -> None:
        """Finish the last save and release threads; CheckpointError if that save failed."""
        try:
            self.wait()
        finally:
            self._release()

    def extra(self, step: int) -> dict[str, Any]:
        """The JSON saved beside a state, without reading the arrays."""
        return self._metadata(step)["extra"]

    def restore(self, step: int, like: Any, config: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The state of a step on the shardings of `like`, and its `extra`.

        `like` has the wanted structure, of arrays or jax.ShapeDtypeStruct; it may live on another number of devices than
        the state did.  `config` is the caller's own, to say what differs from `extra["config"]` when leaves do not fit.
        """
        metadata = self._metadata(step)
        self._check(step, metadata, like, config, whole=True)
        return self._read(step, metadata["manifest"], like), metadata["extra"]

    def restore_partial(self, step: int, like: Any, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Only some top-level entries, e.g. ("ema_params",), as a dict, and `extra`; nothing else is read from the disk.

        `like` is a mapping or a state object that has these entries.
        """
        chosen = {name: like[name] if isinstance(like, Mapping) else getattr(like, name) for name in names}
        metadata = self._metadata(step)
        self._check(step, metadata, chosen, None, whole=False)
        return self._read(step, metadata["manifest"], chosen), metadata["extra"]

    def _metadata(self, step: int) -> dict[str, Any]:
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; there are: {there}")
        try:
            metadata = ocp.checkpointables_metadata(self.directory / str(step)).custom_metadata
        except _STORE_ERRORS as error:
            raise self._damaged(step, error) from error
        if not isinstance(metadata, Mapping) or not {"manifest", "extra"} <= set(metadata):
            raise self._damaged(step, "its manifest is missing")
        return dict(metadata)

    def _check(self, step: int, metadata: dict[str, Any], like: Any, config: Any, whole: bool) -> None:
        """Compare manifest and wanted leaves, and name every kind of difference in one message."""
        there, here = metadata["manifest"], {name: _describe(leaf) for name, leaf in named_leaves(like).items()}
        entries = {name.split("/", 1)[0] for name in here}
        problems = []
        for name, what in here.items():
            if name not in there:
                problems.append(f"{name} is not in the checkpoint")
            elif there[name] != what:
                (shape, dtype), (our_shape, our_dtype) = there[name], what
                problems.append(f"{name} is {dtype}{tuple(shape)} there, {our_dtype}{tuple(our_shape)} here")
        for name in there:
            if name not in here and (whole or name.split("/", 1)[0] in entries):
                problems.append(f"{name} is only in the checkpoint")
        if not problems:
            return
        lines = [f"checkpoint {self.directory / str(step)} does not fit this run:", *problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"and {len(problems) - _SHOWN} more leaves")
        differences = config_differences(metadata["extra"].get("config") or {}, config or {}) if config else []
        if differences:
            lines.append(f"it was written by another config: {'; '.join(differences[:_SHOWN])}")
        lines.append("use the config it was written with, or start under another --name")
        raise CheckpointError("\n  ".join(lines[:-1]) + "\n" + lines[-1])

    def _read(self, step: int, manifest: dict[str, Any], like: Any) -> Any:
        """Leaves by name, put back into the structure of `like`."""
        wanted = {name: _abstract(leaf) for name, leaf in named_leaves(like).items()}
        groups: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
        for name, leaf in wanted.items():
            if leaf.size:
                groups.setdefault(_group(name), {})[name] = leaf
        for name, (shape, dtype) in manifest.items():  # Orbax reads a group whole
            if _group(name) in groups and name not in wanted and math.prod(shape):
                groups[_group(name)][name] = _abstract(jax.ShapeDtypeStruct(tuple(shape), dtype))
        try:
            found = ocp.load_checkpointables(self.directory / str(step), groups) if groups else {}
        except _STORE_ERRORS as error:
            raise self._damaged(step, error) from error
        leaves = [
            found[_group(name)][name] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for name, leaf in wanted.items()
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _write_failed(self, step: int, size: int, error: Exception) -> CheckpointError:
        """Forget the failed save, give its space back, and say what happened."""
        self._release()
        self._clean()
        last = self.latest()
        kept = (
            "there is no older one" if last is None else f"checkpoint {last} is intact and the same command resumes it"
        )
        if "No space left" in str(error) or "Disk quota" in str(error):
            free = shutil.disk_usage(self.directory).free
            return CheckpointError(
                f"no space left for checkpoint {step} in {self.directory}: it needs up to {_bytes(size)}, {_bytes(free)} are free. "
                f"Free some space (training.keep_checkpoints={self._keep}, plus one while it is written) and run again; {kept}."
            )
        return CheckpointError(f"could not write checkpoint {step} to {self.directory}: {_first_line(error)}; {kept}.")

    def _damaged(self, step: int, error: Exception | str) -> CheckpointError:
        older = [other for other in self.steps() if other < step]
        then = f"go on from step {older[-1]}" if older else "start again, since there is no older one"
        path = self.directory / str(step)
        return CheckpointError(
            f"checkpoint {path} is damaged: {_first_line(error)}. Restore it from a copy, or delete that directory to {then}."
        )

    def _release(self) -> None:
        writer, self._writer, self._pending = self._writer, None, None
        if writer is not None:
            try:
                writer.close()
            except _STORE_ERRORS as error:  # the same failure that save() or wait() has already turned into a sentence
                logging.getLogger(__name__).debug("closing Orbax: %s", error)

    def _clean(self) -> None:
        if jax.process_index() == 0:
            for path in self.directory.glob(_TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by a name made of the keys on their path, in the order of jax.tree.leaves."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if path and getattr(path[-1], "name", None) in ("value", "raw_value"):  # Flax's box around an array, by version
            path = path[:-1]
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "state"
        if name in leaves:
            raise CheckpointError(f"two leaves of the state are called {name}; rename one")
        leaves[name] = leaf
    return leaves


def config_differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What two nested configs, as read from JSON, disagree on: ["model.latent_dim 64 there, 128 here", ...]."""
    differences = []
    for key in [*there, *(key for key in here if key not in there)]:
        one, two = there.get(key), here.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            differences += config_differences(one, two, f"{prefix}{key}.")
        elif one != two:
            differences.append(f"{prefix}{key} {one} there, {two} here")
    return differences


def _group(name: str) -> str:
    """The Orbax checkpointable a leaf belongs to."""
    return name.split("/", 1)[0] if "/" in name else _LEAVES


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf; what names no sharding goes to the first device."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=sharding)


def _describe(leaf: Any) -> list[Any]:
    """A leaf in the manifest: [[4, 3], "float32"]."""
    abstract = _abstract(leaf)
    return [list(abstract.shape), abstract.dtype.name]


def _first_line(error: Exception | str) -> str:
    """The cause at the bottom of a chain of exceptions, on one line."""
    while isinstance(error, Exception) and (error.__cause__ or error.__context__) is not None:
        error = error.__cause__ or error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _without_orbax_tracebacks(record: logging.LogRecord) -> bool:
    """Orbax logs one stack trace per thread for a failure that it also raises; the raised one becomes our sentence."""
    return "orbax" not in record.pathname or record.levelno < logging.WARNING
