"""Which windows of text a run trains on, and which it keeps for evaluation.

Held-out documents are never trained on.  Where only a part of the text is wanted, it comes from all over the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from jdllm.config import Config
from jdllm.data.text import read_documents
from jdllm.data.windows import HELD_OUT_EVERY, Windows, pack, split

SPREAD, MOST_SPREAD_TOKENS = 32, 10_000_000


def train_and_held_out(config: Config, tokenizer: Tokenizer, eos_id: int) -> tuple[Windows, Windows]:
    """Training windows, at most `max_tokens` of them together, and `valid_windows` held-out ones.

    Text is streamed, twice where held-out documents come out of the training text, so that a part of a dataset larger
    than memory can be used.
    """
    t, held_out = config.model.num_tokens, HELD_OUT_EVERY - 1

    def every_20th(wanted: bool) -> Iterator[str]:
        documents = enumerate(read_documents(config.data))
        return (text for number, text in documents if (number % HELD_OUT_EVERY == held_out) == wanted)

    if config.valid_data is not None:
        train, valid = read_documents(config.data), read_documents(config.valid_data)
    else:
        first = list(itertools.islice(read_documents(config.data), HELD_OUT_EVERY))
        few = len(first) < HELD_OUT_EVERY
        train, valid = split(first) if few else (every_20th(False), every_20th(True))
    return (
        spread(train, tokenizer, t, eos_id, config.feed.max_tokens),
        spread(valid, tokenizer, t, eos_id, config.feed.valid_windows * t),
    )


def spread(documents: Iterable[str], tokenizer: Tokenizer, t: int, eos_id: int, most: int | None) -> Windows:
    """About `most` tokens in windows from all over the text (from its first 32 x `most` tokens, or 10 million).

    The first windows alone would be one book or one decade of speeches.  They come in a fixed random order, so that the
    first few stand for all.
    """
    if most is None:
        return pack(documents, tokenizer, t, eos_id)
    found = pack(documents, tokenizer, t, eos_id, max(most, min(SPREAD * most, MOST_SPREAD_TOKENS)))
    count = min(max(most // t, 1), len(found))
    return found[np.random.default_rng(0).permutation(evenly(len(found), count))]


def evenly(length: int, count: int) -> Int[np.ndarray, " n"]:
    """At most `count` different indices below `length`, in rising order and equally far apart."""
    return np.linspace(0, length - 1, min(count, length)).astype(np.int64)
