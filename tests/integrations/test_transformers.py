"""The Hugging Face Trainer: ``AmpTrainer`` is our own loop, bit for bit, and leaves the user's model as it was."""

from __future__ import annotations

import doctest
import warnings
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from integrations.hf_runs import ACCUMULATE, CLIP, DECAY, LAYERS, RATE, RUNS, fresh_state, own_curve, same_weights
from integrations.trainer_loops import make_batches, make_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from amp_compiler import AmpWarning, ArgumentError, DynamicLossScaler, PolicyError, amp_compile
from amp_compiler.integrations import accelerate, transformers
from amp_compiler.integrations.transformers import AmpTrainer

__all__ = ["fresh_state"]


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    given = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "train_sampling_strategy": "sequential",
             "remove_unused_columns": False, "report_to": [], "use_cpu": True, "disable_tqdm": True,
             "save_strategy": "no", "logging_strategy": "no", **others}  # fmt: skip
    return TrainingArguments(str(folder), **given)


def dataset(batches: int) -> list[dict[str, Tensor]]:
    return [{"tokens": x, "labels": y} for xs, ys in make_batches(batches) for x, y in zip(xs, ys, strict=True)]


@pytest.mark.parametrize(("dtype", "batches"), RUNS)
def test_it_equals_our_own_loop(dtype: torch.dtype, batches: int, tmp_path: Path) -> None:
    model = make_model(layers=LAYERS)
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
        train_dataset=dataset(batches),
        compute_loss_func=loss_of,
        optimizers=(optimizer, scheduler),
        amp_dtype=dtype,
    )
    trainer.train()
    own = own_curve(dtype, batches)
    assert losses == own.losses
    assert optimizer.param_groups[0]["lr"] == own.rates[-1]
    assert same_weights(own, model)
    low = "float16" if dtype is torch.float16 else "bfloat16"
    assert dict(trainer.amp_report().by_precision) == own.precisions
    assert own.precisions[low] > 10
    assert "forward" not in vars(model)


# ---------------------------------------------------------------------------------------------- a small language model


def make_language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))  # fmt: skip


def sentences(count: int, length: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(2, 32, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": t, "labels": t.clone()} for t in tokens]


class Weighted(nn.Module):
    """A loss that is multiplied by ``labels``: with a large one, scaled gradients are not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).sum() * labels.max()}


@pytest.mark.trainers
def test_logs_evaluation_and_the_users_model(tmp_path: Path) -> None:
    """One run of a model that Transformers knows: its own loss, logs, evaluate, generate, save_model."""
    model = make_language_model()
    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["model"] is model)

    trainer = AmpTrainer(
        model,
        arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2, logging_strategy="steps", logging_steps=1),
        train_dataset=sentences(16),
        eval_dataset=sentences(8),
        callbacks=[Watch()],
        amp_dtype="float16",
    )
    trainer.train()
    assert seen == [True, True]
    assert "forward" not in vars(model)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss_scale"] for entry in logs] == [2.0**16] * 2
    assert [entry["skipped_steps"] for entry in logs] == [0, 0]

    plain = Trainer(make_language_model(), trainer.args, train_dataset=sentences(16))  # fp32
    plain.train()
    for entry, other in zip(logs, [entry for entry in plain.state.log_history if "loss" in entry], strict=True):
        assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)  # and not 65536 times as large
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-3)

    low = trainer.evaluate()["eval_loss"]
    high = Trainer(model, arguments(tmp_path), eval_dataset=sentences(8)).evaluate()["eval_loss"]
    assert low != high
    assert low == pytest.approx(high, rel=1e-3)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    start = sentences(1)[0]["input_ids"][None, :3]
    assert torch.equal(model.generate(start, max_new_tokens=2, do_sample=False),
                       loaded.generate(start, max_new_tokens=2, do_sample=False))  # fmt: skip


@pytest.mark.trainers
@pytest.mark.parametrize("low_rank", [False, True])
def test_evaluation_with_gradient_checkpointing_is_low(low_rank: bool, tmp_path: Path) -> None:
    """Checkpointing adds a hook with ``requires_grad_`` to the embedding, also in front of PEFT's frozen layers."""
    model: Any = make_language_model()
    if low_rank:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]))
    trainer = AmpTrainer(
        model,
        arguments(tmp_path, max_steps=2, gradient_checkpointing=True),
        train_dataset=sentences(8),
        eval_dataset=sentences(4),
        amp_dtype=torch.bfloat16,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        trainer.train()
        trained = len(trainer.amp_report().rows)
        assert torch.tensor(trainer.evaluate()["eval_loss"]).isfinite()
    evaluated = [row for row in trainer.amp_report().rows[trained:] if row.op in ("linear", "addmm")]
    assert evaluated
    assert {row.precision for row in evaluated} == {"bfloat16"}


def test_a_skipped_step_leaves_the_scheduler_and_shows_in_the_logs(tmp_path: Path) -> None:
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    data = [{"x": torch.ones(4), "labels": torch.tensor(v)} for v in (1.0, 1e36, 1.0, 1e36)]
    weights: list[Tensor] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            weights.append(model.layer.weight.detach().clone())

    trainer = AmpTrainer(
        model,
        arguments(tmp_path, per_device_train_batch_size=1, logging_strategy="steps", logging_steps=1),
        train_dataset=data,
        callbacks=[Watch()],
        optimizers=(optimizer, scheduler),
        amp_dtype=torch.float16,
        amp_loss_scaler=DynamicLossScaler(init_scale=1024.0),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["skipped_steps"] for entry in logs] == [0, 1, 1, 2]
    assert [entry["loss_scale"] for entry in logs] == [1024.0, 512.0, 512.0, 256.0]
    assert [torch.equal(a, b) for a, b in pairwise(weights)] == [True, False, True]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_the_model_is_put_back_after_an_exception_and_training_goes_on(tmp_path: Path) -> None:
    model = Weighted()

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt  # after the gradients were unscaled

    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 2
    trainer = AmpTrainer(
        model, arguments(tmp_path, per_device_train_batch_size=1, max_grad_norm=0.0), train_dataset=data,
        callbacks=[Stop()], optimizers=(torch.optim.SGD(model.parameters(), 0.5), None), amp_dtype=torch.float16,
        amp_loss_scaler=128.0,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "forward" not in vars(model)
    trainer.pop_callback(Stop)
    before = model.layer.bias.detach().clone()
    trainer.train()
    assert "forward" not in vars(model)
    torch.testing.assert_close(model.layer.bias, before - 0.75)  # rates 0.5 and 0.25: a linear schedule of two steps


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_second_precision_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"bf16=True.*amp_dtype=torch\.bfloat16"):
        AmpTrainer(Weighted(), arguments(tmp_path, bf16=True))
    AmpTrainer(Weighted(), arguments(tmp_path))  # nothing of it stays behind


def test_arguments_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="O2"):
        AmpTrainer(Weighted(), arguments(tmp_path), amp_level="02")
    with pytest.raises(PolicyError, match="nowhere"):
        AmpTrainer(Weighted(), arguments(tmp_path), amp_options={"exclude": ["nowhere"]})
    with pytest.raises(ArgumentError, match="original"):
        AmpTrainer(amp_compile(Weighted()), arguments(tmp_path))


def test_a_checkpoint_of_one_dtype_is_resumed_in_the_other(tmp_path: Path) -> None:
    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 4
    for dtype, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
        folder = tmp_path / dtype
        given = arguments(folder, per_device_train_batch_size=1, save_strategy="steps", save_steps=2)
        AmpTrainer(Weighted(), given, train_dataset=data, amp_dtype=dtype, amp_loss_scaler="dynamic").train()
        resumed = AmpTrainer(Weighted(), given, train_dataset=data, amp_dtype=other)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert resumed.state.global_step == 4
        assert (resumed.accelerator.scaler is None) == (other == "bfloat16")


def test_a_model_that_another_trainer_trains_now(tmp_path: Path) -> None:
    """A callback evaluates the model by a trainer of its own, and unwraps it wholly: training stays low."""
    model = Weighted()
    data = [{"x": torch.ones(4), "labels": torch.tensor(1.0)}] * 3
    lowered: list[bool] = []

    class Inner(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            lowered.append("forward" in vars(model))
            AmpTrainer(model, arguments(tmp_path), eval_dataset=data, amp_dtype="bfloat16").evaluate()
            lowered.append("forward" in vars(model))
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    trainer = AmpTrainer(
        model, arguments(tmp_path, per_device_train_batch_size=1), train_dataset=data, callbacks=[Inner()],
        amp_dtype="bfloat16",
    )  # fmt: skip
    trainer.train()
    assert lowered == [True] * 6
    assert "forward" not in vars(model)


@pytest.mark.parametrize("module", [accelerate, transformers], ids=["accelerate", "transformers"])
def test_the_examples_of_the_docstrings_run(module: ModuleType) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert examples
    for test in examples:
        told: list[str] = []
        failed = runner.run(test, out=told.append, clear_globs=False).failed  # Dynamo keeps names in the globals
        assert failed == 0, "".join(told)
