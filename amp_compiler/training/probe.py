"""Runs rewritten forward graphs node by node and records whether each value and its gradient were finite.

Hooks look at the gradient of every value, so a backward op is identified by the forward op that it belongs to. All
values and gradients are kept in memory meanwhile, so this is for diagnosing one batch, after the fact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from .. import ir
from ..common.torch_names import OpOverload, pytree
from ..kernels.sharded import local_parts

#: ops that fill in a number where a mask says so: an infinite one is intended
_MARKERS = frozenset(
    {"full", "full_like", "new_full", "fill", "masked_fill", "where", "scalar_tensor", "lift_fresh_copy"}
)
#: higher-order ops that compute just what their body does
_TRANSPARENT = ("higher_order::tag_activation_checkpoint", "higher_order::wrap", "higher_order::invoke_subgraph")


@dataclass
class Seen:
    """One value of a graph that was run with checks, and what is known of its gradient."""

    node: fx.Node
    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: list[fx.Node]
    value: str  # "inf", "-inf", "nan", or "" if finite
    meant: bool = False  # not finite on purpose, such as a mask
    gradient: Tensor | None = None
    order: int = 0  # when its gradient came, counting from 1; 0: none came

    @property
    def gradient_kind(self) -> str:
        return "" if self.gradient is None else kind_of(self.gradient)


@dataclass
class Probe:
    """Runs graphs node by node while ``looking`` is set, and records what it saw."""

    looking: bool = False
    in_fp32: bool = False  # run every op in fp32, whatever was decided
    seen: dict[fx.Node, Seen] = field(default_factory=dict)
    made: dict[int, fx.Node] = field(default_factory=dict)  # id of a tensor -> the node that produced it first
    read_on: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # node -> inputs of other graphs with its value
    gradients: int = 0
    #: hooks on the watched tensors: if not removed, each would keep its tensor and the batch's whole graph alive
    hooks: list[RemovableHandle] = field(default_factory=list)
    #: runs the graphs instead, for another question (``underflow.py``)
    instead: Callable[[fx.GraphModule, Sequence[Any]], Any] | None = None

    def begin(self, *, in_fp32: bool = False) -> None:
        self.in_fp32 = in_fp32
        self.looking, self.seen, self.made, self.read_on, self.gradients = True, {}, {}, {}, 0

    def end(self) -> Probe:
        """Stop looking and return what was seen."""
        done = Probe(False, self.in_fp32, self.seen, self.made, self.read_on, self.gradients)
        while self.hooks:
            self.hooks.pop().remove()
        self.looking, self.seen, self.made, self.read_on, self.instead = False, {}, {}, {}, None
        return done

    def run(self, graph: fx.GraphModule, args: Sequence[Any]) -> Any:
        return Watching(graph, self).run(*args) if self.instead is None else self.instead(graph, args)

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
        """True for a mask: infinite by a literal in the code, an input that is a mask, or computed from such values."""
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
        """Return (phase, value) of the first non-finite value whose own inputs are all finite or infinite on purpose;
        None if there is none."""
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
        """Return the values that were computed from this one, in any graph."""
        found = [self.seen[u] for u in node.users if u in self.seen and not ir.is_higher_order(u)]
        for other in self.read_on.get(node, []):
            found += self.readers(other)
        return found or [self.seen[u] for u in node.users if u in self.seen]

    def _differentiated(self, bad: Seen) -> Seen:
        """Return the op whose backward produced this gradient: the reader of the value that turns a finite gradient
        into one that is not finite. If that cannot be determined, the latest reader (autograd goes backward)."""
        readers = [s for s in self.readers(bad.node) if s is not bad]
        finite = [s for s in readers if s.gradient is not None and not s.gradient_kind]
        guilty = [s for s in finite if alone_is_finite(s, None, "backward") is False] if len(finite) > 1 else finite
        return (guilty or finite or readers or [bad])[-1]


class Watcher(Protocol):
    """Sees every value of a graph that ``Watching`` runs."""

    def watch(self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class Watching(fx.Interpreter):
    """Runs a graph node by node and shows every value to a watcher. ``keep``: all values stay in memory meanwhile.

    For a watcher with ``in_fp32``, every low-precision dtype of the graph is read as fp32, whatever was decided.
    """

    def __init__(self, graph: fx.GraphModule, watcher: Watcher, keep: bool = True) -> None:
        super().__init__(graph, garbage_collect_values=not keep)
        self.watcher, self.keep = watcher, keep

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        in_fp32 = getattr(self.watcher, "in_fp32", False)
        if in_fp32 and n.op == "call_function" and ir.op_name(n) not in _TRANSPARENT:
            args, kwargs = pytree.tree_map(_widen, (args, kwargs))
            result = self.call_function(n.target, args, kwargs)
        else:
            result = self.run_op(n, args, kwargs)
            if n.op == "placeholder":
                args = (result,)
            result = _widen(result) if in_fp32 else result
        if n.op == "placeholder" and is_float(result) and result.is_leaf and result.requires_grad:
            result = result.view_as(result)  # keeps the hook off the user's own parameter
        if n.op != "output" and not isinstance(result, fx.GraphModule):
            self.watcher.watch(n, result, args, kwargs)
        return result

    def run_op(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one node; the body of a transparent op is run node by node too."""
        if n.op == "call_function" and ir.op_name(n) in _TRANSPARENT:
            bodies = [a for a in args if isinstance(a, fx.GraphModule)]
            return self.inside(bodies[0], args[args.index(bodies[0]) + 1 :])
        return super().run_node(n)

    def inside(self, body: fx.GraphModule, args: Sequence[Any]) -> Any:
        """Run a graph that is inside of this one."""
        return type(self)(body, self.watcher, self.keep).run(*args)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in ir.LOW_DTYPES:
        return value.float()
    return torch.float32 if value in ir.LOW_DTYPES and isinstance(value, torch.dtype) else value


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def kind_of(tensor: Tensor) -> str:
    """Return "nan", "inf" or "-inf", the first of them that the tensor holds; "" if everything is finite."""
    values = _values(tensor)
    if values.numel() == 0 or bool(values.isfinite().all()):
        return ""
    if bool(values.isnan().any()):
        return "nan"
    return "inf" if values.is_complex() or bool((values == math.inf).any()) else "-inf"


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude in the tensor."""
    values = _values(tensor)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _values(tensor: Tensor) -> Tensor:
    """Return the numbers of the tensor; of a DTensor those that this process has."""
    (tensor,) = local_parts([tensor.detach()])
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor


def _masks(value: Any) -> bool:
    """True if the value looks like a mask: it holds finite numbers and minus infinity, nothing else."""
    return isinstance(value, Tensor) and kind_of(value) == "-inf"


def alone_is_finite(seen: Seen, dtype: torch.dtype | None, phase: str) -> bool | None:
    """True if one op, run by itself, gives finite results; None if it cannot be run by itself. Floats are converted to
    ``dtype`` (None: they keep theirs). In the backward phase, it gets the gradient that it got then."""
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
