"""Rules for values that are written to: by this op, later, through a view, or between calls."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Because, Decision, decisions
from amp_compiler.ir.nesting import policy_at
from amp_compiler.ir.wide import why_wide
from amp_compiler.policy import Rule, dtype_name
from amp_compiler.policy.ops.row import OpClass

from .state import At, State

#: views that mean something else in another dtype
DTYPE_VIEWS = ("view.dtype", "view_as_complex", "view_as_real", "imag")
#: in-place arithmetic that computes in the promoted dtype and rounds once into self
NATIVE_INPLACE = ("add_", "sub_", "mul_", "div_", "copy_")


def view_of_written(at: At) -> Decision | None:
    """A view of a tensor that is written to keeps its dtype: a cast would make a copy, and the write would be lost."""
    if at.state.like_autocast or not at.state.aliases.is_view(at.node):
        return None
    return decisions.as_it_comes(at.node, "a view of a tensor that is written to: keeps its dtype", Rule.VIEW)


def in_place(at: At) -> Decision | None:
    """An op that writes to an argument runs in that argument's dtype."""
    if not at.written:
        return None
    written = [a for n, a in at.floats if n in at.written]
    dtype = ir.dtype_of(written[0]) if written else None
    if dtype is None:
        reason = "writes in place to a tensor whose dtype is never changed"
        return decisions.as_traced(at.node, reason, Rule.IN_PLACE, at.choice)
    reason = "writes in place: runs in the dtype of the tensor it writes to"
    causes = (written[0].name,)
    if at.name in NATIVE_INPLACE:
        return decisions.as_it_comes(at.node, reason, Rule.IN_PLACE, at.choice, causes=causes)
    keep = tuple(at.written)
    return decisions.cast(at.node, dtype, reason, Rule.IN_PLACE, at.choice, keep=keep, causes=causes)


def written_later(at: At) -> Decision | None:
    """An op is fp32 if something is later written into its result that low precision cannot represent."""
    why = at.state.needs_fp32.get(at.node)
    if why is None:
        return None
    return decisions.cast(at.node, torch.float32, why.reason, Rule.CONSTANT, at.choice, causes=why.causes)


def kept_between_calls(at: At) -> Decision | None:
    """An op whose result is kept between calls, where rounding errors would add up, is fp32."""
    if at.node not in at.state.kept_between_calls or at.cls is not OpClass.FOLLOW:
        return None
    reason = "its result is kept between calls, where rounding errors add up"
    return decisions.cast(at.node, torch.float32, reason, Rule.STATE, at.choice)


def makers_in_fp32(state: State) -> dict[fx.Node, Because]:
    """Return the nodes that must run in fp32 because of what is later written into their result, or through a view."""
    found: dict[fx.Node, Because] = {}
    aliases = state.aliases
    state.carried.look_ahead()
    for node in state.gm.graph.nodes if aliases.written else ():
        if node.op != "call_function" or node not in aliases.written:
            continue
        low = policy_at(node, state.ctx.policy).low
        given = [(n, a) for n, a in ir.tensor_args(node) if n not in ir.mutated_args(node)]
        misfit = state.carried.misfit(node, low, given) if ir.mutated_args(node) else None
        why = ""
        if ir.mutated_args(node) and "::" in ir.op_name(node):
            why = f"{ir.op_name(node)}, a custom op, writes to it"
        elif misfit is not None:
            why = f"the constant {misfit.value:g}, written into its result, does not fit {dtype_name(low)}"
        elif aliases.is_view(node) and ir.is_conversion(node) and aliases.observes_alias(node):
            why = f"it shares memory with {node.name}, and one of the two is written to"
        elif aliases.is_view(node) and ir.overload_name(node) in DTYPE_VIEWS:
            why = f"{node.name} reinterprets its bytes, and they are written to"
        if why:
            found[aliases.shared_with(node)[0]] = Because(why, (node.name,))
    state.carried.restart()
    return found


def note_written(node: fx.Node, new: Decision, state: State) -> None:
    """Record a wide value that is written into another one: what shares memory with that is wide too. If it is low, it
    must be created in fp32, unless a product computed it: that stays low, as under autocast, and the write rounds."""
    if not state.wide.applies or node not in state.aliases.written:
        return
    shared = state.aliases.shared_with(node)
    if any(new.wide):
        for other in shared:
            if (known := ir.decision(other)) is not None and known.out == new.out and not known.wide:
                ir.decide(other, replace(known, wide=new.wide))
        return
    read = (a for n, a in ir.tensor_args(node) if n not in ir.mutated_args(node))
    why = next((why for a in read if (why := why_wide(a))), "")
    maker = shared[0]
    choice = policy_at(maker, state.ctx.policy).classify(ir.op_name(maker))
    if why and maker.op == "call_function" and choice.cls is not OpClass.LOW:
        state.takes_wide[maker] = Because(f"{why} is written into its result", (node.name,))
