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

from ..ir.low_values import is_followed
from . import followed

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


def all_followed(gm: fx.GraphModule, lowered: fx.GraphModule) -> bool:
    """True if every dtype that the code behind a Dynamo graph asked for was followed to the calls that name it
    (``followed.py``), and into the lowered graph. The graph then needs no twin."""
    reading = followed.current()
    if reading is None or not reading.is_whole or reading.named or not is_followed(lowered):
        return False
    traced = torch._guards.TracingContext.get_traced_code() or ()
    python = [node.target.__code__ for node in gm.graph.nodes if hasattr(node.target, "__code__")]
    return not any(_asks(code) for code in python) and not any(
        _asks_otherwise(code) for code in traced if not code.co_filename.startswith(_NOT_THE_MODEL)
    )


#: the names of ``DTYPE_NAMES`` that ``followed.py`` sees, that the graph shows, or that all precisions have in common
_SEEN = frozenset({"dtype", "finfo", "type_as", "is_floating_point"})


@functools.lru_cache(maxsize=4096)
def _asks_otherwise(code: CodeType) -> bool:
    """True if a function may learn the dtype of a tensor in a way that is not followed."""
    unseen = DTYPE_NAMES - _SEEN
    if not unseen & {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}:
        return False
    steps = list(dis.get_instructions(code))
    for before, step in zip([None, *steps], steps, strict=False):
        named = isinstance(step.argval, str) and step.argval in unseen
        a_class, of_device = step.opname == "LOAD_GLOBAL", before is not None and before.argval == "device"
        if named and not (step.argval == "type" and (a_class or of_device)):
            return True
    return False


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
