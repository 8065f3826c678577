"""Wide values: at O2, the result of an fp32 op stays fp32 until a white-listed op reads it.

``sum``, ``pow``, ``exp`` and losses run in fp32 because their results may exceed the range of low precision or lose
their digits there. Rounding such a result in the next addition would undo that, so ``assign_precision`` follows it from
node to node. A value is *wide* if it is

1. the fp32 result of an op of class FP32, by the table or by the user's black list (not of one that is *fp32 inside*
   and runs low);
2. the fp32 result of a neutral op that reads a wide value, or of one that moves or selects values of a wide one;
3. one number that a reduction computes from many (``x.mean()``, ``torch.dot``), whatever the op's class, unless it is
   on the white list: such numbers are losses, norms and counts, and cost nothing in fp32;
4. an input of the graph that an earlier piece of the same call made wide, or a target of a compiled training step;
5. an input of a graph inside a higher-order op, or a result of one, if it is wide on the other side.

A neutral op (FOLLOW) that reads a wide value runs in fp32, and so does arithmetic on single numbers that the graph
returns: a scalar loss is fp32 whatever it is computed from. White-listed ops round the wide values that they read, and
their results are not wide; a cast that follows a dtype (``x.to(y.dtype)``) ends the chain. What is computed from
constants of the model's code alone is not wide: its values are known, and ``constants`` checks their range.

``Handed`` records the wide values that pieces of one call pass to each other, and, where a model is in pieces only
because of ``torch.distributed``, which of them are low: a value goes from piece to piece in the dtype that the fp32
model gives it, and the next piece has to treat it as the same graph would.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.torch_names import OpOverload, pytree
from ..policy import Choice, Policy, Rule
from ..policy.ops.row import OpClass
from .meta import Because, Decision
from .nesting import policies_in, policy_at

#: ops that select values and reduce many numbers to one
SELECTING_REDUCTIONS = ("amax", "amin")
#: rules of decisions on nodes whose results don't come from their arguments' values, or that end the chain
ENDS = (Rule.CREATION, Rule.NO_FLOAT, Rule.INPUT, Rule.FOLLOWS, Rule.LEVEL)
_WIDE_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def why_wide(node: Any) -> str:
    """Return what made the value of ``node`` wide, in words; empty if it is not wide."""
    known = ir.decision(node) if isinstance(node, fx.Node) else None
    return known.wide[0] if known is not None and len(known.wide) == 1 else ""


def wide_outputs(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return ``why_wide`` of each output of a graph."""
    last = next(iter(reversed(gm.graph.nodes)))
    return tuple(why_wide(value) for value in pytree.tree_leaves(last.args[0]))


def _low_outputs(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """The low dtype in which each output of a graph was computed, if it was cast back for its reader only."""
    last = next(iter(reversed(gm.graph.nodes)))
    found: list[torch.dtype | None] = []
    for value in pytree.tree_leaves(last.args[0]):
        known = ir.decision(value) if isinstance(value, fx.Node) else None
        source = ir.cast_source(value) if known is not None and known.rule is Rule.INSERTED else None
        dtype = ir.dtype_of(source) if isinstance(source, fx.Node) else None
        found.append(dtype if dtype in ir.LOW_DTYPES else None)
    return found


class WideRule:
    """The rule for one graph. ``known``: nodes whose values are constants. ``marks``: say which values are wide at
    levels too that do not keep them, for ``place_neutral``."""

    def __init__(self, gm: fx.GraphModule, policy: Policy, known: Container[fx.Node], *, marks: bool = False) -> None:
        self.policy, self.known = policy, known
        self.applies = any(p.keeps_wide for p in policies_in(gm, policy))
        self.marks = self.applies or marks
        self.returned = _returned_scalars(gm) if self.marks else set()

    def asks_for_fp32(self, node: fx.Node, args: Iterable[fx.Node], choice: Choice) -> Because | None:
        """Return why ``node`` has to run in fp32; None if the rule does not apply."""
        if not self.applies or not policy_at(node, self.policy).keeps_wide:
            return None
        return self.would_ask(node, args, choice)

    def would_ask(self, node: fx.Node, args: Iterable[fx.Node], choice: Choice) -> Because | None:
        """Return the same as at a level that keeps wide values."""
        if choice.rule is Rule.WHITE_LIST:
            return None
        given = list(args)
        if choice.cls is OpClass.LOW:
            reason = "computes a scalar that is returned, such as a loss: kept in fp32"
            return Because(reason) if node in self.returned else None
        if wide := next((a for a in given if why_wide(a)), None):
            return Because(f"reads {why_wide(wide)}", (wide.name,))
        may_reduce = choice.cls is not OpClass.EXACT or ir.op_name(node) in SELECTING_REDUCTIONS
        if may_reduce and _reduces_to_scalar(node, given):
            return Because("reduces many values to one number, such as a loss or a norm: kept in fp32")
        if node in self.returned and choice.cls is OpClass.FOLLOW:
            return Because("part of a scalar that is returned, such as a loss: kept in fp32")
        return None

    def noted(self, node: fx.Node, new: Decision) -> Decision:
        """Return the decision on ``node``, extended by which of its results are wide."""
        why = self._made_wide(node, new) if self.marks and node not in self.known else ""
        wide = tuple(why if dtype in _WIDE_DTYPES else "" for dtype in new.out)
        return replace(new, wide=wide) if any(wide) else new

    def _made_wide(self, node: fx.Node, new: Decision) -> str:
        if new.rule in ENDS:
            return ""
        if ir.is_getitem(node):
            source, index = node.args
            known = ir.decision(source) if isinstance(source, fx.Node) else None
            found = known.wide if known is not None else ()
            return found[index] if isinstance(index, int) and index < len(found) else ""
        choice = policy_at(node, self.policy).classify(ir.op_name(node))
        if choice.cls is OpClass.LOW:
            return ""
        if choice.cls is OpClass.FP32 or new.rule is Rule.CONDITIONAL:
            return f"the fp32 result of {described(node)}"
        if choice.cls is OpClass.KEEP and _reads_no_value(node):
            return ""
        inherited = next((why for _, a in ir.tensor_args(node) if (why := why_wide(a))), "")
        return inherited or (f"the fp32 result of {described(node)}" if new.rule is Rule.WIDE else "")


def described(node: fx.Node) -> str:
    """Return an op and the line it comes from: ``sum (model.py:12)``."""
    place = ir.source_line(node).partition(" in ")[0]
    return f"{ir.op_name(node)} ({os.path.basename(place)})" if place else ir.op_name(node)


def _reduces_to_scalar(node: fx.Node, args: Sequence[fx.Node]) -> bool:
    result = ir.tensor_of(node)
    if result is None or result.dim() != 0 or not ir.is_eligible(result):
        return False
    return any((value := ir.tensor_of(a)) is not None and value.dim() > 0 for a in args)


def _reads_no_value(node: fx.Node) -> bool:
    """True for ops such as ``zeros_like``, ``new_full``, ``randn_like``, which read a shape only or draw numbers."""
    name, target = ir.op_name(node), node.target
    random = isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return random or name.endswith("_like") or name.startswith("new_")


def _returned_scalars(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the single numbers that the graph returns, and those that they are computed from. The loss of a training
    step may have dimensions of size 1."""
    last = next(iter(reversed(gm.graph.nodes)))
    results = pytree.tree_leaves(last.args[0]) if last.op == "output" else []
    loss = results[gm.meta[ir.LOSS]] if gm.meta.get(ir.LOSS) is not None else None
    todo = [n for n in results if isinstance(n, fx.Node) and _is_scalar(n) and (n is loss or not n.meta["val"].shape)]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            todo += [a for a in node.all_input_nodes if _is_scalar(a)]
    return found


def _is_scalar(node: fx.Node) -> bool:
    """True for a float of one element."""
    value = ir.tensor_of(node)
    if value is None or not value.dtype.is_floating_point:
        return False
    return all(type(size) is int and size == 1 for size in value.shape)


# ---------------------------------------------------------------------------------- from piece to piece


_TARGET = "a target of the training step"


class _Calls(threading.local):
    def __init__(self) -> None:
        self.running = 0
        self.found: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self.low: dict[int, tuple[weakref.ref[torch.Tensor], torch.dtype]] = {}


class Handed:
    """The wide values that the pieces of the running call have computed so far. It does not keep them alive.

    ``notes_low``: remember low values as well.
    """

    def __init__(self) -> None:
        self._calls = _Calls()
        self.notes_low = False

    def begin(self, given: Any = None) -> None:
        """Begin a call of a compiled model, which ``end`` must end; ``given``: values that count as wide from the
        start."""
        self._calls.running += 1
        if given is None:
            return
        for value in (given,) if isinstance(given, torch.Tensor) else pytree.tree_leaves(given):
            self.add(value, _TARGET)

    def end(self) -> None:
        calls = self._calls
        calls.running -= 1
        if not calls.running:
            if calls.found:
                calls.found.clear()
            if calls.low:
                calls.low.clear()

    def add(self, value: Any, why: str) -> None:
        if isinstance(value, torch.Tensor):
            self._calls.found[id(value)] = (weakref.ref(value), why)

    def why(self, value: Any) -> str:
        """Return what made this tensor, or the one that it is a view of, wide in the running call; empty if nothing."""
        found = self._calls.found
        for tensor in (value, value._base) if found and isinstance(value, torch.Tensor) else ():
            known = found.get(id(tensor))
            if known is not None and known[0]() is tensor:
                return known[1]
        return ""

    def low(self, value: Any) -> torch.dtype | None:
        """The low dtype that holds each value of this tensor, by the piece that made it, or the one that it is a view
        of; None if no piece did."""
        found = self._calls.low
        for tensor in (value, value._base) if found and isinstance(value, torch.Tensor) else ():
            known = found.get(id(tensor))
            if known is not None and known[0]() is tensor:
                return known[1]
        return None

    def from_piece(self, graph: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, which runs ``graph``, and remembers its wide and low results."""
        places = [(place, why) for place, why in enumerate(wide_outputs(graph)) if why]
        low = [(place, dtype) for place, dtype in enumerate(_low_outputs(graph)) if dtype] if self.notes_low else []
        if not places and not low:
            return run

        def call(*args: Any) -> Any:
            results = run(*args)
            for place, why in places:
                self.add(results[place], why)
            for place, dtype in low:
                if isinstance(results[place], torch.Tensor):
                    self._calls.low[id(results[place])] = (weakref.ref(results[place]), dtype)
            return results

        return call
