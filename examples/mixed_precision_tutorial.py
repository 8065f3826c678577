"""Mixed precision from the start, on handwritten digits: levels, precision by hand, loss scaling, one compiled step.

It takes the way of MindSpore's tutorial, in fp16 throughout:

1. automatic: a level decides what every op of the network runs in;
2. manual: layers with a precision of their own, and a region of code with one;
3. loss scaling in a training loop written by hand: scale, look, unscale, adjust;
4. all of that as one call, with a scale that adapts itself and with a fixed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from digits import Digits, load_data
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from amp_compiler import (
    AmpModule,
    DynamicLossScaler,
    StaticLossScaler,
    all_finite,
    amp_compile,
    compile_train_step,
    precision,
    set_precision,
)

SEED = 0
EPOCHS = 5
BATCH = 128
LOW = torch.float16
LEVELS = ("O0", "O1", "auto", "O2", "O3")

# So large that the first gradients overflow in fp16: the scale has something to adapt to.
FIRST_SCALE = 2.0**22

console = Console(highlight=False)
Reports = dict[str, dict[str, int]]  # name of a network -> how many of its ops run in which precision


@dataclass
class Training:
    """What one way of training gave."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: int = 0
    accuracy: float = 0.0


class Network(nn.Module):
    """For 8 x 8 images. Ops of every class: linear is low, a norm is fp32, gelu is what the level decides."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.hidden = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
        self.out = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.hidden(self.flatten(images)))


class NetworkWithRegion(Network):
    """The same network; its code says which lines run in fp16."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.flatten(images)
        with precision("float16"):
            x = self.hidden(x)
        return self.out(x)


def make_network(kind: type[Network] = Network) -> Network:
    torch.manual_seed(SEED)
    return kind()


def ops_by_precision(fast: AmpModule, images: Tensor) -> dict[str, int]:
    with torch.no_grad():
        fast(images)  # the first call compiles
    return dict(fast.report().by_precision)


# ---------------------------------------------------------------------------------- 1. automatic


def automatic(images: Tensor) -> Reports:
    """One network at five levels. From O0 to O2 its own parameters stay as they are, and are what is trained."""
    found: Reports = {}
    for level in LEVELS:
        fast = amp_compile(make_network(), level=level, dtype=LOW)
        found[level] = ops_by_precision(fast, images)
    return found


# ---------------------------------------------------------------------------------- 2. by hand


def manual(images: Tensor) -> Reports:
    """Two ways to choose by hand; the level fills in what nobody chose."""
    layers = make_network()
    set_precision(layers, "float32")  # the network and all below it,
    set_precision(layers.hidden, "float16")  # but for these: the innermost wins

    region = make_network(NetworkWithRegion)
    set_precision(region, "float32")

    found: Reports = {}
    for name, model in (("set_precision", layers), ("precision region", region)):
        fast = amp_compile(model, level="O1", dtype=LOW)
        found[name] = ops_by_precision(fast, images)
    return found


# ---------------------------------------------------------------------------------- 3. loss scaling


def batches(data: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    """All epochs, in an order that is the same every time."""
    shuffle = torch.Generator().manual_seed(SEED)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(data.train_images), generator=shuffle).split(BATCH):
            if len(chosen) == BATCH:  # a smaller batch would be compiled once more
                yield data.train_images[chosen], data.train_labels[chosen]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)


def written_by_hand(data: Digits) -> Training:
    """Every part of loss scaling in sight.

    fp16 ends at 6e-8, below which gradients become 0. A loss times 1024 has gradients times 1024, which stay; they are
    divided again in fp32. If the factor was too large for fp16's other end, 65504, they are inf and the update is left
    out.
    """
    model = make_network()
    fast = amp_compile(model, level="O2", dtype=LOW)
    optimizer, scaler = make_optimizer(model), DynamicLossScaler(init_scale=FIRST_SCALE, growth_interval=20)
    parameters = list(model.parameters())
    told = Training()
    for images, labels in batches(data):
        told.scales.append(scaler.get_scale())
        loss = F.cross_entropy(fast(images), labels)
        scaled = torch.autograd.grad(scaler.scale(loss), parameters)
        finite = all_finite(scaled)
        if finite:
            for parameter, gradient in zip(parameters, scaler.unscale(scaled), strict=True):
                parameter.grad = gradient
            optimizer.step()
        else:
            told.skipped += 1
        scaler.adjust(finite)
        told.losses.append(loss.item())
    told.accuracy = accuracy(model, data)
    return told


# ---------------------------------------------------------------------------------- 4. one compiled step


def compiled(data: Digits, scaler: DynamicLossScaler | StaticLossScaler) -> Training:
    """Model, loss, backward, loss scaling and update in one call, from one graph."""
    model = make_network()
    step = compile_train_step(model, F.cross_entropy, make_optimizer(model), "O2", dtype=LOW, loss_scaler=scaler)
    told = Training()
    for images, labels in batches(data):
        result = step(images, labels)
        told.losses.append(result.loss.item())  # item() waits for the number; the step itself never does
        told.scales.append(result.scale.item())
        told.skipped += bool(result.skipped)
    told.accuracy = accuracy(model, data)
    return told


def compiled_dynamic(data: Digits) -> Training:
    return compiled(data, DynamicLossScaler(init_scale=FIRST_SCALE, growth_interval=20))


def compiled_static(data: Digits) -> Training:
    return compiled(data, StaticLossScaler(1024.0))


def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of test images that the fp32 master weights name correctly."""
    with torch.no_grad():
        return (model(data.test_images).argmax(dim=1) == data.test_labels).float().mean().item()


# ---------------------------------------------------------------------------------- what it prints

WAYS: dict[str, Callable[[Digits], Training]] = {
    "loop by hand": written_by_hand,
    "compiled, dynamic": compiled_dynamic,
    "compiled, static": compiled_static,
}


def show_precisions(title: str, found: Reports) -> None:
    console.print(f"[bold]{title}[/bold]")
    for name, counts in found.items():
        ops = ", ".join(f"{number} in {dtype}" for dtype, number in sorted(counts.items()))
        console.print(f"  {name:<17} ops: {ops}")
    console.print()


def show_training(found: dict[str, Training]) -> None:
    table = Table(title="O2 in float16", title_justify="left", title_style="bold")
    table.add_column("training")
    for heading in ("losses", "skipped", "scales", "accuracy"):
        table.add_column(heading, justify="right")
    for name, t in found.items():
        losses = f"{t.losses[0]:.3f} to {t.losses[-1]:.3f}"
        scales = f"{t.scales[0]:.0f} to {t.scales[-1]:.0f}"
        table.add_row(name, losses, str(t.skipped), scales, f"{t.accuracy:.1%}")
    console.print(table)
    hand, dynamic = found["loop by hand"], found["compiled, dynamic"]
    console.print(f"The loop and the compiled step give the same losses, bit for bit: {hand.losses == dynamic.losses}")


def main() -> tuple[Reports, dict[str, Training]]:
    data = load_data()
    levels, by_hand = automatic(data.test_images), manual(data.test_images)
    show_precisions("A level for the whole network", levels)
    show_precisions("Precision by hand", by_hand)
    found = {name: train(data) for name, train in WAYS.items()}
    show_training(found)
    return levels | by_hand, found


if __name__ == "__main__":
    main()
