"""normalize: one spelling for every cast, no tracing leftovers, regions as annotations.

1. ``x.float()``, ``x.to(y)``, ``x.type_as(y)``, ``aten._to_copy(x, dtype=d)``  →  ``aten.to.dtype(x, d)``
2. ``_assert_tensor_metadata(x, dtype=f32)``  →  dropped: it asserts dtypes that the rewrite changes;
   ``detach_(x)``, which tracers insert after constants  →  ``detach(x)``: it writes nothing
3. ``_enter_autocast(...) … _exit_autocast(...)`` and ``amp.scope("float32") … amp.scope("")`` (a ``precision``
   scope)  →  dropped; the nodes between are annotated with the innermost region, and how deep in the modules it began
4. ``amp.scope(policy) … amp.scope("")``, a part that was compiled by itself  →  dropped; the nodes between are
   annotated with its policy. A ``precision`` scope around it applies inside too, but an autocast region does not: the
   policy wins. ``O0`` inside other levels becomes a region of fp32, because it must not receive low values from them.

Requires: captured. Ensures: normalized. A second run changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir.nesting import Nested, check_together, has_parts, marked_policy
from amp_compiler.ir.regions import Region
from amp_compiler.policy import Policy, precision_dtype
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import CAPTURED, NORMALIZED

aten = torch.ops.aten
SCOPE = "amp::scope"  # the node where a precision scope begins or ends, see amp_compiler/policy/scopes.py


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    around = Region(*ctx.around) if ctx.around is not None else None
    mixed = not ctx.policy.rewrites and has_parts(gm)
    modified = _regions(gm, _entered(ctx.policy, "", around, 1) if mixed else (around, None), ctx.policy)
    for _, inner in ir.all_graphs(gm):
        if _casts(inner.graph):
            modified = True
    if modified:
        for _, inner in ir.all_graphs(gm):
            inner.recompile()
    return modified


def _casts(graph: fx.Graph) -> bool:
    modified = False
    written = ir.written_nodes(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
            modified = True
        elif node.target is aten.detach_.default:
            node.target = aten.detach.default
            modified = True
        elif _is_plain_cast(node) and not (ir.is_cast(node) and node.target is aten.to.dtype):
            value = ir.tensor_of(node)
            assert value is not None
            other = dict(ir.schema_args(node)).get("other")
            if isinstance(other, fx.Node):
                node.meta[ir.DTYPE_OF] = other.name
            node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], value.dtype), {}
            modified = True
        if ir.is_cast(node) and _converts(node) and written & {node, ir.cast_source(node)}:
            # it made a copy in fp32, and one side is written to: it must copy even if no conversion is left
            node.args = (*node.args, False, True)
            modified = True
    return modified


def _is_plain_cast(node: fx.Node) -> bool:
    """True for a conversion that changes only the dtype, in any of its spellings."""
    if not ir.is_conversion(node):
        return False
    named = dict(ir.schema_args(node))
    if named.get("copy") or named.get("memory_format") is not None or named.get("pin_memory"):
        return False
    if ir.op_name(node) == "_to_copy" and not _converts(node):
        return False  # a plain copy
    source, value = named.get("self", named.get("a")), ir.tensor_of(node)
    before = ir.tensor_of(source) if isinstance(source, fx.Node) else None
    return (
        before is not None and value is not None
        and before.device == value.device and before.layout == value.layout
    )  # fmt: skip


def _converts(node: fx.Node) -> bool:
    source, after = node.args[0], ir.tensor_of(node)
    before = ir.tensor_of(source) if isinstance(source, fx.Node) else None
    return before is not None and after is not None and before.dtype != after.dtype


#: the region around a node, and the part with a policy of its own
Around = tuple[Region | None, Nested | None]


def _entered(policy: Policy, root: str, region: Region | None, depth: int) -> Around:
    """Return what surrounds the nodes of a part, given the region around the part."""
    if policy.rewrites:
        return region, Nested(policy, root)
    return region or Region("level", torch.float32, depth), Nested(replace(policy, level="O1"), root)


def _regions(gm: fx.GraphModule, around: Around, outer: Policy) -> bool:
    """Annotate the nodes of a graph, and of the graphs inside it, with the innermost region around them."""
    modified = False
    stack: list[Around] = [around]
    dead: list[fx.Node] = []
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        depth = len(ir.module_chain(node))
        if name == "_enter_autocast":
            _device, dtype, enabled, *_ = node.args
            chosen = (dtype if dtype is not None else _autocast_dtype(node)) if enabled else None
            stack.append((Region("autocast", chosen, depth), stack[-1][1]))
            dead.append(node)
        elif ir.op_name(node) == SCOPE and (policy := marked_policy(str(node.args[0]))) is not None:
            root, region = ir.module_path(node), stack[-1][0]
            check_together(outer, policy, root)
            kept = region if region is not None and region.kind == "precision" else None
            stack.append(_entered(policy, root, kept, depth))
            dead.append(node)
        elif ir.op_name(node) == SCOPE and node.args[0]:
            stack.append((Region("precision", precision_dtype(node.args[0]), depth), stack[-1][1]))
            dead.append(node)
        elif name == "_exit_autocast" or ir.op_name(node) == SCOPE:
            stack.pop()
            dead.append(node)
        elif node.op == "call_function":
            for key, value in zip((ir.REGION, ir.NESTED), stack[-1], strict=True):
                if value is not None and node.meta.get(key) != value:
                    node.meta[key] = value
                    modified = True
            if ir.is_higher_order(node):
                for _, inner in ir.subgraphs(gm, node):
                    modified |= _regions(inner, stack[-1], outer)
    for node in reversed(dead):
        gm.graph.erase_node(node)
    return modified or bool(dead)


def _autocast_dtype(node: fx.Node) -> torch.dtype:
    return torch.get_autocast_dtype(str(node.args[0]))


PASS = Pass("normalize", Dialect.PRE_DISPATCH, requires=(CAPTURED,), ensures=(NORMALIZED,), run=run)
