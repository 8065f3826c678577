"""A loss that is not finite while its gradients are: the update is made, and somebody has to say so.

Nothing is skipped then, because weights are updated from gradients, and those are fine; but a scheduler or a log that
reads the loss sees inf or NaN. The flag stays on the device until the host reads something there anyway.
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
    """Collects, on the device, whether it happened; ``look`` warns, once for each training step that is compiled."""

    def __init__(self, device: torch.device) -> None:
        self._free_to_read = device.type == "cpu"  # the host waits for nothing there
        self._warned = False
        self._not_finite: Tensor | None = None  # a loss of the window that is running
        self._happened: Tensor | None = None  # in a window since the last look

    def see(self, loss_finite: Tensor, *, first: bool) -> None:
        """The loss of one micro-batch; ``first``: of its window."""
        if self._warned:
            return
        bad = loss_finite.logical_not()
        self._not_finite = bad if first or self._not_finite is None else self._not_finite | bad

    def end(self, gradients_finite: Tensor, *, host_has_waited: bool) -> None:
        """The end of a window. ``host_has_waited``: the host has just read a value of the device."""
        if self._warned or self._not_finite is None:
            return
        now = self._not_finite & gradients_finite
        self._happened = now if self._happened is None else self._happened | now
        self._not_finite = None
        if host_has_waited or self._free_to_read:
            self.look()

    def look(self) -> None:
        """Where the host reads from the device anyway: warn if it happened."""
        happened, self._happened = self._happened, None
        if not self._warned and happened is not None and happened.tolist():  # dispatches no op for a CPU tensor
            self._warned = True
            warnings.warn(MESSAGE, AmpWarning, stacklevel=users_frame())
