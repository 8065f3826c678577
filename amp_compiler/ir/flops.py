"""Floating-point operations of the heavy ops in a pre-dispatch graph, computed from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from .. import ir


def node_flops(node: fx.Node) -> int:
    """Return two for each multiply-add of a matmul-like or convolution node; 0 for any other op."""
    formula = _FORMULAS.get(ir.op_name(node).removesuffix("_")) if node.op == "call_function" else None
    if formula is None:
        return 0
    named = dict(ir.schema_args(node))
    return formula(named, _shape(ir.tensor_of(node)))


def _shape(value: torch.Tensor | None) -> list[int]:
    return [] if value is None else [ir.concrete(s) for s in value.shape]


def _of(named: dict[str, Any], *names: str) -> list[int]:
    for name in names:
        node = named.get(name)
        if isinstance(node, fx.Node):
            return _shape(ir.tensor_of(node))
    return []


def _matmul(named: dict[str, Any], out: list[int]) -> int:
    left = _of(named, "self", "input")
    return 2 * prod(out) * (left[-1] if left else 0)


def _linear(named: dict[str, Any], out: list[int]) -> int:
    return 2 * prod(out) * (_of(named, "weight") or [0])[-1]


def _addmm(named: dict[str, Any], out: list[int]) -> int:
    left = _of(named, "mat1", "batch1", "mat")
    return 2 * prod(out) * (left[-1] if left else 0)


def _conv(named: dict[str, Any], out: list[int]) -> int:
    return 2 * prod(out) * prod(_of(named, "weight")[1:])


def _conv_transpose(named: dict[str, Any], out: list[int]) -> int:
    return 2 * prod(_of(named, "input")) * prod(_of(named, "weight")[1:])


def _attention(named: dict[str, Any], out: list[int]) -> int:
    query, key = _of(named, "query"), _of(named, "key")
    if not query or not key:
        return 0
    return 2 * prod(query) * key[-2] + 2 * prod(out) * key[-2]


def _recurrent(named: dict[str, Any], out: list[int]) -> int:
    """Count a whole RNN: every step of every sequence is multiplied by every matrix once."""
    weights = [_shape(ir.tensor_of(node)) for node in named.get("params", ()) if isinstance(node, fx.Node)]
    return 2 * prod(_of(named, "input")[:2]) * sum(prod(shape) for shape in weights if len(shape) == 2)


def _lstm(named: dict[str, Any], out: list[int]) -> int:
    x, weight, recurrent = _of(named, "x"), _of(named, "w_ih"), _of(named, "w_hh")
    return 2 * prod(x[:2]) * (prod(weight) + prod(recurrent))


def _einsum(named: dict[str, Any], out: list[int]) -> int:
    equation, tensors = named.get("equation"), named.get("tensors", ())
    if not isinstance(equation, str) or "." in equation:
        return 0
    sizes: dict[str, int] = {}
    for letters, node in zip(equation.split("->")[0].replace(" ", "").split(","), tensors, strict=False):
        sizes.update(zip(letters, _shape(ir.tensor_of(node)), strict=False))
    return 2 * prod(sizes.values())


_FORMULAS: dict[str, Callable[[dict[str, Any], list[int]], int]] = {
    "linear": _linear, "matmul": _matmul, "mm": _matmul, "bmm": _matmul, "mv": _matmul, "dot": _matmul,
    "addmm": _addmm, "baddbmm": _addmm, "addbmm": _addmm, "addmv": _addmm,
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "convolution": _conv,
    "conv_transpose1d": _conv_transpose, "conv_transpose2d": _conv_transpose,
    "conv_transpose3d": _conv_transpose, "scaled_dot_product_attention": _attention, "einsum": _einsum,
    "amp::lstm_layer": _lstm, "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent, "rnn_relu": _recurrent,
}  # fmt: skip
#: ops that multiply matrices or convolve
PRODUCTS = frozenset(_FORMULAS)
