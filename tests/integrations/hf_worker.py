"""Runs of Accelerate and of the Hugging Face Trainer in processes of their own: ``hf_worker.py CASE FOLDER DTYPE``.

Each process writes what its run left behind to ``FOLDER/CASE-RANK.pt``. See ``test_hf_processes.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelerate import Accelerator
from integrations.trainer_loops import make_batches, make_model
from transformers import TrainingArguments

from amp_compiler import DynamicLossScaler
from amp_compiler.integrations.accelerate import amp_module, prepare
from amp_compiler.integrations.transformers import AmpTrainer

RATE, UPDATES, SAVED_AFTER = 1e-2, 12, 5
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def scaler() -> DynamicLossScaler:
    """It overflows at first, and grows often, so that resuming with another scale would show."""
    return DynamicLossScaler(init_scale=2.0**20, growth_interval=4)


def left(model: nn.Module, others: dict[str, Any]) -> dict[str, Any]:
    return {"weights": {name: p.detach().clone() for name, p in model.named_parameters()}, **others}


def accelerate(case: str, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """``whole``: all updates. ``begin``: the first ones, then save. ``resume``: load, then the others."""
    model = make_model()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    plan = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    asked = {} if WORLD > 1 else {"loss_scaler": scaler() if dtype is torch.float16 else None}
    prepared, stepper, mover = prepare(accelerator, model, optimizer, plan, dtype=dtype, **asked)
    first, last = (SAVED_AFTER if case == "resume" else 0), (SAVED_AFTER if case == "begin" else UPDATES)
    if case == "resume":
        accelerator.load_state(str(folder / "state"))
    scales = []
    for tokens, labels in make_batches(UPDATES * WORLD)[RANK::WORLD][first:last]:
        accelerator.backward(nn.functional.cross_entropy(prepared(tokens), labels))
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        stepper.step()
        if WORLD == 1:
            mover.step()
        stepper.zero_grad()
        scales.append(accelerator.scaler.get_scale() if accelerator.scaler else 1.0)
    if case == "begin":
        accelerator.save_state(str(folder / "state"))
    found = {"scales": scales, "low": amp_module(prepared).report().by_precision,
             "own": accelerator.unwrap_model(prepared) is model}  # fmt: skip
    if case == "overflow":
        before = left(model, {})["weights"]
        factor = 1e36 if RANK == 0 else 1.0
        accelerator.backward(prepared(tokens).sum() * factor)
        stepper.step()
        rate = optimizer.param_groups[0]["lr"]
        mover.step()
        found |= {"skipped": accelerator.optimizer_step_was_skipped, "moved": optimizer.param_groups[0]["lr"] != rate,
                  "same": all(torch.equal(before[n], p) for n, p in model.named_parameters())}  # fmt: skip
    return left(model, found)


def trainer(case: str, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    model = make_model()
    batches = make_batches(UPDATES * WORLD)
    made = AmpTrainer(
        model,
        TrainingArguments(
            str(folder / "trainer"), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=RATE,
            train_sampling_strategy="sequential", remove_unused_columns=False, report_to=[], use_cpu=True,
            disable_tqdm=True, save_steps=SAVED_AFTER, save_strategy="no" if WORLD > 1 else "steps", logging_steps=1,
            average_tokens_across_devices=False, lr_scheduler_type="constant" if WORLD > 1 else "linear",
            weight_decay=1e-2,
        ),
        train_dataset=[{"tokens": x, "labels": y} for xs, ys in batches for x, y in zip(xs, ys, strict=True)],
        compute_loss_func=lambda outputs, labels, num_items_in_batch=None: nn.functional.cross_entropy(outputs, labels),
        optimizers=(torch.optim.AdamW(model.parameters(), RATE), None),
        amp_dtype=dtype,
        amp_loss_scaler=scaler() if dtype is torch.float16 and WORLD == 1 else "dynamic",
    )  # fmt: skip
    made.train(resume_from_checkpoint=str(folder / f"trainer/checkpoint-{SAVED_AFTER}") if case == "resume" else None)
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    return left(model, {
        "scales": [entry.get("loss_scale", 1.0) for entry in logs], "losses": [entry["loss"] for entry in logs],
        "skipped": [entry.get("skipped_steps", 0) for entry in logs], "low": made.amp_report().by_precision,
        "own": made.accelerator.unwrap_model(made.model_wrapped) is model and "forward" not in vars(model),
    })  # fmt: skip


if __name__ == "__main__":
    kind, case, where, precision = sys.argv[1:]
    result = {"accelerate": accelerate, "trainer": trainer}[kind](case, Path(where), getattr(torch, precision))
    torch.save(result, Path(where) / f"{case}-{RANK}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
