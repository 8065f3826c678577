"""Networks with planted faults: ops that fp16 breaks, among many that it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

#: kind of fault -> the ops of its block that must stay in fp32
FAULTS = {
    "quotient": ("addcdiv#0",),  # divides numbers that fp16 cannot hold
    "activations": ("mul#2", "mul#3"),  # reaches 1e6, and comes back
    "weights": ("linear#0",),  # weights whose rounding errors do not cancel, as they themselves nearly do
    "cancellation": ("add#0", "sub#0"),  # the difference of large numbers that are nearly equal
}


class Block(nn.Module):
    """Four ops, and those of a fault."""

    def __init__(self, width: int, fault: str = "") -> None:
        super().__init__()
        self.fc, self.fault = nn.Linear(width, width), fault
        if fault == "weights":
            half, difference = 1e4 * torch.rand(width, width), torch.eye(width)
            self.pair = nn.Parameter(torch.cat([half, difference - half], 1), requires_grad=False)
        elif fault:
            large = torch.full((width,), {"cancellation": 3e4, "activations": 1e3}.get(fault, 1e6))
            self.large = nn.Parameter(large, requires_grad=False)
            self.other = nn.Parameter(2 * large if fault == "quotient" else 1 / large, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.fc(x))
        x = x * 0.97
        if self.fault == "quotient":
            y = torch.addcdiv(y, self.other, self.large)
        elif self.fault == "activations":
            y = y * self.large * self.large * self.other * self.other
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


def expected(faults: Mapping[int, str]) -> set[str]:
    """The names of the ops that must stay in fp32."""
    return {f"blocks.{number}:{op}" for number, kind in faults.items() for op in FAULTS[kind]}


def relative_error(model: nn.Module, x: Tensor) -> Callable[[Callable[[Tensor], Tensor]], float]:
    """An ``evaluate``: the error of a model's output on ``x``, relative to the fp32 model's."""
    with torch.no_grad():
        reference = model(x)

    def evaluate(compiled: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            return float((compiled(x) - reference).norm() / reference.norm())

    return evaluate
