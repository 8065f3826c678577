"""A graph as plain values, which renderers, the diff and ``explain`` can read after the graph itself has changed.

A pass rewrites a graph in place, so the pipeline takes a ``GraphView`` after each one. It holds no tensor and no FX
node, only names, ops, shapes, dtypes, reasons, and the edges between nodes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.torch_names import HigherOrderOperator, OpOverload, schema_of
from ..policy import Rule, dtype_name
from .flops import node_flops
from .provenance import in_backward, sequence_number, traced_from

OTHER = "other"  # integers, booleans, fp64: ops without a precision to choose
FORWARD, BACKWARD = "forward", "backward"
#: kinds of nodes; a "cast" is between float dtypes, a "select" selects one of several results or views a parameter
KINDS = ("input", "parameter", "buffer", "constant", "call", "cast", "select", "output")


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor that a node returns: its dtype and its shape, with symbolic sizes by name."""

    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{SHORT.get(self.dtype, self.dtype)}[{', '.join(map(str, self.shape))}]"


SHORT = {dtype_name(dtype): short for dtype, short in ir.DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node. ``precision``: of an op that computes; '' for inputs and outputs. ``reason`` and ``rule``: why, and by
    which kind of rule. ``cls``: the op's class in the table. ``inputs``: the names of the nodes that it reads.
    ``nbytes``: the number of bytes it writes. ``origin``: the node of the forward graph that it was made from.
    ``causes``: the nodes that its precision comes from. ``number``: which of its module's calls of the op it is."""

    name: str
    kind: str
    op: str
    values: tuple[Value, ...] = ()
    precision: str = ""
    reason: str = ""
    rule: str = ""
    cls: str = ""
    module: str = ""
    source: str = ""
    inputs: tuple[str, ...] = ()
    flops: int = 0
    nbytes: int = 0
    part: str = FORWARD
    label: str = ""
    origin: str = ""
    subgraph: str = ""
    code: str = ""
    causes: tuple[str, ...] = ()
    number: int | None = None

    @property
    def value(self) -> str:
        """``bf16[8, 64]``, or several in brackets."""
        text = ", ".join(map(str, self.values))
        return f"({text})" if len(self.values) > 1 else text

    @property
    def title(self) -> str:
        """The name to show to people: a parameter's path, otherwise the node's name."""
        return self.label or self.name


@dataclass(frozen=True)
class GraphView:
    """A whole graph. ``classes``: module path -> class name, for every module that a node came from."""

    nodes: tuple[NodeView, ...] = ()
    classes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, NodeView]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> dict[str, list[NodeView]]:
        """name -> the nodes that read it."""
        found: dict[str, list[NodeView]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                if name in found:
                    found[name].append(node)
        return found

    @property
    def casts(self) -> list[NodeView]:
        return [node for node in self.nodes if node.kind == "cast"]

    @property
    def has_backward(self) -> bool:
        return any(node.part == BACKWARD for node in self.nodes)

    def part(self, keep: set[str]) -> GraphView:
        """Return the named nodes, with the edges between them."""
        nodes = (
            replace(n, inputs=tuple(i for i in n.inputs if i in keep)) for n in self.nodes if n.name in keep
        )
        return GraphView(tuple(nodes), self.classes)


# --------------------------------------------------------------------------------------------- taking one


def take_view(gm: fx.GraphModule, forward: GraphView | None = None) -> GraphView:
    """Return the view of a graph. ``forward``: the forward graph that a functional one was made from; reasons and
    module paths that differentiation lost are looked up there."""
    nodes: list[NodeView] = []
    classes: dict[str, str] = {}
    for prefix, inner in ir.all_graphs(gm):
        for node in inner.graph.nodes:
            for path, cls in ir.module_stack(node):
                classes.setdefault(path, _class_name(cls))
        nodes += _Taker(inner, prefix, forward).nodes()
    bodies = dict(_body_inputs(gm))
    nodes = [replace(n, inputs=(bodies[n.name],)) if n.name in bodies else n for n in nodes]
    if forward is not None:
        classes = {**forward.classes, **classes}
    return GraphView(tuple(nodes), classes)


def _body_inputs(gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (input of a graph inside a node, the argument for it): the edges into a body."""
    for node in gm.graph.nodes:
        if ir.is_higher_order(node):
            for name, inner in ir.subgraphs(gm, node):
                path = f"{prefix}{name}."
                for place, given in ir.operands(node, inner):
                    yield f"{path}{place.name}", f"{prefix}{given.name}"
                yield from _body_inputs(inner, path)


class _Taker:
    def __init__(self, gm: fx.GraphModule, prefix: str, forward: GraphView | None) -> None:
        self.gm, self.prefix = gm, f"{prefix}." if prefix else ""
        self.subgraph, self.forward = prefix, forward
        self.known: dict[str, NodeView] = forward.by_name if forward is not None else {}
        self.functional = forward is not None
        self.by_sequence: dict[int, str] = {}
        self.backward: set[fx.Node] = set()
        self.origins: dict[fx.Node, str] = {}
        self.held: set[fx.Node] = set()  # parameters, buffers, constants and views of them

    def nodes(self) -> list[NodeView]:
        places = [n for n in self.forward.nodes if n.kind in INPUTS and not n.subgraph] if self.forward else []
        found = []
        number = 0
        for node in self.gm.graph.nodes:
            given = None
            if node.op == "placeholder":
                given = places[number] if number < len(places) and not _is_tangent(node) else None
                number += 1
            found.append(self.input(node, given) if node.op in ("placeholder", "get_attr") else self.call(node))
        return found

    def input(self, node: fx.Node, given: NodeView | None) -> NodeView:
        path = str(node.meta.get(ir.PATH, ""))
        kind = "constant" if node.op == "get_attr" or node.meta.get(ir.CONSTANT) is not None else "input"
        if node.meta.get(ir.PARAMETER) or path:
            kind = "parameter" if node.meta.get(ir.PARAMETER) or node.name.startswith("p_") else "buffer"
        label = path or _readable(node.name)
        if given is not None and not self.subgraph:
            kind, label = given.kind, given.label
        if _is_tangent(node):
            self.backward.add(node)
            number = node.name.removeprefix("tangents_")
            label = f"gradient of output {number}" if number.isdigit() else node.name
        if kind != "input":
            self.held.add(node)
        module = label.rpartition(".")[0] if kind in ("parameter", "buffer") else ""
        return NodeView(
            self.prefix + node.name, kind, node.op, _values(node), module=module, label=label,
            part=BACKWARD if node in self.backward else FORWARD, subgraph=self.subgraph,
            nbytes=_bytes(node), code=f"self.{node.target}" if node.op == "get_attr" else "",
        )  # fmt: skip

    def call(self, node: fx.Node) -> NodeView:
        known = ir.decision(node)
        if in_backward(node) or any(n in self.backward for n in node.all_input_nodes):
            self.backward.add(node)
        part = BACKWARD if node in self.backward and node.op != "output" else FORWARD
        source = self.known.get(self.origin(node, part))
        kind = _kind(node)
        if self.functional and kind == "call" and _is_view(node) and all(n in self.held for n in node.all_input_nodes):
            kind = "select"
            self.held.add(node)
        module, line = ir.module_path(node), ir.source_line(node)
        precision, reason, rule, cls = "", "", "", ""
        causes: tuple[str, ...] = ()
        if known is not None:
            precision, reason, rule = precision_name(known.precision), known.reason, known.rule
            causes = tuple(self.prefix + name for name in known.causes)
            cls = known.cls.value if known.cls is not None else ""
        elif node.op == "call_function":
            precision = _computed_in(node)
        if source is not None:
            module, line = source.module, source.source or line
            if known is None:
                rule, cls = source.rule, source.cls
                reason, causes = source.reason, (source.name,) if part == BACKWARD else source.causes
                if part == BACKWARD:
                    reason = f"backward of {source.name}: {reason}"
                elif source.op != ir.op_name(node) and kind != "select":
                    reason = f"part of {source.name} ({source.op}): {reason}"
        if self.functional and not reason and node.op == "call_function" and kind == "call":
            reason, rule = "added by a pass, for several values at once", Rule.ADDED
        if kind == "cast" and (not reason or (source is not None and source.kind != "cast")):
            reason, rule, causes = _cast_reason(node, part), Rule.INSERTED, ()
        return NodeView(
            self.prefix + node.name, kind, ir.op_name(node) if node.op == "call_function" else node.op, _values(node),
            precision, reason, rule, cls, module, line, tuple(self.prefix + n.name for n in node.all_input_nodes),
            node_flops(node), _bytes(node), part, "", source.name if source is not None else "", self.subgraph,
            _code(node), causes, node.meta.get(ir.CALL),
        )  # fmt: skip

    def origin(self, node: fx.Node, part: str) -> str:
        """Return the node of the forward graph that a functional node was made from: as torch recorded it, else by the
        number that autograd gives to an op and its backward, else that of one of its inputs."""
        if not self.functional or self.subgraph:
            return ""
        name = traced_from(node)
        number = sequence_number(node)
        if part == FORWARD and name in self.known:
            if number is not None:
                self.by_sequence.setdefault(number, name)
        elif number is not None and number in self.by_sequence:
            name = self.by_sequence[number]
        elif ir.op_name(node).startswith(("amp::unscale", "amp::all_finite")):
            name = ""  # it works on all gradients at once
        elif name not in self.known:
            name = next((self.origins[n] for n in node.all_input_nodes if self.origins.get(n)), "")
        self.origins[node] = name
        return name


INPUTS = ("input", "parameter", "buffer", "constant")


def precision_name(dtype: torch.dtype | None) -> str:
    """Return ``bfloat16`` or another float's name; ``other`` for a dtype without a precision to choose."""
    return dtype_name(dtype) if dtype is not None and dtype in ir.ELIGIBLE else OTHER


def _kind(node: fx.Node) -> str:
    if node.op == "output":
        return "output"
    if ir.is_float_cast(node):
        return "cast"
    return "select" if ir.is_getitem(node) else "call"


def _is_view(node: fx.Node) -> bool:
    """True if an op returns the memory of its input."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = schema_of(node.target).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _computed_in(node: fx.Node) -> str:
    """Return the precision of an op without a decision: a product's own dtype, else that of its first result."""
    named = dict(ir.schema_args(node))
    if ir.op_name(node).startswith("amp::cast") and isinstance(named.get("dtype"), torch.dtype):
        return precision_name(named["dtype"])
    floats = [v.dtype for v in ir.tensor_outputs(node) if v is not None and v.dtype.is_floating_point]
    return precision_name(floats[0]) if floats else OTHER


def _cast_reason(node: fx.Node, part: str) -> str:
    readers = [n for n in node.users if n.op == "call_function"]
    to = dtype_name(ir.cast_dtype(node))
    if not readers:
        return f"a result that leaves the graph in {to}" if node.users else f"a cast to {to}"
    more = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
    where = " in the backward" if part == BACKWARD else ""
    return f"{readers[0].name} ({ir.op_name(readers[0])}){more} reads it in {to}{where}"


def _values(node: fx.Node) -> tuple[Value, ...]:
    values = (v for v in ir.tensor_outputs(node) if v is not None) if node.op != "output" else ()
    return tuple(Value(dtype_name(v.dtype), tuple(_size(s) for s in v.shape)) for v in values)


def _size(size: Any) -> int | str:
    return size if type(size) is int else str(size)


def _bytes(node: fx.Node) -> int:
    return sum(ir.nbytes(v) for v in ir.tensor_outputs(node) if v is not None) if node.op != "output" else 0


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def _class_name(cls: Any) -> str:
    text = cls if isinstance(cls, str) else getattr(cls, "__name__", str(cls))
    return text.rpartition(".")[2]


_GENERATED = re.compile(r"^(arg|primals_)\d+(_\d+)?$")


def _readable(name: str) -> str:
    return "" if _GENERATED.match(name) else name


# ----------------------------------------------------------------------------------------------- as Python


def _code(node: fx.Node) -> str:
    """Return the right-hand side of a node's assignment, as Python."""
    if node.op == "output":
        return _literal(node.args[0])
    if node.op != "call_function":
        return ""
    if node.target is operator.getitem:
        return f"{_literal(node.args[0])}[{_literal(node.args[1])}]"
    given = [_literal(a) for a in node.args] + [f"{k}={_literal(v)}" for k, v in node.kwargs.items()]
    return f"{_callee(node.target)}({', '.join(given)})"


def _callee(target: Any) -> str:
    if isinstance(target, OpOverload):
        return f"torch.ops.{target}"
    if isinstance(target, HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}".lstrip(".")


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, slice):
        return f"slice({_literal(value.start)}, {_literal(value.stop)}, {_literal(value.step)})"
    if isinstance(value, tuple):
        inner = ", ".join(map(_literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return repr(value)


