"""Casts, in both dialects: ``aten.to.dtype`` in pre-dispatch ATen, ``aten._to_copy`` in functional ATen."""

from __future__ import annotations

import torch
from torch import fx

from .schema import op_name
from .values import tensor_of

aten = torch.ops.aten
#: ops that convert to another dtype, in all spellings
_CONVERSIONS = ("to", "_to_copy", "type_as", "prims::convert_element_type")


def is_conversion(node: fx.Node) -> bool:
    """True for an op that may convert to another dtype, in any of its spellings, whatever else it does."""
    return node.op == "call_function" and op_name(node) in _CONVERSIONS


def is_cast(node: fx.Node) -> bool:
    """True for an explicit dtype conversion that does nothing else (no device, no layout change)."""
    if node.op != "call_function":
        return False
    if node.target is aten.to.dtype or node.target is torch.ops.prims.convert_element_type.default:
        return len(node.args) == 2 and not any(node.kwargs.values())
    return node.target is aten._to_copy.default and "dtype" in node.kwargs and _changes_only_dtype(node)


def _changes_only_dtype(node: fx.Node) -> bool:
    """True if a conversion changes only the dtype: autograd's ``_to_copy`` names the value's own layout and device."""
    source = node.args[0]
    before = tensor_of(source) if isinstance(source, fx.Node) else None
    for key, value in node.kwargs.items():
        if key == "dtype" or value is None or value is False:
            continue
        if before is None or (key, value) not in (("layout", before.layout), ("device", before.device)):
            return False
    return True


def cast_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype that a cast node converts to."""
    dtype = node.kwargs["dtype"] if node.target is aten._to_copy.default else node.args[1]
    assert isinstance(dtype, torch.dtype)
    return dtype


def cast_source(node: fx.Node) -> fx.Node:
    """Return the node whose value a cast node converts."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def is_float_cast(node: fx.Node) -> bool:
    """True for a cast between two different float dtypes, which reports and benchmarks count."""
    if not is_cast(node):
        return False
    source, result = tensor_of(cast_source(node)), tensor_of(node)
    return (
        source is not None and result is not None and source.dtype != result.dtype
        and source.dtype.is_floating_point and result.dtype.is_floating_point
    )  # fmt: skip


def lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """True if every value of ``source`` is also a value of ``target``, so that a cast loses nothing."""
    if source == target:
        return True
    exact: dict[torch.dtype, tuple[torch.dtype, ...]] = {
        torch.float16: (torch.float32, torch.float64),
        torch.bfloat16: (torch.float32, torch.float64),
        torch.float32: (torch.float64,),
        torch.bool: (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        torch.uint8: (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        torch.int8: (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        torch.int16: (torch.float32, torch.float64),
        torch.int32: (torch.float64,),
    }
    return target in exact.get(source, ())
