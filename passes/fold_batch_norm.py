"""fold_batch_norm: fold the scale and shift of a batch norm at inference into the layer before it.

``batch_norm(conv2d(x, w, b), scale, shift, mean, var)``  →  ``conv2d(x, w', b')`` with

    w' = w * scale / sqrt(var + eps)        b' = (b - mean) * scale / sqrt(var + eps) + shift

computed in fp64 and rounded to fp32, before any other rounding. The layer is a convolution, a transposed convolution,
or a linear layer on [batch, features].

Left alone: a batch norm that uses the batch's own statistics; a layer whose result or weight has another reader;
weights that are written to; a norm whose module has a different precision rule than the layer's; and a result that the
low-precision dtype represents badly (the largest weight of a channel overflows or is subnormal in it).

Requires: normalized, and ``ctx.weights``: without them it does nothing. Ensures: normalized. A second run changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.ir.weights import drop_unread, misfit
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import NORMALIZED

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
Make = Callable[[], Tensor]


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.weights is None or not ctx.policy.rewrites or ctx.policy.autocast_device is not None:
        return False
    ir.number_calls(gm)
    fixed = set(ctx.weights.fixed(gm.graph))
    written, outputs = ir.written_nodes(gm.graph), ir.output_nodes(gm.graph)
    modified = False
    for norm in list(gm.graph.nodes):
        if norm.op != "call_function" or ir.op_name(norm) != "batch_norm":
            continue
        layer = norm.args[0]
        if isinstance(layer, fx.Node) and layer not in written and layer not in outputs:
            modified |= _fold(gm.graph, norm, layer, fixed, ctx)
    if modified:
        drop_unread(gm.graph, ctx.weights)
        gm.recompile()
    return modified


def _fold(graph: fx.Graph, norm: fx.Node, layer: fx.Node, fixed: set[fx.Node], ctx: Context) -> bool:
    weights = ctx.weights
    assert weights is not None
    given, into = ir.all_args(norm), ir.all_args(layer)
    statistics = [given["running_mean"], given["running_var"], given["weight"], given["bias"]]
    weight, bias = into.get("weight"), into.get("bias")
    if given["training"] or any(s is not None and s not in fixed for s in statistics) or None in statistics[:2]:
        return False
    if weight not in fixed or (bias is not None and bias not in fixed) or len(layer.users) > 1 or len(weight.users) > 1:
        return False
    groups = _groups(layer, into)
    if groups is None or any(v.meta["val"].dtype is not torch.float32 for v in (layer, norm, weight)):
        return False
    if _rules(norm, ctx) != _rules(layer, ctx):
        return False
    mean, var, scale, shift = (None if s is None else weights[s].make for s in statistics)
    assert mean is not None
    assert var is not None
    factor = partial(_factor, var, scale, float(given["eps"]))
    make_weight = partial(_weight, weights[weight].make, factor, groups)
    make_bias = partial(_bias, None if bias is None else weights[bias].make, mean, factor, shift)
    with torch.no_grad():
        if not _holds(make_weight(), groups, ctx.policy.low) or misfit(make_bias(), ctx.policy.low) is not None:
            return False
    weights.change(weight, make_weight)
    shape = ir.retype(statistics[0].meta["val"], torch.float32)
    new_bias = weights.add(graph, bias if bias is not None else weight, "folded", make_bias, shape)
    _set_bias(layer, new_bias)
    norm.replace_all_uses_with(layer)
    graph.erase_node(norm)
    return True


def _groups(layer: fx.Node, into: dict[str, Any]) -> int | None:
    """Return 0 if the weight's first dimension is the channels of the result, the number of groups for a transposed
    convolution; None for other layers, or if a batch norm behind it would see channels in another dimension."""
    name, result = ir.op_name(layer), ir.tensor_of(layer)
    if layer.op != "call_function" or result is None:
        return None
    if name == "linear":
        return 0 if result.dim() == 2 else None
    batched = result.dim() == into["weight"].meta["val"].dim() if isinstance(into.get("weight"), fx.Node) else False
    if name in CONVOLUTIONS and batched:
        return 0
    return int(into["groups"]) if name in TRANSPOSED and batched else None


def _rules(node: fx.Node, ctx: Context) -> tuple[Any, ...]:
    """Return the user's precision rules for a node and the modules around it."""
    paths = ir.module_chain(node)
    single = ctx.policy.call_rule(paths[-1], ir.op_name(node), node.meta.get(ir.CALL))
    said = [(ctx.policy.module_rule(path) or ("", None))[1] for path in paths]
    marked = [ctx.module_precision.get(path) for path in paths]
    around = node.meta.get(ir.REGION), node.meta.get(ir.NESTED)
    return single and single.precision, [d for d in said if d][-1:], [d for d in marked if d][-1:], *around


def _set_bias(layer: fx.Node, bias: fx.Node) -> None:
    args = list(layer.args)
    if "bias" in layer.kwargs:
        layer.update_kwarg("bias", bias)
    elif len(args) > 2:
        layer.update_arg(2, bias)
    else:
        layer.args = (*args, bias)


# ------------------------------------------------------------------------------------------- the arithmetic


def _factor(var: Make, scale: Make | None, eps: float) -> Tensor:
    root = (var().double() + eps).rsqrt()
    return root if scale is None else root * scale().double()


def _by_channel(weight: Tensor, groups: int) -> Tensor:
    """Return a view of a layer's weight whose first dimension is the channels of the result."""
    if not groups:
        return weight
    inner, outer = weight.shape[0] // groups, weight.shape[1]
    return weight.view(groups, inner, outer, -1).transpose(1, 2).reshape(groups * outer, inner, -1)


def _weight(weight: Make, factor: Make, groups: int) -> Tensor:
    value, scale = weight().detach(), factor()
    if groups:
        inner, outer = value.shape[0] // groups, value.shape[1]
        scale = scale.view(groups, 1, outer).expand(groups, inner, outer).reshape(groups * inner, outer)
    scale = scale.view(*scale.shape, *(1,) * (value.dim() - scale.dim()))
    return (value * scale).to(torch.float32)


def _bias(bias: Make | None, mean: Make, factor: Make, shift: Make | None) -> Tensor:
    value = -mean().double() if bias is None else bias().double() - mean().double()
    value = value * factor()
    return (value if shift is None else value + shift().double()).to(torch.float32)


def _holds(weight: Tensor, groups: int, low: torch.dtype) -> bool:
    peaks = _by_channel(weight, groups).flatten(1).abs().amax(1)
    limits = torch.finfo(low)
    return bool(((peaks == 0) | ((peaks >= limits.tiny) & (peaks <= limits.max))).all())


PASS = Pass("fold_batch_norm", Dialect.PRE_DISPATCH, requires=(NORMALIZED,), ensures=(NORMALIZED,), run=run)
