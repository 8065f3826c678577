"""``amp::cast_matmul``: a matrix product that rounds its operands to low precision as it reads them.

    cast_matmul(Tensor a, Tensor b, Tensor? bias, ScalarType dtype, ScalarType out_dtype, *,
                Tensor? plus=None, Tensor? times=None, bool relu=False) -> Tensor

``a`` is [M, K] or [B, M, K], ``b`` [K, N] or [B, K, N], in any float dtype and with any strides; ``bias`` is [N] or
None. Operands and bias are rounded to ``dtype`` (fp16 or bf16), products are added up in fp32, and the result is
rounded once, to ``out_dtype`` (``dtype`` or fp32). So no cast of an operand is written to memory, and a weight gradient
that is wanted in fp32 is returned in fp32.

A low result may go through what follows it: ``plus`` is added, ``times`` is multiplied with, both in ``dtype`` and with
as many values in the same order, and ``relu`` is applied, each as an op of its own would do it, with its own rounding.

``reference`` defines the meaning. On a CPU, torch's fp32 product runs (see ``cpu.py``), between conversions in C++
(``cpp/cast_matmul.h``, ``cpp/loops.h``) or, where that is not built, in Python; on CUDA and ROCm, a Triton kernel runs
(``cast_matmul_triton.py``, loaded when a tensor there needs it).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import registry
from .gpu import DTYPES, uses_triton

#: a buffer with more bytes than this is not kept for the next call
KEPT = 1 << 26
VIEWS = 256  # the number of shapes to remember
_BUFFERS: weakref.WeakSet[Tensor] = weakref.WeakSet()  # the buffers of all threads


class Scratch(threading.local):
    """Memory for operands while they are fp32, one buffer per use, kept from call to call: new memory costs more than
    the conversion into it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, Sequence[int], bool], Tensor] = {}

    def take(self, use: str, shape: Sequence[int], dtype: torch.dtype, turned: bool = False) -> Tensor:
        """Return a tensor that is valid until the next call with the same ``use``. ``turned``: its last two dimensions
        are swapped in memory."""
        key = (use, dtype, shape, turned)
        found = self.views.get(key)
        return self._make(key) if found is None else found

    def _make(self, key: tuple[str, torch.dtype, Sequence[int], bool]) -> Tensor:
        use, dtype, shape, turned = key
        size = math.prod(shape)
        held = self.buffers.get((use, dtype))
        keep = size * dtype.itemsize <= KEPT
        if held is None or held.numel() < size:
            with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
                held = torch.empty(size, dtype=dtype)
            if keep:
                self.buffers[use, dtype] = held
                _BUFFERS.add(held)
                self.views.clear()  # they refer to the memory that this replaces
        lying = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        view = held[:size].view(lying)
        view = view.transpose(-1, -2) if turned else view
        if keep:
            if len(self.views) >= VIEWS:
                self.views.clear()
            self.views[key] = view
        return view

    def widened(self, use: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values rounded to ``dtype``, as fp32, with the memory layout of ``x``."""
        turned = x.dim() >= 2 and x.stride(-1) != 1 and x.stride(-2) == 1
        low = x if x.dtype is dtype else self.take(use, x.shape, dtype, turned).copy_(x)
        return self.take(use, x.shape, torch.float32, turned).copy_(low)


SCRATCH = Scratch()


def scratch_bytes() -> int:
    """Return the memory that the kernels of this process keep for their next calls: at most ``KEPT`` bytes per operand
    and thread, in C++ and in Python."""
    compiled: int = torch.ops.amp_cpu.scratch_bytes() if registry.loaded() else 0
    return compiled + sum(buffer.nbytes for buffer in list(_BUFFERS))


_LIBRARY = torch.library.Library("amp", "FRAGMENT")
_LIBRARY.define(
    "cast_matmul(Tensor a, Tensor b, Tensor? bias, ScalarType dtype, ScalarType out_dtype, *, Tensor? plus=None,"
    " Tensor? times=None, bool relu=False) -> Tensor"
)


def cast_matmul(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """Return ``a @ b + bias`` with everything rounded to ``dtype``, added up in fp32, in ``out_dtype``.

    >>> cast_matmul(torch.tensor([[1.0, 2.001]]), torch.ones(2, 1), None, torch.bfloat16, torch.float32)
    tensor([[3.]])
    """
    apply: Callable[..., Tensor] = _CastMatmul.apply  # torch 2.13 gives it no type
    return apply(a, b, bias, dtype, out_dtype)


def reference(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """The definition of the op, in fp64: exact products of rounded operands, rounded once."""
    exact = a.to(dtype).double() @ b.to(dtype).double()
    if bias is not None:
        exact = exact + bias.to(dtype).double()
    return exact.to(torch.float32).to(out_dtype)


def _then(result: Tensor, plus: Tensor | None, times: Tensor | None, relu: bool) -> Tensor:
    """Change a result, in its own memory, as the ops that follow a product would."""
    for other in (plus, times):
        if other is not None and (other.dtype is not result.dtype or other.numel() != result.numel()):
            raise RuntimeError(f"cast_matmul adds or multiplies with as many {result.dtype} values as the result has")
    if plus is not None:
        result.add_(plus.reshape(result.shape))
    if times is not None:
        result.mul_(times.reshape(result.shape))
    return result.relu_() if relu else result


def _cpu(
    a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype, *,
    plus: Tensor | None = None, times: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    return _then(_product(a, b, bias, dtype, out_dtype), plus, times, relu)


def _product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    if a.dim() == 3 and b.stride(0) == 0:  # one matrix for the whole batch: torch's `linear` of turned inputs
        return _product(a.flatten(0, 1), b[0], bias, dtype, out_dtype).view(*a.shape[:2], b.shape[-1])
    left, right = SCRATCH.widened("left", a, dtype), SCRATCH.widened("right", b, dtype)
    result = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)
    sums = result if out_dtype is torch.float32 else SCRATCH.take("sums", result.shape, torch.float32)
    if bias is None:
        (torch.bmm if a.dim() == 3 else torch.mm)(left, right, out=sums)
    else:
        add = torch.baddbmm if a.dim() == 3 else torch.addmm
        add(SCRATCH.widened("bias", bias, dtype), left, right, out=sums)
    return result if sums is result else result.copy_(sums)


def _cuda(
    a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype, *,
    plus: Tensor | None = None, times: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    return _then(_cuda_product(a, b, bias, dtype, out_dtype), plus, times, relu)


def _cuda_product(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    if uses_triton(a.device) and all(x is None or x.dtype in DTYPES for x in (a, b, bias)):
        from .cast_matmul_triton import cast_matmul as launch

        return launch(a, b, bias, dtype, out_dtype)
    product = torch.bmm if a.dim() == 3 else torch.mm
    result: Tensor = product(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    if bias is not None:
        result = result + bias.to(dtype)
    return result.to(out_dtype)


def _fake(
    a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype, *,
    plus: Tensor | None = None, times: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    if a.dim() != b.dim() or a.dim() not in (2, 3):
        raise RuntimeError(f"cast_matmul: {a.shape} times {b.shape}")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


class _CastMatmul(torch.autograd.Function):
    """The backward of a low-precision product, which rounds the gradient too. It is not registered with the op, which
    then costs 10 µs per call instead of 250 (torch 2.13); graphs use the op only after differentiation."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.dtype, ctx.bias = dtype, None if bias is None else (bias.shape, bias.dtype)
        result: Tensor = torch.ops.amp.cast_matmul.default(a, b, bias, dtype, out_dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (gradient,), (a, b) = gradients, ctx.saved_tensors
        product = torch.ops.amp.cast_matmul.default
        grads: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            grads[0] = product(gradient, b.transpose(-1, -2), None, ctx.dtype, torch.float32).to(a.dtype)
        if ctx.needs_input_grad[1]:
            grads[1] = product(a.transpose(-1, -2), gradient, None, ctx.dtype, torch.float32).to(b.dtype)
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            grads[2] = gradient.to(ctx.dtype).float().sum_to_size(shape).to(dtype)
        return grads[0], grads[1], grads[2], None, None


registry.in_python([("cast_matmul", _cpu)])
_LIBRARY.impl("cast_matmul", _cuda, "CUDA")
torch.library.register_fake("amp::cast_matmul", _fake, lib=_LIBRARY)
