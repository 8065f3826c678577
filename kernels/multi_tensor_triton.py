"""``amp::all_finite`` and ``amp::unscale`` on GPUs, in Triton: many tensors in one launch per dtype, no host sync.

Imported only when a CUDA (or ROCm) tensor needs it. How it works:

1. Tensors of one dtype form a group, and a group is one launch. Tensors that do not start at a multiple of 16 bytes
   form separate groups, so that the others can still use wide loads.
2. Each tensor is cut into chunks of ``CHUNK`` elements and each program handles one chunk: a tensor of 3 elements costs
   one program, an embedding of 23 million takes its share of the GPU.
3. A table tells each program its tensor, and for each tensor its address and length. The tables of all groups are
   copied to the device at once from page-locked memory, which the host does not wait for.
4. The flag is set by a plain store of 1.0, without atomics: it starts at 0.0 (or at the caller's value), and no program
   ever writes anything else, so the order and the number of writes do not matter. Only a program that saw a non-finite
   number writes at all. Nothing reads the flag before the launch ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

SUPPORTED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
CHUNK = 32768  # elements per program: over 3000 programs for BERT-base, enough for any GPU, and a table of 30 KB
BLOCK = 2048  # elements at a time: 8 per thread, two loads of 16 bytes in fp32 and one in fp16
WARPS = 8
ALIGNMENT = 16  # bytes of the widest load

_CAPTURED: list[Tensor] = []  # tables that a CUDA graph copies again at each replay


@triton.jit  # type: ignore[untyped-decorator]
def unscale_kernel(  # type: ignore[no-untyped-def]
    table,  # per tensor: from where, to where, how many elements, its first chunk
    owners,  # per chunk: its tensor
    inv_scale,
    found,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    UNSCALE: tl.constexpr,  # False: only check
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * 4
    source = tl.load(row).to(tl.pointer_type(FROM))
    target = tl.load(row + 1).to(tl.pointer_type(TO))
    start = (program - tl.load(row + 3)) * CHUNK
    count = tl.minimum(tl.load(row + 2) - start, CHUNK)
    source += start
    target += start
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    lanes = tl.arange(0, BLOCK)
    factor = 1.0
    if UNSCALE:
        factor = tl.load(inv_scale).to(tl.float32)

    # whole blocks first, without a mask, which would prevent wide loads; then the rest
    finite = tl.full((BLOCK,), 1, tl.int1)
    whole = (count // BLOCK).to(tl.int32) * BLOCK
    for at in range(0, whole, BLOCK):
        numbers = tl.load(source + at + lanes).to(tl.float32)
        finite = finite & (tl.abs(numbers) < float("inf"))  # false for NaN, too
        if UNSCALE:
            tl.store(target + at + lanes, (numbers * factor).to(TO))
    rest = whole + lanes < count
    numbers = tl.load(source + whole + lanes, mask=rest, other=0.0).to(tl.float32)
    finite = finite & (tl.abs(numbers) < float("inf"))
    if UNSCALE:
        tl.store(target + whole + lanes, (numbers * factor).to(TO), mask=rest)
    # each lane writes by itself, without a reduction or a barrier; usually no lane writes
    tl.store(found + lanes * 0, tl.full((BLOCK,), 1.0, tl.float32), mask=finite == 0)


def non_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if a number in one of the tensors is not finite, else 0.0, as fp32 without dimensions on their device.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    _check(tensors, device)
    found = torch.zeros((), dtype=torch.float32, device=device)
    _launch([(tensor, None) for tensor in (_dense(tensor) for tensor in tensors)], None, found)
    return found


def unscale(grads: Sequence[Tensor], inv_scale: Tensor, found: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the gradients times ``inv_scale`` as new fp32 tensors, and the flag: 1.0 if ``found`` is 1.0 or a gradient
    isn't finite.

    The new tensors have the strides of ``torch.empty_like``; gradients with gaps or overlaps are copied first.
    """
    _check(grads, found.device, inv_scale, found)
    found = found.clone()
    pairs = []
    for grad in grads:
        grad = _dense(grad)
        pairs.append((grad, torch.empty_like(grad, dtype=torch.float32)))
    _launch(pairs, inv_scale, found)
    return [target for _, target in pairs], found


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found: Tensor) -> None:
    """Multiply the gradients by ``inv_scale`` in place, in their dtypes; set ``found`` to 1.0 if one was not finite.

    Each gradient may be in the list only once, because chunks run in any order. One with gaps between its elements is
    unscaled in a copy and written back.
    """
    _check(grads, found.device, inv_scale, found)
    dense = [_dense(grad) for grad in grads]
    _launch([(values, values) for values in dense], inv_scale, found)
    for grad, values in zip(grads, dense, strict=True):
        if values is not grad:
            grad.copy_(values)
        elif not grad.is_inference():
            torch.autograd.graph.increment_version(grad)


def _check(tensors: Sequence[Tensor], device: torch.device, *scalars: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in SUPPORTED or tensor.layout is not torch.strided:
            raise TypeError(f"expected dense float32, float16 or bfloat16, not {tensor.dtype} ({tensor.layout}).")
    for scalar in scalars:
        if scalar.numel() != 1 or scalar.dtype is not torch.float32:
            raise TypeError(f"expected one float32 number, not {list(scalar.shape)} of {scalar.dtype}.")
    for tensor in (*tensors, *scalars):
        if tensor.device != device:
            raise ValueError(f"all tensors have to be on one device, not on {tensor.device} and {device}.")


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its elements fill a block of memory, in any order; otherwise a copy that does."""
    if tensor.is_contiguous():
        return tensor
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty_like(tensor).copy_(tensor)
        expected *= size
    return tensor


@dataclass
class _Group:
    """The tensors of one launch."""

    source: torch.dtype
    target: torch.dtype
    aligned: bool
    rows: list[int] = field(default_factory=list)  # four numbers per tensor
    chunks: list[int] = field(default_factory=list)  # the number of chunks of each tensor
    first: int = 0  # the first chunk of the next tensor

    def add(self, source: Tensor, target: Tensor) -> None:
        self.rows += (source.data_ptr(), target.data_ptr(), source.numel(), self.first)
        self.chunks.append(-(-source.numel() // CHUNK))
        self.first += self.chunks[-1]

    def owners(self) -> Tensor:
        return torch.repeat_interleave(torch.tensor(self.chunks, dtype=torch.int64, device="cpu"))


def _launch(pairs: Sequence[tuple[Tensor, Tensor | None]], inv_scale: Tensor | None, found: Tensor) -> None:
    groups: dict[tuple[torch.dtype, torch.dtype, bool], _Group] = {}
    for source, target in pairs:
        if not source.numel():
            continue
        written = source if target is None else target
        aligned = source.data_ptr() % ALIGNMENT == 0 and written.data_ptr() % ALIGNMENT == 0
        key = (source.dtype, written.dtype, aligned)
        groups.setdefault(key, _Group(*key)).add(source, written)
    if not groups:
        return
    pieces = []
    for group in groups.values():
        pieces += [torch.tensor(group.rows, dtype=torch.int64, device="cpu"), group.owners()]
    on_device = _to_device(torch.cat(pieces), found.device).split([len(piece) for piece in pieces])
    with torch.cuda.device(found.device) if found.is_cuda else contextlib.nullcontext():
        for at, group in enumerate(groups.values()):
            unscale_kernel[(group.first,)](
                on_device[2 * at],
                on_device[2 * at + 1],
                inv_scale,
                found,
                FROM=SUPPORTED[group.source],
                TO=SUPPORTED[group.target],
                UNSCALE=inv_scale is not None,
                ALIGNED=group.aligned,
                CHUNK=CHUNK,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )


def _to_device(table: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return table
    table = table.pin_memory()  # torch keeps it until the copy is done
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(table)  # a few KB per capture, never freed: there is no notice when a graph is freed
    return table.to(device, non_blocking=True)
