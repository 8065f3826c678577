"""assign_precision: a precision and a reason on every node, in one walk from inputs to outputs.

It only annotates (``node.meta["amp"]``, a ``Decision``); no node and no traced value is changed.
For each node, the first rule that applies:

1. a cast that the author wrote: an explicit dtype is honoured as it stands; one that followed another tensor's
   (``x.to(y.dtype)``, see ``mark_dtype_origin``) follows the precision assigned here
2. nothing floating-point in it, or it creates a tensor: kept; one created in the dtype of another is low at O2, O3
3. fp64 or complex among its inputs, a sparse one, or a complex result: kept with the dtypes it was traced with
4. it writes to an argument: runs in that argument's dtype (a cast copy would lose the write)
5. a region, ``set_precision`` or module rule says a dtype: that dtype
6. everything in it is low already: kept
7. the code takes another way in the low dtype, as the twin trace shows: fp32
8. the author cast what it computes with to fp32: fp32 (a LOW op only if that is true of all its operands)
9. at O2 and O3 in a conversion, a lookup in a parameter: low, as the parameter is stored
10. the policy's class of the op at the level (DESIGN §3), unless a constant does not fit the low dtype;
   a FOLLOW op that answers (a comparison, an argmax, a sort with its indices) takes the widest of its inputs
   at every level, because rounding them could only change the answer; at O2 a FOLLOW op that reads a *wide* value,
   one that an fp32 op made, is fp32 (``amp_compiler/ir/wide.py``)

A number that is the limit of its dtype (``torch.finfo(x.dtype).min``) becomes the low dtype's own limit where the
op is low, or where it would else turn into an inf or a 0 further on.
With ``Policy.torch`` the lists and rules of torch.autocast replace 2 to 10, and numbers and dtypes that followed the
dtype of a value follow the one that it has there.
Requires: normalized. Ensures: assigned. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from amp_compiler import ir
from amp_compiler.common.errors import BannedOpError
from amp_compiler.ir import Decision, Mode, constants, decisions, memory
from amp_compiler.ir.constants import Held
from amp_compiler.ir.memory import Memory
from amp_compiler.ir.nesting import Nested, policies_in, policy_at
from amp_compiler.ir.weights import misfits
from amp_compiler.ir.wide import WideRule, why_wide, wide_outputs
from amp_compiler.policy import Choice, dtype_name, precision_dtype
from amp_compiler.policy.ops import torch_lists
from amp_compiler.policy.ops.row import OpClass
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import ASSIGNED, NORMALIZED

from .normalize import Region

#: KEEP ops that hand on the values they get
MOVES = ("lift_fresh_copy", "lift_fresh", "detach_", "to", "_to_copy", "type_as")
CASTS = ("to", "_to_copy", "type_as", "prims::convert_element_type")
#: ops that make a tensor of one value, in a dtype that they name
FILLS = ("zeros", "ones", "full", "empty", "eye", "scalar_tensor", "empty_strided")
#: ops that make a tensor of one value, in the dtype of their input
LIKE_FILLS = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
#: ops that look up rows of a table
LOOKUPS = ("embedding", "index_select", "index")
#: views that mean another thing in another dtype
DTYPE_VIEWS = ("view.dtype", "view_as_complex", "view_as_real", "imag")
#: in-place arithmetic that computes in the promoted dtype and rounds once into self
NATIVE_INPLACE = ("add_", "sub_", "mul_", "div_", "copy_")
#: higher-order ops whose body simply runs here: position of the body among the arguments
TRANSPARENT = {"tag_activation_checkpoint": 0, "wrap_with_set_grad_enabled": 1}
AUTOGRAD_FUNCTION = "autograd_function_apply"
#: higher-order ops that give results of their body to it again: position of the values among the arguments
LOOPS = {"while_loop": 2, "scan": 1}


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    before = {node: ir.decision(node) for _, inner in ir.all_graphs(gm) for node in inner.graph.nodes}
    held = _held_by_weights(gm, ctx)
    first = _Assign(gm, ctx, carried=held)
    first.run()
    kept = first.limits_kept_in_fp32()
    if kept:
        _Assign(gm, ctx, own_limits=kept, carried=held).run()
    return any(ir.decision(node) != old for node, old in before.items())


def _held_by_weights(gm: fx.GraphModule, ctx: Context) -> dict[fx.Node, Held]:
    """Weights that the low dtype cannot hold: in a conversion their values are known. Each matters to its readers."""
    policies = [policy for policy in policies_in(gm, ctx.policy) if policy.level != "O0"]
    if ctx.weights is None or not policies:
        return {}
    lows = dict.fromkeys(policy.low for policy in policies)
    found = misfits(gm.graph, ctx.weights, lows)
    for node, peak in found.items():
        ctx.weights.keep(node, peak, next(low for low in lows if not constants.fits(peak, low)))
    return {node: Held(peak, once=True) for node, peak in found.items()}


class _Assign:
    def __init__(
        self, gm: fx.GraphModule, ctx: Context, *, native: bool = False, own_limits: frozenset[fx.Node] = frozenset(),
        carried: dict[fx.Node, Held] | None = None, wide: dict[fx.Node, str] | None = None,
    ) -> None:  # fmt: skip
        self.gm, self.ctx, self.policy = gm, ctx, ctx.policy
        self.own_limits = own_limits  # nodes whose numbers stay what they were in fp32
        self.native = native  # a body that no policy governs (the backward of a custom function)
        self.given_constants = dict(carried or {})
        self.given_wide = dict(wide or {})
        self.carried: dict[fx.Node, Held] = dict(carried or {})  # values that hold a constant which low cannot
        self.asked: dict[fx.Node, str] = {}  # values that the author cast to fp32 or that come of such, and which
        self.neutral: set[fx.Node] = set()  # floats made of integers, or by the model's code itself
        self.by_name = {n.name: n for n in gm.graph.nodes}
        self.memory = Memory(gm)
        self.lows = self.low_dtypes()
        self.state = memory.kept_between_calls(gm)
        policies = policies_in(gm, self.policy)
        like_autocast = self.policy.autocast_device is not None or all(p.level == "O0" for p in policies)
        self.values = {} if like_autocast else constants.evaluate(gm, self.memory.written, self.limits)
        self.needs_fp32 = self.makers_in_fp32() if self.policy.autocast_device is None else {}
        self.wide = WideRule(gm, self.policy, self.values)
        self.take_wide: dict[fx.Node, str] = {}  # makers of low values that a wide one is written into

    def run(self, inputs: Sequence[torch.dtype | None] | None = None) -> None:
        self.walk(inputs)
        while new := {node: why for node, why in self.take_wide.items() if node not in self.needs_fp32}:
            self.needs_fp32 |= new
            self.carried, self.asked, self.neutral = dict(self.given_constants), {}, set()
            self.walk(inputs)

    def walk(self, inputs: Sequence[torch.dtype | None] | None) -> None:
        place = 0
        for node in self.gm.graph.nodes:
            self.policy = policy_at(node, self.ctx.policy)
            if node.op == "placeholder":
                known = inputs[place] if inputs is not None and place < len(inputs) else None
                out = (known,) if known is not None else decisions.traced(node)
                new = Decision(Mode.NATIVE, None, "an input: keeps its dtype", out=out, rule="input")
                why = self.given_wide.get(node) or node.meta.get(ir.WIDE, "")
                if why and self.wide.applies and out == (torch.float32,):
                    new = replace(new, wide=(why,))
                place += 1
            elif node.op == "get_attr":
                new = Decision(
                    Mode.NATIVE, None, "a constant: keeps its dtype", out=decisions.traced(node), rule="input"
                )
            elif node.op == "call_function":
                new = self.wide.noted(node, self.with_numbers(node, self.decide(node)))
                if new.rule == "in_place":
                    self.note_written(node, new)
            else:
                continue
            self.carry(node, new)
            self.note_asked(node, new)
            ir.decide(node, new)

    def note_written(self, node: fx.Node, new: Decision) -> None:
        """Where a wide value is written into another: what shares its memory is wide too. If it is low, it must be
        made in fp32, unless a product made it: that stays low, as under autocast, and the write rounds."""
        if not self.wide.applies or node not in self.memory.written:
            return
        shared = self.memory.shared_with(node)
        if any(new.wide):
            for other in shared:
                if (known := ir.decision(other)) is not None and known.out == new.out and not known.wide:
                    ir.decide(other, replace(known, wide=new.wide))
            return
        read = (a for n, a in ir.tensor_args(node) if n not in ir.mutated_args(node))
        why = next((why for a in read if (why := why_wide(a))), "")
        maker = shared[0]
        choice = policy_at(maker, self.ctx.policy).classify(ir.op_name(maker))
        if why and maker.op == "call_function" and choice.cls is not OpClass.LOW:
            self.take_wide[maker] = f"{why} is written into its result"

    def low_dtypes(self) -> tuple[torch.dtype, ...]:
        """Every low dtype that some part of the graph may run in."""
        found = set(self.ctx.module_precision.values())
        for policy in policies_in(self.gm, self.policy):
            found |= {policy.low, *(precision_dtype(name) for _, name in policy.modules)}
        regions = (node.meta.get(ir.REGION) for node in self.gm.graph.nodes)
        found |= {region.dtype for region in regions if isinstance(region, Region) and region.dtype is not None}
        return tuple(dtype for dtype in ir.LOW_DTYPES if dtype in found)

    def limits_kept_in_fp32(self) -> frozenset[fx.Node]:
        """Nodes whose number became the low dtype's limit, while all that computes with it turned out to be fp32:
        there the fp32 limit is right (a row that is masked whole has equal weights only with the limit itself)."""
        found = set()
        for node in self.gm.graph.nodes:
            known = ir.decision(node)
            if known is None or not known.numbers or node in self.own_limits:
                continue
            if known.precision in ir.LOW_DTYPES and known.rule != "creation" and known.cls is not OpClass.EXACT:
                continue
            seen, todo = set(), list(node.users)
            while todo:
                user = todo.pop()
                if user not in seen:
                    seen.add(user)
                    todo += list(user.users) if self.passes_on(user) else ()
            if all(self.is_fp32(user) for user in seen if not self.passes_on(user)):
                found.add(node)
        return frozenset(found)

    @staticmethod
    def passes_on(node: fx.Node) -> bool:
        known = ir.decision(node)
        return known is not None and (known.cls is OpClass.EXACT or known.rule in ("author", "follows", "getitem"))

    @staticmethod
    def is_fp32(node: fx.Node) -> bool:
        known = ir.decision(node)
        return known is not None and known.mode is Mode.CAST and known.precision is torch.float32

    # ------------------------------------------------------------------------------------ one node

    def decide(self, node: fx.Node) -> Decision:
        name = ir.op_name(node)
        if ir.is_getitem(node):
            return decisions.selected(node)
        if ir.is_higher_order(node):
            return self.higher_order(node)
        if name in CASTS:
            return self.author_cast(node)
        if self.memory.is_view(node) and self.policy.autocast_device is None:
            return decisions.as_it_comes(node, "a view of a tensor that is written to: keeps its dtype", "view")
        floats = [(n, a) for n, a in ir.tensor_args(node) if ir.is_eligible(ir.tensor_of(a))]
        if self.policy.level == "O0":
            return decisions.as_it_comes(node, "level O0: untouched", "level")
        if not floats:
            if any(v is not None and v.dtype.is_floating_point for v in ir.tensor_outputs(node)):
                return self.creation(node, name)
            return decisions.as_it_comes(node, "no floating-point input", "no_float")
        if self.native:
            return decisions.as_it_comes(node, "backward of a custom autograd function: keeps its dtypes", "native")
        if self.policy.autocast_device is not None:
            return self.like_autocast(node, name, floats)
        return self.by_level(node, name, floats)

    def author_cast(self, node: fx.Node) -> Decision:
        out, known = decisions.traced(node), ir.origin(node)
        dtype = out[0] if out else None
        shared = self.memory.is_view(node)
        shared |= self.native and self.policy.autocast_device is None  # a body that stays as it is
        if self.policy.level == "O0" or known is None or not known.follows or known.unsure or shared:
            return Decision(Mode.NATIVE, dtype, "a cast that the model's code asks for", out=out, rule="author")
        dtype, source = self.followed(node), node.args[0]
        held = self.carried.get(source) if isinstance(source, fx.Node) else None
        if held is not None and not held.survives(dtype) and self.policy.autocast_device is None:
            reason = f"holds the constant {held.value:g}, which {dtype_name(dtype)} cannot represent: stays in fp32"
            return Decision(Mode.NATIVE, torch.float32, reason, out=(torch.float32,), rule="author")
        reason = f"a cast to the dtype of another value, which is {dtype_name(dtype)}"
        return Decision(Mode.NATIVE, dtype, reason, out=(dtype,), rule="follows", named=dtype)

    def creation(self, node: fx.Node, name: str) -> Decision:
        known, low = ir.origin(node), self.region_low(node)
        asked = self.dtype_asked(known.of) if known is not None and known.follows else None
        if self.policy.autocast_device is not None and asked in ir.LOW_DTYPES and name in FILLS:
            reason = f"made in the dtype of {known.of}" if known is not None else ""
            return Decision(Mode.NATIVE, asked, reason, out=(asked,), rule="creation", named=asked)
        follows = known is not None and known.follows and name in FILLS and self.counts_as_low(node)
        if follows and self.fits_into(node, low):
            reason = f"made in the dtype of another value, which is {dtype_name(low)}"
            return Decision(Mode.NATIVE, low, reason, out=(low,), rule="creation", named=low)
        return decisions.as_it_comes(node, "makes a tensor in the dtype that the model's code gives it", "creation")

    # ------------------------------------------------------------------ what followed a dtype, and what did not

    def region_low(self, node: fx.Node) -> torch.dtype:
        forced = self.forced_dtype(node)
        return forced[0] if forced is not None else self.policy.low

    def counts_as_low(self, node: fx.Node) -> bool:
        """At O2 and O3 the model's code sees a low model, unless a region or a module rule says fp32."""
        by_level = self.policy.level in ("O2", "O3") and self.policy.autocast_device is None
        return by_level and self.region_low(node) in ir.LOW_DTYPES

    def followed(self, node: fx.Node) -> torch.dtype:
        """The dtype that ``x.to(y.dtype)`` stands for: at O2 and O3 the low one, else that of ``y``. Where it is not
        known which tensor was asked, the dtype in which ``x`` left the low path (``x.float()`` … and back)."""
        source, known = node.args[0], ir.origin(node)
        assert isinstance(source, fx.Node)
        assert known is not None
        value, forced = ir.tensor_of(source), self.forced_dtype(node)
        asked = self.dtype_asked(known.of)
        if self.policy.autocast_device is not None and asked is not None:
            return asked
        if value is None or not (ir.is_eligible(value) or value.dtype is torch.bool):
            return torch.float32  # integers: the low dtype may not hold them
        if forced is not None and forced[3]:
            return forced[0]
        if self.counts_as_low(node):
            return self.region_low(node)
        if asked is not None:
            return asked
        borders = list(self.low_border(source))
        inner = [n for n in borders if n.op == "call_function"] or borders
        return decisions.widest([ir.dtype_of(n) for n in inner])

    def dtype_asked(self, of: str) -> torch.dtype | None:
        """The precision of the value that the model's code asked for its dtype, if it is known which it was."""
        return ir.dtype_of(self.by_name[of]) if of in self.by_name else None

    def low_border(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nearest values at or before ``node`` that are low in the twin."""
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

    def note_asked(self, node: fx.Node, known: Decision) -> None:
        """Spread what the author asked for: values cast to fp32 by hand, and all that is computed with them."""
        if self.policy.autocast_device is not None:
            return
        if node in self.values and known.precision not in ir.LOW_DTYPES:
            self.neutral.add(node)
        if node.op != "call_function":
            return
        if torch.float32 not in known.out:
            return
        floats = [a for _, a in ir.tensor_args(node) if ir.is_eligible(ir.tensor_of(a))]
        if ir.is_getitem(node):
            floats = list(node.all_input_nodes)
        if known.rule == "creation" or not floats:
            self.neutral.add(node)
        elif known.rule in ("author", "explicit_dtype"):
            self.asked[node] = f"{floats[0].name}, which the model's code casts to float32"
        elif known.rule != "follows" and (asked := next((self.asked[a] for a in floats if a in self.asked), "")):
            self.asked[node] = asked
        elif all(a in self.neutral for a in floats):
            self.neutral.add(node)

    def asked_for(self, floats: list[tuple[str, fx.Node]], *, whole: bool) -> str:
        """Which of ``floats`` the author cast to fp32; with ``whole``, only if none is otherwise."""
        found = [self.asked[a] for _, a in floats if a in self.asked]
        if not found or (whole and any(a not in self.asked and a not in self.neutral for _, a in floats)):
            return ""
        return found[0]

    def scalars(self, node: fx.Node, creation: bool = False) -> list[float]:
        """The numbers of an op; one that is the limit of its dtype counts as the low dtype's."""
        return constants.scalars(node, creation, self.limits(node))

    def fits_into(self, node: fx.Node, low: torch.dtype) -> bool:
        """Whether an op that makes a tensor can make it in the low dtype."""
        return node not in self.needs_fp32 and all(constants.fits(v, low) for v in self.scalars(node, creation=True))

    def limits(self, node: fx.Node) -> dict[str, float]:
        """Numbers of an op that are the low dtype's limits instead of fp32's."""
        known = ir.origin(node) if self.policy.autocast_device is None and node not in self.own_limits else None
        return self.own_numbers(node, known.numbers) if known is not None else {}

    def own_numbers(self, node: fx.Node, numbers: Sequence[tuple[str, float]]) -> dict[str, float]:
        """Limits of the dtype that the twin was traced in, as limits of the one that is low at this node."""
        low = self.region_low(node) if numbers else torch.float32
        if low not in ir.LOW_DTYPES:
            return dict(numbers)
        return {name: constants.limit_in(value, self.ctx.policy.low, low) for name, value in numbers}

    def with_numbers(self, node: fx.Node, new: Decision) -> Decision:
        """Numbers that followed a dtype follow the op's precision, or the low dtype's range where that matters."""
        known = ir.origin(node)
        untouched = self.policy.level == "O0" or node in self.own_limits
        if known is None or not known.numbers or untouched or self.region_low(node) not in ir.LOW_DTYPES:
            return new
        given = dict(ir.schema_args(node))
        low = any(d in ir.LOW_DTYPES for d in new.out)
        may_reach_low = low or self.policy.autocast_device is None
        if self.policy.autocast_device is not None and known.numbers_of in self.by_name:
            low = self.dtype_asked(known.numbers_of) in ir.LOW_DTYPES  # what the code would have seen under autocast
        chosen = tuple(
            (n, v) for n, v in self.own_numbers(node, known.numbers).items()
            if low or (may_reach_low and not constants.fits(float(given[n]), self.policy.low))
        )  # fmt: skip
        if not chosen:
            return new
        name, value = chosen[0]
        reason = f"{new.reason}; {given[name]:g} was the limit of its dtype and is now {value:g}"
        return replace(new, numbers=chosen, reason=reason)

    def by_level(self, node: fx.Node, name: str, floats: list[tuple[str, fx.Node]]) -> Decision:
        choice = self.policy.classify(name)
        written = ir.mutated_args(node)
        if written:
            return self.in_place(node, name, floats, written, choice)
        for _, arg in ir.tensor_args(node):
            value = ir.tensor_of(arg)
            if value is not None and (
                value.dtype in (torch.float64, torch.complex64, torch.complex128) or value.layout is not torch.strided
            ):
                what = "sparse" if value.layout is not torch.strided else dtype_name(value.dtype)
                return decisions.as_traced(node, f"has a {what} input: such tensors are never changed", "untouched")
        results = pytree.tree_leaves(node.meta.get("val")) if choice.cls not in (OpClass.FP32, OpClass.KEEP) else ()
        if any(isinstance(t, torch.Tensor) and t.dtype.is_complex for t in results):
            # fp16 and a complex number make complex32, and bf16 complex64 or, since torch 2.15, bcomplex32
            return decisions.as_traced(node, "gives a complex result, which has no low-precision form", "untouched")
        if choice.cls is OpClass.KEEP:
            if name in LIKE_FILLS and self.fits_into(node, self.policy.low) and not decisions.names_dtype(node):
                return decisions.as_it_comes(node, "makes a tensor like another, in its dtype", "creation", choice)
            rule = "creation" if name in LIKE_FILLS else choice.rule
            return decisions.as_traced(node, choice.reason, rule, choice)
        if ir.all_args(node).get("sparse") is True and self.ctx.weights is None:
            reason = "its gradient is sparse, and a cast cannot pass on a sparse gradient"
            return decisions.as_traced(node, reason, "untouched", choice)
        if decisions.names_dtype(node):
            return decisions.as_it_comes(
                node, "an explicit dtype= argument wins", "explicit_dtype", choice, traced_out=True
            )
        if choice.row is not None and choice.row.keep_args:
            floats = [(n, a) for n, a in floats if n not in choice.row.keep_args] or floats
        if node in self.needs_fp32:
            return decisions.cast(node, torch.float32, self.needs_fp32[node], "constant", choice)
        forced = self.forced_dtype(node)
        low = self.policy.low
        if forced is not None:
            dtype, reason, rule, whole = forced
            if choice.cls is OpClass.EXACT:
                return self.exact(node, floats, choice)
            if whole:
                return self.checked(node, name, dtype, reason, rule, choice, floats)
            low = dtype
        if all(a_val.dtype in ir.LOW_DTYPES for _, a in floats if (a_val := ir.tensor_of(a)) is not None):
            return decisions.as_traced(node, "in low precision already, by the model's own code", "already_low", choice)
        unsure = origin.unsure if (origin := ir.origin(node)) is not None else ""
        if unsure:
            return decisions.cast(node, torch.float32, f"kept in fp32: {unsure}", "unsure", choice)
        if choice.cls is OpClass.EXACT:
            if name in LOOKUPS and self.is_stored_low(floats):
                reason = f"a lookup in a weight, which {self.policy.level} stores in {dtype_name(low)}"
                return self.checked(node, name, low, reason, "stored_low", choice, floats)
            return self.exact(node, floats, choice)
        named = ir.all_args(node)
        condition = self.policy.condition_for(name, named)
        if condition is not None:
            reason = f"conditional rule: {condition.op} with {condition.argument}={named[condition.argument]!r}"
            return decisions.cast(node, torch.float32, reason, "conditional", choice)
        return self.by_class(node, name, floats, choice, low)

    def is_stored_low(self, floats: list[tuple[str, fx.Node]]) -> bool:
        """Whether all of ``floats`` are parameters of a conversion that stores what it can in the low dtype."""
        weights = self.ctx.weights
        if weights is None or not weights.store_low or self.policy.level not in ("O2", "O3"):
            return False
        return all(a in weights and weights[a].kind == "parameter" and a not in self.memory.written for _, a in floats)

    def by_class(
        self, node: fx.Node, name: str, floats: list[tuple[str, fx.Node]], choice: Choice, low: torch.dtype
    ) -> Decision:
        level, cls, row = self.policy.level, choice.cls, choice.row
        flows = {ir.dtype_of(a) for _, a in floats}
        answers = ir.answers(node)
        wide = self.wide.asks_for_fp32(node, [a for _, a in floats], choice)
        if wide and not answers and cls is not OpClass.FP32:
            return decisions.cast(node, torch.float32, wide, "wide", choice)
        if not answers and choice.rule == "table" and all(a in self.neutral for _, a in floats):
            reason = "computed from constants alone: fp32 until it meets another value"
            return decisions.cast(node, torch.float32, reason, "neutral", choice)
        if node in self.state and cls is OpClass.FOLLOW:
            reason = "its result is kept between calls, where rounding errors add up"
            return decisions.cast(node, torch.float32, reason, "state", choice)
        asked = self.asked_for(floats, whole=cls is OpClass.LOW)
        by_list = choice.rule in ("white_list", "black_list")
        if asked and not by_list and (cls is OpClass.LOW or level == "O3" or (cls is OpClass.FOLLOW and level == "O2")):
            return decisions.cast(node, torch.float32, f"computes with {asked}", "asked", choice)
        if cls is OpClass.LOW or (cls is OpClass.FOLLOW and level in ("O2", "O3") and not answers):
            return self.checked(node, name, low, choice.reason, choice.rule, choice, floats)
        if cls is OpClass.FP32 and level == "O3" and choice.rule == "table":
            reason = f"level O3 runs everything low ({choice.reason})"
            return self.checked(node, name, low, reason, "level", choice, floats)
        if cls is OpClass.FP32:
            main = ir.dtype_of(floats[0][1])
            inside = row is not None and row.fp32_inside and main == low and not wide
            if level == "O2" and choice.rule == "table" and row is not None and inside:
                reason = f"low in and out, fp32 inside torch's kernel, because it {choice.reason}"
                value = ir.tensor_of(floats[0][1])
                on_cpu = value is not None and value.device.type == "cpu"
                kept = row.fp32_args_on_cpu if on_cpu else ()
                return decisions.cast(node, low, reason, "fp32_inside", choice, keep=kept)
            return decisions.cast(node, torch.float32, choice.reason, choice.rule, choice)
        if level == "O1" and not answers:
            reason = "level O1 runs only matrix products and convolutions in low precision"
            return decisions.cast(node, torch.float32, reason, choice.rule, choice)
        if flows == {low}:
            return self.checked(
                node, name, low, f"all its inputs are low: {choice.reason}", choice.rule, choice, floats
            )
        source = next(a for _, a in floats if ir.dtype_of(a) != low)
        return decisions.cast(node, torch.float32, f"follows {source.name}, which is fp32", choice.rule, choice)

    def exact(self, node: fx.Node, floats: list[tuple[str, fx.Node]], choice: Choice) -> Decision:
        given = [a for _, a in floats]
        filled = [a for a in given if not _is_empty(a)] or given  # an empty KV cache decides nothing
        dtype = decisions.widest([ir.dtype_of(a) for a in filled])
        if dtype in ir.LOW_DTYPES and (wide := self.wide.asks_for_fp32(node, given, choice)):
            return decisions.cast(node, torch.float32, wide, "wide", choice)
        if dtype in ir.LOW_DTYPES:
            return self.checked(
                node,
                ir.op_name(node),
                dtype,
                f"follows its input: {choice.reason}",
                choice.rule,
                choice,
                floats,
            )
        return decisions.cast(node, dtype, f"follows its input: {choice.reason}", choice.rule, choice)

    def checked(
        self, node: fx.Node, name: str, dtype: torch.dtype, reason: str, rule: str, choice: Choice,
        floats: list[tuple[str, fx.Node]],
    ) -> Decision:  # fmt: skip
        """A low precision, unless a constant among the arguments does not survive it."""
        if dtype in ir.LOW_DTYPES:
            if choice.row is not None and choice.row.fp32_only:
                reason = "torch has no low-precision kernel for it: kept in fp32"
                return decisions.cast(node, torch.float32, reason, "fp32_only", choice)
            if choice.row is not None and not _strides_fit(floats, dtype, choice.row.stride_bytes):
                reason = f"its low-precision kernel needs strides of {choice.row.stride_bytes} bytes: kept in fp32"
                return decisions.cast(node, torch.float32, reason, "fp32_only", choice)
            if choice.row is not None and choice.row.banned and dtype is torch.float16:
                raise BannedOpError(f"{name}: {choice.row.banned} At {ir.source_line(node) or node.name}.")
            if ir.has_integer_operand(node) and any(map(ir.is_eligible, ir.tensor_outputs(node))):
                reason = "computes with integers, which the low dtype may not represent: kept in fp32"
                return decisions.cast(node, torch.float32, reason, "constant", choice)
            misfit = self.misfit(node, dtype, floats, choice.cls)
            if misfit is not None:
                reason = f"the constant {misfit:g} is not representable in {dtype_name(dtype)}: kept in fp32"
                return decisions.cast(node, torch.float32, reason, "constant", choice)
        return decisions.cast(node, dtype, reason, rule, choice)

    def misfit(
        self, node: fx.Node, dtype: torch.dtype, floats: list[tuple[str, fx.Node]], cls: OpClass | None = None
    ) -> float | None:
        """A constant among the arguments, or carried by one of them, that ``dtype`` cannot hold."""
        for value in self.scalars(node):
            if not constants.fits(value, dtype):
                return value
        for _, arg in floats:
            held = self.carried.get(arg)
            if held is None or held.survives(dtype):
                continue
            if cls is OpClass.LOW and held.placed and abs(held.value) < 1:
                continue  # a product does not care for an eps that was added to its operand
            return held.value
        return None

    def carry(self, node: fx.Node, known: Decision) -> None:
        """Note which values hold a constant that does not fit, so that no later op rounds it to inf or 0.

        Such constants are what the code computes without any input, and scalars that an op in fp32 puts into its
        result. They go through ops that move or select values; one that is too large also goes through arithmetic (a
        mask added to scores), one that is too small does not (the sum of an eps and something else is no eps), but its
        reciprocal is too large for the op that takes it.
        """
        if self.policy.autocast_device is not None or known.precision in ir.LOW_DTYPES:
            return
        name, made = ir.op_name(node), known.rule == "creation"
        held: list[Held] = constants.hardest(self.values[node]) if node in self.values else []
        if node.op == "call_function" and node not in self.values:
            if made or known.rule in ("constant", "neutral", "in_place") or name in constants.PLACE:
                held += [Held(v, placed=not made) for v in self.scalars(node, creation=made)]
            moves = known.rule == "in_place" or known.cls is OpClass.EXACT or name in MOVES
            arithmetic = known.cls is OpClass.FOLLOW or known.rule in ("constant", "neutral")
            for _, arg in ir.tensor_args(node):
                value = self.carried.get(arg)
                if value is None:
                    continue
                if moves:
                    held.append(value)
                elif arithmetic and abs(value.value) > 1 and (not value.once or len(list(ir.tensor_args(node))) == 1):
                    held.append(Held(value.value, placed=True, once=value.once))
                if name in constants.POWERS and value.value > 0:
                    held.append(Held(value.value ** constants.POWERS[name], placed=True, once=True))
        self.hold(node, held, in_place=known.rule == "in_place")

    def hold(self, node: fx.Node, held: list[Held], in_place: bool = False) -> None:
        misfits = [h for h in held if not all(h.survives(low) for low in self.lows)]
        if misfits:
            self.carried[node] = max(misfits, key=lambda h: abs(h.value))
            if in_place:  # what was written into is read by its own name
                self.carried.update(dict.fromkeys(self.memory.shared_with(node), self.carried[node]))

    def makers_in_fp32(self) -> dict[fx.Node, str]:
        """Nodes that must run in fp32 because of what is later written into their result, or through which view."""
        found: dict[fx.Node, str] = {}
        given_to_us = dict(self.carried)
        self.moved_constants()
        for node in self.gm.graph.nodes if self.memory.written else ():
            if node.op != "call_function" or node not in self.memory.written:
                continue
            self.policy = policy_at(node, self.ctx.policy)
            low = dtype_name(self.policy.low)
            given = [(n, a) for n, a in ir.tensor_args(node) if n not in ir.mutated_args(node)]
            value = self.misfit(node, self.policy.low, given) if ir.mutated_args(node) else None
            why = ""
            if ir.mutated_args(node) and "::" in ir.op_name(node):
                why = f"{ir.op_name(node)}, a custom op, writes to it"
            elif value is not None:
                why = f"the constant {value:g}, written into its result, does not fit {low}"
            elif self.memory.is_view(node) and ir.op_name(node) in CASTS and self.memory.shows_that_it_is(node):
                why = f"{node.name} is one tensor with it, and one of the two is written to"
            elif self.memory.is_view(node) and ir.overload_name(node) in DTYPE_VIEWS:
                why = f"{node.name} looks at its bytes, and they are written to"
            if why:
                found[self.memory.shared_with(node)[0]] = why
        self.carried = given_to_us
        return found

    def moved_constants(self) -> None:
        """Where ops that only move values take constants, before anything is decided."""
        for node in self.gm.graph.nodes:
            self.policy = policy_at(node, self.ctx.policy)
            if node in self.values:
                self.hold(node, constants.hardest(self.values[node]))
            elif node.op == "call_function" and not ir.is_higher_order(node):
                moves = ir.op_name(node) in MOVES or self.policy.classify(ir.op_name(node)).cls is OpClass.EXACT
                floats = [a for _, a in ir.tensor_args(node) if ir.is_eligible(ir.tensor_of(a))]
                if moves:
                    self.hold(node, [self.carried[a] for a in floats if a in self.carried])
                elif not floats:
                    self.hold(node, [Held(v) for v in self.scalars(node, creation=True)])

    def in_place(
        self,
        node: fx.Node,
        name: str,
        floats: list[tuple[str, fx.Node]],
        written: frozenset[str],
        choice: Choice,
    ) -> Decision:
        targets = [ir.dtype_of(a) for n, a in floats if n in written]
        if not targets or targets[0] is None:
            reason = "writes in place to a tensor whose dtype is never changed"
            return decisions.as_traced(node, reason, "in_place", choice)
        dtype = targets[0]
        reason = "writes in place: runs in the dtype of the tensor it writes to"
        if name in NATIVE_INPLACE:
            return decisions.as_it_comes(node, reason, "in_place", choice)
        return decisions.cast(node, dtype, reason, "in_place", choice, keep=tuple(written))

    # ------------------------------------------------------------------------- regions and modules

    def forced_dtype(self, node: fx.Node) -> tuple[torch.dtype, str, str, bool] | None:
        """(dtype, reason, rule, whole): what a region or a module rule says; whole is False when it only
        changes which low dtype the classes use."""
        region = node.meta.get(ir.REGION)
        depth = region.depth if isinstance(region, Region) else 0
        paths = ir.module_chain(node)
        for index in range(len(paths) - 1, depth - 1, -1):  # a module called in the region is inside it
            dtype = self.ctx.module_precision.get(paths[index])
            if dtype is not None:
                named = f"set_precision({paths[index] or 'the model'}, {dtype_name(dtype)})"
                return dtype, named, "set_precision", True
        for path in reversed(paths[depth:]) if self.policy.modules or self.ctx.policy.modules else ():
            rule = self.module_rule(node, path)
            if rule is not None and not any(self.module_rule(node, p) == rule for p in paths[:depth]):
                return rule[1], f"module rule '{rule[0]}': {dtype_name(rule[1])}", "module_rule", True
        if isinstance(region, Region):
            if region.kind == "level":
                return torch.float32, str(region), "level", True
            if region.kind == "autocast" and region.dtype is not None:
                low = region.dtype if region.dtype in ir.LOW_DTYPES else torch.float32
                return low, str(region), "region", low is torch.float32
            return region.dtype or torch.float32, str(region), "region", True
        return None

    def module_rule(self, node: fx.Node, path: str) -> tuple[str, torch.dtype] | None:
        """The rule for a module around a node; the rules of a part that was compiled by itself come first there."""
        part = node.meta.get(ir.NESTED)
        if isinstance(part, Nested) and part.policy.modules and (inside := part.relative(path)) is not None:
            rule = part.policy.module_rule(inside)
            if rule is not None:
                return rule
        return self.ctx.policy.module_rule(path)

    # ------------------------------------------------------------------------------ torch.autocast

    def like_autocast(self, node: fx.Node, name: str, floats: list[tuple[str, fx.Node]]) -> Decision:
        assert self.policy.autocast_device is not None
        lists = torch_lists.LISTS[self.policy.autocast_device]
        overload = ir.overload_name(node)
        region = node.meta.get(ir.REGION)
        low = self.policy.low
        forced = self.forced_dtype(node)
        written = ir.mutated_args(node)
        listed = self.policy.classify(name)
        if isinstance(region, Region) and region.kind == "autocast" and (forced is None or forced[2] == "region"):
            if region.dtype is None:
                return decisions.as_it_comes(node, str(region), "region")
            low = region.dtype
        elif forced is not None and not written and not self.memory.is_view(node):
            return decisions.cast(node, forced[0], forced[1], forced[2])
        if written and listed.rule in ("white_list", "black_list"):
            return self.in_place(node, name, floats, written, listed)
        if listed.rule in ("white_list", "black_list"):
            return decisions.cast(node, low if listed.cls is OpClass.LOW else torch.float32, listed.reason, listed.rule)
        if overload in lists["banned"]:
            raise BannedOpError(
                f"torch.autocast bans {name} on {self.policy.autocast_device}: use "
                f"binary_cross_entropy_with_logits. At {ir.source_line(node) or node.name}."
            )
        if overload in lists["low"]:
            return decisions.cast(node, low, "torch.autocast runs it in low precision", "autocast")
        if overload in lists["fp32_set_dtype"]:
            if decisions.names_dtype(node):
                return decisions.as_it_comes(
                    node, "an explicit dtype= argument wins", "explicit_dtype", traced_out=True
                )
            return decisions.cast(node, torch.float32, "torch.autocast runs it in fp32", "autocast")
        if overload in lists["fp32"]:
            return decisions.cast(node, torch.float32, "torch.autocast runs it in fp32", "autocast")
        if overload in lists["promote"]:
            widest = decisions.widest([ir.dtype_of(a) for _, a in floats])
            return decisions.cast(node, widest, "torch.autocast promotes it to its widest input", "autocast")
        return decisions.as_it_comes(node, "torch.autocast does not list it: torch's own type promotion", "autocast")

    # -------------------------------------------------------------------------------- higher order

    def higher_order(self, node: fx.Node) -> Decision:
        name = ir.op_name(node).removeprefix("higher_order::")
        bodies = [inner for _, inner in ir.subgraphs(self.gm, node)]
        like_autocast = self.policy.autocast_device is not None
        if name in TRANSPARENT and bodies:
            given = node.args[TRANSPARENT[name] + 1 :]
            self.inside(node, bodies[0], native=self.native).run([_flow(a) for a in given])
            return Decision(Mode.NATIVE, None, f"{name}: the ops of its body have their own precisions",
                            out=_body_outputs(bodies[0]), rule="transparent", wide=wide_outputs(bodies[0]))  # fmt: skip
        if name == AUTOGRAD_FUNCTION and len(bodies) == 2 and like_autocast and not self.native:
            forward, backward = bodies
            _Assign(forward, self.ctx).run([_flow(a) for a in node.args[2:]])
            output, saved = _output_values(forward)
            out = tuple(_flow(v) for v in pytree.tree_leaves(output))
            given_back = [*out, *(_flow(v) for v in pytree.tree_leaves(saved))]
            _Assign(backward, self.ctx, native=True).run(given_back)
            return Decision(Mode.NATIVE, None, "a custom autograd function: its forward as autocast would run it",
                            out=out, rule="transparent")  # fmt: skip
        if name == AUTOGRAD_FUNCTION:
            for number, body in enumerate(bodies):
                (self.inside(node, body, native=True) if number == 0 else _Assign(body, self.ctx, native=True)).run()
            new = decisions.as_traced(
                node, "a custom autograd function: forward and backward keep their dtypes", "opaque"
            )
            return replace(new, wide=_together([wide_outputs(bodies[0])] if bodies else [], len(new.out)))
        for body in bodies:
            self.inside(node, body, native=self.native).run()
        if name in LOOPS and bodies:
            self.again(node, bodies[-1], len(pytree.tree_leaves(node.args[LOOPS[name]])))
        reason = f"{name}: its inputs and outputs keep their dtypes, the ops of its body have their own precisions"
        new = decisions.as_traced(node, reason, "sealed")
        return replace(new, wide=_together([wide_outputs(body) for body in bodies], len(new.out)))

    def again(self, node: fx.Node, body: fx.GraphModule, carried: int) -> None:
        """The body of a loop, whose first results are its first inputs in the next round: wide ones are wide there."""
        places = [n for n in body.graph.nodes if n.op == "placeholder"]
        wide: dict[fx.Node, str] = {}
        while True:
            found = zip(places[:carried], wide_outputs(body)[:carried], strict=False)
            new = {place: why for place, why in found if why and not why_wide(place)}
            if not new:
                return
            wide |= new
            self.inside(node, body, native=self.native, wide=wide).run()

    def inside(
        self, node: fx.Node, body: fx.GraphModule, *, native: bool, wide: dict[fx.Node, str] | None = None
    ) -> _Assign:
        """The same for a graph inside a node; it knows which of its inputs hold constants and which are wide."""
        pairs = list(ir.operands(node, body))
        held = {place: self.carried[given] for place, given in pairs if given in self.carried}
        given_wide = {place: why for place, given in pairs if (why := why_wide(given))}
        return _Assign(body, self.ctx, native=native, carried=held, wide=given_wide | (wide or {}))


# ------------------------------------------------------------------------------------------- small facts


def _is_empty(node: fx.Node) -> bool:
    value = ir.tensor_of(node)
    return value is not None and any(type(size) is int and size == 0 for size in value.shape)


def _strides_fit(floats: list[tuple[str, fx.Node]], dtype: torch.dtype, stride_bytes: int) -> bool:
    """True if, in ``dtype``, all strides of the matrices in ``floats`` but those of 1 are multiples of
    ``stride_bytes``; a stride that only the run will tell is taken not to be."""
    values = [v for _, a in floats if stride_bytes and (v := ir.tensor_of(a)) is not None and v.dim() > 1]
    strides = [s for v in values for s in v.stride() if type(s) is not int or s != 1]
    if not strides:
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # brings SymPy, a second to import

    return all(statically_known_true(s * dtype.itemsize % stride_bytes == 0) for s in strides)


def _together(wide: Sequence[tuple[str, ...]], number: int) -> tuple[str, ...]:
    """Each result of a higher-order op is wide if one of its bodies makes it so; ``wide``: of each body's results."""
    alike = [given[:number] for given in wide if len(given) >= number]
    found = tuple(next(filter(None, whys), "") for whys in zip(*alike, strict=True))
    return found if any(found) else ()


def _flow(value: Any) -> torch.dtype | None:
    return ir.dtype_of(value) if isinstance(value, fx.Node) else None


def _output_values(gm: fx.GraphModule) -> Any:
    return next(n for n in gm.graph.nodes if n.op == "output").args[0]


def _body_outputs(gm: fx.GraphModule) -> tuple[torch.dtype | None, ...]:
    return tuple(_flow(v) for v in pytree.tree_leaves(_output_values(gm)))


PASS = Pass("assign_precision", Dialect.PRE_DISPATCH, requires=(NORMALIZED,), ensures=(ASSIGNED,), run=run)
