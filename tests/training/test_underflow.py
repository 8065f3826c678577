"""``step.explain_underflow()``: which gradients are flushed to zero, from which op on, and the scale that helps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import StaticLossScaler, TrainStep, compile_train_step
from amp_compiler.kernels import cpu


class Net(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.broken = nn.Linear(8, 8), nn.Linear(8, 1), broken

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(x)


def tiny(output: Tensor, targets: Tensor) -> Tensor:
    return 1e-9 * (output - targets).square().mean()


def step_of(scaler: StaticLossScaler | None, loss: object = tiny, broken: bool = False, **options: object) -> TrainStep:
    torch.manual_seed(0)
    model = Net(broken)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"dtype": torch.float16, **options}
    return compile_train_step(model, loss, optimizer, loss_scaler=scaler, **options)  # type: ignore[arg-type]


def run(step: TrainStep) -> TrainStep:
    step(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(4, 1))
    return step


@pytest.fixture(scope="module")
def flushed() -> TrainStep:
    """A step that has lost its gradients, for the tests that only ask."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu.SETTING, "wide")  # as in conftest.py
        return run(step_of(None))


@pytest.mark.parametrize("broken", [False, True])
def test_names_the_op_the_parameters_and_the_scale(flushed: TrainStep, broken: bool) -> None:
    step = run(step_of(None, broken=True)) if broken else flushed
    found = step.explain_underflow()
    assert found
    assert found.share > 0.9
    assert (found.op, found.module) == ("linear", "second")
    assert "test_underflow.py" in found.source
    assert {name for name, _ in found.parameters} == {
        "first.weight", "first.bias", "second.weight", "second.bias"}  # fmt: skip
    assert found.better_scale is not None
    assert f"A scale of {found.better_scale:g} would save them" in str(found)


def test_the_scale_that_is_named_saves_them(flushed: TrainStep) -> None:
    better = flushed.explain_underflow().better_scale
    assert better is not None
    assert not flushed.model.first.weight.grad.any()
    saved = run(step_of(StaticLossScaler(better)))
    found = saved.explain_underflow()
    assert not found
    assert found.share == 0
    assert f"At the present scale of {better:g} no gradient is flushed" in str(found)
    assert saved.model.first.weight.grad.any()


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_are_stored_low_are_named(flushed: TrainStep) -> None:
    torch.manual_seed(0)
    model = Net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run(compile_train_step(model, tiny, optimizer, loss_scaler=None, dtype=torch.float16))
    expected = {name for name, _ in flushed.explain_underflow().parameters}
    assert {name for name, _ in step.explain_underflow().parameters} == expected
    assert {p.name for p in step.health().parameters if p.flushed} == expected


def test_gradients_that_fit() -> None:
    step = run(step_of(None, nn.functional.mse_loss))
    assert "Without a loss scale no gradient is flushed to zero in float16" in str(step.explain_underflow())


def test_both_ends() -> None:
    """A loss whose gradients span more than fp16 holds."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        weights = torch.tensor([[3e4], [3e4], [1e-9], [1e-9]])
        return (weights * output).sum()

    found = run(step_of(None, loss)).explain_underflow()
    assert found
    assert found.better_scale is None
    assert "No larger scale helps" in str(found)


def test_nothing_low() -> None:
    step = run(step_of(None, level="O0"))
    assert "No gradient of this step is computed in float16" in str(step.explain_underflow())


def test_before_the_first_step() -> None:
    assert not step_of(None).explain_underflow()


def test_the_state_of_the_run_is_not_changed() -> None:
    step = run(step_of(StaticLossScaler(8.0)))
    before = copy.deepcopy(step.state_dict())
    step.explain_underflow()
    after = step.state_dict()
    for name, value in before["model"].items():
        assert torch.equal(value, after["model"][name])
    assert before["scaler"] == after["scaler"]
    other = run(step_of(StaticLossScaler(8.0)))
    for one in (step, other):
        run(one)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), other.model.parameters(), strict=True))
