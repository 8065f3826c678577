"""The ways to train and to infer that are measured beside each other: ours, and torch's own.

*Training*: a step is one update of the weights: all its micro-batches, forward, loss, backward, unscaling, optimizer
(fused). What runs in low precision has a loss scaler, in bf16 too, so that both sides do the same work: ours its own,
autocast `torch.amp.GradScaler`. fp32 has none, and `model.to` has none: GradScaler refuses gradients that are not fp32.
Where a peer is compiled, its forward and loss are one `torch.compile`d function with autocast inside, which leaves
Inductor the most to fuse.

*Inference* is one forward under `torch.inference_mode`. `model.to` gets inputs that are low already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler import amp_compile, compile_train_step, convert_model
from harness import saved_by_autograd, saved_in_graph
from subjects import Subject

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
REFERENCE = "fp32"


@dataclass(frozen=True)
class Setting:
    """What all variants of a comparison share."""

    dtype: torch.dtype
    optimizer: str = "sgd"
    accumulate: int = 1

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](model.parameters(), lr=1e-4, fused=True)


@dataclass(frozen=True)
class Variant:
    """One way to do it. `step` is what is timed; `rest` frees what may be freed between steps.

    `saved` tells the bytes that one forward keeps for its backward; None where that cannot be said.
    """

    step: Callable[[], object]
    rest: Callable[[], object] = lambda: None
    saved: Callable[[], int] | None = None


def is_compiled(name: str) -> bool:
    """Whether Inductor runs it: what is fused into its kernels is not counted."""
    return name.endswith(("+compile", "+inductor"))


def peer_of(name: str) -> str:
    """What else a variant is compared with, beside fp32."""
    return "autocast+compile" if is_compiled(name) else "autocast"


#: how the errors begin that say what a peer cannot do on this machine, and what to tell the reader
_CANNOT = {"could not create a primitive descriptor for the LSTM": "oneDNN has no LSTM of this dtype here"}


def cannot(name: str, error: BaseException) -> str:
    """What a peer cannot do by nature, from the error that it raised; nothing if this is a failure."""
    if not name.startswith(("autocast", "model.to")):
        return ""
    return next((reason for start, reason in _CANNOT.items() if str(error).startswith(start)), "")


# ------------------------------------------------------------------------------------------------------ training


def _by_hand(subject: Subject, setting: Setting, low: bool, compiled: bool) -> Variant:
    """A loop as PyTorch's documentation has it."""
    model = subject.make()
    optimizer = setting.optimize(model)
    batches = subject.batches(setting.accumulate)
    scaler = torch.amp.GradScaler("cpu", enabled=low)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", setting.dtype, enabled=low):
            loss = subject.loss_fn(model(x), y)
            return loss / setting.accumulate if setting.accumulate > 1 else loss

    run = torch.compile(forward) if compiled else forward

    def step() -> None:
        optimizer.zero_grad()
        for x, y in batches:
            scaler.scale(run(x, y)).backward()
        scaler.step(optimizer)
        scaler.update()

    def saved() -> int:
        return saved_by_autograd(lambda: scaler.scale(run(*batches[0])), model, batches[0])

    return Variant(step, optimizer.zero_grad, saved)


def _all_low(subject: Subject, setting: Setting) -> Variant:
    """Parameters, batch, loss and update in the low dtype."""
    model = subject.make().to(setting.dtype)
    optimizer = setting.optimize(model)
    batches = [(_low(x, setting.dtype), _low(y, setting.dtype)) for x, y in subject.batches(setting.accumulate)]

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return subject.loss_fn(model(x), y) / setting.accumulate

    def step() -> None:
        optimizer.zero_grad()
        for x, y in batches:
            forward(x, y).backward()
        optimizer.step()

    def saved() -> int:
        return saved_by_autograd(lambda: forward(*batches[0]), model, batches[0])

    return Variant(step, optimizer.zero_grad, saved)


def _ours(subject: Subject, setting: Setting, level: str, backend: str = "eager") -> Variant:
    model = subject.make()
    optimizer = setting.optimize(model)
    batches = subject.batches(setting.accumulate)
    compiled = compile_train_step(
        model, subject.loss_fn, optimizer, level, dtype=setting.dtype, backend=backend,
        loss_scaler=None if level == "O0" else "dynamic", accumulate_steps=setting.accumulate,
    )  # fmt: skip

    def step() -> None:
        for x, y in batches:
            compiled(x, y)

    saved = partial(saved_in_graph, compiled) if backend == "eager" else None  # Inductor makes some of it again
    return Variant(step, optimizer.zero_grad, saved)


def _low(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


# ----------------------------------------------------------------------------------------------------- inference


def _run(subject: Subject, setting: Setting, make: Callable[[nn.Module, Tensor], Callable[[Tensor], Any]]) -> Variant:
    ((x, _),) = subject.batches()
    run = make(subject.make().eval(), x)

    @torch.inference_mode()
    def step() -> object:
        return run(x)

    return Variant(step)


def _plain(subject: Subject, setting: Setting, low: bool, compiled: bool) -> Variant:
    def make(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
        def forward(x: Tensor) -> Any:
            with torch.autocast("cpu", setting.dtype, enabled=low):
                return model(x)

        return torch.compile(forward) if compiled else forward

    return _run(subject, setting, make)


def _low_model(subject: Subject, setting: Setting) -> Variant:
    def make(model: nn.Module, x: Tensor) -> Callable[[Tensor], Any]:
        low, cast = copy.deepcopy(model).to(setting.dtype), _low(x, setting.dtype)
        return lambda _: low(cast)

    return _run(subject, setting, make)


def _amp(subject: Subject, setting: Setting, level: str, backend: str = "eager") -> Variant:
    return _run(
        subject, setting, lambda model, x: amp_compile(model, level, dtype=setting.dtype, backend=backend)
    )


def _converted(subject: Subject, setting: Setting) -> Variant:
    return _run(subject, setting, lambda model, x: convert_model(model, (x,), dtype=setting.dtype))


Maker = Callable[[Subject, Setting], Variant]
TRAINING: dict[str, Maker] = {
    "fp32": partial(_by_hand, low=False, compiled=False),
    "fp32+compile": partial(_by_hand, low=False, compiled=True),
    "autocast": partial(_by_hand, low=True, compiled=False),
    "autocast+compile": partial(_by_hand, low=True, compiled=True),
    "model.to": _all_low,
    **{level: partial(_ours, level=level) for level in ("O0", "O1", "auto", "O2", "O3")},
    "O2+inductor": partial(_ours, level="O2", backend="inductor"),
}
INFERENCE: dict[str, Maker] = {
    "fp32": partial(_plain, low=False, compiled=False),
    "fp32+compile": partial(_plain, low=False, compiled=True),
    "autocast": partial(_plain, low=True, compiled=False),
    "autocast+compile": partial(_plain, low=True, compiled=True),
    "model.to": _low_model,
    **{level: partial(_amp, level=level) for level in ("O0", "O1", "auto", "O2", "O3")},
    "O2+inductor": partial(_amp, level="O2", backend="inductor"),
    "converted": _converted,
}
KINDS: dict[str, dict[str, Maker]] = {"training": TRAINING, "inference": INFERENCE}
