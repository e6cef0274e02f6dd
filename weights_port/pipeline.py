"""From a config to a trained run: resume check, text, frozen encoder, hidden-state caches, training loop.

`run` backs both `jdllm train` and experiments/train_ldlm.py.  What `prepare` leaves in the run folder is all that
evaluation and a resumed run need to find their data again:

    config.json         the resolved config (hidden_dim and vocab_size are the encoder's own)
    tokenizer.json      of the encoder, so that generation needs neither encoder nor network
    data.json           paths and hashes of the caches, the encoder's identity, its EOS id
    valid_windows.npz   ids and lengths of held-out windows, for text figures when the cache is gone

A resumed run whose caches are in place does not load the encoder again (SmolLM2 alone takes 45 s), and keeps its data
even if the text files have changed since.  Left out: anything about the model or the loss.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jdllm.config import Config, ConfigError

if TYPE_CHECKING:
    from jdllm.data.cache import HiddenStateCache
    from jdllm.data.windows import Windows
    from jdllm.training.loop import TrainingData
    from weights_port.encoder import EncoderInfo, HiddenStateEncoder
    from weights_port.processes import EncoderProcesses

STORED_VALID_WINDOWS = 2048  # half of them is what MAUVE compares with
STATISTICS_WINDOWS = 2048  # of an online feed; the mean of 100,000 tokens is known to a 300th of their spread

# What a resumed run may change without becoming another run.  Everything else shapes the weights.
MAY_CHANGE = (
    "training.steps", "training.minutes", "training.log_every", "training.sample_every", "training.checkpoint_every",
    "training.keep_checkpoints", "training.wandb", "objective.frozen_after", "feed.cache_dir", "feed.prefetch",
    "feed.encoder_device", "feed.encoder_memory", "feed.encoder_processes", "feed.encoder_batch_tokens", "sampling",
)  # fmt: skip
# The encoder's own values replace these, so the ones in a fresh config say nothing.
RESOLVED = ("model.hidden_dim", "model.vocab_size")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """All that training needs; the encoder is let go of unless the feed is online."""

    config: Config
    """Resolved: hidden_dim and vocab_size are the encoder's."""
    info: EncoderInfo
    tokenizer_json: str
    train_source: HiddenStateCache
    """What training reads; of an online feed only a sample, for the statistics."""
    valid_source: HiddenStateCache
    train_hash: str
    """Of all windows of training text."""
    online: tuple[HiddenStateEncoder, Windows] | None = None
    """The encoder and all training windows, when hidden states are computed beside the training step."""


def run(config: Config, run_dir: Path) -> int:
    """Train until the steps are done, or go on where an interrupted run stopped; returns the exit code.

    Of several processes the first one reads text and writes the caches, then the others find them.
    """
    import jax

    from jdllm.training.processes import first_then_others, is_first

    def ready() -> Prepared:
        check_resume(config, run_dir)
        return prepare(config, run_dir)

    if config.feed.feed == "online" or jax.distributed.is_initialized():
        # JAX would take three quarters of the card before the encoder, which lives there too, is done with it.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    leave_card_to_encoder(config)
    prepared = first_then_others(ready)
    if not prepared.online:
        release_gpu()
    from jdllm.evaluation.diversity import sample_figures
    from jdllm.training.loop import train
    from jdllm.training.sizes import table

    baseline = prepared.config.model.kind != "ldlm"
    if baseline and is_first():
        say(table(prepared.config))
    last = train(prepared.config, run_dir, training_data(prepared), sample_figures)
    if not is_first():
        return 0
    minutes, accuracy = last["seconds"] / 60, last.get("reconstruction")
    held_out = "" if accuracy is None else f"; {accuracy:.1%} of held-out tokens reconstructed"
    held_out += f"; {last['nll']:.3f} nats per held-out token" if "nll" in last else ""
    say(f"done: {int(last['step']):,} steps in {minutes:.1f} minutes{held_out}")
    show_samples(run_dir)
    say(
        f"run: {run_dir} (samples/, plots/, metrics.jsonl)\nnext: jdllm generate --run {run_dir}{'' if baseline else ' --watch'}"
    )
    return 0


def show_samples(run_dir: Path, count: int = 3) -> None:
    """The first texts of the newest sample file, unselected, on stdout."""
    files = sorted((run_dir / "samples").glob("step-*.txt"), key=lambda path: int(path.stem.removeprefix("step-")))
    if not files:
        return
    texts = re.split(r"^--- \d+\n", files[-1].read_text(encoding="utf-8"), flags=re.MULTILINE)[1 : count + 1]
    say(f"written by the model ({count} of the samples in {files[-1]}, not selected):")
    for text in texts:
        print(f"  | {text.strip().replace(chr(10), f'{chr(10)}  | ')}\n", flush=True)


def release_gpu() -> None:
    """Give back the memory of an encoder that is no longer used, which PyTorch would keep for itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def leave_card_to_encoder(config: Config) -> None:
    """Keep JAX off the card that an online encoder was given by number, if there is another one to train on."""
    kind, _, number = config.feed.encoder_device.partition(":")
    if config.feed.feed != "online" or kind != "cuda" or not number.isdecimal():
        return
    import jax
    import torch

    others = [card for card in range(torch.cuda.device_count()) if card != int(number)]
    if others:
        say(f"encoder on cuda:{number}, training on {', '.join(f'cuda:{card}' for card in others)}")
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, others)))


def trainers_device() -> str:
    """PyTorch's name of the device that this process's first JAX device is."""
    import jax

    device = jax.local_devices()[0]
    return f"cuda:{device.local_hardware_id}" if device.platform == "gpu" else "cpu"


def own_card(device: str) -> str:
    """For one of several processes, "auto" is the card that it trains on: several may share a host, and each sees all cards."""
    import jax

    if device != "auto" or not jax.distributed.is_initialized():
        return device
    found = trainers_device()
    return found if found.startswith("cuda") else device


def training_data(prepared: Prepared) -> TrainingData:
    """The loop's view of what was prepared."""
    from tokenizers import Tokenizer

    from jdllm.data.loader import BatchLoader, TokensOnly
    from jdllm.training.loop import TrainingData
    from jdllm.training.sharding import make_mesh, own_rows
    from weights_port.online import OnlineFeed

    config, train, valid = prepared.config, prepared.train_source, prepared.valid_source
    size = config.training.batch_size
    arguments = (size, config.seed, config.feed.prefetch, own_rows(make_mesh(config), size))
    read = TokensOnly if config.model.kind != "ldlm" else lambda cache: cache
    if prepared.online:
        loader = OnlineFeed(*prepared.online, *arguments, device=trainers_device())
    else:
        loader = BatchLoader(read(train), *arguments)
    return TrainingData(
        loader=loader,
        valid=read(valid),
        hidden_mean=train.mean,
        hidden_std=train.std,
        tokenizer=Tokenizer.from_str(prepared.tokenizer_json),
        eos_id=prepared.info.eos_id,
        head=None,  # `prepare` has written it into the run folder
        provenance={
            "encoder": train.key["encoder"], "tokenizer": train.key["tokenizer"],
            "training text": prepared.train_hash, "held-out text": valid.key["data"],
        },
    )  # fmt: skip


def check_resume(config: Config, run_dir: Path) -> None:
    """ConfigError if the folder holds a run of another config, or something that is no run.

    A run that has not written a checkpoint yet is no reason to refuse: it starts again with the new config.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file; choose another --name or --runs-dir")
    saved = run_dir / "config.json"
    if not saved.is_file():
        if run_dir.is_dir() and any(run_dir.iterdir()):
            raise ConfigError(
                f"{run_dir} is not empty and not a run (no config.json); choose another --name or --runs-dir"
            )
        return
    if not has_checkpoint(run_dir):
        return
    record = json.loads((run_dir / "data.json").read_text()) if (run_dir / "data.json").is_file() else {}
    if "weights" in record:
        raise ConfigError(
            f"{run_dir} holds {record['weights']} weights, which cannot be trained; go on with {record['quantized_from']}, "
            "which it was made from, or choose another --name"
        )
    found = differences(Config.load(saved), config, (*MAY_CHANGE, *RESOLVED))
    if found:
        raise ConfigError(
            f"{run_dir} is a run of another config:\n"
            + "".join(f"  {line}\n" for line in found)
            + "choose another --name "
            "to start a new run, or give the old values to go on with this one"
        )


def has_checkpoint(run_dir: Path) -> bool:
    """Whether training has left something that a new run would destroy."""
    checkpoints = run_dir / "checkpoints"
    return checkpoints.is_dir() and any(path.name.isdecimal() for path in checkpoints.iterdir())


def prepare(config: Config, run_dir: Path) -> Prepared:
    """Text -> windows -> hidden states on disk; writes the files named above.  DataError, EncoderError, ConfigError."""
    found = prepared_before(config, run_dir)
    if found is not None:
        return found
    from jdllm.data.text import read_documents
    from weights_port.processes import EncoderProcesses

    for source in filter(None, (config.data, config.valid_data)):
        next(iter(read_documents(source)), None)  # bad text is said in a second, not after the encoder has loaded
    encoder = load(config)
    try:
        return prepare_with(encoder, config, run_dir)
    finally:
        if isinstance(encoder, EncoderProcesses):
            encoder.close()


def prepare_with(encoder: HiddenStateEncoder | EncoderProcesses, config: Config, run_dir: Path) -> Prepared:
    """The same with the encoder at hand."""
    from tokenizers import Tokenizer

    from jdllm.data.train_and_held_out import evenly, train_and_held_out
    from weights_port.encoder import check_length

    check_length(encoder.info, config.model.num_tokens)
    config = resolve(config, encoder.info)
    train, valid = train_and_held_out(config, Tokenizer.from_str(encoder.tokenizer_json), encoder.info.eos_id)
    say(
        f"data: {int(train.lengths.sum()):,} tokens in {len(train):,} windows of {config.model.num_tokens} to train on, "
        f"{len(valid):,} windows held out"
    )
    online = config.feed.feed == "online"
    train_part = train[evenly(len(train), STATISTICS_WINDOWS)] if online else train
    sources = {name: extract(config, encoder, part) for name, part in (("train", train_part), ("valid", valid))}
    check_same_data(run_dir, {name: source.key for name, source in sources.items()})
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "tokenizer.json").write_text(encoder.tokenizer_json)
    if config.model.head == "encoder":
        from jdllm.training.run import save_frozen
        from weights_port.head import folded_head

        save_frozen(run_dir, folded_head(encoder.checkpoint))
    stored = slice(0, STORED_VALID_WINDOWS)
    np.savez_compressed(run_dir / "valid_windows.npz", ids=valid.ids[stored], lengths=valid.lengths[stored])
    caches = {
        name: {"path": os.fspath(source.path.absolute()), "hash": source.hash, "key": source.key}
        for name, source in sources.items()
    }
    info = encoder.info
    data = {**caches, "eos_id": info.eos_id, "encoder": dataclasses.asdict(info), "train_windows": train.hash}
    config.save(run_dir / "config.json")
    replace_text(run_dir / "data.json", json.dumps(data, indent=2) + "\n")  # last: it vouches for the others
    return Prepared(
        config, info, encoder.tokenizer_json, sources["train"], sources["valid"], train.hash,
        online=(encoder, train) if online else None,
    )  # fmt: skip


def check_same_data(run_dir: Path, keys: dict[str, dict[str, Any]]) -> None:
    """ConfigError if a run that has been trained was trained on other hidden states than these."""
    if not has_checkpoint(run_dir) or not (run_dir / "data.json").is_file():
        return
    recorded = json.loads((run_dir / "data.json").read_text())
    there = flatten({name: recorded[name]["key"] for name in keys})
    different = [key for key, value in flatten(keys).items() if there.get(key) != value]
    if different:
        raise ConfigError(
            f"{run_dir} was trained on something else: {', '.join(different)} differ{'s' if len(different) == 1 else ''} "
            "(the text, the encoder, or its arithmetic has changed); restore it, or choose another --name"
        )


def prepared_before(config: Config, run_dir: Path) -> Prepared | None:
    """What an earlier `prepare` of the same run left, if all of it is still there."""
    from jdllm.data.cache import HiddenStateCache
    from jdllm.data.text import DataError
    from jdllm.data.windows import tokenizer_hash
    from jdllm.training.run import FROZEN_HEAD
    from weights_port.encoder import EncoderInfo

    needed = ["config.json", "data.json", "tokenizer.json", "valid_windows.npz"]
    needed += [FROZEN_HEAD] if config.model.head == "encoder" else []
    if config.feed.feed == "online" or not all((run_dir / name).is_file() for name in needed):
        return None
    saved = Config.load(run_dir / "config.json")
    if differences(saved, config, (*MAY_CHANGE, *RESOLVED)):
        return None
    data = json.loads((run_dir / "data.json").read_text())
    sources = []
    for name in ("train", "valid"):
        if not (Path(data[name]["path"]) / "DONE").exists():
            say(f"the {name} cache {data[name]['path']} is gone; making it again")
            return None
        sources.append(HiddenStateCache.open(Path(data[name]["path"]), expect=data[name]["key"]))
    tokenizer_json = (run_dir / "tokenizer.json").read_text()
    if tokenizer_hash(tokenizer_json) != sources[0].key["tokenizer"]:
        raise DataError(
            f"{run_dir / 'tokenizer.json'} is not the tokenizer that the cache {sources[0].path} was made with; delete it and "
            "run the same command again, which writes the right one"
        )
    info = EncoderInfo(**data["encoder"])
    config = resolve(config, info)
    config.save(run_dir / "config.json")
    return Prepared(config, info, tokenizer_json, *sources, data["train_windows"])


def load(config: Config) -> HiddenStateEncoder | EncoderProcesses:
    """The frozen model of a config, its upper layers left out; in processes of its own where there are several."""
    from weights_port.checkpoints import open_checkpoint
    from weights_port.encoder import load_encoder
    from weights_port.processes import start

    say(f"encoder: loading {config.encoder}")
    feed = config.feed
    if feed.encoder_processes > 1:
        source = dict(revision=feed.revision, trust_remote_code=feed.trust_remote_code)
        return start(
            open_checkpoint(config.encoder, **source), feed.encoder_processes, config.encoder, feed.encoder_device,
            layer=feed.layer, dtype=feed.encoder_dtype, weights=feed.encoder_weights, **source,
        )  # fmt: skip
    return load_encoder(
        config.encoder, layer=feed.layer, device=own_card(feed.encoder_device), dtype=feed.encoder_dtype,
        weights=feed.encoder_weights, memory=feed.encoder_memory, revision=feed.revision,
        trust_remote_code=feed.trust_remote_code,
    )  # fmt: skip


def resolve(config: Config, info: EncoderInfo) -> Config:
    """The config with the encoder's own width and vocabulary."""
    return config.replace(model__hidden_dim=info.hidden_dim, model__vocab_size=info.vocab_size)


def extract(config: Config, encoder: HiddenStateEncoder | EncoderProcesses, part: Windows) -> HiddenStateCache:
    """Hidden states of these windows, from the disk or through the encoder."""
    from jdllm.data.cache import HiddenStateCache
    from weights_port.extract import extract_to_cache

    path = extract_to_cache(
        encoder, part, Path(config.feed.cache_dir), batch_tokens=config.feed.encoder_batch_tokens, data_hash=part.hash
    )
    return HiddenStateCache.open(path)


def differences(there: Config, here: Config, free: tuple[str, ...]) -> list[str]:
    """Fields in which two configs differ, as 'key: old there, new here', without those in `free` and their children."""
    old, new = flatten(there.to_dict()), flatten(here.to_dict())
    return [
        f"{key}: {old[key]!r} there, {new[key]!r} here"
        for key in new
        if old[key] != new[key] and not any(key == field or key.startswith(field + ".") for field in free)
    ]


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"head_dim": 64}} -> {"model.head_dim": 64}."""
    flat = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def say(message: str) -> None:
    """Progress for the person at the terminal."""
    print(message, file=sys.stderr, flush=True)
