"""``amp::wide_*``: convolution, attention and batched sums of products in fp16 or bf16, computed in fp32 on a CPU.

Each has the arguments and results of the ATen op that it is named after. Low operands are widened, the fp32 kernel
runs, and each result is rounded once to the dtype that the native op would give it. See ``cpu.py`` for when that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

#: ATen op -> its results that are fp32 in the native op too; all other float results take the operands' dtype
OPS: dict[Any, tuple[int, ...]] = {
    aten.convolution.default: (),
    aten.convolution_backward.default: (),
    aten.baddbmm.default: (),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (1,),  # the log of the sums
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (),
}
LOW = (torch.float16, torch.bfloat16)

_LIBRARY = torch.library.Library("amp", "FRAGMENT")


def wide_form(op: Any) -> Any:
    """The wide op for an ATen op, or None."""
    return _WIDE.get(op)


def _define(op: Any, kept: tuple[int, ...]) -> Any:
    name = f"wide_{op._schema.name.removeprefix('aten::').lstrip('_')}"
    schema = str(op._schema)
    _LIBRARY.define(name + schema[schema.index("(") :])
    _LIBRARY.impl(name, _runner(op, kept), "CPU")
    torch.library.register_fake(f"amp::{name}", op, lib=_LIBRARY)
    return getattr(torch.ops.amp, name).default


def _runner(op: Any, kept: tuple[int, ...]) -> Callable[..., Any]:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value

    def run(*args: Any, **kwargs: Any) -> Any:
        low = next(a.dtype for a in args if isinstance(a, Tensor) and a.dtype in LOW)
        result = op(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
        if isinstance(result, Tensor):
            return result.to(low)
        return tuple(
            r.to(low) if isinstance(r, Tensor) and r.is_floating_point() and i not in kept else r
            for i, r in enumerate(result)
        )

    return run


_WIDE = {op: _define(op, kept) for op, kept in OPS.items()}
