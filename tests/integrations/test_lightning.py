"""``AmpPrecision`` in Lightning's Trainer: the numbers of our own loop, and a module that is as it was."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from integrations.lightning_modules import Classifier, Curve, Small, adamw, inputs, loader, make_trainer
from integrations.trainer_loops import make_batches, make_model, own_loop
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from amp_compiler import AmpWarning, DynamicLossScaler, amp_compile
from amp_compiler.integrations.lightning import AmpPrecision

#: ``make test`` runs fp16, which has a scaler; ``test_low_weights.py`` compares a shorter run in bf16 there
LOW = [pytest.param(torch.bfloat16, marks=pytest.mark.trainers), torch.float16]


@pytest.mark.parametrize("dtype", LOW)
def test_fifty_steps_equal_our_own_loop_bit_for_bit(dtype: torch.dtype) -> None:
    batches, curve, module = make_batches(50), Curve(), Classifier(layers=1)
    trainer = make_trainer(
        AmpPrecision(dtype=dtype), accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[curve]
    )
    trainer.fit(module, loader(batches))
    model = make_model(layers=1)
    own = own_loop(model, adamw(model), batches, dtype=dtype, accumulate=2, clip=1.0)
    assert curve.losses == own.losses
    assert curve.scales == own.scales
    for name, weight in module.net.named_parameters():
        assert torch.equal(weight, own.weights[name]), name


# ------------------------------------------------------------------------------------------ what a step may be


class Steps(Small):
    """Steps that compute by themselves, call a part, and call methods of Lightning in between."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.printed = torchmetrics.Accuracy(task="binary"), [""]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        hidden = batch @ self.up.weight.t() + self.up.bias
        self.log("middle", hidden.detach().mean())
        logits = self.down(hidden.relu())
        self.print("step", batch_idx)
        loss = (logits @ torch.ones(2, 2)).square().mean()
        self.log_dict({"loss": loss, "twice": loss.detach() * 2})
        self.log("accuracy", self.accuracy(logits, (logits > 0).int()))
        return {"loss": loss * (1 + self.global_step), "logits": logits.detach()}

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self(batch).square().mean())

    def test_step(self, batch: Tensor) -> None:
        self.log("test_loss", self.forward(batch).square().mean())


def test_every_step_is_low_whatever_it_calls(capsys: pytest.CaptureFixture[str]) -> None:
    module, precision = Steps(), AmpPrecision(dtype="float16")
    trainer = make_trainer(precision, log_every_n_steps=1)
    trainer.fit(module, loader(inputs(6)), loader(inputs(1)))
    metrics = trainer.callback_metrics
    assert set(metrics) >= {"middle", "loss", "twice", "accuracy", "val_loss", "loss_scale", "grad_norm"}
    assert float(metrics["twice"]) == 2 * float(metrics["loss"])
    assert float(metrics["accuracy"]) == 1.0
    assert capsys.readouterr().out.count("step ") == 6
    report = precision.report("training_step")
    assert {(row.op, row.precision) for row in report.rows if row.op in ("matmul", "linear")} == {
        ("matmul", "float16"), ("linear", "float16"),
    }  # fmt: skip
    assert report.low_flops_share == 1.0
    assert len(precision.compiled["training_step"].graphs) <= 8  # self.global_step doesn't make one for every step
    trainer.validate(module, loader(inputs(1)), verbose=False)
    trainer.test(module, loader(inputs(1)), verbose=False)
    outputs: Any = trainer.predict(module, loader(inputs(1)))
    for step in ("validation_step", "test_step", "predict_step"):
        rows = precision.report(step).rows
        assert {row.precision for row in rows if row.op == "linear"} == {"float16"}, step
    low = amp_compile(module, dtype="float16")(inputs(1)[0])
    assert torch.equal(outputs[0], low)
    assert not torch.equal(outputs[0], module(inputs(1)[0]))
    assert precision.precision == trainer.precision == "16-mixed"


def test_outputs_have_the_dtypes_of_the_fp32_model() -> None:
    """Lightning's own plugin for Fabric makes all outputs fp32 and all inputs low."""

    class Mixed(Small):
        def predict_step(self, batch: Tensor) -> Any:
            return self(batch), self(batch).double(), self(batch).bfloat16(), batch.double() + 2.0**-40

    trainer = make_trainer(AmpPrecision(dtype="float16"))
    ((plain, double, low, exact),) = trainer.predict(Mixed(), loader(inputs(1)))  # type: ignore[misc]
    assert (plain.dtype, double.dtype, low.dtype) == (torch.float32, torch.float64, torch.bfloat16)
    assert torch.equal(exact, inputs(1)[0].double() + 2.0**-40)
    trainer = make_trainer(AmpPrecision(dtype="float16", keep_output_dtypes=False))
    (raw,) = trainer.predict(Small(), loader(inputs(1)))  # type: ignore[misc]
    assert raw.dtype is torch.float16


def test_a_step_may_return_nothing() -> None:
    class Sometimes(Small):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx in (1, 2, 3) else super().training_step(batch, batch_idx)

    modules = Sometimes(), Sometimes()
    for module, level in zip(modules, ("O1", "O0"), strict=True):
        make_trainer(AmpPrecision(level, "float16"), accumulate_grad_batches=2).fit(module, loader(inputs(4)))
    for low, wide in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.allclose(low, wide, atol=2e-3)
        assert not torch.equal(wide, dict(Small().named_parameters())["up.weight"]) or wide.shape != (8, 4)


@pytest.mark.trainers
@pytest.mark.parametrize("level", ["O2", "O0"])
def test_what_changes_with_every_step_costs_few_captures(level: str) -> None:
    class Changing(Small):
        def __init__(self) -> None:
            super().__init__()
            self.outputs: list[Tensor] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            output = self(batch)
            self.outputs.append(output.detach())
            return (output @ output.t()).mean() * math.exp(-self.global_step)

    module, precision = Changing(), AmpPrecision(level, "float16")
    with pytest.warns(AmpWarning, match="training_step was captured anew in 6 calls"):
        make_trainer(precision).fit(module, loader(inputs(9)))
    assert len(module.outputs) == 9
    ops = [(row.op, row.precision) for row in precision.report().rows]
    if level == "O2":
        assert ops == [("linear", "float16"), ("relu", "float16"), ("linear", "float16")]
        trainer = make_trainer(precision, max_epochs=2)
        trainer.fit(module, loader(inputs(3)))
        assert len(precision.compiled["training_step"].graphs) == 1


# ------------------------------------------------------------------------------------------ what users complain of


def schedule(interval: str) -> Any:
    def make(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    return make


def test_an_overflow_leaves_scheduler_weights_and_optimizer_where_they_were() -> None:
    """Lightning-AI/pytorch-lightning#18828, #5558: the scheduler moved on skipped steps."""
    module, curve = Small(schedule("step")), Curve()
    before = copy.deepcopy(module.state_dict())
    scaler = DynamicLossScaler(init_scale=2.0**60, backoff_factor=2.0**-30)
    precision = AmpPrecision(dtype="float16", loss_scaler=scaler)
    trainer = make_trainer(precision, callbacks=[curve])
    trainer.fit(module, loader(inputs(1)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert trainer.optimizers[0].state_dict()["state"] == {}
    assert curve.rates == [1e-2]
    config = trainer.lr_scheduler_configs[0]
    assert (config.scheduler.last_epoch, config.frequency) == (0, 1)
    assert precision.metrics() == {"loss_scale": 2.0**30, "skipped_steps": 1.0}
    assert precision.step_was_skipped

    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(inputs(2)))
    assert precision.metrics() == {"loss_scale": 1.0, "skipped_steps": 2.0}
    assert curve.rates == [1e-2, 1e-2, 0.5e-2]
    assert not any(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_schedulers_that_move_with_epochs_are_left_alone() -> None:
    trainer = make_trainer(AmpPrecision(dtype="float16", loss_scaler=2.0**100))
    trainer.fit(Small(schedule("epoch")), loader(inputs(1)))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


@pytest.mark.parametrize(("algorithm", "fused"), [("norm", False), ("norm", True), ("value", True)])
def test_unscaled_gradients_are_clipped(algorithm: str, fused: bool) -> None:
    """Lightning-AI/pytorch-lightning#9694, #15501, #21435: scaled ones were clipped, or fused optimizers refused."""
    seen: list[float] = []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen.append(float(pl_module.up.weight.grad.norm()))

    module = Small(lambda m: torch.optim.SGD(m.parameters(), 1.0, fused=fused))
    batch = inputs(1)[0]
    wide = torch.autograd.grad(module.training_step(batch, 0), module.up.weight)[0]
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = make_trainer(
        AmpPrecision(dtype="float16"), gradient_clip_val=1e-2, gradient_clip_algorithm=algorithm, callbacks=[Look()]
    )
    trainer.fit(module, loader([batch]))
    assert seen == pytest.approx([float(wide.norm())], rel=1e-2)
    moved = torch.cat([(p.detach() - start[name]).flatten() for name, p in module.named_parameters()])
    assert float(moved.abs().max() if algorithm == "value" else moved.norm()) == pytest.approx(1e-2, rel=1e-3)


def test_fp16_parameters_train() -> None:
    """Lightning-AI/pytorch-lightning#5140, #7078: "Attempting to unscale FP16 gradients"."""
    module, precision = Small(lambda m: torch.optim.SGD(m.parameters(), 0.1)).half(), AmpPrecision(dtype="float16")
    before = module.up.weight.detach().clone()
    make_trainer(precision, gradient_clip_val=1.0).fit(module, loader([x.half() for x in inputs(4)]))
    assert not torch.equal(before, module.up.weight)
    assert module.up.weight.isfinite().all()


# ------------------------------------------------------------------------------------------ the user's module


def test_the_module_is_as_it_was_also_after_an_exception() -> None:
    class Stop(RuntimeError):
        pass

    class Failing(Small):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.held = {*self.__dict__}
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == 1:
                raise Stop

    module, trainer = Failing(), make_trainer(AmpPrecision(dtype="float16"))
    trainer.predict(module, loader(inputs(1)))  # leaves what Lightning itself leaves
    before = {**module.__dict__, "held": None}
    for _ in range(2):  # the iteration that was broken off does not disturb the next run
        with pytest.raises(Stop):
            trainer.fit(module, loader(inputs(3)))
        assert "training_step" in module.held
        after = dict(module.__dict__)
        assert after.keys() == before.keys()
        for name in before.keys() - {"held", "_current_fx_name"}:
            assert after[name] is before[name] or after[name] == before[name], name
        assert copy.deepcopy(trainer.precision_plugin).metrics()["skipped_steps"] == 0  # not in an iteration any more
        trainer.fit_loop.epoch_loop.reset()


def test_copies_made_while_training_are_plain(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copy(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            pl_module._trainer, kept = None, pl_module._trainer
            copies.append(copy.deepcopy(pl_module))
            copies.append(pickle.loads(pickle.dumps(pl_module)))
            pl_module._trainer = kept

    average = EMAWeightAveraging(decay=0.5)
    module = Small()
    make_trainer(AmpPrecision(dtype="float16"), callbacks=[Copy(), average]).fit(module, loader(inputs(2)))
    assert len(copies) == 4
    assert all("training_step" not in twin.__dict__ for twin in copies)
    assert torch.equal(copies[0].up.weight, copies[1].up.weight)


def test_one_module_in_several_runs() -> None:
    module, precision = Small(), AmpPrecision(dtype="float16")
    trainer = make_trainer(precision, fast_dev_run=True)
    trainer.fit(module, loader(inputs(2)))
    trainer.fit(module, loader(inputs(2)))
    assert len(precision.compiled["training_step"].graphs) == 1
    other = AmpPrecision("O1", "bfloat16")
    make_trainer(other).fit(module, loader(inputs(2)))
    assert other.report().by_precision["bfloat16"] == 3
    assert precision.report().by_precision["float16"] == 3


def test_a_module_under_torch_compile_is_low() -> None:
    module, precision = Small(), AmpPrecision(dtype="float16")
    make_trainer(precision).fit(torch.compile(module, backend="eager"), loader(inputs(2)))
    assert precision.report().by_precision["float16"] == 3
    assert type(module.training_step).__name__ == "function"  # Lightning leaves it as torch.compile has made it
