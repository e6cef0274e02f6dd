"""The record of a run: metrics.jsonl, sample files, and Weights & Biases.

metrics.jsonl is the record that everything else is made from (plots, evaluation, tests): one JSON object a line with "step"
and "kind" first.  Lines reach the disk as they are written.  JSON has no NaN, so non-finite numbers are the strings "nan",
"inf" and "-inf", and `read_metrics` turns them back.  Weights & Biases gets copies, offline unless asked; it may fail at the
start, in words, but never stops a run later.  Left out: what to log and when (loop.py), and figures (plots.py).
"""

from __future__ import annotations

import html
import inspect
import json
import math
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jdllm.config import ConfigError
from jdllm.training.progress import Progress as Progress  # what a run shows while it writes its record

Kind = Literal["train", "probe", "eval"]
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class TrackingError(ConfigError):
    """The record of a run that cannot be written or read; the message says what to do."""


class Tracker:
    """Writes the record of one run into `run_dir`; opened again after an interruption, it goes on where it stopped."""

    def __init__(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any],
        mode: Literal["offline", "online", "disabled"] = "offline",
        project: str = "jdllm",
        run_name: str | None = None,
    ):
        self.run_dir = Path(run_dir)
        self._metrics = self.run_dir / "metrics.jsonl"
        self._wandb: Any = None
        self._wandb_errors: tuple[type[Exception], ...] = ()
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self._metrics.exists():
                _rewrite(self._metrics, lambda record: True)
            self._file = self._metrics.open("a", encoding="utf-8")
        except OSError as error:
            raise TrackingError(f"cannot write {self._metrics}: {error.strerror or error}") from None
        if mode != "disabled":
            self._start_wandb(config, mode, project, run_name or self.run_dir.name)

    def log(self, step: int, metrics: Mapping[str, Any], kind: Kind = "train") -> None:
        """Append one line: numbers, NumPy or JAX scalars, lists of numbers or None, strings."""
        record = {"step": int(step), "kind": kind, **{key: _plain(value) for key, value in metrics.items()}}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrackingError(
                f"cannot write {self._metrics}: {error.strerror or error}; make room and run the same command to resume"
            ) from None
        values = {f"{kind}/{key}": _restored(record[key]) for key in metrics}
        numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
        self._to_wandb({"step": record["step"], **numbers})

    def samples(self, step: int, texts: Sequence[str]) -> None:
        """Write samples/step-000500.txt.  A disk that refuses is reported, not raised: samples never end a run."""
        path = self.run_dir / "samples" / f"step-{step:06d}.txt"
        content = "".join(f"--- {number}\n{text}\n" for number, text in enumerate(texts, start=1))
        try:
            path.parent.mkdir(exist_ok=True)
            _replace(path, content)
        except OSError as error:
            print(f"samples of step {step} were not written to {path}: {error.strerror or error}", file=sys.stderr)
        if self._wandb is not None:
            import wandb

            self._to_wandb(
                {"step": int(step), "samples": wandb.Html(f"<pre>{html.escape(content)}</pre>", inject=False)}
            )

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, which a resumed run writes again.  All or nothing if interrupted."""
        self._file.close()
        _rewrite(self._metrics, lambda record: record["step"] <= step)
        self._file = self._metrics.open("a", encoding="utf-8")

    def close(self) -> None:
        """Finish the files and the Weights & Biases run."""
        self._file.close()
        run, self._wandb = self._wandb, None
        if run is not None:
            try:
                run.finish()
            except self._wandb_errors as error:
                print(f"Weights & Biases did not finish cleanly: {error}", file=sys.stderr)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start_wandb(self, config: Mapping[str, Any], mode: str, project: str, name: str) -> None:
        """Start or continue the run whose id lies in run_dir/wandb_id."""
        remedy = "use --training.wandb disabled"
        os.environ.setdefault("WANDB_CACHE_DIR", str((self.run_dir / "wandb" / "cache").absolute()))
        try:
            import wandb
        except ImportError:
            raise TrackingError(f"the package wandb is not installed: run `pip install wandb`, or {remedy}") from None
        self._wandb_errors = (wandb.Error, OSError, RuntimeError, *_private_wandb_errors())
        id_file = self.run_dir / "wandb_id"
        if not id_file.exists() or not id_file.read_text().strip():
            _replace(id_file, secrets.token_hex(4) + "\n")
        try:
            if mode == "online":
                quiet = {"prompt": False} if "prompt" in inspect.signature(wandb.login).parameters else {}
                if not wandb.login(verify=False, **quiet):
                    raise wandb.errors.UsageError("no API key")
            self._wandb = wandb.init(
                project=project,
                name=name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=self.run_dir,
                mode=mode,
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True, init_timeout=60),
            )
            # Our own step, since the counter of wandb refuses to go back to where a resumed run starts.
            self._wandb.define_metric("step")
            self._wandb.define_metric("*", step_metric="step")
        except self._wandb_errors as error:
            self._file.close()
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            login = (
                "run `wandb login`, set WANDB_API_KEY, or use --training.wandb offline" if mode == "online" else remedy
            )
            raise TrackingError(f"Weights & Biases ({mode}) did not start: {why}; {login}") from error

    def _to_wandb(self, values: dict[str, Any]) -> None:
        if self._wandb is None:
            return
        try:
            self._wandb.log(values)
        except self._wandb_errors as error:
            self._wandb = None
            print(
                f"Weights & Biases stopped taking data ({error}); the run goes on, see {self._metrics}", file=sys.stderr
            )


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl (or of the run directory it lies in); a torn last line is left out."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise TrackingError(f"cannot read {path}: {error.strerror or error}") from None
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # the part after the last newline is empty or torn
        try:
            record = json.loads(line)
            record["step"], record["kind"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise TrackingError(
                f"{path}, line {number} is not a record of metrics; delete that line and try again"
            ) from None
        records.append({key: _restored(value) for key, value in record.items()})
    return records


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (list, tuple)) or np.ndim(value):
        return [_plain(item) for item in (value if isinstance(value, (list, tuple)) else np.asarray(value).tolist())]
    number = np.asarray(value).item()
    return str(number) if isinstance(number, float) and not math.isfinite(number) else number


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _rewrite(path: Path, keep: Any) -> None:
    """Keep the records that `keep` accepts; without a torn last line, and by one rename."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = read_metrics(path)
    kept = [line for line, record in zip(lines, records) if keep(record)]
    if len(kept) != len(records) or lines[-1]:
        _replace(path, "".join(line + "\n" for line in kept))


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def _private_wandb_errors() -> tuple[type[Exception], ...]:
    """What wandb raises when its background process is gone; not derived from wandb.Error."""
    try:
        from wandb.sdk.mailbox import HandleAbandonedError, MailboxClosedError
    except ImportError:
        return ()
    return (MailboxClosedError, HandleAbandonedError)
