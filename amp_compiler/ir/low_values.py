"""What the nodes of a graph traced in fp32 would be if its inputs were low, where dtypes were followed in the code.

Capture has noted on each node which tensor's dtype it names, or a limit of it (``DTYPE_OF``, ``NUMBER_OF``). So the
dtype of every result can be found op by op, with the dtypes that the code would have read there; no second trace is
needed. What torch returns for which dtypes is asked once per kind of call: no result's dtype depends on sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..common.torch_names import OpOverload, is_dtensor, pytree
from .casts import is_conversion
from .constants import limit_in
from .meta import DTYPE_OF, FOLLOWED, NUMBER_OF, OF_INPUT, Origin
from .promoting import promoting
from .schema import is_getitem, is_higher_order, mutated_args, op_name, schema_args
from .values import fake_mode, retype, tensor_of, tensor_outputs

#: ops that a tracer inserts after a constant tensor of the code
LIFTS = ("lift_fresh_copy", "lift_fresh", "lift")
Dtypes = tuple[torch.dtype | None, ...]
Numbers = tuple[tuple[str, float], ...]


def is_followed(gm: fx.GraphModule) -> bool:
    """True if ``low_origins`` can tell about a graph all that the code's trace in low precision would."""
    if not gm.meta.get(FOLLOWED):
        return False
    tensors = {node.name for node in gm.graph.nodes if tensor_of(node) is not None}
    for node in gm.graph.nodes:
        asked = {node.meta[key] for key in (DTYPE_OF, NUMBER_OF) if key in node.meta} - {OF_INPUT}
        if not tensors.issuperset(asked) or is_higher_order(node) or "unbacked_bindings" in node.meta:
            return False
        if any(is_dtensor(value) for value in tensor_outputs(node)):
            return False
    return bool(tensors)


def low_origins(gm: fx.GraphModule, low: torch.dtype) -> dict[fx.Node, Origin]:
    """Return what a trace in ``low`` would reveal about each node of a graph whose dtypes were followed."""
    run = _LowRun(low)
    return {node: run.visit(node) for node in gm.graph.nodes}


class _LowRun:
    """Goes through a graph and finds the dtypes of its values if its inputs are low."""

    def __init__(self, low: torch.dtype) -> None:
        self.low = low
        self.dtypes: dict[fx.Node, Dtypes] = {}
        self.by_name: dict[str, fx.Node] = {}

    def visit(self, node: fx.Node) -> Origin:
        dtypes, follows = _traced(node), False
        numbers: Numbers = ()
        if node.op == "placeholder":
            dtypes = tuple(self.low if dtype is torch.float32 else dtype for dtype in dtypes)
        elif is_getitem(node):
            dtypes = self.selected(node, dtypes)
        elif op_name(node) in LIFTS and self.is_low(node.meta.get(DTYPE_OF)):
            dtypes = (self.low,)
        elif type(node.target) is OpOverload:
            named, numbers = self.named(node)
            if named or any(self.dtypes[n] != _traced(n) for n in node.all_input_nodes):
                dtypes = self.call(node, named)
            asks = _only(dtypes) if is_conversion(node) else named.get("dtype")
            follows = asks is self.low and _names_fp32(node)
        self.dtypes[node], self.by_name[node.name] = dtypes, node
        return Origin(
            follows, _only(dtypes), numbers, of=asked(node, DTYPE_OF) if follows else "",
            numbers_of=asked(node, NUMBER_OF) if numbers else "",
        )  # fmt: skip

    def selected(self, node: fx.Node, dtypes: Dtypes) -> Dtypes:
        source, place = node.args
        assert isinstance(source, fx.Node)
        flat = len(self.dtypes[source]) == len(source.meta["val"]) and isinstance(place, int)
        return (self.dtypes[source][place],) if flat and len(dtypes) == 1 else dtypes  # type: ignore[index]

    def named(self, node: fx.Node) -> tuple[dict[str, Any], Numbers]:
        """Return the dtype, by argument, and the limits that the code gives to an op in low precision, if they differ
        from those that it gives in fp32."""
        given = dict(schema_args(node)) if DTYPE_OF in node.meta or NUMBER_OF in node.meta else {}
        follows = given.get("dtype") is torch.float32 and self.is_low(node.meta.get(DTYPE_OF))
        named = {"dtype": self.low} if follows else {}
        if not self.is_low(node.meta.get(NUMBER_OF)):
            return named, ()
        numbers = ((name, value) for name, value in given.items() if type(value) in (int, float))
        limits = ((name, value, limit_in(value, torch.float32, self.low)) for name, value in numbers)
        return named, tuple((name, limit) for name, value, limit in limits if limit != value)

    def is_low(self, name: str | None) -> bool:
        return name == OF_INPUT or (name in self.by_name and _only(self.dtypes[self.by_name[name]]) is self.low)

    def call(self, node: fx.Node, named: dict[str, Any]) -> Dtypes:
        """Return the dtypes of an op's results for the dtypes that its operands have here."""
        key = (node.target, len(tensor_outputs(node)), *(
            (name, _kind(named.get(name, arg), self.dtypes)) for name, arg in schema_args(node)
        ))  # fmt: skip
        if key not in _KNOWN:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = self.ask(node, named)
        return _KNOWN[key]

    def ask(self, node: fx.Node, named: dict[str, Any]) -> Dtypes:
        args, kwargs = pytree.tree_map_only(fx.Node, self.fake, (node.args, dict(node.kwargs)))
        if named:
            names = [name for name, _ in schema_args(node)]
            args = [named.get(name, arg) for name, arg in zip(names, args, strict=False)]
            kwargs = {name: named.get(name, arg) for name, arg in kwargs.items()}
        target: Any = node.target
        with fake_mode(node.graph), torch.no_grad():
            try:
                result = promoting(lambda a, k: target(*a, **k), args, kwargs, in_place=bool(mutated_args(node)))
            except (RuntimeError, TypeError):  # torch has no such op for these dtypes: as it was in fp32
                return _traced(node)
        return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in pytree.tree_leaves(result))

    def fake(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        dtype = _only(self.dtypes[node])
        return retype(value, dtype) if isinstance(value, torch.Tensor) and dtype is not None else value


#: what torch has returned for the dtypes of an op's operands
_KNOWN: dict[Any, Dtypes] = {}
_MOST_KNOWN = 10_000


def _kind(arg: Any, dtypes: dict[fx.Node, Dtypes]) -> Any:
    """Return what the dtype of an op's result may depend on in one of its arguments."""
    if isinstance(arg, fx.Node):
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            return dtypes[arg], value.dim() == 0, value.layout, value.device.type
        return _NUMBERS.get(type(value), type(value))
    if isinstance(arg, (list, tuple)):
        return tuple(_kind(item, dtypes) for item in arg)
    return arg if isinstance(arg, _TELLS) else _NUMBERS.get(type(arg), type(arg))


#: a symbolic number counts as a number
_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
#: arguments whose values may decide on the dtype of a result
_TELLS = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, bool, type(None))


def asked(node: fx.Node, key: str) -> str:
    """Return the name of the node whose dtype, or its limit, a node names; "" if it is not in the graph."""
    name = str(node.meta.get(key, ""))
    return name if name != OF_INPUT else ""


def _traced(node: fx.Node) -> Dtypes:
    return tuple(None if value is None else value.dtype for value in tensor_outputs(node))


def _only(dtypes: Dtypes) -> torch.dtype | None:
    return dtypes[0] if len(dtypes) == 1 else None


def _names_fp32(node: fx.Node) -> bool:
    """True if the dtype that a node names, or converts to, is fp32 in the trace."""
    if is_conversion(node):
        return _only(_traced(node)) is torch.float32
    return dict(schema_args(node)).get("dtype") is torch.float32
