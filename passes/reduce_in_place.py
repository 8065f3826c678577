"""reduce_in_place: average, reduce and unscale a bucket of gradients in the memory that it was packed into.

1. ``div(cat(…), processes)``                →  ``div_(cat(…), processes)``
2. ``all_reduce(div(…))``                    →  ``all_reduce_(div(…))``
3. ``gradients, found = unscale([bucket])``  →  ``found = unscale_([bucket])``, if every bucket is fp32

The graph is not functional afterwards, so this is one of the last passes; Inductor does the same by itself.

Requires: reduced; the eager backend, no activation checkpointing. Ensures: reduced_in_place. A second run changes
nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.torch_names import collectives
from amp_compiler.kernels import unscale as _defines_amp_unscale  # noqa: F401
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import EAGER, RECOMPUTES_NOTHING, REDUCES
from amp_compiler.rewrite.facts import REDUCED, REDUCED_IN_PLACE
from amp_compiler.rewrite.facts.parallel import collective

aten = torch.ops.aten


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    sent = [node for node in gm.graph.nodes if collective(node) == "all_reduce"]
    for node in sent:
        mean = node.args[0]
        assert isinstance(mean, fx.Node)
        node.target = collectives.all_reduce_.default
        packed = mean.args[0]
        if isinstance(packed, fx.Node) and ir.op_name(packed) == "cat" and len(packed.users) == 1:
            mean.target = aten.div_.Scalar
    unscale = next((n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale"), None)
    if unscale is not None and sent:
        _unscale_in_place(gm, unscale)
    if sent:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return bool(sent)


def _unscale_in_place(gm: fx.GraphModule, unscale: fx.Node) -> None:
    buckets, inverse, found = unscale.args
    assert isinstance(buckets, (list, tuple))
    values = [ir.tensor_of(bucket) for bucket in buckets if isinstance(bucket, fx.Node)]
    if any(value is None or value.dtype != torch.float32 for value in values):
        return
    graph = gm.graph
    with graph.inserting_before(unscale):
        now = ir.call(
            graph, ir.fake_mode(graph), torch.ops.amp.unscale_.default, (list(buckets), inverse, found), {}
        )  # fmt: skip
    for user in list(unscale.users):
        if user.args[1] == 1:
            user.replace_all_uses_with(now)
        else:
            for part in list(user.users):
                part.replace_all_uses_with(buckets[int(str(part.args[1]))])  # type: ignore[arg-type]
                graph.erase_node(part)
        graph.erase_node(user)
    graph.erase_node(unscale)


PASS = Pass(
    "reduce_in_place", Dialect.FUNCTIONAL, requires=(REDUCED,), ensures=(REDUCED_IN_PLACE,), run=run,
    when=(EAGER, REDUCES, RECOMPUTES_NOTHING),
)  # fmt: skip
