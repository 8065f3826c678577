"""``all_finite``: one question about many tensors, answered on their device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..common.errors import ArgumentError
from ..kernels import all_finite as finite_kernel


def all_finite(tensors: Tensor | Iterable[Tensor | None]) -> Tensor:
    """A bool tensor: is every number of every tensor finite? No host sync; ``None`` entries are left out.

    >>> import torch
    >>> all_finite([torch.ones(2), torch.tensor([1.0, float("nan")])])
    tensor(False)
    """
    try:
        given = finite_kernel.as_list(tensors)
    except TypeError as error:
        raise ArgumentError(
            f"all_finite: {error} Pass the gradients, as in [p.grad for p in model.parameters()]."
        ) from None
    return finite_kernel.all_finite(given)
