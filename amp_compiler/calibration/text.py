"""The ops of a calibration as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .row import Row

_SHOWN = 30  # rows of a table


def table(title: str, rows: Sequence[Row]) -> str:
    """Return the ops as a table, those that do not fit first, then by sensitivity."""
    rows = sorted(rows, key=lambda r: (-r.result.overflow, -r.overflow, -r.underflow, -r.sensitivity))
    several = Counter((row.module, row.op) for row in rows)  # a module may call an op more than once
    names = ("up to", "down to", "overflow", "flushed")
    lines = [title, f"{'op':<36} {' '.join(f'{name:>9}' for name in names)} {'sensitivity':>12}"]
    for row in rows[:_SHOWN]:
        op = f"{row.op}#{row.number}" if several[row.module, row.op] > 1 and row.number is not None else row.op
        name = f"{row.module}: {op}" if row.module else op
        name = name if len(name) <= 36 else f"…{name[-35:]}"
        lines.append(
            f"{name:<36} {row.max_abs:>9.2g} {row.min_nonzero:>9.2g} {share_text(row.overflow):>9} "
            f"{share_text(row.underflow):>9} {row.sensitivity:>12.2g}"
        )
    if len(rows) > _SHOWN:
        lines.append(f"and {len(rows) - _SHOWN} more ops: all of them are in .rows")
    return "\n".join(lines)


def share_text(share: float) -> str:
    """Return a share in percent; nothing for zero."""
    return "" if not share else f"{share:.1%}" if share >= 0.001 else "<0.1%"
