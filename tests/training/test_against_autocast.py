"""A compiled step against the loop with ``torch.autocast`` and ``torch.amp.GradScaler``, and fp32's accuracy."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, Policy, compile_train_step
from helpers import BF16, F16
from networks import NETWORKS, BertLike
from training_helpers import Loop, differences, fused_adamw, gradients, state, trains_like


def square(output: Tensor, targets: Any) -> Tensor:
    return output.float().pow(2).mean()


def small_encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return BertLike(layers=1, hidden=16, heads=2, intermediate=32, vocab=20, seq=6), (torch.randint(20, (2, 6)),)


# Each with another mixture of what a step can do; the optimizer is a fused one unless said otherwise.
@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("dense", F16, {"accumulate_steps": 3, "max_grad_norm": 0.1}),
        ("conv_bn", BF16, {"accumulate_steps": 2}),
        ("small_encoder", BF16, {"accumulate_steps": 2, "max_grad_norm": 1.0}),
        ("shared_weights", F16, {"accumulate_steps": 2}),
        ("custom_function", BF16, {}),
    ],
)
def test_equal_in_every_bit(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model, args = {**NETWORKS, "small_encoder": small_encoder}[name]()
    given = [(tuple(a.detach() * (1 + i) if a.is_floating_point() else a for a in args), None) for i in range(6)]
    step = trains_like(model, given, square, fused_adamw, dtype=dtype, policy=Policy.torch("cpu", dtype), **options)
    assert len(step.joint_graphs) == 1


def test_equal_over_overflows_and_growth() -> None:
    """fp16, a scale that starts too high: both skip the same updates and arrive at the same scale and weights."""
    model, args = NETWORKS["dense"]()
    twin, _ = NETWORKS["dense"]()
    x = args[0].detach()
    settings = {"init_scale": 2.0**24, "growth_interval": 3}
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (twin, model))
    scaler = torch.amp.GradScaler("cpu", **settings)
    loop = Loop(twin, square, theirs, F16, scaler=scaler, max_grad_norm=1.0)
    step = compile_train_step(
        model, square, ours, policy=Policy.torch("cpu", F16), loss_scaler=DynamicLossScaler(**settings),
        max_grad_norm=1.0,
    )  # fmt: skip
    skipped = []
    for _ in range(16):
        before = scaler.get_scale()
        loop(x)
        result = step(x)
        assert float(result.scale) == before
        assert bool(result.skipped) == (scaler.get_scale() < before)
        skipped.append(bool(result.skipped))
    assert step.scaler.get_scale() == scaler.get_scale()
    assert skipped[0]
    assert True in skipped[5:]
    assert False in skipped
    assert differences(state(model, ours), state(twin, theirs)) == []


def test_dropout_draws_the_same_masks() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.2))
    given = [(torch.randn(4, 8), None) for _ in range(4)]
    trains_like(model, given, square, dtype=BF16, seed=7, policy=Policy.torch("cpu", BF16), accumulate_steps=2)


# ------------------------------------------------------------------------------------------------ it trains


class Tiny(nn.Module):
    """The gradient of ``weight`` is about 1e-8 for each value: nothing in fp16, which ends at 6e-8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_a_gradient_that_underflows_trains_with_scaling() -> None:
    x = torch.full((1, 8), 1e-3)

    def loss(output: Tensor, targets: Any) -> Tensor:
        return output.float().sum() * 1e-9  # the gradient of the output is 0 in fp16

    moved = {}
    for scaler in (None, "dynamic"):
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e10)
        step = compile_train_step(model, loss, optimizer, level="O2", dtype=F16, loss_scaler=scaler)
        step(x)
        moved[scaler] = (0.1 - model.weight).mean().item()
    assert moved[None] == 0.0
    assert moved["dynamic"] == pytest.approx(1e-2, rel=1e-2)


SEEDS = range(5)
EPOCHS = 6


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets")
    data, labels = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1280], y[:1280], x[1280:], y[1280:]


def digits_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def accuracy(model: nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> float:
    """The mean over the seeds; one model, whose weights are drawn anew for each."""
    x, y, test_x, test_y = digits()
    right = 0.0
    for seed in SEEDS:
        torch.manual_seed(seed)
        model.load_state_dict(digits_network().state_dict())
        optimizer.state.clear()
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x)).split(128):
                step(x[rows], y[rows])
        with torch.no_grad():
            right += (model(test_x).argmax(1) == test_y).float().mean().item() / len(SEEDS)
    return right


def digits_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, fused=True)


@functools.cache
def fp32_accuracy() -> float:
    model = digits_network()
    optimizer = digits_optimizer(model)
    return accuracy(model, optimizer, Loop(model, F.cross_entropy, optimizer))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("level", ["O1", "auto", "O2"])
def test_digits_are_learned_as_well_as_in_fp32(level: str, dtype: torch.dtype) -> None:
    model = digits_network()
    optimizer = digits_optimizer(model)
    step = compile_train_step(model, F.cross_entropy, optimizer, level=level, dtype=dtype)
    assert fp32_accuracy() > 0.93
    assert accuracy(model, optimizer, step) > fp32_accuracy() - 0.01
    assert step.report().low_flops_share == 1.0


def test_the_model_itself_stays_fp32() -> None:
    """Weights, gradients, loss and its own forward; it can be called and copied as before."""
    model, args = NETWORKS["dense"]()
    keys, x = list(model.state_dict()), args[0].detach()
    step = compile_train_step(model, square, fused_adamw(model.parameters()), level="O2", dtype=F16)
    result = step(x)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {g.dtype for g in gradients(model).values()} == {torch.float32}
    assert result.loss.dtype == torch.float32
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == keys
    assert model(x).dtype == torch.float32
    assert torch.equal(model(x), twin(x))
