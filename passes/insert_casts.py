"""insert_casts: make the graph do what ``assign_precision`` decided.

0. a dtype or a number that followed a dtype  →  the one decided for it; then a cast in the model's code to the dtype
   that its source has anyway  →  its source
1. ``linear(x, w)`` decided low  →  ``x_low = cast(x); w_low = cast(w); linear(x_low, w_low)``
2. each cast is placed right before the op that needs it, one for each use, so that autograd adds up
   gradients where it would under torch.autocast (``fold_casts`` merges casts after autodiff)
3. a parameter (a leaf that needs a gradient) is cast once, before its first use, unless it is written to
4. a node kept "as traced" gets its arguments back in the dtypes that it was traced with
5. an input that another graph of the call made low is cast back to that dtype, once, before all other nodes
6. outputs get the dtype that the fp32 model gave them, unless ``keep_output_dtypes`` is off

Afterwards ``node.meta["val"]`` is what each node really returns. Requires: assigned. Ensures: cast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.torch_names import pytree
from amp_compiler.ir import Decision, Mode
from amp_compiler.policy import Rule
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import ASSIGNED, CAST

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    return _insert(gm, ctx.keep_output_dtypes)


def _insert(gm: fx.GraphModule, keep_outputs: bool) -> bool:
    graph = gm.graph
    gm.meta[ir.SETTLED] = True
    modified = _low_inputs(graph) | _arguments(graph)
    modified |= _drop_empty_casts(graph)
    parameters: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    written = ir.written_nodes(graph)

    def cast(value: fx.Node, dtype: torch.dtype, consumer: fx.Node) -> fx.Node:
        nonlocal modified
        modified = True
        shared = _is_parameter(value) and value not in written
        if shared and (value, dtype) in parameters:
            return parameters[value, dtype]
        with graph.inserting_before(consumer):
            name = f"{value.name}_{ir.DTYPE_NAMES[dtype]}"
            new = graph.create_node("call_function", aten.to.dtype, (value, dtype), name=name)
        tensor = ir.tensor_of(value)
        assert tensor is not None
        new.meta["val"] = ir.retype(tensor, dtype)
        ir.inherit_origin(new, consumer)
        reason = f"cast for {consumer.name}" if consumer.op != "output" else "outputs keep the model's dtypes"
        ir.decide(new, Decision(Mode.NATIVE, dtype, reason, Rule.INSERTED, out=(dtype,), causes=(consumer.name,)))
        if shared:
            parameters[value, dtype] = new
        return new

    for node in list(graph.nodes):
        if node.op == "output":
            state = {position for position, _ in gm.meta.get(ir.STATE, [])}
            modified |= _restore_outputs(gm, node, cast, None if keep_outputs else state)
            continue
        known = ir.decision(node)
        if known is None or node.op != "call_function" or known.mode is Mode.NATIVE:
            if ir.is_higher_order(node) and known is not None:
                modified |= _bodies(gm, node, known)
            continue

        def adapt(name: str, value: fx.Node, node: fx.Node = node, known: Decision = known) -> fx.Node:
            target = wanted_dtype(known, name, value, ir.mutated_args(node))
            return value if target is None else cast(value, target, node)

        ir.map_tensor_args(node, adapt)
        if ir.is_higher_order(node):
            modified |= _bodies(gm, node, known)
    _update_values(gm)
    modified |= _drop_empty_casts(graph)
    if modified:
        gm.recompile()
    return modified


def _low_inputs(graph: fx.Graph) -> bool:
    """Inputs that count as low have the dtype that the fp32 model gives them: cast them, which loses nothing, and
    have all their readers read the result."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    modified = False
    for node in inputs:
        value, known = ir.tensor_of(node), ir.decision(node)
        if ir.LOW_INPUT not in node.meta or value is None or known is None or known.out == (value.dtype,):
            continue
        (low,) = known.out
        assert first is not None
        assert low is not None
        with graph.inserting_before(first):
            new = graph.create_node("call_function", aten.to.dtype, (node, low), name=f"{node.name}_low")
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
        new.meta["val"] = value  # as traced, until all casts are there
        ir.decide(new, Decision(Mode.NATIVE, low, known.reason, Rule.INSERTED, out=(low,), causes=(node.name,)))
        ir.amend(node, out=(value.dtype,))
        modified = True
    return modified


def _arguments(graph: fx.Graph) -> bool:
    """Set dtype and number arguments as decided; True if one changed."""
    modified = False
    for node in graph.nodes:
        known = ir.decision(node)
        if known is None or (known.named is None and not known.numbers):
            continue
        wanted: dict[str, Any] = dict(known.numbers)
        if known.named is not None:
            wanted["dtype"] = known.named
        for position, (name, value) in enumerate(list(ir.schema_args(node))):
            if name in wanted and value != wanted[name]:
                modified = True
                if position < len(node.args):
                    node.update_arg(position, wanted[name])
                else:
                    node.update_kwarg(name, wanted[name])
    return modified


def _drop_empty_casts(graph: fx.Graph) -> bool:
    """Replace a cast to the dtype that its source now has by the source, which is what torch would return.

    The cast stays for an output, and for a node that needs the dtypes it was traced with, until these have been
    handled: in the trace, the cast and its source differ.
    """
    modified = False
    for node in list(graph.nodes):
        if not ir.is_cast(node) or ir.decision(node) is None:
            continue
        source = ir.cast_source(node)
        if ir.dtype_of(source) != ir.cast_dtype(node):
            continue
        before, after = ir.tensor_of(source), ir.tensor_of(node)
        converts = before is not None and after is not None and before.dtype != after.dtype
        for user in list(node.users):
            known = ir.decision(user)
            if converts and (user.op == "output" or (known is not None and known.mode is Mode.TRACED)):
                continue
            user.replace_input_with(node, source)
            modified = True
        if not node.users:
            graph.erase_node(node)
            modified = True
    return modified


def wanted_dtype(known: Decision, name: str, value: fx.Node, written: frozenset[str]) -> torch.dtype | None:
    """Return the dtype that an argument has to be cast to, or None if it fits as it is."""
    has, traced = ir.dtype_of(value), ir.tensor_of(value)
    if traced is None or has is None:
        return None
    if known.mode is Mode.CAST and name not in known.keep_args:
        want = known.precision if ir.is_eligible(traced) else None
    elif known.mode is Mode.TRACED or (name in known.keep_args and name not in written):
        want = traced.dtype if ir.is_eligible(traced) else None
    else:
        want = None
    return want if want is not None and want != has else None


def _is_parameter(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr") and bool(node.meta.get(ir.PARAMETER))


def _restore_outputs(gm: fx.GraphModule, node: fx.Node, cast: Any, only: set[int] | None) -> bool:
    """Cast each output to the dtype that the model returns: as traced, or as in ``gm.meta`` where tracing lost it.

    ``only``: the positions to look at. Outputs that are views of one value stay views of one value.
    """
    flat, spec = pytree.tree_flatten(node.args[0])
    given = gm.meta.get(ir.OUTPUT_DTYPES, [])
    dtypes = given if len(given) == len(flat) else [None] * len(flat)
    wanted: dict[int, torch.dtype] = {}
    for index, (value, dtype) in enumerate(zip(flat, dtypes, strict=True)):
        traced, has = (ir.tensor_of(value), ir.dtype_of(value)) if isinstance(value, fx.Node) else (None, None)
        if traced is None or has is None or not ir.is_eligible(traced) or ir.decision(value) is None:
            continue
        if has != (want := dtype or traced.dtype) and (only is None or index in only):
            wanted[index] = want
    if not wanted:
        return False
    classes = ir.alias_classes(gm.graph)
    makers: dict[int, fx.Node] = {}
    for other in gm.graph.nodes:
        makers.setdefault(classes[other], other)
    done: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    was = list(flat)
    for index, want in wanted.items():
        value = was[index]
        together = {was[i] for i, w in wanted.items() if w is want and classes[was[i]] == classes[value]}
        root = makers[classes[value]] if len(together) > 1 else value
        flat[index] = _again(value, root if ir.tensor_of(root) is not None else value, want, node, cast, done)
    node.args = (pytree.tree_unflatten(flat, spec),)
    return True


def _again(
    value: fx.Node, root: fx.Node, dtype: torch.dtype, before: fx.Node, cast: Any,
    done: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> fx.Node:  # fmt: skip
    """Return ``value``, a view of ``root``, as the same view of ``root`` cast to ``dtype``."""
    if (value, dtype) not in done:
        if value is root or not value.all_input_nodes:
            done[value, dtype] = cast(value, dtype, before)
        else:
            source = value.all_input_nodes[0]
            viewed = _again(source, root, dtype, before, cast, done)
            if ir.is_cast(value):  # when it was traced, it returned its source
                done[value, dtype] = viewed
                return viewed
            with value.graph.inserting_before(before):
                new = value.graph.node_copy(value, lambda n: viewed if n is source else n)
            new.meta = dict(value.meta)
            known = ir.decision(value)
            assert known is not None
            out = tuple(None if d is None else dtype for d in known.out)
            reason = "a view of another output"
            ir.decide(new, replace(known, mode=Mode.NATIVE, precision=dtype, out=out, reason=reason))
            done[value, dtype] = new
    return done[value, dtype]


def _bodies(gm: fx.GraphModule, node: fx.Node, known: Decision) -> bool:
    """Rewrite the graphs inside a higher-order node; a sealed one returns the dtypes it was traced with."""
    modified = False
    if known.rule in (Rule.TRANSPARENT, Rule.SEALED):
        for _, inner in ir.subgraphs(gm, node):
            modified |= _insert(inner, keep_outputs=known.rule is Rule.SEALED)
    return modified


def _update_values(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        known = ir.decision(node)
        if known is None:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            if known.out and known.out[0] is not None and value.dtype != known.out[0]:
                node.meta["val"] = ir.retype(value, known.out[0])
        elif isinstance(value, (tuple, list)):
            flat, spec = pytree.tree_flatten(value)
            if len(flat) == len(known.out):
                new = [
                    ir.retype(v, d) if isinstance(v, torch.Tensor) and d is not None and v.dtype != d else v
                    for v, d in zip(flat, known.out, strict=True)
                ]
                node.meta["val"] = pytree.tree_unflatten(new, spec)


PASS = Pass("insert_casts", Dialect.PRE_DISPATCH, requires=(ASSIGNED,), ensures=(CAST,), run=run)
