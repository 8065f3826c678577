"""Parameters that are stored in fp16 or bf16 and trained: an optimizer would lose small updates to rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..common.gradients import LOW
from ..policy import dtype_name
from .state import State


def trained_low_dtype(model: Any) -> torch.dtype | None:
    """Return the dtype of the first trainable parameter in low precision; None if there is none."""
    if not isinstance(model, nn.Module):
        return None
    return next((p.dtype for p in model.parameters() if p.requires_grad and p.dtype in LOW), None)


def warn_if_trained(model: Any, state: State) -> None:
    """Warn, once per compiled model, if a forward in training mode was captured that an optimizer may follow."""
    if "low parameters" in state.warned or not torch.is_grad_enabled() or not getattr(model, "training", False):
        return
    if (low := trained_low_dtype(model)) is not None:
        state.warned.add("low parameters")
        state.leave(
            f"the model's parameters are {dtype_name(low)} and are trained: an optimizer that updates them loses small "
            "updates to rounding. compile_train_step(..., master_weights=True) keeps them; so does a model in fp32 "
            "(model.float()), which is cast where it is used. For inference, call model.eval() or requires_grad_(False)"
        )
