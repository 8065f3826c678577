"""Rules for what the model's own code says: its casts, its ``dtype=`` arguments, the tensors that it creates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Decision, Mode, decisions
from amp_compiler.policy import Rule, dtype_name
from amp_compiler.policy.ops.row import OpClass

from .state import At

#: ops that create a tensor of one value, in a dtype that they name
FILLS = ("zeros", "ones", "full", "empty", "eye", "scalar_tensor", "empty_strided")


def selected(at: At) -> Decision | None:
    """A node that selects one output of another has the precision of that output."""
    return decisions.selected(at.node) if ir.is_getitem(at.node) else None


def author_cast(at: At) -> Decision | None:
    """A cast in the model's code is honoured as it is; one that followed another tensor's dtype, as in
    ``x.to(y.dtype)`` (see ``mark_dtype_origin``), follows the precision assigned here."""
    if not ir.is_conversion(at.node):
        return None
    node, state = at.node, at.state
    out, known = decisions.traced(node), ir.origin(node)
    dtype = out[0] if out else None
    shared = state.aliases.is_view(node) or (state.native and not state.like_autocast)  # a body that stays as it is
    if not at.policy.rewrites or known is None or not known.follows or known.unsure or shared:
        return Decision(Mode.NATIVE, dtype, "a cast that the model's code asks for", Rule.AUTHOR, out=out)
    dtype, source = _followed(at), node.args[0]
    held = state.carried.held.get(source) if isinstance(source, fx.Node) else None
    if held is not None and not held.survives(dtype) and not state.like_autocast:
        reason = f"carries the constant {held.value:g}, which {dtype_name(dtype)} cannot represent: stays in fp32"
        causes = (source.name,) if isinstance(source, fx.Node) else ()
        return Decision(Mode.NATIVE, torch.float32, reason, Rule.AUTHOR, out=(torch.float32,), causes=causes)
    reason = f"a cast to the dtype of another value, which is {dtype_name(dtype)}"
    return Decision(Mode.NATIVE, dtype, reason, Rule.FOLLOWS, out=(dtype,), named=dtype, causes=_cause(known))


def _cause(known: ir.Origin) -> tuple[str, ...]:
    return (known.of,) if known.of else ()


def _followed(at: At) -> torch.dtype:
    """Return the dtype that ``x.to(y.dtype)`` stands for: the low one where the model counts as low, else that of
    ``y``. If it is not known which tensor was asked, the dtype that ``x`` had before it was last widened
    (``x.float()`` … and back)."""
    source, known = at.node.args[0], ir.origin(at.node)
    assert isinstance(source, fx.Node)
    assert known is not None
    value, asked = ir.tensor_of(source), at.state.dtype_asked(known.of)
    if at.state.like_autocast and asked is not None:
        return asked
    if value is None or not (ir.is_eligible(value) or value.dtype is torch.bool):
        return torch.float32  # integers, which low precision may not represent
    if at.forced is not None and at.forced.whole:
        return at.forced.dtype
    if at.is_in_low_model:
        return at.low_here
    if asked is not None:
        return asked
    borders = list(_low_border(source))
    inner = [n for n in borders if n.op == "call_function"] or borders
    return decisions.widest([ir.dtype_of(n) for n in inner])


def _low_border(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nearest values at or before ``node`` that are low in the twin."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        value, known = ir.tensor_of(node), ir.origin(node)
        if node in seen or not ir.is_eligible(value):
            continue
        seen.add(node)
        if known is None or known.twin in ir.LOW_DTYPES:
            yield node
        else:
            todo += [n for n in node.all_input_nodes if ir.tensor_of(n) is not None]


def creation(at: At) -> Decision | None:
    """An op that creates a float tensor keeps its dtype; if it asked another value for its dtype, it is low where that
    is."""
    if at.floats or not any(v is not None and v.dtype.is_floating_point for v in ir.tensor_outputs(at.node)):
        return None
    known, low, state = ir.origin(at.node), at.low_here, at.state
    if known is not None and known.follows and at.name in FILLS:
        asked = state.dtype_asked(known.of)
        if state.like_autocast and asked in ir.LOW_DTYPES:
            reason = f"created in the dtype of {known.of}"
            return _created(asked, reason, known)
        if at.is_in_low_model and state.fits_into(at.node, low):
            return _created(low, f"created in the dtype of another value, which is {dtype_name(low)}", known)
    return decisions.as_it_comes(at.node, "creates a tensor in the dtype that the model's code gives it", Rule.CREATION)


def _created(dtype: torch.dtype | None, reason: str, known: ir.Origin) -> Decision:
    return Decision(Mode.NATIVE, dtype, reason, Rule.CREATION, out=(dtype,), named=dtype, causes=_cause(known))


def explicit_dtype(at: At) -> Decision | None:
    """An explicit ``dtype=`` argument wins."""
    if not at.names_dtype:
        return None
    reason = "an explicit dtype= argument wins"
    return decisions.as_it_comes(at.node, reason, Rule.EXPLICIT_DTYPE, at.choice, traced_out=True)


def unsure(at: At) -> Decision | None:
    """If the code takes a different path in low precision, as the twin trace shows, the op is fp32."""
    known = ir.origin(at.node)
    if known is None or not known.unsure:
        return None
    return decisions.cast(at.node, torch.float32, f"kept in fp32: {known.unsure}", Rule.UNSURE, at.choice)


def asked_for_fp32(at: At) -> Decision | None:
    """An op on values that the author cast to fp32 is fp32, where the level would make it low; a white-listed op only
    if that is true of all its operands. The user's own lists take precedence."""
    asked = at.state.asked.among(at.operands, whole=at.cls is OpClass.LOW)
    if asked is None or at.choice.rule in (Rule.WHITE_LIST, Rule.BLACK_LIST):
        return None
    if not at.policy.level_row.treatment(at.cls).asks_for_low:
        return None
    reason = f"computes with {asked.reason}"
    return decisions.cast(at.node, torch.float32, reason, Rule.ASKED, at.choice, causes=asked.causes)
