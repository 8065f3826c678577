"""Gradient accumulation in fp16, twice: written out by hand with a loss scaler, and as one compiled step.

Nine linear layers learn random numbers, a small copy of the network that Paddle's guide to mixed precision uses.
Four batches make one update. Both ways start from the same weights, see the same batches and end in the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, amp_compile, compile_train_step

SEED = 100
LAYERS = 9
WIDTH = 64
BATCH = 32
BATCHES = 40
ACCUMULATE = 4
LEVEL = "O2"
LOW = torch.float16

console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """The loss of every batch, the weights at the end, and how often they were updated."""

    losses: list[float]
    weights: dict[str, Tensor]
    updates: int


class NineLayers(nn.Module):
    """Linear layers and nothing else, so that nearly all the work is matrix multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


def make_network() -> NineLayers:
    torch.manual_seed(SEED)
    return NineLayers()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def make_scaler() -> DynamicLossScaler:
    return DynamicLossScaler(init_scale=1024.0)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The same every time: inputs and targets between 0 and 1."""
    source = torch.Generator().manual_seed(SEED)
    for _ in range(BATCHES):
        yield torch.rand(BATCH, WIDTH, generator=source), torch.rand(BATCH, WIDTH, generator=source)


def by_hand() -> Run:
    """Your own loop: ``backward`` adds up scaled gradients, every fourth batch the scaler takes the step."""
    model = make_network()
    fast = amp_compile(model, level=LEVEL, dtype=LOW)
    optimizer, scaler = make_optimizer(model), make_scaler()
    losses, updates = [], 0
    for number, (x, y) in enumerate(batches(), start=1):
        loss = F.mse_loss(fast(x), y)
        scaler.scale(loss / ACCUMULATE).backward()  # divided, so that the sum of four is their mean
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            updates += 1
    return Run(losses, model.state_dict(), updates)


def compiled() -> Run:
    """The same as one call a batch. The weights are cast to fp16 once an update, not once a batch."""
    model = make_network()
    optimizer, scaler = make_optimizer(model), make_scaler()
    step = compile_train_step(
        model, F.mse_loss, optimizer, LEVEL, dtype=LOW, loss_scaler=scaler, accumulate_steps=ACCUMULATE
    )
    losses, updates = [], 0
    before = model.linears[0].weight.detach().clone()
    for x, y in batches():
        result = step(x, y)
        losses.append(result.loss.item())
        weight = model.linears[0].weight.detach()
        updates += not torch.equal(weight, before)
        before = weight.clone()
    return Run(losses, model.state_dict(), updates)


def show(hand: Run, step: Run) -> None:
    table = Table(title=f"{BATCHES} batches, an update every {ACCUMULATE}, {LEVEL} in float16")
    for heading in ("batch", "loss by hand", "loss of the step"):
        table.add_column(heading, justify="right")
    for number in [*range(0, BATCHES, 8), BATCHES - 1]:
        table.add_row(str(number + 1), f"{hand.losses[number]:.6f}", f"{step.losses[number]:.6f}")
    console.print(table)
    same_weights = all(torch.equal(hand.weights[name], step.weights[name]) for name in hand.weights)
    console.print(f"updates: {hand.updates} by hand, {step.updates} by the step")
    console.print(f"the same loss curve, bit for bit: {hand.losses == step.losses}")
    console.print(f"the same weights, bit for bit:    {same_weights}")


def main() -> tuple[Run, Run]:
    hand, step = by_hand(), compiled()
    show(hand, step)
    return hand, step


if __name__ == "__main__":
    main()
