"""The values behind the first inputs of an exported graph: parameters, buffers and constants of the model's code.

A pass changes a weight by setting a new function that computes it. Weights are materialized one at a time, when they
are needed, in addition to those that are kept in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from .. import ir
from ..common.torch_names import OpOverload, schema_of
from ..policy import dtype_name
from ..policy.ops.names import find_row
from ..policy.ops.row import OpClass
from . import constants


@dataclass(frozen=True)
class Weight:
    """One weight: its ``path`` in the model (``"encoder.0.weight"``), its kind in torch (``"parameter"``, ``"buffer"``
    or ``"constant"``), and the function that computes its value.

    ``source``: equal for two inputs that share the same memory of the model (tied weights). ``fresh``: each call of
    ``make`` returns a new tensor.
    """

    path: str
    kind: str
    make: Callable[[], torch.Tensor]
    persistent: bool = True
    source: Hashable | None = None
    fresh: bool = False


def _gone() -> torch.Tensor:
    raise AssertionError("only the names of these weights were kept")


class Weights:
    """The weights of one graph by the name of their input. ``stored``: for an input that was removed, the name of the
    one that holds its values, rounded."""

    def __init__(self, known: Mapping[str, Weight]) -> None:
        self._known = dict(known)
        self.store_low = True  # True if ``freeze_parameters`` will run
        self.kept: dict[str, str] = {}  # path -> why low precision cannot represent this weight
        self.stored: dict[str, str] = {}

    def names_only(self) -> Weights:
        """Return the names of these weights without their values, for another graph with inputs of the same names."""
        return Weights({name: replace(weight, make=_gone) for name, weight in self._known.items()})

    def __contains__(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in self._known

    def __getitem__(self, node: fx.Node) -> Weight:
        return self._known[node.name]

    def value(self, node: fx.Node) -> torch.Tensor:
        """Compute and return the weight's value."""
        with torch.no_grad():
            return self._known[node.name].make().detach()

    def fixed(self, graph: fx.Graph) -> list[fx.Node]:
        """Return the inputs of ``graph`` that are weights and are never written to."""
        written = ir.written_nodes(graph)
        return [n for n in graph.nodes if n in self and n not in written]

    def change(self, node: fx.Node, make: Callable[[], torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """Set another value for the weight behind ``node``; with ``dtype``, it is the same value rounded to that."""
        old = self._known[node.name]
        self._known[node.name] = replace(old, make=make, fresh=True, source=None if dtype is None else old.source)
        if dtype is not None:
            node.meta["val"] = ir.retype(node.meta["val"], dtype)
            known = ir.decision(node)
            if known is not None:
                ir.amend(node, out=(dtype,))

    def add(
        self, graph: fx.Graph, like: fx.Node, suffix: str, make: Callable[[], torch.Tensor], value: torch.Tensor,
        *, rounded: bool = False,
    ) -> fx.Node:  # fmt: skip
        """Add a weight, as an input after all other weights, named after ``like``. ``value`` is a fake of it.

        ``rounded``: it holds the values of ``like`` in another dtype.
        """
        last = [n for n in graph.nodes if n in self][-1]
        base = self._known[like.name]
        paths = {weight.path for weight in self._known.values()}
        path, number = f"{base.path}_{suffix}", 1
        while path in paths:
            number += 1
            path = f"{base.path}_{suffix}_{number}"
        with graph.inserting_after(last):
            node = graph.placeholder(f"{like.name}_{suffix}")
        node.target = node.name
        node.meta = {k: v for k, v in like.meta.items() if k not in (ir.PARAMETER, ir.CONSTANT, "tensor_meta")}
        node.meta["val"] = value
        known = ir.decision(node)
        if known is not None:
            ir.amend(node, out=(value.dtype,))
        kind = "buffer" if base.kind == "constant" else base.kind
        self._known[node.name] = Weight(path, kind, make, base.persistent, base.source if rounded else None, fresh=True)
        return node

    def keep(self, node: fx.Node, peak: float, low: torch.dtype) -> None:
        """Record that a weight stays fp32, and why."""
        name, what = dtype_name(low), "overflows" if peak > 1 else "rounds to 0"
        self.kept[self._known[node.name].path] = f"its largest value {peak:g} {what} in {name}"

    def drop(self, graph: fx.Graph, node: fx.Node) -> None:
        """Remove a weight that nothing reads."""
        del self._known[node.name]
        graph.erase_node(node)


def drop_unread(graph: fx.Graph, weights: Weights) -> bool:
    """Remove all weights that nothing reads; True if there were any."""
    unread = [n for n in graph.nodes if n in weights and not n.users]
    for node in unread:
        weights.drop(graph, node)
    return bool(unread)


def moves(node: fx.Node) -> bool:
    """True for an op that moves or selects the values of its one float argument, so that rounding commutes with it."""
    if node.op != "call_function" or ir.is_cast(node) or not isinstance(node.target, OpOverload):
        return False
    if schema_of(node.target).is_mutable or node.target.namespace != "aten" or ir.has_integer_operand(node):
        return False
    row, result = find_row(ir.op_name(node)), ir.tensor_of(node)
    if row is None or row.cls is not OpClass.EXACT or result is None or not result.dtype.is_floating_point:
        return False
    if dict(ir.schema_args(node)).get("dtype") is not None or _numbers(node):
        return False
    return len(float_args(node)) == 1


def float_args(node: fx.Node) -> list[fx.Node]:
    """Return the float tensors among the arguments, one entry per use."""
    values = [(a, ir.tensor_of(a)) for _, a in ir.tensor_args(node)]
    return [a for a, v in values if v is not None and v.dtype.is_floating_point]


def _numbers(node: fx.Node) -> bool:
    """True if a number other than an index or a size takes part (a fill value, a clamp's limit)."""
    assert isinstance(node.target, OpOverload)
    kinds = {a.name: str(a.type) for a in schema_of(node.target).arguments}
    given = [(kinds.get(name, ""), value) for name, value in ir.schema_args(node) if value is not None]
    return any(isinstance(value, float) or kind in ("number", "Optional[number]") for kind, value in given)


def misfit(value: torch.Tensor, low: torch.dtype) -> float | None:
    """Return the largest magnitude in a weight if ``low`` rounds it to inf, or to 0 (and so the whole weight)."""
    if not value.numel() or not value.dtype.is_floating_point:
        return None
    smallest, largest = (float(limit) for limit in torch.aminmax(value))
    peak = max(abs(smallest), abs(largest))
    if not math.isfinite(peak) or math.isnan(smallest):
        finite = value[value.isfinite()]
        peak = float(finite.abs().max()) if finite.numel() else 0.0
    return None if constants.fits(peak, low) else peak


def misfits(graph: fx.Graph, weights: Weights, lows: Iterable[torch.dtype]) -> dict[fx.Node, float]:
    """Return the fp32 weights that one of ``lows`` cannot represent, each with the offending value."""
    found = {}
    lows = tuple(lows)
    for node in weights.fixed(graph):
        if node.meta["val"].dtype is torch.float32:
            value = weights.value(node)
            peaks = [peak for low in lows if (peak := misfit(value, low)) is not None]
            if peaks:
                found[node] = peaks[0]
    return found
