"""Explain why a node has its precision: the chain of reasons that leads to it, the casts around it, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from ...common.errors import ArgumentError
from ...common.messages import nearest_path, suggestion
from ...ir.view import INPUTS, SHORT, GraphView, NodeView
from ...policy import LEVELS, Rule, matches, words_for
from ...policy.ops.names import canonical
from ...policy.ops.row import OpClass
from .select import find, modules
from .words import CAST, COLOURS, count, size

_LENGTH = 12  # the longest chain


@dataclass(frozen=True)
class Link:
    """One step of a chain: a node and what decided on it."""

    node: NodeView
    by: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Why one node has its precision. ``chain``: from the node up to the rule. ``casts_in`` and ``casts_out``: around
    it in the forward graph. ``runs_as``: its nodes in the graph that runs, with the casts that are left there.
    ``measured``: what a calibration says about its values, one sentence each."""

    node: NodeView
    chain: tuple[Link, ...]
    casts_in: tuple[NodeView, ...]
    casts_out: tuple[NodeView, ...]
    runs_as: tuple[NodeView, ...] = ()
    casts_left: tuple[NodeView, ...] = ()
    measured: tuple[str, ...] = ()

    @property
    def cast_bytes(self) -> int:
        """The bytes that the casts around it write in the forward graph."""
        return sum(n.nbytes for n in (*self.casts_in, *self.casts_out))


def chosen(
    view: GraphView, node: str | None, op: str | None, module: str | None, runs: GraphView | None = None
) -> list[NodeView]:
    """Return the requested nodes; if there are none, raise with a suggestion. ``node`` may name one of the graph that
    runs."""
    if node is not None:
        return [runs.by_name[node] if runs is not None and node not in view.by_name and node in runs.by_name
                else find(view, node)]  # fmt: skip
    found = [n for n in view.nodes if n.kind == "call"]
    if op is not None:
        names = {op.removeprefix("aten."), _canonical(op)}
        found = [n for n in found if n.op in names]
        if not found:
            there = sorted({n.op for n in view.nodes if n.kind == "call"})
            hint = suggestion(op, there, most=3)
            raise ArgumentError(f"The graph has no op {op!r}; it has {', '.join(there)}.", hint=hint)
    if module is not None:
        found = [n for n in found if matches(module, n.module)]
        if not found:
            hint = nearest_path(module, modules(view))
            raise ArgumentError(f"No op of the graph is in a module {module!r}.", hint=hint)
    return found


def _canonical(op: str) -> str:
    try:
        return canonical(op)
    except ArgumentError:
        return op


def explain(node: NodeView, view: GraphView, level: str, runs: GraphView | None = None) -> Explanation:
    """Explain why ``node`` of the forward graph ``view``, or of the graph that runs, has its precision."""
    if runs is not None and view.by_name.get(node.name) is not node:
        known = view.by_name.get(node.origin)
        link = Link(node, f"made from {node.origin}" if node.origin else words_for(node.rule), node.reason)
        return Explanation(node, (link, *(_chain(known, view, level) if known is not None else ())),
                           *_casts_around(node, runs))  # fmt: skip
    made = [n for n in runs.nodes if n.origin == node.name and n.kind == "call"] if runs is not None else []
    left: dict[str, NodeView] = {}
    for one in made:
        assert runs is not None
        for other in (*(runs.by_name[i] for i in one.inputs if i in runs.by_name), *runs.users.get(one.name, ())):
            if other.kind == "cast":
                left[other.name] = other
    return Explanation(
        node, tuple(_chain(node, view, level)), *_casts_around(node, view), tuple(made), tuple(left.values())
    )


def _casts_around(node: NodeView, view: GraphView) -> tuple[tuple[NodeView, ...], tuple[NodeView, ...]]:
    read = (view.by_name[i] for i in node.inputs if i in view.by_name)
    return tuple(n for n in read if n.kind == "cast"), tuple(n for n in view.users[node.name] if n.kind == "cast")


def _chain(node: NodeView, view: GraphView, level: str) -> list[Link]:
    links: list[Link] = []
    seen: set[str] = set()
    step: NodeView | None = node
    while step is not None and step.name not in seen and len(links) < _LENGTH:
        seen.add(step.name)
        links.append(Link(step, _by(step, level), step.reason))
        step = _decided_by(step, view)
    return links


def _by(node: NodeView, level: str) -> str:
    rule = words_for(node.rule)
    if node.kind in INPUTS:
        return f"a {node.kind}: keeps its dtype"
    if node.rule == Rule.TABLE and node.cls:
        says = LEVELS[level].says(OpClass(node.cls)) or "it moves or selects values: it follows its input"
        return f"{rule} has {node.op} as {node.cls.upper()}; {says}"
    return rule


def _decided_by(node: NodeView, view: GraphView) -> NodeView | None:
    """Return the node that this one's precision comes from, if there is one in the graph."""
    cause = next((view.by_name[name] for name in node.causes if name in view.by_name), None)
    return None if cause is None or node.kind == "cast" else _behind(cause, view)


def _behind(node: NodeView, view: GraphView) -> NodeView:
    """Return the source of a cast; other nodes unchanged."""
    while node.kind == "cast" and node.inputs and node.inputs[0] in view.by_name:
        node = view.by_name[node.inputs[0]]
    return node


# ---------------------------------------------------------------------------------------------- as text


def lines(found: Explanation, view: GraphView) -> list[Text]:
    """Return the explanation as lines for a terminal."""
    node = found.node
    colour = COLOURS.get(node.precision, COLOURS[""])[0]
    text = [
        Text.assemble((node.title, "bold"), f"  {node.op}  ", (node.value, "dim"), "  ",
                      (node.precision or node.kind, f"bold {colour}".strip())),
    ]  # fmt: skip
    if node.module:
        cls = view.classes.get(node.module, "")
        text.append(Text.assemble("  module   ", (node.module, "blue"), f" ({cls})" if cls else ""))
    if node.source:
        text.append(Text(f"  source   {node.source}"))
    for place, link in enumerate(found.chain):
        if place:
            text.append(Text.assemble("  because  ", (link.node.title, "bold"), f" ({link.node.op}) is ",
                                      (link.node.precision or link.node.value, "bold")))  # fmt: skip
        text.append(Text(f"  {'why' if not place else '':<8} {link.by}"))
        if link.reason and link.reason not in link.by:
            text.append(Text(f"  {'':<8} {link.reason}", style="dim"))
    for place, sentence in enumerate(found.measured):
        text.append(Text(f"  {'' if place else 'measured':<8} {sentence}"))
    for what, casts in (("reads", found.casts_in), ("is read", found.casts_out)):
        for cast in casts:
            text.append(Text(f"  {what:<8} {_cast(cast, view, named_input=what == 'reads')}", style=CAST[0]))
    around = (*found.casts_in, *found.casts_out)
    if around:
        text.append(Text(f"  cost     {count(len(around), 'cast')} around it, {size(found.cast_bytes)} written"))
    else:
        text.append(Text("  cost     no cast around it"))
    if found.runs_as:
        names = ", ".join(dict.fromkeys(n.op for n in found.runs_as))
        left = sum(n.nbytes for n in found.casts_left)
        text.append(Text(f"  runs as  {names}; {count(len(found.casts_left), 'cast')} left around it, {size(left)}"))
    return text


def _cast(node: NodeView, view: GraphView, named_input: bool) -> str:
    source = view.by_name.get(node.inputs[0]) if node.inputs else None
    name = source.title if source is not None else node.inputs[0] if node.inputs else "?"
    before = SHORT.get(source.values[0].dtype, "") if source is not None and source.values else ""
    readers = [reader.title for reader in view.users.get(node.name, ()) if not named_input]
    by = f" by {', '.join(readers)}" if readers else ""
    return f"{name} cast {before} → {SHORT.get(node.values[0].dtype, '')}, {size(node.nbytes)}{by}"


def document(found: Sequence[Explanation]) -> list[dict[str, Any]]:
    """Return explanations as plain values."""
    from .json import node_document

    return [
        {
            "node": node_document(one.node),
            "chain": [{"node": k.node.name, "op": k.node.op, "precision": k.node.precision, "by": k.by,
                       "reason": k.reason} for k in one.chain],
            "casts_in": [node_document(n) for n in one.casts_in],
            "casts_out": [node_document(n) for n in one.casts_out],
            "cast_bytes": one.cast_bytes,
            "runs_as": [n.name for n in one.runs_as],
            "casts_left": [node_document(n) for n in one.casts_left],
            **({"measured": list(one.measured)} if one.measured else {}),
        }
        for one in found
    ]  # fmt: skip
