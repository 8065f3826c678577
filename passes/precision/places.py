"""The precision that the place of a node asks for: a region in the model's code, ``set_precision`` or a module rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.ir.nesting import Nested, policies_in, policy_at
from amp_compiler.ir.regions import Region
from amp_compiler.policy import CallRule, Policy, Rule, dtype_name, precision_dtype
from amp_compiler.rewrite.base import Context


class Forced(NamedTuple):
    """A precision that the place of a node asks for. ``whole`` is False where it only changes which dtype is low;
    ``yields`` is True if a cast in the model's code comes first."""

    dtype: torch.dtype
    reason: str
    rule: Rule
    whole: bool
    yields: bool = False


def forced_dtype(node: fx.Node, ctx: Context, *, is_asked: bool = False) -> Forced | None:
    """Return what a region or a module rule asks for at a node; the innermost wins. ``is_asked``: the model's code asks
    for fp32 there, so that rules which yield to it do not count."""
    region = node.meta.get(ir.REGION)
    depth = region.depth if isinstance(region, Region) else 0
    paths = ir.module_chain(node)
    for index in range(len(paths) - 1, depth - 1, -1):  # a module called in the region is inside it
        dtype = ctx.module_precision.get(paths[index])
        if dtype is not None:
            named = f"set_precision({paths[index] or 'the model'}, {dtype_name(dtype)})"
            return Forced(dtype, named, Rule.SET_PRECISION, True)
    single = _call_rule(node, paths[-1], ctx.policy) if depth < len(paths) else None
    if single is not None and not (single.yields and is_asked):
        told = single.reason or f"call rule '{single}'"
        return Forced(precision_dtype(single.precision), told, Rule.CALL_RULE, True, single.yields)
    has_rules = policy_at(node, ctx.policy).modules or ctx.policy.modules
    for path in reversed(paths[depth:]) if has_rules else ():
        rule = _module_rule(node, path, ctx.policy)
        if rule is not None and not any(_module_rule(node, p, ctx.policy) == rule for p in paths[:depth]):
            return Forced(rule[1], f"module rule '{rule[0]}': {dtype_name(rule[1])}", Rule.MODULE_RULE, True)
    return _of_region(region) if isinstance(region, Region) else None


def _of_region(region: Region) -> Forced:
    if region.kind == "level":
        return Forced(torch.float32, str(region), Rule.LEVEL, True)
    if region.kind == "autocast" and region.dtype is not None:
        low = region.dtype if region.dtype in ir.LOW_DTYPES else torch.float32
        return Forced(low, str(region), Rule.REGION, low is torch.float32)
    return Forced(region.dtype or torch.float32, str(region), Rule.REGION, True)


def _module_rule(node: fx.Node, path: str, policy: Policy) -> tuple[str, torch.dtype] | None:
    """Return the rule for a module around a node; inside a part that was compiled by itself, its own rules come
    first."""
    part = node.meta.get(ir.NESTED)
    if isinstance(part, Nested) and part.policy.modules and (inside := part.relative(path)) is not None:
        rule = part.policy.module_rule(inside)
        if rule is not None:
            return rule
    return policy.module_rule(path)


def _call_rule(node: fx.Node, path: str, policy: Policy) -> CallRule | None:
    """Return the rule for this very op; inside a part that was compiled by itself, its own rules come first."""
    part, name, number = node.meta.get(ir.NESTED), ir.op_name(node), node.meta.get(ir.CALL)
    if isinstance(part, Nested) and part.policy.calls and (inside := part.relative(path)) is not None:
        rule = part.policy.call_rule(inside, name, number)
        if rule is not None:
            return rule
    return policy.call_rule(path, name, number)


def low_at(node: fx.Node, ctx: Context) -> torch.dtype:
    """Return the dtype that counts as low at a node; fp32 in an fp32 region."""
    forced = forced_dtype(node, ctx)
    return forced.dtype if forced is not None else policy_at(node, ctx.policy).low


def low_dtypes(gm: fx.GraphModule, ctx: Context) -> tuple[torch.dtype, ...]:
    """Return every low-precision dtype that some part of a graph may run in."""
    found = set(ctx.module_precision.values())
    for policy in policies_in(gm, ctx.policy):
        found |= {policy.low, *(precision_dtype(name) for _, name in policy.modules)}
        found |= {precision_dtype(rule.precision) for rule in policy.calls}
    regions = (node.meta.get(ir.REGION) for node in gm.graph.nodes)
    found |= {region.dtype for region in regions if isinstance(region, Region) and region.dtype is not None}
    return tuple(dtype for dtype in ir.LOW_DTYPES if dtype in found)
