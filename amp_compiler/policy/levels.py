"""The levels."""

from __future__ import annotations

from ..common.errors import ArgumentError
from ..common.messages import suggestion

LEVELS = ("O0", "O1", "auto", "O2", "O3")


def check_level(level: object) -> str:
    """``level`` if it is one, else an error that names the nearest."""
    if level in LEVELS:
        return str(level)
    given = "auto" if str(level).lower() == "auto" else str(level).upper()
    hint = suggestion(given, LEVELS, cutoff=0.4)
    raise ArgumentError(f"Unknown level {level!r}: choose one of {', '.join(LEVELS)}.", hint=hint)
