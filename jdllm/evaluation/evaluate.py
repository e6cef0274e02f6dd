"""Measure a run from its folder: the composition behind `jdllm eval`.

Held-out hidden states come from the run's cache.  Where that is gone, figures of text are still possible, since training
leaves held-out tokens in the run folder; the report then says what is missing and how to get it back.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jdllm.data.cache import HiddenStateCache
from jdllm.data.text import DataError
from jdllm.evaluation import report as reporting
from jdllm.evaluation.frontier import at_entropy
from jdllm.evaluation.likelihood import held_out_nll
from jdllm.evaluation.reconstruction import denoising_loss_by_tau, reconstruction_accuracy
from jdllm.evaluation.report import Score, Scores
from jdllm.generation.generator import Generator
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.run import load


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A language model that judges texts."""

    name: str
    score: Score
    is_encoder: bool
    """It is the very model whose hidden states the run learned, which flatters the run."""


def evaluate_run(
    run_dir: Path,
    *,
    steps: Sequence[int],
    options: Mapping[str, Any],
    temperatures: Sequence[float] = (),
    seed: int = 0,
    checkpoint: int | None = None,
    out: Path | None = None,
    load_scorer: Callable[[Generator], Scorer] | None = None,
) -> dict[str, Any]:
    """Measure, write `out` (by default eval.json in the run) and what goes beside it, and return the report.

    `options` are those of Generator.generate_tokens, `num` among them; what is not given is the run's own.  At the last of
    `steps` other `temperatures` are measured too, and the perplexity where samples are as diverse as human text.

    The scorer is loaded last, when everything that needs no scorer has been measured.
    """
    generator = load(run_dir, checkpoint=checkpoint)
    human, notes = held_out_windows(run_dir)[0], []
    kind = generator.config.model.kind
    accuracy, losses = of_hidden_states(run_dir, generator, seed, notes) if kind == "ldlm" else (None, None)
    if kind == "autoregressive":
        steps = (generator.config.model.num_tokens,)  # one a token, whatever is asked for
    likelihood = None if kind == "ldlm" else held_out_nll(generator, *held_out_windows(run_dir), seed=seed)
    sampling = generator.sampling(**options)
    num = sampling.num
    tokens = {}
    for count in steps:
        say(f"generating {num} texts in {count} steps")
        tokens[str(count)] = generator.generate_tokens(seed=seed, **{**options, "steps": count})
    scorer = load_scorer(generator) if load_scorer else None
    flattered = bool(scorer) and scorer.is_encoder and kind == "ldlm"
    if flattered:
        notes.append(f"the scorer {scorer.name} is also the encoder that the run learned from, which flatters the run")
    if len(human) < num:
        notes.append(
            f"the run keeps {len(human)} held-out texts, fewer than the {num} samples; their figures are the less exact"
        )
    score = remembered(scorer.score) if scorer else None
    samples, known = {}, {}
    for count, ids in tokens.items():
        say(f"judging the texts of {count} steps")
        own, beside = reporting.beside_human(ids, human, generator.eos_id, score, known)
        samples[count] = {"samples": dataclasses.asdict(own), "human": dataclasses.asdict(beside)}
    last, by_temperature = samples[str(steps[-1])], {sampling.temperature: samples[str(steps[-1])]["samples"]}
    for temperature in temperatures:
        if temperature not in by_temperature:
            say(f"generating and judging {num} texts in {steps[-1]} steps at temperature {temperature:g}")
            changed = {**options, "steps": steps[-1], "temperature": temperature}
            ids = generator.generate_tokens(seed=seed, **changed)
            own, _ = reporting.beside_human(ids, human, generator.eos_id, score, known)
            by_temperature[temperature] = dataclasses.asdict(own)
    if temperatures and score:
        last["samples"][reporting.AT_HUMAN_ENTROPY] = at_human_entropy(by_temperature, last["human"]["entropy"])
    report = {
        "run": str(run_dir),
        "checkpoint": generator.step,
        "samples": samples,
        "by_temperature": {f"{t:g}": by_temperature[t] for t in sorted(by_temperature)} if temperatures else None,
        "reconstruction": accuracy,
        "denoising_loss": losses,
        "likelihood": likelihood,
        "notes": notes,
        "sampling": {
            **dataclasses.asdict(sampling),
            "seed": seed,
            "steps": list(steps),
        },
        "scorer": scorer.name if scorer else None,
        "scorer_is_encoder": flattered,
        "encoder": generator.config.encoder,
        "minutes": Checkpoints(run_dir / "checkpoints").extra(generator.step).get("seconds", 0.0) / 60,
        "command": reporting.command_line(),
        "commit": reporting.commit(),
    }
    texts = {count: generator.decode(ids[: reporting.SHOWN_SAMPLES]) for count, ids in tokens.items()}
    reporting.save(report, texts, out or run_dir / "eval.json")
    return report


def at_human_entropy(by_temperature: Mapping[float, dict[str, Any]], entropy: float) -> float | None:
    """Perplexity at the temperature whose samples have this unigram entropy, between measured ones; None if none has."""
    curve = [by_temperature[t] for t in sorted(by_temperature) if by_temperature[t]["perplexity"]]
    found = at_entropy([row["entropy"] for row in curve], np.log([row["perplexity"] for row in curve]), entropy)
    return None if found is None else float(np.exp(found))


def of_hidden_states(
    run_dir: Path, generator: Generator, seed: int, notes: list[str]
) -> tuple[dict[str, float] | None, list[float] | None]:
    """Reconstruction by decoder noise and denoising loss by tau, or a note why there is neither."""
    recorded = json.loads((run_dir / "data.json").read_text())["valid"]
    try:
        source = HiddenStateCache.open(recorded["path"], expect=recorded["key"])
    except DataError as error:
        notes.append(
            f"no reconstruction and no denoising loss, since the held-out hidden states are gone ({error}); the command "
            "that trained this run makes them again"
        )
        return None, None
    say(f"reconstructing {len(source)} held-out windows")
    levels = sorted({0.0, 1.0, 3.0, generator.config.objective.decoder_noise})
    accuracy = {f"{x:g}": reconstruction_accuracy(generator, source, decoder_noise=x, seed=seed) for x in levels}
    return accuracy, denoising_loss_by_tau(generator, source, seed=seed).tolist()


def held_out_windows(run_dir: Path) -> tuple[Int[np.ndarray, "m t"], Int[np.ndarray, " m"]]:
    """Ids and lengths of held-out windows that training left in the run folder; what follows their end is the EOS id."""
    path = run_dir / "valid_windows.npz"
    if not path.is_file():
        raise DataError(f"{path} is missing; the command that trained this run writes it again")
    with np.load(path) as stored:
        return stored["ids"], stored["lengths"]


def remembered(score: Score) -> Score:
    """The same scorer, which reads equal texts once: human text is cut alike for most step counts."""
    known: dict[bytes, Scores] = {}

    def once(ids: Int[np.ndarray, "n t"], lengths: Int[np.ndarray, " n"]) -> Scores:
        valid = np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, -1)
        key = valid.tobytes()
        if key not in known:
            known[key] = score(ids, lengths)
        return known[key]

    return once


def say(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)
