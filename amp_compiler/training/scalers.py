"""Loss scalers: multiply the loss, divide the gradients, leave a step out if one is not finite, adapt the scale.

They stand where ``torch.amp.GradScaler`` does, with the same methods, and add a floor and a cap for the scale,
patience, and a diagnosis when update after update is skipped. The state lives in small tensors on
the loss's device, and nothing but ``step`` of an optimizer that is not fused makes the host wait for it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..common.errors import AmpWarning, ArgumentError, ScalerError
from ..common.torch_names import amp_update_scale_
from ..kernels import all_finite as finite_kernel
from ..kernels import unscale as unscale_kernel
from . import scaler_checks as checks
from .scaler_state import Stage, TorchScaler, Use
from .update import apply_update, gradients, inverse, takes_found_inf

STUCK_AFTER = 10  # updates in a row that are skipped before a warning

Nested = TypeVar("Nested")


def all_finite(tensors: Tensor | Iterable[Tensor | None]) -> Tensor:
    """A bool tensor: is every number of every tensor finite? No host sync; ``None`` entries are left out.

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


class LossScaler(TorchScaler):
    """What both scalers share. Here the scale never changes by itself."""

    def __init__(self, scale: float, device: torch.device | str | None, enabled: bool) -> None:
        where = checks.device(device, "device")
        if not isinstance(enabled, bool):
            raise ArgumentError(f"enabled must be True or False, not {enabled!r}.")
        if enabled and where is not None and where.type == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                f"{type(self).__name__}(device={str(where)!r}): CUDA is not available, so the scaler is disabled, as "
                "torch.amp.GradScaler is. Leave device= out to have it on the device of the loss.",
                AmpWarning,
                stacklevel=3,
            )
            enabled = False
        super().__init__(scale, where, enabled)
        self._replicas: dict[torch.device, Tensor] = {}
        self._told = 0  # updates in a row that were skipped when a warning last told of them

    # ------------------------------------------------------------------------------------------ a training loop

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: Nested) -> Nested: ...
    def scale(self, outputs: Any) -> Any:
        """The loss, or a nested tuple, list or dict of losses, times the scale; as it is if the scaler is disabled."""
        if not self._enabled:
            return outputs
        return _map(outputs, lambda tensor: tensor * self.scale_on(tensor.device), "scale")

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """``scale(loss).backward(**kwargs)``, also for several losses at once."""
        if isinstance(loss, Tensor):
            self.scale(loss).backward(**kwargs)
        else:
            torch.autograd.backward(_leaves(self.scale(loss), "backward"), **kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note whether all are finite. No host sync.

        For what needs true gradients before the step: clipping, logging. Gradients keep their dtype, so those of fp16
        parameters are rounded to fp16 again and small ones vanish; ``unscale`` gives fp32 copies.
        """
        if not self._enabled:
            return
        scale = self._existing("unscale_")
        use = self._use(optimizer)
        if use.stage is Stage.UNSCALED:
            raise ScalerError(
                f"unscale_() was already called for this {_name(optimizer)} since the last update(): a second one "
                "would divide its gradients twice. Call unscale_() once, after the last backward(), then step(), then "
                "update()."
            )
        if use.stage is Stage.STEPPED:
            raise ScalerError(
                f"unscale_() was called after step() for this {_name(optimizer)}. Call unscale_() before step(), and "
                "update() once after the steps of all optimizers."
            )
        grads = gradients(optimizer)
        if grads:
            found = torch.zeros((), dtype=torch.float32, device=scale.device)
            unscale_kernel.unscale_(grads, inverse(scale), found)
            use.found = found
        use.stage = Stage.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if that was not done, and take ``optimizer.step(*args, **kwargs)`` if all are finite.

        Returns what it returned, ``None`` if the step was left out. A fused optimizer decides on its own device; for
        others the host has to wait for the answer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ScalerError(
                "step() cannot take a closure: it would run the backward again, with gradients that nobody checks. Run "
                "forward and backward before step(); an optimizer that needs a closure (LBFGS) cannot be scaled."
            )
        scale = self._existing("step")
        use = self._use(optimizer)
        if use.stage is Stage.STEPPED:
            raise ScalerError(
                f"step() was already called for this {_name(optimizer)} since the last update(). Call update() once "
                "after the steps of all optimizers."
            )
        grad_scale = None
        if use.stage is Stage.READY and (grads := gradients(optimizer)):
            if takes_found_inf(optimizer):
                use.found = finite_kernel.non_finite(grads).to(scale.device, non_blocking=True)
                grad_scale = scale
            else:
                self.unscale_(optimizer)
        if use.found is None:
            raise ScalerError(
                f"step() found no gradient at all in this {_name(optimizer)}. Was scale(loss).backward() not called, "
                "or zero_grad() after it, or are all its parameters frozen (requires_grad=False)?"
            )
        result, taken = apply_update(optimizer, use.found, grad_scale=grad_scale, args=args, kwargs=kwargs)
        use.stage = Stage.STEPPED
        if taken is False:
            self._look(3)  # the host has just waited, so one more number costs nothing
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, once after the steps of all optimizers; or set it to ``new_scale``. No host sync.

        A tensor is not looked at: what is not finite or not positive in it leaves the scale as it is, and the rest is
        brought between floor and cap.
        """
        if not self._enabled:
            return
        scale = self._existing("update")
        if new_scale is not None:
            self._set(scale, new_scale)
            self._end_iteration()
        else:
            found = [use.found for use in self._uses.values() if use.found is not None]
            if not found:
                raise ScalerError(
                    "update() has nothing to go by: neither step() nor unscale_() has seen gradients since the last "
                    "update(). Call it once after step()."
                )
            self.adapt(functools.reduce(torch.maximum, found))
            self._look(3, waited=False)

    # ------------------------------------------------------------------------------------------ functional use

    @overload
    def unscale(self, tensors: Tensor) -> Tensor: ...
    @overload
    def unscale(self, tensors: Nested) -> Nested: ...
    def unscale(self, tensors: Any) -> Any:
        """New tensors divided by the scale: a gradient, a loss, a nested tuple, list or dict of them (or of ``None``).

        fp16 and bf16 become fp32. The results carry no autograd history. ``update`` does not hear of them: tell
        ``adjust``.
        """
        if not self._enabled:
            return tensors
        structure = _map(tensors, Tensor.detach, "unscale")
        given = _leaves(structure, "unscale")
        if not given:
            return structure
        for tensor in given:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise ArgumentError(f"unscale() takes floating point tensors; one of these is {tensor.dtype}.")
        scale = self.scale_on(given[0].device)
        results = iter(unscale_kernel.unscale(given, inverse(scale), torch.zeros_like(scale))[0])
        return _map(structure, lambda _: next(results), "unscale")

    def adjust(self, finite: Tensor) -> None:
        """Adapt the scale to one bool tensor, as ``all_finite(gradients)`` gives it. No host sync."""
        if not isinstance(finite, Tensor) or finite.numel() != 1:
            raise ArgumentError("adjust() takes a bool tensor of one element, as all_finite(gradients) gives it.")
        self.adapt(finite.logical_not().reshape(()).float())
        self._look(3, waited=False)

    def adapt(self, found: Tensor) -> None:
        """``adjust`` for a flag as torch's optimizers take it: 1.0 if a gradient was not finite, else 0.0, a fp32
        tensor of no dimensions. It warns of nothing: ``newly_stuck`` tells a caller that wants to."""
        if not self._enabled:
            return
        self._numbers.create(found.device)
        scale, stuck = self._numbers.tensors["scale"], self._numbers.tensors["stuck"]
        found = found.to(scale.device, non_blocking=True)
        if self._numbers.on_host():  # the host may look at these without waiting for anything
            count = stuck.numpy()
            count[...] = (count + 1) * found.numpy()
        else:
            stuck.add_(1).mul_(found)
        self._rescale(scale, found)
        self._end_iteration()

    def scale_on(self, device: torch.device | str | int) -> Tensor:
        """The scale on a device: a fp32 tensor of no dimensions that follows every later change. Not to be written."""
        where = torch.device(device)
        if not self._enabled:
            return torch.ones((), device=where)
        self._numbers.create(where)
        scale = self._numbers.tensors["scale"]
        if scale.device == where:
            return scale
        if where not in self._replicas:
            copy = scale.to(where, copy=True)
            same = scale if copy.device == scale.device else self._replicas.get(copy.device, copy)  # "cuda" is "cuda:0"
            self._replicas[where] = self._replicas[copy.device] = same
        return self._replicas[where]

    # ------------------------------------------------------------------------------------------ values on the host

    def get_scale(self) -> float:
        """The scale as a float, 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        self._look(3)
        return float(self._numbers.read("scale"))

    @property
    def diagnosis(self) -> str:
        """What is wrong, if many updates in a row were skipped; else an empty string. Waits for the device."""
        count = self._numbers.read("stuck")
        return self._advice(count) if count >= STUCK_AFTER else ""

    def newly_stuck(self, *, waited: bool = True) -> int:
        """How many updates in a row were skipped, if they are many (10) and this was not told yet; else 0.

        ``waited``: the host has just waited for the device anyway. If not, it looks only where that costs nothing.
        """
        if not self._enabled or not (waited or self._numbers.on_host()):
            return 0
        count, before = self._numbers.read("stuck"), self._told
        self._told = count if count >= STUCK_AFTER else 0
        return self._told if before == 0 or count < before else 0

    def is_enabled(self) -> bool:
        """False if the scaler was made with ``enabled=False``: it then leaves everything as it is."""
        return self._enabled

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by when it grows."""
        return 1.0

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by when gradients overflowed."""
        return 1.0

    def get_growth_interval(self) -> int:
        """How many finite updates in a row make the scale grow."""
        return 1

    def set_growth_factor(self, new_factor: float) -> None:
        """An error: a fixed scale does not change."""
        raise ArgumentError(f"The scale of {type(self).__name__} is fixed. Use DynamicLossScaler for one that changes.")

    def set_backoff_factor(self, new_factor: float) -> None:
        """An error: a fixed scale does not change."""
        self.set_growth_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """An error: a fixed scale does not change."""
        self.set_growth_factor(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """All state as plain numbers, which ``torch.amp.GradScaler`` can load too; empty if disabled. Waits for the
        device."""
        if not self._enabled:
            return {}
        self._look(3)
        return {
            "scale": self._numbers.read("scale"),
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
            "_growth_tracker": self._numbers.read("finite"),
            "_overflow_tracker": self._numbers.read("overflows"),
            "_stuck_tracker": self._numbers.read("stuck"),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the scale of a state, of a scaler here or ``torch.amp.GradScaler``. A wrong one changes nothing."""
        if not self._enabled:
            return
        state = checks.State(state_dict)
        self._write(scale=state.take("scale", checks.scale_of), stuck=state.take("_stuck_tracker", checks.count, 0))

    # ------------------------------------------------------------------------------------------ inside

    def _existing(self, method: str) -> Tensor:
        """The scale, where it must have been used before."""
        if not self._numbers.tensors:
            raise ScalerError(
                f"{method}() was called before scale(): no loss was scaled yet, so no gradient is either. Call "
                "scale(loss).backward() first."
            )
        return self._numbers.tensors["scale"]

    def _use(self, optimizer: Optimizer) -> Use:
        if (use := self._uses.get(id(optimizer))) is None:
            if not hasattr(optimizer, "param_groups"):
                raise ArgumentError(f"A torch.optim.Optimizer is needed here, not {type(optimizer).__name__}.")
            use = self._uses[id(optimizer)] = Use(optimizer)
        return use

    def _end_iteration(self) -> None:
        self._uses = {}
        for replica in self._replicas.values():
            replica.copy_(self._numbers.tensors["scale"], non_blocking=True)

    def _write(self, **values: float) -> None:
        """New numbers, in the tensors that are already there."""
        self._numbers.write(**values)
        for replica in self._replicas.values():
            replica.fill_(self._numbers.plain["scale"])

    def _rescale(self, scale: Tensor, found: Tensor) -> None:
        """Change the scale after an update."""

    def _set(self, scale: Tensor, new: float | Tensor) -> None:
        if not isinstance(new, Tensor):
            scale.fill_(self._checked(new, "update(new_scale)"))
            return
        if new.numel() != 1 or new.requires_grad or new.is_complex():
            raise ArgumentError("update(new_scale): a tensor must be real, have one element and require no gradient.")
        value = new.reshape(()).to(scale.device, torch.float32, non_blocking=True)
        scale.copy_(torch.where(value.isfinite() & (value > 0), value, scale))
        self._clamp(scale)

    def _checked(self, scale: Any, name: str) -> float:
        return checks.scale_of(scale, name)

    def _clamp(self, scale: Tensor) -> None:
        scale.clamp_(checks.SMALLEST, checks.LARGEST)

    def _look(self, stacklevel: int, *, waited: bool = True) -> None:
        """Warn, once for each time that updates go on being skipped. Only where the host may read."""
        if count := self.newly_stuck(waited=waited):
            warnings.warn(self._advice(count), AmpWarning, stacklevel)

    def _advice(self, count: int) -> str:
        return (
            f"Gradients were not finite in the last {count} updates, at the fixed loss scale "
            f"{self._numbers.read('scale'):g}; all these steps were left out. Lower the scale or use "
            f"DynamicLossScaler; if that does not help, {_REMEDY}"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._uses:
            raise ScalerError(
                "A scaler can be copied or pickled between iterations only: call update() first. (To save a run, "
                "state_dict() is enough.)"
            )
        return {**self.__dict__, "_replicas": {}}


class StaticLossScaler(LossScaler):
    """A loss scale that stays as it is. Steps with non-finite gradients are left out all the same.

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

    After ``growth_interval`` finite updates in a row it is multiplied by ``growth_factor``; after ``overflow_patience``
    updates in a row with non-finite gradients (each of these steps is left out) by ``backoff_factor``. It stays
    between ``min_scale`` and ``max_scale`` (``None``: the largest finite fp32 number) and is never inf, NaN or 0.
    ``device``: where the scale is kept (``None``: where the first loss is). With ``enabled=False`` losses and gradients
    are left as they are, and ``step`` is ``optimizer.step``. A ``torch.amp.GradScaler`` to ``isinstance``.

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
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Change what the scale is multiplied by when it grows."""
        self._growth_factor = checks.growth(new_factor, "set_growth_factor")

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change what the scale is multiplied by when gradients overflowed."""
        self._backoff_factor = checks.backoff(new_factor, "set_backoff_factor")

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Change how many finite updates in a row make the scale grow."""
        self._growth_interval = checks.positive_int(new_interval, "set_growth_interval")
        # torch's update compares by equality: a count beyond the interval would never make the scale grow again
        self._numbers.plain["finite"] = min(self._numbers.plain["finite"], new_interval - 1)
        if self._numbers.tensors:
            self._numbers.tensors["finite"].clamp_(max=new_interval - 1)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state and {
            **state,
            "overflow_patience": self._overflow_patience,
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, of this class or of ``torch.amp.GradScaler``. A wrong one changes nothing.

        What the latter does not know (patience, floor, cap) stays as it is here, and its scale is brought between
        floor and cap.
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
                "another one, or make the scaler with other limits."
            )
        return value

    def _clamp(self, scale: Tensor) -> None:
        scale.clamp_(self._floor, self._ceiling)

    def _rescale(self, scale: Tensor, found: Tensor) -> None:
        finite, overflows = self._numbers.tensors["finite"], self._numbers.tensors["overflows"]
        too_many = found
        if self._overflow_patience > 1:
            overflow = found != 0
            overflows.add_(1).mul_(overflow)
            too_many = (overflows >= self._overflow_patience).float()
            # An overflow that is put up with: torch's update counts from -1 to 0 and leaves the scale alone.
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
                f"{scale:g}; all these steps were left out. The cause is the model, not the scale: {_REMEDY}"
            )
        return (
            f"Gradients were not finite in the last {count} updates, and all these steps were left out; the loss scale "
            f"has fallen to {scale:g}. If it goes on, the cause is the model, not the scale: {_REMEDY}"
        )

    def __repr__(self) -> str:
        return (
            f"DynamicLossScaler({self._numbers.read('scale'):g}, growth_factor={self._growth_factor:g}, "
            f"backoff_factor={self._backoff_factor:g}, growth_interval={self._growth_interval}, "
            f"overflow_patience={self._overflow_patience}, min_scale={self._min_scale:g}, max_scale={self._max_scale})"
        )


_REMEDY = (
    "keep ops in fp32 (black_list= or exclude=), see which went non-finite first (explain_overflow() of "
    "compile_train_step), lower the learning rate, or check the data."
)


# ------------------------------------------------------------------------------------------ nested values


def _map(value: Any, function: Callable[[Tensor], Tensor], method: str) -> Any:
    """The same structure with each tensor replaced; iterables that are no list, tuple or dict become lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map(item, function, method) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function, method) for item in value))
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        items = [_map(item, function, method) for item in value]
        return type(value)(items) if isinstance(value, list | tuple) else items
    if value is None and method == "unscale":
        return None
    raise ArgumentError(
        f"{method}() takes a tensor, or tuples, lists and dicts of tensors, not {type(value).__name__}: {value!r}."
    )


def _leaves(value: Any, method: str) -> list[Tensor]:
    leaves: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    _map(value, keep, method)
    return leaves


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
