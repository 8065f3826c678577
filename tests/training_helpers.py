"""What the tests of ``compile_train_step`` share: the loop that a user writes by hand, batches, and comparisons."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import compile_train_step
from amp_compiler.kernels import all_finite
from amp_compiler.training.scaler_state import Numbers

Batch = tuple[Any, Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
INF = float("inf")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def batches(number: int, inputs: tuple[int, ...], targets: tuple[int, ...] | None = None, seed: int = 0) -> list[Batch]:
    """Random inputs and targets of these shapes (targets as the inputs unless given), always the same ones."""
    source = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(inputs, generator=source), torch.randn(inputs if targets is None else targets, generator=source))
        for _ in range(number)
    ]


def bad(batch: Batch) -> Batch:
    """The same batch with infinite inputs: loss and gradients are not finite."""
    return torch.full_like(batch[0], INF), batch[1]


class Loop:
    """The training loop that a user writes with torch alone; called like a training step, it returns the loss.

    ``dtype``: that of ``torch.autocast``, which covers model and loss; None for fp32. ``scaler``: the GradScaler.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None = None, *,
        scaler: torch.amp.GradScaler | None = None, accumulate_steps: int = 1, max_grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.optimizer, self.dtype = model, loss_fn, optimizer, dtype
        self.scaler = scaler or torch.amp.GradScaler("cpu")
        self.size, self.max_grad_norm, self.done = accumulate_steps, max_grad_norm, 0

    def __call__(self, inputs: Any, targets: Any = None) -> Tensor:
        if self.done % self.size == 0:
            self.optimizer.zero_grad()
        self.done += 1
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            if isinstance(inputs, dict):
                output = self.model(**inputs)
            else:
                output = self.model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
            loss = output if self.loss_fn is None else self.loss_fn(output, targets)
            loss = getattr(loss, "loss", loss)
        self.scaler.scale(loss / self.size if self.size > 1 else loss).backward()
        if self.done % self.size == 0:
            self.scaler.unscale_(self.optimizer)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()


def state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """A copy of all that an update may change: parameters, buffers, tensors that the modules hold as attributes, and
    the optimizer's state, in which what was never used counts as not there."""
    found: dict[str, Any] = {name: t.detach().clone() for name, t in model.state_dict(keep_vars=True).items()}
    for path, module in model.named_modules():
        found |= {f"{path}.{k}": v.detach().clone() for k, v in vars(module).items() if isinstance(v, Tensor)}
    if optimizer is not None:
        for index, entry in optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{k}": copy.deepcopy(v) for k, v in entry.items()}
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names under which two states differ in a bit (NaN equals NaN)."""
    names = [name for name in {**ours, **theirs} if name not in ours or name not in theirs]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if isinstance(a, Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            same = a == b
        if not same:
            names.append(name)
    return sorted(names)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def trains_like(
    model: nn.Module,
    given: Iterable[Batch],
    loss_fn: Any = F.mse_loss,
    optimizer: MakeOptimizer = sgd,
    *,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """Train a copy of the model by the hand-written loop and the model itself by a compiled step, and compare losses,
    gradients, parameters, buffers and optimizer state bit by bit; returns the step. At level O0 unless given."""
    twin, given = copy.deepcopy(model), list(given)
    theirs = optimizer(twin.parameters())
    shared = {k: kwargs[k] for k in ("accumulate_steps", "max_grad_norm") if k in kwargs}
    if seed is not None:
        torch.manual_seed(seed)
    loop = Loop(twin, loss_fn, theirs, dtype, **shared)
    expected = [loop(*copy.deepcopy(batch)) for batch in given]
    if seed is not None:
        torch.manual_seed(seed)
    ours = optimizer(model.parameters())
    step = compile_train_step(model, loss_fn, ours, **({} if "policy" in kwargs else {"level": "O0"}) | kwargs)
    losses = [step(*copy.deepcopy(batch)).loss for batch in given]
    assert [float(x) for x in losses] == [float(x) for x in expected]
    assert differences(state(model, ours), state(twin, theirs)) == []
    mine, other = gradients(model), gradients(twin)
    assert [n for n, x in mine.items() if x is None] == [n for n, x in other.items() if x is None]
    assert differences(mine, other) == []
    return step


@contextlib.contextmanager
def as_on_a_gpu(step: Any = None) -> Iterator[None]:
    """Inside, a step and all scalers on a CPU do as they do where the host would have to wait for a device; ``tolist``,
    a read that no profiler shows, is an error, except in kernels, of which those for CPUs run here."""
    read, kernels = Tensor.tolist, Path(all_finite.__file__).parent

    def refuse(tensor: Tensor) -> Any:
        if Path(sys._getframe(1).f_code.co_filename).parent == kernels:
            return read(tensor)
        raise AssertionError("the host reads a value of the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Numbers, "on_host", lambda self: False)
        patch.setattr(Tensor, "tolist", refuse)
        if step is not None:
            patch.setattr(step, "_on_host", False)
            patch.setattr(step._loss_watch, "_free_to_read", False)
            patch.setattr(step._window, "reads_flags", False)
        yield
