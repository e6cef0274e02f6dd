"""The training loop, to be read from top to bottom: resume, step, log, probe, sample, save, stop.

What happens at a step depends on the step alone, so a run that was killed and resumed goes through the same states as
one that was not.  Probes and samples may fail (a full GPU, a full disk) without ending the run; NaNs and collapse end it,
with the reason in words.

Several processes (processes.py) all run this loop.  What decides the next step is the same in each: metrics come from the
devices of all, and clocks and Ctrl-C are exchanged at the lines of the log.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Float, Int

from jdllm.config import Config, ConfigError
from jdllm.diffusion.timesteps import cumulative
from jdllm.generation.generator import Generator
from jdllm.model.ldlm import Model, Params
from jdllm.training.checkpoint import Checkpoints
from jdllm.training.plots import plots
from jdllm.training.probe import WINDOWS, make_probe, move_gate
from jdllm.training.processes import Bystander, exchange, first_then_others, is_first
from jdllm.training.run import load_frozen, save_frozen
from jdllm.training.sharding import (
    batch_sharding,
    make_mesh,
    on_mesh,
    replicated,
    spread,
    state_sharding,
    to_devices,
    whole,
)
from jdllm.training.state import TrainState, init_state, make_optimizer
from jdllm.training.step import cast, make_train_step
from jdllm.training.throughput import FeedClock, flops_per_window, peak_flops
from jdllm.training.tracking import Progress, Tracker

SAMPLES = 64
"""Windows generated at each sampling step; the first eight are written down."""
Judge = Callable[[Int[np.ndarray, "n t"], int], dict[str, float]]
"""(tokens, eos_id) -> figures of samples, `entropy` among them."""


class TrainingStopped(ConfigError):
    """Training ended itself; the message says why and what to try."""


class TrainingData(NamedTuple):
    """What a run feeds on."""

    loader: Any
    """Endless iterator of this process's rows of each batch, with get_state, set_state and close."""
    valid: Any
    """Held-out windows with len and gather."""
    hidden_mean: Float[np.ndarray, " dh"]
    hidden_std: Float[np.ndarray, " dh"]
    tokenizer: tokenizers.Tokenizer
    eos_id: int
    head: Float[np.ndarray, "dh v"] | None
    """The frozen model's head with its norm gain folded in, when model.head is "encoder"."""
    provenance: dict[str, Any]
    """Hashes and identities that a resumed run must share."""


def train(config: Config, run_dir: Path, data: TrainingData, judge: Judge) -> dict[str, float]:
    """Train to `training.steps`, going on from the newest checkpoint of `run_dir`; returns the last metrics.

    Raises TrainingStopped on NaN or collapse and CheckpointError on a resume that does not fit.  Ctrl-C writes a
    checkpoint before it is passed on.
    """
    t, alone = config.training, jax.process_count() == 1

    def open_folder() -> Checkpoints:
        run_dir.mkdir(parents=True, exist_ok=True)
        if is_first():
            config.save(run_dir / "config.json")
            if data.head is not None:
                save_frozen(run_dir, data.head)
        return Checkpoints(run_dir / "checkpoints", t.keep_checkpoints)

    checkpoints = first_then_others(open_folder)

    # --- model, mesh, state
    model, mesh = Model(config, "remat" if t.remat else "unroll"), make_mesh(config)
    optimizer = make_optimizer(config.optimizer)
    init = functools.partial(init_state, model, optimizer)
    moments = (jnp.asarray(data.hidden_mean), jnp.asarray(data.hidden_std))
    shardings = state_sharding(mesh, jax.eval_shape(init, *moments))
    rows = batch_sharding(mesh)
    frozen: Params = load_frozen(run_dir, model, state_sharding(mesh, model.frozen_shapes))

    # --- resume
    start, seconds = int(exchange([checkpoints.latest() or 0])[0, 0]), 0.0
    pending: list[dict[str, Any]] = []  # metrics of the steps since the last line of the log
    if start:
        shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(init, *moments), shardings
        )
        state, extra = checkpoints.restore(start, shapes, config.to_dict())
        check_provenance(extra["provenance"], data.provenance, run_dir)
        data.loader.set_state(extra["loader"])
        seconds, pending = extra["seconds"], extra["pending"]
        if is_first():
            print(f"resuming {run_dir} at step {start}", flush=True)
    else:
        state = jax.jit(init, out_shardings=shardings)(*moments)
    tracker = Tracker(run_dir, config.to_dict(), t.wandb) if is_first() else Bystander()
    tracker.truncate_after(start)

    # --- compile
    function, everywhere = on_mesh(mesh, make_train_step(model, optimizer)), replicated(mesh)
    step = jax.jit(function, donate_argnums=0, out_shardings=(shardings, everywhere))
    probe = jax.jit(on_mesh(mesh, make_probe(Model(config))), out_shardings=everywhere)
    texts = data.valid.gather(np.arange(min(len(data.valid), WINDOWS)))
    text_entropy = judge(texts["ids"], data.eos_id)["entropy"]
    held_out = spread(texts, mesh)
    window_flops = [flops_per_window(model, denoiser_alone=second) for second in (False, True)]
    peak = peak_flops()

    def measure(state: TrainState) -> dict[str, np.ndarray]:
        return jax.device_get(probe(state, frozen, held_out))

    def save(at: int) -> None:
        extra = {
            "config": config.to_dict(), "provenance": data.provenance, "commit": commit(), "seconds": seconds,
            "loader": data.loader.get_state(),
            "pending": [{k: float(v) for k, v in row.items()} for row in jax.device_get(pending)],
        }  # fmt: skip
        checkpoints.save(at, state, extra)

    def ended() -> bool:
        return done >= t.steps or bool(t.minutes) and seconds >= 60 * t.minutes

    # --- loop
    last: dict[str, float] = {}
    done, clocked_at, clock = start, start, time.perf_counter()
    low_entropy, stop, feed = 0, False, FeedClock()
    try:
        with Progress(t.steps, start) if is_first() else Bystander() as progress, Interruption() as interruption:
            while not ended():
                batch = to_devices(feed.take(data.loader), rows)
                over = max(done / t.steps, seconds / (60 * t.minutes) if t.minutes else 0.0)
                state, metrics = step(state, frozen, batch, min(over, 1.0))
                feed.started(metrics)
                pending.append(metrics)
                done += 1
                if done == start + 1:  # compilation is over, time begins
                    jax.block_until_ready(metrics)
                    clocked_at, clock, feed.waited = done, time.perf_counter(), 0.0
                if alone:
                    stop = interruption.requested

                if done % t.log_every == 0 or done in (1, t.steps):
                    values = {k: float(np.mean(v)) for k, v in _columns(jax.device_get(pending)).items()}
                    pending = []
                    told = exchange([time.perf_counter() - clock, feed.waited, interruption.requested])
                    stop = bool(told[:, 2].any())
                    if done > clocked_at:
                        elapsed, windows = float(told[0, 0]), (done - clocked_at) * t.batch_size
                        seconds += elapsed
                        values["tokens_per_second"] = windows * config.model.num_tokens / elapsed
                        values["wait_share"] = float(told[:, 1].max()) / elapsed
                        if peak:
                            values["mfu"] = (
                                windows * window_flops[over >= config.objective.frozen_after] / elapsed / peak
                            )
                    clocked_at, clock, feed.waited = done, time.perf_counter(), 0.0
                    tracker.log(done, values, "train")
                    last |= values
                    progress.update(done, last)
                    check_finite(values, done)
                    check_collapse(values, config, done)

                if done % t.probe_every == 0 or ended():
                    found = attempt("probe", measure, state)
                    if found:
                        values = {k: v.tolist() for k, v in found.items()}
                        if config.model.kind == "ldlm":
                            state = move_gate(state, values["reconstruction"], values["effective_rank"], config)
                            values["gate_open"] = float(state.gate_open)
                        tracker.log(done, values, "probe")
                        last |= {k: v for k, v in values.items() if isinstance(v, float)}
                        progress.update(done, last)

                if done % t.sample_every == 0 or ended():
                    writer = generator(config, model, mesh, state, frozen, data)
                    found = attempt("sampling", sample, writer, judge) if is_first() else None
                    if found:
                        texts, values = found
                        values |= {"text_entropy": text_entropy}
                        tracker.samples(done, texts)
                        tracker.log(done, values, "eval")
                        last |= values
                    entropy = float(exchange([found[1]["entropy"] if found else np.nan])[0, 0])
                    if not np.isnan(entropy):
                        gamma_up = "gamma" in last and last["gamma"] >= 0.5 * config.objective.gamma_max
                        low = entropy < t.collapse_entropy * text_entropy
                        low_entropy = low_entropy + 1 if low and gamma_up else 0
                        if low_entropy >= 3:
                            raise TrainingStopped(
                                f"step {done}: the unigram entropy of samples is {entropy:.2f} nats, that of the "
                                f"text {text_entropy:.2f}, three times in a row: the model has collapsed to a few words. "
                                "Lower objective.gamma_max, raise objective.gamma_gate or objective.decoder_noise; "
                                "training.collapse_entropy=0 switches this check off"
                            )

                if done % t.checkpoint_every == 0 and not ended():
                    save(done)
                if stop:
                    break
        save(done)
        checkpoints.wait()
        if stop and not ended():
            raise KeyboardInterrupt(f"interrupted at step {done}; a checkpoint is written")
    finally:
        if is_first():
            attempt("plotting", plots, run_dir)
        tracker.close()
        feed.close()
        data.loader.close()
        checkpoints.close()
    return last | {"step": float(done), "seconds": seconds}


class Interruption:
    """Ctrl-C and SIGTERM as a request to stop after the step at hand, when state and data position agree.

    A second Ctrl-C stops at once; what the last checkpoint holds is then what remains.  Several processes stop at the next
    line of the log, whichever of them was asked.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step; once more stops at once", flush=True)


def generator(
    config: Config, model: Model, mesh: jax.sharding.Mesh, state: TrainState, frozen: Params, data: TrainingData
) -> Generator:
    """The averaged weights of a state, ready to write, whole on one device of each process."""
    dtype = config.training.compute_dtype
    arrays = {
        "params": cast(state.ema_params, dtype), "frozen": frozen, "edges": cumulative(state.timesteps, config.diffusion),
        "latent_stats": state.latent_stats, "hidden_mean": state.hidden_mean, "hidden_std": state.hidden_std,
    }  # fmt: skip
    return Generator(
        config=config, **whole(mesh, arrays), tokenizer=data.tokenizer, eos_id=data.eos_id, dtype=dtype,
        step=int(state.step),
    )  # fmt: skip


def sample(writer: Generator, judge: Judge) -> tuple[list[str], dict[str, float]]:
    """Texts and figures of a few unselected samples; the seed is always the same, so that files can be compared."""
    tokens = writer.generate_tokens(seed=writer.config.seed, num=SAMPLES)
    return writer.decode(tokens[:8]), dict(judge(tokens, writer.eos_id))


def attempt(what: str, action: Callable[..., Any], *arguments: Any) -> Any:
    """The action's result, or None and a line on the terminal when it fails: evaluation must never end a run."""
    try:
        return action(*arguments)
    except Exception as error:
        print(f"{what} failed and is skipped this time: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def check_finite(values: dict[str, float], step: int) -> None:
    """TrainingStopped on a NaN or an infinity, naming the terms."""
    broken = [name for name, value in values.items() if not np.isfinite(value)]
    if broken:
        raise TrainingStopped(
            f"step {step}: {', '.join(broken)} became NaN or infinite. The last checkpoint is from before; lower "
            "optimizer.learning_rate or use training.compute_dtype=float32, and run again"
        )


def check_collapse(values: dict[str, float], config: Config, step: int) -> None:
    """TrainingStopped when latents have become the same for all inputs."""
    if config.model.kind == "ldlm" and values["latent_variance"] < config.training.collapse_variance:
        raise TrainingStopped(
            f"step {step}: latents hardly depend on their input any more (their variance over the batch is "
            f"{values['latent_variance']:.4f}, training.collapse_variance is {config.training.collapse_variance}). Lower objective.gamma_max or raise objective.gamma_gate"
        )


def check_provenance(there: dict[str, Any], here: dict[str, Any], run_dir: Path) -> None:
    """ConfigError when a checkpoint was trained on other data, encoder or tokenizer than those at hand."""
    different = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if different:
        raise ConfigError(
            f"{run_dir} was trained with another {', '.join(different)}; give the same --data and --encoder, "
            "or start a new run with another --name"
        )


def commit() -> str:
    """Short hash of the code, with + when it has uncommitted changes; 'unknown' outside a checkout."""
    here = Path(__file__).parent
    try:
        run = functools.partial(subprocess.run, cwd=here, capture_output=True, text=True, timeout=10)
        found = run(["git", "rev-parse", "--short=12", "HEAD"])
        dirty = run(["git", "status", "--porcelain", "-uno"]).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() + ("+" if dirty else "") if found.returncode == 0 else "unknown"


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {key: np.asarray([row[key] for row in rows], np.float64) for key in rows[0]}


__all__ = ["TrainingData", "TrainingStopped", "train"]
