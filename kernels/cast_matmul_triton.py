"""``amp::cast_matmul`` on GPUs, in Triton: operands rounded to fp16 or bf16 as they are loaded, fp32 accumulation.

Imported only when a CUDA (or ROCm) tensor needs it. ``cast_matmul`` is the launcher; ``cast_matmul_configs.py`` has the
tuning configurations of each target, and ``cast_matmul_estimate.py`` picks one.
``python -m amp_compiler.kernels.check`` compiles all of them.

How the work is laid out:

1. One program computes one BLOCK_M × BLOCK_N tile of one matrix of the batch. Programs that run at the same time work
   on GROUP_M neighbouring rows of tiles, so that they share the columns of ``b`` in the L2 cache.
2. Strides are arguments: a transposed operand is read where it is, a broadcast one has batch stride 0.
3. Every load has a mask and returns 0 outside the matrices, whatever is in memory there. 0 · 0 adds nothing; if one
   side were not masked, 0 · inf would give NaN.
4. If the output has too few tiles to fill the GPU and K is long, K is split: each program writes an fp32 partial sum
   to a workspace, and a second small kernel adds them in a fixed order. No atomics: the same inputs give the same bits.
5. Offsets have 32 bits where that is enough (it saves registers) and 64 where a tensor spans 2^31 elements.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .cast_matmul_configs import STEP, TARGETS, Config, ceil_div, piece_length, target_of
from .cast_matmul_estimate import Shape, choose

LOW = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
OPERANDS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def matmul_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    bias,
    out,
    M,
    N,
    K,
    batch,
    piece,  # how much of K each program adds up
    stride_az,
    stride_am,
    stride_ak,
    stride_bz,
    stride_bk,
    stride_bn,
    stride_bias,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K, and so is every piece of it
    WIDE: tl.constexpr,  # 64-bit offsets
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[piece, batch, M, N], contiguous: the sum over one piece of K of round(a) · round(b), plus round(bias)."""
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = program % (tiles_m * tiles_n)
    slab = program // (tiles_m * tiles_n)
    matrix = (slab % batch).to(tl.int64)
    start = (slab // batch) * piece

    # GROUP_M rows of tiles at a time, column by column
    in_group = GROUP_M * tiles_n
    first_m = (tile // in_group) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (tile % in_group) % group_m
    tile_n = (tile % in_group) // group_m

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    in_rows = (rows < M)[:, None]
    in_columns = (columns < N)[None, :]
    if WIDE:
        rows = rows.to(tl.int64)
        columns = columns.to(tl.int64)
        depth = depth.to(tl.int64)

    # One 64-bit base moves along K, and the offsets of the tile stay the same: 64-bit pointers to every element would
    # fill the registers if the elements cannot be loaded several at a time.
    a_at = a + matrix * stride_az + start.to(tl.int64) * stride_ak
    b_at = b + matrix * stride_bz + start.to(tl.int64) * stride_bk
    in_a = rows[:, None] * stride_am + depth[None, :] * stride_ak
    in_b = depth[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    end = tl.minimum(start + piece, K)
    for k in range(start, end, BLOCK_K):
        if EVEN_K:
            left = tl.load(a_at + in_a, mask=in_rows, other=0.0)
            right = tl.load(b_at + in_b, mask=in_columns, other=0.0)
        else:
            left = tl.load(a_at + in_a, mask=in_rows & (depth < end - k)[None, :], other=0.0)
            right = tl.load(b_at + in_b, mask=in_columns & (depth < end - k)[:, None], other=0.0)
        total = tl.dot(left.to(DTYPE), right.to(DTYPE), total)
        a_at += tl.full((), BLOCK_K, tl.int64) * stride_ak
        b_at += tl.full((), BLOCK_K, tl.int64) * stride_bk

    if HAS_BIAS:
        extra = tl.load(bias + columns * stride_bias, mask=columns < N, other=0.0)
        total += extra.to(DTYPE).to(tl.float32)[None, :]
    out_at = out + slab.to(tl.int64) * M * N
    tl.store(out_at + (rows[:, None] * N + columns[None, :]), total.to(out.dtype.element_ty), mask=in_rows & in_columns)


@triton.jit  # type: ignore[untyped-decorator]
def add_pieces_kernel(  # type: ignore[no-untyped-def]
    parts,
    bias,
    out,
    numel,
    N,
    pieces,
    stride_bias,
    DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[numel] = the sum of parts[pieces, numel], first piece first, plus round(bias): one rounding at the end."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    part_at = parts + at
    for _ in range(pieces):
        total += tl.load(part_at, mask=inside, other=0.0)
        part_at += numel
    if HAS_BIAS:
        extra = tl.load(bias + (at % N) * stride_bias, mask=inside, other=0.0)
        total += extra.to(DTYPE).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


ADD_BLOCK = 512


def cast_matmul(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """Return ``a @ b + bias`` with everything rounded to ``dtype``, summed in fp32, and rounded once to ``out_dtype``.

    ``a`` is [M, K] or [B, M, K], ``b`` [K, N] or [B, K, N], in fp32, fp16 or bf16 and with any strides; a batch of
    one is broadcast. ``bias`` is [N] in any float dtype, or None.
    """
    _check(a, b, bias, dtype, out_dtype)
    shape = (*a.shape[:-1], b.shape[-1])
    if a.dim() == 3 and b.dim() == 2 and (a.shape[0] == 1 or a.stride(0) == a.shape[1] * a.stride(1)):
        a = a.flatten(0, 1) if a.numel() else a.reshape(-1, a.shape[-1])  # one tall matrix
    elif b.dim() == 3 and a.dim() == 2:
        shape = (b.shape[0], *shape)
    matrices_a, matrices_b = (x if x.dim() == 3 else x[None] for x in (a, b))
    batch = max(matrices_a.shape[0], matrices_b.shape[0]) if matrices_a.shape[0] and matrices_b.shape[0] else 0
    if a.dim() == 3 and b.dim() == 3:
        shape = (batch, *shape[1:])
    m, k, n = *matrices_a.shape[1:], matrices_b.shape[2]
    out = torch.empty(shape, dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    target = target_of(a.device)
    aligned = _aligned(matrices_a) and _aligned(matrices_b)
    # The estimate has figures for one fp32 operand; a product of two, or of none, is chosen as if the right one were.
    wide = "left" if a.dtype is torch.float32 and b.dtype is not torch.float32 else "right"
    low = "bf16" if dtype is torch.bfloat16 else "fp16"
    config, pieces = choose(Shape(m, n, k, batch, wide, low), target, aligned)
    piece = piece_length(k, pieces)
    split = pieces > 1
    result = torch.empty((pieces, *out.shape), dtype=torch.float32, device=a.device) if split else out
    launch, settings = _launcher(target, config, aligned, a.is_cuda)
    with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
        launch[lambda meta: (pieces * batch * ceil_div(m, meta["BLOCK_M"]) * ceil_div(n, meta["BLOCK_N"]),)](
            matrices_a,
            matrices_b,
            None if split else bias,
            result,
            m,
            n,
            k,
            batch,
            piece,
            *_strides(matrices_a),
            *_strides(matrices_b),
            bias.stride(0) if bias is not None else 0,
            DTYPE=LOW[dtype],
            HAS_BIAS=bias is not None and not split,
            EVEN_K=k % STEP == 0,
            WIDE=any(_spans_far(x) for x in (matrices_a[0], matrices_b[0])) or m * n >= 2**31,
            **settings,
        )
        if split:
            add_pieces_kernel[(ceil_div(out.numel(), ADD_BLOCK),)](
                result,
                bias,
                out,
                out.numel(),
                n,
                pieces,
                bias.stride(0) if bias is not None else 0,
                DTYPE=LOW[dtype],
                HAS_BIAS=bias is not None,
                BLOCK=ADD_BLOCK,
            )
    return out


def _check(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    if dtype not in LOW:
        raise TypeError(f"cast_matmul rounds to float16 or bfloat16, not to {dtype}.")
    if out_dtype not in (dtype, torch.float32):
        raise TypeError(f"cast_matmul returns {dtype} or float32, not {out_dtype}.")
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype not in OPERANDS:
            raise TypeError(f"cast_matmul takes float32, float16 and bfloat16, but {name} is {operand.dtype}.")
        if operand.dim() not in (2, 3):
            raise ValueError(f"cast_matmul takes matrices and batches of them, but {name} is {list(operand.shape)}.")
    batches = [x.shape[0] for x in (a, b) if x.dim() == 3 and x.shape[0] != 1]
    if a.shape[-1] != b.shape[-2] or len(set(batches)) > 1:
        raise ValueError(f"cast_matmul: {list(a.shape)} and {list(b.shape)} cannot be multiplied.")
    if bias is not None and bias.shape != b.shape[-1:]:
        raise ValueError(f"cast_matmul: a bias of {list(bias.shape)} does not fit {b.shape[-1]} columns.")
    if any(x is not None and x.device != a.device for x in (b, bias)):
        raise ValueError("cast_matmul: all tensors have to be on one device.")


def _strides(matrices: Tensor) -> tuple[int, ...]:
    """Return the strides, with 0 for a batch of one, which is broadcast."""
    batch, *rest = matrices.stride()
    return (batch if matrices.shape[0] > 1 else 0, *rest)


def _spans_far(matrix: Tensor) -> bool:
    """True if an offset into the matrix needs more than 32 bits."""
    return sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride(), strict=True)) >= 2**31


def _aligned(matrices: Tensor) -> bool:
    """True if Triton can load several elements at once, for which it requires divisibility by 16."""
    (_, *sizes), strides = matrices.shape, _strides(matrices)
    dense = any(stride == 1 and size % 16 == 0 for size, stride in zip(sizes, strides[1:], strict=True))
    return dense and matrices.data_ptr() % 16 == 0 and all(stride == 1 or stride % 16 == 0 for stride in strides)


def _launcher(target: str, config: Config, aligned: bool, on_gpu: bool) -> tuple[Any, dict[str, int]]:
    if on_gpu and gpu.autotunes():
        return _autotuned(target, aligned), {}
    return matmul_kernel, {**config.meta(), **config.compiler()}


@functools.cache
def _autotuned(target: str, aligned: bool) -> Any:
    kind = TARGETS[target]
    configs = [
        triton.Config(config.meta(), **config.compiler())
        for config in kind.configs
        if aligned or config.takes_unaligned
    ]
    decorate: Callable[..., Any] = triton.autotune(configs, key=["M", "N", "K", "batch", "piece"])
    return decorate(matmul_kernel)
