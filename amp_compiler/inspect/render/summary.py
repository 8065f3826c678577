"""A report as text that fits a terminal: totals, then module by module, then what is unusual; or every row."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from ...policy import LEVELS, Rule
from ..data import LOW, ReportData, Row, work_line
from .modules import ROOT, merged_names, summarize
from .words import CAST, COLOURS, count, size

WIDTH = 100  # of output that does not go to a terminal
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}  # as reasons write them
_NARROW = 60  # no table gets narrower
_KINDS = 12  # the most reasons for fp32 that a summary lists
#: rules of ops that are in fp32 because of their inputs or results, not because of a choice
_ORDINARY = (Rule.CREATION, Rule.NEUTRAL, Rule.NO_FLOAT, Rule.INPUT, Rule.SELECTED, Rule.TRANSPARENT, Rule.SEALED,
             Rule.LEVEL)  # fmt: skip
#: rules by which an op may have followed its inputs; its causes are the nodes that it followed
_FOLLOWING = (Rule.TABLE, Rule.WHITE_LIST, Rule.BLACK_LIST, Rule.FOLLOW_LIST)


def terminal_width() -> int:
    """Return the width of the terminal, or ``COLUMNS``; 100 if there is none."""
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, _NARROW)


def lines(report: ReportData, width: int | None = None, hint: bool = True) -> list[Text]:
    """Return what ``print(report)`` shows. ``hint``: end with what to type next in Python."""
    width = width or terminal_width()
    if not report.rows and not report.not_captured:
        return _paragraph("amp report: " + ("; ".join(report.notes) or "no op captured"), width)
    made = [*totals(report, width), Text(), *_modules(report, width)]
    for part in (_in_fp32(report, width), _limits(report, width), _remarks(report, width)):
        made += [Text(), *part] if part else []
    return [*made, Text(), *_paragraph(_hint(report), width, style="dim")] if hint and report.rows else made


def _hint(report: ReportData) -> str:
    """Return what to type next, with names from this report."""
    kept = [r for r in report.rows if r.precision == "float32" and r.rule in (Rule.TABLE, Rule.WIDE)]
    kept = [r for r in kept if not _is_ordinary(r)]
    low = [r for r in report.rows if r.precision in LOW]
    told = "Every op: print(report.full())."
    if not kept and not low:
        return told
    one = (kept or low)[0]
    change = f'low: white_list=["{one.op}"]' if kept else f'in fp32: black_list=["{one.op}"]'
    if not kept and one.module:
        change += f' or exclude=["{one.module}"]'
    return f'{told} One op: report.why("{one.op}"). To run it {change}.'


def full(report: ReportData, width: int | None = None) -> list[Text]:
    """Return every row below its module, followed by the rest of the report."""
    width = width or terminal_width()
    if not report.rows:
        return lines(report, width)
    first_column = min(max(len(_named(r)) for r in report.rows), width // 3)
    second_column = max(len(SHORT.get(r.precision, r.precision)) for r in report.rows)
    room = width - first_column - second_column - 6
    made: list[Text] = []
    module: str | None = None
    for row in report.rows:
        if row.module != module:
            module = row.module
            made.append(Text(_fit(module or ROOT, width), style="bold blue"))
        style = COLOURS.get(row.precision, COLOURS[""])[0]
        first, *rest = textwrap.wrap(row.reason, room) or [""]
        made.append(
            Text.assemble("  ", (_cut(_named(row), first_column), style), "  ",
                          (SHORT.get(row.precision, row.precision).ljust(second_column), style), "  ", (first, "dim"))
        )  # fmt: skip
        made += [Text(" " * (width - room) + more, style="dim") for more in rest]
    return [*made, Text(), *ending(report, width)]


def ending(report: ReportData, width: int, graph: str = "") -> list[Text]:
    """Return the lines below a list of all ops: the totals, what was not captured, notes and kernels. ``graph``: the
    one in which the casts are counted."""
    remarks = _remarks(report, width)
    return [*totals(report, width, graph), *([Text(), *remarks] if remarks else [])]


def _named(row: Row) -> str:
    """Return the node's name, and its op if the name doesn't show it."""
    return row.node if row.node.rstrip("_0123456789") == row.op.rstrip("_0123456789") else f"{row.node} ({row.op})"


def totals(report: ReportData, width: int, graph: str = "") -> list[Text]:
    """Return the totals of a report, in two or three lines."""
    counts: list[Text | str] = []
    for name, number in sorted(report.by_precision.items()):
        counts += [", " if counts else "", Text(f"{number} {name}", style=COLOURS.get(name, COLOURS[""])[0])]
    where = f" in the {graph} graph" if graph else ""
    found = [
        Text.assemble(f"level {report.level}, {report.dtype}: {count(len(report.rows), 'op')} (", *counts, ")"),
        Text.assemble((count(report.casts, "cast"), CAST[0]), f"{where} ({size(report.cast_bytes)}); matmul and "
                      f"convolution FLOPs in low precision: {report.low_flops_share:.1%}"),
    ]  # fmt: skip
    made = [line for one in found for line in ([one] if len(one.plain) <= width else _paragraph(one.plain, width))]
    return made + (_paragraph(work_line(report.work), width) if report.work is not None else [])


# -------------------------------------------------------------------------------------------- by module


def _modules(report: ReportData, width: int) -> list[Text]:
    found = summarize(report)
    precisions = [name for name in COLOURS if any(m.ops[name] for m in found)]
    flops = sum(m.flops for m in found)
    head = ["module", "ops", *(SHORT.get(name, name) for name in precisions)]
    head += ["FLOPs", "low FLOPs"] if flops else []
    head += ["casts"] if report.casts_by_module is not None else []
    body = []
    for m in found:
        number = sum(m.ops.values())
        cells = [m.name + (f" ×{m.alike}" if m.alike > 1 else ""), f"{number:,}" if number else "-"]
        cells += [f"{m.ops[name]:,}" if m.ops[name] else "-" for name in precisions]
        if flops:
            cells += [f"{m.flops / flops:.1%}", f"{m.low_flops / m.flops:.0%}"] if m.flops else ["-", "-"]
        body.append([*cells, *([str(m.casts or "-")] if report.casts_by_module is not None else [])])
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    widths[0] = max(min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)), 8)
    styles = ["blue", "", *(COLOURS[name][0] for name in precisions), "", "", CAST[0]]
    made = [Text("  ".join([_fit(head[0], widths[0]), *_right(head[1:], widths[1:])]), style="bold")]
    for row in body:
        cells = [_fit(row[0], widths[0]), *_right(row[1:], widths[1:])]
        parts = [(cell, style) for cell, style in zip(cells, styles, strict=False)]
        made.append(Text("  ").join(Text(cell, style=style) for cell, style in parts))
    return made


def _right(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]


# ------------------------------------------------------------------------------------------- the unusual


def _in_fp32(report: ReportData, width: int) -> list[Text]:
    """Return the ops in fp32, grouped by reason; nothing at O0, where all ops are in fp32."""
    rows = [r for r in report.rows if r.precision == "float32" and LEVELS[report.level].rewrites]
    if not rows:
        return []
    made, names = [Text("in float32", style="bold")], merged_names(report)
    kinds = _by_reason(r for r in rows if not _is_ordinary(r))
    for reason, members in kinds[:_KINDS]:
        made += _item(_listed(members, names), reason, width)
    if len(kinds) > _KINDS:
        made += _paragraph(f"and {count(len(kinds) - _KINDS, 'more reason')}: report.full()", width, "  ")
    if rest := [r for r in rows if _is_ordinary(r)]:
        why = "read an fp32 value (a parameter, or the result of an fp32 op) or constants only"
        made += _item(_listed(rest, names), why, width)
    return made


def _is_ordinary(row: Row) -> bool:
    return row.rule in _ORDINARY or (row.rule in _FOLLOWING and bool(row.causes))


def _limits(report: ReportData, width: int) -> list[Text]:
    """Return the numbers that became the limit of the low-precision dtype."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.limit:
            found.setdefault(row.limit, []).append(row)
    if not found:
        return []
    names = merged_names(report)
    made = [line for what, rows in found.items() for line in _item(_listed(rows, names), what, width)]
    return [Text("constants", style="bold"), *made]


def _remarks(report: ReportData, width: int) -> list[Text]:
    """Return what was not captured, the notes, and the kernels that replace ATen's."""
    made: list[Text] = []
    for what in report.not_captured:
        made += _paragraph(f"not captured: {what}", width, style="yellow")
    for note in report.notes:
        made += _paragraph(f"note: {note}", width, style="yellow")
    for kernel in report.kernels:
        made += _paragraph(f"kernel: {kernel}", width)
    if report.kernels and report.scratch_bytes:
        size = f"{report.scratch_bytes / 2**20:.1f} MiB"
        made += _paragraph(f"scratch memory that kernels keep in this process, for all models: {size}", width)
    return made


def _by_reason(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows by reason, the largest group first; reasons that differ only in the name of a node are the same."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        reason = row.reason.removesuffix(f"; {row.limit}")
        if row.rule == Rule.ASKED:
            reason = "computes with a value, which the model's code casts to float32"
        found.setdefault(reason, []).append(row)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _listed(rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """Return text such as ``24 × softmax, sum in encoder.layer.0-11.attention``."""
    ops = [op for op, _ in Counter(r.op for r in rows).most_common()]
    places = list(dict.fromkeys(names[r.module] for r in rows))
    where = places[0] if len(places) == 1 else f"{places[0]} and {count(len(places) - 1, 'more module')}"
    return f"{len(rows)} × {', '.join(ops[:4])}{', …' if len(ops) > 4 else ''} in {where}"


# ----------------------------------------------------------------------------------------------- layout


def _item(what: str, why: str, width: int) -> list[Text]:
    return [*_paragraph(what, width, "  "), *_paragraph(why, width, "      ", style="dim")]


def _paragraph(text: str, width: int, indent: str = "", style: str = "") -> list[Text]:
    """Wrap text at spaces; a path or a line of code that is wider than the terminal stays whole, to be copied."""
    more = indent if indent else "    "
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=more, break_long_words=False,
                            break_on_hyphens=False)  # fmt: skip
    return [Text(line, style=style) for line in wrapped]


def _fit(text: str, width: int) -> str:
    """Shorten a path at its beginning: the end says more."""
    return text.ljust(width) if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
