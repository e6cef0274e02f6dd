"""Folders that are written whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from jdllm.config import ConfigError


def check_target(path: Path, option: str) -> None:
    """ConfigError if something is there already."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists already; choose another {option}, or remove it")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its name when all went well, and is removed otherwise."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
