"""What is recorded of a tensor's values: their range, and how many of them a low-precision dtype cannot hold.

``Tally`` sees the tensors of an op one after the other, each in one pass, and keeps none of them. It gives a ``Range``,
a plain value that can be merged with others and written to a file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
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
        exponents: Pairs of an exponent e and how many magnitudes are in [2**e, 2**(e+1)).
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
        least = math.frexp(torch.finfo(dtype).smallest_subnormal)[1] - 1
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
        self.limits, self.scale, self.range = _LIMITS[dtype], scale, Range()

    def see(self, tensor: Tensor, batch: int = 1) -> Range:
        """Add the values of a tensor, which belongs to the batch of that number; return their range alone."""
        seen = range_of(tensor, self.limits, self.scale, batch)
        self.add(seen)
        return seen

    def add(self, seen: Range) -> None:
        """Add values whose range is known."""
        self.range = self.range.merged(seen)


def range_of(tensor: Tensor, limits: _Limits, scale: float, batch: int) -> Range:
    """Return the range of one tensor's values times ``scale``."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.to(torch.float32).reshape(-1)
    if scale != 1.0:
        values = values * scale
    count = values.numel()
    if count == 0:
        return Range()
    bits = values.view(torch.int32) & 0x7FFFFFFF  # ordered as the magnitudes are
    by_exponent = torch.bincount(bits >> 23, minlength=256)
    smallest = int(((bits - 1) & 0x7FFFFFFF).amin()) + 1  # a zero counts as the largest
    largest = int(bits.amax())
    infinite = 0
    if largest >= _INFINITE:
        infinite = int((bits >= _INFINITE).sum())
        by_exponent[255] = 0
        by_exponent[254] -= int((bits == _INFINITE).sum())
        bits = bits.masked_fill(bits >= _INFINITE, 0)
        largest = int(bits.amax())
    zeros = int((bits == 0).sum()) - infinite if int(by_exponent[0]) else 0
    counts = by_exponent.tolist()
    counts[0] -= zeros
    flushed = int((bits <= limits.flushed).sum()) - zeros - infinite if smallest <= limits.flushed else 0
    subnormals = int((bits < limits.normal).sum()) - zeros - infinite - flushed if smallest < limits.normal else 0
    return Range(
        count, _float(largest), _float(smallest) if largest else 0.0,
        int((bits >= limits.overflow).sum()) if largest >= limits.overflow else 0, flushed, subnormals, infinite,
        batch, tuple((place + _ZERO_EXPONENT, number) for place, number in enumerate(counts) if number),
    )  # fmt: skip


def _float(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
