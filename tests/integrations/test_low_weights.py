"""Models whose parameters are stored in bf16 or fp16, in every trainer: no update is lost to rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from integrations.hf_runs import fresh_state  # noqa: F401  (a fixture)
from integrations.lightning_modules import loader, make_trainer
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from transformers import TrainingArguments

from amp_compiler import AmpWarning, DynamicLossScaler, amp_compile
from amp_compiler.integrations.accelerate import prepare
from amp_compiler.integrations.lightning import AmpPrecision
from amp_compiler.integrations.transformers import AmpTrainer
from amp_compiler.training.masters import LowWeights

BF16, F16 = torch.bfloat16, torch.float16
RATE = 1e-3  # times Adam's sign: less than half of a step of bf16 beside 1, where layer norms begin


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.to(dtype)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.down(torch.relu(self.norm(self.up(x)))).float().square().mean()}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator).to(dtype) for _ in range(5)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)


def by_hand(dtype: torch.dtype, method: bool | str) -> Net:
    model = Net(dtype)
    with warnings.catch_warnings(action="ignore", category=AmpWarning):
        compiled, optimizer, weights = amp_compile(model, dtype=dtype), optimizer_of(model), LowWeights(method)
        scaler = DynamicLossScaler(enabled=dtype is F16)
        for x in inputs(dtype):
            scaler.scale(compiled(x)["loss"]).backward()
            scaler.unscale_(optimizer)
            with weights.updating(optimizer):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def with_lightning(model: nn.Module, dtype: torch.dtype, method: bool | str, folder: Path) -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    make_trainer(AmpPrecision(dtype=dtype, master_weights=method)).fit(Module(), loader(inputs(dtype)))


def with_fabric(model: nn.Module, dtype: torch.dtype, method: bool | str, folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=AmpPrecision(dtype=dtype, master_weights=method))
    prepared, optimizer = fabric.setup(model, optimizer_of(model))
    for x in inputs(dtype):
        fabric.backward(prepared(x)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def with_accelerate(model: nn.Module, dtype: torch.dtype, method: bool | str, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = prepare(accelerator, model, optimizer_of(model), dtype=dtype, master_weights=method)
    for x in inputs(dtype):
        accelerator.backward(prepared(x)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def with_transformers(model: nn.Module, dtype: torch.dtype, method: bool | str, folder: Path) -> None:
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=1, num_train_epochs=1, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip

    class InOrder(AmpTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    optimizers = optimizer_of(model), None
    InOrder(
        model, arguments, train_dataset=[{"x": x} for x in inputs(dtype)], optimizers=optimizers,  # type: ignore[arg-type]
        data_collator=lambda rows: rows[0], amp_dtype=dtype, amp_master_weights=method,
    ).train()  # fmt: skip


TRAINERS: dict[str, Callable[..., None]] = {
    "Lightning": with_lightning, "Fabric": with_fabric, "Accelerate": with_accelerate, "Trainer": with_transformers,
}  # fmt: skip


#: what ``make test`` runs; the rest is marked ``trainers``
DIAGONAL = [("Lightning", BF16, True), ("Fabric", BF16, "kahan"), ("Accelerate", F16, True),
            ("Trainer", BF16, "stochastic")]  # fmt: skip
CASES = [(trainer, *how) for trainer in TRAINERS
         for how in ((BF16, True), (F16, True), (BF16, "stochastic"), (BF16, "kahan"))]  # fmt: skip


def marked(values: Any, in_test: bool) -> Any:
    return pytest.param(*values, marks=() if in_test else pytest.mark.trainers, id=" ".join(map(str, values)))


@pytest.mark.parametrize(
    ("trainer", "dtype", "method"), [marked(case, case in DIAGONAL) for case in CASES]
)
def test_updates_are_those_of_our_own_loop(
    trainer: str, dtype: torch.dtype, method: bool | str, tmp_path: Path
) -> None:
    wanted, model = by_hand(dtype, method), Net(dtype)
    with warnings.catch_warnings(action="error", category=AmpWarning):  # there is nothing to warn about
        TRAINERS[trainer](model, dtype, method, tmp_path)
    assert int((model.norm.weight != 1).sum()) > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters(), strict=True))


@pytest.mark.parametrize("trainer", [marked((name,), name == "Fabric") for name in TRAINERS])
def test_without_them_updates_are_lost_and_a_warning_says_so(trainer: str, tmp_path: Path) -> None:
    model = Net(BF16)
    with pytest.warns(AmpWarning, match="small updates"):
        TRAINERS[trainer](model, BF16, False, tmp_path)
    assert int((model.norm.weight != 1).sum()) == 0


@pytest.mark.parametrize("together", [True, False])
def test_fabric_loads_masters_before_the_first_step(together: bool, tmp_path: Path) -> None:
    """With a module and an optimizer that are set up together, nothing is rounded; otherwise a warning says so."""

    def run(number: int, load: Path | None = None) -> tuple[dict[str, Any], Fabric]:
        precision, net = AmpPrecision(dtype=BF16), Net(BF16)
        fabric = Fabric(accelerator="cpu", devices=1, plugins=precision)
        if together:
            model, optimizer = fabric.setup(net, optimizer_of(net))
        else:
            model = fabric.setup_module(net)
            optimizer = fabric.setup_optimizers(optimizer_of(net))
        state = {"model": model, "optimizer": optimizer, "precision": precision}
        if load is not None:
            fabric.load(load, state)
        for x in inputs(BF16)[-number:] if load else inputs(BF16)[:number]:
            fabric.backward(model(x)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return state, fabric

    first, fabric = run(len(inputs(BF16)) - 2)
    fabric.save(tmp_path / "state.ckpt", first)
    if not together:
        with pytest.warns(AmpWarning, match=r"too early.*fp32 masters.*bfloat16.*fabric\.setup\(model, optimizer\)"):
            run(1, tmp_path / "state.ckpt")
        return
    with warnings.catch_warnings(action="error", category=AmpWarning):
        rest, _ = run(2, tmp_path / "state.ckpt")
    whole, _ = run(len(inputs(BF16)))
    for one, other in zip(rest["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.equal(one, other)
        held, wanted = (s["optimizer"].optimizer.state[p] for s, p in ((rest, one), (whole, other)))
        assert held["amp_master"].dtype is torch.float32
        assert all(torch.equal(held[key], wanted[key]) for key in wanted)
