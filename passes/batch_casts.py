"""batch_casts: cast all small parameters that are cast to the same dtype with one op, instead of one op each.

``b1_low = cast(b1); b2_low = cast(b2); …``  →  ``flat = cast(cat([b1, b2, …])); b1_low, b2_low, … = split(flat)``

A model has as many biases as matrices; casting each costs an op of its own for a few hundred bytes. Only inputs of
the graph that are one-dimensional, contiguous and have at most ``LARGEST`` elements take part, so the extra copy is
small; the values are bit-identical. Skipped under Inductor, which fuses such casts by itself.

Requires: folded; the eager backend. Ensures: folded, batched. A second run changes nothing.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import EAGER
from amp_compiler.rewrite.facts import BATCHED, FOLDED
from amp_compiler.rewrite.facts.functional import alike_casts

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    groups = alike_casts(gm.graph)
    for casts in groups:
        _batch(gm.graph, casts, ir.cast_dtype(casts[0]))
    if groups:
        gm.recompile()
    return bool(groups)


def _batch(graph: fx.Graph, casts: list[fx.Node], dtype: torch.dtype) -> None:
    values = [v for c in casts if (v := ir.tensor_of(c)) is not None]
    sizes = [int(v.shape[0]) for v in values]
    with graph.inserting_before(casts[0]):
        flat = graph.call_function(aten.cat.default, ([ir.cast_source(c) for c in casts],))
        low = graph.call_function(aten._to_copy.default, (flat,), {"dtype": dtype})
        parts = graph.call_function(aten.split_with_sizes.default, (low, sizes))
        pieces = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(casts))]
    source = ir.tensor_of(ir.cast_source(casts[0]))
    assert source is not None
    flat.meta["val"] = _sized(source, sum(sizes), source.dtype)
    low.meta["val"] = _sized(source, sum(sizes), dtype)
    parts.meta["val"] = [v for v in values]
    for piece, cast in zip(pieces, casts, strict=True):
        piece.meta.update(cast.meta)
        cast.replace_all_uses_with(piece)
        graph.erase_node(cast)


def _sized(like: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    mode = getattr(like, "fake_mode", None)
    if mode is None:
        return torch.empty(size, dtype=dtype, device="meta")
    with mode:
        return torch.empty(size, dtype=dtype, device=like.device)


PASS = Pass("batch_casts", Dialect.FUNCTIONAL, requires=(FOLDED,), ensures=(FOLDED, BATCHED), run=run, when=(EAGER,))
