"""A calibration as text: a table of its ops, and sentences about one of them."""

from __future__ import annotations

from collections import Counter

from ..common.errors import CalibrationError
from ..ir.view import GraphView
from ..policy import dtype_name
from ..runtime.record import Range
from .calibration import Calibration, Row

_SHOWN = 30  # rows of a table


def table(calibration: Calibration) -> str:
    """Return the ops as a table, those that do not fit first, then by sensitivity."""
    rows = sorted(calibration.rows, key=lambda r: (-r.overflow, -r.underflow, -r.sensitivity))
    lines = [calibration.title(), f"{'op':<36} {'up to':>9} {'down to':>9} {'overflow':>9} {'flushed':>9} {'sensitivity':>12}"]
    for row in rows[:_SHOWN]:
        name = f"{row.module}: {row.op}" if row.module else row.op
        name = name if len(name) <= 36 else f"…{name[-35:]}"
        lines.append(
            f"{name:<36} {row.max_abs:>9.2g} {row.min_nonzero:>9.2g} {_share(row.overflow):>9} "
            f"{_share(row.underflow):>9} {row.sensitivity:>12.2g}"
        )
    if len(rows) > _SHOWN:
        lines.append(f"and {len(rows) - _SHOWN} more ops: all of them are in .rows")
    return "\n".join(lines)


def _share(share: float) -> str:
    return "" if not share else f"{share:.1%}" if share >= 0.001 else "<0.1%"


def sentences(row: Row, calibration: Calibration) -> tuple[str, ...]:
    """Return what is known of one op's values."""
    batches = f"{calibration.batches} batch" + ("es" if calibration.batches != 1 else "")
    found = [f"its results are {_range(row.result)}, in {batches}{_lost(row.result, calibration)}"]
    if row.operands:
        found.append("it reads values up to " + ", ".join(f"{r.max_abs:.2g}" for r in row.operands))
    if row.gradient is not None and row.gradient.elements:
        at = f" at a loss scale of {calibration.scale:g}" if calibration.scale != 1 else ""
        found.append(f"its gradients are {_range(row.gradient)}{at}{_lost(row.gradient, calibration)}")
    found.append(f"its sensitivity is {row.sensitivity:.2g}, number {_rank(row, calibration)} of {len(calibration.rows)}")
    return tuple(found)


def _rank(row: Row, calibration: Calibration) -> int:
    return 1 + sum(other.sensitivity > row.sensitivity for other in calibration.rows)


def _range(values: Range) -> str:
    where = f" (batch {values.batch})" if values.batch else ""
    return f"between {values.min_nonzero:.2g} and {values.max_abs:.2g}{where}" if values.max_abs else "all zero"


def _lost(values: Range, calibration: Calibration) -> str:
    parts = [f"{_share(share)} {what}" for share, what in (
        (values.overflow, "overflow"), (values.underflow, "are flushed to zero"), (values.subnormal, "become subnormal"))
        if share]  # fmt: skip
    return f"; in {dtype_name(calibration.dtype)} {', '.join(parts)}" if parts else ""


def measured_by_name(calibration: Calibration, view: GraphView, where: str) -> dict[str, tuple[str, ...]]:
    """Return node name -> sentences for the nodes of a graph that the calibration knows; raise if it knows none."""
    rows = {(row.module, row.op, row.number): row for row in calibration.rows}
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for node in view.nodes:
        if node.kind == "call":
            key = node.module, node.op
            row = rows.get((*key, counts[key])) or rows.get((*key, None))
            counts[key] += 1
            if row is not None:
                found[node.name] = sentences(row, calibration)
    if not found:
        raise CalibrationError(
            f"{where} is the calibration of another model ({calibration.model or 'a function'}): none of its ops is in "
            "this one. Calibrate this model."
        )
    return found
