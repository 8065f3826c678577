"""Rules for ops that stay as they were traced: there is nothing to choose, or their dtypes are never changed."""

from __future__ import annotations

import torch

from amp_compiler import ir
from amp_compiler.common.torch_names import pytree
from amp_compiler.ir import Decision, decisions
from amp_compiler.policy import Rule, dtype_name
from amp_compiler.policy.ops.row import OpClass

from .state import At

#: ops that create a tensor of one value, in the dtype of their input
LIKE_FILLS = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
_NEVER = (torch.float64, torch.complex64, torch.complex128)


def level_changes_nothing(at: At) -> Decision | None:
    """Level O0 leaves everything as it is."""
    if at.policy.rewrites:
        return None
    return decisions.as_it_comes(at.node, f"level {at.policy.level}: untouched", Rule.LEVEL)


def no_float(at: At) -> Decision | None:
    """An op without floating-point inputs stays as it is."""
    return None if at.floats else decisions.as_it_comes(at.node, "no floating-point input", Rule.NO_FLOAT)


def in_native_body(at: At) -> Decision | None:
    """The backward of a custom autograd function keeps its dtypes."""
    if not at.state.native:
        return None
    reason = "backward of a custom autograd function: keeps its dtypes"
    return decisions.as_it_comes(at.node, reason, Rule.NATIVE)


def never_changed(at: At) -> Decision | None:
    """An op with an fp64, complex or sparse input, or a complex result, keeps the dtypes that it was traced with."""
    for _, arg in ir.tensor_args(at.node):
        value = ir.tensor_of(arg)
        if value is not None and (value.dtype in _NEVER or value.layout is not torch.strided):
            what = "sparse" if value.layout is not torch.strided else dtype_name(value.dtype)
            reason = f"has a {what} input: such tensors are never changed"
            return decisions.as_traced(at.node, reason, Rule.UNTOUCHED, causes=(arg.name,))
    results = pytree.tree_leaves(at.node.meta.get("val")) if at.cls not in (OpClass.FP32, OpClass.KEEP) else ()
    if any(isinstance(t, torch.Tensor) and t.dtype.is_complex for t in results):
        # fp16 and a complex number give complex32, and bf16 complex64 or, since torch 2.15, bcomplex32
        reason = "returns a complex result, which has no low-precision form"
        return decisions.as_traced(at.node, reason, Rule.UNTOUCHED)
    return None


def kept_by_class(at: At) -> Decision | None:
    """An op of class KEEP gets the dtypes that it was traced with; ``zeros_like`` and similar use their input's."""
    if at.cls is not OpClass.KEEP:
        return None
    if at.name not in LIKE_FILLS:
        return decisions.as_traced(at.node, at.choice.reason, at.choice.rule, at.choice)
    if at.state.fits_into(at.node, at.policy.low) and not at.names_dtype:
        return decisions.as_it_comes(at.node, "creates a tensor like another, in its dtype", Rule.CREATION, at.choice)
    return decisions.as_traced(at.node, at.choice.reason, Rule.CREATION, at.choice)


def sparse_gradient(at: At) -> Decision | None:
    """A cast cannot pass on a sparse gradient; in a conversion there is none."""
    if ir.all_args(at.node).get("sparse") is not True or at.state.ctx.weights is not None:
        return None
    reason = "its gradient is sparse, and a cast cannot pass on a sparse gradient"
    return decisions.as_traced(at.node, reason, Rule.UNTOUCHED, at.choice)


def already_low(at: At) -> Decision | None:
    """An op whose inputs the model's own code made low stays low."""
    if not all(v.dtype in ir.LOW_DTYPES for _, a in at.operands if (v := ir.tensor_of(a)) is not None):
        return None
    reason = "in low precision already, by the model's own code"
    return decisions.as_traced(at.node, reason, Rule.ALREADY_LOW, at.choice)
