"""Runs of ``AmpPrecision`` in processes of their own; see ``test_lightning_processes.py``.

``python lightning_worker.py resume FOLDER CHECKPOINT`` continues a run; under ``torchrun``, ``lightning_worker.py ddp
FOLDER`` trains with two processes. Both write what they end with into FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations.lightning_modules import Classifier, Small, inputs, loader, make_trainer
from integrations.trainer_loops import make_batches
from lightning.pytorch.callbacks import ModelCheckpoint

from amp_compiler import DynamicLossScaler
from amp_compiler.integrations.lightning import AmpPrecision


def schedule(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(folder: Path, epochs: int, checkpoint: str | None = None) -> dict[str, Any]:
    """Train with an overflow on the way; return everything that the next step depends on."""
    scaler = DynamicLossScaler(2.0**26, growth_interval=3)
    module, precision = Classifier(schedule), AmpPrecision(dtype="float16", loss_scaler=scaler)
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(
        precision, max_epochs=epochs, gradient_clip_val=1.0, accumulate_grad_batches=2, enable_checkpointing=True,
        callbacks=[saving],
    )  # fmt: skip
    trainer.fit(module, loader(make_batches(8)), ckpt_path=checkpoint)
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "scaler": precision.state_dict(),
    }


class Watched(Small):
    """Overflows in one process only, in the first step; knows the gradients before each step."""

    def __init__(self) -> None:
        super().__init__(lambda m: torch.optim.SGD(m.parameters(), 0.1))
        self.gradients: list[list[Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        factor = torch.tensor(2.0**60 if batch_idx == 0 and self.global_rank == 1 else 1.0)
        loss = self(batch).square().mean() * factor
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])


def train_together(folder: Path) -> None:
    module, precision = Watched(), AmpPrecision(dtype="float16")
    trainer = make_trainer(precision, strategy="ddp", devices=2, max_epochs=1)
    trainer.fit(module, loader(inputs(8)))
    rank = trainer.global_rank
    rows = precision.report("training_step").rows
    torch.save(
        {
            "weights": module.state_dict(), "gradients": module.gradients, "metrics": precision.metrics(),
            "linear": [row.precision for row in rows if row.op == "linear"], "world": trainer.world_size,
            "held": [name for name in module.__dict__ if name.endswith("_step") or name == "log"],
        },
        folder / f"rank{rank}.pt",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, target = sys.argv[1], Path(sys.argv[2])
    if what == "ddp":
        train_together(target)
    else:
        torch.save(run(target, 2, sys.argv[3]), target / "resumed.pt")
