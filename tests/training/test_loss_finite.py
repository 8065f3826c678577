"""The loss of a compiled step: fp32 whatever it is made of, told when it is not finite, and explained."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import TrainStep, compile_train_step
from amp_compiler.common.errors import AmpWarning
from amp_compiler.training.loss_watch import MESSAGE, LossWatch
from helpers import BF16, F16, LOW
from training_helpers import fused_adamw, sgd

HUGE = 3e38  # two of them are too much for fp32


def start(model: nn.Module, loss: Any, make: Any = sgd, dtype: torch.dtype = F16, **kwargs: Any) -> TrainStep:
    return compile_train_step(model, loss, make(model.parameters()), dtype=dtype, backend="eager", **kwargs)


class VAE(nn.Module):
    """The one of PyTorch's examples, narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.mean, self.log_variance = nn.Linear(784, 40), nn.Linear(40, 8), nn.Linear(40, 8)
        self.outside = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.inside(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        z = mean + torch.ones_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.outside(z)), mean, log_variance


def evidence(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    restored, mean, log_variance = output
    entropy = F.binary_cross_entropy(restored, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return entropy + divergence


@pytest.mark.parametrize("dtype", LOW, ids=["bf16", "f16"])
def test_the_loss_of_a_vae_is_a_number_and_moves(dtype: torch.dtype) -> None:
    """Its sum is 70,000, more than fp16 holds, and bf16 has one number in 512 there."""
    torch.manual_seed(0)
    model, x = VAE(), torch.rand(128, 784)
    before = float(evidence(model(x), x))
    step = start(model, evidence, lambda p: torch.optim.Adam(p, lr=1e-3), dtype, loss_scaler=8.0)
    results = [step(x, x) for _ in range(4)]
    losses = [float(r.loss) for r in results]
    assert all(bool(r.loss_finite) and not bool(r.skipped) for r in results)
    assert losses[0] == pytest.approx(before, rel=1e-3)
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4
    assert any(loss % 512 for loss in losses)


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.1 * F.cross_entropy(output, target, label_smoothing=0.1)


def test_a_weighted_sum_of_losses_is_not_rounded() -> None:
    """In bf16 it stood still for a dozen steps, which a scheduler takes for a plateau."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 4), torch.randn(16, 8), torch.arange(16) % 4
    step = start(model, smoothed, lambda p: torch.optim.SGD(p, lr=1e-3), BF16)
    losses = [float(step(x, y).loss) for _ in range(12)]
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 12


def pieces(model: nn.Module) -> nn.Module:
    """The same with a graph break, so that the step runs in pieces."""
    model.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return model


@pytest.mark.parametrize("wrap", [nn.Sequential, pieces], ids=["whole", "pieces"])
def test_targets_are_not_rounded(wrap: Any) -> None:
    """The difference of large numbers: a target rounded to fp16 would be off by 8."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    step = start(wrap(model), lambda output, target: (output - target).abs().mean(), loss_scaler=1.0)
    with warnings.catch_warnings(action="ignore", category=AmpWarning):
        result = step(torch.full((1, 2), 16384.0), torch.full((1, 2), 16387.0))
    assert float(result.loss) == 3.0
    row = next(r for r in step.report().rows if r.op == "sub")
    assert (row.precision, row.reason) == ("float32", "reads a target of the training step")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_of_low_values_is_fp32(shape: tuple[int, ...]) -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    step = start(model, lambda output, _: (output[:1, 0] * 1.001 + output[:1, 1] * 300).reshape(shape))
    result = step(torch.tensor([[1.0, 250.0]]))
    assert float(result.loss) == pytest.approx(75001.001, rel=1e-7)


# --------------------------------------------------------------------------------------------- not finite


def overflows(output: Tensor, target: Tensor) -> Tensor:
    rest = (target * HUGE).sum()  # here
    return output.mean() + rest


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [(sgd, {}), (fused_adamw, {}), (sgd, {"loss_scaler": None}), (fused_adamw, {"accumulate_steps": 2})],
)
def test_a_loss_that_is_not_finite_is_told_once_and_explained(make: Any, kwargs: dict[str, Any]) -> None:
    step = start(nn.Linear(2, 2), overflows, make, **kwargs)
    x, good, bad = torch.ones(1, 2), torch.zeros(2), torch.ones(2)
    size = kwargs.get("accumulate_steps", 1)
    with warnings.catch_warnings(action="error"):
        results = [step(x, good) for _ in range(size)]
    assert all(bool(r.loss_finite) for r in results)
    assert not step.explain_overflow()
    with pytest.warns(AmpWarning, match="loss of a training step was not finite") as told:
        results = [step(x, bad) for _ in range(3 * size)]
    assert [str(w.message) for w in told] == [MESSAGE]
    assert told[0].filename == __file__
    assert not any(bool(r.loss_finite) or bool(r.skipped) for r in results)
    assert bool(results[-1].updated)
    found = step.explain_overflow()
    assert (found.phase, found.op, found.value, found.parameters) == ("forward", "sum", "inf", ())
    assert "# here" in found.source


def test_a_skipped_update_is_no_reason_to_warn() -> None:
    step = start(nn.Linear(2, 2), lambda output, _: output.sum())
    with warnings.catch_warnings(action="error"):
        result = step(torch.full((1, 2), math.inf))
    assert (bool(result.skipped), bool(result.loss_finite)) == (True, False)


def test_the_flag_waits_on_another_device_until_the_host_reads_anyway() -> None:
    watch, true, false = LossWatch(torch.device("meta")), torch.tensor(True), torch.tensor(False)
    with warnings.catch_warnings(action="error"):
        watch.see(false, first=True)
        watch.end(true, host_has_waited=False)
        watch.see(true, first=True)
        watch.end(true, host_has_waited=False)
    watch.see(true, first=True)
    with pytest.warns(AmpWarning, match="not finite"):
        watch.end(true, host_has_waited=True)
    with warnings.catch_warnings(action="error"):
        watch.see(false, first=True)
        watch.end(true, host_has_waited=True)
        watch.look()


def test_a_checkpoint_is_a_read_that_is_made_anyway() -> None:
    step = start(nn.Linear(2, 2), overflows, fused_adamw)
    step._loss_watch._free_to_read = False  # as on a GPU
    with warnings.catch_warnings(action="error"):
        step(torch.ones(1, 2), torch.ones(2))
    with pytest.warns(AmpWarning, match="not finite"):
        step.state_dict()
