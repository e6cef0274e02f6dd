"""Does each ingredient of the recipe help, and by how much?  A grid of runs that differ from the full recipe in one choice.

    python experiments/ablate_recipe.py --data DIR_OF_BOOKS --valid-data FILE --out results/ablation-books
    python experiments/ablate_recipe.py ... --minutes 9                    # as many cells as fit, then stop; run it again to go on
    python experiments/ablate_recipe.py ... --cells full,masked,autoregressive --size books --cell-minutes 10
    python experiments/ablate_recipe.py --out results/ablation-books --merge other/cells.json     # results of another machine

Every cell is a normal run (`jdllm train`, then `jdllm eval`) on the same cached hidden states; the order answers the main
questions first.  Cells in OUT/cells.json that are done, diverged or collapsed are not run again, a cell that was killed goes on
from its checkpoint, one that failed is tried again.  Results of several sessions add up in OUT.  All cells are one group in
Weights & Biases, offline unless asked; OUT/README.md says the same without an account.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tyro

from jdllm.config import Config, ConfigError, preset
from jdllm.evaluation import cell_report, cells
from jdllm.evaluation.run_cells import Job, Runner

MSE = {"objective__decoder_loss": "ce"}
WARMUP = {"objective__gamma_gate": 0.0, "objective__gamma_rank": 0.0}
GAMMA_0 = {"objective__gamma_max": 0.0, "objective__gamma_min": 0.0}
TIMESTEPS = {"diffusion__timesteps": "uniform"}
NOISE = {"objective__decoder_noise": 0.0}
CONSTANT = {"objective__decoder_noise_law": "constant"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One choice that differs from the full recipe."""

    name: str
    question: str
    changes: dict[str, Any]
    main: bool = False
    """Belongs to the questions that are answered first."""


def from_start(gamma: float) -> dict[str, Any]:
    """Gamma at one value from the first step."""
    return {**WARMUP, "objective__gamma_max": gamma, "objective__gamma_min": gamma}


def grid(base: Config) -> list[Cell]:
    """All cells, in the order in which they are run with the first seed."""
    t, d, gamma = base.model.num_tokens, base.model.latent_dim, base.objective.gamma_max
    return [
        Cell("full", "the full recipe", {}, True),
        Cell("naive", "joint training without all four: cross-entropy for MSE, gamma 1 from the start, uniform timesteps, no decoder noise", {**MSE, **from_start(1.0), **TIMESTEPS, **NOISE}, True),
        Cell("two-stage", "gamma 0, latents frozen after 40% of the run; the denoiser trains on them from the start", {**GAMMA_0, "objective__frozen_after": 0.4}, True),
        Cell("no-mse", "cross-entropy of the tokens shapes the latents instead of MSE to the hidden states", MSE, True),
        Cell("no-warmup", f"gamma at {gamma:g} from the start", from_start(gamma), True),
        Cell("no-adaptive", "uniform timesteps", TIMESTEPS, True),
        Cell("no-noise", "no decoder noise", NOISE, True),
        Cell("masked", "masked diffusion baseline", {"model__kind": "masked"}, True),
        Cell("autoregressive", "autoregressive baseline", {"model__kind": "autoregressive"}, True),
        Cell("no-self-conditioning", "no self-conditioning", {"objective__self_conditioning": 0.0}),
        Cell("gamma-0", "the denoiser never shapes the latents", GAMMA_0),
        Cell("gamma-1", "gamma may rise to 1, whatever the rank", {"objective__gamma_max": 1.0, "objective__gamma_rank": 0.0}),
        Cell("gamma-0.1", "gamma may rise to 0.1", {"objective__gamma_max": 0.1}),
        Cell("gamma-clock", "gamma rises by the clock, no gate", WARMUP),
        Cell("noise-1", "decoder noise drawn from U(0, 1)", {"objective__decoder_noise": 1.0}),
        Cell("noise-5", "decoder noise drawn from U(0, 5)", {"objective__decoder_noise": 5.0}),
        Cell("noise-8", "decoder noise drawn from U(0, 8)", {"objective__decoder_noise": 8.0}),
        Cell("noise-3-constant", "decoder noise always 3", CONSTANT),
        Cell("noise-1-constant", "decoder noise always 1", {**CONSTANT, "objective__decoder_noise": 1.0}),
        Cell("noise-5-constant", "decoder noise always 5", {**CONSTANT, "objective__decoder_noise": 5.0}),
        Cell("noise-8-constant", "decoder noise always 8", {**CONSTANT, "objective__decoder_noise": 8.0}),
        Cell("per-dimension", "latents standardised per dimension", {"model__standardize": "dimension"}),
        Cell("rmsnorm", "RMSNorm instead of standardised latents", {"model__standardize": "rmsnorm"}),
        Cell("schedule-1", "cosine schedule, d = 1", {"diffusion__schedule_d": 1.0}),
        Cell("schedule-5", "schedule with d = 5", {"diffusion__schedule_d": 5.0}),
        Cell("latents-half", f"{t // 2} latents for {t} tokens", {"model__num_latents": t // 2}),
        Cell("latents-quarter", f"{t // 4} latents for {t} tokens", {"model__num_latents": t // 4}),
        Cell("width-two-thirds", f"latents and blocks of width {2 * d // 3}", {"model__latent_dim": 2 * d // 3}),
        Cell("adamw", "AdamW at 6e-4 instead of Muon", {"optimizer__name": "adamw", "optimizer__learning_rate": 6e-4}),
        Cell("rate-doubled", "twice the learning rate", {"optimizer__learning_rate": 2 * base.optimizer.learning_rate}),
        Cell("all-rows", "decoders trained on every row of a batch", {"objective__decoder_share": 1.0}),
        Cell("then-frozen", "the full recipe for 40% of the run, then the denoiser alone", {"objective__frozen_after": 0.4}),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the ablation."""

    data: str = "data/books"
    """Training text."""
    valid_data: str | None = None
    """Held-out text."""
    out: Path = Path("results/ablation")
    """Folder of cells.json, summary.json, README.md, samples.md and plots; results of earlier sessions are kept."""
    runs_dir: Path = Path("runs/ablation")
    """Folder of the runs."""
    cache_dir: str = "cache"
    """Folder of the hidden-state cache."""
    preset: str = "books"
    """Preset that the cells change."""
    size: Literal["third", "whole"] = "third"
    """The preset's shapes, or about a third of its weights on windows of 64 tokens."""
    cells: str = ""
    """Names of cells to run, separated by commas, in this order; by default all."""
    seeds: int = 2
    """Seeds of each cell: the second one of all comes after the first one of all, but for `full` and `naive`."""
    steps: int = 1800
    """Budget: training steps of a cell."""
    cell_minutes: float | None = None
    """Budget: training minutes of a cell instead of steps; cells then have the card to themselves."""
    max_tokens: int = 8_000_000
    """Training tokens."""
    num: int = 512
    """Samples in each evaluation."""
    sampling_steps: str = "10,32"
    """Denoising steps of the samples; the table shows the last."""
    temperatures: str = "0.8,0.9,1.0,1.1"
    """Temperatures at the last of these steps, so that cells can be compared at the entropy of human text."""
    scorer: str = "smollm2"
    """Language model that scores: a Hugging Face id, a folder, or `smollm2`, which is flagged where it is the encoder."""
    minutes: float | None = None
    """Stop after so many minutes: running cells write a checkpoint, and the same command goes on with them."""
    side_by_side: int = 1
    """Cells that share the card at a time, so that one compiles while another computes."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases; the group has the name of OUT."""
    merge: tuple[Path, ...] = ()
    """More cells.json to add to OUT; nothing is run."""

    @property
    def budget(self) -> str:
        return f"{self.cell_minutes:g} minutes" if self.cell_minutes else f"{self.steps} steps"


def cell_config(options: Options, changes: dict[str, Any], seed: int) -> Config:
    """The preset with the budget and one choice changed."""
    config = preset(options.preset).replace(
        data=options.data, valid_data=options.valid_data, seed=seed,
        feed__max_tokens=options.max_tokens, feed__cache_dir=options.cache_dir, feed__valid_windows=1024,
        training__steps=10**6 if options.cell_minutes else options.steps, training__minutes=options.cell_minutes,
        training__wandb=options.wandb, training__sample_every=1000, training__checkpoint_every=500,
        training__keep_checkpoints=1,
    )  # fmt: skip
    if options.size == "third":
        m = config.model
        config = config.replace(
            model__num_tokens=m.num_tokens // 2, model__num_latents=m.num_latents // 2,
            model__latent_dim=2 * m.latent_dim // 3, model__encoder_depth=m.encoder_depth // 2,
            model__decoder_depth=m.decoder_depth // 2, model__token_decoder_depth=max(1, 2 * m.token_decoder_depth // 3),
            model__denoiser_depth=2 * m.denoiser_depth // 3,
            objective__gamma_gate=0.85, objective__gamma_warmup_steps=600, objective__decoder_noise_ramp_steps=300,
        )  # fmt: skip
    return config.replace(**changes)


def plan(options: Options) -> Iterator[tuple[Cell, int]]:
    """Cells and seeds in the order of the questions: main cells, the second seeds of the two extremes, the rest, other seeds."""
    every = grid(cell_config(options, {}, 0))
    names = [cell.name for cell in every]
    wanted = options.cells.split(",") if options.cells else names
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--cells: there is no cell '{name}'; there are: {', '.join(names)}")
    chosen = [every[names.index(name)] for name in wanted]
    seeds = range(1, options.seeds)
    yield from ((cell, 0) for cell in chosen if cell.main)
    yield from ((cell, seed) for seed in seeds for cell in chosen if cell.name in ("full", "naive"))
    yield from ((cell, 0) for cell in chosen if not cell.main)
    for main in (True, False):
        yield from (
            (cell, seed)
            for seed in seeds
            for cell in chosen
            if cell.main == main and cell.name not in ("full", "naive")
        )


def jobs(options: Options) -> list[Job]:
    """What `plan` names, as runs; a cell that this config does not know is skipped with a sentence."""
    found = []
    for cell, seed in plan(options):
        try:
            config = cell_config(options, cell.changes, seed)
        except (ConfigError, TypeError) as error:
            print(f"{cell.name}: skipped, this config has no such choice ({error})", flush=True)
            continue
        found.append(Job(cell.name, seed, options.size, options.budget, cell.question, config))
    return found


def commands(job: Job, options: Options) -> list[list[str]]:
    """What trains and what evaluates a cell."""
    jdllm, runs_dir = [sys.executable, "-m", "jdllm.cli"], options.runs_dir
    train = ["--preset", options.preset, "--name", job.run_name, "--runs-dir", str(runs_dir), *flags(job.config)]
    evaluate = ["--steps", options.sampling_steps, "--num", str(options.num), "--scorer", options.scorer]
    evaluate += ["--temperatures", options.temperatures] if options.temperatures else []
    return [[*jdllm, "train", *train], [*jdllm, "eval", "--run", str(runs_dir / job.run_name), *evaluate]]


def flags(config: Config) -> list[str]:
    """Command-line options that turn the preset into this config."""
    base, here, found = preset(config.preset).to_dict(), config.to_dict(), []
    for group, value in here.items():
        for field, item in value.items() if isinstance(value, dict) else [(None, value)]:
            if item == (base[group][field] if field else base[group]):
                continue
            path = f"{group}.{field}" if field else group
            if isinstance(item, bool):
                path = path if item else f"{group}.no-{field}"
            name = f"--{path.replace('_', '-')}"
            found += [name] if isinstance(item, bool) else [name, str(item)]
    return found


def prepare_all(jobs: list[Job], runs_dir: Path) -> None:
    """Hidden states once; every new run finds what the first one prepared, and loads no encoder."""
    from weights_port.pipeline import prepare, release_gpu, resolve

    first = runs_dir / jobs[0].run_name
    prepared = prepare(jobs[0].config, first)
    for job in jobs:
        folder = runs_dir / job.run_name
        if not (folder / "data.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            resolve(job.config, prepared.info).save(folder / "config.json")
            for file in ("tokenizer.json", "valid_windows.npz", "data.json"):
                shutil.copy(first / file, folder)
    release_gpu()


def same_recipe(before: dict[str, Any], config: Config) -> bool:
    """Whether a stored config is this one, paths, clocks and what else a run may change aside (but for the stages of a cell)."""
    from weights_port.pipeline import MAY_CHANGE, RESOLVED, differences

    aside = {*MAY_CHANGE, *RESOLVED, "data", "valid_data"} - {"objective.frozen_after"}
    try:
        return not differences(Config.from_dict(before), config, tuple(aside))
    except ConfigError:  # a key that is no longer there
        return False


def main() -> int:
    options = tyro.cli(Options)
    try:
        return ablate(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def ablate(options: Options) -> int:
    """Exit code: 0, or 1 when a cell failed."""
    if options.cell_minutes and options.side_by_side > 1:
        raise ConfigError(
            "--cell-minutes with --side-by-side: cells that share a card do less in a minute; use --steps"
        )
    text = "Runs that differ from the full recipe in one choice, made by `experiments/ablate_recipe.py`."
    about = {"title": options.out.name, "text": text}
    if options.merge:
        records = cells.merge(cells.read(options.out / "cells.json"), *map(cells.read, options.merge))
        cell_report.write(options.out, records, about)
        return 0
    runner = Runner(
        options.out, options.runs_dir, about, lambda job: commands(job, options), side_by_side=options.side_by_side,
        deadline=time.monotonic() + 60 * options.minutes if options.minutes else float("inf"),
    )  # fmt: skip
    todo = runner.open_jobs(jobs(options), same_recipe)
    if todo:
        prepare_all(todo, options.runs_dir)
    code = runner.run(todo)
    if options.wandb != "disabled":
        runner.to_wandb(options.wandb)
    return code


if __name__ == "__main__":
    sys.exit(main())
