"""A graph as a table that fits a terminal: one op per line, below the module that it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

from ...ir.view import BACKWARD, SHORT, GraphView, NodeView
from .words import CAST, COLOURS, is_row, size

_LIMITS = (24, 20, 18, 5)  # the maximum widths of node, op, shape and dtype
_HEAD = ("node", "op", "shape", "dtype", "why")


def table(view: GraphView, width: int = 120) -> list[Text]:
    """Return the lines of a graph, without parameters and selections of outputs."""
    nodes = [n for n in view.nodes if is_row(n)]
    cells = [_cells(n) for n in nodes]
    widths = [
        max(min(max((len(c[i]) for c in [_HEAD, *cells]), default=4), limit), 4) for i, limit in enumerate(_LIMITS)
    ]
    room = max(width - sum(widths) - 2 * (len(widths) + 1), 16)
    lines = [Text("  " + _row(_HEAD, [*widths, room]), style="bold")]
    for part in ("forward", BACKWARD):
        here = [(n, c) for n, c in zip(nodes, cells, strict=True) if n.part == part]
        if view.has_backward and here:
            lines += [Text(), Text(part, style="bold reverse")]
        module: str | None = None
        for node, cell in here:
            if node.module != module and node.kind not in ("input", "output"):
                module = node.module
                lines.append(_heading(module, view))
            lines.append(_line(node, cell, widths, room))
    return lines


def _heading(module: str, view: GraphView) -> Text:
    cls = view.classes.get(module, "")
    return Text.assemble((module or "(model)", "bold blue"), (f"  {cls}" if cls else "", "dim"))


def _cells(node: NodeView) -> tuple[str, ...]:
    value = node.values[0] if node.values else None
    shape = f"[{', '.join(map(str, value.shape))}]" if value is not None else ""
    op = node.op
    if node.kind == "cast":
        op = f"cast ({size(node.nbytes)})"
    elif node.kind in ("input", "output"):
        op = node.kind
    return node.name, op, shape, SHORT.get(value.dtype, value.dtype) if value is not None else "", node.reason


def _line(node: NodeView, cell: Sequence[str], widths: Sequence[int], room: int) -> Text:
    style = CAST[0] if node.kind == "cast" else COLOURS.get(node.precision, COLOURS[""])[0]
    name, op, shape, dtype = (_fit(c, w) for c, w in zip(cell[:4], widths, strict=True))
    if node.kind == "cast" and len(cell[0]) > widths[0]:
        name = "…" + cell[0][1 - widths[0] :]  # the end of a parameter's path says more than its beginning
    return Text.assemble("  ", name, "  ", (op, style), "  ", (shape, "dim"), "  ", (dtype, f"bold {style}".strip()),
                         "  ", (_fit(cell[4], room).rstrip(), "dim"))  # fmt: skip


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(_fit(c, w) for c, w in zip(cells, widths, strict=True)).rstrip()


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def plain(lines: Iterable[Text]) -> str:
    """Return the lines as text without colours."""
    return "\n".join(line.plain.rstrip() for line in lines)
