"""Parts of messages: the first line of an error, the closest known name, the user's own line of code."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from types import FrameType

#: what Dynamo says if an op fails while it is traced
_OF_AN_OP = re.compile(r"Dynamo failed to run FX node.*: got (\w+)\((['\"])(.*)\2\)")
#: modules whose frames may be between a user's line and ours
_INSIDE = ("amp_compiler", "torch.", "contextlib", "functools", "importlib")


def first_line(error: BaseException, *, named: bool = False, limit: int | None = None) -> str:
    """Return the first non-empty line of an error's text; the name of its class if it has no text.

    ``named``: with the class in front. ``limit``: the most characters of the line.

    >>> first_line(ValueError("no such size\\nmore"), named=True), first_line(ValueError())
    ('ValueError: no such size', 'ValueError')
    """
    name = type(error).__name__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:limit]
    if not line:
        return name
    return f"{name}: {line}" if named else line


def traced_line(error: BaseException) -> str:
    """Return the class and the first line of an error; of one of Dynamo about an op, those of the op's own error.

    >>> traced_line(RuntimeError("Dynamo failed to run FX node with fake tensors: call_function: got TypeError('no')"))
    'TypeError: no'
    """
    inner = _OF_AN_OP.search(str(error))
    return f"{inner[1]}: {inner[3]}" if inner else first_line(error, named=True)


def raised_at(error: BaseException) -> str:
    """Return the innermost line of the user's code that led to an error, as `` (at file.py:3)``; or nothing."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith(_INSIDE):
            place = f" (at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def suggestion(
    given: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6, otherwise: str = ""
) -> str:
    """Return ``Did you mean 'linear'?`` with the known names that are closest to ``given``, at most ``most`` of them;
    ``otherwise`` if none is close.

    >>> suggestion("liner", ["linear", "conv2d"]), suggestion("x", ["linear"], otherwise="Known: linear.")
    ("Did you mean 'linear'?", 'Known: linear.')
    """
    near = difflib.get_close_matches(given, list(known), n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def nearest_path(pattern: str, paths: Iterable[str]) -> str:
    """Return a hint for a module pattern that matches nothing: the closest path, or what paths look like."""
    known = [path for path in paths if path]
    return suggestion(pattern.rstrip(".*"), known, otherwise=f"Paths look like: {', '.join(known[:4]) or '(none)'}.")


def size(nbytes: float) -> str:
    """Return a number of bytes as people write it.

    >>> size(512), size(2048), size(3_400_000)
    ('512 B', '2.0 kB', '3.4 MB')
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 cast``, ``2 casts``.

    >>> count(1, "cast"), count(2, "cast"), count(2, "bus", "buses")
    ('1 cast', '2 casts', '2 buses')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def users_frame() -> int:
    """Return the ``stacklevel`` with which a warning of the caller shows the user's own line, not ours or torch's."""
    return _users(sys._getframe(1))[1]


def users_code() -> FrameType:
    """Return the frame of the user's code that led to the caller."""
    return _users(sys._getframe(1))[0]


def _users(frame: FrameType) -> tuple[FrameType, int]:
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    return frame, level
