"""A calibration as one HTML page: ops coloured by range and sensitivity, and the exponents of each on a click."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..inspect.render.shaded import cells, shaded_page
from .row import Row

_NAMES = ("op", "up to", "down to", "overflow", "flushed", "sensitivity")


def page(title: str, rows: Sequence[Row], dtype: torch.dtype) -> str:
    """Return the page. A row is red if values overflow, yellow if some are flushed to zero, and green otherwise; the
    darker its last cell, the larger the sensitivity."""
    largest = max((row.sensitivity for row in rows), default=0.0)
    return shaded_page(title, {"": (_NAMES, [_row(row, largest, dtype) for row in rows])})


def _row(row: Row, largest: float, dtype: torch.dtype) -> str:
    kind = "overflows" if row.overflow else "vanishes" if row.underflow else "fits"
    name = f"{row.module}: {row.op}" if row.module else row.op
    decades = math.log10(largest) - math.log10(row.sensitivity) if row.sensitivity else 8.0
    figures = (f"{row.max_abs:.2g}", f"{row.min_nonzero:.2g}", f"{row.overflow:.2%}", f"{row.underflow:.2%}",
               f"{row.sensitivity:.2g}")  # fmt: skip
    ranges = {"results": row.result} | ({} if row.gradient is None else {"gradients": row.gradient})
    shades = {len(figures) - 1: max(1 - decades / 8, 0.0)}
    return cells(kind, name, figures, shades=shades, detail=row.source, ranges=ranges, dtype=dtype)
