"""``all_finite``: check many tensors for inf and NaN on their device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..common.errors import ArgumentError
from ..kernels import all_finite as finite_kernel


def all_finite(tensors: Tensor | Iterable[Tensor | None]) -> Tensor:
    """Check whether every number of every tensor is finite, without a host sync.

    Args:
        tensors: One tensor, or several. None entries are ignored, so ``[p.grad for p in model.parameters()]`` works.

    Returns:
        A bool tensor of no dimensions on the device of the first tensor.

    Examples:
        >>> import torch
        >>> from amp_compiler import all_finite
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
