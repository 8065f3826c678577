"""Warn about a loss that is not finite although its gradients are.

Such an update isn't skipped, because weights are updated from gradients, and those are fine; but a scheduler or a log
that reads the loss sees inf or NaN. The flag stays on the device until the host reads from the device anyway.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..common.errors import AmpWarning
from ..common.messages import users_frame

MESSAGE = (
    "The loss of a training step was not finite while all its gradients were, so the weights were updated. Call "
    "step.explain_overflow() right after such a step: it names the op. A scheduler or a stopping rule that reads "
    "the loss should look at result.loss_finite first."
)


class LossWatch:
    """Records on the device whether it happened; ``look`` warns, once per compiled training step."""

    def __init__(self, device: torch.device) -> None:
        self._free_to_read = device.type == "cpu"  # reading makes the host wait for nothing
        self._warned = False
        self._not_finite: Tensor | None = None  # some loss of the current window was not
        self._happened: Tensor | None = None  # in some window since the last look

    def see(self, loss_finite: Tensor | bool, *, first: bool) -> None:
        """Record whether the loss of one micro-batch was finite, as a number if the host knows it; ``first``: it is the
        first of its window."""
        if self._warned:
            return
        if self._free_to_read and (loss_finite.tolist() if isinstance(loss_finite, Tensor) else loss_finite):
            self._not_finite = None if first else self._not_finite
            return
        bad = torch.as_tensor(loss_finite).logical_not()
        self._not_finite = bad if first or self._not_finite is None else self._not_finite | bad

    @property
    def asks(self) -> bool:
        """False if ``end`` would do nothing."""
        return self._not_finite is not None and not self._warned

    def end(self, gradients_finite: Tensor, *, host_has_waited: bool) -> None:
        """End a window. ``host_has_waited``: the host has just read a value from the device."""
        if self._warned or self._not_finite is None:
            return
        now = self._not_finite & gradients_finite
        self._happened = now if self._happened is None else self._happened | now
        self._not_finite = None
        if host_has_waited or self._free_to_read:
            self.look()

    def look(self) -> None:
        """Warn if it happened. Call this where the host reads from the device anyway."""
        happened, self._happened = self._happened, None
        if not self._warned and happened is not None and happened.tolist():  # dispatches no op for a CPU tensor
            self._warned = True
            warnings.warn(MESSAGE, AmpWarning, stacklevel=users_frame())
