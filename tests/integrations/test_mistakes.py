"""What users of trainers get wrong: the error names what they called, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from integrations.hf_runs import fresh_state
from integrations.lightning_modules import Small, inputs
from integrations.test_transformers import Weighted, arguments
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer as HuggingFaceTrainer

from amp_compiler import CaptureError, ScalerError, fit
from amp_compiler.integrations.accelerate import prepare
from amp_compiler.integrations.lightning import AmpPrecision
from amp_compiler.integrations.transformers import AmpMixin, AmpTrainer

__all__ = ["fresh_state"]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1)


def test_keywords_of_lightning_accelerate_and_fit() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    calls: dict[str, Any] = {
        r"^AmpPrecision\(\) got an unexpected keyword argument 'levle'. Did you mean 'level'\?": lambda: AmpPrecision(
            levle="O1"  # type: ignore[call-arg]
        ),
        r"^prepare\(\) got an unexpected keyword argument 'levl'. Did you mean 'level'\?": lambda: prepare(
            Accelerator(cpu=True), net, optimizer, levl="O1"
        ),
        r"^prepare\(\) got .* 'black_lists'. Did you mean 'black_list'\?": lambda: prepare(
            Accelerator(cpu=True), net, optimizer, black_lists=["exp"]
        ),
        r"^fit\(\) got .* 'epoch'. Did you mean 'epochs'\?": lambda: fit(net, None, optimizer, [], epoch=2),
        r"^fit\(\) got .* 'max_grad_nrm'. Did you mean 'max_grad_norm'\?": lambda: fit(
            net, None, optimizer, [], max_grad_nrm=1.0
        ),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=message):
            call()
    assert "forward" not in vars(net)


def test_keywords_of_transformers(tmp_path: Path) -> None:
    class Logging(HuggingFaceTrainer):
        def __init__(self, *args: Any, log_everything: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Mine(AmpMixin, Logging):
        pass

    given = (Weighted(), arguments(tmp_path))
    with pytest.raises(TypeError, match=r"^AmpTrainer\(\) got .* 'amp_levl'. Did you mean 'amp_level'\?"):
        AmpTrainer(*given, amp_levl="O1")
    with pytest.raises(TypeError, match=r"^AmpTrainer\(\) got .* 'train_datasets'. Did you mean 'train_dataset'\?"):
        AmpTrainer(*given, train_datasets=[])
    with pytest.raises(TypeError, match=r"^Mine\(\) got .* 'log_everythin'. Did you mean 'log_everything'\?"):
        Mine(*given, log_everythin=True)
    with pytest.raises(TypeError, match=r"^amp_options got .* 'blacklist'. Did you mean 'black_list'\?"):
        AmpTrainer(*given, amp_options={"blacklist": ["exp"]})
    Mine(*given, log_everything=True, train_dataset=[])


def test_loss_backward_with_accelerate() -> None:
    net = nn.Linear(2, 2)
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepare(accelerator, net, torch.optim.SGD(net.parameters(), 0.1), dtype="float16")
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ScalerError, match=r"without loss scaling.*Call accelerator\.backward\(loss\) in the place of"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ScalerError, match=r"Call accelerator\.backward\(loss\)"):
        optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_loss_backward_with_lightning() -> None:
    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int = 0) -> None:
            self.optimizers().zero_grad()
            super().training_step(batch, index).backward()
            self.optimizers().step()

    trainer = Trainer(plugins=AmpPrecision(dtype="float16"), max_steps=1, accelerator="cpu", barebones=True)
    with pytest.raises(ScalerError, match=r"without loss scaling.*Call self\.manual_backward\(loss\)"):
        trainer.fit(Manual(), DataLoader(inputs(2), batch_size=None))


class Penalized(Small):
    """The norm of the gradient by the input, as in a WGAN-GP."""

    def penalty(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=-1) - 1).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Any:
        return self(batch).square().mean() + self.penalty(batch)


class Apart(Penalized):
    @torch.compiler.disable
    def penalty(self, x: Tensor) -> Tensor:
        return super().penalty(x)


def test_a_gradient_penalty() -> None:
    def run(module: Penalized) -> AmpPrecision:
        precision = AmpPrecision(dtype="bfloat16")
        trainer = Trainer(plugins=precision, max_steps=1, accelerator="cpu", barebones=True)
        trainer.fit(module, DataLoader(inputs(1), batch_size=None))
        return precision

    with pytest.raises(CaptureError, match=r"differentiates a gradient.*put @torch\.compiler\.disable above it"):
        run(Penalized(optimizers=sgd))
    precision = run(low := Apart(optimizers=sgd))
    assert precision.report().by_precision["bfloat16"] == 3
    wide = Penalized()
    wide.training_step(inputs(1)[0]).backward()
    for (name, start), end in zip(Penalized().named_parameters(), low.parameters(), strict=True):
        step = wide.get_parameter(name).grad
        torch.testing.assert_close((start - end) / 0.1, step, rtol=0.05, atol=0.02, msg=name)


def test_a_gradient_penalty_with_accelerate() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Penalized()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.training_step(x)

    accelerator = Accelerator(cpu=True)
    model = prepare(accelerator, Net(), dtype="bfloat16")
    with pytest.raises(CaptureError, match=r"put @torch\.compiler\.disable above it"):
        accelerator.backward(model(inputs(1)[0]))
