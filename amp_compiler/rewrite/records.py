"""Records of what each stage did to a graph: the history that reports and pages show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from .. import ir
from ..common.logs import log, wants
from ..ir.view import GraphView, take_view


@dataclass(frozen=True)
class Record:
    """One stage of one graph: what ran, how long, whether it changed anything, and the graph as text and as values."""

    name: str
    seconds: float
    modified: bool
    text: str
    graph: str = "forward"
    nodes: int = 0
    casts: int = 0
    note: str = ""
    view: GraphView = field(default_factory=GraphView, repr=False, compare=False)


def record(
    name: str, seconds: float, modified: bool, gm: fx.GraphModule, graph: str, history: Sequence[Record],
    note: str = "", *, fresh: bool = True,
) -> Record:  # fmt: skip
    """Return the record of a stage. ``history``: the stages before it. ``fresh``: False if the last of them is of the
    same graph, so that nothing has changed since."""
    if not fresh:
        log("passes", "%s %s: %.1f ms, %s", graph, name, seconds * 1e3, note or "changed nothing")
        return replace(history[-1], name=name, seconds=seconds, modified=modified, note=note)
    text, last = ir.format_graph(gm), history[-1] if history else None
    if not modified and last is not None and (last.graph, last.text) == (graph, text):
        return record(name, seconds, modified, gm, graph, history, note, fresh=False)
    graphs = [inner for _, inner in ir.all_graphs(gm)]
    casts = sum(ir.is_float_cast(n) for inner in graphs for n in inner.graph.nodes)
    nodes = sum(len(inner.graph.nodes) for inner in graphs)
    before = None if graph == "forward" else next((r.view for r in reversed(history) if r.graph == "forward"), None)
    made = Record(name, seconds, modified, text, graph, nodes, casts, note, take_view(gm, before))
    log("passes", "%s %s: %.1f ms, %d nodes, %d casts", graph, name, seconds * 1e3, nodes, casts)
    if wants("casts") and history and history[-1].graph == graph:
        _log_casts(history[-1].view, made.view)
    return made


def _log_casts(before: GraphView, after: GraphView) -> None:
    old, new = {n.name: n for n in before.casts}, {n.name: n for n in after.casts}
    for name in [n for n in old if n not in new]:
        log("casts", "- %s: %s of %s, %s bytes", name, old[name].value, old[name].inputs[0], old[name].nbytes)
    for name in [n for n in new if n not in old]:
        log("casts", "+ %s: %s of %s, %s bytes", name, new[name].value, new[name].inputs[0], new[name].nbytes)
