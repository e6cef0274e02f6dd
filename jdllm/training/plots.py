"""Figures of a run, from its metrics.jsonl alone: losses, the course of the recipe, loss by noise level, gradient shares.

The course figure is the one to look at first.  gamma may rise only while held-out reconstruction holds; if reconstruction,
latent variance or effective rank falls when gamma rises, the latents are collapsing (research/prototype.md).  A metric that
was not logged leaves its panel out; nothing is smoothed away, the thin line is what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdllm.training.tracking import read_metrics

_COLORS = ("#1f6fb4", "#d1495b", "#2a9d5c", "#8a5cc2", "#c98a00")

# A panel: title, logarithmic y, fixed y range or None, and (kind, key, label) of its curves.
_LOSSES = (
    ("Total loss", True, None, (("train", "loss", "loss"),)),
    ("Denoising, L_diff", True, None, (("train", "loss_diffusion", "L_diff"),)),
    ("Hidden states, L_h", True, None, (("train", "loss_hidden", "L_h"),)),
    ("Tokens, L_w (nats)", True, None, (("train", "loss_token", "L_w"),)),
)
_COURSE = (
    ("Encoder's share of the diffusion gradient", False, (-0.03, 1.03), (("train", "gamma", "gamma"),)),
    (
        "Held-out reconstruction",
        False,
        (-0.03, 1.03),
        (("probe", "reconstruction", "without noise"), ("probe", "reconstruction_noisy", "with decoder noise")),
    ),
    ("Latent variance over the batch", False, None, (("train", "latent_variance", "variance"),)),
    ("Held-out nats per token", False, None, (("probe", "nll", "of a baseline"),)),
    ("Effective rank of the latents", False, None, (("train", "effective_rank", "rank"),)),
)
_SHARES = (
    (
        "Share of the encoder's gradient norm",
        False,
        (-0.03, 1.03),
        (("train", "gradient_share_diffusion", "L_diff"), ("train", "gradient_share_hidden", "L_h")),
    ),
    ("Gradient norm before clipping", True, None, (("train", "gradient_norm", "norm"),)),
)


def plots(run_dir: str | Path) -> list[Path]:
    """Write plots/*.png of a run and return their paths; empty if nothing was logged yet."""
    records = read_metrics(run_dir)
    directory = Path(run_dir) / "plots"
    directory.mkdir(exist_ok=True)
    written = []
    for name, panels in (("losses", _LOSSES), ("course", _COURSE), ("gradients", _SHARES)):
        written += _curves(directory / f"{name}.png", f"{Path(run_dir).resolve().name}: {name}", panels, records)
    return written + _loss_by_tau(directory / "loss_by_tau.png", Path(run_dir).resolve().name, records)


def _curves(path: Path, title: str, panels: Sequence[Any], records: list[dict[str, Any]]) -> list[Path]:
    """One figure of up to four panels over steps."""
    drawn = []
    for panel in panels:
        curves = [(label, *_series(records, kind, key)) for kind, key, label in panel[3]]
        curves = [curve for curve in curves if len(curve[1])]
        if curves:
            drawn.append((*panel[:3], curves))
    if not drawn:
        return []
    columns = min(2, len(drawn))
    figure, axes = _figure(title, math.ceil(len(drawn) / columns), columns)
    last = max(steps[-1] for panel in drawn for _, steps, _ in panel[3])
    for axis, (name, log, limits, curves) in zip(axes, drawn):
        for (label, steps, values), color in zip(curves, _COLORS):
            many = len(values) > 60
            axis.plot(
                steps,
                values,
                color=color,
                lw=0.7 if many else 1.5,
                alpha=0.35 if many else 1.0,
                marker="" if many else ".",
            )
            if many:
                axis.plot(steps, _running_median(values), color=color, lw=1.8)
            axis.plot([], [], color=color, lw=1.8, label=f"{label}, last {values[-1]:.3g}")
        if log and all((values > 0).all() for _, _, values in curves):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(_minor_labels(axis))
        if limits:
            axis.set_ylim(*limits)
        axis.set_xlim(0, max(last, 1))
        axis.locator_params(axis="x", nbins=6)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_xlabel("step")
        axis.legend(fontsize=8, frameon=False, loc="best")
    return [_save(figure, axes[len(drawn) :], path)]


def _loss_by_tau(path: Path, run: str, records: list[dict[str, Any]]) -> list[Path]:
    """Held-out L_diff per bin of tau: the last values, and fainter ones from earlier in the run."""
    probes = [
        record
        for record in records
        if isinstance(record.get("loss_diffusion_bins"), list) and record["loss_diffusion_bins"]
    ]
    if not probes:
        return []
    figure, axes = _figure(f"{run}: denoising loss by noise level", 1, 1)
    chosen = sorted({round(index) for index in np.linspace(0, len(probes) - 1, 4)})
    for index, alpha in zip(chosen, np.linspace(0.3, 1.0, len(chosen)) if len(chosen) > 1 else [1.0]):
        bins = np.array([math.nan if value is None else value for value in probes[index]["loss_diffusion_bins"]], float)
        tau = (np.arange(len(bins)) + 0.5) / len(bins)
        seen = np.isfinite(bins)  # a bin that no timestep has visited yet is a gap, so the curve goes from dot to dot
        axes[0].plot(
            tau[seen],
            bins[seen],
            color=_COLORS[0],
            alpha=alpha,
            lw=1.5,
            marker=".",
            label=f"step {probes[index]['step']}",
        )
    axes[0].set_xlim(0, 1)
    axes[0].set_ylim(bottom=0)
    axes[0].set_xlabel("tau (0 clean, 1 noise)")
    axes[0].set_ylabel("L_diff")
    axes[0].legend(fontsize=8, frameon=False)
    return [_save(figure, [], path)]


def _series(records: list[dict[str, Any]], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of one metric."""
    points = [
        (record["step"], record[key])
        for record in records
        if record["kind"] == kind and isinstance(record.get(key), (int, float))
    ]
    points = [point for point in points if math.isfinite(point[1])]
    return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)


def _running_median(values: np.ndarray) -> np.ndarray:
    """Median over a window of a fortieth of the curve, shorter at its ends."""
    half = max(1, len(values) // 80)
    return np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _minor_labels(axis: Any) -> Any:
    """Labels 0.6 instead of 6 x 10^-1 between the decades of a logarithmic axis, as long as there is room for them."""
    low, high = axis.get_ylim()
    decades = math.log10(high / low)
    digits = range(2, 10) if decades < 0.5 else (2, 3, 5) if decades < 1.5 else (3,) if decades < 3 else ()
    return lambda value, _: f"{value:g}" if round(value / 10 ** math.floor(math.log10(value) + 1e-9)) in digits else ""


def _figure(title: str, rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(5.2 * columns if columns > 1 else 6.5, 3.1 * rows if rows > 1 else 3.6), layout="constrained"
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = list(np.ravel(figure.subplots(rows, columns)))
    for axis in axes:
        axis.grid(alpha=0.25, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, unused: Sequence[Any], path: Path) -> Path:
    for axis in unused:
        axis.set_visible(False)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    return path
