"""The Hugging Face Trainer's other ways to train, on small models of Transformers; PEFT with it and Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from integrations.hf_runs import fresh_state
from integrations.test_transformers import arguments, make_language_model, sentences
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, Trainer

from amp_compiler.integrations.accelerate import amp_module, prepare
from amp_compiler.integrations.transformers import AmpMixin, AmpTrainer

__all__ = ["fresh_state"]
pytestmark = [pytest.mark.trainers, pytest.mark.slow]


def trained(folder: Path, model: nn.Module | None = None, **given: Any) -> tuple[AmpTrainer, list[float]]:
    """Train for three updates; return the trainer and the losses."""
    trainer = AmpTrainer(
        model or make_language_model(),
        arguments(folder, max_steps=3, logging_strategy="steps", logging_steps=1, **given),
        train_dataset=sentences(12),
        amp_dtype="float16",
    )
    trainer.train()
    assert trainer.amp_report().by_precision["float16"] > 20
    assert "forward" not in vars(trainer.model)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"optim": "adamw_torch_fused"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_the_same_losses_in_another_way(given: dict[str, Any], tmp_path: Path) -> None:
    _, plain = trained(tmp_path)
    _, other = trained(tmp_path, **given)
    assert other == pytest.approx(plain, rel=1e-5)


OPTIONS: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "fused": {"optim": "adamw_torch_fused"},
    "not clipped": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2},
    "neftune": {"neftune_noise_alpha": 5.0},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "warm-up": {"warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "eval_accumulation_steps": 1, "save_strategy": "steps",
                  "save_steps": 1, "load_best_model_at_end": True},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_at_o0_the_weights_are_the_trainers_own(option: str, tmp_path: Path) -> None:
    """At O0 only the integration is left, and with fp16 a loss scale, a power of two, which changes no bit."""
    models = []
    for kind, more in ((Trainer, {}), (AmpTrainer, {"amp_level": "O0", "amp_dtype": "float16"})):
        model = make_language_model()
        torch.manual_seed(1)
        trainer = kind(
            model, arguments(tmp_path / kind.__name__, max_steps=3, **OPTIONS[option]),
            train_dataset=sentences(12), eval_dataset=sentences(4), **more,
        )  # fmt: skip
        trainer.train()
        models.append(trainer.model)
    start = make_language_model()
    plain, amp = ([p.detach() for p in model.parameters()] for model in models)
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), plain, strict=True))
    for (name, _), a, b in zip(start.named_parameters(), plain, amp, strict=True):
        assert torch.equal(a, b), name


def test_label_smoothing(tmp_path: Path) -> None:
    _, plain = trained(tmp_path)
    _, smooth = trained(tmp_path, label_smoothing_factor=0.1)
    assert smooth != plain
    assert smooth == pytest.approx(plain, rel=1e-2)


def test_a_batch_that_does_not_fit_is_tried_again_smaller(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Small(AmpTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(model, inputs, *args, **kwargs)
            sizes.append(len(inputs["input_ids"]))
            if sizes[-1] > 2:
                raise RuntimeError("CUDA out of memory.")
            return loss

    model = make_language_model()
    trainer = Small(
        model, arguments(tmp_path, max_steps=2, auto_find_batch_size=True), train_dataset=sentences(12),
        amp_dtype="float16",
    )  # fmt: skip
    trainer.train()
    assert sizes[0] == 4
    assert sizes[-1] <= 2
    assert trainer.state.global_step == 2
    assert "forward" not in vars(model)


def test_a_new_model_for_every_run(tmp_path: Path) -> None:
    trainer = AmpTrainer(
        model_init=make_language_model, args=arguments(tmp_path, max_steps=1), train_dataset=sentences(4),
        amp_dtype="bfloat16",
    )  # fmt: skip
    models = []
    for _ in range(2):
        trainer.train()
        models.append(trainer.model)
        assert trainer.amp_report().by_precision["bfloat16"] > 20
        assert "forward" not in vars(trainer.model)
    assert models[0] is not models[1]


class AmpSeq2SeqTrainer(AmpMixin, Seq2SeqTrainer):
    pass


def test_generation_during_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1,
    ))  # fmt: skip
    trainer = AmpSeq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", predict_with_generate=True,
        ),
        train_dataset=sentences(4),
        eval_dataset=sentences(4),
        amp_dtype="bfloat16",
    )  # fmt: skip
    trainer.train()
    found = trainer.predict(sentences(4), max_length=5)
    assert found.predictions.shape[0] == 4
    assert found.metrics["test_loss"] > 0
    assert "forward" not in vars(model)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model  # here: make test collects this file and runs none of it

    return get_peft_model(
        make_language_model(),
        LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True, init_lora_weights=True),
    )


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_peft_with_the_trainer(tmp_path: Path) -> None:
    model = lora()
    before = copies(model)
    trainer, _ = trained(tmp_path, model, learning_rate=1e-2)
    assert moved(model, before) == {name for name, p in model.named_parameters() if p.requires_grad}
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def test_peft_with_accelerate() -> None:
    model = lora()
    before = copies(model)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    prepared, stepper = prepare(accelerator, model, optimizer, dtype=torch.float16)
    batch = torch.stack([s["input_ids"] for s in sentences(4)])
    for _ in range(2):
        accelerator.backward(prepared(input_ids=batch, labels=batch).loss)
        assert float(accelerator.clip_grad_norm_(prepared.parameters(), 1.0)) < 10
        stepper.step()
        stepper.zero_grad()
    assert moved(model, before) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert amp_module(prepared).report().by_precision["float16"] > 20
    assert accelerator.unwrap_model(prepared) is model
