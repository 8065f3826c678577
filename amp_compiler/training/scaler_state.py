"""The state of a loss scaler, and the names that ``torch.amp.GradScaler`` has for it.

Our scalers are instances of torch's class, so they pass ``isinstance`` checks, but they share no code with it: their
numbers are kept in ``Numbers``, and what other libraries read under torch's private names is computed from them.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..kernels import all_finite as finite_kernel
from .update import gradients


class Stage(enum.Enum):
    READY = enum.auto()
    UNSCALED = enum.auto()
    STEPPED = enum.auto()


@dataclass(slots=True)
class Use:
    """What was done with one optimizer since the last update."""

    optimizer: Optimizer  # kept alive, so that no other optimizer gets its id meanwhile
    stage: Stage = Stage.READY
    found: Tensor | None = None  # 1.0 if a gradient was not finite, on the scale's device
    taken: bool | None = None  # whether the step was taken; None if the host doesn't know


def host_value(tensor: Tensor) -> Any:
    """Return the one number of a tensor. For a CPU tensor, ``tolist`` dispatches no op, which ``item`` does."""
    value: Any = tensor.tolist()
    while isinstance(value, list):
        (value,) = value
    return value


class Numbers:
    """A scaler's numbers: Python numbers until the device is known, then tensors of no dimensions on it."""

    DTYPES: ClassVar = {
        "scale": torch.float32,
        "finite": torch.int32,  # updates in a row with finite gradients
        "overflows": torch.int32,  # updates in a row with non-finite ones since the scale last fell
        "stuck": torch.float32,  # updates in a row with non-finite ones
    }

    def __init__(self, scale: float, device: torch.device | None) -> None:
        self.plain: dict[str, Any] = {"scale": scale, "finite": 0, "overflows": 0, "stuck": 0}
        self.tensors: dict[str, Tensor] = {}
        self._shared: dict[str, Any] = {}
        self.device = device  # where the tensors will be; None: where the first one is needed

    def create(self, device: torch.device) -> None:
        """Create the tensors, if there are none yet."""
        if not self.tensors:
            for name, dtype in self.DTYPES.items():
                self.tensors[name] = torch.full((), self.plain[name], dtype=dtype, device=self.device or device)

    def on_host(self) -> bool:
        """True if the host can read them without waiting for a device."""
        return not self.tensors or self.tensors["scale"].device.type == "cpu"

    def shared(self, name: str) -> Any:
        """Return the memory of a tensor on the host as an array of no dimensions, to read and write without an op."""
        found = self._shared.get(name)
        if found is None:
            found = self._shared[name] = self.tensors[name].numpy()
        return found

    def count_skips(self, found: Tensor, overflowed: bool | None) -> bool | None:
        """Count skipped updates in a row, where ``found`` is the flag of the last update, and ``overflowed`` the same
        if the host has read it. Return the flag as the host reads it without waiting; None if it would have to wait."""
        if not self.on_host():
            self.tensors["stuck"].add_(1).mul_(found)
            return None
        overflowed = bool(host_value(found)) if overflowed is None else overflowed
        count = self.shared("stuck")
        count[...] = count + 1 if overflowed else 0
        return overflowed

    def read(self, name: str) -> Any:
        """Return the number on the host."""
        if name not in self.tensors:
            return self.plain[name]
        return type(self.plain[name])(host_value(self.tensors[name]))

    def write(self, **values: float) -> None:
        for name, value in values.items():
            self.plain[name] = value
            if name in self.tensors:
                self.tensors[name].fill_(value)

    def __getstate__(self) -> dict[str, Any]:
        return {"plain": {name: self.read(name) for name in self.plain}, "tensors": {}, "_shared": {},
                "device": self.device}  # fmt: skip


class TorchScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for ``isinstance``, whose private names are computed from our state.

    torch 2.13 to 2.15: accelerate calls ``_lazy_init_scale_growth_tracker(scaler._device)``; others read ``_scale``,
    ``_growth_tracker`` and ``_per_optimizer_states``. All public methods are the subclasses' own.
    """

    def __init__(self, scale: float, device: torch.device | None, enabled: bool) -> None:
        # torch's __init__ isn't called: its device is "cuda" by default, and it disables the scaler if there is none
        self._numbers = Numbers(scale, device)
        self._uses: dict[int, Use] = {}
        self._enabled = enabled

    def overflow_flag(self, optimizer: Optimizer) -> Tensor | None:
        """Return what ``unscale_`` or ``step`` has found in the gradients of ``optimizer`` since the last update: an
        fp32 tensor of no dimensions, 1.0 if one was not finite. None if neither has seen gradients. No host sync.
        """
        use = self._uses.get(id(optimizer))
        return None if use is None else use.found

    @property
    def _scale(self) -> Tensor | None:  # type: ignore[override]
        return self._numbers.tensors.get("scale")

    @property
    def _growth_tracker(self) -> Tensor | None:  # type: ignore[override]
        return self._numbers.tensors.get("finite")

    @property
    def _init_scale(self) -> float:  # type: ignore[override]
        return float(self._numbers.plain["scale"])

    @property
    def _init_growth_tracker(self) -> int:  # type: ignore[override]
        return int(self._numbers.plain["finite"])

    @property
    def _device(self) -> str:  # type: ignore[override]
        scale, chosen = self._scale, self._numbers.device
        default = "cuda" if torch.cuda.is_available() else "cpu"
        return scale.device.type if scale is not None else chosen.type if chosen is not None else default

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:  # type: ignore[override]
        states: dict[int, dict[str, Any]] = defaultdict(lambda: {"stage": OptState.READY, "found_inf_per_device": {}})
        for number, use in self._uses.items():
            found = {} if use.found is None else {use.found.device: use.found}
            states[number] = {"stage": OptState[use.stage.name], "found_inf_per_device": found}
        return states

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        self._numbers.create(torch.device(dev))

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        use = self._uses.setdefault(id(optimizer), Use(optimizer))
        use.found = finite_kernel.non_finite(gradients(optimizer)).to(scale.device, non_blocking=True)
        return {use.found.device: use.found}
