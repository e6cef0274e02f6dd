"""What `jdllm generate` shows: texts or JSON lines on stdout, timings on stderr, and texts that form while one watches.

Texts are separated by a rule with their number, since a text may hold any line break itself.  `--watch` draws on stderr,
so that the finished texts can still be piped; tokens that changed in the last step are bright.  Without a terminal every
step is printed below the last.  Left out: colours of the finished text, paging.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    import tokenizers

WORTH_REPEATING_SECONDS = 20.0
LEAST_SECONDS_A_STEP = 0.12  # a GPU is done with ten steps before an eye has read one


def generate(
    run: Path,
    *,
    checkpoint: int | None,
    implementation: str = "auto",
    seed: int,
    options: Mapping[str, Any],
    jsonl: bool,
    watch: bool,
) -> int:
    """Load a run, generate with `options` (names of `Generator.generate_tokens`), print; returns the exit code."""
    import jdllm

    generator = jdllm.load(run, checkpoint=checkpoint)
    generator.implementation = implementation
    if watch:
        with Watch(generator.tokenizer, generator.eos_id) as view:
            tokens = generator.generate_tokens(seed=seed, on_step=view, **options)
    else:
        start = time.perf_counter()
        tokens = generator.generate_tokens(seed=seed, **options)
        first, warm = time.perf_counter() - start, None
        if first < WORTH_REPEATING_SECONDS:  # the same program again, now that it is compiled
            start = time.perf_counter()
            tokens = generator.generate_tokens(seed=seed, **options)
            warm = time.perf_counter() - start
        say(f"{timing(tokens, first, warm)}; {generator.taken()}")
    texts = generator.decode(tokens)
    write(texts, tokens, generator.eos_id, seed, jsonl=jsonl)
    return 0


def timing(tokens: Int[np.ndarray, "n t"], first: float, warm: float | None) -> str:
    """One line: seconds and speed without compilation (`warm`), or with it when only one run was made."""
    n, t = tokens.shape
    seconds, note = (
        (first, "compilation included")
        if warm is None
        else (warm, f"after {max(first - warm, 0):.1f} s of compilation")
    )
    return f"{n} texts of {t} tokens in {seconds:.3f} s ({n * t / seconds:,.0f} tokens/s), {note}"


def write(texts: Sequence[str], tokens: Int[np.ndarray, "n t"], eos_id: int, seed: int, *, jsonl: bool) -> None:
    """Finished texts on stdout."""
    for index, (text, ids) in enumerate(zip(texts, tokens.tolist())):
        if jsonl:
            ids = ids[: ids.index(eos_id)] if eos_id in ids else ids
            line = {"index": index, "seed": seed, "text": text, "tokens": ids}
            print(json.dumps(line, ensure_ascii=False))
        else:
            print(f"--- {index + 1}/{len(texts)} ---\n{text}")
    sys.stdout.flush()


class Watch:
    """A callback for every denoising step: `view(step, total, tokens)` redraws all texts."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_id: int, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self._pieces = lambda ids: pieces(tokenizer, ids, eos_id)
        self._previous: Int[np.ndarray, "n t"] | None = None
        self._live = Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
        self._next = 0.0

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.console.is_terminal:
            self._live.__exit__(*error)

    def __call__(self, step: int, total: int, tokens: Int[np.ndarray, "n t"]) -> None:
        previous, self._previous = self._previous, np.array(tokens)
        lines = [Text(f"step {step}/{total}", style="bold")]
        for row, ids in enumerate(tokens):
            line = Text.assemble((f"{row + 1:>3}  ", "dim"))
            for piece, position in self._pieces(ids):
                changed = previous is None or previous[row, position] != ids[position]
                line.append(piece.replace("\n", " "), style="bold yellow" if changed else "")
            lines.append(line)
        if not self.console.is_terminal:
            self.console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
            return
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._live.update(Group(*lines), refresh=True)
        self._next = time.monotonic() + LEAST_SECONDS_A_STEP


def pieces(tokenizer: tokenizers.Tokenizer, ids: Int[np.ndarray, " t"], eos_id: int) -> list[tuple[str, int]]:
    """The decoded text cut into pieces, each with the position of its last token; together they are the whole text.

    A character of several byte tokens is one piece, at the token that completes it.
    """
    found, done, text = [], 0, ""
    for position, token in enumerate(ids.tolist()):
        if token == eos_id:
            break
        text = tokenizer.decode(ids[: position + 1].tolist())
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            found.append((text[done:], position))
            done = len(text)
    if len(text) > done:
        found.append((text[done:], position))
    return found


def say(message: str) -> None:
    """Timings and notes: on stderr, out of the way of the text."""
    print(message, file=sys.stderr, flush=True)
