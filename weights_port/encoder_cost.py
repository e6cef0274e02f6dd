"""What a way to load the frozen model costs: seconds, memory, tokens/s.  Used by experiments/measure_encoder.py.

Memory of the process is what belongs to no file: a mapped checkpoint costs none, since the kernel can drop its pages.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from typing import Any

import numpy as np

from jdllm.data.windows import Windows
from weights_port.checkpoints import open_checkpoint
from weights_port.encoder import HiddenStateEncoder, load_encoder
from weights_port.extract import extract_to_cache
from weights_port.loading import missing_kernels
from weights_port.processes import start


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, and text to run through it."""

    encoder: str
    layer: int
    tokens: int
    num_tokens: int
    batch_tokens: int

    def windows(self, tokens: int | None = None) -> Windows:
        """Full windows of random bytes, which every tokenizer has."""
        count = max(1, (tokens or self.tokens) // self.num_tokens)
        ids = np.random.default_rng(0).integers(0, 256, (count, self.num_tokens)).astype(np.int32)
        return Windows(ids, np.full(count, self.num_tokens, np.int32))


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def loading(work: Work, weights: str) -> dict[str, Any]:
    """Load, then run: seconds, GB on the GPU after loading and at either peak, GB of memory, tokens/s."""
    import torch

    load_encoder("tiny-qwen3_5", layer=1, weights=weights)  # imports are not counted
    before, began, cuda = anonymous_bytes(), time.perf_counter(), torch.cuda.is_available()
    encoder = load_encoder(work.encoder, layer=work.layer, weights=weights)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "dtype": encoder.info.identity["dtype"], "load_seconds": time.perf_counter() - began,
        "ram_not_of_a_file_gb": (anonymous_bytes() - before) / 1e9,
        "missing": missing_kernels(encoder.config, encoder.info.layer),
    }  # fmt: skip
    if cuda:
        found |= {
            "loaded_gb": torch.cuda.memory_allocated() / 1e9,
            "load_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        }
        torch.cuda.reset_peak_memory_stats()
    found["tokens_per_second"] = tokens_per_second(encoder, work.windows(), work.batch_tokens)
    if cuda:
        found["run_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def spread(work: Work) -> dict[str, Any]:
    """Half of the weights on the GPU, the rest in the CPU's memory: whether the states are the same, and how fast."""
    import torch

    check = work.windows(2048)
    whole = load_encoder(work.encoder, layer=work.layer)
    states = whole.states(check.ids, check.lengths).float().cpu()
    half = torch.cuda.memory_allocated() / 2e9
    del whole
    torch.cuda.empty_cache()
    encoder = load_encoder(work.encoder, layer=work.layer, device="spread", memory=half)
    other = encoder.states(check.ids, check.lengths).float().cpu()
    return {
        "limit_gb": half, "relative_difference": float((other - states).norm() / states.norm()),
        "tokens_per_second": tokens_per_second(encoder, work.windows(4 * work.batch_tokens), work.batch_tokens),
    }  # fmt: skip


def processes(work: Work, count: int) -> dict[str, Any]:
    """Several processes fill one cache in the temporary folder; the first few windows are not counted."""
    text = work.windows()
    checkpoint = open_checkpoint(work.encoder)
    with (
        tempfile.TemporaryDirectory() as folder,
        start(checkpoint, count, work.encoder, "auto", layer=work.layer) as encoder,
    ):
        began = 0.0
        for part in (text[np.arange(min(len(text), 16 * count))], text):
            began = time.perf_counter()
            extract_to_cache(encoder, part, folder, batch_tokens=work.batch_tokens, data_hash=part.hash, progress=False)
        return {"tokens_per_second": text.ids.size / (time.perf_counter() - began)}


def tokens_per_second(encoder: HiddenStateEncoder, windows: Windows, batch_tokens: int) -> float:
    """Speed of the model alone, after one batch that is not counted."""
    size = max(1, batch_tokens // windows.ids.shape[1])
    encoder.encode_torch(windows.ids[:size], windows.lengths[:size]).cpu()
    began = time.perf_counter()
    for at in range(0, len(windows), size):
        hidden = encoder.encode_torch(windows.ids[at : at + size], windows.lengths[at : at + size])
    hidden.cpu()
    return windows.ids.size / (time.perf_counter() - began)


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))
