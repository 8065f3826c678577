"""Files that users ask for: written whole or not at all, with an error that says what to do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ArgumentError


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The path of a file to be written, if the folder that it names is there."""
    target = Path(path)
    folder = target.resolve().parent
    if not folder.is_dir():
        raise ArgumentError(
            f"{target} cannot be written: there is no folder {folder}. Create it first (mkdir -p {folder}), or give "
            "another path."
        )
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
        raise ArgumentError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target
