"""widen_weights: on a CPU without low-precision units, run products with a stored weight in fp32 between two roundings.

``mm(x: bf16, t(w: bf16))``  →  ``cast(mm(cast(x, f32), t(w_f32)), bf16)``; likewise ``addmm``, ``bmm`` and
``convolution``, with the bias. ``w_f32`` is the stored weight widened once, when the model is first called; a weight
that is read transposed, like a linear layer's, is stored transposed, which makes the fp32 product an eighth faster.

The numbers are those of ``amp::cast_matmul``: low operands, fp32 sums, one rounding. ``x`` is widened once for all
products that read it, even through different views. The copies need twice the memory of the low weights that they are
made from; ``cache_weights = False`` on a converted model avoids them.

Requires: functional; the eager backend, ``cache_weights``, kernels that are not compiled; and ``ctx.weights``: without
them it does nothing. Ensures: functional. A second run changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir.weights import Weights, drop_unread
from amp_compiler.kernels.cpu import runs_wide
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import CACHES_WEIGHTS, EAGER, KERNELS_IN_PYTHON
from amp_compiler.rewrite.facts import FUNCTIONAL

aten = torch.ops.aten
#: op -> the positions of its operands; its other arguments are settings
PRODUCTS = {
    aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
}  # fmt: skip
#: ops that show the elements of a weight in another shape or order, without copying them
VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.unsqueeze.default,
         aten.expand.default}  # fmt: skip


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.weights is None or ctx.policy.autocast_device is not None:
        return False
    widen = _Widen(gm.graph, ctx.weights)
    products = [n for n in gm.graph.nodes if n.target in PRODUCTS and widen.takes(n)]
    for node in products:
        widen.product(node)
    if products:
        gm.graph.eliminate_dead_code()
        drop_unread(gm.graph, ctx.weights)
        gm.recompile()
    return bool(products)


class _Widen:
    def __init__(self, graph: fx.Graph, weights: Weights) -> None:
        self.graph, self.weights = graph, weights
        self.fixed = set(weights.fixed(graph))
        self.wide: dict[fx.Node, fx.Node] = {}  # value -> the same in fp32
        self.turned: dict[fx.Node, fx.Node] = {}  # weight -> its transpose in fp32, contiguous

    def takes(self, node: fx.Node) -> bool:
        value = ir.tensor_of(node)
        if value is None or value.dtype not in ir.LOW_DTYPES or value.device.type != "cpu":
            return False
        if not runs_wide(value.dtype):
            return False
        return any(self.root(a) is not None for a in self.operands(node)) and not node.kwargs

    def operands(self, node: fx.Node) -> list[fx.Node]:
        places = PRODUCTS[node.target]  # type: ignore[index]
        return [a for i, a in enumerate(node.args) if i in places and isinstance(a, fx.Node)]

    def root(self, node: fx.Node) -> fx.Node | None:
        """Return the low weight that an operand is a view of; None if it isn't one."""
        while node.target in VIEWS:
            node = node.all_input_nodes[0]
        return node if node in self.fixed and node.meta["val"].dtype in ir.LOW_DTYPES else None

    def shows_all(self, node: fx.Node) -> bool:
        """True if a view has each element of its source once: then the source may be widened for all its views."""
        return node.target is not aten.expand.default and len(node.all_input_nodes) == 1

    def product(self, node: fx.Node) -> None:
        low = node.meta["val"].dtype
        for operand in self.operands(node):
            node.replace_input_with(operand, self.widened(operand, node))
        node.meta["val"] = ir.retype(node.meta["val"], torch.float32)
        readers = list(node.users)
        with self.graph.inserting_after(node):
            rounded = self.graph.call_function(aten._to_copy.default, (node,), {"dtype": low})
        rounded.meta["val"] = ir.retype(node.meta["val"], low)
        ir.inherit_origin(rounded, node)
        for user in readers:
            user.replace_input_with(node, rounded)

    def widened(self, operand: fx.Node, before: fx.Node) -> fx.Node:
        if operand.meta["val"].dtype is torch.float32:
            return operand
        if operand in self.wide:
            return self.wide[operand]
        value = ir.retype(operand.meta["val"], torch.float32)
        if operand in self.fixed:
            make = self.weights[operand].make
            new = self.weights.add(self.graph, operand, "f32", partial(_widened, make), value, rounded=True)
        elif operand.target is aten.t.default and operand.args[0] in self.fixed:
            new = self.transposed(operand.all_input_nodes[0], value)
        elif operand.target in VIEWS and (self.root(operand) is not None or self.shows_all(operand)):
            source = self.widened(operand.all_input_nodes[0], operand)
            with self.graph.inserting_after(operand):
                new = self.graph.node_copy(operand, lambda n: source)
            new.meta = {**operand.meta, "val": value}
        else:
            with self.graph.inserting_after(operand):
                new = self.graph.call_function(aten._to_copy.default, (operand,), {"dtype": torch.float32})
            new.meta["val"] = value
            ir.inherit_origin(new, before)
        self.wide[operand] = new
        return new

    def transposed(self, weight: fx.Node, like: torch.Tensor) -> fx.Node:
        if weight not in self.turned:
            mode = getattr(like, "fake_mode", None)
            with mode if mode is not None else contextlib.nullcontext(), torch.no_grad():
                value = like.contiguous()
            make = partial(_turned, self.weights[weight].make)
            self.turned[weight] = self.weights.add(self.graph, weight, "t_f32", make, value)
        return self.turned[weight]


def _widened(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    return make().float()


def _turned(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    return make().t().float().contiguous()


PASS = Pass(
    "widen_weights", Dialect.FUNCTIONAL, requires=(FUNCTIONAL,),
    ensures=(FUNCTIONAL,), run=run, when=(EAGER, CACHES_WEIGHTS, KERNELS_IN_PYTHON),
)  # fmt: skip
