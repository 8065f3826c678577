"""fold_views: remove views of views, and copies that nothing needs.

1. ``t(t(x))``  →  ``x``; likewise two transpositions of the same dimensions
2. ``view(view(x, …), shape)``  →  ``view(x, shape)``, where the shape is known and x itself can be viewed like that
3. ``view(x, its own shape)``, ``expand(x, its own shape)``  →  ``x``
4. ``clone(x)``  →  ``x`` (dropout in eval mode is one), unless the copy or x is written to, an input or a result (which
   may be written later), or the copy has a different memory layout
5. ``cast(clone(cast(x: bf16, f32)), c64)``  →  ``cast(x, c64)``: where rules 1 to 4 bring two casts together, they are
   folded as ``fold_casts`` would have done, and two equal ones become one

Autograd records each of them, and each is an op to dispatch: six transpositions per linear layer, of which two are
needed. Inductor does the same by itself.

Requires: functional; the eager backend. Ensures: viewed. A second run changes nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import EAGER
from amp_compiler.rewrite.facts import FUNCTIONAL, VIEWED

aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default}


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    modified = False
    for _, inner in ir.all_graphs(gm):
        if _fold(inner.graph):
            inner.graph.eliminate_dead_code()
            inner.recompile()
            modified = True
    return modified


def _fold(graph: fx.Graph) -> bool:
    written = ir.written_nodes(graph)
    returned = ir.output_nodes(graph)
    classes = ir.alias_classes(graph)
    frozen = {classes[n] for n in written}
    # an input may be written to after the graph has run, and a result by the caller
    shown = {classes[n] for n in returned} | {classes[n] for n in graph.nodes if n.op == "placeholder"}
    modified = False
    for node in list(graph.nodes):
        if node.op != "call_function" or "recompute" in node.meta or classes[node] in frozen:
            continue
        while _shorten(node):
            modified = True
        same = _same(node)
        if same is None and node.target is aten.clone.default and classes[node] not in shown:
            source = node.args[0]
            if isinstance(source, fx.Node) and classes[source] not in frozen | shown and _alike(node, source):
                same = source
        if same is not None and not (node in returned and same.op == "placeholder"):
            casts = [u for u in node.users if ir.is_cast(u) and classes[u] not in frozen]
            node.replace_all_uses_with(same)
            for cast in casts:
                _fold_cast(cast, returned, written)
            modified = True
    return modified


def _fold_cast(cast: fx.Node, returned: set[fx.Node], written: set[fx.Node]) -> None:
    """Apply rule 5 to a cast whose source has changed."""
    source = ir.cast_source(cast)
    while ir.is_cast(source) and source not in written and ir.cast_source(source) not in written:
        value = ir.tensor_of(ir.cast_source(source))
        if value is None or not ir.lossless(value.dtype, ir.cast_dtype(source)):
            break
        source = ir.cast_source(source)
    if source in written:
        return
    cast.replace_input_with(ir.cast_source(cast), source)
    if cast not in returned and _alike(cast, source):
        cast.replace_all_uses_with(source)
        return
    for other in [u for u in source.users if u is not cast and ir.is_cast(u) and _alike(u, cast)]:
        first, second = min(cast, other), max(cast, other)
        if not {first, second} & (returned | written):
            second.replace_all_uses_with(first)


def _same(node: fx.Node) -> fx.Node | None:
    """Return the source of a view that changes nothing; None for other nodes."""
    inner = node.args[0] if node.args else None
    if not isinstance(inner, fx.Node):
        return None
    if node.target in (aten.t.default, aten.transpose.int) and inner.target is node.target:
        source = inner.args[0]
        if isinstance(source, fx.Node) and _dims(node) == _dims(inner):
            return source
    if (node.target in _VIEWS or node.target is aten.expand.default) and _alike(node, inner):
        return inner
    return None


def _dims(node: fx.Node) -> set[object]:
    value = ir.tensor_of(node)
    assert value is not None
    return {d % value.dim() if isinstance(d, int) else d for d in node.args[1:]}


def _shorten(node: fx.Node) -> bool:
    """Turn a view of a view into a view of the first one's source; True if it was possible."""
    inner = node.args[0] if node.args else None
    if node.target not in _VIEWS or not isinstance(inner, fx.Node) or inner.target not in _VIEWS:
        return False
    source = inner.args[0]
    value, wanted = ir.tensor_of(source) if isinstance(source, fx.Node) else None, ir.tensor_of(node)
    if value is None or wanted is None or not _known(value) or not _known(wanted):
        return False
    if not value.is_contiguous():  # whether another shape is possible is then harder to tell
        return False
    node.update_arg(0, source)
    return True


def _known(value: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _alike(node: fx.Node, other: fx.Node) -> bool:
    """True if both have the same shape and the same memory layout."""
    one, two = ir.tensor_of(node), ir.tensor_of(other)
    if one is None or two is None or not _known(one) or not _known(two):
        return False
    return one.shape == two.shape and one.stride() == two.stride() and one.dtype == two.dtype


PASS = Pass("fold_views", Dialect.FUNCTIONAL, requires=(FUNCTIONAL,), ensures=(VIEWED,), run=run, when=(EAGER,))
