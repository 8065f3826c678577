"""Bytes that a node's kernel moves, from the shapes of what it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from .. import ir
from ..common.torch_names import OpOverload
from ..ir.schema import signature

#: ops that only name memory, or allocate it, beside those whose schema says that they are views
_FREE = frozenset({
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "sym_size", "detach",
    "lift_fresh_copy", "_assert_tensor_metadata", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as",
    "expand_as", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size",
})  # fmt: skip
#: ops that read as much of their first operand as they write, however large it is
_GATHERS = frozenset({"embedding", "index_select", "index", "gather", "select_backward", "slice_backward", "take"})
#: ops that read their operands more often than once: batch norm computes statistics before it normalizes
_READS = {
    "batch_norm": 2, "_native_batch_norm_legit": 2, "_native_batch_norm_legit_functional": 2, "native_batch_norm": 2,
    "cudnn_batch_norm": 2, "_batch_norm_with_update": 2, "_batch_norm_with_update_functional": 2,
    "native_batch_norm_backward": 2, "cudnn_batch_norm_backward": 2, "batch_norm_backward": 2,
    "instance_norm": 2, "group_norm": 2, "native_group_norm": 2, "native_group_norm_backward": 2,
}  # fmt: skip


def is_free(node: fx.Node) -> bool:
    """True for a node that runs no kernel: an input, a view, a selection of an output, an allocation."""
    if node.op != "call_function" or ir.is_getitem(node):
        return True
    if not isinstance(node.target, OpOverload):
        return not ir.is_higher_order(node)
    told = signature(node.target)
    if told.name in ("dropout", "feature_dropout") and dict(ir.schema_args(node)).get("train") is False:
        return True
    if told.name in ("contiguous", "to", "_to_copy", "clone"):
        return told.name in ("contiguous", "to") and not _changes(node)
    return told.name in _FREE or (bool(told.aliased) and not told.written)


def _changes(node: fx.Node) -> bool:
    """Whether a conversion writes anything: another dtype, or another order in memory."""
    source = node.args[0]
    before, after = ir.tensor_of(source) if isinstance(source, fx.Node) else None, ir.tensor_of(node)
    if before is None or after is None:
        return True
    return before.dtype != after.dtype or before.stride() != after.stride()


def is_pointwise(node: fx.Node) -> bool:
    """True for an op that computes each element by itself, which Inductor fuses with its neighbours."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return ir.is_conversion(node) or torch.Tag.pointwise in node.target.tags


def nbytes(value: torch.Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a tensor, a floating one as if it had ``dtype``. What is expanded is in memory once."""
    kind = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
    total = kind.itemsize
    for size, stride in zip(value.shape, _strides(value), strict=True):
        total *= 1 if stride == 0 else ir.concrete(size)
    return total


def _strides(value: torch.Tensor) -> tuple[int, ...]:
    if value.layout is not torch.strided:
        return (1,) * value.dim()
    return tuple(ir.concrete(stride) for stride in value.stride())


def reads(node: fx.Node, dtype: torch.dtype | None = None) -> Iterator[tuple[fx.Node, int]]:
    """(operand, bytes) that a kernel reads; an operand that it is given twice counts once."""
    name = ir.op_name(node)
    times = _READS.get(name, 1)
    written = max((nbytes(v, dtype) for v in ir.tensor_outputs(node) if v is not None), default=0)
    first = True
    for argument in dict.fromkeys(arg for _, arg in ir.tensor_args(node)):
        value = ir.tensor_of(argument)
        assert value is not None
        size = nbytes(value, dtype)
        if first and name in _GATHERS:
            size = min(size, written)
        yield argument, size * times
        first = False


def writes(node: fx.Node, dtype: torch.dtype | None = None) -> int:
    """Bytes that a kernel writes."""
    return sum(nbytes(value, dtype) for value in ir.tensor_outputs(node) if value is not None)
