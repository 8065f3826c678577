"""``compile_train_step``: a model, a loss and an optimizer in, a compiled training step out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..cost.device import Device
from ..parallel.engines import make_engine
from ..parallel.spec import DataParallel, Sharded
from ..policy import Policy
from ..policy.ops.names import OpLike
from ..runtime.arguments import check_request
from ..runtime.low_parameters import trained_low_dtype
from ..runtime.options import Options
from .arguments import (
    check_method,
    check_method_of_parts,
    check_model,
    check_numbers,
    check_optimizer,
    make_scaler,
    tell_of_low_parameters,
)
from .owner import Owner
from .results import check_loss_fn
from .scaler_base import LossScaler
from .step import TrainStep
from .together import start_together


def compile_train_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: torch.optim.Optimizer,
    level: str = "O2",
    *,
    dtype: torch.dtype | str | None = None,
    policy: Policy | None = None,
    white_list: Iterable[OpLike] = (),
    black_list: Iterable[OpLike] = (),
    exclude: Iterable[str | type[nn.Module]] = (),
    loss_scaler: str | float | LossScaler | None = "dynamic",
    accumulate_steps: int = 1,
    max_grad_norm: float | None = None,
    backend: str = "auto",
    disable_passes: Iterable[str] = (),
    parallel: DataParallel | Sharded | None = None,
    master_weights: bool | str = True,
    return_output: bool = False,
    device: str | os.PathLike[str] | Device | None = None,
    health_every: int | None = None,
) -> TrainStep:
    """Compile a whole training step: forward, loss, backward, loss scaling, clipping and the optimizer.

    ``step(inputs, targets)`` runs it and updates the model's own parameters.

    Args:
        model: The module to train. Its parameters are the fp32 master weights; see ``master_weights`` if some are
            stored in fp16 or bf16.
        loss_fn: A function of ``(output, targets)`` that returns a scalar loss, ``(loss, anything)``, or a dict with
            ``"loss"``; what comes with the loss is ``result.extra``. Use None if the model itself returns one of these,
            or an object with ``.loss``.
        optimizer: An optimizer of the model's parameters. Fused ones (``fused=True``) need no host synchronization.
        level: As for ``amp_compile``.
        dtype: As for ``amp_compile``.
        policy: As for ``amp_compile``.
        white_list: As for ``amp_compile``.
        black_list: As for ``amp_compile``.
        exclude: As for ``amp_compile``.
        loss_scaler: ``"dynamic"``, a ``DynamicLossScaler`` or ``StaticLossScaler``, a number for a fixed scale, or None
            for neither scaling nor a check of the gradients.
        accumulate_steps: Update the weights at every n-th call, by the mean of the gradients of n batches.
        max_grad_norm: Clip the unscaled gradients to this norm.
        backend: As for ``amp_compile``.
        disable_passes: As for ``amp_compile``.
        parallel: How several processes train the model together: ``DataParallel(...)`` or ``Sharded(...)``. None, also
            for a model that is wrapped already, leaves it to the model.
        master_weights: How parameters that are stored in fp16 or bf16 are updated, in which small updates would be lost
            to rounding. True keeps an fp32 master of each in the optimizer's state; ``"stochastic"`` keeps nothing and
            rounds at random, right on average; ``"kahan"`` keeps what the rounding lost, in the parameter's dtype;
            False loses it. fp32 parameters are not affected.
        return_output: Put the model's output into ``result.output``.
        device: As for ``amp_compile``; the backward counts too.
        health_every: Sample every n-th update for ``step.health()``, which tells what is lost to rounding. None, the
            default, samples nothing; 50 costs about 2 % of the time.

    Returns:
        A ``TrainStep``. Call it with ``inputs`` (a tensor, a tuple of arguments or a dict of keyword arguments) and
        ``targets``; each call returns a ``StepResult``.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from amp_compiler import compile_train_step
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = compile_train_step(model, nn.functional.cross_entropy, optimizer, level="O2", dtype=torch.bfloat16)
        >>> result = step(torch.ones(3, 4), torch.tensor([0, 1, 1]))
        >>> bool(result.skipped), float(result.scale)
        (False, 65536.0)
    """
    check_model(model)
    check_loss_fn(loss_fn)
    check_optimizer(optimizer, model)
    check_numbers(accumulate_steps, max_grad_norm, health_every)
    check_method(master_weights)
    asked = check_request(level, dtype, policy, white_list, black_list, exclude, backend, disable_passes, device)
    chosen = asked.policy_for(model)
    # with autocast's own numerics, values between the pieces of a model that breaks the graph stay low
    options = Options(chosen, backend, chosen.autocast_device is None, disable_passes=asked.disable_passes,
                      device=asked.device)  # fmt: skip
    scaler = None if "scale_loss" in asked.disable_passes else make_scaler(loss_scaler)
    tell_of_low_parameters(model, master_weights, chosen.dtype if chosen.rewrites else None)
    engine = make_engine(parallel, model, asked.disable_passes)
    if engine.part is not None and trained_low_dtype(model) is not None:
        check_method_of_parts(master_weights)
    if engine.together:
        given = (accumulate_steps, max_grad_norm, master_weights, health_every)
        start_together(engine, Owner(model, loss_fn, optimizer), chosen, scaler, *given)
    own = (scaler, accumulate_steps, max_grad_norm, return_output, engine, master_weights)
    return TrainStep(model, loss_fn, optimizer, options, *own, health_every=health_every)
