"""Rules for what is left to the policy: the op's class at the level, unless a constant does not fit low precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.errors import BannedOpError
from amp_compiler.ir import Decision, decisions
from amp_compiler.policy import Rule, Treatment, dtype_name
from amp_compiler.policy.ops.row import OpClass

from .state import At

F32 = torch.float32
#: ops that look up rows of a table
LOOKUPS = ("embedding", "index_select", "index")


def by_place(at: At) -> Decision | None:
    """A region, ``set_precision`` or a module rule sets the dtype. Ops that move values follow their input."""
    if at.forced is None:
        return None
    if at.cls is OpClass.EXACT:
        return _exact(at)
    return _checked(at, at.forced.dtype, at.forced.reason, at.forced.rule) if at.forced.whole else None


def stored_low(at: At) -> Decision | None:
    """In a conversion, a lookup in a parameter is low, as the parameter is stored, where the model counts as low."""
    if at.cls is not OpClass.EXACT or at.name not in LOOKUPS or not _is_stored_low(at):
        return None
    reason = f"a lookup in a weight, which {at.policy.level} stores in {dtype_name(at.low)}"
    return _checked(at, at.low, reason, Rule.STORED_LOW, causes=(at.operands[0][1].name,))


def _is_stored_low(at: At) -> bool:
    """True if all operands are parameters of a conversion that stores what it can in low precision."""
    weights = at.state.ctx.weights
    if weights is None or not weights.store_low or not at.policy.level_row.low_model:
        return False
    written = at.state.aliases.written
    return all(a in weights and weights[a].kind == "parameter" and a not in written for _, a in at.operands)


def moves_values(at: At) -> Decision | None:
    """An op that moves or selects values (EXACT) follows its input."""
    return _exact(at) if at.cls is OpClass.EXACT else None


def conditional(at: At) -> Decision | None:
    """An op with arguments that a conditional rule of the policy names is fp32."""
    named = ir.all_args(at.node)
    rule = at.policy.condition_for(at.name, named)
    if rule is None:
        return None
    reason = f"conditional rule: {rule.op} with {rule.argument}={named[rule.argument]!r}"
    return decisions.cast(at.node, F32, reason, Rule.CONDITIONAL, at.choice)


def reads_wide(at: At) -> Decision | None:
    """An op that reads the result of an fp32 op, or that reduces many numbers to one, is fp32 (``ir/wide.py``)."""
    if at.wide is None or at.returns_non_float or at.cls is OpClass.FP32:
        return None
    return decisions.cast(at.node, F32, at.wide.reason, Rule.WIDE, at.choice, causes=at.wide.causes)


def from_constants(at: At) -> Decision | None:
    """What is computed from constants alone is fp32 until it is combined with another value."""
    if at.returns_non_float or at.choice.rule is not Rule.TABLE or not at.state.asked.are_neutral(at.operands):
        return None
    reason = "computed from constants alone: fp32 until it is combined with another value"
    return decisions.cast(at.node, F32, reason, Rule.NEUTRAL, at.choice)


def by_level(at: At) -> Decision:
    """The level's treatment of the op's class; the user's own lists take precedence. An op that returns something other
    than floats (a comparison, an argmax) runs in the widest dtype of its inputs at every level: rounding them could
    only change its result."""
    treatment, choice, level = _treatment(at), at.choice, at.policy.level
    if treatment.asks_for_low:
        if at.cls is OpClass.FP32:
            return _checked(at, at.low, f"level {level} runs everything low ({choice.reason})", Rule.LEVEL)
        return _checked(at, at.low, choice.reason, choice.rule)
    if treatment is Treatment.FP32_LOW_OUTSIDE and (inside := _low_outside(at)) is not None:
        return inside
    if treatment in (Treatment.FP32, Treatment.FP32_LOW_OUTSIDE):
        reason = f"level {level} runs only matrix products and convolutions in low precision"
        return decisions.cast(at.node, F32, choice.reason if at.cls is OpClass.FP32 else reason, choice.rule, choice)
    wider = next((a for _, a in at.operands if ir.dtype_of(a) != at.low), None)
    if wider is None:
        causes = _same(at, at.low)
        return _checked(at, at.low, f"all its inputs are low: {choice.reason}", choice.rule, causes)
    reason = f"follows {wider.name}, which is fp32"
    return decisions.cast(at.node, F32, reason, choice.rule, choice, causes=(wider.name,))


def _treatment(at: At) -> Treatment:
    if at.choice.rule in (Rule.WHITE_LIST, Rule.BLACK_LIST):
        return Treatment.LOW if at.cls is OpClass.LOW else Treatment.FP32
    if at.cls is OpClass.FOLLOW and at.returns_non_float:
        return Treatment.LOWEST_INPUT
    return at.policy.level_row.treatment(at.cls)


def _low_outside(at: At) -> Decision | None:
    """Low in and out, if torch's kernel computes in fp32 by itself and its inputs are low already."""
    row, first = at.choice.row, at.operands[0][1]
    if row is None or not row.fp32_inside or ir.dtype_of(first) != at.low or at.wide is not None:
        return None
    reason = f"low in and out, fp32 inside torch's kernel, because it {at.choice.reason}"
    value = ir.tensor_of(first)
    kept = row.fp32_args_on_cpu if value is not None and value.device.type == "cpu" else ()
    return decisions.cast(at.node, at.low, reason, Rule.FP32_INSIDE, at.choice, keep=kept, causes=(first.name,))


def _exact(at: At) -> Decision:
    given = [a for _, a in at.operands]
    filled = [a for a in given if not _is_empty(a)] or given  # an empty KV cache decides nothing
    dtype = decisions.widest([ir.dtype_of(a) for a in filled])
    if dtype in ir.LOW_DTYPES and at.wide is not None:
        return decisions.cast(at.node, F32, at.wide.reason, Rule.WIDE, at.choice, causes=at.wide.causes)
    return _checked(at, dtype, f"follows its input: {at.choice.reason}", at.choice.rule, _same(at, dtype))


def _same(at: At, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the operand that an op takes its precision from: the first of that dtype, or else the first."""
    given = [a for _, a in at.operands]
    found = next((a for a in given if ir.dtype_of(a) == dtype), given[0] if given else None)
    return (found.name,) if found is not None else ()


def _checked(at: At, dtype: torch.dtype, reason: str, rule: Rule, causes: tuple[str, ...] = ()) -> Decision:
    """Decide on ``dtype``, unless it is low and torch has no kernel for it, or a constant of the op does not fit."""
    row, node, choice = at.choice.row, at.node, at.choice
    if dtype in ir.LOW_DTYPES:
        if row is not None and row.fp32_only:
            told = "torch has no low-precision kernel for it: kept in fp32"
            return decisions.cast(node, F32, told, Rule.FP32_ONLY, choice)
        if row is not None and not _strides_fit(at.operands, dtype, row.stride_bytes):
            told = f"its low-precision kernel needs strides of {row.stride_bytes} bytes: kept in fp32"
            return decisions.cast(node, F32, told, Rule.FP32_ONLY, choice)
        if row is not None and row.banned and dtype is torch.float16:
            where = ir.source_line(node)
            message = f"{at.name}: {row.banned} At {where or node.name}."
            raise BannedOpError(message, node=node.name, source=where, hint=row.banned)
        if ir.has_integer_operand(node) and any(map(ir.is_eligible, ir.tensor_outputs(node))):
            told = "computes with integers, which low precision may not represent: kept in fp32"
            return decisions.cast(node, F32, told, Rule.CONSTANT, choice)
        misfit = at.state.carried.misfit(node, dtype, at.operands, choice.cls)
        if misfit is not None:
            told = f"the constant {misfit.value:g} is not representable in {dtype_name(dtype)}: kept in fp32"
            return decisions.cast(node, F32, told, Rule.CONSTANT, choice, causes=misfit.causes)
    return decisions.cast(node, dtype, reason, rule, choice, causes=causes)


def allows_low(at: At) -> bool:
    """True if nothing about the op's kernel and its constants forbids the low dtype."""
    banned = at.choice.row is not None and bool(at.choice.row.banned)
    return not banned and _checked(at, at.low, "", at.choice.rule).precision in ir.LOW_DTYPES


def _is_empty(node: fx.Node) -> bool:
    value = ir.tensor_of(node)
    return value is not None and any(type(size) is int and size == 0 for size in value.shape)


def _strides_fit(floats: Sequence[tuple[str, fx.Node]], dtype: torch.dtype, stride_bytes: int) -> bool:
    """True if, in ``dtype``, all strides of the matrices in ``floats`` except those of 1 are multiples of
    ``stride_bytes``; a stride that is only known at run time counts as not a multiple."""
    values = [v for _, a in floats if stride_bytes and (v := ir.tensor_of(a)) is not None and v.dim() > 1]
    strides = [s for v in values for s in v.stride() if type(s) is not int or s != 1]
    if not strides:
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings SymPy, a second to import

    return all(statically_known_true(s * dtype.itemsize % stride_bytes == 0) for s in strides)
