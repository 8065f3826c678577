"""Accelerate, Transformers' Trainer, PEFT and Lightning take a compiled model where they take a model."""

import inspect
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import AmpModule, AmpWarning, amp_compile

BF16 = torch.bfloat16


def compiled(model: nn.Module, **options: Any) -> AmpModule:
    return amp_compile(model, "O2", dtype=BF16, backend="eager", **options)


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(x) * scale


# ------------------------------------------------------------------------------------------------ Accelerate


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_accelerate(mixed_precision: str, accelerate_state: None, tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=mixed_precision, cpu=True)
    model = Net()
    kept, before = dict(model.__dict__), model.fc.weight.detach().clone()
    fast = compiled(model)
    expected = fast(batch())
    prepared, optimizer = accelerator.prepare(fast, torch.optim.SGD(fast.parameters(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)  # in bf16 it is called inside torch.autocast: the policy wins
        out = prepared(batch())
    assert torch.equal(out, expected)
    accelerator.backward(out.sum())
    optimizer.step()
    assert not torch.equal(model.fc.weight, before)
    assert fast.report().by_precision == {"bfloat16": 2}
    assert model.__dict__ == kept
    assert accelerator.unwrap_model(prepared) is fast
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert inspect.signature(bare.forward) == inspect.signature(model.forward)
    assert bare(batch()).shape == (4, 2)
    accelerator.save_model(prepared, tmp_path)
    assert (tmp_path / "model.safetensors").exists()


# ---------------------------------------------------------------------------------- Transformers and PEFT


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A model for transformers with one layer, as anybody may write one."""
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import SequenceClassifierOutput

    class TinyConfig(PretrainedConfig):  # type: ignore[misc, no-any-unimported]
        model_type = "tiny"
        width: int = 4

    class Tiny(PreTrainedModel):  # type: ignore[misc, no-any-unimported]
        config_class = TinyConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.body, self.head = nn.Linear(config.width, config.width), nn.Linear(config.width, 2)
            self.post_init()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.head(torch.tanh(self.body(x)))
            loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    return Tiny(TinyConfig())


def trainer(model: Any, folder: Path, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    data = [{"x": row, "labels": i % 2} for i, row in enumerate(batch())]
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, learning_rate=0.1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


@pytest.mark.filterwarnings("ignore::amp_compiler.common.errors.AmpWarning")
def test_the_trainer_of_transformers(tiny: Any, tmp_path: Path) -> None:
    model = tiny
    before = model.head.weight.detach().clone()
    fast = compiled(model)
    run = trainer(fast, tmp_path, bf16=True, eval_strategy="steps", eval_steps=3)
    run.train()
    assert not torch.equal(model.head.weight, before)
    assert 0 < run.evaluate()["eval_loss"] < 1
    assert fast.report().by_precision["bfloat16"] >= 3
    run.save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == ["Tiny"]
    back = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(back.head.weight, model.head.weight)
    fast.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").exists()


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_peft_around_and_inside(tiny: Any, around: bool, tmp_path: Path) -> None:
    import copy

    import peft

    config = peft.LoraConfig(target_modules=["body"], r=2, init_lora_weights=False)
    model = copy.deepcopy(tiny)
    if around:
        fast = compiled(model)
        tuned = peft.get_peft_model(fast, config)
    else:
        tuned = fast = compiled(peft.get_peft_model(model, config))
    assert isinstance(tuned, peft.PeftModel)
    labels = torch.tensor([0, 1, 0, 1])
    tuned(x=batch(), labels=labels).loss.backward()
    trained = {name for name, p in tuned.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    low = [r.module for r in fast.report().rows if r.op == "linear" and r.precision == "bfloat16"]
    assert len(low) == 4
    tuned.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    if not around:
        trainer(fast, tmp_path / "run").train()
    merged = tuned.merge_and_unload()
    assert torch.allclose(merged(x=batch()).logits, tuned(x=batch()).logits, atol=0.1)


# -------------------------------------------------------------------------------------------------- Lightning


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Lit(lightning.LightningModule):  # type: ignore[misc, no-any-unimported]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, rows: Any, index: int) -> Tensor:
            loss = self(rows[0]).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, rows: Any, index: int) -> None:
            self.log("val", self(rows[0]).square().mean())

        def predict_step(self, rows: Any, index: int) -> Tensor:
            return self(rows[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch()), batch_size=2)
    model = Lit()
    before = model.net.weight.detach().clone()
    fast = compiled(model)
    run = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    run.fit(fast, data, data)
    assert {"loss", "val"} <= set(run.callback_metrics)
    assert not torch.equal(model.net.weight, before)
    assert fast.report().by_precision["bfloat16"] >= 1
    assert fast.report().by_precision.get("float32", 0) == 0
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(Lit.load_from_checkpoint(tmp_path / "last.ckpt").net.weight, model.net.weight)
    rows = torch.cat(run.predict(fast, data))
    assert torch.equal(rows, compiled(model)(batch()))


def test_a_step_that_does_not_call_the_model_is_told_of() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            return self.net(rows).mean()

    fast = amp_compile(Steps())
    with pytest.warns(AmpWarning, match=r"training_step did not call the model itself.*amp_compile\("):
        fast.training_step(batch(), 0)
    with warnings.catch_warnings(action="error"):
        fast.training_step(batch(), 1)
    fast.enabled = False
    assert not fast.training_step(batch(), 2).isnan()
