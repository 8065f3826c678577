"""``amp::wide_*``: convolutions and attention in fp16 or bf16, computed in fp32 on a CPU.

Each has the arguments and results of the ATen op that it is named after. Low operands are widened, the fp32 kernel
runs, and each result is rounded once to the dtype that the native op would return. See ``cpu.py`` for when that is
faster. They are written in C++ (``cpp/wide.h``; convolutions as products: ``cpp/convolution.h``; attention:
``cpp/attention.h``) and, for where that is not built, in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_compiler.common.torch_names import schema_of

from . import registry
from .cpu import Work

aten = torch.ops.aten

#: the ops, and what kind of work they do
OPS = {
    aten.convolution.default: Work.CONVOLUTION,
    aten.convolution_backward.default: Work.CONVOLUTION,
    aten.baddbmm.default: Work.PRODUCT,
    aten._scaled_dot_product_flash_attention_for_cpu.default: Work.ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Work.ATTENTION,
}
#: results that the native ops return in fp32
_STAY_WIDE = ("logsumexp",)
LOW = (torch.float16, torch.bfloat16)

_LIBRARY = torch.library.Library("amp", "FRAGMENT")


def _define(op: Any) -> Any:
    name = f"wide_{schema_of(op).name.removeprefix('aten::').lstrip('_')}"
    # torch's stable interface, by which the compiled kernels are registered, has no numbers of any type.
    schema = str(schema_of(op)).replace("Scalar ", "float ")
    _LIBRARY.define(name + schema[schema.index("(") :])
    _IN_PYTHON.append((name, _runner(op)))
    torch.library.register_fake(f"amp::{name}", op, lib=_LIBRARY)
    return getattr(torch.ops.amp, name).default


def _runner(op: Any) -> Callable[..., Any]:
    names = [result.name for result in schema_of(op).returns]

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value

    def run(*args: Any, **kwargs: Any) -> Any:
        low = next(a.dtype for a in args if isinstance(a, Tensor) and a.dtype in LOW)
        result = op(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
        if isinstance(result, Tensor):
            return result.to(low)
        return tuple(
            r.to(low) if isinstance(r, Tensor) and r.is_floating_point() and name not in _STAY_WIDE else r
            for r, name in zip(result, names, strict=True)
        )

    return run


_IN_PYTHON: list[tuple[str, Callable[..., Any]]] = []
#: ATen op -> its wide form
FORMS = {op: _define(op) for op in OPS}
registry.in_python(_IN_PYTHON)
