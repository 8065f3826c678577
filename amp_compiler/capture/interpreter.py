"""Runs a Dynamo graph under the tracer, node by node, so that the trace is the same graph in pre-dispatch ATen."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)

from .. import ir
from ..common.torch_names import HigherOrderOperator, OpOverload, pytree, schema_of
from ..ir.constants import is_limit
from ..ir.low_values import LIFTS
from ..ir.promoting import promoting
from . import higher_order, vmap
from .marked import is_mark
from .placed import Placements
from .promotion import converted


class LoweringInterpreter(fx.Interpreter):
    """Runs Dynamo's graph under the tracer; custom autograd functions and checkpoints stay nodes.

    An op that has nothing to do (``x.float()`` in fp32, dropout in eval mode) returns its input itself, and the tracer
    would then take every later use of the input for a use of that op. Such an op returns a new tensor here.
    """

    #: False once a dtype, or a limit of one, cannot be followed from Dynamo's graph into the lowered one
    follows = True

    @functools.cached_property
    def placements(self) -> Placements:
        return Placements(self.graph)

    @functools.cached_property
    def asked(self) -> dict[str, Any]:
        """By name, the values of the nodes that were asked for their dtypes; None before they are computed."""
        return dict.fromkeys(asked.name for n in self.graph.nodes for asked in _asked(n).values())

    def run_node(self, n: fx.Node) -> Any:
        result = self._run_node(n)
        if n.name in self.asked:
            self.asked[n.name] = result
        return result

    def _run_node(self, n: fx.Node) -> Any:
        inputs = [self.env[a] for a in n.all_input_nodes if isinstance(self.env.get(a), torch.Tensor)]
        mode = get_proxy_mode()
        if n.op not in ("call_function", "call_method") or mode is None:
            return super().run_node(n)
        if is_mark(n):
            return self.env[n.args[0]] if isinstance(n.args[0], fx.Node) else None
        before = [(x, get_proxy_slot(x, mode.tracer, None)) for x in inputs]
        marks = {
            key: self._mark(asked, mode.tracer) for key, asked in _asked(n).items()
            if key != ir.NUMBER_OF or self._may_be_low(asked)
        }  # fmt: skip
        last = next(iter(reversed(mode.tracer.graph.nodes)), None) if marks else None
        result = self._run(n)
        new = list(_after(last, mode.tracer.graph)) if marks else []
        for key, mark in marks.items():
            self.follows &= mark is not None and _is_clear(n, new, key)
            for made in new if mark is not None else ():
                made.meta[key] = mark
        for x, proxy in before:
            if result is x and proxy is not None:
                return _apart(x, proxy, mode.tracer)
        return result

    def _may_be_low(self, asked: fx.Node) -> bool:
        """False for a tensor that the author has given another dtype than fp32: its limits are always the same."""
        value = self.asked[asked.name]
        return not isinstance(value, torch.Tensor) or value.dtype is torch.float32

    def _mark(self, asked: fx.Node, tracer: Any) -> Any:
        """Return the node that a node of Dynamo's graph, which was asked for its dtype, has become; None if there is
        none. An input that nothing but its dtype was read of is not in the graph."""
        value = self.asked[asked.name]
        if isinstance(value, torch.Tensor):
            source = get_proxy_slot(value, tracer, None)
            return source.proxy.node if source is not None else None
        is_gone = value is None and asked.op == "placeholder"
        dtype = getattr(asked.meta.get("example_value"), "dtype", None)
        return ir.OF_INPUT if is_gone and dtype is torch.float32 else None

    def _run(self, n: fx.Node) -> Any:
        if self.placements.needed:
            with self._set_current_node(n):
                result = self.placements.call(n, n.target, *self.fetch_args_kwargs_from_env(n))
            if result is not NotImplemented:
                return result
        return super().run_node(n)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = self.fetch_attr(str(target))
        assert isinstance(body, fx.GraphModule)
        here = torch.fx.traceback.get_current_meta()
        meta: dict[str, Any] = {k: v for k, v in here.items() if k in ("stack_trace", "nn_module_stack")}
        return vmap.run(body, args, meta, type(self))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator):
            if target.name() == "autograd_function_apply":
                return higher_order.keep_autograd_function(target, args, kwargs, type(self))
            if target.name() == "tag_activation_checkpoint":
                return higher_order.keep_checkpoint(target, args, kwargs, type(self))
            if higher_order.is_closed(target, args):
                return higher_order.keep_closed(target, args, kwargs)
        if target is getattr(torch._C._autograd, "_get_data_attr", None):
            return args[0].detach()  # the tracer does not see ``x.data``; both share memory and stop gradients
        return super().call_function(target, args, kwargs)


class PromotingInterpreter(LoweringInterpreter):
    """For the twin: a promoted operand keeps its proxy, so the graph shows no cast that the author did not write."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_place = "setitem" in str(target) or getattr(target, "__name__", "").endswith("_")
        return promoting(lambda a, k: super(PromotingInterpreter, self).call_function(target, a, k),
                         args, kwargs, in_place, converted)  # fmt: skip

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return promoting(lambda a, k: super(PromotingInterpreter, self).call_method(target, a, k),
                         args, kwargs, str(target).endswith("_"), converted)  # fmt: skip


def _asked(node: fx.Node) -> dict[str, fx.Node]:
    """By key of the meta, the nodes whose dtype or limit a call of Dynamo's graph names."""
    named = {key: node.meta[key] for key in (ir.DTYPE_OF, ir.NUMBER_OF) if key in node.meta}
    if node.op == "call_method" and node.target in ("to", "cpu", "cuda"):
        dtypes = [arg for arg in (*node.args[1:], *node.kwargs.values()) if isinstance(arg, (fx.Node, torch.dtype))]
        if not dtypes or isinstance(dtypes[0], fx.Node):  # ``x.to(y)``, ``x.to(device)``: the ATen op names a dtype
            named[ir.DTYPE_OF] = node.all_input_nodes[-1]
    if node.target is operator.setitem and isinstance(node.args[0], fx.Node) and not isinstance(node.args[2], fx.Node):
        named[ir.DTYPE_OF] = node.args[0]  # ``x[0] = 1`` makes a constant of x's dtype
    return named


def _is_clear(node: fx.Node, made: Sequence[fx.Node], key: str) -> bool:
    """True if a dtype or limit that a call names can only be the one that the ops it was lowered to name."""
    if key == ir.NUMBER_OF and not any(_names_limit(n) for n in made):
        return False  # the call computes with it
    return len(made) == 1 or (bool(made) and not hasattr(node.target, "__code__"))


def _names_limit(node: fx.Node) -> bool:
    """True if a limit of fp32 is a number of an op, or if the op is a constant, which holds it."""
    if ir.op_name(node) in LIFTS:
        return True
    return any(is_limit(arg, torch.float32) for arg in pytree.tree_leaves((node.args, node.kwargs)))


def _after(last: fx.Node | None, graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that were added to a graph after ``last``."""
    for node in reversed(graph.nodes):
        if node is last:
            return
        yield node


def _apart(value: torch.Tensor, proxy: Any, tracer: Any) -> torch.Tensor:
    """Return a new tensor for the op that returned ``value``, which keeps its proxy (unless the op wrote in place)."""
    newest = get_proxy_slot(value, tracer)
    target = getattr(newest.proxy.node, "target", None)
    in_place = isinstance(target, OpOverload) and schema_of(target).is_mutable
    if newest is proxy or in_place:
        return value
    with disable_proxy_modes_tracing():
        twin = value.view_as(value)
    set_proxy_slot(twin, tracer, newest)
    set_proxy_slot(value, tracer, proxy)
    return twin
