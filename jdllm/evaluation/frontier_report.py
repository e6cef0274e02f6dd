"""The frontier as tables, plots and sample sheets; what it says in sentences comes from frontier.py."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdllm.config import ConfigError
from jdllm.evaluation.frontier import Equal, Row, equal_entropy, findings, finite, human_figures, summary
from jdllm.evaluation.report import to_json, with_interval

SHOWN = 8
"""Texts of a run on the sheet."""
COLORS = {"ldlm": "#1f6fb4", "masked": "#d1495b", "autoregressive": "#2a9d5c"}


def read(folder: Path) -> list[Row]:
    """Rows measured before; none when there are none yet."""
    path = folder / "frontier.json"
    if not path.is_file():
        return []
    try:
        return [Row(**row) for row in json.loads(path.read_text())]
    except (json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); restore it from git, or move it away") from None


def save(folder: Path, rows: Sequence[Row], batches: Sequence[int]) -> None:
    """frontier.json and summary.json, after every row; each file whole or not at all."""
    _replace(folder / "frontier.json", to_json([dataclasses.asdict(row) for row in rows]))
    _replace(folder / "summary.json", to_json(summary(rows, batches)))


def write(folder: Path, rows: Sequence[Row], batches: Sequence[int], about: str) -> None:
    """The same, README.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    human = human_figures(rows)
    points = equal_entropy(rows, human["entropy"], batches) if human else []
    save(folder, rows, batches)
    plot(folder, rows, points, batches)
    _replace(folder / "README.md", markdown(folder.name, rows, points, batches, about))


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def markdown(title: str, rows: Sequence[Row], points: Sequence[Equal], batches: Sequence[int], about: str) -> str:
    """README.md of the folder."""
    human = human_figures(rows)
    parts = [f"# {title}", about]
    for name in (scorers := sorted({row.scorer for row in rows})):
        is_encoder = any(row.scorer_is_encoder for row in rows if row.scorer == name)
        flagged = (
            ", **which is also the encoder that LDLM runs learned from; that flatters them, and not the baselines**"
            if is_encoder
            else ""
        )
        parts.append(f"Scorer (perplexity, MAUVE): {name}{flagged}.")
    if len(scorers) > 1:
        parts.append("**Rows were scored by different models; compare only within one.**")
    if human:
        parts.append(
            f"## At the entropy of human text ({human['entropy']:.3f} nats)\n\nInterpolated between measured temperatures, in "
            "brackets 95% intervals over texts; a dash is an entropy that was not reached. Human text: perplexity "
            f"{with_interval(human, 'perplexity', '{:.1f}')}, MAUVE against other human text {with_interval(human, 'mauve', '{:.3f}')}."
        )
        parts += [equal_table(points, batches), "![quality against time](frontier.png)"]
    parts.append("\n".join(f"* {line}" for line in findings(rows, points, batches)) or "Nothing to compare yet.")
    parts += ["## All that was measured", "![perplexity against entropy](entropy.png)", full_table(rows, batches)]
    runs = dict.fromkeys((r.run, r.kind, r.checkpoint, r.gpu_minutes, r.seed) for r in rows)
    parts.append(
        "## Runs and commands\n\n"
        + "\n".join(
            f"* {run}: {kind}, step {step:,}, {minutes:.1f} minutes of training, seed {seed}"
            for run, kind, step, minutes, seed in runs
        )
        + "\n"
        + "\n".join(
            f"* at {commit}: `{command}`" for commit, command in dict.fromkeys((r.commit, r.command) for r in rows)
        )
    )
    parts.append("Samples, unselected and of the same seed: [samples.md](samples.md).")
    return "\n\n".join(parts) + "\n"


def equal_table(points: Sequence[Equal], batches: Sequence[int]) -> str:
    """A line for each run and way, perplexity by number of steps, and milliseconds below each other."""
    counts = sorted({p.steps for p in points})
    lines = [
        "| run | way | " + " | ".join(f"{steps} steps" for steps in counts) + " |",
        "|---|---|" + "---:|" * len(counts),
    ]
    for run, way in dict.fromkeys((p.run, p.way) for p in points):
        here = {p.steps: p for p in points if (p.run, p.way) == (run, way)}
        cells = []
        for steps in counts:
            p = here.get(steps)
            if p is None:
                cells.append("–")
                continue
            times = " / ".join("–" if p.ms.get(str(b)) is None else f"{p.ms[str(b)]:.2f}" for b in batches)
            cells.append(f"{p.perplexity:.1f} [{p.low:.1f}, {p.high:.1f}]<br>{times} ms")
        lines.append(f"| {run} | {way} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append(f"Milliseconds: of one sequence at batch {' / '.join(map(str, batches))}.")
    return "\n".join(lines)


def full_table(rows: Sequence[Row], batches: Sequence[int]) -> str:
    """Every row, in the order of run, way, steps, temperature."""
    lines = [
        "| run | way | steps | temperature | perplexity | entropy | MAUVE | repeated 4-grams | "
        + " | ".join(f"ms, batch {batch}" for batch in batches)
        + " |",
        "|---|---|" + "---:|" * (6 + len(batches)),
    ]
    for r in sorted(rows, key=lambda r: (r.run, r.way, r.steps, r.temperature)):
        figures = r.figures
        times = ["–" if r.ms(batch) is None else f"{r.ms(batch):.2f}" for batch in batches]
        cells = [
            r.run, r.way, str(r.steps), f"{r.temperature:g}", with_interval(figures, "perplexity", "{:.1f}"),
            with_interval(figures, "entropy", "{:.3f}"), with_interval(figures, "mauve", "{:.3f}"),
            with_interval(figures, "repetition_4", "{:.2%}"), *times,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_samples(folder: Path, runs: Mapping[str, Sequence[str]], human: Sequence[str], note: str) -> None:
    """samples.md, and samples.json that keeps the texts of runs measured earlier, whose weights may be gone."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "samples.json"
    texts = {**(json.loads(path.read_text()) if path.is_file() else {}), **runs}
    _replace(path, to_json(texts))
    _replace(folder / "samples.md", samples_sheet({**texts, "human text, held out": human}, note))


def samples_sheet(columns: Mapping[str, Sequence[str]], note: str) -> str:
    """Texts side by side, one column a source; line breaks are shown as ⏎."""

    def cell(text: str) -> str:
        return text.strip().replace("|", "\\|").replace("\n", " ⏎ ") or "(empty)"

    count = max(map(len, columns.values()), default=0)
    lines = ["# Samples side by side, unselected", "", note, "", "| | " + " | ".join(columns) + " |"]
    lines.append("|---|" + "---|" * len(columns))
    for index in range(count):
        texts = [cell(texts[index]) if index < len(texts) else "" for texts in columns.values()]
        lines.append(f"| {index + 1} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def plot(folder: Path, rows: Sequence[Row], points: Sequence[Equal], batches: Sequence[int]) -> None:
    """frontier.png: perplexity at equal entropy against time; entropy.png: perplexity against entropy over temperatures."""
    human = human_figures(rows)
    figure, axes = _figure(
        max(len(batches), 1), "Perplexity at the entropy of human text against milliseconds a sequence"
    )
    for axis, batch in zip(axes, batches):
        for run, way in dict.fromkeys((p.run, p.way) for p in points):
            line = [p for p in points if (p.run, p.way) == (run, way) and finite(p.ms.get(str(batch)))]
            line = sorted(line, key=lambda p: p.steps)
            if line:
                x, y = [p.ms[str(batch)] for p in line], [p.perplexity for p in line]
                errors = [[p.perplexity - p.low for p in line], [p.high - p.perplexity for p in line]]
                axis.errorbar(
                    x, y, errors, color=COLORS[line[0].kind], marker="o", ms=4, lw=1, alpha=0.8, label=f"{run} {way}"
                )
                for p, at in zip(line, x):
                    axis.annotate(
                        str(p.steps), (at, p.perplexity), fontsize=6, xytext=(3, 3), textcoords="offset points"
                    )
        if axis.lines:
            axis.set(xscale="log", yscale="log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.set_xlabel(f"ms a sequence, batch {batch} (log); numbers are steps")
    _finish(figure, axes, human and human["perplexity"], folder / "frontier.png")

    figure, axes = _figure(1, "Each line one way and number of steps over temperatures")
    for key in dict.fromkeys((r.run, r.way, r.steps) for r in rows):
        line = sorted((r for r in rows if (r.run, r.way, r.steps) == key), key=lambda r: r.temperature)
        line = [r for r in line if finite(r.figures["perplexity"])]
        if line:
            x, y = [r.figures["entropy"] for r in line], [r.figures["perplexity"] for r in line]
            axes[0].plot(x, y, color=COLORS[line[0].kind], marker=".", lw=0.8, alpha=0.6)
            axes[0].annotate(f"{key[1]} {key[2]}", (x[-1], y[-1]), fontsize=5)
    if axes[0].lines:
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter("{x:g}")
        axes[0].yaxis.set_minor_formatter("{x:g}")
    if human:
        axes[0].axvline(human["entropy"], color="black", lw=1, ls=":")
    axes[0].set_xlabel("unigram entropy, nats")
    _finish(figure, axes, human and human["perplexity"], folder / "entropy.png", legend=False)


def _figure(columns: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * columns, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _finish(figure: Any, axes: Sequence[Any], human: float | None, path: Path, legend: bool = True) -> None:
    for axis in axes:
        axis.set_ylabel("perplexity (log)")
        axis.grid(alpha=0.25, lw=0.6, which="both")
        if human:
            axis.axhline(human, color="black", lw=1, ls="--", label="human text")
        if legend and axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, frameon=False)
    temporary = path.with_name("." + path.name)
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
