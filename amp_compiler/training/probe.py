"""Runs rewritten forward graphs node by node and remembers, of every value, whether it and its gradient were finite.

Hooks look at the gradient of every value, so an op of the backward is told by the op of the forward that it belongs to.
Values and gradients are kept while it lasts: it is a tool for one batch, after the fact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from .. import ir
from ..common.torch_names import OpOverload, pytree

#: ops that put a number where a mask says: an infinite one is meant
_MARKERS = frozenset(
    {"full", "full_like", "new_full", "fill", "masked_fill", "where", "scalar_tensor", "lift_fresh_copy"}
)
#: higher-order ops whose body is what they compute
_TRANSPARENT = ("higher_order::tag_activation_checkpoint", "higher_order::wrap", "higher_order::invoke_subgraph")


@dataclass
class Seen:
    """One value of a graph that was run with checks."""

    node: fx.Node
    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: list[fx.Node]
    value: str  # "inf", "-inf", "nan", or "" if finite
    meant: bool = False  # not finite because the code wants it so
    gradient: Tensor | None = None
    order: int = 0  # of its gradient; 0: none came

    @property
    def gradient_kind(self) -> str:
        return "" if self.gradient is None else kind_of(self.gradient)


@dataclass
class Probe:
    """Runs graphs node by node while ``looking``, and remembers what it saw."""

    looking: bool = False
    in_fp32: bool = False  # run every op in fp32, whatever was decided
    seen: dict[fx.Node, Seen] = field(default_factory=dict)
    made: dict[int, fx.Node] = field(default_factory=dict)  # id of a tensor -> the node that gave it first
    read_on: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # node -> inputs of other graphs that are it
    gradients: int = 0
    #: of the tensors that are watched; left on them, each would keep its tensor, and the batch's whole graph, for ever
    hooks: list[RemovableHandle] = field(default_factory=list)

    def begin(self, *, in_fp32: bool = False) -> None:
        self.in_fp32 = in_fp32
        self.looking, self.seen, self.made, self.read_on, self.gradients = True, {}, {}, {}, 0

    def end(self) -> Probe:
        """Stop looking; what was seen goes to the caller."""
        done = Probe(False, self.in_fp32, self.seen, self.made, self.read_on, self.gradients)
        while self.hooks:
            self.hooks.pop().remove()
        self.looking, self.seen, self.made, self.read_on = False, {}, {}, {}
        return done

    def run(self, graph: fx.GraphModule, args: Sequence[Any]) -> Any:
        return _Watching(graph, self).run(*args)

    def watch(self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [t for t in pytree.tree_leaves(result) if is_float(t)]
        sources = [n for n in node.all_input_nodes if n.op != "get_attr" or n in self.seen]
        if node.op == "placeholder" or ir.is_higher_order(node):
            inner = [self.made[id(t)] for t in tensors if id(t) in self.made]
            if node.op == "placeholder":
                for source in inner:
                    self.read_on.setdefault(source, []).append(node)
            sources = inner or sources
        for tensor in tensors:
            self.made.setdefault(id(tensor), node)
        seen = Seen(node, result, args, kwargs, sources, next((kind for t in tensors if (kind := kind_of(t))), ""))
        seen.meant = bool(seen.value) and self._is_meant(seen)
        self.seen[node] = seen
        for tensor in tensors:
            if tensor.requires_grad:
                self.hooks.append(tensor.register_hook(lambda gradient: self._gradient(seen, gradient)))

    def _is_meant(self, seen: Seen) -> bool:
        """A mask: infinite by a literal in the code, or an input that is one, or made of such."""
        if seen.value == "nan":
            return False
        causes = [s for s in self._sources(seen) if s.value]
        if causes:
            return all(s.meant for s in causes)
        if seen.node.op == "placeholder":
            return not seen.node.meta.get(ir.PARAMETER) and _masks(seen.result)
        literal = any(isinstance(x, float) and math.isinf(x) for x in pytree.tree_leaves((seen.args, seen.kwargs)))
        return seen.node.op == "get_attr" or (literal and ir.op_name(seen.node).rstrip("_") in _MARKERS)

    def _sources(self, seen: Seen) -> Iterator[Seen]:
        return (self.seen[n] for n in seen.sources if n in self.seen)

    def _gradient(self, seen: Seen, gradient: Tensor) -> None:
        self.gradients += 1
        if seen.gradient is None or (not seen.gradient_kind and kind_of(gradient)):
            seen.gradient, seen.order = gradient.detach(), self.gradients

    # --------------------------------------------------------------------------------------- the culprit

    def culprit(self, loss_is_finite: bool) -> tuple[str, Seen] | None:
        """(phase, value) of the first value that is not finite though all that it was made of is, or was meant to be
        infinite."""
        if not loss_is_finite and (first := self._first_forward()) is not None:
            return first
        bad = [s for s in self.seen.values() if s.gradient_kind]
        if not bad:
            return self._first_forward()
        return "backward", self._differentiated(min(bad, key=lambda s: s.order))

    def _first_forward(self) -> tuple[str, Seen] | None:
        bad = [s for s in self.seen.values() if s.value and not s.meant]
        if not bad:
            return None
        seen = bad[-1]
        while causes := [s for s in self._sources(seen) if s.value and not s.meant]:
            seen = next((s for s in causes if s.value == seen.value), causes[0])
        return ("input" if seen.node.op == "placeholder" else "forward"), seen

    def readers(self, node: fx.Node) -> list[Seen]:
        """The values that were computed from this one, in whichever graph."""
        found = [self.seen[u] for u in node.users if u in self.seen and not ir.is_higher_order(u)]
        for other in self.read_on.get(node, []):
            found += self.readers(other)
        return found or [self.seen[u] for u in node.users if u in self.seen]

    def _differentiated(self, bad: Seen) -> Seen:
        """The op whose backward made this gradient: of those that read the value, the one that gives a gradient that is
        not finite for the finite one that it got; the latest if that cannot be told (autograd goes backward)."""
        readers = [s for s in self.readers(bad.node) if s is not bad]
        finite = [s for s in readers if s.gradient is not None and not s.gradient_kind]
        guilty = [s for s in finite if alone_is_finite(s, None, "backward") is False] if len(finite) > 1 else finite
        return (guilty or finite or readers or [bad])[-1]


class _Watching(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, probe: Probe) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.probe = probe

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_function" and ir.op_name(n) in _TRANSPARENT:
            bodies = [a for a in args if isinstance(a, fx.GraphModule)]
            result = _Watching(bodies[0], self.probe).run(*args[args.index(bodies[0]) + 1 :])
        elif n.op == "call_function" and self.probe.in_fp32:
            args, kwargs = pytree.tree_map(_widen, (args, kwargs))
            result = self.call_function(n.target, args, kwargs)
        else:
            result = super().run_node(n)
        if n.op == "placeholder":
            args = (result,)
        if n.op == "placeholder" and is_float(result) and result.is_leaf and result.requires_grad:
            result = result.view_as(result)  # a hook on the user's parameter itself would stay there
        if n.op != "output" and not isinstance(result, fx.GraphModule):
            self.probe.watch(n, result, args, kwargs)
        return result


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in ir.LOW_DTYPES:
        return value.float()
    return torch.float32 if value in ir.LOW_DTYPES and isinstance(value, torch.dtype) else value


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def kind_of(tensor: Tensor) -> str:
    """ "inf", "-inf" or "nan" if the tensor holds such, NaN first; "" if all is finite."""
    values = _values(tensor)
    if values.numel() == 0 or bool(values.isfinite().all()):
        return ""
    if bool(values.isnan().any()):
        return "nan"
    return "inf" if values.is_complex() or bool((values == math.inf).any()) else "-inf"


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude."""
    values = _values(tensor)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _values(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


def _masks(value: Any) -> bool:
    """What a mask looks like: nothing but minus infinity beside ordinary numbers."""
    return isinstance(value, Tensor) and kind_of(value) == "-inf"


def alone_is_finite(seen: Seen, dtype: torch.dtype | None, phase: str) -> bool | None:
    """Run one op by itself, with floats in ``dtype`` (None: as they were), in the backward with the gradient that it
    got: is all that it gives finite? None if it cannot be run so."""
    if not isinstance(seen.node.target, OpOverload):
        return None

    def own(value: Any) -> Any:
        if not is_float(value):
            return dtype if dtype is not None and value in ir.LOW_DTYPES else value
        copy = value.detach().to(dtype or value.dtype, copy=True)
        return copy.requires_grad_(value.requires_grad)

    args, kwargs = pytree.tree_map(own, (seen.args, seen.kwargs))
    try:
        with torch.enable_grad():
            result = seen.node.target(*args, **kwargs)
            outputs = [t for t in pytree.tree_leaves(result) if is_float(t)]
            inputs = [t for t in pytree.tree_leaves((args, kwargs)) if is_float(t) and t.requires_grad]
            if phase == "forward" or seen.gradient is None or not inputs or not outputs[0].requires_grad:
                return not any(kind_of(t) for t in outputs)
            given = seen.gradient.to(outputs[0].dtype)
            gradients = torch.autograd.grad(outputs[0], inputs, given, allow_unused=True)
    except (RuntimeError, TypeError, ValueError):
        return None
    return not any(kind_of(t) for t in (*outputs, *gradients) if t is not None)
