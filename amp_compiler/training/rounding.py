"""How an fp32 value becomes a low-precision weight without losing, on average or in sum, what does not fit."""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000  # the bits of an fp32 number's exponent
_LARGEST_POWER = 2.0**127


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return fp32 ``values`` in ``dtype``, each rounded to one of its two neighbours, with probabilities by which the
    expectation is the value itself (to within 2**-24 of the neighbours' distance).

    Values that ``dtype`` can represent stay as they are, and so do inf and NaN. The neighbour above the largest finite
    number is inf.

    >>> round_stochastically(torch.tensor([1.0, float("inf")]), torch.bfloat16, torch.Generator())
    tensor([1., inf], dtype=torch.bfloat16)
    """
    limits = torch.finfo(dtype)
    noise = torch.rand(values.shape, generator=generator, device=values.device)
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)  # the power of two below; inf for inf and NaN
    unit = power.clamp_(limits.smallest_normal, _LARGEST_POWER).mul_(limits.eps)  # the neighbours' distance, exact
    count = values.abs().div_(unit)
    below = count.floor()
    up = noise < count.sub_(below)  # False if the difference is NaN
    return below.add_(up.to(torch.float32)).mul_(unit).copysign_(values).to(dtype)


def split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp32 ``values`` rounded to ``dtype``, and in ``dtype`` too what the rounding lost.

    The sum of both rounds to the first again: by that, a remainder is known to belong to its value. It is also an fp32
    number, so that a value that did not change is split into the same two again.

    >>> split(torch.tensor([1.001]), torch.bfloat16)
    (tensor([1.], dtype=torch.bfloat16), tensor([0.0010], dtype=torch.bfloat16))
    """
    rounded = values.to(dtype)
    rest = (values - rounded.float()).to(dtype)
    # a remainder that was rounded up to half of the distance is a tie, which may round to the other neighbour
    rest = torch.where(belongs(rounded, rest), rest, rest * (1 - torch.finfo(dtype).eps))
    return rounded, torch.where(belongs(rounded, rest), rest, 0.0)  # 0 also beside inf, NaN and subnormal ties


def belongs(rounded: Tensor, rest: Tensor) -> Tensor:
    """True where ``rest`` can be what was lost when a value was rounded to ``rounded``."""
    return (rounded.float() + rest.float()).to(rounded.dtype) == rounded
