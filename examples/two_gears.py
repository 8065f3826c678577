"""Loss scaling in two gears, as MegEngine's guide calls them, on handwritten digits in fp16.

Automatic: ``scaler.backward(loss)`` in place of ``loss.backward()``, the rest of the loop as it was. Manual: scale,
unscale, step and update one after the other, with room between them to work on the true gradients. A third function
shows that clipping, the work most often done there, needs no manual gear: a compiled step has it as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from digits import Digits, load_data
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, amp_compile, compile_train_step

SEED = 0
EPOCHS = 4
BATCH = 128
LEVEL = "auto"  # what MegEngine's autocast does: an op takes the widest of its inputs
LOW = torch.float16
MAX_NORM = 0.5

console = Console(highlight=False)
Work = Callable[[Sequence[nn.Parameter]], None]  # what is done with the gradients before the step


@dataclass(frozen=True)
class Drive:
    """One training run."""

    losses: list[float]
    weights: dict[str, Tensor]
    accuracy: float


class Network(nn.Module):
    """A small convolutional network for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.hidden = nn.Linear(8 * 4 * 4, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv(images)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


def make_network() -> Network:
    torch.manual_seed(SEED)
    return Network()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(data: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    shuffle = torch.Generator().manual_seed(SEED)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(data.train_images), generator=shuffle).split(BATCH):
            if len(chosen) == BATCH:  # a smaller batch would be compiled once more
                yield data.train_images[chosen], data.train_labels[chosen]


def automatic_gear(data: Digits) -> Drive:
    """The scaler multiplies in ``backward`` and divides in ``step``."""
    model = make_network()
    fast = amp_compile(model, level=LEVEL, dtype=LOW)
    optimizer, scaler = make_optimizer(model), DynamicLossScaler()
    losses = []
    for images, labels in batches(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(images), labels)
        scaler.backward(loss)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return Drive(losses, model.state_dict(), accuracy(model, data))


def manual_gear(data: Digits, work: Work) -> Drive:
    """The same in single steps. Between ``unscale_`` and ``step`` gradients are what they would be in fp32."""
    model = make_network()
    fast = amp_compile(model, level=LEVEL, dtype=LOW)
    optimizer, scaler = make_optimizer(model), DynamicLossScaler()
    losses = []
    for images, labels in batches(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        work(list(model.parameters()))
        scaler.step(optimizer)  # knows that they are unscaled, and that one may be inf
        scaler.update()
        losses.append(loss.item())
    return Drive(losses, model.state_dict(), accuracy(model, data))


def compiled_step(data: Digits) -> Drive:
    """Clipping without the manual gear."""
    model = make_network()
    step = compile_train_step(model, F.cross_entropy, make_optimizer(model), LEVEL, dtype=LOW, max_grad_norm=MAX_NORM)
    losses = [step(images, labels).loss.item() for images, labels in batches(data)]
    return Drive(losses, model.state_dict(), accuracy(model, data))


def leave_alone(parameters: Sequence[nn.Parameter]) -> None:
    """No work: then both gears must give the same."""


def clip(parameters: Sequence[nn.Parameter]) -> None:
    """Shorten the gradient of all parameters together where it is longer than ``MAX_NORM``."""
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def centre(parameters: Sequence[nn.Parameter]) -> None:
    """Gradient centralization: take the mean out of every output channel's gradient. No library step has this."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dim() > 1:
            parameter.grad -= parameter.grad.mean(dim=tuple(range(1, parameter.grad.dim())), keepdim=True)


def accuracy(model: nn.Module, data: Digits) -> float:
    with torch.no_grad():
        return (model(data.test_images).argmax(dim=1) == data.test_labels).float().mean().item()


def main() -> dict[str, Drive]:
    data = load_data()
    drives = {
        "automatic": automatic_gear(data),
        "manual, no work": manual_gear(data, leave_alone),
        "manual, clipped": manual_gear(data, clip),
        "manual, centred": manual_gear(data, centre),
        "compiled, clipped": compiled_step(data),
    }
    table = Table(title=f"Digits, {EPOCHS} epochs, {LEVEL} in float16", title_justify="left", title_style="bold")
    table.add_column("gear")
    for heading in ("first loss", "last loss", "test accuracy"):
        table.add_column(heading, justify="right")
    for name, drive in drives.items():
        table.add_row(name, f"{drive.losses[0]:.4f}", f"{drive.losses[-1]:.4f}", f"{drive.accuracy:.1%}")
    console.print(table)
    same = drives["automatic"].losses == drives["manual, no work"].losses
    console.print(f"Without work in between both gears give the same losses, bit for bit: {same}")
    return drives


if __name__ == "__main__":
    main()
