"""Numbers that are the limit of a dtype, such as ``torch.finfo(x.dtype).min``.

Such a number becomes the limit of the low-precision dtype where its op is low, or where it would otherwise turn into
inf or 0 later. If everything that computes with it turns out to be fp32, the fp32 limit is right, and the walk starts
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Decision, Mode, constants
from amp_compiler.ir.nesting import policy_at
from amp_compiler.policy import Rule
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context

from .places import low_at


class Limits:
    """The limits among the numbers of one graph. ``kept``: nodes whose numbers stay as they were in fp32."""

    def __init__(self, ctx: Context, by_name: Mapping[str, fx.Node], kept: frozenset[fx.Node]) -> None:
        self.ctx, self.by_name, self.kept = ctx, by_name, kept
        self.like_autocast = ctx.policy.autocast_device is not None

    def of(self, node: fx.Node) -> dict[str, float]:
        """Return the numbers of an op that become limits of the low-precision dtype instead of fp32's."""
        known = ir.origin(node) if not self.like_autocast and node not in self.kept else None
        return self._in_low(node, known.numbers) if known is not None else {}

    def _in_low(self, node: fx.Node, numbers: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Return limits of the twin's dtype as limits of the dtype that is low at this node."""
        low = low_at(node, self.ctx) if numbers else torch.float32
        if low not in ir.LOW_DTYPES:
            return dict(numbers)
        return {name: constants.limit_in(value, self.ctx.policy.low, low) for name, value in numbers}

    def applied(self, node: fx.Node, new: Decision) -> Decision:
        """Return the decision with numbers that follow the op's precision, or the low-precision range if it matters."""
        known, policy = ir.origin(node), policy_at(node, self.ctx.policy)
        untouched = not policy.rewrites or node in self.kept
        if known is None or not known.numbers or untouched or low_at(node, self.ctx) not in ir.LOW_DTYPES:
            return new
        given = dict(ir.schema_args(node))
        low = any(d in ir.LOW_DTYPES for d in new.out)
        may_reach_low = low or not self.like_autocast
        if self.like_autocast and known.numbers_of in self.by_name:  # what the code would have seen under autocast
            low = ir.dtype_of(self.by_name[known.numbers_of]) in ir.LOW_DTYPES
        chosen = tuple(
            (n, v) for n, v in self._in_low(node, known.numbers).items()
            if low or (may_reach_low and not constants.fits(float(given[n]), policy.low))
        )  # fmt: skip
        if not chosen:
            return new
        name, value = chosen[0]
        limit = f"{given[name]:g} was the limit of its dtype and is now {value:g}"
        return replace(new, numbers=chosen, limit=limit, reason=f"{new.reason}; {limit}")


def kept_in_fp32(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """Return the nodes whose number became the low-precision limit, but everything that computes with it turned out to
    be fp32: there the fp32 limit is right (a fully masked row has equal weights only with the exact limit)."""
    found = set()
    for node in gm.graph.nodes:
        known = ir.decision(node)
        if known is None or not known.numbers:
            continue
        if known.precision in ir.LOW_DTYPES and known.rule is not Rule.CREATION and known.cls is not OpClass.EXACT:
            continue
        seen, todo = set(), list(node.users)
        while todo:
            user = todo.pop()
            if user not in seen:
                seen.add(user)
                todo += list(user.users) if _passes_on(user) else ()
        if all(_is_fp32(user) for user in seen if not _passes_on(user)):
            found.add(node)
    return frozenset(found)


def _passes_on(node: fx.Node) -> bool:
    known = ir.decision(node)
    moves = (Rule.AUTHOR, Rule.FOLLOWS, Rule.SELECTED)
    return known is not None and (known.cls is OpClass.EXACT or known.rule in moves)


def _is_fp32(node: fx.Node) -> bool:
    known = ir.decision(node)
    return known is not None and known.mode is Mode.CAST and known.precision is torch.float32
