"""Everything of a batch that its low-precision dtype cannot hold, found in one run in fp32, and what to do about it.

The first overflow hides those behind it: inf is all that comes after. A run in fp32 shows the true size of every value
and of every gradient, so all ops that must stay in fp32 are named at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from .. import ir
from ..common.torch_names import pytree
from ..policy import dtype_name
from ..policy.ops.row import OpClass
from .probe import Probe, Seen, is_float, kind_of, largest

_MANY = 6  # places to name; a model with more of them needs another remedy than lists


@dataclass(frozen=True)
class Misfits:
    """The ops that must stay in fp32, as arguments of ``compile_train_step``.

    ``min_scale``: 0 if the scale is low enough, else one at which all gradients fit. ``floor``: the smallest scale that
    the scaler takes. ``ops``: how many ops. ``top``: the largest of their values.
    """

    dtype: str = ""
    exclude: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    min_scale: float = 0.0
    floor: float = 1.0
    ops: int = 0
    top: float = 0.0

    def advice(self) -> str:
        """A line for the user; empty if there is nothing to add."""
        lists = [f"exclude={list(self.exclude)}"] * bool(self.exclude)
        lists += [f"black_list={list(self.black_list)}"] * bool(self.black_list)
        if len(self.exclude) + len(self.black_list) > _MANY:
            return (
                f"{self.ops} ops of this batch have values that {self.dtype} cannot hold (up to {self.top:.3g}): "
                "normalize in the model, or use dtype=torch.bfloat16."
            )
        power = f"2.0**{math.log2(self.min_scale):.0f}" if self.min_scale else ""
        scale = f"loss_scaler=DynamicLossScaler(min_scale={power})" if power else ""
        if lists and scale:
            return f"For all overflows of this batch together: {', '.join((*lists, scale))}."
        if scale:
            return (
                f"With a scale of {self.floor:g}, the smallest that this scaler takes, gradients of this batch "
                f"overflow. They fit with {scale}."
            )
        return f"For all overflows of this batch together: {', '.join(lists)}." if self.ops > 1 else ""


def misfits(run: Probe, floor: float) -> Misfits:
    """What a run in fp32 with a scale of 1 tells. ``floor``: the smallest scale that the run can have."""
    if any(s.value and not s.meant for s in run.seen.values()):
        return Misfits()  # not finite in fp32 either: precision is not the cause
    found = {node: size for node, seen in run.seen.items() if (size := _too_large(run, seen))}
    modules = {ir.module_path(node) for node in run.seen}
    exclude: dict[str, None] = {}
    black_list: dict[str, None] = {}
    for node in found:
        place = ir.module_path(node)
        is_leaf = bool(place) and not any(other.startswith(f"{place}.") for other in modules)
        if is_leaf:
            exclude[place] = None
        else:
            black_list[ir.op_name(node)] = None
    low = next((d for node in found if (d := _low(node)) is not None), None) or _any_low(run)
    if low is None:
        return Misfits()
    scale = _scale(run, found, torch.finfo(low).max)
    needed = scale / 4 if scale < floor else 0.0  # with room for the batches to come
    return Misfits(
        dtype_name(low), tuple(exclude), tuple(black_list), needed, floor, len(found), max(found.values(), default=0.0)
    )


def _too_large(run: Probe, seen: Seen) -> float:
    """The largest value that this op reads or gives in low precision, if it is beyond the range; else 0."""
    node, low = seen.node, _low(seen.node)
    if low is None or node.op != "call_function" or ir.is_float_cast(node) or ir.is_higher_order(node):
        return 0.0
    known = ir.decision(node)
    if known is None or known.cls is OpClass.EXACT:
        return 0.0
    around = [s for n in (node, *seen.sources) if (s := run.seen.get(n)) is not None and _is_low(n)]
    size = max((largest(t) for s in around for t in _tensors(s) if not s.meant), default=0.0)
    return size if size > torch.finfo(low).max else 0.0


def _scale(run: Probe, found: dict[fx.Node, float], limit: float) -> float:
    """The largest power of two that keeps the gradients of all low values within ``limit``."""
    top = 0.0
    for node, seen in run.seen.items():
        readers = [s.node for s in run.readers(node)]
        widened = node in found or (ir.is_float_cast(node) and bool(readers) and all(r in found for r in readers))
        if seen.gradient is not None and _is_low(node) and not widened and not kind_of(seen.gradient):
            top = max(top, largest(seen.gradient))
    return 2.0 ** math.floor(math.log2(limit / top)) if top else math.inf


def _any_low(run: Probe) -> torch.dtype | None:
    return next((d for node in run.seen if (d := _low(node)) is not None), None)


def _low(node: fx.Node) -> torch.dtype | None:
    """The low dtype of what an op gives or reads."""
    for value in (ir.tensor_of(n) for n in (node, *node.all_input_nodes)):
        if value is not None and value.dtype in ir.LOW_DTYPES:
            return value.dtype
    return None


def _is_low(node: fx.Node) -> bool:
    value = ir.tensor_of(node)
    return value is not None and value.dtype in ir.LOW_DTYPES


def _tensors(seen: Seen) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(seen.result) if is_float(t)]
