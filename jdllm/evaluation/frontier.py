"""Quality against time: rows of samples from trained models, compared at the entropy of human text.

Perplexity alone can be gamed by safe text, so each way to sample is followed over temperatures, and its perplexity read where
its entropy is that of human text (as the curves of Dieleman et al. 2022, arXiv 2211.15089, are read).  Between two measured
temperatures log perplexity is interpolated linearly in entropy; nothing is extrapolated, a way that never has that entropy
has no figure.  Milliseconds are those of one sequence: a call's median over its batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

SCHEMA_FROM_FIGURES = {"gen_ppl": "perplexity", "entropy": "entropy", "mauve": "mauve"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Samples of one run, sampled in one way, and what was measured of them."""

    run: str
    kind: str
    """ldlm, masked or autoregressive."""
    seed: int
    """Of training."""
    checkpoint: int
    gpu_minutes: float
    recon: float | None
    way: str
    """All sampling options but steps and temperature, in words: `ddim`, `ddim guidance=1`, `confidence`."""
    steps: int
    temperature: float
    num: int
    figures: dict[str, Any]
    """TextFigures of the samples."""
    human: dict[str, Any]
    """The same of human text of their lengths."""
    milliseconds: dict[str, float]
    """A call's median, by batch size."""
    scorer: str
    scorer_is_encoder: bool
    command: str
    commit: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What need not be measured again."""
        return self.run, self.checkpoint, self.way, self.steps, self.temperature, self.num, self.scorer

    def ms(self, batch: int) -> float | None:
        """Milliseconds of one sequence."""
        call = self.milliseconds.get(str(batch))
        return None if call is None else call / batch


@dataclasses.dataclass(frozen=True)
class Equal:
    """One way to sample in one number of steps, at the entropy of human text."""

    run: str
    kind: str
    way: str
    steps: int
    perplexity: float
    low: float
    high: float
    """95% interval over texts."""
    temperature: float
    ms: dict[str, float | None]
    """Of one sequence, by batch size."""


def human_figures(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Those beside the longest samples, so of whole windows."""
    return max((row.human for row in rows), key=lambda figures: figures["tokens"], default=None)


def equal_entropy(rows: Sequence[Row], entropy: float, batches: Sequence[int]) -> list[Equal]:
    """Every way and number of steps whose measured entropies lie on both sides of `entropy`, or at it."""
    curves: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.figures["perplexity"] is not None:
            curves.setdefault((row.run, row.way, row.steps), []).append(row)
    found = []
    for (run, way, steps), curve in curves.items():
        curve = sorted(curve, key=lambda row: row.temperature)
        entropies = [row.figures["entropy"] for row in curve]
        columns = [[row.figures["perplexity"] for row in curve]]
        columns += zip(*(row.figures["intervals"]["perplexity"] for row in curve))
        values = [at_entropy(entropies, np.log(column), entropy) for column in columns]
        temperature = at_entropy(entropies, [row.temperature for row in curve], entropy)
        if values[0] is None or temperature is None:
            continue
        ms = {str(batch): next((row.ms(batch) for row in curve if row.ms(batch)), None) for batch in batches}
        found.append(Equal(run, curve[0].kind, way, steps, *(float(np.exp(v)) for v in values), temperature, ms))
    return found


def at_entropy(entropies: Sequence[float], values: Sequence[float], wanted: float) -> float | None:
    """`values` at `wanted` entropy, linear between the first two neighbours (in the order given) that have it between them.

    One point within a thousandth of it will do; None when it is not reached.
    """
    for entropy, value in zip(entropies, values):
        if abs(entropy - wanted) <= 1e-3 * wanted:
            return float(value)
    for (e0, v0), (e1, v1) in zip(zip(entropies, values), list(zip(entropies, values))[1:]):
        if min(e0, e1) <= wanted <= max(e0, e1):
            return float(v0 + (v1 - v0) * (wanted - e0) / (e1 - e0))
    return None


def best(points: Sequence[Equal], kind: str, steps: int | None = None) -> Equal | None:
    """The lowest perplexity of a kind (in so many steps)."""
    chosen = [p for p in points if p.kind == kind and (steps is None or p.steps == steps)]
    return min(chosen, key=lambda p: p.perplexity, default=None)


def beaten_by(point: Equal, others: Sequence[Equal], batch: int) -> list[Equal]:
    """Those of another kind that are better and no slower at this batch size."""
    own = point.ms.get(str(batch))
    return [
        other
        for other in others
        if other.kind != point.kind and own is not None and (ms := other.ms.get(str(batch))) is not None
        and ms <= own and other.perplexity < point.perplexity
    ]  # fmt: skip


def findings(rows: Sequence[Row], points: Sequence[Equal], batches: Sequence[int], default: str = "ddim") -> list[str]:
    """What the points say: kinds beside each other, ways to sample against the default, where latent diffusion loses."""
    human = human_figures(rows)
    said = []
    ldlm = [p for p in points if p.kind == "ldlm"]
    for steps in sorted({p.steps for p in ldlm}):
        own = best(points, "ldlm", steps)
        text = f"LDLM in {steps} steps ({own.way}): {_point(own, human)}"
        for kind, chosen in (
            ("masked", best(points, "masked", steps)),
            ("autoregressive", best(points, "autoregressive")),
        ):
            if chosen:
                text += f"; {kind} in {chosen.steps} ({chosen.way}): {_point(chosen, human)}"
            else:
                text += f"; {kind}: not measured at this entropy" + (f" in {steps} steps" if kind == "masked" else "")
        said.append(text + ".")
    said += _ways(ldlm, default)
    for batch in batches:
        beaten = [(p, min(b, key=lambda o: o.perplexity)) for p in ldlm if (b := beaten_by(p, points, batch))]
        timed = [p for p in ldlm if p.ms.get(str(batch)) is not None]
        if timed:
            lost = "; ".join(
                f"{p.way} in {p.steps} to {o.kind} in {o.steps} ({o.way})" for p, o in beaten[:6]
            )  # fmt: skip
            said.append(
                f"At batch {batch}, {len(beaten)} of {len(timed)} LDLM points have a baseline that is better and no slower"
                + (f": {lost}" + (" and others" if len(beaten) > 6 else "") if beaten else "") + "."
            )  # fmt: skip
    never = sorted({(r.run, r.way, r.steps) for r in rows} - {(p.run, p.way, p.steps) for p in points})
    if never and human:
        listed = ", ".join(f"{run} {way} in {steps}" for run, way, steps in never[:8])
        said.append(
            f"{len(never)} ways never have the entropy of human text ({human['entropy']:.3f} nats) at the temperatures that "
            f"were tried, and are not compared: {listed}{' and others' if len(never) > 8 else ''}."
        )
    return said


def _point(p: Equal, human: dict[str, Any]) -> str:
    text = (
        f"perplexity {p.perplexity:.1f} [{p.low:.1f}, {p.high:.1f}], {p.perplexity / human['perplexity']:.2f} x human"
    )
    times = [f"{ms:.2f} ms a sequence at batch {batch}" for batch, ms in p.ms.items() if ms is not None]
    return text + "".join(f", {t}" for t in times)


def _ways(points: Sequence[Equal], default: str) -> list[str]:
    """For each run and number of steps, the best way against the default one."""
    said = []
    for run, steps in sorted({(p.run, p.steps) for p in points}):
        here = {p.way: p for p in points if (p.run, p.steps) == (run, steps)}
        first = min(here.values(), key=lambda p: p.perplexity)
        if default not in here or len(here) < 2:
            continue
        if first.way == default:
            said.append(f"{run}, {steps} steps: none of {len(here)} ways to sample is better than {default}.")
            continue
        own, apart = here[default], first.high < here[default].low
        said.append(
            f"{run}, {steps} steps: {first.way} has {first.perplexity / own.perplexity - 1:+.1%} of the perplexity of {default} "
            f"at equal entropy; their intervals {'do not overlap' if apart else 'overlap'}."
        )
    return said


def summary(rows: Sequence[Row], batches: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of summary.json: one for each row and batch size, and human text."""
    found = []
    for row in rows:
        for batch in batches:
            found.append({
                "name": f"{row.run} {row.way}", "seed": row.seed, "gpu_minutes": row.gpu_minutes, "recon": row.recon,
                **{ours: row.figures.get(name) for ours, name in SCHEMA_FROM_FIGURES.items()}, "steps": row.steps,
                "ms_per_sequence": row.ms(batch), "batch": batch, "commit": row.commit, "kind": row.kind, "run": row.run,
                "way": row.way, "temperature": row.temperature, "intervals": row.figures["intervals"],
                "command": row.command,
            })  # fmt: skip
    if human := human_figures(rows):
        found.append({
            "name": "human", "seed": None, "gpu_minutes": None, "recon": None,
            **{ours: human.get(name) for ours, name in SCHEMA_FROM_FIGURES.items()}, "steps": None, "ms_per_sequence": None,
            "batch": None, "commit": rows[0].commit, "kind": "human", "intervals": human["intervals"],
            "command": rows[0].command,
        })  # fmt: skip
    return found


def finite(value: float | None) -> bool:
    """Whether it can be drawn."""
    return value is not None and math.isfinite(value)
