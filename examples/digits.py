"""Train one small network on handwritten digits at every level, and compare what comes out.

Run it with ``make demo``. The network, the data, the seed and the order of the batches are the same
each time; only the level differs. The low dtype is bfloat16, so no loss scaling is needed. The
levels are trained by ``fit``, the reference by a loop that is written out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amp_compiler import amp_compile, fit

LEVELS = ("O0", "O1", "auto", "O2", "O3")
SHOWN_LEVEL = "O2"  # the level whose graph is printed at the end
SEED = 0
EPOCHS = 8
BATCH = 128
GRAPH_LINES = 25

console = Console(highlight=False)


@dataclass(frozen=True)
class Digits:
    """The data set, split once: 8 x 8 images scaled to 0..1, and their labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled, in an order that is the same every time. A last, smaller batch would only make Dynamo compile again
        for its shape: it is left out."""
        shuffle = torch.Generator().manual_seed(SEED)
        data = TensorDataset(self.train_images, self.train_labels)
        return DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=shuffle)


@dataclass(frozen=True)
class Outcome:
    """One row of the table. The plain fp32 model has no casts and no share to report."""

    name: str
    loss: float
    accuracy: float
    seconds: float
    casts: int | None = None
    low_flops_share: float | None = None
    graph: str = ""


def load_data() -> Digits:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=SEED, stratify=labels)
    train_images, test_images = (torch.tensor(part).float().reshape(-1, 1, 8, 8) / 16 for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return Digits(train_images, train_labels, test_images, test_labels)


def make_network() -> nn.Sequential:
    """Ops of several classes: conv and linear are low, batch norm is fp32, relu and pooling follow."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    """The share of images that are named correctly."""
    return (output.argmax(dim=1) == labels).float().mean()


def first_call() -> float:
    """Seconds of the first compiled call of all, which does what is done once: in a new process it loads torch's
    compiler, and on a new machine it compiles CPU kernels, if the CPU needs them (a few seconds, told on stderr)."""
    start = time.perf_counter()
    amp_compile(nn.Linear(8, 8), dtype=torch.bfloat16)(torch.ones(8, 8)).sum().backward()
    return time.perf_counter() - start


def run_fp32(data: Digits) -> Outcome:
    """The reference: the model as it is, not compiled, in a loop without mixed precision."""
    start = time.perf_counter()
    model, batches = make_network(), data.batches()
    optimizer = make_optimizer(model)
    mean_loss = float("nan")
    with console.status("") as status:  # a spinner on a terminal, nothing elsewhere
        for epoch in range(1, EPOCHS + 1):
            status.update(f"fp32: epoch {epoch} of {EPOCHS}, loss {mean_loss:.4f}")
            losses = []
            for images, labels in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            mean_loss = sum(losses) / len(losses)
    model.eval()
    with torch.no_grad():
        right = accuracy(model(data.test_images), data.test_labels).item()
    return Outcome("fp32", mean_loss, right, time.perf_counter() - start)


def run_level(level: str, data: Digits) -> Outcome:
    """The same, through the compiler. The parameters that are trained and tested are the model's own, in fp32."""
    start = time.perf_counter()
    model = make_network()
    history = fit(
        model, F.cross_entropy, make_optimizer(model), data.batches(), EPOCHS, level=level, dtype=torch.bfloat16,
        loss_scaler=None, metrics={"accuracy": accuracy}, validation=[(data.test_images, data.test_labels)],
    )  # fmt: skip
    last, step = history[-1], history.step
    report = step.report()
    forward = [record for record in step.history if record.graph == "forward"]  # capture, then each pass
    graph = forward[-1].text if level == SHOWN_LEVEL else ""
    seconds = time.perf_counter() - start
    return Outcome(
        level, last.loss, last.validation["accuracy"], seconds, report.casts, report.low_flops_share, graph
    )


def show_table(outcomes: list[Outcome], ready: float) -> None:
    table = Table(title=f"Digits, {EPOCHS} epochs, low dtype bfloat16")
    table.add_column("level")
    for heading in ("final loss", "test accuracy", "casts", "low-precision FLOPs", "seconds"):
        table.add_column(heading, justify="right")
    for o in outcomes:
        table.add_row(
            o.name,
            f"{o.loss:.4f}",
            f"{o.accuracy:.1%}",
            "-" if o.casts is None else str(o.casts),
            "-" if o.low_flops_share is None else f"{o.low_flops_share:.0%}",
            f"{o.seconds:.1f}",
        )
    console.print(table)
    console.print(f"The seconds include the compilation of the network, but not the {ready:.1f} s of the first call.")
    console.print("They are not a benchmark: see benchmarks/.")


def show_graph(graph: str) -> None:
    lines = graph.splitlines()
    console.print(f"\nPart of the rewritten graph, every cast explicit ({SHOWN_LEVEL}):\n")
    console.print("\n".join(lines[:GRAPH_LINES]), markup=False, soft_wrap=True)
    if len(lines) > GRAPH_LINES:
        console.print(f"... {len(lines) - GRAPH_LINES} more lines")


def main() -> None:
    data = load_data()
    ready = first_call()
    console.print(f"ready  {ready:.1f} s for the first call, which sets up kernels and torch's compiler")
    outcomes = []
    for name in ("fp32", *LEVELS):
        outcome = run_fp32(data) if name == "fp32" else run_level(name, data)
        summary = f"loss {outcome.loss:.4f}  accuracy {outcome.accuracy:.1%}  {outcome.seconds:.1f} s"
        console.print(f"{name:>5}  {summary}")
        outcomes.append(outcome)
    console.print()
    show_table(outcomes, ready)
    show_graph(next(o.graph for o in outcomes if o.name == SHOWN_LEVEL))


if __name__ == "__main__":
    main()
