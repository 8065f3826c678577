"""Where the rules allow both precisions: ops that ``place_neutral`` may give the cheaper one.

Such ops are neutral ones (FOLLOW) and those that move values (EXACT), at a level where they follow their inputs. An op
is fixed if a list, a place in the model's code or a constant decided on it, if something writes to its result, or if it
reads a value that must not be rounded: one that an fp32 op made (``ir/wide.py``) or that the author cast to fp32.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from amp_compiler import ir
from amp_compiler.ir import Decision, Mode
from amp_compiler.policy import Rule, Treatment
from amp_compiler.policy.ops.row import OpClass

from .classes import allows_low
from .state import At


def noted(at: At, new: Decision) -> Decision:
    """The decision, which says also whether the other precision would be allowed."""
    return replace(new, either=True) if at.state.places and _allows_both(at, new) else new


def _allows_both(at: At, new: Decision) -> bool:
    if new.mode is not Mode.CAST or new.rule not in (Rule.TABLE, Rule.FOLLOW_LIST) or new.numbers:
        return False
    if at.cls not in (OpClass.FOLLOW, OpClass.EXACT) or at.forced is not None or at.node in at.state.aliases.written:
        return False
    if at.policy.level_row.follow is not Treatment.LOWEST_INPUT or _has_limit(at):
        return False
    if new.precision not in (torch.float32, at.low) or (new.precision is torch.float32 and not allows_low(at)):
        return False
    return at.cls is OpClass.EXACT or at.returns_non_float or _may_round(at)


def _may_round(at: At) -> bool:
    """True if an op may read all its operands rounded."""
    asked = at.state.asked.among(at.operands, whole=False)
    return asked is None and at.state.wide.would_ask(at.node, [a for _, a in at.operands], at.choice) is None


def _has_limit(at: At) -> bool:
    """True if one of the op's numbers is the limit of a dtype, and goes with the precision."""
    known = ir.origin(at.node)
    return known is not None and bool(known.numbers)
