"""What is recorded of a tensor's values: their range, and how many of them a low-precision dtype cannot hold.

``Tally`` sees the tensors of an op one after the other, each in one pass, and keeps none of them. It gives a ``Range``,
a plain value that can be merged with others and written to a file.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_INFINITE = 0x7F7FFFFF  # the largest finite fp32 number; masks use it as infinity
_ZERO_EXPONENT = -127  # of the fp32 numbers below 2**-126, as their bits have it


class _Limits(NamedTuple):
    """Bits of fp32 magnitudes: the smallest that is rounded to inf, the largest that is rounded to zero, and the
    smallest that is rounded to a normal number."""

    overflow: int
    flushed: int
    normal: int


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


#: halves between two neighbours are rounded to the even one, which is inf, zero and the smallest normal number here
_LIMITS = {
    torch.float16: _Limits(_bits(65520.0), _bits(2.0**-25), _bits(2.0**-14 - 2.0**-25)),
    torch.bfloat16: _Limits(0x7F7F8000, 0x8000, 0x7F8000),
}


@dataclass(frozen=True, slots=True)
class Range:
    """The values of one op's result, operand or gradient, over all batches.

    Infinite values, and masks that stand for them (the largest fp32 number), are counted in ``infinite`` and nowhere
    else.

    Attributes:
        elements: How many values there were.
        max_abs: The largest magnitude.
        min_nonzero: The smallest magnitude other than zero; 0 if there is none.
        overflows: How many values are rounded to infinity in the low-precision dtype.
        flushed: How many non-zero values are rounded to zero.
        subnormals: How many values become subnormal numbers, which have fewer bits.
        infinite: How many values are not finite, or stand for infinity.
        batch: The batch, counted from 1, in which ``max_abs`` was reached; 0 if there was none.
        exponents: Pairs of an exponent e and how many magnitudes are in [2**e, 2**(e+1)); of large tensors, estimated
            from an even sample of their elements.
    """

    elements: int = 0
    max_abs: float = 0.0
    min_nonzero: float = 0.0
    overflows: int = 0
    flushed: int = 0
    subnormals: int = 0
    infinite: int = 0
    batch: int = 0
    exponents: tuple[tuple[int, int], ...] = ()

    @property
    def overflow(self) -> float:
        """The share of the values that overflow, from 0 to 1."""
        return self.overflows / self.elements if self.elements else 0.0

    @property
    def underflow(self) -> float:
        """The share of the values that are flushed to zero, from 0 to 1."""
        return self.flushed / self.elements if self.elements else 0.0

    @property
    def subnormal(self) -> float:
        """The share of the values that become subnormal, from 0 to 1."""
        return self.subnormals / self.elements if self.elements else 0.0

    @property
    def nonzero(self) -> int:
        """How many values are neither zero nor infinite."""
        return sum(count for _, count in self.exponents)

    def merged(self, other: Range) -> Range:
        """Return the range of the values of both."""
        first = self if self.max_abs >= other.max_abs and self.batch else other
        small = [r.min_nonzero for r in (self, other) if r.min_nonzero]
        exponents = Counter(dict(self.exponents)) + Counter(dict(other.exponents))
        return Range(
            self.elements + other.elements, first.max_abs, min(small, default=0.0), self.overflows + other.overflows,
            self.flushed + other.flushed, self.subnormals + other.subnormals, self.infinite + other.infinite,
            first.batch, tuple(sorted(exponents.items())),
        )  # fmt: skip

    def times(self, scale: float, dtype: torch.dtype) -> Range:
        """Return the range of the values times a power of two, as their exponents tell it: the counts of a value that
        is within a factor of two of a limit may be off."""
        shift = round(math.log2(scale))
        largest = math.frexp(torch.finfo(dtype).max)[1] - 1
        normal = math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1
        least = math.frexp(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)[1] - 1
        moved = tuple((exponent + shift, count) for exponent, count in self.exponents)
        return Range(
            self.elements, self.max_abs * scale, self.min_nonzero * scale,
            sum(c for e, c in moved if e > largest), sum(c for e, c in moved if e < least - 1),
            sum(c for e, c in moved if least - 1 <= e < normal), self.infinite, self.batch, moved,
        )  # fmt: skip


def merge(ranges: Iterable[Range]) -> Range:
    """Return the range of the values of all of them."""
    total = Range()
    for one in ranges:
        total = total.merged(one)
    return total


class Tally:
    """Adds up what ``Range`` says over any number of tensors. ``scale``: a factor for all values, as of a loss."""

    def __init__(self, dtype: torch.dtype, scale: float = 1.0) -> None:
        self.dtype, self.scale, self.range = dtype, scale, Range()

    def see(self, tensor: Tensor, batch: int = 1) -> Range:
        """Add the values of a tensor, which belongs to the batch of that number; return their range alone."""
        seen = range_of(tensor, self.dtype, self.scale, batch)
        self.add(seen)
        return seen

    def add(self, seen: Range) -> None:
        """Add values whose range is known."""
        self.range = self.range.merged(seen)


#: elements that are looked at together: few enough to stay in the cache
_CHUNK = 1 << 16


class _Scratch(threading.local):
    """Memory that a thread uses again: to allocate as much as a tensor has for each pass takes longer than the pass."""

    def __init__(self) -> None:
        self.magnitudes = torch.empty(_CHUNK)
        self.bits = torch.empty(_CHUNK, dtype=torch.int32)


_SCRATCH = _Scratch()


def range_of(tensor: Tensor, dtype: torch.dtype, scale: float = 1.0, batch: int = 1) -> Range:
    """Return the range of one tensor's values times ``scale``. Nothing of the tensor's size is allocated if it is dense
    and in fp32."""
    values, times = _flat(tensor)
    if values.numel() == 0:
        return Range()
    limits, step = _LIMITS[dtype], sample_step(values.numel())
    counts = [0] * 256
    largest, smallest, infinite, overflows, flushed, subnormals = 0, _INFINITE, 0, 0, 0, 0
    for start in range(0, values.numel(), _CHUNK):
        chunk = values[start : start + _CHUNK]
        magnitudes = torch.mul(chunk, scale, out=_scratch(_SCRATCH.magnitudes, chunk)).abs_()
        bits, other = magnitudes.view(torch.int32), _scratch(_SCRATCH.bits, chunk)  # ordered as the magnitudes are
        most = int(bits.amax())
        lost = 0
        if most >= _INFINITE:
            lost = _count(bits >= _INFINITE)
            bits.masked_fill_(bits >= _INFINITE, 0)
            most = int(bits.amax())
        least = int(torch.sub(bits, 1, out=other).bitwise_and_(0x7FFFFFFF).amin()) + 1  # a zero counts as the largest
        if least < limits.normal:
            small = other[torch.lt(other, limits.normal - 1)]  # without zeros; less one each
            tiny = _count(small < limits.flushed)
            flushed, subnormals = flushed + tiny, subnormals + small.numel() - tiny
        if most >= limits.overflow:
            overflows += _count(bits >= limits.overflow)
        largest, smallest, infinite = max(largest, most), min(smallest, least), infinite + lost
        sample = bits[-start % step :: step]
        found = torch.bincount(sample >> 23, minlength=256).tolist()
        if found[0]:
            found[0] -= _count(sample == 0)
        counts = [a + b for a, b in zip(counts, found, strict=True)]
    exponents = tuple((place + _ZERO_EXPONENT, n * step * times) for place, n in enumerate(counts) if n)
    return Range(
        values.numel() * times, _float(largest), _float(smallest) if largest else 0.0, overflows * times,
        flushed * times, subnormals * times, infinite * times, batch, exponents,
    )  # fmt: skip


def sample_step(elements: int) -> int:
    """Return n such that every n-th element is a sample of at least 2**15 elements; it is odd, as sizes rarely are."""
    return max(elements >> 16, 1) | 1


def sample_of(tensor: Tensor) -> Tensor:
    """Return an even sample of at least 2**13 elements, for shares that need not be exact; all of them if they are
    fewer, or sparse."""
    if tensor.layout is not torch.strided:
        return tensor
    values = flattened(tensor.detach())[0]
    return values[:: max(values.numel() >> 14, 1) | 1]


def flattened(tensor: Tensor, order: Sequence[int] | None = None) -> tuple[Tensor, list[int]]:
    """Return the elements in the order of memory, without a copy where that is possible, and the order of the
    dimensions by which another tensor of the shape is flattened in the same way."""
    strides: Sequence[int] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: -strides[d]) if order is None else list(order)
    return tensor.permute(order).reshape(-1), order


def _flat(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the elements as fp32, and how often each of them is in the tensor."""
    values, times = tensor.detach(), 1
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.resolve_neg()
    for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded, as the gradient of a sum
            values, times = values.narrow(dim, 0, 1), times * size
    return flattened(values)[0].to(torch.float32), times


def _scratch(memory: Tensor, chunk: Tensor) -> Tensor:
    if chunk.device != memory.device:
        return torch.empty_like(chunk, dtype=memory.dtype)
    return memory[: chunk.numel()]


def _count(which: Tensor) -> int:
    return int(torch.count_nonzero(which))


def _float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
