"""Parameters that are stored in fp16 or bf16, and how an optimizer updates them without losing small updates.

An update that is small beside its weight vanishes when the sum is rounded to the weight's dtype. So the optimizer gets
fp32 tensors in the place of such parameters while it steps, and what it makes of them is written back:

* ``True``: fp32 masters, kept in ``optimizer.state`` beside the optimizer's own entries (4 bytes per parameter)
* ``"stochastic"``: none are kept; the new value is rounded up or down at random, right on average
* ``"kahan"``: what the rounding lost is kept in the parameter's own dtype (2 bytes per parameter)
* ``False``: the optimizer updates the low-precision parameters themselves

``LowWeights`` does it around any ``optimizer.step()``; nothing here knows of a ``TrainStep``::

    weights = LowWeights(True)
    weights.attach(optimizer)  # once: loading an optimizer's state keeps it fp32
    with weights.updating(optimizer):
        optimizer.step()  # or scaler.step(optimizer)

Outside of ``updating`` the optimizer holds the model's own parameters. What it keeps for them is fp32, and so are the
gradients if ``allow_gradients(parameter, torch.float32)`` was called; low ones are widened.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..common.errors import AmpWarning
from ..common.gradients import LOW
from ..common.messages import users_frame
from ..common.torch_names import foreach_copy_
from ..parallel.shards import local_of
from ..policy import dtype_name
from ..runtime.low_parameters import updated_in_fp32
from .rounding import belongs, round_stochastically, split

METHODS: tuple[bool | str, ...] = (True, "stochastic", "kahan", False)
#: what an optimizer's state holds for a low-precision parameter in addition to the optimizer's own entries
MASTER, COMPENSATION = "amp_master", "amp_compensation"
#: the same in every process, so that all processes round alike
_SEED = 0

_HOOKS: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()
#: how each optimizer that ``attach`` was called for updates low-precision parameters
_METHODS: weakref.WeakKeyDictionary[Optimizer, bool | str] = weakref.WeakKeyDictionary()


@dataclass
class _Exchanged:
    """A parameter, the fp32 tensor that the optimizer has in its place, and what earlier roundings have lost."""

    parameter: Tensor
    wide: Tensor
    rest: Tensor | None


class LowWeights:
    """Updates low-precision parameters by one of the ``METHODS``.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=0.001)
        >>> weights = LowWeights(True)
        >>> for _ in range(5):
        ...     weight.grad = torch.ones_like(weight)
        ...     with weights.updating(optimizer):
        ...         optimizer.step()
        >>> weight.item(), round(optimizer.state[weight][MASTER].item(), 6)
        (0.99609375, 0.995)
    """

    def __init__(self, method: bool | str) -> None:
        self.method = method
        self._generators: dict[str, torch.Generator] = {}
        #: parameter -> its compensation as it was last written, and the parameter's version then
        self._written: Any = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def updating(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, the optimizer holds fp32 tensors in the place of low-precision parameters that have a gradient.

        Afterwards these parameters get the new values. If nothing was changed, because the step was skipped, nothing
        changes here either: neither a parameter, a master, a compensation nor the random generator.
        """
        dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        if self.method is False or LOW.isdisjoint(dtypes):
            yield
            return
        exchanged: list[_Exchanged] = []
        try:
            with torch.no_grad():
                self._put_in(optimizer, exchanged)
            yield
            if exchanged:
                with torch.no_grad():
                    self._write(exchanged)
        finally:
            self._take_out(optimizer, exchanged)

    def takes(self, optimizer: Optimizer) -> bool:
        """Whether an update of this optimizer is made in fp32 instead of low precision: then ``updating`` must find the
        gradients when it begins."""
        if self.method is not False:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.dtype in LOW:
                        return True
        return False

    def attach(self, optimizer: Optimizer) -> None:
        """Keep fp32 what the optimizer's ``load_state_dict`` loads: torch rounds it to the dtype of the parameter. With
        ``False`` it does round, and what an earlier method has left is removed."""
        if self.method is not False:
            updated_in_fp32(parameter for _, _, parameter in _low(optimizer))
        if _METHODS.get(optimizer) == self.method:
            return
        if self.method is not False and optimizer not in _METHODS:
            _tell_of_rounded_masters(optimizer)
        _METHODS[optimizer] = self.method
        handles = _HOOKS.pop(optimizer, ())
        for handle in handles:
            handle.remove()
        if self.method is False:
            if handles:
                _narrow(optimizer)
            return
        given: list[Mapping[str, Any]] = []

        def before(optimizer: Optimizer, state: Any) -> None:
            given[:] = [state]

        def after(optimizer: Optimizer) -> None:
            _take_over(optimizer, given.pop())

        _HOOKS[optimizer] = [
            optimizer.register_load_state_dict_pre_hook(before), optimizer.register_load_state_dict_post_hook(after),
        ]  # fmt: skip

    def hand_over(self, old: Optimizer, new: Optimizer) -> None:
        """Let ``new`` continue with the masters and compensations of ``old``."""
        for _, _, parameter in _low(new) if old is not new else ():
            kept = old.state.get(parameter, {})
            for key in (MASTER, COMPENSATION):
                if key in kept and key not in new.state[parameter]:
                    new.state[parameter][key] = kept.pop(key)

    def adopt(self, optimizer: Optimizer, saved: Mapping[int, Tensor]) -> None:
        """Use what a checkpoint of another dtype or method has for a parameter, by its id: an fp32 value is the master
        of a low-precision parameter, and a saved master the value of an fp32 parameter."""
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            held = optimizer.state.get(parameter, {})
            value = saved.get(id(parameter))
            if parameter.dtype in LOW and self.method is not False:
                if MASTER not in held and value is not None and value.dtype == torch.float32:
                    optimizer.state[parameter][MASTER] = value.to(parameter.device, copy=True)
                continue
            master, rest = held.pop(MASTER, None), held.pop(COMPENSATION, None)
            if master is not None and parameter.dtype not in LOW:
                parameter.detach().copy_(master)
            elif rest is not None and parameter.dtype not in LOW:
                parameter.detach().add_(rest)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of the random generators, by device; the rest is in the optimizer's state."""
        return {device: generator.get_state() for device, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue with the random numbers that would have come next when ``state_dict()`` was called."""
        self._generators = {}
        for device, numbers in state.items():
            self._generator(torch.device(device)).set_state(numbers.cpu())

    # --------------------------------------------------------------------------------------- the update

    def _put_in(self, optimizer: Optimizer, exchanged: list[_Exchanged]) -> None:
        for group, place, parameter in _low(optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            own = optimizer.state.pop(parameter, {})
            pair = self._pair(parameter, own.pop(MASTER, None), own.pop(COMPENSATION, None))
            pair.wide.grad = gradient if gradient.dtype == torch.float32 else gradient.float()
            exchanged.append(pair)
            group["params"][place] = pair.wide
            if own:
                optimizer.state[pair.wide] = {key: _widened(value) for key, value in own.items()}

    def _pair(self, parameter: Tensor, master: Any, rest: Any) -> _Exchanged:
        """Return what the optimizer gets for a parameter: its master, or its value with what was lost."""
        kahan = self.method == "kahan"
        if isinstance(master, Tensor) and master.shape == parameter.shape:
            wide = master.to(parameter.device, torch.float32)
            _follow(local_of(wide), local_of(parameter.detach()))
            rest = None
            if kahan:
                rest = torch.zeros_like(parameter, requires_grad=False)
                local_of(rest).copy_(split(local_of(wide), parameter.dtype)[1])
            return _Exchanged(parameter, wide, rest)
        wide = parameter.detach().float()
        if isinstance(rest, Tensor) and rest.shape == parameter.shape and not self._is_stale(parameter, rest):
            rest = rest.to(parameter.device, parameter.dtype)
            own = local_of(rest)
            own.masked_fill_(belongs(local_of(parameter.detach()), own).logical_not_(), 0.0)
            local_of(wide).add_(own)
        else:
            rest = torch.zeros_like(parameter, requires_grad=False)
        return _Exchanged(parameter, wide, rest if kahan else None)

    def _is_stale(self, parameter: Tensor, rest: Tensor) -> bool:
        """True if somebody else has written to the parameter since ``rest`` was computed."""
        known, version = self._written.get(parameter, (None, 0))
        return known is rest and version != local_of(parameter)._version

    def _take_out(self, optimizer: Optimizer, exchanged: list[_Exchanged]) -> None:
        own = {id(pair.wide): pair for pair in exchanged}
        for group in optimizer.param_groups if exchanged else ():
            group["params"][:] = [own[id(p)].parameter if id(p) in own else p for p in group["params"]]
        for pair in exchanged:
            pair.wide.grad = None
            entries = optimizer.state.pop(pair.wide, {})
            if self.method is True:
                entries[MASTER] = pair.wide
            elif pair.rest is not None:
                entries[COMPENSATION] = pair.rest
                self._written[pair.parameter] = pair.rest, local_of(pair.parameter)._version
            if entries:
                optimizer.state[pair.parameter] = entries

    def _write(self, exchanged: list[_Exchanged]) -> None:
        lows, wides = [local_of(pair.parameter) for pair in exchanged], [local_of(pair.wide) for pair in exchanged]
        if self.method is True:
            foreach_copy_(lows, wides)
        elif self.method == "kahan":
            for pair, low, wide in zip(exchanged, lows, wides, strict=True):
                assert pair.rest is not None
                rounded, lost = split(wide, low.dtype)
                low.copy_(rounded)
                local_of(pair.rest).copy_(lost)
        elif _differ(lows, wides):
            for low, wide in zip(lows, wides, strict=True):
                low.copy_(round_stochastically(wide, low.dtype, self._generator(low.device)))

    def _generator(self, device: torch.device) -> torch.Generator:
        if str(device) not in self._generators:
            self._generators[str(device)] = torch.Generator(device).manual_seed(_SEED)
        return self._generators[str(device)]


def _low(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], int, Tensor]]:
    """The optimizer's low-precision parameters, each with its group and its place in it."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if parameter.dtype in LOW:
                yield group, place, parameter


def _tell_of_rounded_masters(optimizer: Optimizer) -> None:
    """Warn if the state was loaded before ``attach``: only then a master is not fp32."""
    for _, _, parameter in _low(optimizer):
        master = optimizer.state.get(parameter, {}).get(MASTER)
        if isinstance(master, Tensor) and master.dtype in LOW:
            warnings.warn(
                f"amp_compiler: the state of this {type(optimizer).__name__} was loaded too early, so torch has "
                f"rounded the fp32 masters in it to {dtype_name(master.dtype)}, and small updates of the earlier run "
                "are lost. Load it after compile_train_step() or accelerate's prepare(); with Fabric, after "
                "fabric.setup(model, optimizer) of both together.",
                AmpWarning,
                stacklevel=users_frame(),
            )
            return


def _follow(master: Tensor, low: Tensor) -> None:
    """Let the master be what the parameter is, where somebody else has written to the parameter.

    The values are compared: a write through ``parameter.data`` counts up no version. Where they agree, the master keeps
    the digits that the parameter lacks.
    """
    rounded = master.to(low.dtype)
    same_bits = low.device.type == "cpu" and torch.equal(rounded.view(torch.int16), low.view(torch.int16))
    if not same_bits:  # on other devices the host would have to wait for the answer
        master.copy_(torch.where(rounded == low, master, low.float()))


def _differ(lows: list[Tensor], wides: list[Tensor]) -> bool:
    """True if any value differs. The host waits once per device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for low, wide in zip(lows, wides, strict=True):
        flags.setdefault(low.device, []).append((low != wide).any())
    return any(bool(torch.stack(found).any()) for found in flags.values())


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


def _take_over(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Replace what ``load_state_dict`` has rounded by what it was given."""
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        held = optimizer.state.get(parameter, {})
        for key, value in held.items() if parameter.dtype in LOW else ():
            saved = given["state"][number].get(key)
            if isinstance(value, Tensor) and isinstance(saved, Tensor) and value.dtype != saved.dtype:
                held[key] = saved.to(value.device, copy=True)


def _narrow(optimizer: Optimizer) -> None:
    """Make the optimizer's state what it is without us: in the dtype of the parameter."""
    for _, _, parameter in _low(optimizer):
        held = optimizer.state.get(parameter, {})
        for key in (MASTER, COMPENSATION):
            held.pop(key, None)
        for key, value in held.items():
            if key != "step" and isinstance(value, Tensor) and value.dtype == torch.float32:
                held[key] = value.to(parameter.dtype)
