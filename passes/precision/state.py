"""What is known while the nodes of a graph are decided: about the whole graph (``State``) and about one node (``At``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir import Because, decisions
from amp_compiler.ir.constants import Held, fits
from amp_compiler.ir.nesting import policies_in, policy_at
from amp_compiler.ir.wide import WideRule
from amp_compiler.policy import Choice, Policy
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context

from .asked import Asked
from .carried import Carried
from .limits import Limits
from .places import Forced, forced_dtype

Dtypes = Sequence[torch.dtype | None]


class State:
    """The state of one graph. ``native``: a body that no policy governs (the backward of a custom function).
    ``own_limits``: nodes whose numbers stay as they were in fp32. ``carried`` and ``wide``: what is known about its
    inputs. ``enter``: decides the nodes of a graph inside this one, with the given state and input dtypes."""

    def __init__(
        self, gm: fx.GraphModule, ctx: Context, enter: Callable[[State, Dtypes | None], None], *, native: bool = False,
        own_limits: frozenset[fx.Node] = frozenset(), carried: Mapping[fx.Node, Held] | None = None,
        wide: Mapping[fx.Node, str] | None = None,
    ) -> None:  # fmt: skip
        self.gm, self.ctx, self.enter, self.native = gm, ctx, enter, native
        self.like_autocast = ctx.policy.autocast_device is not None
        self.given_wide = dict(wide or {})
        self.by_name = {n.name: n for n in gm.graph.nodes}
        self.aliases = ir.Aliases(gm)
        self.kept_between_calls = ir.kept_between_calls(gm)
        self.limits = Limits(ctx, self.by_name, own_limits)
        self.carried = Carried(gm, ctx, self.aliases, self.limits, carried or {})
        self.asked = Asked(self.carried.values)
        marks = ctx.costs is not None and not self.like_autocast
        self.wide = WideRule(gm, ctx.policy, self.carried.values, marks=marks)
        # with a second policy or low dtype in the graph, a change could reach ops that go by other rules
        alike = len(policies_in(gm, ctx.policy)) == 1 and self.carried.lows == (ctx.policy.low,)
        #: True if costs are to choose where the rules allow both precisions
        self.places = marks and alike and not native
        #: nodes that must run in fp32 because of what is later written into their results
        self.needs_fp32: dict[fx.Node, Because] = {}
        #: nodes that create low values into which, as this walk found, a wide value is written
        self.takes_wide: dict[fx.Node, Because] = {}

    def restart(self) -> None:
        """Forget what a walk has recorded."""
        self.carried.restart()
        self.asked.restart()

    def dtype_asked(self, of: str) -> torch.dtype | None:
        """Return the precision of the value whose dtype the model's code read, if it is known which one."""
        return ir.dtype_of(self.by_name[of]) if of in self.by_name else None

    def fits_into(self, node: fx.Node, low: torch.dtype) -> bool:
        """True if an op that creates a tensor can create it in the low-precision dtype."""
        return node not in self.needs_fp32 and all(fits(v, low) for v in self.carried.scalars(node, creation=True))


class At:
    """One node of a graph, and what the rules need to know about it."""

    def __init__(self, node: fx.Node, state: State) -> None:
        self.node, self.state = node, state
        self.policy: Policy = policy_at(node, state.ctx.policy)
        self.name = ir.op_name(node)

    @cached_property
    def floats(self) -> list[tuple[str, fx.Node]]:
        """(argument, node) for each float tensor whose precision may be changed."""
        return [(n, a) for n, a in ir.tensor_args(self.node) if ir.is_eligible(ir.tensor_of(a))]

    @cached_property
    def operands(self) -> list[tuple[str, fx.Node]]:
        """The floats without those that the op's row keeps as they are, unless that is all of them."""
        kept = self.choice.row.keep_args if self.choice.row is not None else ()
        return [(n, a) for n, a in self.floats if n not in kept] or self.floats

    @cached_property
    def choice(self) -> Choice:
        """What the policy says about the op."""
        return self.policy.classify(self.name)

    @property
    def cls(self) -> OpClass:
        return self.choice.cls

    @cached_property
    def written(self) -> frozenset[str]:
        """The names of the arguments that the op writes to."""
        return ir.mutated_args(self.node)

    @cached_property
    def forced(self) -> Forced | None:
        """What the place of the node asks for."""
        found = forced_dtype(self.node, self.state.ctx)
        if found is not None and found.yields and self.state.asked.among(self.floats, whole=self.cls is OpClass.LOW):
            return forced_dtype(self.node, self.state.ctx, is_asked=True)
        return found

    @property
    def low_here(self) -> torch.dtype:
        """The dtype that counts as low at this place; fp32 in an fp32 region."""
        return self.forced.dtype if self.forced is not None else self.policy.low

    @property
    def low(self) -> torch.dtype:
        """The dtype in which a low op runs here; a region's may differ from the policy's."""
        return self.forced.dtype if self.forced is not None and not self.forced.whole else self.policy.low

    @cached_property
    def is_in_low_model(self) -> bool:
        """True if the model's code sees a low model here: by the level, unless the place asks for fp32."""
        by_level = self.policy.level_row.low_model and not self.state.like_autocast
        return by_level and self.low_here in ir.LOW_DTYPES

    @cached_property
    def wide(self) -> Because | None:
        """Why the rule of wide values asks for fp32."""
        return self.state.wide.asks_for_fp32(self.node, [a for _, a in self.operands], self.choice)

    @cached_property
    def returns_non_float(self) -> bool:
        """True for a comparison, an argmax, a sort with its indices: rounding could only change its results."""
        return ir.returns_non_float(self.node)

    @cached_property
    def names_dtype(self) -> bool:
        """True where the author gave the op a ``dtype=`` of their own choice."""
        return decisions.names_dtype(self.node)
