"""Floating-point operations of one op that ran, from the profiler's record of it: products, convolutions, attention,
oneDNN's LSTM layers, forward and backward. (``flops.py`` has those of nodes in a captured graph.)

A multiplication and an addition count as two. The formulas are those of ``torch.utils.flop_counter`` where it has one:
elementwise work and a bias count nothing, and a causal mask saves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.lowering import STANDS_FOR

# The record of one tensor argument (``sizes``, ``dtype``); None or a number for other arguments.
Argument = Any
# How torch's profiler writes a dtype that is an argument: by its number in c10::ScalarType.
_SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}


def event_flops(name: str, arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int] | None:
    """Return the dtype that an op multiplies in and its number of operations; None for other ops.

    ``arguments``: as in the profiler's tree, with tensors; ``lists``: the same, with lists of integers.
    """
    formula = _FORMULAS.get(STANDS_FOR.get(name, name))
    return None if formula is None else formula(arguments, lists)


Formula = Callable[[Sequence[Argument], Sequence[Any]], tuple[torch.dtype, int]]


def _product(left: int) -> Formula:
    """Return the formula of a matrix product, batched or not, with the operands ``left`` and ``left + 1``."""

    def formula(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
        a, b = arguments[left : left + 2]
        columns = math.prod(b.sizes) // max(1, math.prod(b.sizes[:-2]) * a.sizes[-1]) if len(b.sizes) > 1 else 1
        return a.dtype, 2 * math.prod(a.sizes) * columns

    return formula


def _cast_product(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
    _, number = _product(0)(arguments, lists)
    return _SCALAR_TYPES[arguments[3]], number


def _convolution(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
    x, weight = arguments[:2]
    stride, padding, dilation = lists[3:6]
    space = x.sizes[2:]
    if not arguments[6]:  # the whole filter is applied per output position; transposed: per input position
        filters = weight.sizes[2:]
        space = [
            (size + 2 * _at(padding, i) - _at(dilation, i) * (filters[i] - 1) - 1) // _at(stride, i) + 1
            for i, size in enumerate(space)
        ]
    return x.dtype, 2 * x.sizes[0] * math.prod(space) * math.prod(weight.sizes)


def _convolution_backward(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
    """Count the gradients of input and weight: each costs as much as the forward."""
    gradient, x, weight = arguments[:3]
    space = (x if arguments[7] else gradient).sizes[2:]
    wanted = sum(bool(flag) for flag in lists[10][:2])
    return gradient.dtype, wanted * 2 * x.sizes[0] * math.prod(space) * math.prod(weight.sizes)


def _at(values: Sequence[int], i: int) -> int:
    """Return the value for dimension ``i``; a single value stands for all dimensions."""
    return values[i] if len(values) > 1 else values[0]


def _attention(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
    from torch.utils.flop_counter import sdpa_flop_count  # it imports Triton

    query, key, value = arguments[:3]
    return query.dtype, sdpa_flop_count(query.sizes, key.sizes, value.sizes)


def _attention_backward(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return arguments[1].dtype, sdpa_backward_flop_count(*(tensor.sizes for tensor in arguments[:4]))


def _rnn_layer(times: int, x_at: int = 0, weights_at: int = 1) -> Formula:
    """Return the formula of an RNN layer: every step of every sequence is multiplied by both weights; the backward
    does it twice, for the input and for the weights."""

    def formula(arguments: Sequence[Argument], lists: Sequence[Any]) -> tuple[torch.dtype, int]:
        x, (from_input, from_state) = arguments[x_at], arguments[weights_at : weights_at + 2]
        weights = math.prod(from_input.sizes) + math.prod(from_state.sizes)
        return x.dtype, times * 2 * math.prod(x.sizes[:-1]) * weights

    return formula


_FORMULAS: dict[str, Formula] = {
    **{f"aten::{name}": _product(0) for name in ("mm", "bmm", "mv", "dot", "vdot", "_scaled_mm")},
    **{f"aten::{name}": _product(1) for name in ("addmm", "_addmm_activation", "baddbmm", "addbmm", "addmv")},
    **{f"aten::{name}_": _product(1) for name in ("addmm", "baddbmm", "addbmm", "addmv")},
    **{f"aten::{name}": _convolution for name in ("convolution", "_convolution", "convolution_overrideable")},
    "aten::convolution_backward": _convolution_backward,
    **{
        f"aten::_scaled_dot_product_{name}": _attention
        for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    },
    **{
        f"aten::_scaled_dot_product_{name}_backward": _attention_backward
        for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    },
    "aten::mkldnn_rnn_layer": _rnn_layer(1),
    "aten::mkldnn_rnn_layer_backward": _rnn_layer(2),
    "amp::lstm_layer": _rnn_layer(1, 0, 3),
    "amp::lstm_layer_backward": _rnn_layer(2, 3, 6),
    "amp::cast_matmul": _cast_product,
}
