"""``explain_overflow`` names all that does not fit in a batch at once, so that one round of advice is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, TrainStep, compile_train_step


class Cubes(nn.Module):
    """Its cubes leave fp16, and so does every layer behind them, and the gradients of the layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Any:
        h = self.before(x)
        h = h * h * h
        return self.after(self.middle(h).relu())


def train(size: float, steps: int, model: type[nn.Module] = Cubes, **options: Any) -> tuple[TrainStep, bool]:
    torch.manual_seed(0)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    step = compile_train_step(network, F.mse_loss, optimizer, dtype=torch.float16, **options)
    x, y = size * torch.randn(8, 12), torch.randn(8, 1)
    updated = [bool(step(x, y).updated) for _ in range(steps)]
    return step, updated[-1]


@settings(max_examples=4, deadline=None)
@given(size=st.floats(30, 300))
@pytest.mark.filterwarnings("ignore")
def test_one_round_is_enough(size: float) -> None:
    step, updated = train(size, 1)
    assert not updated
    found = step.explain_overflow()
    advice = str(found).splitlines()[-1]
    assert advice.startswith("For all overflows of this batch together: ")
    assert f"exclude={list(found.exclude)}, black_list={list(found.black_list)}" in advice
    assert found.black_list == ("mul",)
    scaler: dict[str, Any] = {}
    if "loss_scaler=" in advice:
        scaler["loss_scaler"] = eval(advice.partition("loss_scaler=")[2].removesuffix("."))
        assert isinstance(scaler["loss_scaler"], DynamicLossScaler)
    _, updated = train(size, 60, exclude=found.exclude, black_list=found.black_list, **scaler)
    assert updated


def test_the_floor_of_the_scale_is_named() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).float() * 1e6

    step, _ = train(1.0, 1, Steep, loss_scaler=DynamicLossScaler(init_scale=4.0, min_scale=4.0))
    found = step.explain_overflow()
    assert found.phase == "backward"
    assert "With a scale of 4, the smallest that this scaler takes, gradients of this batch overflow." in str(found)
    scaler = eval(str(found).partition("fit with loss_scaler=")[2].removesuffix("."))
    assert train(1.0, 40, Steep, loss_scaler=scaler)[1]


def test_a_floor_that_is_too_high() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x).float() * 30

    step, updated = train(1.0, 1, Steep, loss_scaler=DynamicLossScaler(init_scale=2.0**16, min_scale=2.0**16))
    assert not updated
    assert str(step.explain_overflow()).endswith(
        "the scale of 65536 is the smallest that the scaler may take: lower its min_scale."
    )


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(10)), nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x.pow(5))


def test_too_many_for_a_list() -> None:
    step, _ = train(1e2, 1, Deep)
    assert "ops of this batch have values that float16 cannot hold" in str(step.explain_overflow())


def test_a_single_one_needs_no_second_line() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 1)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x.pow(5)) * 1e-9

    step, _ = train(10.0, 1, One, loss_scaler=1.0)
    found = step.explain_overflow()
    assert "together" not in str(found)
    assert found.exclude == ("layer",)
