"""Calls that do not fit the example inputs: an error that names the input, never other numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import convert_model
from amp_compiler.common.errors import ArgumentError, CaptureError
from helpers import F16


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x) * scale, x.exp().sum(-1)


X, SCALE = torch.full((2, 4), 10.0), torch.ones(4)


def test_another_dtype_is_refused() -> None:
    """exp of an fp16 input would overflow where the report says float32."""
    converted = convert_model(Two().eval(), (X,), {"scale": SCALE}, dtype=F16)
    assert converted(X, scale=SCALE)[1].isfinite().all()
    for model in (converted, converted.remove_casts()):
        with pytest.raises(ArgumentError, match=r"'x' is float16, .* for float32: write x.to\(torch.float32\)"):
            model(X.half(), scale=SCALE)
        with pytest.raises(ArgumentError, match="'scale' is int64"):
            model(X, scale=SCALE.long())


def test_other_inputs_than_in_the_example() -> None:
    converted = convert_model(Two().eval(), (X,), {"scale": SCALE}, dtype=F16)
    for args, kwargs in (((), {}), ((X, SCALE), {}), ((), {"x": X, "scale": SCALE}), ((X, X), {"scale": SCALE})):
        with pytest.raises(ArgumentError, match="converted for 1 input by position and scale by name"):
            converted(*args, **kwargs)
    with pytest.raises(ArgumentError, match="'x' must be a float32 tensor, not 3"):
        converted(3, scale=SCALE)
    with pytest.raises(ArgumentError, match="nested"):
        converted((X, X), scale=SCALE)


def test_code_that_cannot_be_exported_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum().item() > 0:
                return x * 2
            return x

    with pytest.raises(CaptureError, match=r"test_inputs.py:\d+ in forward: if x.sum\(\).item\(\) > 0:"):
        convert_model(Asks().eval(), (X,), dtype=F16)
    assert "def forward" not in capfd.readouterr().err  # torch prints the graph so far
