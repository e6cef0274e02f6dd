"""`jdllm train | plan | generate | eval | quantize | export | import`: the commands, their options, and what is said when something is wrong.

A command is a frozen dataclass; tyro makes its options and help from the fields and the docstrings under them, and every
field of `Config` is an option of `train`.  Nothing heavy is imported before a command runs, so help is quick, and
`generate` never loads torch.  What a command does lives elsewhere: weights_port/pipeline.py trains,
jdllm/generation writes text, jdllm/evaluation judges it, weights_port/export.py converts.

Exit codes: 0 done, 2 something that a person can mend (wrong input, a full disk, a collapse), 130 Ctrl-C, 1 our own fault.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jdllm.config import Config, ConfigError, preset

if TYPE_CHECKING:
    from jdllm.evaluation.evaluate import Scorer
    from jdllm.generation.generator import Generator

DEFAULT_PRESET = "quickstart"


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a model, or go on with an interrupted run: the same command does both.

    --preset is read first and sets all defaults below; any other option changes one field of it.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    """The run."""
    name: str | None = None
    """Name of the run, a folder in --runs-dir; by default the name of the preset."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    distributed: bool = False
    """One of several processes that train together; JAX asks the cluster (SLURM, Open MPI, Kubernetes) for the others.
    All of them need the same folders for runs and caches."""
    coordinator: str | None = None
    """Without such a cluster: host:port of process 0, the same for all."""
    num_processes: int | None = None
    """Number of processes, with --coordinator."""
    process_id: int | None = None
    """Number of this process from 0, with --coordinator.  Several on one host share its cards by CUDA_VISIBLE_DEVICES."""

    def __call__(self) -> int:
        given = (self.coordinator, self.num_processes, self.process_id)
        if self.distributed or any(value is not None for value in given):
            from jdllm.training.processes import join

            join(*given)
        from weights_port.pipeline import run

        return run(self.config, self.runs_dir / (self.name or self.config.preset))


@dataclasses.dataclass(frozen=True)
class Generate:
    """Write text from noise with a trained run.  Text goes to stdout, timings go to stderr."""

    run: Path
    """Folder of the run, such as runs/quickstart."""
    num: int | None = None
    """Texts to write; by default the run's sampling.num."""
    steps: int | None = None
    """Denoising steps; by default the run's sampling.steps.  An autoregressive model takes one a token and none else."""
    sampler: Literal["ddim", "sde", "early_stop", "dpmpp"] | None = None
    """DDIM, stochastic Euler on the reverse SDE, DDIM stopped early on a longer grid, or DPM-Solver++(2M)."""
    seed: int = 0
    """The same seed writes the same text on the same machine."""
    guidance: float | None = None
    """Weight of self-conditioning guidance; anything but 0 doubles the cost of a step."""
    temperature: float | None = None
    """Scale of the initial noise, or softmax temperature of a baseline; below 1 is safer and more alike."""
    order: Literal["confidence", "entropy", "random"] | None = None
    """Masked diffusion: which places get their tokens first."""
    top_p: float | None = None
    """Baselines: draw from the likeliest tokens that together have this probability."""
    grid: Literal["u", "tau", "u_late"] | None = None
    """Steps uniform in the trained warp u of time, or in time tau itself."""
    implementation: Literal["auto", "xla", "triton"] = "auto"
    """Of the denoising loop: compiled by XLA, one fused launch of our own, or the faster of the two where that was measured."""
    checkpoint: int | None = None
    """Step of the checkpoint to use; by default the newest."""
    jsonl: bool = False
    """One JSON object a line (index, seed, text, tokens) instead of text."""
    watch: bool = False
    """Show the texts while they form, step by step."""

    def __call__(self) -> int:
        require_run(self.run)
        for field, low in (("num", 1), ("steps", 1)):
            value = getattr(self, field)
            if value is not None and value < low:
                raise ConfigError(f"--{field} {value} is too small; the least is {low}")
        if self.temperature is not None and self.temperature < 0:
            raise ConfigError(f"--temperature {self.temperature} is negative; 1 is the noise of training, 0 is none")
        options = {
            field: getattr(self, field)
            for field in ("num", "steps", "sampler", "guidance", "temperature", "grid", "order", "top_p")
            if getattr(self, field) is not None
        }
        from jdllm.generation.show import generate

        return generate(
            self.run, checkpoint=self.checkpoint, implementation=self.implementation, seed=self.seed, options=options,
            jsonl=self.jsonl, watch=self.watch,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measure a run: reconstruction, denoising loss, and its samples beside held-out human text."""

    run: Path
    """Folder of the run, such as runs/quickstart."""
    steps: str = "4,10,32,64"
    """Denoising steps to measure, separated by commas; an autoregressive model takes one a token, whatever is given."""
    num: int = 512
    """Samples for every step count."""
    seed: int = 0
    """Seed of the samples and of all noise."""
    sampler: Literal["ddim", "sde", "early_stop", "dpmpp"] | None = None
    """By default the run's own, as are the five below."""
    grid: Literal["u", "tau", "u_late"] | None = None
    """Steps uniform in the warped u, or in tau."""
    guidance: float | None = None
    """Weight of self-conditioning guidance."""
    temperature: float | None = None
    """Scale of the noise, or softmax temperature of a baseline."""
    order: Literal["confidence", "entropy", "random"] | None = None
    """Masked diffusion: which places get their tokens first."""
    top_p: float | None = None
    """Baselines: draw from the likeliest tokens that together have this probability."""
    temperatures: str = ""
    """More temperatures, separated by commas, at the last of the steps: perplexity at equal entropy needs some."""
    scorer: str = "smollm2"
    """Language model that scores samples: `smollm2`, a Hugging Face id or folder, or `none` to leave perplexity out."""
    checkpoint: int | None = None
    """Step of the checkpoint to use; by default the newest."""
    out: Path | None = None
    """Where the JSON goes; by default eval.json in the run.  The table and the samples go beside it."""

    def __call__(self) -> int:
        require_run(self.run)
        if self.num < 2:
            raise ConfigError(f"--num {self.num} is too small; the least is 2, and figures settle from about 256")
        steps = step_list(self.steps)
        from jdllm.evaluation.evaluate import evaluate_run
        from jdllm.evaluation.report import markdown

        def load_scorer(generator: Generator) -> Scorer:
            from weights_port.scorer import scorer_for_run

            return scorer_for_run(self.scorer, self.run, generator)

        names = ("num", "sampler", "grid", "guidance", "temperature", "order", "top_p")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        report = evaluate_run(
            self.run, steps=steps, seed=self.seed, options=options, checkpoint=self.checkpoint,
            temperatures=temperature_list(self.temperatures), out=self.out,
            load_scorer=None if self.scorer == "none" else load_scorer,
        )  # fmt: skip
        print(markdown(report), end="")
        return 0


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run as a folder that PyTorch loads without JAX: weights as safetensors, tokenizer, model card."""

    run: Path
    """Folder of the run, such as runs/quickstart."""
    out: Path
    """Folder to write; it must not exist yet."""
    format: Literal["torch", "safetensors", "hf"] = "torch"
    """For this repository's PyTorch twin; the bare files; or with the code, so that transformers alone loads it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights; bfloat16 halves the file and rounds them."""
    checkpoint: int | None = None
    """Step of the checkpoint to use; by default the newest."""

    def __call__(self) -> int:
        require_run(self.run)
        from weights_port.export import export_run

        export_run(self.run, self.out, checkpoint=self.checkpoint, dtype=self.dtype, format=self.format)
        return 0


@dataclasses.dataclass(frozen=True)
class Import:
    """Make a run to generate from out of a folder that `jdllm export` wrote; training cannot go on with it."""

    folder: Path
    """The exported folder."""
    run: Path
    """Folder of the new run; it must not exist yet."""

    def __call__(self) -> int:
        if not self.folder.is_dir():
            raise ConfigError(f"there is no folder {self.folder}; pass one that `jdllm export` wrote")
        from weights_port.export import import_run

        import_run(self.folder, self.run)
        return 0


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Make a run with weights in 8 or 4 bits out of a trained one, to generate from and to evaluate; it cannot be trained."""

    run: Path
    """Folder of the run, such as runs/quickstart."""
    weights: Literal["int8", "fp8", "int4"]
    """int8 is the most exact, fp8 what tensor cores know, int4 the smallest."""
    out: Path
    """Folder of the new run; it must not exist yet."""
    checkpoint: int | None = None
    """Step of the checkpoint to use; by default the newest."""

    def __call__(self) -> int:
        require_run(self.run)
        from jdllm.training.quantized import quantize_run

        size = quantize_run(self.run, self.out, self.weights, checkpoint=self.checkpoint)
        print(
            f"{self.out}: {self.weights}, {size / 1e6:,.1f} MB to generate from; judge it with: jdllm eval --run {self.out}",
            file=sys.stderr,
        )
        return 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Say whether a training run fits on a device, part by part, and which switches to turn if it does not.

    --preset is read first; any other option of `jdllm train` changes one field of it.  Nothing is loaded or run.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    """The run."""
    device_memory: float = 32.0
    """Memory of one device in GB (10^9 bytes)."""
    devices: int | None = None
    """Devices that share a batch; by default as many as weights are sharded over, training.fsdp."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Kind of device; attention is fused on a GPU, so it keeps less."""
    tokens: int | None = None
    """Tokens of text, for the size of the cache on the disk; by default feed.max_tokens."""
    compile: bool = False
    """Also compile step and probe for the devices at hand, and give XLA's own account: exact there, minutes for large presets."""
    json: bool = False
    """JSON, sizes in bytes, instead of a table."""

    def __call__(self) -> int:
        if self.config.model.kind != "ldlm":
            raise ConfigError(
                f"jdllm plan counts the memory of an LDLM; it does not know model.kind={self.config.model.kind}"
            )
        from jdllm.training.plan import make_plan, show, with_xla

        plan = make_plan(self.config, self.device_memory, device=self.device, devices=self.devices)
        print(show(with_xla(plan) if self.compile else plan, tokens=self.tokens, json=self.json), end="")
        return 0 if plan.fitting is not None else 2


COMMANDS = {
    "train": Train, "generate": Generate, "eval": Eval, "plan": Plan, "quantize": Quantize, "export": Export, "import": Import,
}  # fmt: skip
Command = Train | Plan | Generate | Eval | Quantize | Export | Import


def step_list(text: str) -> tuple[int, ...]:
    """'4,10,32' -> (4, 10, 32), in rising order and each once."""
    try:
        steps = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--steps {text!r} is not a list of numbers; write for example --steps 4,10,32") from None
    if steps[0] < 1:
        raise ConfigError(f"--steps {text!r} has a step count under 1; write for example --steps 4,10,32")
    return tuple(steps)


def temperature_list(text: str) -> tuple[float, ...]:
    """'0.8,0.9' -> (0.8, 0.9); '' -> ()."""
    try:
        temperatures = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--temperatures {text!r} is not a list of numbers; write for example 0.8,0.9,1") from None
    if any(not 0 <= temperature < float("inf") for temperature in temperatures):
        raise ConfigError(f"--temperatures {text!r} has one that is negative or no number; write for example 0.8,0.9,1")
    return temperatures


def require_run(directory: Path) -> None:
    """ConfigError that lists the neighbours, unless the folder holds a run."""
    if (directory / "config.json").is_file():
        return
    runs = sorted(str(path.parent) for path in directory.absolute().parent.glob("*/config.json"))
    there = f"; there are: {', '.join(map(os.path.relpath, runs))}" if runs else "; train one with: jdllm train"
    what = (
        f"{directory} is not a run (it has no config.json)" if directory.exists() else f"there is no run at {directory}"
    )
    raise ConfigError(what + there)


def preset_name(arguments: Sequence[str]) -> str:
    """The value of --preset, which has to be known before the other options have defaults."""
    name = DEFAULT_PRESET
    for index, argument in enumerate(arguments):
        if argument.startswith("--preset="):
            name = argument.partition("=")[2]
        elif argument == "--preset" and index + 1 < len(arguments):
            name = arguments[index + 1]
    return name


def parse(arguments: Sequence[str], *, prog: str = "jdllm", command: str | None = None) -> Command:
    """The command that the arguments name (or `command`, whose options they are), ready to be called.

    SystemExit with code 2 and an explanation on stderr when they do not fit, ConfigError on an unknown preset.
    """
    chosen = command or (arguments[0] if arguments else None)
    config = preset(preset_name(arguments) if chosen in ("train", "plan") else DEFAULT_PRESET)
    if command == "train":
        return tyro.cli(Train, default=Train(config=config), args=arguments, prog=prog)
    commands = Annotated[Train, tyro.conf.subcommand("train", default=Train(config=config))]
    for name, cls in COMMANDS.items():
        if name == "plan":
            commands = commands | Annotated[cls, tyro.conf.subcommand(name, default=Plan(config=config))]
        elif name != "train":
            commands = commands | Annotated[cls, tyro.conf.subcommand(name)]
    description = (
        "Latent diffusion language models: train one on a frozen model's hidden states, write text, measure it."
    )
    return tyro.cli(commands, args=arguments, prog=prog, description=description)


def main(arguments: Sequence[str] | None = None, *, prog: str = "jdllm", command: str | None = None) -> int:
    """Run a command; errors that a person can mend become one sentence on stderr.  JDLLM_DEBUG=1 shows the traceback."""
    try:
        return parse(sys.argv[1:] if arguments is None else arguments, prog=prog, command=command)() or 0
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `jdllm generate | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ConfigError, ModuleNotFoundError, OSError) as error:
        if os.environ.get("JDLLM_DEBUG") == "1":
            raise
        message = explain(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2


def explain(error: Exception) -> str | None:
    """What to tell the person at the terminal, or None for a fault of ours, whose traceback is wanted."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in ("", "jdllm", "weights_port"):
            return None
        return f"the package '{package}' is missing; install it with: pip install {package}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return (
            f"no space left on the disk{where}; make room and run the same command, it goes on from the last checkpoint"
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"no permission to write or read {error.filename or 'a file'}; choose another folder or change its permissions"
    return None


if __name__ == "__main__":
    sys.exit(main())
