"""The gradient of a low-precision parameter, which may be wider than the parameter."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = frozenset({torch.float16, torch.bfloat16})


def set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Assign ``.grad``, also one of another dtype than the parameter's, which torch refuses unless it is told.

    >>> weight = torch.zeros(2, dtype=torch.bfloat16)
    >>> set_gradient(weight, torch.ones(2))
    >>> weight.grad
    tensor([1., 1.])
    """
    if parameter.dtype in LOW and parameter.grad_dtype is not gradient.dtype:
        parameter.grad = None
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient


def allow_gradients(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let the parameter have gradients of ``dtype``; autograd then casts them and adds them up in it. One that it has
    already is cast."""
    if parameter.grad_dtype is not dtype:
        held, parameter.grad = parameter.grad, None
        parameter.grad_dtype = dtype
        if held is not None:
            parameter.grad = held.to(dtype)
