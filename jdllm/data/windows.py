"""Documents as windows of t tokens, and tokens as text again.

A document is cut into windows that do not overlap and never hold two documents; its last one ends in EOS and padding.
Left out on purpose: packing several short documents into one window, since the model is to learn where text ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from jdllm.data.text import DataError

HELD_OUT_EVERY = 20
LEAST_TOKENS = 2  # a window of one token is a lone EOS
_PIECE_CHARS, _CHUNK_CHARS = 20_000, 8_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Text as n windows of t tokens; positions from `lengths` on are padding and repeat the EOS id."""

    ids: Int[np.ndarray, "n t"]
    lengths: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def hash(self) -> str:
        """sha256 over shape, ids and lengths."""
        digest = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        digest.update(np.ascontiguousarray(self.ids, "<i4"))
        digest.update(np.ascontiguousarray(self.lengths, "<i4"))
        return digest.hexdigest()

    def __getitem__(self, rows: slice | Sequence[int] | np.ndarray) -> Windows:
        """The windows of a slice or of a list of indices."""
        return Windows(self.ids[rows], self.lengths[rows])


def pack(documents: Iterable[str], tokenizer: Tokenizer, t: int, eos_id: int, max_tokens: int | None = None) -> Windows:
    """Tokenise documents and cut each into windows of t tokens.

    A document of L tokens counts as L + 1 with its EOS.  An EOS inside the text ends a document there.  Windows with
    fewer than two tokens are dropped.  With max_tokens, reading stops once the windows hold that many; the last window
    that would exceed it is left out.  DataError when nothing is left.

    Long documents are tokenised in pieces of about 20,000 characters so that all cores have work.  They are cut before a
    single space between two visible characters, where the usual pre-tokenisers cut too, so the tokens are the same.  A
    tokenizer for which that fails on a sample (SentencePiece, which marks the beginning of a text) gets whole documents.
    """
    if tokenizer.id_to_token(eos_id) is None:
        raise DataError(f"the tokenizer has no token {eos_id} to end a text with; it belongs to another model")
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    rest, total = np.empty(0, np.int32), 0
    for tokens, ends in _tokens(documents, tokenizer, eos_id, max_tokens):
        rest = np.concatenate([rest, tokens, [eos_id]] if ends else [rest, tokens]).astype(np.int32)
        count = -(-len(rest) // t) if ends else len(rest) // t
        new, rest = rest[: count * t], rest[count * t :]
        sizes = np.full(count, t, np.int32)
        if len(new) % t:
            sizes[-1] = len(new) % t
            new = np.pad(new, (0, t - len(new) % t), constant_values=eos_id)
        keep = sizes >= LEAST_TOKENS
        ids.append(new.reshape(-1, t)[keep])
        lengths.append(sizes[keep])
        total += int(lengths[-1].sum())
        if max_tokens is not None and total >= max_tokens:
            break
    windows = (
        Windows(np.concatenate(ids), np.concatenate(lengths))
        if ids
        else Windows(np.empty((0, t), np.int32), np.empty(0, np.int32))
    )
    if max_tokens is not None:
        windows = windows[: int(np.searchsorted(np.cumsum(windows.lengths), max_tokens, side="right"))]
    if not len(windows):
        limit = "" if max_tokens is None else f" within feed.max_tokens={max_tokens}"
        raise DataError(
            f"the text gives no window of at least {LEAST_TOKENS} tokens{limit}; give more text with --data"
        )
    return windows


def split(documents: Iterable[str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents: every 20th is held out, of fewer than 20 the last, of a single one its last twentieth."""
    documents = list(documents)
    if len(documents) == 1:
        text = documents[0]
        space = re.compile(r"\s\S").search(text, len(text) - len(text) // HELD_OUT_EVERY)
        at = space.start() if space else len(text)
        documents = [text[:at], text[at:].lstrip()]
    held_out = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    train = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    if not held_out and train:
        held_out = [train.pop()]
    if not any(text.strip() for text in train) or not any(text.strip() for text in held_out):
        raise DataError(
            "there is too little text to hold some out for evaluation; give more with --data, or name --valid-data"
        )
    return train, held_out


def decode(tokenizer: Tokenizer, ids: Sequence[int] | Int[np.ndarray, " t"], eos_id: int) -> str:
    """The text of one window, up to its first EOS."""
    ids = [int(token) for token in ids]
    return tokenizer.decode(ids[: ids.index(eos_id)] if eos_id in ids else ids, skip_special_tokens=False)


def tokenizer_hash(tokenizer: Tokenizer | str) -> str:
    """sha256 of the tokenizer's JSON."""
    return hashlib.sha256((tokenizer if isinstance(tokenizer, str) else tokenizer.to_str()).encode()).hexdigest()


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """DataError if the tokenizer makes ids that a model with vocab_size tokens lacks."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer knows ids up to {largest} and the model only {vocab_size} tokens; they do not belong together: "
            f"use the tokenizer that came with the encoder"
        )


def _tokens(
    documents: Iterable[str], tokenizer: Tokenizer, eos_id: int, max_tokens: int | None
) -> Iterator[tuple[np.ndarray, bool]]:
    """Token ids in order, as (some tokens of a document, whether it ends with them), EOS taken out."""
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    piece_chars = _PIECE_CHARS if _cuts_cleanly(tokenizer) else None
    chunk_chars = _CHUNK_CHARS if max_tokens is None else min(_CHUNK_CHARS, max(_PIECE_CHARS, 4 * max_tokens))

    def encode(pieces: list[tuple[str, bool]]) -> Iterator[tuple[np.ndarray, bool]]:
        encoded = tokenizer.encode_batch_fast([text for text, _ in pieces], add_special_tokens=False)
        for encoding, (_, last) in zip(encoded, pieces):
            ids = np.array(encoding.ids, np.int32)
            *before, end = np.split(ids, np.flatnonzero(ids == eos_id)) if (ids == eos_id).any() else [ids]
            parts = [*before, end]
            for i, part in enumerate(parts):
                yield part[i > 0 :], last or i < len(parts) - 1

    pieces: list[tuple[str, bool]] = []
    chars = 0
    for document in documents:
        for piece in _pieces(document, piece_chars):
            pieces.append((piece, False))
            chars += len(piece)
            if chars >= chunk_chars:
                yield from encode(pieces)
                pieces, chars = [], 0
        pieces.append(("", True))
    yield from encode(pieces)


def _pieces(text: str, size: int | None) -> Iterator[str]:
    """Cut before a single space between visible characters, `size` characters or a little more after the last cut."""
    start, space = 0, re.compile(r"(?<=\S) (?=\S)")
    while size is not None and len(text) - start > size and (cut := space.search(text, start + size)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _cuts_cleanly(tokenizer: Tokenizer) -> bool:
    """Whether cutting before a space leaves the tokens as they are, tried on a sample."""
    sample = 'It was late. "Who is there?" he said;\nnobody - not even 12 men, nor O\'Neil - answered.\n\n  The end (of it) came: soon.'
    whole = tokenizer.encode(sample, add_special_tokens=False).ids
    pieces = tokenizer.encode_batch(list(_pieces(sample, 1)), add_special_tokens=False)
    return whole == [token for piece in pieces for token in piece.ids]
