"""insert_casts: make the graph do what ``assign_precision`` decided.

0. a cast of the author's to the dtype that its source has anyway  →  its source
1. ``linear(x, w)`` decided low  →  ``x_low = cast(x); w_low = cast(w); linear(x_low, w_low)``
2. each cast stands immediately before the op that needs it, one for each use, so that autograd adds up
   gradients where torch.autocast's would (they are merged after autodiff, by ``fold_casts``)
3. a parameter (a leaf that needs a gradient) is cast once, before its first use
4. a node kept "as traced" gets its arguments back in the dtypes that it was traced with
5. outputs get the dtype that the fp32 model gave them, unless ``keep_output_dtypes`` is off

Afterwards ``node.meta["val"]`` is what each node really gives. Requires: assigned. Ensures: cast.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from amp_compiler import graph as g
from amp_compiler.graph import Decision, Mode

from .base import Context, Dialect, Pass

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    return _insert(gm, ctx.keep_output_dtypes)


def _insert(gm: fx.GraphModule, keep_outputs: bool) -> bool:
    graph = gm.graph
    modified = _drop_empty_casts(graph)
    parameters: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def cast(value: fx.Node, dtype: torch.dtype, consumer: fx.Node) -> fx.Node:
        nonlocal modified
        modified = True
        shared = _is_parameter(value)
        if shared and (value, dtype) in parameters:
            return parameters[value, dtype]
        with graph.inserting_before(consumer):
            name = f"{value.name}_{g.DTYPE_NAMES[dtype]}"
            new = graph.create_node("call_function", aten.to.dtype, (value, dtype), name=name)
        tensor = g.tensor_of(value)
        assert tensor is not None
        new.meta["val"] = g.retype(tensor, dtype)
        g.inherit_origin(new, consumer)
        reason = f"cast for {consumer.name}" if consumer.op != "output" else "outputs keep the model's dtypes"
        g.decide(new, Decision(Mode.NATIVE, dtype, reason, out=(dtype,), rule="inserted"))
        if shared:
            parameters[value, dtype] = new
        return new

    for node in list(graph.nodes):
        if node.op == "output":
            if keep_outputs:
                modified |= _restore_outputs(node, cast)
            continue
        known = g.decision(node)
        if known is None or node.op != "call_function" or known.mode is Mode.NATIVE:
            if g.is_higher_order(node) and known is not None:
                modified |= _bodies(gm, node, known)
            continue

        def adapt(name: str, value: fx.Node, node: fx.Node = node, known: Decision = known) -> fx.Node:
            target = wanted_dtype(known, name, value)
            return value if target is None else cast(value, target, node)

        g.map_tensor_args(node, adapt)
        if g.is_higher_order(node):
            modified |= _bodies(gm, node, known)
    _update_values(gm)
    if modified:
        gm.recompile()
    return modified


def _drop_empty_casts(graph: fx.Graph) -> bool:
    """A cast to the dtype that its source now has gives its source back, in torch as here."""
    modified = False
    for node in list(graph.nodes):
        if g.is_cast(node) and g.decision(node) is not None and g.dtype_of(g.cast_source(node)) == g.cast_dtype(node):
            node.replace_all_uses_with(g.cast_source(node))
            graph.erase_node(node)
            modified = True
    return modified


def wanted_dtype(known: Decision, name: str, value: fx.Node) -> torch.dtype | None:
    """The dtype that an argument has to be cast to, or None where it fits as it is."""
    has, traced = g.dtype_of(value), g.tensor_of(value)
    if traced is None or has is None:
        return None
    if known.mode is Mode.CAST and name not in known.keep_args:
        want = known.precision if g.is_eligible(traced) else None
    elif known.mode is Mode.TRACED or name in known.keep_args:
        want = traced.dtype if known.mode is Mode.TRACED and g.is_eligible(traced) else None
    else:
        want = None
    return want if want is not None and want != has else None


def _is_parameter(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr") and bool(node.meta.get(g.PARAMETER))


def _restore_outputs(node: fx.Node, cast: object) -> bool:
    assert callable(cast)
    modified = False

    def restore(value: fx.Node) -> fx.Node:
        nonlocal modified
        traced, has = g.tensor_of(value), g.dtype_of(value)
        if traced is None or has is None or traced.dtype == has or g.decision(value) is None:
            return value
        modified = True
        new = cast(value, traced.dtype, node)
        assert isinstance(new, fx.Node)
        return new

    node.args = (pytree.tree_map_only(fx.Node, restore, node.args[0]),)
    return modified


def _bodies(gm: fx.GraphModule, node: fx.Node, known: Decision) -> bool:
    """Rewrite the graphs inside a higher-order node; a sealed one gives back the dtypes it was traced with."""
    modified = False
    if known.rule in ("transparent", "sealed"):
        for _, inner in g.subgraphs(gm, node):
            modified |= _insert(inner, keep_outputs=known.rule == "sealed")
    return modified


def _update_values(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        known = g.decision(node)
        if known is None:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            if known.out and known.out[0] is not None and value.dtype != known.out[0]:
                node.meta["val"] = g.retype(value, known.out[0])
        elif isinstance(value, (tuple, list)):
            flat, spec = pytree.tree_flatten(value)
            if len(flat) == len(known.out):
                new = [
                    g.retype(v, d) if isinstance(v, torch.Tensor) and d is not None and v.dtype != d else v
                    for v, d in zip(flat, known.out, strict=True)
                ]
                node.meta["val"] = pytree.tree_unflatten(new, spec)


PASS = Pass("insert_casts", Dialect.PRE_DISPATCH, requires=("assigned",), ensures=("cast",), run=run)
