"""The difference between two graphs of one model: which ops changed precision, which casts were added and removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ...ir.view import INPUTS, SHORT, GraphView, NodeView
from .json import SCHEMA_VERSION
from .words import CAST, COLOURS, count, size

Cast = tuple[str, str, int, str]  # what is cast, to which dtype, bytes, forward or backward


@dataclass(frozen=True)
class Difference:
    """What differs between two graphs. ``changed``: (before, after) for each op in both whose precision changed."""

    old: GraphView
    new: GraphView
    before: str
    after: str
    changed: tuple[tuple[NodeView, NodeView], ...]
    came: tuple[NodeView, ...]
    went: tuple[NodeView, ...]
    casts_came: tuple[Cast, ...]
    casts_went: tuple[Cast, ...]


def difference(
    old: GraphView, new: GraphView, before: str, after: str, casts: tuple[GraphView, GraphView] | None = None
) -> Difference:
    """Compare two graphs by the names of their nodes. ``casts``: other graphs whose casts to compare."""
    mine, yours = _ops(old), _ops(new)
    changed = tuple(
        (mine[name], node) for name, node in yours.items() if name in mine and mine[name].precision != node.precision
    )
    came = tuple(node for name, node in yours.items() if name not in mine)
    went = tuple(node for name, node in mine.items() if name not in yours)
    first, second = casts or (old, new)
    a, b = _casts(first), _casts(second)
    return Difference(
        first, second, before, after, changed, came, went, tuple((b - a).elements()), tuple((a - b).elements())
    )


def _ops(view: GraphView) -> dict[str, NodeView]:
    return {n.name: n for n in view.nodes if n.kind == "call"}


def _casts(view: GraphView) -> Counter[Cast]:
    found: Counter[Cast] = Counter()
    for node in view.casts:
        source = view.by_name.get(node.inputs[0]) if node.inputs else None
        name = "?" if source is None else source.label if source.kind in INPUTS and source.label else source.name
        found[(name, node.values[0].dtype, node.nbytes, node.part)] += 1
    return found


def _totals(view: GraphView) -> dict[str, Any]:
    return {
        "casts": len(view.casts),
        "cast_bytes": sum(n.nbytes for n in view.casts),
        "by_precision": dict(Counter(n.precision for n in view.nodes if n.kind == "call")),
    }


def document(found: Difference) -> dict[str, Any]:
    """Return the difference as plain values (``difference`` in schema.json)."""

    def casts(given: Sequence[Cast]) -> list[dict[str, Any]]:
        return [{"source": s, "to": to, "bytes": nbytes, "part": part} for s, to, nbytes, part in given]

    return {
        "schema": SCHEMA_VERSION,
        "before": found.before,
        "after": found.after,
        "changed": [
            {"node": new.name, "op": new.op, "module": new.module, "before": old.precision, "after": new.precision,
             "reason": new.reason}
            for old, new in found.changed
        ],
        "came": [n.name for n in found.came],
        "went": [n.name for n in found.went],
        "casts_came": casts(found.casts_came),
        "casts_went": casts(found.casts_went),
        "totals": {"before": _totals(found.old), "after": _totals(found.new)},
    }  # fmt: skip


def table(found: Difference, width: int = 120) -> list[Text]:
    """Return the difference as lines for a terminal."""
    lines = [Text.assemble(("before: ", "bold"), found.before, "   ", ("after: ", "bold"), found.after)]
    lines += [Text(), Text(f"{count(len(found.changed), 'op')} with another precision", style="bold")]
    module: str | None = None
    names = max((len(n.name) for _, n in found.changed), default=4)
    for old, new in found.changed:
        if new.module != module:
            module = new.module
            lines.append(Text(module or "(model)", style="bold blue"))
        line = Text.assemble(
            "  ", new.name.ljust(names), "  ", _precision(old.precision), " → ", _precision(new.precision), "  ",
            (new.reason, "dim"),
        )  # fmt: skip
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    for what, sign, nodes in (("added", "+", found.came), ("removed", "-", found.went)):
        if nodes:
            lines += [Text(), Text(f"{count(len(nodes), 'op')} {what}", style="bold")]
            lines += [Text(f"  {sign} {n.name} ({n.op})") for n in nodes]
    for what, sign, casts in (("added", "+", found.casts_came), ("removed", "-", found.casts_went)):
        total = sum(nbytes for _, _, nbytes, _ in casts)
        lines += [Text(), Text(f"{count(len(casts), 'cast')} {what} ({size(total)})", style="bold")]
        for source, to, nbytes, part in casts:
            where = "" if part == "forward" else "  backward"
            lines.append(Text(f"  {sign} {source} → {SHORT.get(to, to)}  {size(nbytes)}{where}", style=CAST[0]))
    lines.append(Text())
    for name, view in (("before", found.old), ("after", found.new)):
        totals = _totals(view)
        ops = ", ".join(f"{n} {p}" for p, n in sorted(totals["by_precision"].items()))
        lines.append(Text(f"{name}: {ops}; {count(totals['casts'], 'cast')}, {size(totals['cast_bytes'])}"))
    return lines


def _precision(name: str) -> Text:
    return Text(name or "-", style=COLOURS.get(name, COLOURS[""])[0])
