"""Find out whether code asks a tensor for its dtype: only then can its trace in low precision differ (``twin.py``)."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

#: names in a function's code by which it can learn the dtype of a tensor
DTYPE_NAMES = frozenset({
    "dtype", "finfo", "type_as", "type", "element_size", "itemsize", "nbytes", "result_type", "promote_types",
    "can_cast", "is_floating_point",
})  # fmt: skip


def may_depend_on_dtype(gm: fx.GraphModule) -> bool:
    """True if the code behind a Dynamo graph may have asked a tensor for its dtype. If not, the graph needs no twin:
    every cast in it names its dtype."""
    codes: list[CodeType] = list(torch._guards.TracingContext.get_traced_code() or ())
    for _, inner in _with_bodies(gm):
        for node in inner.graph.nodes:
            if node.op == "call_function" and isinstance(code := getattr(node.target, "__code__", None), CodeType):
                codes.append(code)  # Python that runs when the graph is lowered
            elif node.op == "call_method" and node.target == "to" and len(node.all_input_nodes) > 1:
                return True
    return any(_asks(code) for code in codes if not code.co_filename.startswith(_NOT_THE_MODEL))


#: what moves DTensors asks for dtypes to describe them; calls of modules with hooks ask results for their types
_NOT_THE_MODEL = tuple(
    os.path.join(os.path.dirname(torch.__file__), *parts)
    for parts in (("distributed",), ("nn", "modules", "module.py"))
)


def _asks(code: CodeType) -> bool:
    names = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
    return bool(names & DTYPE_NAMES)


def may_branch_on_dtype() -> bool:
    """True if the code that Dynamo has traced may take another path in low precision. Its second trace then depends on
    more than its ops show: ``if self.training and x.dtype == torch.float16: x = x.clamp(...)``."""
    codes = torch._guards.TracingContext.get_traced_code() or ()
    return any(_branches(code) for code in codes if not code.co_filename.startswith(_NOT_THE_MODEL))


#: these are the same in every floating-point dtype
_SAME_FOR_FLOATS = frozenset({"is_floating_point"})
_NOT_FLOATS = frozenset({"bool", "uint8", "int8", "int16", "short", "int32", "int", "int64", "long"})
_JUMPS = ("POP_JUMP", "JUMP_IF")
_COMPARES = ("COMPARE_OP", "IS_OP", "CONTAINS_OP")


@functools.lru_cache(maxsize=4096)
def _branches(code: CodeType) -> bool:
    """True if a function compares something that it has from a dtype, or jumps by it. Comparing with None, with the
    dtype of integers or with that of a device does not count."""
    if not _asks(code) and not any("dtype" in name for name in (*code.co_varnames, *code.co_freevars)):
        return False
    steps = list(dis.get_instructions(code))
    pairs = list(zip([None, *steps], steps, strict=False))
    held = {name for name in (*code.co_varnames, *code.co_freevars) if "dtype" in name}
    reads: set[tuple[int, int]] = set()  # line and column
    for _ in range(2):  # once more for names that are read before the line that sets them, in a loop
        for before, step in pairs:
            start, _end = _span(step)
            is_dtype = before is not None and before.opname.startswith("LOAD") and _span(before)[0] in reads
            of_device = before is not None and before.argval == "device"
            is_named = step.opname.startswith("LOAD") and isinstance(step.argval, str) and not of_device
            named = DTYPE_NAMES - _SAME_FOR_FLOATS - ({"type"} if step.opname == "LOAD_GLOBAL" else set())
            if is_named and (step.argval in held or step.argval in named):
                reads.add(start)
            elif step.opname.startswith("STORE") and is_dtype:
                held.add(str(step.argval))
    for before, step in pairs:
        compares = step.opname in _COMPARES
        if before is None or not (compares or step.opname.startswith(_JUMPS)) or "NONE" in step.opname:
            continue
        if before.argval in _NOT_FLOATS or before.opname in _COMPARES:
            continue  # the comparison itself was looked at
        start, end = _span(step if compares else before)  # what a jump of a comprehension tests has a span of its own
        if any(start <= read <= end for read in reads):
            return True
    return False


def _span(step: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the expression of an instruction starts and ends; everywhere if Python doesn't know."""
    at = step.positions
    if at is None or at.lineno is None or at.end_lineno is None or at.col_offset is None or at.end_col_offset is None:
        return (0, 0), (sys.maxsize, 0)
    return (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)


def _with_bodies(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    return ((name, m) for name, m in gm.named_modules() if isinstance(m, fx.GraphModule))


class DtypeReads(TorchFunctionMode):
    """Records whether code that runs inside asks a tensor for its dtype, or converts one. If it does neither, its trace
    in low precision would be the same graph. What torch's own tracing asks does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found:
            asks = getattr(func, "__self__", None) is torch.Tensor.dtype or getattr(func, "__name__", "") in _CONVERTS
            if getattr(func, "__module__", "") == "torch.nn.functional":  # Python that runs outside of this mode
                asks |= isinstance(code := getattr(func, "__code__", None), CodeType) and _asks(code)
            self.found = asks and _asked_by_model(sys._getframe(1))
        return func(*args, **(kwargs or {}))


#: functions of tensors that convert, or whose result reveals a dtype
_CONVERTS = DTYPE_NAMES | {"to", "float", "half", "bfloat16", "double", "tensor", "as_tensor", "scalar_tensor", "full"}
_TRACING = tuple(
    os.path.join(os.path.dirname(torch.__file__), *parts) for parts in (
        ("_export",), ("fx",), ("_subclasses",), ("_dynamo",), ("utils",), ("_compile.py",), ("_ops.py",),
        ("overrides.py",), ("_library",), ("_prims_common",), ("_tensor.py",),
    )
)  # fmt: skip
_MACHINERY = tuple(os.path.join(os.path.dirname(torch.__file__), part) for part in ("export", "_functorch", "_guards"))


def _asked_by_model(frame: FrameType | None) -> bool:
    """True if the first frame outside of tracing modes belongs to a model (or to ``torch.nn``), not to export."""
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TRACING)):
        frame = frame.f_back
    return frame is None or not frame.f_code.co_filename.startswith(_MACHINERY)
