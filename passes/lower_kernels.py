"""lower_kernels: replace ops by our kernels where the table ``kernels/lowering.py`` says so.

``convolution(x: bf16, w: bf16)``  →  ``amp::wide_convolution(x, w)`` on a CPU without low-precision units, in fp32
between two roundings; likewise its backward, attention with its backward, and ``baddbmm``. An LSTM layer, which was
captured as one of our kernels already, only gets its reason, and ``keeps=False`` where nothing reads what a backward
needs.

The kernels have the same arguments and results; see ``kernels/wide.py`` for what they compute and ``kernels/cpu.py``
for when they are used. Off with ``Policy.torch``, whose results are bit-identical to autocast's.

Requires: folded. Ensures: folded, lowered. A second run changes nothing.
"""

from __future__ import annotations

from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import FOLDED, LOWERED
from amp_compiler.rewrite.facts.functional import unread_results, wanted_kernel


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.policy.autocast_device is not None:
        return False
    modified = False
    for node in list(gm.graph.nodes):
        kernel, why = wanted_kernel(node)
        if why:
            node.meta[ir.KERNEL] = why
        if kernel is not node.target:
            node.target, modified = kernel, True
        if unread := unread_results(node):
            for dead in [user for user in node.users if user.args[1] in unread]:
                gm.graph.erase_node(dead)
            node.kwargs = {**node.kwargs, "keeps": False}
            results = node.meta["val"]
            node.meta["val"] = tuple(_emptied(v) if i in unread else v for i, v in enumerate(results))
            modified = True
    if modified:
        gm.recompile()
    return modified


def _emptied(value: Tensor) -> Tensor:
    return value.new_empty(0)


PASS = Pass("lower_kernels", Dialect.FUNCTIONAL, requires=(FOLDED,), ensures=(FOLDED, LOWERED), run=run)
