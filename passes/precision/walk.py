"""One walk over the nodes of a graph, from inputs to outputs; for each node the first rule that applies decides."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Decision, Mode, decisions
from amp_compiler.policy import Rule
from amp_compiler.rewrite.base import Context

from . import either, limits, writes
from .autocast import like_autocast
from .bodies import higher_order
from .carried import held_by_weights
from .classes import by_level, by_place, conditional, from_constants, moves_values, reads_wide, stored_low
from .code import asked_for_fp32, author_cast, creation, explicit_dtype, selected, unsure
from .state import At, Dtypes, State
from .untouched import (
    already_low,
    in_native_body,
    kept_by_class,
    level_changes_nothing,
    never_changed,
    no_float,
    sparse_gradient,
)
from .writes import in_place, kept_between_calls, view_of_written, written_later

#: in order; the package's docstring lists them, and a test checks that the two agree
RULES = (
    selected, higher_order, author_cast, view_of_written, level_changes_nothing, creation, no_float, in_native_body,
    like_autocast, in_place, never_changed, kept_by_class, sparse_gradient, explicit_dtype, written_later, by_place,
    already_low, unsure, stored_low, moves_values, conditional, reads_wide, from_constants, kept_between_calls,
    asked_for_fp32, by_level,
)  # fmt: skip


def assign(gm: fx.GraphModule, ctx: Context) -> bool:
    """Write a decision on every node; True if one of them has changed."""
    before = {node: ir.decision(node) for _, inner in ir.all_graphs(gm) for node in inner.graph.nodes}
    ir.number_calls(gm)
    held = held_by_weights(gm, ctx)
    _assign(State(gm, ctx, _assign, carried=held), None)
    kept = limits.kept_in_fp32(gm)
    if kept:
        _assign(State(gm, ctx, _assign, own_limits=kept, carried=held), None)
    return any(ir.decision(node) != old for node, old in before.items())


def _assign(state: State, inputs: Dtypes | None) -> None:
    """Decide on all nodes of a graph; start again while wide values turn out to be written into low ones."""
    if not state.like_autocast:
        state.needs_fp32 = writes.makers_in_fp32(state)
    _walk(state, inputs)
    while new := {node: why for node, why in state.takes_wide.items() if node not in state.needs_fp32}:
        state.needs_fp32 |= new
        state.restart()
        _walk(state, inputs)


def _walk(state: State, inputs: Dtypes | None) -> None:
    place = 0
    for node in state.gm.graph.nodes:
        if node.op == "placeholder":
            known = inputs[place] if inputs is not None and place < len(inputs) else None
            new = _input(node, known, state)
            place += 1
        elif node.op == "get_attr":
            out = decisions.traced(node)
            new = Decision(Mode.NATIVE, None, "a constant: keeps its dtype", Rule.INPUT, out=out)
        elif node.op == "call_function":
            at = At(node, state)
            new = state.wide.noted(node, either.noted(at, state.limits.applied(node, decide(at))))
            if new.rule is Rule.IN_PLACE:
                writes.note_written(node, new, state)
        else:
            continue
        state.carried.note(node, new)
        if not state.like_autocast:
            state.asked.note(node, new)
        ir.decide(node, new)


def decide(at: At) -> Decision:
    """Return the decision of the first rule that applies."""
    return next(found for rule in RULES if (found := rule(at)) is not None)


def _input(node: fx.Node, known: torch.dtype | None, state: State) -> Decision:
    out = (known,) if known is not None else decisions.traced(node)
    if (low := node.meta.get(ir.LOW_INPUT)) is not None:
        return Decision(Mode.NATIVE, None, "an input that another graph of the call made low", Rule.INPUT, out=(low,))
    new = Decision(Mode.NATIVE, None, "an input: keeps its dtype", Rule.INPUT, out=out)
    why = state.given_wide.get(node) or node.meta.get(ir.WIDE, "")
    return replace(new, wide=(why,)) if why and state.wide.marks and out == (torch.float32,) else new
