"""Constants of the model's code that a low-precision dtype cannot represent, and the values that carry them.

Such constants are values that the code computes without any input, and scalars that an fp32 op puts into its result.
They pass through ops that move or select values. One that is too large also passes through arithmetic (a mask added to
scores). One that is too small does not (an eps plus something else is not an eps), but its reciprocal is too large for
the op that divides by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Decision, constants
from amp_compiler.ir.constants import Held
from amp_compiler.ir.nesting import policies_in, policy_at
from amp_compiler.ir.weights import misfits
from amp_compiler.policy import Rule
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context

from .limits import Limits
from .places import low_dtypes

#: KEEP ops that pass on the values of their inputs
MOVES = ("lift_fresh_copy", "lift_fresh", "detach_", "to", "_to_copy", "type_as")


class Misfit(NamedTuple):
    """A constant that a dtype cannot represent, and the value that carries it, unless it is an argument of the op."""

    value: float
    causes: tuple[str, ...] = ()


class Carried:
    """Records which values of a graph carry such constants. ``given``: the inputs that do."""

    def __init__(
        self, gm: fx.GraphModule, ctx: Context, aliases: ir.Aliases, limits: Limits, given: Mapping[fx.Node, Held]
    ) -> None:
        self.gm, self.ctx, self.aliases, self.limits = gm, ctx, aliases, limits
        self.like_autocast = ctx.policy.autocast_device is not None
        self.lows = low_dtypes(gm, ctx)
        self.given = dict(given)
        self.held: dict[fx.Node, Held] = dict(given)
        rewrites = any(policy.rewrites for policy in policies_in(gm, ctx.policy))
        looks = rewrites and not self.like_autocast
        #: nodes that depend on no input, with their values
        self.values = constants.evaluate(gm, aliases.written, limits.of) if looks else {}

    def restart(self) -> None:
        """Forget what a walk has recorded."""
        self.held = dict(self.given)

    def scalars(self, node: fx.Node, creation: bool = False, *, in_result: bool = False) -> list[float]:
        """Return the numbers of an op; the limit of a dtype counts as the limit of the low-precision dtype."""
        return constants.scalars(node, creation, self.limits.of(node), in_result=in_result)

    def misfit(
        self, node: fx.Node, dtype: torch.dtype, floats: Sequence[tuple[str, fx.Node]], cls: OpClass | None = None
    ) -> Misfit | None:
        """Return a constant, among the arguments or carried by one of them, that ``dtype`` cannot represent."""
        for value in self.scalars(node):
            if not constants.fits(value, dtype):
                return Misfit(value)
        for _, arg in floats:
            held = self.held.get(arg)
            if held is None or held.survives(dtype):
                continue
            if cls is OpClass.LOW and held.placed and abs(held.value) < 1:
                continue  # an eps that was added to an operand does not matter to a product
            return Misfit(held.value, (arg.name,))
        return None

    def note(self, node: fx.Node, known: Decision) -> None:
        """Record whether the result of a node carries a constant, so that no later op rounds it to inf or 0."""
        if self.like_autocast or known.precision in ir.LOW_DTYPES:
            return
        name, made = ir.op_name(node), known.rule is Rule.CREATION
        held: list[Held] = constants.hardest(self.values[node]) if node in self.values else []
        if node.op == "call_function" and node not in self.values:
            places = known.rule in (Rule.CONSTANT, Rule.NEUTRAL, Rule.IN_PLACE) or name in constants.PLACE
            if made or places:
                held += [Held(v, placed=not made) for v in self.scalars(node, made, in_result=True)]
            moves = known.rule is Rule.IN_PLACE or known.cls is OpClass.EXACT or name in MOVES
            arithmetic = known.cls is OpClass.FOLLOW or known.rule in (Rule.CONSTANT, Rule.NEUTRAL)
            for _, arg in ir.tensor_args(node):
                value = self.held.get(arg)
                if value is None:
                    continue
                if moves:
                    held.append(value)
                elif arithmetic and abs(value.value) > 1 and (not value.once or len(list(ir.tensor_args(node))) == 1):
                    held.append(Held(value.value, placed=True, once=value.once))
                if name in constants.POWERS and value.value > 0:
                    held.append(Held(value.value ** constants.POWERS[name], placed=True, once=True))
        self._hold(node, held, in_place=known.rule is Rule.IN_PLACE)

    def _hold(self, node: fx.Node, held: list[Held], in_place: bool = False) -> None:
        lost = [h for h in held if not all(h.survives(low) for low in self.lows)]
        if lost:
            self.held[node] = max(lost, key=lambda h: abs(h.value))
            if in_place:  # later readers use the name of the tensor that was written to
                self.held.update(dict.fromkeys(self.aliases.shared_with(node), self.held[node]))

    def look_ahead(self) -> None:
        """Record where ops that only move values carry constants, before anything is decided."""
        for node in self.gm.graph.nodes:
            if node in self.values:
                self._hold(node, constants.hardest(self.values[node]))
            elif node.op == "call_function" and not ir.is_higher_order(node):
                name = ir.op_name(node)
                moves = name in MOVES or policy_at(node, self.ctx.policy).classify(name).cls is OpClass.EXACT
                floats = [a for _, a in ir.tensor_args(node) if ir.is_eligible(ir.tensor_of(a))]
                if moves:
                    self._hold(node, [self.held[a] for a in floats if a in self.held])
                elif not floats:
                    self._hold(node, [Held(v) for v in self.scalars(node, creation=True)])


def held_by_weights(gm: fx.GraphModule, ctx: Context) -> dict[fx.Node, Held]:
    """Return the weights that the low-precision dtype cannot represent, whose values are known in a conversion."""
    policies = [policy for policy in policies_in(gm, ctx.policy) if policy.rewrites]
    if ctx.weights is None or not policies:
        return {}
    lows = dict.fromkeys(policy.low for policy in policies)
    found = misfits(gm.graph, ctx.weights, lows)
    for node, peak in found.items():
        ctx.weights.keep(node, peak, next(low for low in lows if not constants.fits(peak, low)))
    return {node: Held(peak, once=True) for node, peak in found.items()}
