"""Samples beside human text of the same length, and everything measured of a run as JSON, table and texts.

A figure of samples alone says little: low perplexity is also what "the the the" has, and all figures depend on length.
So each stands beside the same figure of held-out human text, cut to the lengths of the samples (diversity.py).  Human
windows start in the middle of a sentence and so do samples, hence both are scored alike, without any context before them.

The scoring model is passed in as a function, so this room stays free of torch.  Left out: memorisation checks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jdllm.evaluation import diversity, intervals
from jdllm.evaluation.intervals import Interval
from jdllm.evaluation.mauve import mauve


class Scores(NamedTuple):
    """What a scoring model says of n texts, each by itself."""

    nll: Float[np.ndarray, " n"]
    """Sum of -log p over the predicted tokens, in nats."""
    predicted: Int[np.ndarray, " n"]
    """Number of predicted tokens: all but the first."""
    features: Float[np.ndarray, "n f"]
    """Where the model puts the text, for MAUVE."""


Score = Callable[[Int[np.ndarray, "n t"], Int[np.ndarray, " n"]], Scores]
"""(ids, lengths) -> Scores."""

SHOWN_SAMPLES = 32
AT_HUMAN_ENTROPY = "perplexity_at_human_entropy"
"""Key of the figure that stands beside those of TextFigures where several temperatures were measured."""


@dataclasses.dataclass(frozen=True)
class TextFigures:
    """Figures of one set of texts; shares in [0, 1], entropy in nats."""

    perplexity: float | None
    """Generative perplexity under the scorer, or None without one."""
    entropy: float
    """Unigram entropy of a window, mean."""
    distinct_2: float
    distinct_3: float
    repetition_4: float
    """Share of 4-grams that the same text has said before."""
    tokens: float
    """Tokens of a text, mean, without EOS."""
    texts: int
    """Texts that were counted."""
    mauve: float | None = None
    """Against one half of the human text; None without a scorer, or with fewer than 40 human texts."""
    intervals: dict[str, Interval] = dataclasses.field(default_factory=dict)
    """95% intervals over texts of perplexity, entropy, repetition_4 and mauve."""


def text_figures(
    ids: Int[np.ndarray, "n t"],
    lengths: Int[np.ndarray, " n"],
    scores: Scores | None,
    *,
    distinct_texts: int | None = None,
) -> TextFigures:
    """All figures of n texts but MAUVE; `lengths` counts the tokens of each that belong to it.

    distinct-n falls as text grows, so it is taken over the first `distinct_texts` only.
    """
    entropies = diversity.unigram_entropy(ids, lengths)
    repeated = diversity.repetition_by_row(ids, lengths, 4)
    repeated, first = repeated[~np.isnan(repeated)], slice(0, distinct_texts)
    ranges = {"entropy": intervals.of_mean(entropies), "repetition_4": intervals.of_mean(repeated)}
    perplexity = None
    if scores is not None:
        perplexity = float(np.exp(scores.nll.sum() / scores.predicted.sum()))
        ranges["perplexity"] = intervals.of_perplexity(scores.nll, scores.predicted)
    return TextFigures(
        perplexity=perplexity,
        entropy=float(entropies.mean()),
        distinct_2=diversity.distinct(ids[first], lengths[first], 2),
        distinct_3=diversity.distinct(ids[first], lengths[first], 3),
        repetition_4=diversity.repetition(ids, lengths, 4),
        tokens=float(lengths.mean()),
        texts=len(ids),
        intervals=ranges,
    )


def beside_human(
    samples: Int[np.ndarray, "n t"],
    human: Int[np.ndarray, "m t"],
    eos_id: int,
    score: Score | None,
    known: dict[bytes, TextFigures] | None = None,
) -> tuple[TextFigures, TextFigures]:
    """Figures of n samples, and of up to 2n human texts, cut to the lengths of the samples; distinct-n over equally many.

    Human texts are taken evenly from all m and in turns: the odd ones are the reference of MAUVE, the even ones are what human
    text scores against it, the samples' first ones, as many, what samples do.  `known` keeps figures of human text, by how
    it was cut, between calls with the same human text and scorer.
    """
    lengths, available = diversity.text_lengths(samples, eos_id), diversity.text_lengths(human, eos_id)
    chosen = np.linspace(0, len(human) - 1, min(2 * len(samples), len(human))).astype(int)
    human, available = human[chosen], available[chosen]
    _, cut = diversity.cut_to_lengths_of(np.resize(lengths, len(human)), available)
    of_samples, of_human = scores_of(samples, lengths, score), scores_of(human, cut, score)
    equally = min(len(samples), len(human))
    own = text_figures(samples, lengths, of_samples, distinct_texts=equally)
    known = {} if known is None else known
    beside = known.get(cut.tobytes()) or text_figures(human, cut, of_human, distinct_texts=equally)
    if of_samples is not None and of_human is not None:
        half = len(of_human.features) // 2
        reference, other = of_human.features[1::2][:half], of_human.features[0::2][:half]
        own = _with_mauve(own, reference, of_samples.features[:half])
        beside = beside if cut.tobytes() in known else _with_mauve(beside, reference, other)
    known[cut.tobytes()] = beside
    return own, beside


def scores_of(ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"], score: Score | None) -> Scores | None:
    """Of the texts of two tokens and more; None without a scorer or such texts."""
    scorable = lengths >= 2
    if score is None or not scorable.any():
        return None
    found = score(ids[scorable], lengths[scorable])
    return found if found.predicted.any() else None


def _with_mauve(
    figures: TextFigures, human: Float[np.ndarray, "m f"], features: Float[np.ndarray, "m f"]
) -> TextFigures:
    """The figures with MAUVE of these features; as they were where there is too little text."""
    value, interval = mauve(human, features)
    if math.isnan(value):
        return figures
    return dataclasses.replace(figures, mauve=value, intervals={**figures.intervals, "mauve": interval})


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """The few figures that programs read (results/<run>/summary.json); human figures are those beside the most steps."""
    by_steps = report["samples"]
    human = by_steps[max(by_steps, key=int)]["human"]
    return {
        "gen_ppl": {steps: row["samples"]["perplexity"] for steps, row in by_steps.items()},
        "entropy": {steps: row["samples"]["entropy"] for steps, row in by_steps.items()},
        "mauve": {steps: row["samples"].get("mauve") for steps, row in by_steps.items()},
        "human_ppl": human["perplexity"],
        "human_entropy": human["entropy"],
        "human_mauve": human.get("mauve"),
        "recon": (report["reconstruction"] or {}).get("0"),
        **({"nll": report["likelihood"]["nll"]} if report.get("likelihood") else {}),
        "gpu_minutes": report["minutes"],
        "scorer": report["scorer"],
        "command": report["command"],
        "commit": report["commit"],
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown tables."""
    lines = [
        f"### {report['run']}, step {report['checkpoint']:,}",
        "",
        "| text | perplexity | x human | entropy (nats) | vs human | MAUVE | distinct-2 | distinct-3 | repeated 4-grams | tokens | texts |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for steps, row in report["samples"].items():
        own, human = row["samples"], row["human"]
        ratio = own["perplexity"] / human["perplexity"] if own["perplexity"] and human["perplexity"] else None
        change = own["entropy"] / human["entropy"] - 1 if human["entropy"] else None
        lines.append(_row(f"{steps} steps", own, _number(ratio, "{:.2f}"), _number(change, "{:+.1%}")))
        lines.append(_row("human, same length", human, "1", "0%"))
    if report.get("by_temperature"):
        last = list(report["samples"])[-1]
        human, own = report["samples"][last]["human"], report["samples"][last]["samples"]
        lines += [
            "",
            f"| {last} steps, temperature | perplexity | x human | entropy (nats) | vs human |",
            "|---|---:|---:|---:|---:|",
        ]
        for temperature, row in report["by_temperature"].items():
            ratio = row["perplexity"] / human["perplexity"] if row["perplexity"] and human["perplexity"] else None
            change = row["entropy"] / human["entropy"] - 1 if human["entropy"] else None
            lines.append(
                f"| {temperature} | {_number(row['perplexity'], '{:.1f}')} | {_number(ratio, '{:.2f}')} | {row['entropy']:.3f} "
                f"| {_number(change, '{:+.1%}')} |"
            )
        equal = own.get(AT_HUMAN_ENTROPY)
        lines += ["", f"At the entropy of human text, between two of these: perplexity {_number(equal, '{:.1f}')}."]
    if any(row["samples"].get("intervals") for row in report["samples"].values()):
        lines += [
            "",
            "In brackets: 95% intervals over texts (bootstrap). They say nothing about another training seed.",
        ]
    if report.get("likelihood"):
        found = report["likelihood"]
        what = (
            "at most, a bound from {draws} maskings (standard error {standard_error:.3f})"
            if found["bound"]
            else "exact"
        )
        lines += ["", f"Held-out text: {found['nll']:.3f} nats per token, {what.format(**found)}."]
    if report["reconstruction"]:
        lines += [
            "",
            "| decoder noise (standard deviations of a latent) | held-out tokens reconstructed |",
            "|---|---:|",
        ]
        lines += [f"| {noise} | {_number(share, '{:.1%}')} |" for noise, share in report["reconstruction"].items()]
    if report["denoising_loss"]:
        bins = report["denoising_loss"]
        edges = [f"{i / len(bins):.1f}-{(i + 1) / len(bins):.1f}" for i in range(len(bins))]
        lines += ["", "| tau | " + " | ".join(edges) + " |", "|---|" + "---:|" * len(bins)]
        lines.append("| denoising loss, held-out | " + " | ".join(f"{loss:.3f}" for loss in bins) + " |")
    lines += ["", *(f"* {note}" for note in report["notes"])] if report["notes"] else []
    return "\n".join(lines) + "\n"


def _row(name: str, figures: dict[str, Any], ratio: str, change: str) -> str:
    cells = [
        name, with_interval(figures, "perplexity", "{:.1f}"), ratio, with_interval(figures, "entropy", "{:.3f}"), change,
        with_interval(figures, "mauve", "{:.3f}"),
        _number(figures["distinct_2"], "{:.3f}"), _number(figures["distinct_3"], "{:.3f}"),
        _number(figures["repetition_4"], "{:.2%}"), f"{figures['tokens']:.1f}", str(figures["texts"]),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def with_interval(figures: dict[str, Any], key: str, form: str) -> str:
    """30.1 [28.9, 31.4], or 30.1 where no interval is known, or a dash."""
    value, interval = figures.get(key), (figures.get("intervals") or {}).get(key)
    if interval is None or value is None or None in interval or not all(map(math.isfinite, interval)):
        return _number(value, form)
    return f"{_number(value, form)} [{form.format(interval[0])}, {form.format(interval[1])}]"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else form.format(value)


def to_json(values: Any) -> str:
    """Strict JSON: what is not a finite number becomes null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(clean(values), indent=2, allow_nan=False) + "\n"


def rows_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of rows that are dicts: a column for every key that any of them has, numbers to three digits."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [f"{x:.3g}" if isinstance(x, float) else str(x) for x in (row.get(key, "") for key in keys)] for row in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (keys, ["---"] * len(keys), *cells))


def command_line() -> str:
    """What was typed, for the record."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def commit() -> str:
    """The commit of this source tree, with -dirty when tracked files differ, or 'unknown' outside a git checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def save(report: dict[str, Any], texts: dict[str, Sequence[str]], out: Path) -> None:
    """`out` as JSON, the table beside it as .md, and the first unselected samples of each step count under samples/."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(to_json({**report, "summary": summary(report)}))
    out.with_suffix(".md").write_text(markdown(report))
    folder = out.parent / "samples"
    folder.mkdir(exist_ok=True)
    for steps, lines in texts.items():
        shown = [f"--- {i + 1} ---\n{text}\n" for i, text in enumerate(lines[:SHOWN_SAMPLES])]
        (folder / f"steps-{steps}.txt").write_text("".join(shown))
