"""What a run shows while it works: a live bar on a terminal, and now and then a plain line elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.progress
import rich.text

_PLAIN_SECONDS = 15.0  # between lines when nobody watches a terminal


class Progress:
    """A live bar with the latest numbers on a terminal; elsewhere a plain line at most every 15 seconds."""

    def __init__(
        self, total: int, start: int = 0, description: str = "train", console: rich.console.Console | None = None
    ):
        self._console = console or rich.console.Console()
        self._total, self._start, self._step, self._description = total, start, start, description
        self._latest: dict[str, Any] = {}
        self._began, self._printed_at, self._fresh = time.monotonic(), -math.inf, False
        self._bar: _Bar | None = None
        if self._console.is_terminal:
            self._bar = _Bar(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(bar_width=None),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("left"),
                rich.progress.TimeRemainingColumn(),
                console=self._console,
                expand=True,
                refresh_per_second=4,
                speed_estimate_period=120,
            )
            self._task = self._bar.add_task(description, total=total, completed=start)
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, Any] | None = None, total: int | None = None) -> None:
        """Now at `step`; metrics replace earlier ones of the same name.  `total` changes the expected end."""
        self._step, self._total = step, self._total if total is None else total
        self._latest.update(metrics or {})
        if self._bar is not None:
            self._bar.line = _summary(self._latest)
            self._bar.update(self._task, completed=step, total=self._total)
        elif time.monotonic() - self._printed_at >= _PLAIN_SECONDS:
            self._print_plain()
        else:
            self._fresh = True

    def note(self, text: str) -> None:
        """A line of its own that stays: an evaluation, a checkpoint, a reason to stop."""
        (self._bar.console if self._bar is not None else self._console).print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.stop()
        elif self._fresh:
            self._print_plain()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _print_plain(self) -> None:
        elapsed = time.monotonic() - self._began
        done = self._step - self._start
        left = (
            f", {_clock(elapsed / done * (self._total - self._step))} left"
            if 0 < done and self._step < self._total
            else ""
        )
        parts = [
            f"{self._description} {self._step}/{self._total}",
            _summary(self._latest),
            f"{_clock(elapsed)} gone{left}",
        ]
        print("  ".join(part for part in parts if part), file=self._console.file, flush=True)
        self._printed_at, self._fresh = time.monotonic(), False


class _Bar(rich.progress.Progress):
    """The bar, and under it one line of numbers that may be as wide as the terminal."""

    line = ""

    def get_renderables(self):
        yield self.make_tasks_table(self.tasks)
        if self.line:
            yield rich.text.Text(self.line, style="dim", no_wrap=True, overflow="ellipsis")


def _summary(metrics: Mapping[str, Any]) -> str:
    """loss 3.21 (diffusion 0.51, hidden 0.31, token 2.40)  reconstruction 45.1%  12.3k tok/s  gamma 0.001"""
    parts = []
    if "loss" in metrics:
        terms = [
            f"{name} {metrics[f'loss_{name}']:.3g}"
            for name in ("diffusion", "hidden", "token")
            if f"loss_{name}" in metrics
        ]
        parts.append(f"loss {metrics['loss']:.4g}" + (f" ({', '.join(terms)})" if terms else ""))
    if "reconstruction" in metrics:
        parts.append(f"reconstruction {metrics['reconstruction']:.1%}")
    if "nll" in metrics:
        parts.append(f"held out {metrics['nll']:.3f} nats per token")
    if "tokens_per_second" in metrics:
        rate = metrics["tokens_per_second"]
        parts.append(f"{rate / 1000:.1f}k tok/s" if rate >= 1000 else f"{rate:.0f} tok/s")
    if metrics.get("wait_share", 0.0) >= 0.005:
        parts.append(f"waiting for data {metrics['wait_share']:.0%}")
    if "gamma" in metrics:
        parts.append(f"gamma {metrics['gamma']:.2g}")
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}" if minutes >= 60 else f"{minutes}:{seconds:02d}"
