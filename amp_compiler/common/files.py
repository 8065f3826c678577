"""Files that users ask for: written whole or not at all, with an error that says what to do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ArgumentError


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a file to be written, if the folder that it names is there."""
    target = Path(path)
    if told := _no_folder(target):
        raise ArgumentError(f"{target} cannot be written: {told}.")
    if target.is_dir():
        raise ArgumentError(f"{target} cannot be written: it is a folder. Give the path of a file in it.")
    return target


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file, or leave the old one as it was."""
    target = check_folder(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise ArgumentError(f"{target} cannot be written: {why_not_written(target, error)}.") from error
    return target


def why_not_written(path: Path, error: OSError) -> str:
    """The cause of a failed write, to be put behind a colon; a missing folder is named, with what to do."""
    return _no_folder(path) or str(error.strerror or error)


def _no_folder(path: Path) -> str:
    folder = path.absolute().parent
    return "" if folder.is_dir() else f"there is no folder {folder}; create it first (mkdir -p {folder})"
