"""The levels."""

from __future__ import annotations

import difflib

from ..common.errors import ArgumentError

LEVELS = ("O0", "O1", "auto", "O2", "O3")


def check_level(level: object) -> str:
    """``level`` if it is one, else an error that names the nearest."""
    if level in LEVELS:
        return str(level)
    near = difflib.get_close_matches(str(level).upper(), LEVELS, n=1, cutoff=0.4)
    if str(level).lower() == "auto":
        near = ["auto"]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise ArgumentError(f"Unknown level {level!r}: choose one of {', '.join(LEVELS)}.{hint}")
