"""Files that users ask for: written as a whole or not at all, with errors that say what to do."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import AmpError, ArgumentError


def check_target(
    path: str | os.PathLike[str], *, what: str = "", error: type[AmpError] = ArgumentError, example: str = ""
) -> Path:
    """Return the path of a file to be written; raise if its folder does not exist or it is a folder itself.

    ``what``: what is written ("The policy"). ``error``: the class of the error. ``example``: a valid name.
    """
    target = Path(path)
    start = _not_written(what, path)
    give = f"pass the path of a file{f', such as {example}' if example else ''}."
    if not target.name or os.path.isdir(target):
        raise error(f"{start}: it is a folder;", hint=give)
    if os.path.exists(target) and not os.path.isfile(target):
        raise error(f"{start}: it is a device or a pipe;", hint=give)
    folder = target.absolute().parent
    if not os.path.isdir(folder):
        raise error(f"{start}: there is no folder {folder};", hint=f"create it first (mkdir -p {folder}).")
    return target


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that is going to be written after long work; raise if its folder takes no new file."""
    target = check_target(path)
    try:
        with tempfile.TemporaryFile(dir=os.path.realpath(target.absolute().parent)):
            pass
    except OSError as failure:
        raise ArgumentError(f"{_not_written('', path)}: {failure.strerror or failure}.") from failure
    return target


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, what: str = "", error: type[AmpError] = ArgumentError, example: str = ""
) -> Iterator[Path]:
    """Yield a path to write to, which becomes ``path`` if the body succeeds; otherwise ``path`` stays as it was.

    Until then, the file is in a hidden folder next to the target, which is always removed. Further files that the body
    puts there (such as an ONNX model's weights) are moved too, before the target. The new file keeps the permissions of
    the one that it replaces; a symbolic link is followed. The arguments are those of ``check_target``.
    """
    target = check_target(path, what=what, error=error, example=example)
    real = Path(os.path.realpath(target))
    try:
        with tempfile.TemporaryDirectory(prefix=".amp-", dir=real.parent, ignore_cleanup_errors=True) as scratch:
            yield Path(scratch, real.name)
            for made in sorted(Path(scratch).iterdir(), key=lambda p: p.name == real.name):
                place = real.with_name(made.name)
                if place.exists():
                    shutil.copymode(place, made)
                with open(made, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(made, place)
    except OSError as failure:
        raise error(f"{_not_written(what, path)}: {failure.strerror or failure}.") from failure


def write_text(
    path: str | os.PathLike[str], text: str, *, what: str = "", error: type[AmpError] = ArgumentError
) -> Path:
    """Write a text file, as a whole or not at all."""
    with replacing(path, what=what, error=error) as scratch:
        scratch.write_text(text, encoding="utf-8")
    return Path(path)


def _not_written(what: str, path: str | os.PathLike[str]) -> str:
    place = os.fspath(path) or "''"
    return f"{what} could not be written to {place}" if what else f"{place} cannot be written"
