"""A report as an HTML table, for notebooks."""

from __future__ import annotations

from html import escape

from ..report import Report
from .words import COLOURS, count, size

_ROWS = 500  # a notebook is no place for more; to_html() is


def table(report: Report) -> str:
    """The rows, coloured by precision, the totals below."""
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in ("node", "op", "module", "precision", "why"))
    body = "".join(
        f"<tr>{_cell(row.node)}{_cell(row.op)}{_cell(row.module)}{_precision(row.precision)}"
        f"{_cell(row.reason, row.source)}</tr>"
        for row in report.rows[:_ROWS]
    )
    left = len(report.rows) - _ROWS
    more = f"<p>… and {left} more: report.to_html('graph.html')</p>" if left > 0 else ""
    notes = "".join(f"<p>{escape(text)}</p>" for text in (*report.not_captured, *report.notes))
    counts = ", ".join(f"{number} {escape(name)}" for name, number in sorted(report.by_precision.items()))
    totals = (
        f"level {escape(report.level)}, {escape(report.dtype)}: {count(len(report.rows), 'op')} ({counts}); "
        f"{count(report.casts, 'cast')}, {size(report.cast_bytes)}; {report.low_flops_share:.1%} of the matmul and "
        "convolution FLOPs in low precision"
    )
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}<p>{totals}</p>{notes}</div>"


def _cell(text: str, tip: str = "") -> str:
    return f"<td style='text-align:left' title='{escape(tip)}'>{escape(text)}</td>"


def _precision(name: str) -> str:
    _, paper, ink = COLOURS.get(name, COLOURS[""])
    return f"<td style='background:{paper};color:{ink};text-align:left'>{escape(name)}</td>"
