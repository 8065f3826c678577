"""The tensors that nodes stand for: dtypes, sizes, fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..common.torch_names import dispatch_mode, pytree
from .meta import CONSTANT, META

DTYPE_NAMES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
LOW_DTYPES = (torch.float16, torch.bfloat16)
#: dtypes that a precision decision may change; fp64, complex and integers are never touched
ELIGIBLE = (torch.float32, *LOW_DTYPES)


def tensor_outputs(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """Return the traced value of a node as a flat tuple, with None for anything that isn't a tensor."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return (val,)
    if isinstance(val, (tuple, list)):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in pytree.tree_leaves(val))
    return ()


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """Return the single tensor that a node stands for, or None."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's value after rewriting: the decision's if there is one, else the traced one."""
    known = node.meta.get(META)
    if known is not None and len(known.out) == 1:
        out: torch.dtype | None = known.out[0]
        if out is not None:
            return out
    val = tensor_of(node)
    return None if val is None else val.dtype


def is_eligible(value: torch.Tensor | None) -> bool:
    """True for a dense tensor whose precision may be changed."""
    return value is not None and value.dtype in ELIGIBLE and value.layout is torch.strided


def constant(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """Return the tensor behind a node that stands for a constant of the model's code, or None."""
    if not isinstance(node, fx.Node):
        return None
    found = getattr(gm, str(node.target), None) if node.op == "get_attr" else node.meta.get(CONSTANT)
    return found if type(found) is torch.Tensor else None


def nbytes(value: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a (fake) tensor; a symbolic size counts with its hint."""
    total = (dtype or value.dtype).itemsize
    for size in value.shape:
        total *= concrete(size)
    return total


def concrete(size: Any) -> int:
    """Return an int for a possibly symbolic size: its hint, or 1 for an unbacked one."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if hint is not None else 1


def retype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a new fake tensor like ``value`` in another dtype.

    It is made from a tensor on ``meta``: an op under the fake mode takes seven times as long, and a graph has hundreds
    of values. Torch 2.13 to 2.15: the class of fake tensors is called with the mode, that tensor and the device.
    """
    mode: Any = getattr(value, "fake_mode", None)
    if mode is not None and dispatch_mode() is not None:  # which would see the tensor on ``meta``
        with mode, torch.no_grad():
            return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device)
    if _has_usual_strides(value):  # torch computes symbolic strides faster than it takes them over
        plain = torch.empty(value.size(), dtype=dtype, device="meta")
    else:
        plain = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device="meta")
    fake: Any = type(value)
    return plain if mode is None else fake(mode, plain, value.device)


def _has_usual_strides(value: torch.Tensor) -> bool:
    """True if a tensor has the strides that ``torch.empty`` gives.

    Symbolic ones are compared as they are written, which makes no guard.
    """
    wanted: Any = 1
    strides: tuple[Any, ...] = value.stride()
    for size, stride in zip(reversed(value.size()), reversed(strides), strict=True):
        if type(stride) is int and type(wanted) is int:
            if stride != wanted:
                return False
        elif type(stride) is int or type(wanted) is int or stride.node.expr != wanted.node.expr:
            return False
        wanted = wanted * (max(size, 1) if type(size) is int else size)
    return True


def same_sizes(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """True if sizes are known to be equal; to ask symbolic ones would make a guard."""
    if len(one) != len(two):
        return False
    if all(isinstance(size, int) for size in (*one, *two)):
        return tuple(one) == tuple(two)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(a == b) for a, b in zip(one, two, strict=True))


def fake_mode(graph: fx.Graph) -> Any:
    """Return the fake mode of the values of a graph's nodes."""
    values = (v for n in graph.nodes for v in tensor_outputs(n))
    return next(m for v in values if (m := getattr(v, "fake_mode", None)) is not None)


def output_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """Return the traced dtype of each output of a graph; None for those that aren't tensors."""
    last = next(iter(reversed(gm.graph.nodes)))
    values = (tensor_of(n) if isinstance(n, fx.Node) else None for n in pytree.tree_leaves(last.args[0]))
    return [None if v is None else v.dtype for v in values]


def returns_non_float(node: fx.Node) -> bool:
    """True for an op that returns facts about its inputs: a comparison, an argmax, the indices of a sort."""
    values = [v for v in tensor_outputs(node) if v is not None]
    return any(not v.dtype.is_floating_point and not v.dtype.is_complex for v in values)
