"""Which code may take another path in low precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from amp_compiler.capture.dtype_reads import _branches


def compares(x: Tensor) -> Tensor:
    return x.clamp(1) if x.dtype == torch.float16 else x


def compares_a_name(x: Tensor) -> Tensor:
    kind = x.dtype
    y = x.float()
    if y.shape[0] > 2 and kind in (torch.float16,):
        y = y.clamp(1)
    return y


def compares_an_argument(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype is torch.float16 else x + 1


def compares_a_limit(x: Tensor) -> Tensor:
    return x if torch.finfo(x.dtype).max > 1e5 else x + 1


def compares_over_lines(x: Tensor) -> Tensor:
    if (
        x.shape[0] > 2
        and x.element_size()
        == 2
    ):  # fmt: skip
        return x
    return x + 1


def follows(x: Tensor, y: Tensor) -> Tensor:
    z = x.to(y.dtype)
    return z if y.shape[0] > 2 else x


def by_default(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        dtype = x.dtype
    return x.to(dtype)


def of_a_device(x: Tensor) -> Tensor:
    kind = x.device.type if x.device.type != "mps" else "cpu"
    return x.to(x.dtype).to(kind)


def of_integers(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask, 0) if mask.dtype == torch.bool else x


def of_parameters(tensors: Any) -> torch.dtype:
    return next(p.dtype for p in tensors if p.is_floating_point())


def of_classes(x: Any) -> Any:
    return x.dtype if type(x) is Tensor else None


@pytest.mark.parametrize(
    "function", [compares, compares_a_name, compares_an_argument, compares_a_limit, compares_over_lines]
)
def test_code_that_branches(function: Any) -> None:
    assert _branches(function.__code__)


@pytest.mark.parametrize("function", [follows, by_default, of_a_device, of_integers, of_parameters, of_classes])
def test_code_that_only_follows(function: Any) -> None:
    assert not _branches(function.__code__)
