"""Many skipped updates in a row: one warning, with the cause and what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, StaticLossScaler, TrainStep, compile_train_step
from amp_compiler.common.errors import AmpWarning
from helpers import F16
from training_helpers import bad, batches, differences, fused_adamw, sgd, state

(GOOD,) = batches(1, (4, 3), (4, 2))


class Overflows(nn.Module):
    """A product that fp16 cannot hold where the next layer reads it, if asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(self.first(x).abs() + 20 * (x.amax() > 3))  # here
        return self.last(h)


def warned(step: TrainStep, batch: Any, number: int) -> list[str]:
    """The warnings of so many calls with a batch, which all are skipped, or none if it is the good one."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = [step(*batch) for _ in range(number)]
    assert bool(results[-1].skipped) == (batch is not GOOD)
    assert all(w.filename == __file__ for w in seen)
    return [str(w.message) for w in seen if issubclass(w.category, AmpWarning)]


@pytest.mark.parametrize("make", [sgd, fused_adamw])
def test_one_warning_with_the_cause_for_each_time_that_it_happens(make: Any) -> None:
    model = Overflows()
    scaler = DynamicLossScaler(2.0**6, min_scale=2.0**-20)
    step = compile_train_step(
        model, F.mse_loss, make(model.parameters()), dtype=F16, backend="eager", loss_scaler=scaler
    )
    huge = (GOOD[0].clone().fill_(3.5), GOOD[1])
    warned(step, GOOD, 1)
    before = state(model)
    for scale in (2.0**-4, 2.0**-20):  # ten times half of it; after the other twenty, at the floor
        assert warned(step, huge, 9) == []
        (message,) = warned(step, huge, 20)
        assert "last 10 updates were skipped" in message
        assert f"loss scale is {scale:g}" in message
        first = str(step.explain_overflow()).splitlines()[0]
        assert first in message
        assert "exclude=['last']" in message
        assert "explain_overflow()" in message
        assert differences(state(model), before) == []  # to explain it changes nothing
        assert warned(step, GOOD, 1) == []
        before = state(model)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"loss_scaler": StaticLossScaler(8.0), "accumulate_steps": 2}, "loss scale is 8"),
        ({"loss_scaler": DynamicLossScaler(4.0, overflow_patience=20)}, "loss scale is 4"),
    ],
)
def test_other_scalers(kwargs: dict[str, Any], words: str) -> None:
    model = nn.Linear(3, 2)
    step = compile_train_step(model, F.mse_loss, sgd(model.parameters()), dtype=F16, backend="eager", **kwargs)
    size = kwargs.get("accumulate_steps", 1)
    (message,) = warned(step, bad(GOOD), 12 * size)
    assert "last 10 updates were skipped" in message
    assert words in message
    assert "Argument 0 of the model holds inf" in message


def test_an_explanation_that_fails_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    step = compile_train_step(model, F.mse_loss, sgd(model.parameters()), dtype=F16, backend="eager")

    def fails() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(step, "_explain", fails)
    (message,) = warned(step, bad(GOOD), 10)
    assert "could not be determined (MemoryError: no room)" in message


def test_on_another_device_the_count_waits_for_a_read_that_is_made_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimizer decides on the device, so a step never looks; a checkpoint reads from the device anyway."""
    model = nn.Linear(3, 2)
    step = compile_train_step(
        model, F.mse_loss, fused_adamw(model.parameters()), dtype=F16, backend="eager",
        loss_scaler=DynamicLossScaler(init_scale=1024.0),
    )  # fmt: skip
    assert not bool(step(*GOOD).skipped)
    assert step.scaler is not None
    monkeypatch.setattr(type(step.scaler._numbers), "on_host", lambda _: False)  # as on a GPU
    assert warned(step, bad(GOOD), 12) == []
    with pytest.warns(AmpWarning, match="last 12 updates were skipped"):
        step.state_dict()
