"""Callbacks and options of Lightning's Trainer that people use, with ``AmpPrecision``: they do what they do in fp32."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.lightning_modules import make_trainer
from lightning.pytorch import LightningModule
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amp_compiler.integrations.lightning import AmpPrecision

pytestmark = [pytest.mark.trainers, pytest.mark.slow]
START = 0.3  # the learning rate


class Net(LightningModule):
    """A backbone with batch norm and a head, trained by SGD, whose updates follow the gradients closely."""

    def __init__(self, learning_rate: float = START, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.learning_rate, self.batch_size = learning_rate, batch_size
        self.backbone = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)

    val_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.learning_rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def trained(precision: AmpPrecision | None, make: Callable[[], Any] | None, options: dict[str, Any]) -> Net:
    module = Net()
    callbacks = [make()] if make else []
    make_trainer(precision, **{"max_epochs": 3, "callbacks": callbacks, **options}).fit(module)
    return module


CASES: dict[str, tuple[Callable[[], Any] | None, dict[str, Any]]] = {
    "StochasticWeightAveraging": (lambda: of_lightning.StochasticWeightAveraging(0.1, swa_epoch_start=1), {}),
    "WeightAveraging": (of_lightning.WeightAveraging, {}),
    "EMAWeightAveraging": (lambda: of_lightning.EMAWeightAveraging(decay=0.5), {}),
    "BackboneFinetuning": (lambda: of_lightning.BackboneFinetuning(1, lambda epoch: 2.0, verbose=False), {}),
    "EarlyStopping": (lambda: of_lightning.EarlyStopping("val_loss"), {}),
    "GradientAccumulationScheduler": (lambda: of_lightning.GradientAccumulationScheduler({0: 1, 1: 4}), {}),
    "LearningRateFinder": (lambda: of_lightning.LearningRateFinder(num_training_steps=20), {"max_epochs": 1}),
    "BatchSizeFinder": (lambda: of_lightning.BatchSizeFinder(max_trials=2, steps_per_trial=1), {"max_epochs": 1}),
    "clipping by value": (None, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "detect_anomaly": (None, {"detect_anomaly": True}),
    "overfit_batches": (None, {"overfit_batches": 2}),
    "limits": (None, {"limit_train_batches": 0.5, "limit_val_batches": 2, "val_check_interval": 2}),
    "inference_mode": (None, {"inference_mode": False}),
}


IGNORED = pytest.mark.filterwarnings(
    "ignore:.*frozen already exist.*", "ignore:.*train_dataloader.*", "ignore:.*overfit.*"
)


@IGNORED
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_at_o0_the_weights_are_fp32s(case: str, dtype: str) -> None:
    """At O0 only the plugin is left, and with fp16 a loss scale, a power of two, which changes no bit."""
    wide = trained(None, *CASES[case])
    narrow = trained(AmpPrecision(level="O0", dtype=dtype), *CASES[case])
    assert "training_step" not in vars(narrow)
    assert any(not torch.equal(a, b) for a, b in zip(Net().parameters(), wide.parameters(), strict=True))
    for (name, one), other in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert torch.equal(one, other), name


@IGNORED
@pytest.mark.parametrize("case", CASES)
def test_the_steps_are_low(case: str) -> None:
    precision = AmpPrecision(dtype="float16")
    low = trained(precision, *CASES[case])
    assert precision.report("training_step").by_precision["float16"] >= 4
    assert all(p.dtype is torch.float32 and p.isfinite().all() for p in low.parameters())


def test_the_tuner(tmp_path: Path) -> None:
    found = {}
    for name, precision in (("wide", None), ("scaled", AmpPrecision(level="O0", dtype="float16"))):
        module = Net()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        trainer = make_trainer(precision, default_root_dir=tmp_path)
        rate = Tuner(trainer).lr_find(module, num_training=20)
        size = Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1, init_val=2)
        found[name] = rate.results, rate.suggestion(), size
        assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert found["scaled"] == found["wide"]


def test_logs_checkpoints_and_predictions(tmp_path: Path) -> None:
    """A monitor of the learning rate beside our metrics, the best checkpoint, and a run that continues from it."""
    logger = CSVLogger(str(tmp_path / "logs"))
    keep = of_lightning.ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    trainer = make_trainer(
        AmpPrecision(dtype="float16"), max_epochs=2, callbacks=[of_lightning.LearningRateMonitor("step"), keep],
        logger=logger, log_every_n_steps=1, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(module := Net())
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"lr-SGD", "loss_scale", "skipped_steps", "grad_norm", "loss", "val_loss"} <= rows[0].keys()
    other = make_trainer(AmpPrecision(dtype="float16"))
    (best,) = other.validate(module, ckpt_path=keep.best_model_path, verbose=False)
    assert best["val_loss"] == pytest.approx(float(keep.best_model_score), abs=1e-6)
    plain = Net.load_from_checkpoint(tmp_path / "last.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))
    again = make_trainer(AmpPrecision(dtype="float16"), max_epochs=3)
    again.fit(rest := Net(), ckpt_path=tmp_path / "last.ckpt")
    whole = trained(AmpPrecision(dtype="float16"), None, {})
    assert all(torch.equal(a, b) for a, b in zip(rest.parameters(), whole.parameters(), strict=True))
    predicted = again.predict(rest)
    assert predicted is not None
    assert {row.dtype for row in predicted} == {torch.float32}
