"""Sentences about the measured values of an op, for ``explain``."""

from __future__ import annotations

from ..common.errors import CalibrationError
from ..ir.view import GraphView
from ..policy import dtype_name
from ..runtime.record import Range
from .calibration import Calibration
from .row import Row
from .text import share_text


def sentences(row: Row, calibration: Calibration) -> tuple[str, ...]:
    """Return what is known of one op's values."""
    batches = f"{calibration.batches} batch" + ("es" if calibration.batches != 1 else "")
    found = [f"its results are {_range(row.result)}, in {batches}{_lost(row.result, calibration)}"]
    if row.operands:
        found.append("it reads values up to " + ", ".join(f"{r.max_abs:.2g}" for r in row.operands))
    if row.gradient is not None and row.gradient.elements:
        at = f" at a loss scale of {calibration.scale:g}" if calibration.scale != 1 else ""
        found.append(f"its gradients are {_range(row.gradient)}{at}{_lost(row.gradient, calibration)}")
    rank = 1 + sum(other.sensitivity > row.sensitivity for other in calibration.rows)
    found.append(f"its sensitivity is {row.sensitivity:.2g}, number {rank} of {len(calibration.rows)}")
    return tuple(found)


def _range(values: Range) -> str:
    where = f" (batch {values.batch})" if values.batch else ""
    return f"between {values.min_nonzero:.2g} and {values.max_abs:.2g}{where}" if values.max_abs else "all zero"


def _lost(values: Range, calibration: Calibration) -> str:
    shares = (values.overflow, values.underflow, values.subnormal)
    words = ("overflow", "are flushed to zero", "become subnormal")
    parts = [f"{share_text(share)} {what}" for share, what in zip(shares, words, strict=True) if share]
    return f"; in {dtype_name(calibration.dtype)} {', '.join(parts)}" if parts else ""


def measured_by_name(calibration: Calibration, view: GraphView, where: str) -> dict[str, tuple[str, ...]]:
    """Return node name -> sentences for the nodes of a graph that the calibration knows; raise if it knows none."""
    rows = {(row.module, row.op, row.number): row for row in calibration.rows}
    found = {}
    for node in view.nodes:
        if node.kind == "call":
            row = rows.get((node.module, node.op, node.number)) or rows.get((node.module, node.op, None))
            if row is not None:
                found[node.name] = sentences(row, calibration)
    if not found:
        raise CalibrationError(
            f"{where} is the calibration of another model ({calibration.model or 'a function'}): none of its ops is in "
            "this one. Calibrate this model."
        )
    return found
