"""Cells as a report for people without an account anywhere: table, plot, findings in sentences, samples side by side.

What is said of a cell is made from its numbers, so that it is never stronger than they are: a difference stands beside the
spread between seeds, and perplexities of texts with different entropy are not ranked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdllm.evaluation.cells import FULL, Group, Record, groups, summary
from jdllm.evaluation.report import AT_HUMAN_ENTROPY, to_json

SAME_ENTROPY = 0.02
"""Texts whose entropies differ by more than this share are not compared by perplexity alone."""


def table(cells: Sequence[Group], human: dict[str, Any] | None) -> str:
    """Markdown: mean ± standard deviation over seeds; a dash is what is not known."""
    columns = (
        ("perplexity", "perplexity", "{:.1f}"), ("at human entropy", AT_HUMAN_ENTROPY, "{:.1f}"),
        ("entropy (nats)", "entropy", "{:.3f}"), ("MAUVE", "mauve", "{:.3f}"),
        ("repeated 4-grams", "repetition_4", "{:.2%}"), ("reconstruction", "recon", "{:.1%}"),
        ("with noise", "recon_noisy", "{:.1%}"), ("rank", "effective_rank", "{:.0f}"), ("gamma", "gamma", "{:.2g}"),
        ("steps trained", "step", "{:,.0f}"), ("GPU minutes", "minutes", "{:.1f}"),
    )  # fmt: skip
    lines = [
        "| cell | runs | " + " | ".join(title for title, *_ in columns) + " |",
        "|---|---|" + "---:|" * len(columns),
    ]
    for cell in cells:
        shown = [_mean_and_spread(cell, figure, form) for _, figure, form in columns]
        lines.append(f"| `{cell.name}` | {cell.status()} | " + " | ".join(shown) + " |")
    if human:
        shown = [_number(human.get(figure), form) for _, figure, form in columns]
        lines.append("| human text | held out | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _mean_and_spread(cell: Group, figure: str, form: str) -> str:
    spread = cell.spread(figure)
    mean = _number(cell.mean(figure), form)
    return mean if spread is None or figure in ("step", "minutes") else f"{mean} ± {form.format(spread)}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def findings(cells: Sequence[Group], human: dict[str, Any] | None) -> list[str]:
    """A sentence for each cell: what changed against the full recipe, and whether seeds differ as much by themselves."""
    full = next((cell for cell in cells if cell.name == FULL), None)
    if full is None or not full.values("perplexity"):
        return ["The full recipe has no finished run at this size and budget, so nothing is compared."]
    said = [_about_full(full, human)]
    return said + [_against(cell, full) for cell in cells if cell.name != FULL]


def _about_full(full: Group, human: dict[str, Any] | None) -> str:
    n, ppl, entropy = len(full.values("perplexity")), full.mean("perplexity"), full.mean("entropy")
    text = f"The full recipe ({n} seed{'s' if n > 1 else ''}) writes in {full.steps} steps at perplexity {ppl:.1f}"
    if full.spread("perplexity") is not None:
        text += f" ± {full.spread('perplexity'):.1f}"
    if human and human["perplexity"]:
        text += f", {ppl / human['perplexity']:.2f} times that of human text, with {entropy / human['entropy'] - 1:+.1%} of its entropy"
    return text + "."


def _beside(cell: Group, full: Group, figure: str) -> str:
    return f"{cell.mean(figure):.1f}, {cell.mean(figure) / full.mean(figure) - 1:+.1%}"


def _against(cell: Group, full: Group) -> str:
    """What a cell did; difference and doubt in numbers, no adjectives."""
    question = cell.records[0]["question"]
    ended = [f"seed {r['seed']} {r['status']} ({r['reason']})" for r in cell.records if r["status"] != "done"]
    text = f"`{cell.name}` ({question})"
    if not cell.values("perplexity"):
        return f"{text}: " + ("; ".join(ended) if ended else "no perplexity was measured") + "."
    equal = cell.mean(AT_HUMAN_ENTROPY) is not None and full.mean(AT_HUMAN_ENTROPY) is not None
    parts = [f"perplexity {_beside(cell, full, 'perplexity')} against the full recipe"]
    entropy = cell.mean("entropy") / full.mean("entropy") - 1
    parts.append(f"entropy {entropy:+.1%}")
    parts += [f"at human entropy perplexity {_beside(cell, full, AT_HUMAN_ENTROPY)}"] if equal else []
    if cell.mean("mauve") is not None and full.mean("mauve") is not None:
        parts.append(f"MAUVE {cell.mean('mauve'):.3f} against {full.mean('mauve'):.3f}")
    if cell.mean("recon") is not None and full.mean("recon") is not None:
        parts.append(f"reconstruction {100 * (cell.mean('recon') - full.mean('recon')):+.1f} points")
    text += ": " + ", ".join(parts)
    judged = AT_HUMAN_ENTROPY if equal else "perplexity"
    spreads = [s for s in (cell.spread(judged), full.spread(judged)) if s is not None]
    if abs(entropy) > SAME_ENTROPY and not equal:
        text += f"; the entropies differ by more than {SAME_ENTROPY:.0%}, so perplexity alone does not rank the two"
    elif not spreads:
        text += "; one seed each, so it is not known how much of this is chance"
    else:
        times = abs(cell.mean(judged) - full.mean(judged)) / max(*spreads, 1e-9)
        text += f"; the difference is {times:.1f} times the larger standard deviation between seeds"
    return text + "".join(f"; {what}" for what in ended) + "."


def markdown(records: Sequence[Record], about: dict[str, str], plots: dict[str, str]) -> str:
    """README.md of the folder; `plots` names the picture of each section."""
    parts = [f"# {about['title']}", about["text"]]
    for name in (scorers := sorted({r["scorer"] for r in records if r["scorer"]})):
        is_encoder = any(r["scorer_is_encoder"] for r in records if r["scorer"] == name)
        flagged = (
            ", **which is also the encoder that the LDLM cells learned from; that flatters them, and not the baselines**"
            if is_encoder
            else ""
        )
        parts.append(f"Scorer (perplexity, MAUVE): {name}{flagged}.")
    if len(scorers) > 1:
        parts.append("**Cells were scored by different models; their perplexities and MAUVE cannot be compared.**")
    parts.append(
        "Mean ± standard deviation over seeds. Perplexity is lower for safer text, so read it beside entropy. Reconstruction, "
        "rank and gamma are the last of training; baselines have none. All seeds share one set of held-out text."
    )
    for section, cells in groups(records).items():
        human = next((r["human"] for cell in cells for r in cell.records if r["human"]), None)
        parts += [f"## {section}; samples in {cells[0].steps or 'no'} steps", table(cells, human)]
        if section in plots:
            parts.append(f"![cells]({plots[section]})")
        parts.append("\n".join(f"* {line}" for line in findings(cells, human)))
        shared = sorted({r["side_by_side"] for cell in cells for r in cell.records})
        if shared != [1]:
            parts.append(
                f"Cells shared the card with others ({', '.join(map(str, shared))} at a time): GPU minutes are not those of a cell alone."
            )
    failed = [r for r in records if r["status"] == "failed"]
    if failed:
        parts.append(
            "## Failed, to be run again\n\n"
            + "\n".join(f"* `{r['name']}` seed {r['seed']}: {r['reason']}" for r in failed)
        )
    commands = dict.fromkeys((r["commit"], r["command"]) for r in records)
    parts.append("## Commands\n\n" + "\n".join(f"* at {commit}: `{command}`" for commit, command in commands))
    return "\n\n".join(parts) + "\n"


def samples_sheet(records: Sequence[Record], count: int = 4) -> str:
    """The first texts of every cell at its first seed, one below the other; the same noise where shapes are the same."""
    parts = [
        "# Samples, unselected",
        "The first texts of each cell, same sampling seed. Nothing is left out or put in order.",
    ]
    for section, cells in groups(records).items():
        parts.append(f"## {section}")
        for cell in cells:
            texts = next((r["texts"] for r in cell.records if r["texts"]), [])
            parts.append(f"### {cell.name}")
            parts += ["> " + text.strip().replace("\n", "\n> ") for text in texts[:count]] or ["No samples."]
    return "\n\n".join(parts) + "\n"


def plot(path: Path, cells: Sequence[Group], human: dict[str, Any] | None, title: str) -> None:
    """A dot for every seed, a line a cell; a cross where training ended itself."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        ("perplexity", "perplexity (log)"),
        ("entropy", "entropy, nats"),
        ("mauve", "MAUVE"),
        ("recon", "reconstruction"),
    )
    figure = Figure(figsize=(12, 1.5 + 0.32 * len(cells)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, label) in zip(axes, panels):
        for row, cell in enumerate(cells):
            values = cell.values(name)
            axis.plot(
                values, [row] * len(values), "o", color="#1f6fb4" if cell.name != FULL else "#d1495b", ms=5, alpha=0.8
            )
        if human and human.get(name) is not None:
            axis.axvline(human[name], color="black", lw=1, ls="--")
        if name == "perplexity" and any(cell.values(name) for cell in cells):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("{x:g}")
            axis.tick_params(axis="x", which="both", labelsize=7, rotation=45)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(alpha=0.25, lw=0.6)
    for row, cell in enumerate(cells):
        ended = [r["status"] for r in cell.records if r["status"] != "done"]
        if ended:
            axes[0].text(
                0.02,
                row,
                "x " + ", ".join(ended),
                transform=axes[0].get_yaxis_transform(),
                fontsize=7,
                va="center",
                color="#d1495b",
            )
    axes[0].set_yticks(range(len(cells)), [cell.name for cell in cells], fontsize=8)
    axes[0].set_ylim(len(cells) - 0.5, -0.5)
    temporary = path.with_name("." + path.name)
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)


def write(folder: Path, records: Sequence[Record], about: dict[str, str]) -> None:
    """cells.json, summary.json, README.md, samples.md and the plots; each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = {}
    for number, (section, cells) in enumerate(groups(records).items()):
        plots[section] = f"cells{f'-{number}' if number else ''}.png"
        human = next((r["human"] for cell in cells for r in cell.records if r["human"]), None)
        plot(folder / plots[section], cells, human, f"{about['title']}: {section}")
    files = {
        "cells.json": to_json(list(records)), "summary.json": to_json(summary(records)),
        "README.md": markdown(records, about, plots), "samples.md": samples_sheet(records),
    }  # fmt: skip
    for name, content in files.items():
        temporary = folder / (name + ".tmp")
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, folder / name)
