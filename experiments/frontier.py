"""Quality against time: samples of trained runs of any kind, in all step counts, samplers and temperatures.

    python experiments/frontier.py --runs runs/books,runs/masked,runs/autoregressive --out results/frontier-books
    python experiments/frontier.py ... --minutes 9           # the most telling rows first; run it again for more
    python experiments/frontier.py ... --scorer some/model   # a scorer that is not the encoder

Every row: 512 unselected samples of one seed under the scorer, with intervals over texts, beside held-out text of the same
length, and the time of a sequence at batch 1 and 64 (warm, median, synchronised, from seed to tokens on the host).  Rows in
OUT/frontier.json are not measured again.  OUT/README.md compares at the entropy of human text; OUT/samples.md has texts side
by side.  A run's kind decides how it can be sampled (jdllm.generation.generator.OPTIONS).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

import jdllm
from jdllm.config import ConfigError
from jdllm.evaluation import frontier_report
from jdllm.evaluation.evaluate import held_out_windows, of_hidden_states, remembered
from jdllm.evaluation.frontier import Row
from jdllm.evaluation.measure import time_calls
from jdllm.evaluation.report import Score, TextFigures, beside_human, command_line, commit
from jdllm.generation.generator import Generator
from jdllm.training.checkpoint import Checkpoints

Setting = dict[str, Any]
"""Options of Generator.generate_tokens."""

FIRST: dict[str, list[Setting]] = {
    "ldlm": [{"sampler": "ddim"}, {"sampler": "sde"}, {"sampler": "dpmpp"}],
    "masked": [{"order": "confidence"}, {"order": "entropy"}],
    "autoregressive": [{}],
}
LATER: dict[str, list[Setting]] = {
    "ldlm": [
        {"sampler": "ddim", "guidance": 0.5}, {"sampler": "sde", "guidance": 0.5}, {"sampler": "ddim", "grid": "u_late"},
        {"sampler": "sde", "grid": "u_late"}, {"sampler": "ddim", "guidance": 0.25}, {"sampler": "ddim", "grid": "tau"},
        {"sampler": "sde", "grid": "tau"}, {"sampler": "early_stop"}, {"sampler": "ddim", "guidance": 1.0},
    ],
    "masked": [{"order": "random"}, {"order": "confidence", "top_p": 0.9}],
    "autoregressive": [{"top_p": 0.95}, {"top_p": 0.9}],
}  # fmt: skip
TEMPERATURES = {
    "ldlm": [1.0, 0.9, 1.1, 0.8], "masked": [1.0, 0.9, 0.8, 0.7, 1.1], "autoregressive": [1.0, 0.9, 0.8, 0.7, 1.1],
}  # fmt: skip
"""Of the noise or of the softmax; the first is where each begins."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    runs: str
    """Folders of runs, separated by commas."""
    out: Path
    """Folder of frontier.json, summary.json, README.md, samples.md and plots."""
    steps: str = "4,8,16,32,64"
    """Step counts of LDLM and masked diffusion, which is also measured in as many as it has tokens."""
    temperatures: str = ""
    """Temperatures to use, the first one first, separated by commas; by default a choice for each kind of model."""
    batches: str = "1,64"
    """Batch sizes at which a sequence is timed."""
    timed: bool = True
    """Measure times; leave them out when something else uses the card."""
    num: int = 512
    """Samples in each row."""
    seed: int = 0
    """Seed of the samples."""
    scorer: str = "smollm2"
    """Language model that scores: a Hugging Face id, a folder, or `smollm2`, which is flagged where it is the encoder."""
    minutes: float | None = None
    """No new row is begun after so long."""
    shown_steps: int = 16
    """Step count of the samples side by side."""


def stages(kind: str, steps: list[int], tokens: int, temperatures: Sequence[float] = ()) -> list[list[Setting]]:
    """Settings of a kind of model, by importance: the first ways at the first temperature, at the others, other ways."""
    counts = {"ldlm": steps, "masked": sorted({*(s for s in steps if s < tokens), tokens}), "autoregressive": [tokens]}[
        kind
    ]
    warm, *others = temperatures or TEMPERATURES[kind]

    def product(ways: list[Setting], temperatures: list[float]) -> list[Setting]:
        return [
            {**way, "steps": count, "temperature": temperature}
            for temperature, way, count in itertools.product(temperatures, ways, counts)
        ]

    return [product(FIRST[kind], [warm]), product(FIRST[kind], others), product(LATER[kind], [warm, *others])]


def way(setting: Setting) -> str:
    """`ddim guidance=1`: a setting in words, without steps and temperature."""
    named = {key: value for key, value in setting.items() if key not in ("steps", "temperature")}
    words = [str(named.pop(key)) for key in ("sampler", "order") if key in named]
    words += [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in named.items()]
    return " ".join(words) or "plain"


def cost(setting: Setting) -> tuple[Any, ...]:
    """Settings that run the same program for as long: another temperature or grid is another argument of it."""
    sampler = "ddim" if setting.get("sampler") == "early_stop" else setting.get("sampler")
    guided, nucleus = setting.get("guidance", 0.0) != 0.0, setting.get("top_p", 1.0) < 1.0
    return sampler, setting.get("order"), setting["steps"], guided, nucleus


class Subject:
    """A trained run under measurement."""

    def __init__(self, folder: Path, scorer: Any, options: Options):
        from weights_port.encoder import EncoderInfo
        from weights_port.scorer import scores_of

        self.folder, self.options = folder, options
        self.generator: Generator = jdllm.load(folder)
        config = self.generator.config
        self.kind = config.model.kind
        self.human = held_out_windows(folder)[0]
        self.score: Score = remembered(scores_of(scorer, self.generator.tokenizer))
        encoder = EncoderInfo(**json.loads((folder / "data.json").read_text())["encoder"])
        self.scorer, self.is_encoder = scorer.identity, self.kind == "ldlm" and scorer.is_model_of(encoder)
        accuracy = of_hidden_states(folder, self.generator, 0, [])[0] if self.kind == "ldlm" else None
        self.about = {
            "run": folder.name, "kind": self.kind, "seed": config.seed, "checkpoint": self.generator.step,
            "gpu_minutes": Checkpoints(folder / "checkpoints").extra(self.generator.step).get("seconds", 0.0) / 60,
            "recon": accuracy["0"] if accuracy else None,
        }  # fmt: skip
        self.times: dict[tuple[Any, ...], dict[str, float]] = {}
        self.known: dict[bytes, TextFigures] = {}

    def key(self, setting: Setting) -> tuple[Any, ...]:
        """Row.key of the row that this setting gives."""
        name, at = self.about["run"], self.about["checkpoint"]
        return name, at, way(setting), setting["steps"], setting["temperature"], self.options.num, self.scorer

    def measure(self, setting: Setting) -> Row:
        """Samples, their figures beside human text, and times."""
        o = self.options
        ids = self.generator.generate_tokens(seed=o.seed, num=o.num, **setting)
        own, human = beside_human(ids, self.human, self.generator.eos_id, self.score, self.known)
        return Row(
            **self.about, way=way(setting), steps=setting["steps"], temperature=setting["temperature"], num=o.num,
            figures=dataclasses.asdict(own), human=dataclasses.asdict(human),
            milliseconds=self.timed(setting) if o.timed else {},
            scorer=self.scorer, scorer_is_encoder=self.is_encoder, command=command_line(), commit=commit(),
        )  # fmt: skip

    def timed(self, setting: Setting) -> dict[str, float]:
        """Median milliseconds of a call, by batch size; measured once for all settings of one cost."""

        def median(batch: int) -> float:
            return time_calls(lambda: self.generator.generate_tokens(seed=1, num=batch, **setting), most=50).median

        known = cost(setting)
        if known not in self.times:
            self.times[known] = {str(batch): median(batch) for batch in numbers(self.options.batches, int)}
        return self.times[known]

    def shown(self) -> list[str]:
        """Texts for the sheet: the plainest setting."""
        steps = self.options.shown_steps if self.kind != "autoregressive" else self.generator.config.model.num_tokens
        ids = self.generator.generate_tokens(
            seed=self.options.seed, num=frontier_report.SHOWN, steps=steps, temperature=1.0
        )
        return self.generator.decode(ids)


def numbers(listed: str, kind: type) -> list[Any]:
    """The numbers of an option."""
    return [kind(word) for word in listed.split(",") if word.strip()]


def order(subjects: list[Subject], steps: list[int], temperatures: list[float]) -> Iterator[tuple[Subject, Setting]]:
    """Stage by stage, all runs in each."""
    plans = [(s, stages(s.kind, steps, s.generator.config.model.num_tokens, temperatures)) for s in subjects]
    for stage in range(3):
        for subject, plan in plans:
            yield from ((subject, setting) for setting in plan[stage])


def main() -> int:
    options = tyro.cli(Options)
    try:
        return measure_all(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def measure_all(options: Options) -> int:
    """All rows that are not in OUT yet, as time allows."""
    from weights_port.scorer import Scorer

    folders = [Path(name) for name in options.runs.split(",")]
    if len({folder.name for folder in folders}) < len(folders):
        raise ConfigError(
            "--runs: two runs have the same folder name, by which rows are told apart; rename one of them"
        )
    began, rows = time.monotonic(), frontier_report.read(options.out)
    scorer = Scorer(options.scorer)
    subjects = [Subject(folder, scorer, options) for folder in folders]
    batches, steps = numbers(options.batches, int), numbers(options.steps, int)
    shown = {f"{s.about['run']}, {s.kind}": s.shown() for s in subjects}
    human = subjects[0].generator.decode(subjects[0].human[: frontier_report.SHOWN])
    note = (
        f"Seed {options.seed}, the plainest way of each kind, {options.shown_steps} steps (an autoregressive model: one a token), "
        "temperature 1. The same seed is the same noise only for models of the same shapes."
    )
    frontier_report.write_samples(options.out, shown, human, note)
    known = {row.key for row in rows}
    todo = [
        (subject, setting)
        for subject, setting in order(subjects, steps, numbers(options.temperatures, float))
        if subject.key(setting) not in known
    ]
    print(f"{len(todo)} rows to measure, {len(rows)} in {options.out}", flush=True)
    about = (
        "Samples of trained runs, sampled in many ways, made by `experiments/frontier.py`. One training run each: the "
        "intervals are over texts, not over training seeds."
    )
    try:
        for done, (subject, setting) in enumerate(todo):
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                print(f"out of time; {len(todo) - done} rows are open, the same command goes on with them", flush=True)
                break
            row = subject.measure(setting)
            rows.append(row)
            frontier_report.save(options.out, rows, batches)
            print(
                f"{row.run} {row.way} steps={row.steps} temperature={row.temperature:g}: perplexity "
                f"{row.figures['perplexity']}, entropy {row.figures['entropy']:.3f}, MAUVE {row.figures['mauve']}, ms "
                f"{row.milliseconds}",
                flush=True,
            )
    finally:
        frontier_report.write(options.out, rows, batches, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
