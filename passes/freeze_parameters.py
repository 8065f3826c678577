"""freeze_parameters: round each weight once, at conversion, and store it in the precision that its readers want.

1. ``linear(x, cast(w: f32, bf16))``, nothing else reads ``w``  →  ``linear(x, w: bf16)``: stored low
2. ``linear(x, cast(w, bf16)), exp(w)``  →  ``linear(x, w_bf16), exp(w)``: stored twice, once per dtype, however many
   readers
3. ``cast(t(w), bf16)``  →  ``t(w: bf16)``, ``cast(embedding(w, ids), bf16)``  →  ``embedding(w: bf16, ids)``: an op
   that only moves or selects values of a weight is between it and the rounding, and commutes with it. If something
   also reads the weight in fp32, ``t(w)`` is handled as in rule 2, and the result of a lookup is rounded when the model
   runs, which costs less than a second table
4. a weight that ``cond`` passes to its branches is stored low if all of them want it low, and as it is otherwise
5. a weight that overflows in the low-precision dtype, or becomes all zeros, stays fp32 with its cast, and is reported
6. a weight that nothing reads is not stored

A tensor that is written to doesn't count as a weight: its casts stay. No value changes, and no cast of a weight is left
to run.

Requires: cast; ``cast_params``; and ``ctx.weights``: without them it does nothing. Ensures: cast, frozen. A second run
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import DTYPE_NAMES
from amp_compiler.ir.weights import Weights, drop_unread, misfit, moves
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.conditions import STORES_LOW
from amp_compiler.rewrite.facts import CAST, FROZEN


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.weights is None:
        return False
    freeze = _Freeze(gm.graph, ctx.weights)
    modified = False
    for node in ctx.weights.fixed(gm.graph):
        if node.meta["val"].dtype is torch.float32:
            modified |= freeze.weight(node)
    modified |= drop_unread(gm.graph, ctx.weights)
    if modified:
        for _, inner in ir.all_graphs(gm):
            inner.recompile()
    return modified


def _in_branches(user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Return the inputs of the branches of a ``cond`` that stand for ``node``; none if a branch is not visible."""
    owner = user.graph.owning_module
    if ir.op_name(user) != "higher_order::cond" or owner is None:
        return []
    bodies = [body for _, body in ir.subgraphs(owner, user)]
    found = [place for body in bodies for place, given in ir.operands(user, body) if given is node]
    return found if len(bodies) == 2 else []


def _rounded(make: Callable[[], torch.Tensor], low: torch.dtype) -> torch.Tensor:
    return make().to(low)


class _Freeze:
    def __init__(self, graph: fx.Graph, weights: Weights) -> None:
        self.graph, self.weights = graph, weights
        self._memory: dict[fx.Graph, tuple[set[fx.Node], dict[fx.Node, int]]] = {}

    def weight(self, node: fx.Node) -> bool:
        wanted = self.wanted(node)
        lows = {dtype for dtype in wanted if dtype is not None}
        if not lows:
            return False
        value = self.weights.value(node)
        fitting = set()
        for low in lows:
            if (peak := misfit(value, low)) is None:
                fitting.add(low)
            else:
                self.weights.keep(node, peak, low)
        make, modified = self.weights[node].make, False
        if wanted == fitting and len(fitting) == 1:
            (low,) = fitting
            self.weights.change(node, partial(_rounded, make, low), low)
            self.now_low(node, low)
            return True
        for low in sorted(fitting & self.wanted(node, constant=True), key=str):
            rounded = self.weights.add(
                self.graph, node, DTYPE_NAMES[low], partial(_rounded, make, low), ir.retype(node.meta["val"], low),
                rounded=True,
            )  # fmt: skip
            self.read_low(node, rounded, low)
            if None not in wanted:
                self.weights.stored[node.name] = rounded.name
            modified = True
        return modified

    def is_rounding(self, node: fx.Node) -> bool:
        return ir.is_float_cast(node) and ir.cast_dtype(node) in ir.LOW_DTYPES and self.is_inner(node)

    def passes_on(self, node: fx.Node) -> bool:
        return moves(node) and self.is_inner(node)

    def is_inner(self, node: fx.Node) -> bool:
        """True unless a value, or a view of it, is returned to the caller or written to."""
        if node.graph not in self._memory:
            self._memory[node.graph] = ir.written_nodes(node.graph), ir.alias_classes(node.graph)
        written, classes = self._memory[node.graph]
        if node in written:
            return False
        todo = [node]
        while todo:
            for user in todo.pop().users:
                if user.op == "output":
                    return False
                if classes.get(user, -1) == classes.get(node):
                    todo.append(user)
        return True

    def wanted(self, node: fx.Node, constant: bool = False) -> set[torch.dtype | None]:
        """Return the dtypes that readers of a weight round it to; None stands for a reader that uses it as it is.
        ``constant``: ignore readers that also depend on an input of the model, such as a lookup."""
        found: set[torch.dtype | None] = set()
        for user in node.users:
            if self.is_rounding(user):
                found.add(ir.cast_dtype(user))
            elif self.passes_on(user):
                if not constant or len(user.all_input_nodes) == 1:
                    found |= self.wanted(user, constant)
            elif not constant and (places := _in_branches(user, node)):
                for place in places:
                    found |= self.wanted(place)
            else:
                found.add(None)
        return found

    def now_low(self, node: fx.Node, low: torch.dtype) -> None:
        """Update the graph after ``node`` has become low, as all its readers want it."""
        for user in list(node.users):
            if self.is_rounding(user) or ir.is_cast(user):
                user.replace_all_uses_with(node)
                user.graph.erase_node(user)
            elif places := _in_branches(user, node):
                for place in places:
                    place.meta["val"] = ir.retype(place.meta["val"], low)
                    if ir.decision(place) is not None:
                        ir.amend(place, out=(low,))
                    self.now_low(place, low)
            else:
                user.meta["val"] = ir.retype(user.meta["val"], low)
                if ir.decision(user) is not None:
                    ir.amend(user, out=(low,), precision=low)
                self.now_low(user, low)

    def read_low(self, node: fx.Node, rounded: fx.Node, low: torch.dtype) -> None:
        """Let the readers of ``node`` that round it to ``low`` read ``rounded``, the same value already rounded."""
        for user in list(node.users):
            if self.is_rounding(user) and ir.cast_dtype(user) is low:
                user.replace_all_uses_with(rounded)
                self.graph.erase_node(user)
            elif self.passes_on(user) and len(user.all_input_nodes) == 1 and low in self.wanted(user):
                with self.graph.inserting_before(user):
                    again = self.graph.node_copy(user, lambda n: rounded if n is node else n)
                again.meta = {**user.meta, "val": ir.retype(user.meta["val"], low)}
                if ir.decision(again) is not None:
                    ir.amend(again, out=(low,), precision=low)
                self.read_low(user, again, low)
                if not user.users:
                    self.graph.erase_node(user)


PASS = Pass(
    "freeze_parameters", Dialect.PRE_DISPATCH, requires=(CAST,), ensures=(CAST, FROZEN), run=run, when=(STORES_LOW,)
)
