"""lower_kernels: on a CPU without low-precision units, convolutions run in fp32 between two roundings.

``convolution(x: bf16, w: bf16)``  →  ``amp::wide_convolution(x, w)``; likewise its backward, attention's backward and
``baddbmm``. An LSTM's layer, which computes in fp32 anyway, is only noted, and its kernel made ready.

The same arguments and results; see ``kernels/wide.py`` for what they compute and ``kernels/cpu.py`` for when. Off with
``Policy.torch``, whose results are autocast's to the bit.

Requires: folded. Ensures: folded, lowered. A second run changes nothing.
"""

from __future__ import annotations

from torch import fx

from amp_compiler import ir
from amp_compiler.kernels.cpu import reason, runs_wide
from amp_compiler.kernels.lstm import LAYERS
from amp_compiler.kernels.wide import OPS, wide_form
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import FOLDED, LOWERED


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.policy.autocast_device is not None:
        return False
    modified = False
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in (*OPS, *LAYERS):
            continue
        values = [v for _, a in ir.tensor_args(node) if (v := ir.tensor_of(a)) is not None]
        low = {v.dtype for v in values if v.dtype in ir.LOW_DTYPES}
        if len(low) == 1 and all(v.device.type == "cpu" for v in values) and runs_wide(next(iter(low))):
            node.meta[ir.KERNEL] = f"computed in float32: {reason(next(iter(low)))}"
            if node.target in OPS:
                node.target = wide_form(node.target)
                modified = True
    if modified:
        gm.recompile()
    return modified


PASS = Pass("lower_kernels", Dialect.FUNCTIONAL, requires=(FOLDED,), ensures=(FOLDED, LOWERED), run=run)
