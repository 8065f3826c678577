"""Parameters that are stored in fp16 or bf16 and trained: an optimizer would lose small updates to rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.gradients import LOW
from ..policy import dtype_name
from .state import State

#: parameters that somebody updates in fp32, so that no update is lost
_SAFE = WeakTensorKeyDictionary()


def updated_in_fp32(parameters: Iterable[Tensor]) -> None:
    """Note that an optimizer updates these in fp32: there is nothing to warn about."""
    for parameter in parameters:
        _SAFE[parameter] = True


def trained_low_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first trainable parameter in low precision; None if there is none."""
    return next((p.dtype for p in model.parameters() if p.requires_grad and p.dtype in LOW), None)


def warn_if_low(model: nn.Module, state: State) -> None:
    """Warn if a model that was called in training mode has low-precision parameters that an optimizer may update."""
    if all(p in _SAFE for p in model.parameters() if p.requires_grad and p.dtype in LOW):
        return
    if (low := trained_low_dtype(model)) is not None:
        state.leave(
            f"the model's parameters are {dtype_name(low)} and are trained: an optimizer that updates them loses small "
            "updates to rounding. compile_train_step(..., master_weights=True) keeps them; so does a model in fp32 "
            "(model.float()), which is cast where it is used. For inference, call model.eval() or requires_grad_(False)"
        )
