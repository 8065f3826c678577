"""A calibration as one HTML page: ops coloured by range and sensitivity, and the exponents of each on a click."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import torch

from ..runtime.record import Range
from .row import Row

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
summary, .head { display: grid; grid-template-columns: 3fr repeat(5, 1fr); gap: .5em; padding: .2em .5em }
summary { cursor: pointer }
.head { font-weight: bold }
summary span:not(:first-child) { text-align: right }
.overflows { background: #f9c9c4 } .vanishes { background: #fde9b8 } .fits { background: #e4f2e4 }
svg { margin: .5em 1em } text { font-size: 10px } small { color: #555; margin-left: 1em }
"""


def page(title: str, rows: Sequence[Row], dtype: torch.dtype) -> str:
    """Return the page. A row is red if values overflow, yellow if some are flushed to zero, and green otherwise; the
    darker its last cell, the larger the sensitivity."""
    largest = max((row.sensitivity for row in rows), default=0.0)
    names = ("op", "up to", "down to", "overflow", "flushed", "sensitivity")
    head = "".join(f"<span>{name}</span>" for name in names)
    body = "\n".join(_row(row, largest, dtype) for row in rows)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body data-ready=yes>\n<h1>{escape(title)}</h1>\n"
        f'<div class="head">{head}</div>\n{body}\n</body></html>\n'
    )


def _row(row: Row, largest: float, dtype: torch.dtype) -> str:
    kind = "overflows" if row.overflow else "vanishes" if row.underflow else "fits"
    name = f"{row.module}: {row.op}" if row.module else row.op
    decades = math.log10(largest) - math.log10(row.sensitivity) if row.sensitivity else 8.0
    dark = max(1 - decades / 8, 0.0)
    figures = (f"{row.max_abs:.2g}", f"{row.min_nonzero:.2g}", f"{row.overflow:.2%}", f"{row.underflow:.2%}")
    cells = "".join(f"<span>{figure}</span>" for figure in figures)
    shade = f'<span style="background: rgba(60, 90, 200, {dark * 0.6:.2f})">{row.sensitivity:.2g}</span>'
    charts = _histogram("results", row.result, dtype)
    if row.gradient is not None:
        charts += _histogram("gradients", row.gradient, dtype)
    return (
        f'<details><summary class="{kind}"><span>{escape(name)}</span>{cells}{shade}</summary>'
        f"<small>{escape(row.source)}</small><br>{charts}</details>"
    )


def _histogram(name: str, values: Range, dtype: torch.dtype) -> str:
    """Return the exponents as bars; those that the dtype does not hold in full are red."""
    if not values.exponents:
        return ""
    first, last = values.exponents[0][0], values.exponents[-1][0]
    most = max(count for _, count in values.exponents)
    limits = torch.finfo(dtype)
    bars = []
    for exponent, count in values.exponents:
        height = max(round(60 * count / most), 1)
        colour = "#4a7" if limits.smallest_normal <= 2.0**exponent <= limits.max else "#d43"
        bars.append(
            f'<rect x="{(exponent - first) * 8}" y="{60 - height}" width="7" height="{height}" fill="{colour}">'
            f"<title>2^{exponent}: {count:,}</title></rect>"
        )
    width = max((last - first + 1) * 8, 140)
    return (
        f'<svg width="{width}" height="76" role="img" aria-label="exponents of the {name}">{"".join(bars)}'
        f'<text x="0" y="74">{name}: 2^{first} to 2^{last}</text></svg>'
    )
