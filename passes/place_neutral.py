"""place_neutral: ops that may run in either precision get the one that makes the graph fastest on a device.

1. ``y = add(x, bias)``, fp32 because ``bias`` is, and read by a product  →  low, if casting ``bias`` and adding in low
   precision takes less time than adding in fp32 and casting ``y``
2. ``gelu(h)`` and ``tanh(h)``, low because ``h`` is, and both read by fp32 ops  →  fp32, if one cast of ``h`` takes
   less than the casts of both results
3. ``view``, ``relu`` and other ops that move values go with their input; one with several inputs (``cat``) is low only
   if all of them are

The precisions are chosen together, so that the times of all ops and casts add up to the least: a minimum cut
(``amp_compiler/cost/placement.py``). Where the graph will be differentiated, the backward of each op and the casts of
gradients count too. Casts are counted as they will run: ``insert_casts`` puts one at each use, ``fold_casts`` makes one
of those of one value, and each use has a gradient of its own to cast back. Only ops that ``assign_precision`` allows
both precisions are free; values at the border of a graph inside a node, and those that an op takes as they come, keep
theirs. It only annotates: no node is changed.

Requires: assigned. Ensures: placed. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.messages import size
from amp_compiler.common.torch_names import pytree
from amp_compiler.cost.placement import Change, Problem, Use
from amp_compiler.cost.traffic import is_pointwise
from amp_compiler.ir import Decision, Mode, decisions
from amp_compiler.ir.nesting import policy_at
from amp_compiler.policy import Rule, dtype_name
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context, Costs, Dialect, Pass
from amp_compiler.rewrite.conditions import KNOWS_COSTS
from amp_compiler.rewrite.facts import ASSIGNED, PLACED

F32 = torch.float32
_FOLLOWED = "the dtype that the rules alone give the value which it follows"


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    assert ctx.costs is not None
    return _place(gm, ctx, ctx.costs, inside=None)


def _place(gm: fx.GraphModule, ctx: Context, costs: Costs, inside: Rule | None) -> bool:
    """Place the ops of a graph. ``inside``: the rule of the node that it is inside of."""
    modified = False
    for node in gm.graph.nodes:
        known = ir.decision(node) if ir.is_higher_order(node) else None
        if known is not None and known.rule in (Rule.TRANSPARENT, Rule.SEALED):
            for _, body in ir.subgraphs(gm, node):
                modified |= _place(body, ctx, costs, known.rule)
    if any(_is_neutral(node, known) for node in gm.graph.nodes if (known := ir.decision(node)) is not None):
        modified |= _Graph(gm, ctx, costs, inside).placed()
    return modified


def _is_neutral(node: fx.Node, known: Decision) -> bool:
    """True for an op that may be low whatever its inputs are, if they are rounded."""
    return known.either and known.cls is OpClass.FOLLOW and not ir.returns_non_float(node)


def _may_be_either(source: Any) -> bool:
    known = ir.decision(source) if isinstance(source, fx.Node) else None
    return known is not None and known.either


class _Graph:
    """The ops, values and casts of one graph as a problem. Ops that have one precision together are one op of it:
    ``of`` maps nodes to it."""

    def __init__(self, gm: fx.GraphModule, ctx: Context, costs: Costs, inside: Rule | None) -> None:
        self.gm, self.ctx, self.costs, self.inside = gm, ctx, costs, inside
        self.low = ctx.policy.low
        self.by_name = {node.name: node for node in gm.graph.nodes}
        self.problem = Problem()
        #: ops of the problem for all that is fixed in a precision
        self.fixed = {d: self.problem.add_op(0, 0, usual=d is self.low, fixed=True) for d in (F32, self.low)}
        self.of: dict[fx.Node, int] = {}
        self.numbered: list[fx.Node] = []  # the values of the problem
        self._differentiated = _with_gradient(gm, inside is not None) if ctx.differentiated else frozenset()
        self._name_ops()
        self._add_values()

    # ------------------------------------------------------------------------------------------- the problem

    def _name_ops(self) -> None:
        """Which op of the problem each node is."""
        groups = _Groups()
        pinned: set[fx.Node] = set()
        for node in self.gm.graph.nodes:
            known = ir.decision(node)
            if ir.is_getitem(node) and _may_be_either(node.args[0]):
                groups.join(node, node.args[0])
            elif known is not None and known.either and not _is_neutral(node, known):
                operands = list(dict.fromkeys(_operands(node, known)))
                if len(operands) == 1:
                    groups.join(node, operands[0])
            pinned.update(self._taken_as_they_come(node, known))
        for members in groups.of(self.gm.graph.nodes):
            first = members[0]
            known = ir.decision(first)
            dtype = self._dtype(first)
            if known is None or dtype is None:
                continue
            if known.either and not pinned.intersection(members):
                times = [self._times(node) for node in members]
                low, wide = (sum(pair[place] for pair in times) for place in (0, 1))
                op = self.problem.add_op(low, wide, usual=dtype is self.low)
            else:
                op = self.fixed[dtype]
            self.of.update(dict.fromkeys(members, op))
        for node, op in self.of.items():
            known = ir.decision(node)
            if known is not None and known.either and not _is_neutral(node, known):
                for operand in dict.fromkeys(_operands(node, known)):
                    other = self.of.get(operand)
                    if other is not None and other != op and not self._rounds_anyway(known, operand):
                        self.problem.bind(op, other)

    def _taken_as_they_come(self, node: fx.Node, known: Decision | None) -> Iterator[fx.Node]:
        """Arguments whose dtypes decide on that of the result, by torch's own rules or those of a graph inside."""
        if node.op == "output" and self.inside is Rule.TRANSPARENT:
            yield from node.all_input_nodes
        if known is None or known.mode is not Mode.NATIVE or ir.is_conversion(node) or ir.is_getitem(node):
            return
        yield from node.all_input_nodes

    def _rounds_anyway(self, known: Decision, operand: fx.Node) -> bool:
        """True for an operand that does not decide on the precision of an op that moves values: an empty one."""
        return known.precision is self.low and self._dtype(operand) is F32

    def _dtype(self, node: fx.Node) -> torch.dtype | None:
        """The precision that the rules gave a value or an op of several results; None if it isn't fp32 or low."""
        known = ir.decision(node)
        dtype = ir.dtype_of(node)
        if dtype is None or (known is not None and known.either):
            dtype = known.precision if known is not None else None
        return dtype if dtype in (F32, self.low) else None

    def _times(self, node: fx.Node) -> tuple[float, float]:
        """Seconds of an op in the low dtype and in fp32, with its backward."""
        low, wide = self.costs.seconds(node, self.low), self.costs.seconds(node, F32)
        if node in self._differentiated:
            low += self.costs.backward_seconds(node, self.low)
            wide += self.costs.backward_seconds(node, F32)
        return low, wide

    def _add_values(self) -> None:
        """Every value with its readers. A parameter is cast once, and so is its gradient. What the graph returns is a
        tensor of its own, so its cast serves no other reader."""
        uses: dict[tuple[fx.Node, bool], list[int]] = {}
        for node in self.gm.graph.nodes:
            for value, reader in self._reads(node):
                uses.setdefault((value, node.op == "output"), []).append(reader)
        for (value, _), readers in uses.items():
            maker, tensor = self.of.get(value), ir.tensor_of(value)
            if maker is None or tensor is None or not ir.is_eligible(tensor) or all(r == maker for r in readers):
                continue
            to_low, to_fp32 = self._cast_times(value, tensor)
            trained = value in self._differentiated
            if value.meta.get(ir.PARAMETER):
                to_low, to_fp32 = (seconds * (1 + trained) for seconds in (to_low, to_fp32))
                trained = False
            told = [Use(r, to_fp32, to_low) if trained else Use(r) for r in readers]
            self.problem.add_value(maker, to_low, to_fp32, told)
            self.numbered.append(value)

    def _cast_times(self, value: fx.Node, tensor: torch.Tensor) -> tuple[float, float]:
        """Seconds of a cast to low and of one to fp32; none where a kernel of Inductor's casts on the way."""
        if self.costs.fused and (is_pointwise(value) or all(is_pointwise(user) for user in value.users)):
            return 0.0, 0.0
        wide, low = (tensor if tensor.dtype is dtype else ir.retype(tensor, dtype) for dtype in (F32, self.low))
        return self.costs.cast_seconds(wide, self.low), self.costs.cast_seconds(low, F32)

    def _reads(self, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        """(value, op of the problem that says in which precision it is wanted) for each use with a cast, if need be."""
        known = ir.decision(node)
        if node.op == "output":
            yield from self._outputs(node)
        elif node.op == "call_function" and known is not None and ir.is_conversion(node):
            target = self.fixed.get(known.out[0]) if known.out and known.out[0] is not None else None
            if target is not None and isinstance(node.args[0], fx.Node):
                yield node.args[0], target
        elif node.op == "call_function" and known is not None and known.mode is not Mode.NATIVE:
            written = ir.mutated_args(node)
            for name, arg in ir.tensor_args(node):
                if known.mode is Mode.CAST and name not in known.keep_args:
                    own = self.of.get(node) if known.either else None
                    wanted = own if own is not None else self.fixed.get(known.precision or F32)
                else:
                    tensor = ir.tensor_of(arg)
                    wanted = None if tensor is None or name in written else self.fixed.get(tensor.dtype)
                if wanted is not None:
                    yield arg, wanted

    def _outputs(self, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        """What the graph returns is cast back to the dtype that the model gave it; views of one value, which stay
        views of one value, by one cast of it."""
        if self.inside is Rule.TRANSPARENT or (self.inside is None and not self.ctx.keep_output_dtypes):
            return
        flat = pytree.tree_leaves(node.args[0])
        given = self.gm.meta.get(ir.OUTPUT_DTYPES, [])
        dtypes = given if len(given) == len(flat) else [None] * len(flat)
        classes = ir.alias_classes(self.gm.graph)
        firsts: dict[int, fx.Node] = {}
        for other in self.gm.graph.nodes:
            firsts.setdefault(classes[other], other)
        found: dict[tuple[int, int], dict[fx.Node, None]] = {}
        for value, dtype in zip(flat, dtypes, strict=True):
            tensor = ir.tensor_of(value) if isinstance(value, fx.Node) else None
            wanted = self.fixed.get(dtype or tensor.dtype) if tensor is not None else None
            if wanted is not None:
                found.setdefault((classes[value], wanted), {})[value] = None
        for (number, wanted), values in found.items():
            first = firsts[number]
            alike = len(values) > 1 and all(self.of.get(v) == self.of.get(first) for v in values)
            yield from ((value, wanted) for value in ([first] if alike else values))

    # ------------------------------------------------------------------------------------------- the answer

    def placed(self) -> bool:
        """Solve the problem and write the decisions; True if one differs from what was there."""
        low = self.problem.solve()
        changes = self.problem.changes(low)
        modified = False
        for node in self.gm.graph.nodes:
            known = ir.decision(node)
            if known is None:
                continue
            new = known
            if known.either and node in self.of:
                op = self.of[node]
                new = self._decided(node, known, self.low if low[op] else F32, changes.get(op))
            elif ir.is_getitem(node) and decisions.selected(node).out != known.out:
                new = decisions.selected(node)
            elif known.rule is Rule.FOLLOWS and known.named and any(self._differs(c, known) for c in known.causes):
                new = replace(known, reason=f"stays {dtype_name(known.named)}, {_FOLLOWED}")
            if new != known:
                ir.decide(node, new)
                modified = True
        return modified

    def _differs(self, cause: str, known: Decision) -> bool:
        """True if the value whose dtype a cast took has another one now."""
        return cause in self.by_name and ir.dtype_of(self.by_name[cause]) != known.named

    def _decided(self, node: fx.Node, known: Decision, dtype: torch.dtype, change: Change | None) -> Decision:
        choice = policy_at(node, self.ctx.policy).classify(ir.op_name(node))
        reason, rule, causes = known.reason, known.rule, known.causes
        operands = _operands(node, known)
        if _is_neutral(node, known) or (dtype is F32 and all(ir.dtype_of(a) is not F32 for a in operands)):
            reason, rule, causes = self._reason(dtype, change), Rule.PLACED, ()
        elif dtype is not known.precision:
            followed = next((a for a in operands if ir.dtype_of(a) is dtype), operands[0])
            reason, rule, causes = f"follows its input: {choice.reason}", choice.rule, (followed.name,)
        new = decisions.cast(node, dtype, reason, rule, choice, causes=causes)
        return replace(new, wide=known.wide, either=True)

    def _reason(self, dtype: torch.dtype, change: Change | None) -> str:
        """What the other choice would cost."""
        other, device = dtype_name(self.low if dtype is F32 else F32), self.costs.device.name
        if change is None:
            return f"on {device}, what follows it leaves no choice"
        if change.seconds <= 0:
            return f"on {device} {other} would take the same time"
        told = []
        if casts := ", ".join(self._casts(change)):
            told.append(casts)
        if not told or abs(change.op_seconds) > 0.01 * change.seconds:
            word = "more" if change.op_seconds > 0 else "less"
            told.append(f"the op itself {_microseconds(change.op_seconds)} {word}")
        return f"on {device} {other} would cost {_microseconds(change.seconds)} more: {'; '.join(told)}"

    def _casts(self, change: Change) -> Iterator[str]:
        """``2 more casts of 4.2 MB, 1 fewer of 0.1 MB``."""
        for casts, word in ((change.added, "more"), (change.removed, "fewer")):
            written = sum(self._nbytes(value, self.low if to_low else F32) for value, to_low in casts)
            if casts:
                noun = f" cast{'s' * (len(casts) > 1)}" if casts is change.added or not change.added else ""
                yield f"{len(casts)} {word}{noun} of {size(written)}"

    def _nbytes(self, number: int, dtype: torch.dtype) -> int:
        tensor = ir.tensor_of(self.numbered[number])
        assert tensor is not None
        return ir.nbytes(tensor, dtype)


class _Groups:
    """Nodes that have one precision together."""

    def __init__(self) -> None:
        self._first: dict[fx.Node, fx.Node] = {}

    def join(self, node: fx.Node, source: Any) -> None:
        """Let ``node`` go with ``source``, which stands before it."""
        if isinstance(source, fx.Node):
            self._first[node] = self._first.get(source, source)

    def of(self, nodes: Any) -> list[list[fx.Node]]:
        """The groups, each with the node first that it begins with."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            found.setdefault(self._first.get(node, node), []).append(node)
        return list(found.values())


def _operands(node: fx.Node, known: Decision) -> list[fx.Node]:
    """The float arguments that have the precision of their op."""
    return [a for n, a in ir.tensor_args(node) if n not in known.keep_args and ir.is_eligible(ir.tensor_of(a))]


def _with_gradient(gm: fx.GraphModule, inside: bool) -> frozenset[fx.Node]:
    """The values that a gradient comes back for. ``inside``: any input of the graph may have one."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        value = ir.tensor_of(node)
        if node.op == "placeholder":
            has = value is not None and value.dtype.is_floating_point and (inside or value.requires_grad)
        else:
            floats = any(v is not None and v.dtype.is_floating_point for v in ir.tensor_outputs(node))
            has = floats and ir.op_name(node) != "detach" and any(a in found for a in node.all_input_nodes)
        if has or node.meta.get(ir.PARAMETER):
            found.add(node)
    return frozenset(found)


def _microseconds(seconds: float) -> str:
    return f"{abs(seconds) * 1e6:.3g} µs"


PASS = Pass(
    "place_neutral", Dialect.PRE_DISPATCH, requires=(ASSIGNED,), ensures=(PLACED,), run=run, when=(KNOWS_COSTS,)
)
