"""Facts about a captured graph on its way to mixed precision, before autodiff."""

from __future__ import annotations

import torch
from torch import fx

from ... import ir
from ...ir import Mode, decisions
from ...ir.nesting import policy_at
from ...ir.wide import why_wide
from ...policy import Policy, Rule, Treatment
from ...policy.ops.row import OpClass
from ..base import Context, Dialect, Fact, Place


def only_aten(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            place.fail("is not an ATen call.", node)


def _normalized(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            place.fail("is an autocast region that is still a node.", node)
        if ir.op_name(node) == "amp::scope":
            place.fail("is a precision scope that is still a node.", node)
        if ir.is_float_cast(node) and node.target is not torch.ops.aten.to.dtype:
            place.fail("is a cast that is not written as aten.to.dtype.", node)


def _origin(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    """A dtype can only have followed another if it is fp32 in the trace and low in the twin."""
    for node in gm.graph.nodes:
        known = ir.origin(node)
        if known is None or not known.follows:
            continue
        if all(v is None or v.dtype is not torch.float32 for v in ir.tensor_outputs(node)):
            place.fail("is said to follow a dtype, but its value is not fp32.", node)


def _assigned(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    low_dtypes = ir.LOW_DTYPES
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        known = ir.decision(node)
        if known is None or not known.reason:
            place.fail("has no precision or no reason.", node)
        if known.rule is Rule.TABLE and known.mode is Mode.CAST and ctx.policy.autocast_device is None:
            expected = _expected(known.cls, policy_at(node, ctx.policy)) if not ir.returns_non_float(node) else None
            if expected is not None and known.precision != expected:
                place.fail(f"is {known.precision}, but the level's table says {expected}.", node)
        if known.mode is not Mode.NATIVE and _written_and_cast(node, known):
            place.fail("writes to an argument that would be cast: the write would be lost.", node)
        if known.precision in low_dtypes and known.cls is OpClass.FP32 and known.rule is Rule.TABLE:
            place.fail("is on the black list and low.", node)
        if known.precision in low_dtypes and known.mode is Mode.CAST and known.rule in (Rule.TABLE, Rule.FOLLOW_LIST):
            wide = next((why for _, a in ir.tensor_args(node) if (why := why_wide(a))), "")
            if wide and known.cls is not OpClass.LOW and policy_at(node, ctx.policy).keeps_wide:
                place.fail(f"rounds {wide}, which only a white-listed op may do.", node)


def _placed(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    for node in gm.graph.nodes:
        known = ir.decision(node)
        if known is None:
            continue
        if known.rule is Rule.PLACED and known.precision in ir.LOW_DTYPES:
            wide = next((why for _, a in ir.tensor_args(node) if (why := why_wide(a))), "")
            if wide:
                place.fail(f"rounds {wide}, to which costs must not lead.", node)
        if known.rule is Rule.PLACED and not known.either:
            place.fail("was given a precision by its costs, but the rules leave it no choice.", node)
        if ir.is_getitem(node) and decisions.selected(node).out != known.out:
            place.fail(f"is decided to give {known.out}, which is not what its source gives.", node)


def _written_and_cast(node: fx.Node, known: ir.Decision) -> bool:
    for name, arg in ir.tensor_args(node):
        if name in ir.mutated_args(node) and name not in known.keep_args and ir.is_eligible(ir.tensor_of(arg)):
            value = ir.tensor_of(arg)
            if known.mode is Mode.CAST or (value is not None and value.dtype != ir.dtype_of(arg)):
                return True
    return False


def _expected(cls: OpClass | None, policy: Policy) -> torch.dtype | None:
    if cls is OpClass.LOW:
        return None  # a region may have its own low-precision dtype
    return torch.float32 if policy.level_row.treatment(cls) is Treatment.FP32 else None


def _cast(gm: fx.GraphModule, ctx: Context, place: Place) -> None:
    for node in gm.graph.nodes:
        known = ir.decision(node)
        if known is None:
            continue
        values = ir.tensor_outputs(node)
        if len(values) == len(known.out):
            for value, dtype in zip(values, known.out, strict=True):
                if value is not None and dtype is not None and value.dtype != dtype:
                    place.fail(f"was decided to return {dtype}, but its value is {value.dtype}.", node)
        if ir.is_higher_order(node) and known.rule in (Rule.TRANSPARENT, Rule.SEALED):
            _same_as_bodies(gm, node, place)
        if known.mode is Mode.CAST and node.op == "call_function" and not ir.is_higher_order(node):
            for name, arg in ir.tensor_args(node):
                value = ir.tensor_of(arg)
                free = name not in known.keep_args and ir.is_eligible(value)
                if free and value is not None and value.dtype != known.precision:
                    what = f"runs in {known.precision}, but its argument '{name}' ({arg.name}) is {value.dtype}."
                    place.fail(what, node)


def _same_as_bodies(gm: fx.GraphModule, node: fx.Node, place: Place) -> None:
    """A higher-order node returns the dtypes of the graphs inside it, if they return as many values."""
    if ir.op_name(node) == "higher_order::autograd_function_apply":
        return  # one of its graphs is a backward
    said = [None if v is None else v.dtype for v in ir.tensor_outputs(node)]
    for name, body in ir.subgraphs(gm, node):
        gives = ir.output_dtypes(body)
        if len(gives) == len(said) and any(
            a is not None and b is not None and a != b for a, b in zip(gives, said, strict=True)
        ):
            place.fail(f"returns {said}, but its body '{name}' returns {gives}.", node)


CAPTURED = Fact(
    "captured", Dialect.PRE_DISPATCH, "Only ATen calls, placeholders, constants and higher-order nodes.",
    check=only_aten,
)  # fmt: skip
NORMALIZED = Fact(
    "normalized", Dialect.PRE_DISPATCH,
    "A cast is `aten.to.dtype(x, dtype)`; no autocast region and no precision scope is a node.",
    check=_normalized, made_by="normalize",
)  # fmt: skip
ORIGIN = Fact(
    "origin", Dialect.PRE_DISPATCH,
    'A node that followed a dtype is fp32 here and low in the twin (`node.meta["amp_origin"]`).',
    check=_origin, made_by="mark_dtype_origin",
)  # fmt: skip
ASSIGNED = Fact(
    "assigned", Dialect.PRE_DISPATCH,
    'Every call has a `Decision` (`node.meta["amp"]`) with a reason; no argument that is written to would be cast; '
    "at O2 only a white-listed op rounds the result of an fp32 op (`amp_compiler/ir/wide.py` has the rule).",
    check=_assigned, made_by="assign_precision",
)  # fmt: skip
PLACED = Fact(
    "placed", Dialect.PRE_DISPATCH,
    "Where the rules allow both precisions, the costs on the device chose; no such op rounds a value that an fp32 op "
    "made.",
    check=_placed, made_by="place_neutral",
)  # fmt: skip
CAST = Fact(
    "cast", Dialect.PRE_DISPATCH,
    "Every value has the dtype that was decided; every argument of a cast node has its precision.",
    check=_cast, made_by="insert_casts",
)  # fmt: skip
