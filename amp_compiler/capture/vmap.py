"""Replace ``torch.vmap`` in a Dynamo graph by the plain ops that it stands for.

Dynamo writes a vmap as calls that open and close a level of torch.func around ops on batched tensors. The pre-dispatch
tracer is above those levels and would take a batched tensor for a value of the graph. So each section from the first
``_vmap_increment_nesting`` to its ``_vmap_decrement_nesting`` is traced by itself, below them, where batching rules
have turned it into plain ATen; ``lower`` then runs that instead of the section.

torch 2.13: the names of those calls, in ``torch._functorch.predispatch`` and ``torch._functorch.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from .. import ir

OPEN, CLOSE = "_vmap_increment_nesting", "_vmap_decrement_nesting"
KNOWN = frozenset({OPEN, CLOSE, "lazy_load_decompositions", "_add_batch_dim", "_remove_batch_dim"})


def is_functorch(node: fx.Node) -> bool:
    """True for a call that opens, closes or uses levels of torch.func."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return "functorch" in (getattr(node.target, "__module__", "") or "") or "functorch" in str(node.target)


def is_vmap(node: fx.Node) -> bool:
    """True for a call that a vmap consists of; other transforms (grad, jvp) have calls of their own."""
    return is_functorch(node) and getattr(node.target, "__name__", "") in KNOWN


def without_vmap(gm: fx.GraphModule) -> fx.GraphModule:
    """Return ``gm`` with each section of vmap replaced by one call of a module; ``gm`` itself if there is none."""
    if not any(is_vmap(n) for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    root = nn.Module()
    for name, child in gm.named_children():
        root.add_module(name, child)
    for name, tensor in (*gm.named_parameters(recurse=False), *gm.named_buffers(recurse=False)):
        setattr(root, name, tensor)
    copied: dict[fx.Node, fx.Node] = {}
    stretch: list[fx.Node] = []
    depth = 0
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "") if is_vmap(node) else ""
        depth += (name == OPEN) - (name == CLOSE)
        if depth or name == CLOSE:
            stretch.append(node)
        elif name != "lazy_load_decompositions":
            copied[node] = graph.node_copy(node, copied.__getitem__)
        if name == CLOSE and depth == 0:
            _one_call(stretch, graph, root, copied)
            stretch = []
    new = fx.GraphModule(root, graph)
    new.meta.update(gm.meta)
    return new


def _one_call(stretch: Sequence[fx.Node], graph: fx.Graph, root: nn.Module, copied: dict[fx.Node, fx.Node]) -> None:
    inside = set(stretch)
    given = list(dict.fromkeys(a for n in stretch for a in n.all_input_nodes if a not in inside))
    wanted = [n for n in stretch if any(u not in inside for u in n.users)]
    body = fx.Graph()
    values = {a: body.placeholder(a.name) for a in given}
    for node in stretch:
        if getattr(node.target, "__name__", "") != "lazy_load_decompositions":
            values[node] = body.node_copy(node, values.__getitem__)
    body.output(tuple(values[n] for n in wanted))
    name = f"vmap_{len(list(root.children()))}"
    root.add_module(name, fx.GraphModule(nn.Module(), body))
    call = graph.call_module(name, tuple(copied[a] for a in given))
    call.meta = {k: v for k, v in stretch[0].meta.items() if k in ("stack_trace", "nn_module_stack", "custom")}
    for index, node in enumerate(wanted):
        copied[node] = graph.call_function(_item, (call, index))
        copied[node].meta = dict(node.meta)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]


def run(
    body: fx.GraphModule, args: Sequence[Any], meta: dict[str, Any], interpret: Callable[[fx.GraphModule], Any]
) -> Any:
    """Run a section of vmap on the tracer's values: it is traced separately, and the result is run by ``interpret``."""
    with disable_proxy_modes_tracing(), torch.no_grad():
        fresh = [ir.retype(a, a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        plain = make_fx(fx.Interpreter(body).run)(*fresh)
    for node in plain.graph.nodes:
        node.meta.update(meta)
    return interpret(plain).run(*args)
