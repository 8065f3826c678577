"""Loss scaling for trainers that call backward and the steps of several optimizers one by one."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..common.errors import ArgumentError
from ..training.arguments import check_method
from ..training.masters import LowWeights
from ..training.scaler_base import LossScaler
from ..training.update import gradients


class ScaledUpdates:
    """A loss scaler whose ``update`` waits for the steps of all optimizers.

    ``update`` may change the scale, and gradients that another optimizer still holds were made with the old one. So the
    scale changes before the next backward, and gradients held by an optimizer that has not stepped change with it.
    """

    def __init__(self, scaler: LossScaler | None, master_weights: bool | str = True) -> None:
        check_method(master_weights)
        self.scaler = scaler
        self.weights = LowWeights(master_weights)
        self._stepped: list[Optimizer] = []  # since the last update
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._flag: Tensor | None = None  # of the last step: 1.0 if it was skipped
        self._skipped: Tensor | int = 0

    @property
    def skipped(self) -> int:
        """How many steps were skipped. Waits for the device."""
        return int(self._skipped)

    @skipped.setter
    def skipped(self, count: int) -> None:
        self._skipped = count

    @property
    def last_was_skipped(self) -> bool:
        """Whether the last step was skipped. Waits for the device."""
        return self._flag is not None and bool(self._flag)

    @staticmethod
    def check(optimizer: Any) -> None:
        """Raise if an optimizer calls a closure several times per step, so that no gradient could be unscaled."""
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ArgumentError(
                f"{type(optimizer).__name__} evaluates the model several times per step through a closure, which loss "
                'scaling does not support: use dtype="bfloat16", which needs none, or another optimizer.'
            )

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, if that was not done since its last step."""
        assert self.scaler is not None
        self._known.add(optimizer)
        if gradients(optimizer) and not self.scaler.is_unscaled(optimizer):
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Take the step or skip it. Without any gradient there is nothing to do, as without a scaler."""
        assert self.scaler is not None
        self._flag = None
        if not gradients(optimizer):
            return
        if any(other is optimizer for other in self._stepped):  # a second step with the same gradients
            self.finish()
            self._scale(optimizer)
        with self.weights.updating(optimizer):
            self.scaler.step(optimizer, **kwargs)
        if (flag := self.scaler.overflow_flag(optimizer)) is not None:
            self._flag, self._skipped = flag, self._skipped + flag
        self._stepped.append(optimizer)

    def finish(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Adapt the scale, if an optimizer has stepped. ``optimizers``: those that there are, if they are known."""
        if not self._stepped:
            return
        assert self.scaler is not None
        done, self._stepped = {id(optimizer) for optimizer in self._stepped}, []
        others = {id(o): o for o in (*optimizers, *self._known) if id(o) not in done}
        for other in others.values():
            if self.scaler.is_unscaled(other):
                self._scale(other)
        held = {id(g): g for other in others.values() for g in gradients(other)}
        before = {g.device: self.scaler.scale_on(g.device).clone() for g in held.values()}
        self.scaler.update()
        for grad in held.values():
            grad.mul_(self.scaler.scale_on(grad.device) / before[grad.device])

    def begin_backward(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Adapt the scale if that is due. Gradients that were unscaled and not set to zero since are scaled again, as a
        backward may add to them."""
        if self.scaler is None:
            return
        self._known.update(optimizers)
        stepped = {id(optimizer): optimizer for optimizer in self._stepped}
        self.finish()
        unscaled = [optimizer for optimizer in self._known if self.scaler.is_unscaled(optimizer)]
        for optimizer in (*stepped.values(), *unscaled):
            self._scale(optimizer)
        if unscaled:
            self.scaler.forget()

    def _scale(self, optimizer: Optimizer) -> None:
        for grad in gradients(optimizer):
            grad.mul_(self.scaler.scale_on(grad.device))  # type: ignore[union-attr]

    def end(self) -> None:
        """Bring an iteration to its end, also one that was broken off."""
        self.finish()
        if self.scaler is not None:
            self.scaler.forget()

    def __getstate__(self) -> dict[str, Any]:
        rounding = self.weights.state_dict()
        return {"scaler": self.scaler, "_skipped": self.skipped, "method": self.weights.method, "rounding": rounding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scaler"], state["method"])  # type: ignore[misc]
        self._skipped = state["_skipped"]
        self.weights.load_state_dict(state["rounding"])
