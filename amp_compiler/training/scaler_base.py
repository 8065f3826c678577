"""What loss scalers share: the methods of ``torch.amp.GradScaler``, a functional form of them, and a diagnosis.

The state lives in small tensors on the loss's device. Only ``step``, with an optimizer that isn't fused, makes the host
wait for the device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..common.errors import AmpWarning, ArgumentError, ScalerError
from ..kernels import all_finite as finite_kernel
from ..kernels import unscale as unscale_kernel
from . import scaler_checks as checks
from .nested import map_tensors, tensors_in
from .scaler_state import Stage, TorchScaler, Use
from .update import apply_update, gradients, inverse, takes_found_inf

STUCK_AFTER = 10  # warn after this many skipped updates in a row
REMEDY = (
    "keep ops in fp32 (black_list= or exclude=), see which went non-finite first (explain_overflow() of "
    "compile_train_step), lower the learning rate, or check the data."
)

Nested = TypeVar("Nested")


class LossScaler(TorchScaler):
    """The base class of both scalers, whose scale never changes by itself."""

    calls = 0  # of scale()

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
        self._told = 0  # skipped updates in a row at the time of the last warning

    # ------------------------------------------------------------------------------------------ a training loop

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: Nested) -> Nested: ...
    def scale(self, outputs: Any) -> Any:
        """Multiply ``outputs``, a loss or a nested tuple, list or dict of losses, by the scale. Unchanged if the scaler
        is disabled.
        """
        if not self._enabled:
            return outputs
        self.calls += 1
        return map_tensors(outputs, lambda tensor: tensor * self.scale_on(tensor.device), "scale")

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Call ``scale(loss).backward(**kwargs)``; ``loss`` may also be a tuple, list or dict of losses."""
        if isinstance(loss, Tensor):
            self.scale(loss).backward(**kwargs)
        else:
            torch.autograd.backward(tensors_in(self.scale(loss), "backward"), **kwargs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place, and record whether all are finite. No host
        sync.

        Use it before anything that needs true gradients before the step, such as clipping or logging. Gradients keep
        their dtype, so those of fp16 parameters are rounded to fp16 again and small ones vanish; ``unscale`` returns
        fp32 copies.
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
        """Unscale the gradients if that was not done, and call ``optimizer.step(*args, **kwargs)`` if all are finite.

        Returns what the optimizer returned, or None if the step was skipped. A fused optimizer decides on its own
        device; for others the host has to wait for the answer.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ScalerError(
                "step() cannot take a closure, because the gradients of a backward inside it would not be checked. Run "
                "forward and backward before step(); loss scaling does not support LBFGS, which needs a closure."
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
                f"step() found no gradient at all in this {_name(optimizer)}. Call scale(loss).backward() before it, "
                "with no zero_grad() in between, and check that not all parameters are frozen (requires_grad=False)."
            )
        result, use.taken = apply_update(optimizer, use.found, grad_scale=grad_scale, args=args, kwargs=kwargs)
        use.stage = Stage.STEPPED
        if use.taken is False:
            self._look(3)  # the host has just waited, so one more number costs nothing
        return result

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """True if the gradients of ``optimizer`` were unscaled since the last update."""
        use = self._uses.get(id(optimizer))
        return use is not None and use.stage is not Stage.READY

    def was_skipped(self, optimizer: Optimizer) -> bool:
        """True if ``step`` skipped ``optimizer``; ask before ``update``. Waits for the device if that is fused."""
        use = self._uses.get(id(optimizer))
        if use is None or use.found is None:
            return False
        return not use.taken if use.taken is not None else bool(use.found.item())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale, once after the steps of all optimizers; or set it to ``new_scale``. No host sync.

        A tensor ``new_scale`` is not read on the host: if it is not finite and positive, the scale stays as it is;
        otherwise it is clamped between floor and cap.
        """
        if not self._enabled:
            return
        scale = self._existing("update")
        if new_scale is not None:
            self._set(scale, new_scale)
            self.forget()
        else:
            found = [use.found for use in self._uses.values() if use.found is not None]
            if not found:
                raise ScalerError(
                    "update() was called, but neither step() nor unscale_() has seen gradients since the last "
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
        """Return ``tensors`` divided by the scale: a gradient, a loss, or a nested tuple, list or dict of them (or of
        None).

        fp16 and bf16 become fp32, and the results carry no autograd history. ``update`` does not take them into
        account: pass ``all_finite(tensors)`` to ``adjust``.
        """
        if not self._enabled:
            return tensors
        structure = map_tensors(tensors, Tensor.detach, "unscale")
        given = tensors_in(structure, "unscale")
        if not given:
            return structure
        for tensor in given:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise ArgumentError(f"unscale() takes floating point tensors; one of these is {tensor.dtype}.")
        scale = self.scale_on(given[0].device)
        results = iter(unscale_kernel.unscale(given, inverse(scale), torch.zeros_like(scale))[0])
        return map_tensors(structure, lambda _: next(results), "unscale")

    def adjust(self, finite: Tensor) -> None:
        """Adapt the scale to ``finite``, a bool tensor of one element such as ``all_finite(gradients)``. No host sync.
        """
        if not isinstance(finite, Tensor) or finite.numel() != 1:
            raise ArgumentError("adjust() takes a bool tensor of one element, as all_finite(gradients) gives it.")
        self.adapt(finite.logical_not().reshape(()).float())
        self._look(3, waited=False)

    def adapt(self, found: Tensor, overflowed: bool | None = None) -> None:
        """Adapt the scale as ``adjust`` does, to a flag as torch's optimizers take it: ``found`` is 1.0 if a gradient
        was not finite, else 0.0, an fp32 tensor of no dimensions. ``overflowed``: the same, if the host has read it. It
        gives no warning; ``newly_stuck`` says whether one is due.
        """
        if not self._enabled:
            return
        self._numbers.create(found.device)
        scale = self._numbers.tensors["scale"]
        found = found.to(scale.device, non_blocking=True)
        self._rescale(scale, found, self._numbers.count_skips(found, overflowed))
        self.forget()

    def scale_on(self, device: torch.device | str | int) -> Tensor:
        """Return the scale on ``device``: an fp32 tensor of no dimensions that follows every later change. Do not write
        to it.
        """
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
        """Return the scale as a float, 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        self._look(3)
        return float(self._numbers.read("scale"))

    @property
    def diagnosis(self) -> str:
        """Return what is wrong if many updates in a row were skipped, else an empty string. Waits for the device."""
        count = self._numbers.read("stuck")
        return self._advice(count) if count >= STUCK_AFTER else ""

    def newly_stuck(self, *, waited: bool = True) -> int:
        """Return how many updates in a row were skipped, if they are many (10) and no warning was given yet; else 0.

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
        """Return the factor by which the scale grows."""
        return 1.0

    def get_backoff_factor(self) -> float:
        """Return the factor that the scale is multiplied by after an overflow."""
        return 1.0

    def get_growth_interval(self) -> int:
        """Return the number of finite updates in a row after which the scale grows."""
        return 1

    def set_growth_factor(self, new_factor: float) -> None:
        """Raise an ``ArgumentError``: a fixed scale has no use for ``new_factor``."""
        raise ArgumentError(f"The scale of {type(self).__name__} is fixed. Use DynamicLossScaler for one that changes.")

    def set_backoff_factor(self, new_factor: float) -> None:
        """Raise an ``ArgumentError``: a fixed scale has no use for ``new_factor``."""
        self.set_growth_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Raise an ``ArgumentError``: a fixed scale has no use for ``new_interval``."""
        self.set_growth_factor(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain numbers, which ``torch.amp.GradScaler`` can load too. Empty if disabled.

        Waits for the device.
        """
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
        """Load the scale from the ``state_dict`` of a loss scaler or of ``torch.amp.GradScaler``. One that does not fit
        changes nothing.
        """
        if not self._enabled:
            return
        state = checks.State(state_dict)
        self._write(scale=state.take("scale", checks.scale_of), stuck=state.take("_stuck_tracker", checks.count, 0))

    # ------------------------------------------------------------------------------------------ internals

    def _existing(self, method: str) -> Tensor:
        """Return the scale; raise if no loss was scaled yet."""
        if not self._numbers.tensors:
            raise ScalerError(
                f"{method}() was called before scale(): no loss was scaled yet, and so no gradient. Call "
                "scale(loss).backward() first."
            )
        return self._numbers.tensors["scale"]

    def _use(self, optimizer: Optimizer) -> Use:
        if (use := self._uses.get(id(optimizer))) is None:
            if not hasattr(optimizer, "param_groups"):
                raise ArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
            use = self._uses[id(optimizer)] = Use(optimizer)
        return use

    def forget(self) -> None:
        """Begin a new iteration without an update, after one that was broken off."""
        self._uses = {}
        for replica in self._replicas.values():
            replica.copy_(self._numbers.tensors["scale"], non_blocking=True)

    def _write(self, **values: float) -> None:
        """Write new numbers into the existing tensors."""
        self._numbers.write(**values)
        for replica in self._replicas.values():
            replica.fill_(self._numbers.plain["scale"])

    def _rescale(self, scale: Tensor, found: Tensor, overflowed: bool | None) -> None:
        """Change the scale after an update; the last two as those of ``adapt``."""

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
        """Warn once per series of skipped updates, where the host can read without waiting."""
        if count := self.newly_stuck(waited=waited):
            warnings.warn(self._advice(count), AmpWarning, stacklevel)

    def _advice(self, count: int) -> str:
        return (
            f"Gradients were not finite in the last {count} updates, at the fixed loss scale "
            f"{self._numbers.read('scale'):g}; all these steps were skipped. Lower the scale or use "
            f"DynamicLossScaler; if that does not help, {REMEDY}"
        )

    def __getstate__(self) -> dict[str, Any]:
        if self._uses:
            raise ScalerError(
                "A scaler can only be copied or pickled between iterations: call update() first. (To save a run, "
                "state_dict() is enough.)"
            )
        return {**self.__dict__, "_replicas": {}}


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
