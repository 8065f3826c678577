"""How an fp32 value becomes a low-precision weight without losing, on average or in sum, what does not fit."""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000  # the bits of an fp32 number's exponent


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return fp32 ``values`` in ``dtype``, each rounded to one of its two neighbours, with probabilities by which the
    expectation is the value itself (to within 2**-24 of the neighbours' distance).

    Values that ``dtype`` can represent stay as they are, and so do inf and NaN. Beyond the largest finite number of
    ``dtype`` the nearest is taken, as always.

    >>> round_stochastically(torch.tensor([1.0, float("inf")]), torch.bfloat16, torch.Generator())
    tensor([1., inf], dtype=torch.bfloat16)
    """
    limits = torch.finfo(dtype)
    noise = torch.rand(values.shape, generator=generator, device=values.device)
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)  # the power of two below, 0 if subnormal
    unit = power.clamp_(min=limits.smallest_normal).mul_(limits.eps)  # the distance of the two neighbours, exact
    count = values / unit
    below = count.trunc()
    up = noise < count.sub_(below).abs_()
    rounded = torch.where(up, below + values.sign(), below).mul_(unit)
    return torch.where(values.abs() <= limits.max, rounded, values).to(dtype)


def split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp32 ``values`` rounded to ``dtype``, and in ``dtype`` too what the rounding lost.

    The sum of both rounds to the first again: by that, a remainder is known to belong to its value.

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
