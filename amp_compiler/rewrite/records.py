"""Records of what each stage did to a graph: the history that reports and pages show."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

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

    def __getattr__(self, name: str) -> Any:
        """Make the text or the view from the snapshot, if it was not given."""
        snapshot = self.__dict__.get("_snapshot")
        if snapshot is None or name not in ("text", "view"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(snapshot, name)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "text": self.text, "view": self.view}
        state.pop("_snapshot", None)
        return state


class Snapshot:
    """A graph as a stage left it. Its text and its view are made when they are first read: most records of a compiled
    model are never looked at, and the next pass changes the graph."""

    def __init__(self, gm: fx.GraphModule, forward: Record | None, later: bool) -> None:
        self._of, self._forward = weakref.ref(gm), forward
        self._rows: list[_Row] | None = None
        # graphs with others inside are rare, and copying those takes as long as reading them
        if later and not any(ir.is_higher_order(node) for node in gm.graph.nodes):
            self._rows = _rows_of(gm.graph)
        else:
            self._read(gm)

    def is_of(self, gm: fx.GraphModule) -> bool:
        return self._of() is gm

    @property
    def text(self) -> str:
        self._read_copy()
        return self._text

    @property
    def view(self) -> GraphView:
        self._read_copy()
        return self._view

    def _read_copy(self) -> None:
        if self._rows is not None:
            holder: Any = _Holder(_graph_of(self._rows))
            self._read(holder)
            self._rows = None

    def _read(self, gm: fx.GraphModule) -> None:
        self._text = ir.format_graph(gm)
        self._view = take_view(gm, None if self._forward is None else self._forward.view)
        self._forward = None


class _Holder:
    """Stands for the module of a graph that has no graphs inside."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph


class _Row:
    """What a node was, in a tenth of the time that a copy of it takes. Arguments that were nodes are rows."""

    __slots__ = ("args", "kwargs", "meta", "name", "op", "target")

    def __init__(self, node: fx.Node, rows: dict[fx.Node, _Row]) -> None:
        self.op, self.target, self.name, self.meta = node.op, node.target, node.name, dict(node.meta)
        self.args = fx.map_arg(node.args, rows.__getitem__)  # type: ignore[arg-type]
        self.kwargs = fx.map_arg(node.kwargs, rows.__getitem__)  # type: ignore[arg-type]


def _rows_of(graph: fx.Graph) -> list[_Row]:
    rows: dict[fx.Node, _Row] = {}
    for node in graph.nodes:
        rows[node] = _Row(node, rows)
    return list(rows.values())


def _graph_of(rows: list[_Row]) -> fx.Graph:
    made = fx.Graph()
    new_of: dict[Any, fx.Node] = {}

    def node_of(arg: Any) -> Any:
        return new_of[arg] if isinstance(arg, _Row) else arg

    for row in rows:
        args, kwargs = map_aggregate(row.args, node_of), map_aggregate(row.kwargs, node_of)
        new = new_of[row] = made.create_node(row.op, row.target, args, kwargs)
        new.meta, new.name = row.meta, row.name
    return made


def record(
    name: str, seconds: float, modified: bool, gm: fx.GraphModule, graph: str, history: Sequence[Record],
    note: str = "", *, fresh: bool = True,
) -> Record:  # fmt: skip
    """Return the record of a stage. ``history``: the stages before it. ``fresh``: False if the last of them is of the
    same graph, so that nothing has changed since."""
    last = history[-1] if history else None
    known: Snapshot | None = last.__dict__.get("_snapshot") if last is not None else None
    if not fresh or (not modified and last is not None and last.graph == graph and known and known.is_of(gm)):
        log("passes", "%s %s: %.1f ms, %s", graph, name, seconds * 1e3, note or "changed nothing")
        return _like(history[-1], name=name, seconds=seconds, modified=modified, note=note)
    graphs = [inner for _, inner in ir.all_graphs(gm)]
    casts = sum(ir.is_float_cast(n) for inner in graphs for n in inner.graph.nodes)
    nodes = sum(len(inner.graph.nodes) for inner in graphs)
    before = None if graph == "forward" else next((r for r in reversed(history) if r.graph == "forward"), None)
    # a conversion frees weights while it runs, which values of a copied graph would keep
    snapshot = Snapshot(gm, before, later=graph not in ("convert", "run"))
    made = _like(Record(name, seconds, modified, "", graph, nodes, casts, note), _snapshot=snapshot)
    for shown in ("text", "view"):
        del made.__dict__[shown]
    log("passes", "%s %s: %.1f ms, %d nodes, %d casts", graph, name, seconds * 1e3, nodes, casts)
    if wants("casts") and history and history[-1].graph == graph:
        _log_casts(history[-1].view, made.view)
    return made


def _like(made: Record, **changes: Any) -> Record:
    """As ``dataclasses.replace``, but a text and a view that nobody has read are not made."""
    new = object.__new__(Record)
    new.__dict__.update(made.__dict__)
    new.__dict__.update(changes)
    return new


def _log_casts(before: GraphView, after: GraphView) -> None:
    old, new = {n.name: n for n in before.casts}, {n.name: n for n in after.casts}
    for name in [n for n in old if n not in new]:
        log("casts", "- %s: %s of %s, %s bytes", name, old[name].value, old[name].inputs[0], old[name].nbytes)
    for name in [n for n in new if n not in old]:
        log("casts", "+ %s: %s of %s, %s bytes", name, new[name].value, new[name].inputs[0], new[name].nbytes)
