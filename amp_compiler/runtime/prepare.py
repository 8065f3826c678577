"""Compile and load the CPU kernels: an explicit step of the back end, before passes choose kernels for a graph."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .. import ir
from ..kernels import build, cpu
from ..kernels.lowering import BY_OP
from ..policy import Policy
from ..rewrite.facts.functional import PRODUCTS

#: ops that passes may replace by our kernels
_TAKEN = frozenset((*PRODUCTS, *BY_OP))
#: the passes that do so
_TAKERS = frozenset(("fuse_cast_matmul", "lower_kernels"))


def prepare_kernels(gm: fx.GraphModule, policy: Policy, disabled: Collection[str] = ()) -> None:
    """Compile and load the CPU kernels if passes will choose them for ``gm``, a functional graph.

    Without a compiler, or if it fails, the same kernels run in Python (``kernels/build.py``). ``disabled``: the passes
    that are switched off.
    """
    if policy.autocast_device is not None or _TAKERS.issubset(disabled):
        return
    nodes = (n for n in gm.graph.nodes if n.op == "call_function" and n.target in _TAKEN)
    values = (ir.tensor_of(value) for n in nodes for value in (n, *n.all_input_nodes))
    low = {v.dtype for v in values if v is not None and v.dtype in ir.LOW_DTYPES and v.device.type == "cpu"}
    if any(cpu.wants_compiled(dtype) for dtype in low):
        build.prepare()
