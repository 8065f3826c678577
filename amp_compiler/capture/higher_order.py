"""Lowering of higher-order ops: custom autograd functions, checkpoints and others stay one node each.

torch 2.13 internals, and why: ``reenter_make_fx`` and ``track_tensor_tree``, to keep a higher-order op as one node with
lowered bodies. ``make_fx`` would inline a custom ``autograd.Function`` and silently lose its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree

from .. import ir
from ..common.torch_names import pytree
from . import vmap
from .marked import is_mark
from .vmap import is_functorch, is_vmap

#: higher-order ops that the passes know; the body of any other must not be run on fakes
KNOWN_HIGHER_ORDER = frozenset({
    "autograd_function_apply", "tag_activation_checkpoint", "cond", "while_loop", "scan", "map", "associative_scan",
    "wrap", "wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph",
})  # fmt: skip


def is_closed(target: Any, bodies: Sequence[Any]) -> bool:
    """True if a higher-order op must stay as it is: it is unknown, or its body uses torch.func (the scan of a
    state-space model), which cannot run on the tracer's fakes."""
    if target.name() not in KNOWN_HIGHER_ORDER:
        return True
    ours = target.name() in ("autograd_function_apply", "tag_activation_checkpoint")  # their bodies are lowered here
    found = [inner for body in bodies if isinstance(body, fx.GraphModule) for _, inner in ir.all_graphs(body)]
    nodes = [node for inner in found for node in inner.graph.nodes]
    return any(is_functorch(node) and not (ours and (is_vmap(node) or is_mark(node))) for node in nodes)


def keep_autograd_function(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], interpreter: Any) -> Any:
    forward, backward, *given = args
    lowered_forward = _lower_body(forward, given, interpreter)
    output, saved = _outputs(lowered_forward)
    grads = pytree.tree_leaves(output)
    lowered_backward = _lower_body(backward, [_fresh(v) for v in (*grads, *pytree.tree_leaves(saved))], interpreter)
    frozen = set(kwargs.get("non_differentiable_idx", ()))
    needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in given)
    results = []
    for index, value in enumerate(pytree.tree_leaves(output)):
        fresh = _fresh(value)
        if needs and isinstance(fresh, torch.Tensor) and fresh.is_floating_point() and index not in frozen:
            fresh.requires_grad_()
        results.append(fresh)
    flat = pytree.tree_unflatten(results, pytree.tree_structure(output))
    return _emit(target, [lowered_forward, lowered_backward], given, kwargs, flat)


def keep_checkpoint(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], interpreter: Any) -> Any:
    body, *given = args
    lowered = _lower_body(body, given, interpreter)
    if "_checkpoint_context_fn" in body.meta:
        lowered.meta["_checkpoint_context_fn"] = body.meta["_checkpoint_context_fn"]
    values = _outputs(lowered)
    needs = any(isinstance(a, torch.Tensor) and a.requires_grad for a in given)
    fresh = pytree.tree_map_only(torch.Tensor, lambda v: _fresh(v, needs), values)
    return _emit(target, [lowered], given, kwargs, fresh)


def keep_closed(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a node whose bodies stay as Dynamo wrote them; passes see the node and do not look inside."""
    with disable_proxy_modes_tracing():
        fresh = pytree.tree_map_only(torch.Tensor, lambda t: _fresh(t, t.requires_grad), (args, kwargs))
        values = pytree.tree_map_only(torch.Tensor, lambda t: _fresh(t, t.requires_grad), target(*fresh[0], **fresh[1]))
    for body in pytree.tree_leaves((args, kwargs), is_leaf=lambda v: isinstance(v, fx.GraphModule)):
        if isinstance(body, fx.GraphModule):
            body.meta[ir.CLOSED] = True
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer

    def place(value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            name = tracer.get_fresh_qualname(f"{target.name()}_body")
            tracer.root.register_module(name, value)
            return tracer.create_proxy("get_attr", name, (), {})
        return tracer.unwrap_proxy(value) if isinstance(value, (torch.Tensor, torch.SymInt)) else value

    proxies = pytree.tree_map(place, (args, kwargs), is_leaf=lambda v: isinstance(v, fx.GraphModule))
    out = tracer.create_proxy("call_function", target, *proxies)
    return track_tensor_tree(values, out, constant=None, tracer=tracer)


def _lower_body(body: fx.GraphModule, given: Sequence[Any], interpreter: type[fx.Interpreter]) -> fx.GraphModule:
    from torch._higher_order_ops.utils import reenter_make_fx

    with torch.fx.traceback.preserve_node_meta():
        plain = vmap.without_vmap(body)
        lowered = reenter_make_fx(interpreter(plain, garbage_collect_values=False).run)(*given)
    assert isinstance(lowered, fx.GraphModule)
    return lowered


def _outputs(gm: fx.GraphModule) -> Any:
    result = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    return pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], result)


def _fresh(value: Any, requires_grad: bool = False) -> Any:
    """Return a new fake like ``value`` that no tracer knows."""
    if not isinstance(value, torch.Tensor):
        return value
    with disable_proxy_modes_tracing():
        fresh = ir.retype(value, value.dtype)
    return fresh.requires_grad_() if requires_grad and value.is_floating_point() else fresh


def _emit(target: Any, bodies: list[fx.GraphModule], given: Sequence[Any], kwargs: Any, values: Any) -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    held = []
    for body in bodies:
        name = tracer.get_fresh_qualname(f"{target.name()}_body")
        tracer.root.register_module(name, body)
        held.append(tracer.create_proxy("get_attr", name, (), {}))
    proxies = pytree.tree_map(tracer.unwrap_proxy, tuple(given))
    out = tracer.create_proxy("call_function", target, (*held, *proxies), dict(kwargs))
    return track_tensor_tree(values, out, constant=None, tracer=tracer)
