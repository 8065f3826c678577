"""Networks with planted faults: ops that fp16 breaks, among many that it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

#: kind of fault -> the ops of its block that must stay in fp32
FAULTS = {
    "quotient": ("addcdiv#0",),  # divides numbers that fp16 cannot hold
    "activations": ("mul#2", "mul#3"),  # reaches 1e6, and comes back
    "weights": ("linear#0",),  # weights whose rounding errors do not cancel, as they themselves nearly do
    "cancellation": ("add#0", "sub#0"),  # the difference of large numbers that are nearly equal
    "plateau": ("mul#2", "mul#3", "mul#4"),  # reaches 1e6, and stays there for an op
    "gradients": ("mul#1", "mul#2"),  # the values fit, but the gradient between the two is 1e-9
}

#: those that must stay in fp32 too where gradients count: the gradient of ``tanh`` is the sum of two that nearly cancel
IN_THE_BACKWARD = {"weights": ("tanh#0",)}

_LARGE = {"quotient": 1e6, "cancellation": 3e4, "gradients": 6e4}
#: what brings the values back, where it is not 1 / large
_OTHER = {"quotient": 2e6, "gradients": 1e-5}


class Block(nn.Module):
    """Four ops, and those of a fault."""

    def __init__(self, width: int, fault: str = "") -> None:
        super().__init__()
        self.fc, self.fault = nn.Linear(width, width), fault
        if fault == "weights":
            half, difference = 1e4 * torch.rand(width, width), torch.eye(width)
            self.pair = nn.Parameter(torch.cat([half, difference - half], 1), requires_grad=False)
        elif fault:
            large = torch.full((width,), _LARGE.get(fault, 1e3))
            self.large = nn.Parameter(large, requires_grad=False)
            self.one = nn.Parameter(torch.ones(width), requires_grad=False)
            other = torch.full((width,), _OTHER[fault]) if fault in _OTHER else 1 / large
            self.other = nn.Parameter(other, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.fc(x))
        x = x * 0.97
        if self.fault == "quotient":
            y = torch.addcdiv(y, self.other, self.large)
        elif self.fault == "activations":
            y = y * self.large * self.large * self.other * self.other
        elif self.fault == "plateau":
            y = y * self.large * self.large * self.one * self.other * self.other
        elif self.fault == "gradients":
            y = y * self.large * self.other
        elif self.fault == "weights":
            y = nn.functional.linear(torch.cat([y, y], -1), self.pair)
        elif self.fault == "cancellation":
            y = (y + self.large) - self.large
        return x + y


class Planted(nn.Module):
    """A stack of blocks. ``faults``: the number of a block to the kind of its fault."""

    def __init__(self, blocks: int, faults: Mapping[int, str], width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, faults.get(number, "")) for number in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def planted(ops: int, kinds: Sequence[str]) -> tuple[Planted, dict[int, str]]:
    """A network of about so many ops with these faults at even distances, and where they are."""
    blocks = (ops - sum(len(FAULTS[kind]) for kind in kinds)) // 4
    faults = {blocks * (number + 1) // (len(kinds) + 1): kind for number, kind in enumerate(kinds)}
    return Planted(blocks, faults).eval(), faults


def expected(faults: Mapping[int, str], *, gradients: bool = False) -> set[str]:
    """The names of the ops that must stay in fp32. ``gradients``: if the metric looks at gradients."""
    found = {f"blocks.{number}:{op}" for number, kind in faults.items() for op in FAULTS[kind]}
    more = IN_THE_BACKWARD if gradients else {}
    return found | {f"blocks.{number}:{op}" for number, kind in faults.items() for op in more.get(kind, ())}


def relative_error(model: nn.Module, x: Tensor) -> Callable[[Callable[[Tensor], Tensor]], float]:
    """An ``evaluate``: the error of a model's output on ``x``, relative to the fp32 model's."""
    with torch.no_grad():
        reference = model(x)

    def evaluate(compiled: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            return float((compiled(x) - reference).norm() / reference.norm())

    return evaluate


def gradient_error(model: nn.Module, x: Tensor, scale: float = 1e-4) -> Callable[[Callable[[Tensor], Tensor]], float]:
    """An ``evaluate``: the largest error of a weight's gradient, relative to fp32's. ``scale``: of the loss."""
    weights = [p for p in model.parameters() if p.requires_grad]

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(small_loss(run(x), None, scale), weights)

    reference = gradients(model)

    def evaluate(compiled: Callable[[Tensor], Tensor]) -> float:
        errors = [(a - b).norm() / b.norm() for a, b in zip(gradients(compiled), reference, strict=True)]
        return float(torch.stack(errors).max())

    return evaluate


def small_loss(output: Tensor, targets: Tensor | None, scale: float = 1e-4) -> Tensor:
    """A loss whose gradient at the output is ``scale`` or its negative everywhere."""
    signs = torch.ones(output.shape[-1])
    signs[::2] = -1
    return (output * signs).sum() * scale
