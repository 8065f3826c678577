"""``AmpPrecision`` in Lightning's Trainer: the numbers of our own loop, and a module that is as it was."""

from __future__ import annotations

import copy
import csv
import doctest
import math
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from integrations.lightning_modules import Classifier, Curve, Small, adamw, inputs, loader, make_trainer
from integrations.trainer_loops import make_batches, make_model, own_loop
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from amp_compiler import AmpWarning, ArgumentError, DynamicLossScaler, Policy, PolicyError, amp_compile
from amp_compiler.integrations import lightning
from amp_compiler.integrations.lightning import AmpPrecision

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW)
def test_fifty_steps_equal_our_own_loop_bit_for_bit(dtype: torch.dtype) -> None:
    batches, curve, module = make_batches(50), Curve(), Classifier()
    trainer = make_trainer(
        AmpPrecision(dtype=dtype), accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[curve]
    )
    trainer.fit(module, loader(batches))
    model = make_model()
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
    with pytest.warns(AmpWarning, match="The model's parameters are float16"):
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


# ------------------------------------------------------------------------------------------ optimizers


class TwoOptimizers(Small):
    """Both losses first, then both steps; ``down`` is trained at every second batch."""

    def __init__(self) -> None:
        super().__init__(lambda m: [torch.optim.SGD(m.up.parameters(), 0.1), torch.optim.SGD(m.down.parameters(), 0.1)])
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        self.manual_backward(self(batch).square().mean())
        self.manual_backward(self.up(batch).square().mean() / 2)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())


def test_manual_optimization_with_two_optimizers() -> None:
    growing = DynamicLossScaler(2.0**4, growth_interval=1)  # the scale changes with every step
    module, precision = TwoOptimizers(), AmpPrecision(dtype="float16", loss_scaler=growing)
    trainer = make_trainer(precision, log_every_n_steps=1)
    trainer.fit(module, loader(inputs(4)))
    assert {row.precision for row in precision.report().rows if row.op == "linear"} == {"float16"}
    assert growing.get_scale() == 2.0**8
    assert float(trainer.callback_metrics["grad_norm"]) > 0

    wide = TwoOptimizers()
    up, down = wide.optimizers_of(wide)
    for number, batch in enumerate(inputs(4)):
        up.zero_grad()
        (wide(batch).square().mean() + wide.up(batch).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(wide.up.parameters(), 0.1)
        up.step()
        if number % 2:
            down.step()
            down.zero_grad()
    start = dict(Small().named_parameters())
    for name, weight in wide.named_parameters():
        way = (weight - start[name]).detach().norm()
        assert float((module.get_parameter(name) - weight).detach().norm() / way) < 0.02, name


class Closures(Small):
    def __init__(self, optimizers: Any) -> None:
        super().__init__(optimizers)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = self(batch).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        with optimizer.toggle_model():
            assert optimizer.step(closure=closure) is not None


@pytest.mark.trainers
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_closures_of_manual_optimization_are_low(dtype: str) -> None:
    def optimizers(module: nn.Module) -> Any:
        lbfgs, sgd = torch.optim.LBFGS(module.parameters(), 0.1), torch.optim.SGD(module.parameters(), 0.1)
        return lbfgs if dtype == "bfloat16" else sgd

    module, precision = Closures(optimizers), AmpPrecision(dtype=dtype)
    before = module.up.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        make_trainer(precision).fit(module, loader(inputs(3)))
    assert [row.precision for row in precision.report().rows if row.op == "linear"] == [dtype] * 2
    assert not torch.equal(before, module.up.weight)


def test_lbfgs_trains_in_bf16_and_fp16_says_why_not() -> None:
    def lbfgs(module: nn.Module) -> Any:
        return torch.optim.LBFGS(module.parameters(), 0.1, max_iter=3)

    module = Small(lbfgs)
    before = module.up.weight.detach().clone()
    make_trainer(AmpPrecision(dtype="bfloat16")).fit(module, loader(inputs(1)))
    assert not torch.equal(before, module.up.weight)
    with pytest.raises(ArgumentError, match=r'LBFGS evaluates the model several times.*dtype="bfloat16"'):
        make_trainer(AmpPrecision(dtype="float16")).fit(Small(lbfgs), loader(inputs(1)))


# ------------------------------------------------------------------------------------------ logs and checkpoints


def test_loggers_get_scale_skipped_steps_and_norm(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(AmpPrecision(dtype="float16"), logger=logger, log_every_n_steps=2, gradient_clip_val=1e-3)
    trainer.fit(Small(), loader(inputs(4)))
    with open(logger.experiment.metrics_file_path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "3"]
    assert [(row["loss_scale"], row["skipped_steps"]) for row in rows] == [("65536.0", "0.0")] * 2
    assert all(float(row["grad_norm"]) > 0.01 for row in rows)  # before clipping
    trainer = make_trainer(AmpPrecision(log=False), log_every_n_steps=1)
    trainer.fit(Small(), loader(inputs(1)))
    assert not trainer.callback_metrics


def test_a_checkpoint_holds_the_scaler(tmp_path: Path) -> None:
    class WithParameters(Small):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

    def scaler() -> DynamicLossScaler:
        return DynamicLossScaler(init_scale=2.0**10, growth_interval=3)

    def run(epochs: int, **options: Any) -> tuple[Any, AmpPrecision]:
        module, precision = WithParameters(), AmpPrecision(dtype="float16", loss_scaler=scaler())
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer = make_trainer(precision, max_epochs=epochs, enable_checkpointing=True, callbacks=[saving])
        trainer.fit(module, loader(inputs(2)), **options)
        return module, precision

    straight, precision = run(2)
    path = next(tmp_path.glob("epoch=0*"))
    resumed, again = run(2, ckpt_path=path)
    assert again.state_dict() == precision.state_dict()
    assert again.state_dict()["_growth_tracker"] == 1
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert WithParameters.load_from_checkpoint(path, width=9).hparams["width"] == 9
    other = AmpPrecision(dtype="float16")
    other.on_load_checkpoint({"MixedPrecision": {**torch.amp.GradScaler("cpu").state_dict(), "scale": 8.0}})
    assert other.metrics()["loss_scale"] == 8.0


# ------------------------------------------------------------------------------------------ errors


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="Unknown level 'O9'"):
        AmpPrecision("O9")
    with pytest.raises(ArgumentError, match=r"dtype must be torch\.float16 or torch\.bfloat16"):
        AmpPrecision(dtype="float32")
    with pytest.raises(ArgumentError, match="contradicts the policy's"):
        AmpPrecision(dtype="float16", policy=Policy("O2", torch.bfloat16))
    with pytest.raises(ArgumentError, match="Unknown loss_scaler 'static'"):
        AmpPrecision(loss_scaler="static")
    with pytest.raises(ValueError, match=r"`precision=16-mixed` and `plugins=AmpPrecision\(level='O2'"):
        make_trainer(AmpPrecision(), precision="16-mixed")
    with pytest.raises(ArgumentError, match=r"This module was already compiled.*compiled.original"):
        make_trainer(AmpPrecision()).fit(amp_compile(Small()), loader(inputs(1)))
    module = Small()
    module.training_step = amp_compile(module.training_step)  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match="The method training_step of this module was already compiled"):
        make_trainer(AmpPrecision()).fit(module, loader(inputs(1)))
    with pytest.raises(PolicyError, match=r"'dwn' matches no module.*Did you mean 'down'"):
        make_trainer(AmpPrecision(exclude=["dwn"])).fit(Small(), loader(inputs(1)))
    with pytest.raises(ArgumentError, match="nothing to report yet"):
        AmpPrecision().report()


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in lightning._PACKAGES:
        monkeypatch.setitem(sys.modules, f"{name}.plugins.precision", None)
    with pytest.raises(ImportError, match=r'needs Lightning: pip install "amp-compiler\[lightning\]"'):
        lightning._plugin_class()


def test_the_example_of_the_docstring_runs() -> None:
    (test,) = [t for t in doctest.DocTestFinder().find(AmpPrecision, "AmpPrecision") if t.examples]
    result = doctest.DocTestRunner().run(test, clear_globs=False)  # Dynamo keeps names in the globals
    assert (result.failed, result.attempted > 5) == (0, True)
