"""Lightning modules that the tests of ``AmpPrecision`` train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from integrations.trainer_loops import make_model
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from amp_compiler.integrations.lightning import AmpPrecision

Optimizers = Callable[[nn.Module], Any]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 1e-2)


class Classifier(LightningModule):
    """The transformer of ``trainer_loops`` with a training step that calls ``self``."""

    def __init__(self, optimizers: Optimizers = adamw, layers: int = 2) -> None:
        super().__init__()
        self.net, self.optimizers_of = make_model(layers=layers), optimizers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, labels = batch
        return nn.functional.cross_entropy(self(tokens), labels)

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


class Small(LightningModule):
    """Two layers; ``factor`` multiplies the loss, to make gradients overflow."""

    def __init__(self, optimizers: Optimizers = adamw, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        self.optimizers_of, self.factor = optimizers, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean() * self.factor

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


class Curve(Callback):
    """The losses of the micro-batches, and scales and learning rates after each update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.scales.append(trainer.precision_plugin.metrics()["loss_scale"])
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def loader(batches: Sequence[Any]) -> Any:
    return DataLoader(list(batches), batch_size=None)


def inputs(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def make_trainer(plugin: AmpPrecision | None = None, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}  # fmt: skip
    return Trainer(plugins=plugin, **{**quiet, **options})
