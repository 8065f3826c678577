"""Runs a Dynamo graph under the tracer, node by node, so that the trace is the same graph in pre-dispatch ATen."""

from __future__ import annotations

import functools
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
from ..common.torch_names import HigherOrderOperator, OpOverload, schema_of
from . import higher_order, vmap
from .marked import is_mark
from .placed import Placements
from .promotion import converted, promoting


class LoweringInterpreter(fx.Interpreter):
    """Runs Dynamo's graph under the tracer; custom autograd functions and checkpoints stay nodes.

    An op that has nothing to do (``x.float()`` in fp32, dropout in eval mode) returns its input itself, and the tracer
    would then take every later use of the input for a use of that op. Such an op returns a new tensor here.
    """

    @functools.cached_property
    def placements(self) -> Placements:
        return Placements(self.graph)

    def run_node(self, n: fx.Node) -> Any:
        inputs = [self.env[a] for a in n.all_input_nodes if isinstance(self.env.get(a), torch.Tensor)]
        mode = get_proxy_mode()
        if n.op not in ("call_function", "call_method") or mode is None:
            return super().run_node(n)
        if is_mark(n):
            return self.env[n.args[0]] if isinstance(n.args[0], fx.Node) else None
        before = [(x, get_proxy_slot(x, mode.tracer, None)) for x in inputs]
        result = self._run(n)
        named = {key: n.meta[key] for key in (ir.DTYPE_OF, ir.NUMBER_OF) if key in n.meta}
        if n.op == "call_method" and n.target == "to" and len(n.args) > 1 and isinstance(n.args[1], fx.Node):
            named[ir.DTYPE_OF] = n.args[1].name  # ``x.to(y)``: below this point only y's dtype is known
        for key, of in named.items():
            asked = next((v for k, v in self.env.items() if k.name == of), None)
            if isinstance(asked, torch.Tensor) and isinstance(result, torch.Tensor):
                made, source = (get_proxy_slot(v, mode.tracer, None) for v in (result, asked))
                if made is not None and source is not None:
                    made.proxy.node.meta[key] = source.proxy.node
        for x, proxy in before:
            if result is x and proxy is not None:
                return _apart(x, proxy, mode.tracer)
        return result

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
