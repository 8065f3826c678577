"""Loss scaling for trainers that call backward and the steps of several optimizers one by one."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..common.errors import ArgumentError, ScalerError
from ..training.arguments import check_method
from ..training.masters import LowWeights
from ..training.scaler_base import LossScaler
from ..training.update import gradients
from .unscaled import Backwards


class ScaledUpdates:
    """A loss scaler whose ``update`` waits for the steps of all optimizers.

    Whatever the order of ``backward``, clipping and steps, the optimizers see the gradients that they would see without
    loss scaling. ``update`` may change the scale, and gradients that another optimizer still holds were made with the
    old one: they change with it. Gradients that were unscaled are scaled again before a backward adds to them.

    ``backward``: what users call in the place of ``loss.backward()``.
    """

    def __init__(
        self, scaler: LossScaler | None, master_weights: bool | str = True, backward: str = "scaler.backward(loss)"
    ) -> None:
        check_method(master_weights)
        self.scaler = scaler
        self.weights = LowWeights(master_weights)
        self.backward = backward
        self._stepped: list[Optimizer] = []  # since the last update
        self._used: list[Optimizer] = []  # since the last backward: their gradients are unscaled
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: at the last step of each optimizer: how often losses were scaled so far, and its gradients
        self._last: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Tensor]]]]
        self._last = weakref.WeakKeyDictionary()
        self._backwards = Backwards()
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
        """Unscale the gradients of ``optimizer``, if that was not done since the last backward."""
        assert self.scaler is not None
        self._known.add(optimizer)
        grads = gradients(optimizer)
        if not grads:
            return
        self._check_scaled(optimizer, grads)
        if not has(self._used, optimizer) and not self.scaler.is_unscaled(optimizer):
            if self.scaler.calls == self._backwards.scaled and self._backwards.mixed(optimizer, grads):
                raise self._not_scaled(optimizer)
            self.scaler.unscale_(optimizer)

    def _check_scaled(self, optimizer: Optimizer, grads: list[Tensor]) -> None:
        """Raise if the gradients come from a backward that was not scaled, as far as that can be seen."""
        assert self.scaler is not None
        calls, last = self._last.get(optimizer, (0, []))
        if self.scaler.calls > calls:
            return
        kept = any(ref() is grad for ref in last for grad in grads)  # by zero_grad(set_to_none=False), or used twice
        if not kept or (self._backwards.added(optimizer, grads) and any(bool(grad.any()) for grad in grads)):
            raise self._not_scaled(optimizer)

    def _not_scaled(self, optimizer: Optimizer) -> ScalerError:
        return ScalerError(
            f"The gradients of this {type(optimizer).__name__} come from a backward without loss scaling, and would be "
            f"divided by a scale that they were not multiplied by. Call {self.backward} in the place of "
            'loss.backward(), or use dtype="bfloat16", which needs no loss scaling.'
        )

    @contextlib.contextmanager
    def scaling(self) -> Iterator[None]:
        """Inside, a loss is scaled, or the backward of a scaled loss runs."""
        before = 0 if self.scaler is None else self.scaler.calls
        try:
            with self._backwards.own():
                yield
        finally:
            if self.scaler is not None:
                self._backwards.scaled += self.scaler.calls - before

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Take the step or skip it. Without any gradient there is nothing to do, as without a scaler."""
        assert self.scaler is not None
        self._flag = None
        if not gradients(optimizer):
            return
        self.unscale(optimizer)
        if has(self._used, optimizer):  # a second step with the same gradients
            self.finish()
            self._scale(optimizer)
        else:
            self._used.append(optimizer)
        with self.weights.updating(optimizer):
            self.scaler.step(optimizer, **kwargs)
        if (flag := self.scaler.overflow_flag(optimizer)) is not None:
            self._flag, self._skipped = flag, self._skipped + flag
        self._stepped.append(optimizer)
        self._last[optimizer] = self.scaler.calls, [weakref.ref(grad) for grad in gradients(optimizer)]
        self._backwards.forget(optimizer)
        self._backwards.watch(optimizer)

    def finish(self) -> None:
        """Adapt the scale, if an optimizer has stepped."""
        if self.scaler is None or not self._stepped:
            return
        self._scale_clipped()
        self._stepped = []
        held = {id(grad): grad for other in self._waiting() for grad in gradients(other)}
        before = {grad.device: self.scaler.scale_on(grad.device).clone() for grad in held.values()}
        self.scaler.update()
        for grad in held.values():
            grad.mul_(self.scaler.scale_on(grad.device) / before[grad.device])

    def begin_backward(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Adapt the scale if that is due, and make all gradients scaled ones, since a backward may add to them."""
        self._known.update(optimizers)
        self.finish()
        if self.scaler is not None:
            self._scale_clipped()
            for optimizer in self._used:
                self._scale(optimizer)
            self.scaler.forget()
            for optimizer in self._known:
                self._backwards.watch(optimizer)
        self._used.clear()

    def _waiting(self) -> list[Optimizer]:
        """The optimizers that have not stepped since the last backward."""
        return [optimizer for optimizer in self._known if not has(self._used, optimizer)]

    def _scale_clipped(self) -> None:
        """Scale gradients again that were unscaled and not used."""
        for optimizer in self._waiting():
            if self.scaler is not None and self.scaler.is_unscaled(optimizer):
                self._scale(optimizer)

    def _scale(self, optimizer: Optimizer) -> None:
        for grad in gradients(optimizer):
            grad.mul_(self.scaler.scale_on(grad.device))  # type: ignore[union-attr]

    def end(self) -> None:
        """Bring an iteration to its end, also one that was broken off."""
        self.finish()
        if self.scaler is not None:
            self.scaler.forget()
        self._used.clear()
        self.unwatch()

    def unwatch(self) -> None:
        """Take the hooks off the parameters that notice a backward without loss scaling, until the next step."""
        self._backwards.unwatch()

    def __getstate__(self) -> dict[str, Any]:
        rounding = self.weights.state_dict()
        return {"scaler": self.scaler, "_skipped": self.skipped, "method": self.weights.method, "rounding": rounding,
                "backward": self.backward}  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scaler"], state["method"], state["backward"])  # type: ignore[misc]
        self._skipped = state["_skipped"]
        self.weights.load_state_dict(state["rounding"])


def has(optimizers: Iterable[Optimizer], optimizer: Optimizer) -> bool:
    """True if ``optimizer`` itself is one of them."""
    return any(known is optimizer for known in optimizers)
