"""The Hugging Face Trainer: ``AmpTrainer`` is our own loop, bit for bit, and leaves the user's model as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hf_runs import ACCUMULATE, CLIP, DECAY, RATE, fresh_state, own_curve, same_weights
from integrations.trainer_loops import make_batches, make_model
from torch import Tensor, nn
from transformers import TrainingArguments

from amp_compiler.integrations.transformers import AmpTrainer

__all__ = ["fresh_state"]


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "train_sampling_strategy": "sequential",
             "remove_unused_columns": False, "report_to": [], "use_cpu": True, "disable_tqdm": True,
             "save_strategy": "no", "logging_strategy": "no", **others}  # fmt: skip
    return TrainingArguments(str(folder), **given)


def dataset(batches: int) -> list[dict[str, Tensor]]:
    return [{"tokens": x, "labels": y} for xs, ys in make_batches(batches) for x, y in zip(xs, ys, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_equals_our_own_loop(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    losses = []

    def loss_of(outputs: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        losses.append(float(loss.detach()))
        return loss / ACCUMULATE

    trainer = AmpTrainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=ACCUMULATE, max_grad_norm=CLIP),
        train_dataset=dataset(100),
        compute_loss_func=loss_of,
        optimizers=(optimizer, scheduler),
        amp_dtype=dtype,
    )
    trainer.train()
    own = own_curve(dtype)
    assert losses == own.losses
    assert optimizer.param_groups[0]["lr"] == own.rates[-1]
    assert same_weights(own, model)
    low = "float16" if dtype is torch.float16 else "bfloat16"
    assert trainer.amp_report().by_precision[low] > 20
    assert "forward" not in vars(model)
