"""Loss scalers: multiply the loss, divide the gradients, skip a step if one is not finite, adapt the scale.

They replace ``torch.amp.GradScaler``, with the same methods, and add a floor and a cap for the scale, patience, and a
diagnosis when many updates in a row are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..common.errors import ArgumentError
from ..common.torch_names import amp_update_scale_
from . import scaler_checks as checks
from .scaler_base import REMEDY, LossScaler


class StaticLossScaler(LossScaler):
    """A loss scale that never changes. Steps with non-finite gradients are skipped all the same.

    It has the methods of ``torch.amp.GradScaler`` and is one to ``isinstance``.

    Args:
        scale: What losses are multiplied by.
        device: Where the scale is kept. By default on the device of the first loss.
        enabled: If False, losses and gradients are left as they are, and ``step`` calls ``optimizer.step``.

    Examples:
        >>> import torch
        >>> from amp_compiler import StaticLossScaler
        >>> scaler = StaticLossScaler(128.0)
        >>> scaler.scale(torch.tensor(2.0))
        tensor(256.)
    """

    def __init__(self, scale: float, *, device: torch.device | str | None = None, enabled: bool = True) -> None:
        super().__init__(checks.scale_of(scale, "scale"), device, enabled)

    def __repr__(self) -> str:
        return f"StaticLossScaler({self._numbers.read('scale'):g})"


class DynamicLossScaler(LossScaler):
    """A loss scale that grows while gradients are finite and falls when they are not.

    It has the methods of ``torch.amp.GradScaler`` and is one to ``isinstance``; each can load the other's
    ``state_dict``. The scale stays between ``min_scale`` and ``max_scale`` and is never inf, NaN or 0.

    Args:
        init_scale: The scale at the beginning.
        growth_factor: What the scale is multiplied by after ``growth_interval`` finite updates in a row.
        backoff_factor: What the scale is multiplied by after ``overflow_patience`` updates in a row with non-finite
            gradients.
        growth_interval: The number of finite updates in a row after which the scale grows.
        overflow_patience: The number of non-finite updates in a row after which the scale falls. Each of them is
            skipped.
        min_scale: The smallest scale.
        max_scale: The largest scale. None stands for the largest finite fp32 number.
        device: Where the scale is kept. By default on the device of the first loss.
        enabled: If False, losses and gradients are left as they are, and ``step`` calls ``optimizer.step``.

    Examples:
        >>> import torch
        >>> from amp_compiler import DynamicLossScaler
        >>> scaler = DynamicLossScaler(init_scale=4.0, growth_interval=1)
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler.scale(weight.sum()).backward()
        >>> weight.grad
        tensor([4.])
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> weight.item(), scaler.get_scale()
        (0.5, 8.0)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        overflow_patience: int = 1,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        device: torch.device | str | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(init_scale, (str, torch.device)):
            raise ArgumentError(f"init_scale must be a number: the device is a keyword, device={str(init_scale)!r}.")
        self._growth_factor = checks.growth(growth_factor, "growth_factor")
        self._backoff_factor = checks.backoff(backoff_factor, "backoff_factor")
        self._growth_interval = checks.positive_int(growth_interval, "growth_interval")
        self._overflow_patience = checks.positive_int(overflow_patience, "overflow_patience")
        self._min_scale, self._max_scale = checks.scale_of(min_scale, "min_scale"), checks.cap(max_scale, "max_scale")
        super().__init__(self._checked(init_scale, "init_scale"), device, enabled)

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows to ``new_factor``."""
        self._growth_factor = checks.growth(new_factor, "set_growth_factor")

    def get_backoff_factor(self) -> float:
        """Return the factor that the scale is multiplied by after an overflow."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor that the scale is multiplied by after an overflow to ``new_factor``."""
        self._backoff_factor = checks.backoff(new_factor, "set_backoff_factor")

    def get_growth_interval(self) -> int:
        """Return the number of finite updates in a row after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of finite updates in a row after which the scale grows to ``new_interval``."""
        self._growth_interval = checks.positive_int(new_interval, "set_growth_interval")
        # torch's update tests for equality: with a count beyond the interval, the scale would never grow again
        self._numbers.plain["finite"] = min(self._numbers.plain["finite"], new_interval - 1)
        if self._numbers.tensors:
            self._numbers.tensors["finite"].clamp_(max=new_interval - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain numbers, which ``torch.amp.GradScaler`` can load too. Empty if disabled."""
        state = super().state_dict()
        return state and {
            **state,
            "overflow_patience": self._overflow_patience,
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the ``state_dict`` of this class or of ``torch.amp.GradScaler``. One that does not fit is an error and
        changes nothing.

        What the latter does not have (patience, floor, cap) stays as it is here, and its scale is clamped between floor
        and cap.
        """
        if not self._enabled:
            return
        state = checks.State(state_dict)
        scale = state.take("scale", checks.scale_of)
        growth, backoff = state.take("growth_factor", checks.growth), state.take("backoff_factor", checks.backoff)
        interval = state.take("growth_interval", checks.positive_int)
        patience = state.take("overflow_patience", checks.positive_int, self._overflow_patience)
        floor = state.take("min_scale", checks.scale_of, self._min_scale)
        cap = state.take("max_scale", checks.cap, self._max_scale)
        if cap is not None and cap < floor:
            raise state.wrong(f"min_scale={floor:g} is above max_scale={cap:g}.")
        finite = state.take("_growth_tracker", checks.count)
        overflows = state.take("_overflow_tracker", checks.count, 0)
        stuck = state.take("_stuck_tracker", checks.count, 0)

        self._growth_factor, self._backoff_factor, self._growth_interval = growth, backoff, interval
        self._overflow_patience, self._min_scale, self._max_scale = patience, floor, cap
        self._write(
            scale=min(max(scale, floor), self._ceiling),
            finite=min(finite, interval - 1),
            overflows=min(overflows, patience - 1),
            stuck=stuck,
        )

    @property
    def _floor(self) -> float:
        return self._min_scale

    @property
    def _ceiling(self) -> float:
        return checks.LARGEST if self._max_scale is None else self._max_scale

    def _checked(self, scale: Any, name: str) -> float:
        value = checks.scale_of(scale, name)
        if not self._floor <= value <= self._ceiling:
            raise ArgumentError(
                f"{name}={scale!r} is not between min_scale={self._floor:g} and max_scale={self._ceiling:g}. Choose "
                "another value, or create the scaler with other limits."
            )
        return value

    def _clamp(self, scale: Tensor) -> None:
        scale.clamp_(self._floor, self._ceiling)

    def _rescale(self, scale: Tensor, found: Tensor, overflowed: bool | None) -> None:
        if overflowed is False and self._overflow_patience == 1:
            count = self._numbers.shared("finite")
            if count + 1 < self._growth_interval:  # torch's update would count, and leave the scale alone
                count[...] = count + 1
                return
        finite, overflows = self._numbers.tensors["finite"], self._numbers.tensors["overflows"]
        too_many = found
        if self._overflow_patience > 1:
            overflow = found != 0
            overflows.add_(1).mul_(overflow)
            too_many = (overflows >= self._overflow_patience).float()
            # An overflow that patience tolerates: torch's update counts from -1 to 0 and leaves the scale alone.
            finite.masked_fill_(overflow, -1)
            overflows.masked_fill_(too_many != 0, 0)
        amp_update_scale_(
            scale, finite, too_many, self._growth_factor, self._backoff_factor, self._growth_interval
        )
        self._clamp(scale)

    def _advice(self, count: int) -> str:
        scale = self._numbers.read("scale")
        if scale <= self._floor:
            return (
                f"Gradients were not finite in the last {count} updates although the loss scale is at its floor, "
                f"{scale:g}; all these steps were skipped. The cause is the model, not the scale: {REMEDY}"
            )
        return (
            f"Gradients were not finite in the last {count} updates, and all these steps were skipped; the loss scale "
            f"has fallen to {scale:g}. If it persists, the cause is the model, not the scale: {REMEDY}"
        )

    def __repr__(self) -> str:
        return (
            f"DynamicLossScaler({self._numbers.read('scale'):g}, growth_factor={self._growth_factor:g}, "
            f"backoff_factor={self._backoff_factor:g}, growth_interval={self._growth_interval}, "
            f"overflow_patience={self._overflow_patience}, min_scale={self._min_scale:g}, max_scale={self._max_scale})"
        )
