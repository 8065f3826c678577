"""Accelerate: ``prepare(accelerator, model, optimizer, ...)`` in the place of ``accelerator.prepare(model, ...)``.

The model stays the user's own object: its forward is replaced in place. So does the accelerator: its class becomes a
subclass that knows about the loss scaler, since Accelerate unscales gradients only for its own fp16.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import AmpWarning, ArgumentError, ParallelError
from ..common.keywords import check_keywords
from ..common.messages import users_frame
from ..compile import amp_compile
from ..module import AmpModule
from ..policy import Policy, check_low_dtype, default_dtype
from ..training.arguments import check_method, make_scaler, tell_of_low_parameters
from ..training.penalty import told_of_double_backward
from ..training.scaler_base import LossScaler
from ..training.update import gradients
from .inplace import InPlaceForward, installed
from .scaled_updates import ScaledUpdates, has

_SCALER_FILE = "scaler.pt"  # the name that accelerate 1.15 gives to the scaler's state in a checkpoint
_UNSUPPORTED = {
    "DEEPSPEED": "DeepSpeed has a precision and a loss scaler of its own: set them in its configuration",
    "MEGATRON_LM": "Megatron-LM has a precision and a loss scaler of its own: set them in its configuration",
    "FSDP": "train a sharded model by compile_train_step(..., parallel=Sharded()), or use DDP here",
    "XLA": "use Accelerate's own mixed_precision on XLA devices",
}


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *rest: Any,
    level: str = "O2",
    dtype: torch.dtype | str | None = None,
    loss_scaler: str | float | LossScaler | None = "dynamic",
    master_weights: bool | str = True,
    device_placement: list[bool] | None = None,
    **options: Any,
) -> Any:
    """Prepare a model, an optimizer and more for training in mixed precision.

    It calls ``accelerator.prepare`` and returns what that returns, in the same order. The forward of every model that
    is given is replaced in place by its compiled form, so ``accelerator.unwrap_model(prepared)`` is your own model. It
    is put back by ``accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)`` and by ``accelerator.free_memory()``.

    In fp16, ``accelerator.scaler`` is a loss scaler: ``backward`` scales the loss, ``clip_grad_norm_`` and
    ``clip_grad_value_`` clip unscaled gradients, an optimizer skips a step whose gradients are not finite, schedulers
    don't move then, and ``save_state`` and ``load_state`` carry the scale.

    Args:
        accelerator: An ``Accelerator`` without a precision of its own (``mixed_precision="no"``).
        model: The model, on any device.
        optimizer: Its optimizer. Leave it out to prepare a model for evaluation.
        rest: Whatever else ``accelerator.prepare`` takes: data loaders, schedulers, other models and optimizers.
        level: How much runs in low precision, as for ``amp_compile``.
        dtype: The low-precision dtype, by default fp16 on CUDA and bf16 elsewhere.
        loss_scaler: ``"dynamic"``, a ``DynamicLossScaler`` or ``StaticLossScaler``, a number for a fixed scale, or
            None. ``"dynamic"`` scales only in fp16. An accelerator has one scaler for all its models.
        master_weights: How parameters that are stored in fp16 or bf16 are updated, as for ``compile_train_step``.
        device_placement: As for ``accelerator.prepare``.
        options: Other keyword arguments of ``amp_compile``: ``policy``, ``white_list``, ``black_list``, ``exclude``,
            ``backend`` and so on.

    Returns:
        What ``accelerator.prepare`` returns.

    Raises:
        ArgumentError: If the accelerator has a precision of its own or another loss scaler, or an argument isn't valid.
        ParallelError: If the accelerator uses DeepSpeed, FSDP, Megatron-LM or XLA.

    Examples:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from amp_compiler.integrations.accelerate import amp_module, prepare
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accelerator = Accelerator(cpu=True)
        >>> prepared, optimizer = prepare(accelerator, model, optimizer, level="O2", dtype=torch.float16)
        >>> accelerator.backward(prepared(torch.ones(1, 4)).mean())
        >>> norm = accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        >>> optimizer.step()
        >>> accelerator.optimizer_step_was_skipped, accelerator.unwrap_model(prepared) is model
        (False, True)
        >>> amp_module(prepared).report().by_precision["float16"]
        1
    """
    check_keywords("prepare()", options, prepare, amp_compile)
    low = low_dtype(accelerator, dtype, options.get("policy"))
    objects = (model,) if optimizer is None and not rest else (model, optimizer, *rest)
    scaler = accelerator.scaler
    replaced: list[tuple[InPlaceForward | None, InPlaceForward]] = []
    try:
        for given in objects:
            if isinstance(given, nn.Module):
                replaced += _lower(_own(given), {"level": level, "dtype": low, **options})
        armed = arm(accelerator, low, loss_scaler, master_weights)
        for _, now in replaced if optimizer is not None else ():
            tell_of_low_parameters(now.module, armed.amp_updates.weights.method, low)
        result = accelerator.prepare(*objects, device_placement=device_placement)
    except BaseException:
        for before, now in replaced:
            now.remove()
            if before is not None:
                before.install()
        if isinstance(accelerator, AmpAccelerator):
            accelerator.scaler = accelerator.amp_updates.scaler = scaler
        raise
    armed.amp_forwards += [now for _, now in replaced]
    return result


def amp_module(prepared: nn.Module) -> AmpModule:
    """Return the compiled form of a prepared model, which has ``report()``, ``graphs`` and ``history``.

    Args:
        prepared: What ``prepare`` returned, or your own model.
    """
    own = _own(prepared)
    forward = installed(own)
    if forward is None:
        raise ArgumentError(
            f"This {type(own).__name__} was not prepared by amp_compiler.integrations.accelerate.prepare, or its "
            "forward was put back since."
        )
    return forward.compiled


def _own(prepared: nn.Module) -> Any:
    """Return the user's own model without the wrappers of DDP and torch.compile."""
    return extract_model_from_parallel(prepared, keep_torch_compile=False)


def low_dtype(accelerator: Accelerator, dtype: Any, policy: Policy | None) -> torch.dtype:
    """Return the low-precision dtype that is asked for; raise if the accelerator cannot have one from us."""
    kind = str(accelerator.distributed_type.value)
    if kind in _UNSUPPORTED:
        raise ParallelError(f"Accelerate with {kind} is not supported: {_UNSUPPORTED[kind]}.")
    if accelerator.mixed_precision != "no":
        asked = accelerator.mixed_precision
        dtype_of = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}.get(asked, "torch.bfloat16")
        raise ArgumentError(
            f"Accelerator(mixed_precision={asked!r}) would run the model under torch.autocast as well. Make it with "
            f"mixed_precision='no' (in the file of `accelerate config` and in ACCELERATE_MIXED_PRECISION too), and "
            f"pass dtype={dtype_of} to prepare."
        )
    given = getattr(policy, "dtype", None)
    if dtype is not None:
        return check_low_dtype(dtype)
    return given if given is not None else default_dtype(accelerator.device.type)


def arm(
    accelerator: Accelerator, low: torch.dtype, loss_scaler: Any, master_weights: bool | str = True
) -> AmpAccelerator:
    """Make ``accelerator`` scale losses, and its optimizers use unscaled gradients and update in fp32."""
    check_method(master_weights)
    wanted = loss_scaler if loss_scaler != "dynamic" or low is torch.float16 else None
    present = accelerator.scaler
    if present is not None and (wanted is None or wanted == "dynamic"):
        wanted = present  # of an earlier prepare
    scaler = make_scaler(wanted)
    if present is not None and scaler is not present:
        raise ArgumentError(
            "This accelerator has a loss scaler already, and scales all its losses by one scale: leave loss_scaler "
            "out, or make another Accelerator."
        )
    if not isinstance(accelerator, AmpAccelerator):
        accelerator.__class__ = _armed_class(type(accelerator))  # type: ignore[arg-type,unused-ignore]
        accelerator.amp_updates, accelerator.amp_forwards = AcceleratedUpdates(None, master_weights), []
        if master_weights == "stochastic":
            accelerator.register_for_checkpointing(accelerator.amp_updates.weights)
    elif accelerator.amp_updates.weights.method != master_weights:
        raise ArgumentError(
            f"This accelerator updates low-precision parameters by master_weights="
            f"{accelerator.amp_updates.weights.method!r}: pass the same, or make another Accelerator."
        )
    accelerator.scaler = accelerator.amp_updates.scaler = scaler
    for optimizer in accelerator._optimizers:
        accelerator.amp_updates.adopt(optimizer)
    return accelerator  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=16)
def _armed_class(cls: type[Accelerator]) -> type:
    return type(cls.__name__, (AmpAccelerator, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _lower(model: nn.Module, options: dict[str, Any]) -> Iterator[tuple[InPlaceForward | None, InPlaceForward]]:
    """Replace the forward of a model in place; yield what stood there before and what stands there now. One that has
    been replaced gets the newest options."""
    before = installed(model)
    if before is not None:
        if before.options == options:
            return
        before.remove()
    try:
        now = InPlaceForward(model, **options)
    except BaseException:
        if before is not None:
            before.install()
        raise
    now.install()
    yield before, now


class AcceleratedUpdates(ScaledUpdates):
    """The loss scaler of an accelerator, if it has one, and the optimizers that it has prepared."""

    def __init__(
        self, scaler: LossScaler | None, master_weights: bool | str = True, backward: str = "accelerator.backward(loss)"
    ) -> None:
        super().__init__(scaler, master_weights, backward)
        self.optimizers: list[Optimizer] = []

    def adopt(self, prepared: AcceleratedOptimizer) -> AmpOptimizer:
        """Make a prepared optimizer step by way of the scaler."""
        if self.scaler is not None:
            self.check(prepared.optimizer)
        prepared.__class__ = AmpOptimizer
        prepared.amp_updates = self
        self.weights.attach(prepared.optimizer)
        self._known.add(prepared.optimizer)
        if not has(self.optimizers, prepared.optimizer):
            self.optimizers.append(prepared.optimizer)
        return prepared  # type: ignore[no-any-return]

    def unscale_those(self, wanted: Callable[[Optimizer], bool]) -> None:
        """Unscale the gradients of the optimizers that are ``wanted``, unless that was done."""
        for optimizer in self.optimizers:
            if self.scaler is not None and wanted(optimizer):
                self.unscale(optimizer)

    def take(self, scaler: LossScaler, optimizer: Optimizer, closure: Callable[..., Any] | None) -> bool:
        """Take the step or skip it; return whether it was taken. All optimizers are known here, so the scale is adapted
        as soon as no other one has gradients that wait for a step, and otherwise before the next backward."""
        self.step(optimizer, **({} if closure is None else {"closure": closure}))
        skipped = scaler.was_skipped(optimizer)
        if not any(gradients(other) for other in self._waiting()):
            self.finish()
        return not skipped


class AmpOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An ``AcceleratedOptimizer`` whose skipped steps show, also those of fused optimizers."""

    amp_updates: AcceleratedUpdates

    def step(self, closure: Callable[..., Any] | None = None) -> None:
        scaler = self.amp_updates.scaler
        if scaler is None:
            updates = self.gradient_state.sync_gradients  # else Accelerate does not step
            weights = self.amp_updates.weights
            with weights.updating(self.optimizer) if updates else contextlib.nullcontext():
                super().step(closure)
        elif self.gradient_state.sync_gradients:
            self._is_overflow = not self.amp_updates.take(scaler, self.optimizer, closure)


class AmpAccelerator(Accelerator):  # type: ignore[misc]
    """What an accelerator becomes by ``prepare``: scaled losses, and true gradients for whatever looks at them."""

    amp_updates: AcceleratedUpdates
    amp_forwards: list[InPlaceForward]
    scaler: LossScaler | None

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        return self.amp_updates.adopt(super().prepare_optimizer(optimizer, device_placement))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.amp_updates.begin_backward()
        with told_of_double_backward(), self.amp_updates.scaling():
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        if optimizer is None:
            self.amp_updates.unscale_those(lambda one: True)
            return
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        inner = {id(getattr(one, "optimizer", one)) for one in given}
        self.amp_updates.unscale_those(lambda one: id(one) in inner)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        factor = self._unscale_for(given)
        norm = torch.nn.utils.clip_grad_norm_(given, max_norm * factor, norm_type=norm_type)
        return norm if factor == 1.0 else norm / factor

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        torch.nn.utils.clip_grad_value_(given, clip_value * self._unscale_for(given))

    def _unscale_for(self, parameters: list[Tensor]) -> float:
        """Unscale the gradients of ``parameters``; return what they are still multiplied by: within an accumulation,
        where more is to be added to them, they stay scaled."""
        scaler = self.amp_updates.scaler
        if scaler is None:
            return 1.0
        if not self.sync_gradients:
            return scaler.get_scale()
        known = {id(p) for p in parameters}
        self.amp_updates.unscale_those(lambda one: any(id(p) in known for g in one.param_groups for p in g["params"]))
        return 1.0

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        if not keep_fp32_wrapper and (forward := installed(super().unwrap_model(model, True, False))) is not None:
            forward.remove()
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        for forward in self.amp_forwards:
            forward.remove()
        self.amp_forwards.clear()
        self.amp_updates.end()
        self.amp_updates.optimizers.clear()
        return super().free_memory(*objects)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        self.amp_updates.finish()
        return super().save_state(*args, **kwargs)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.amp_updates.end()
        folder = None if input_dir is None else os.path.expanduser(input_dir)
        if self.scaler is None or folder is None or os.path.isfile(os.path.join(folder, _SCALER_FILE)):
            super().load_state(input_dir, *args, **kwargs)
            return
        warnings.warn(
            f"{input_dir} was saved without a loss scaler: the scale stays at {self.scaler.get_scale():g}.", AmpWarning,
            stacklevel=users_frame(),
        )  # fmt: skip
        scaler, self.scaler = self.scaler, None
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            self.scaler = scaler
