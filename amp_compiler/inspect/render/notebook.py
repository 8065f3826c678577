"""A report for notebooks: the summary as it prints, and every op in a table that opens on a click."""

from __future__ import annotations

from html import escape

from ..data import ReportData
from .summary import WIDTH, lines
from .text import plain
from .words import COLOURS, count

_ROWS = 500  # a notebook isn't the place for more; to_html() is


def table(report: ReportData) -> str:
    """Return the summary, and the rows colored by precision, as HTML."""
    told = f"<pre style='line-height:1.25'>{escape(plain(lines(report, WIDTH)))}</pre>"
    if not report.rows:
        return f"<div>{told}</div>"
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in ("node", "op", "module", "precision", "why"))
    body = "".join(
        f"<tr>{_cell(row.node)}{_cell(row.op)}{_cell(row.module)}{_precision(row.precision)}"
        f"{_cell(row.reason, row.source)}</tr>"
        for row in report.rows[:_ROWS]
    )
    left = len(report.rows) - _ROWS
    more = f"<p>… and {left} more: report.to_html('graph.html')</p>" if left > 0 else ""
    rows = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
    return f"<div>{told}<details><summary>{count(len(report.rows), 'op')}</summary>{rows}</details></div>"


def _cell(text: str, tip: str = "") -> str:
    return f"<td style='text-align:left' title='{escape(tip)}'>{escape(text)}</td>"


def _precision(name: str) -> str:
    _, paper, ink = COLOURS.get(name, COLOURS[""])
    return f"<td style='background:{paper};color:{ink};text-align:left'>{escape(name)}</td>"
