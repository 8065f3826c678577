"""``AmpPrecision`` in Lightning's Trainer: optimizers, logs, checkpoints and errors."""

from __future__ import annotations

import csv
import doctest
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.lightning_modules import Small, inputs, loader, make_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from amp_compiler import AmpWarning, ArgumentError, DynamicLossScaler, Policy, PolicyError, amp_compile
from amp_compiler.integrations import lightning
from amp_compiler.integrations.lightning import AmpPrecision


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
