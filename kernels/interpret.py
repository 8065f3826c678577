"""Run Triton kernels on CPU tensors in Triton's interpreter, to test their results without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def interpreted(module: ModuleType) -> Iterator[None]:
    """Run the kernels of a module in Triton's interpreter, on CPU tensors, until the end of the block.

    It does what TRITON_INTERPRET=1 does, but for one module and not for the whole process. It also fixes the bf16 of
    the interpreter of Triton 3.7 to 3.9, as numpy has no bf16: that truncates fp32 instead of rounding it, takes the
    bits of fp16 for bf16 (and the reverse), and multiplies the bits of bf16 as integers.
    """
    floats = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
    builder: Any = interpreter.InterpreterBuilder
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    before = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp", "create_dot")}

    def cast(self: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        if tl.bfloat16 not in kinds or not all(kind in floats for kind in kinds):
            return before["cast_impl"](self, source, to)
        data = torch.from_numpy(numpy.ascontiguousarray(source.data))
        values = data.view(torch.bfloat16) if kinds[0] == tl.bfloat16 else data
        result = values.to(floats[kinds[1]])
        return interpreter.TensorHandle(
            (result.view(torch.uint16) if kinds[1] == tl.bfloat16 else result).numpy(), kinds[1]
        )

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return before["create_dot"](self, a, b, *rest)

    try:
        builder.cast_impl, builder.create_dot = cast, dot
        builder.create_fp_to_fp = lambda self, source, to, rounding: cast(self, source, to)
        for name, kernel in kernels.items():
            setattr(module, name, interpreter.InterpretedFunction(kernel.fn))
        yield
    finally:
        for name, value in before.items():
            setattr(builder, name, value)
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
