"""Batches that a model does not take: the error says which input, what it is, and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import AmpWarning, CalibrationError, calibrate


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Linear(4, 4), nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.dtype is torch.int64:
            raise ValueError("the mask counts")
        return self.conv(self.embed(x)) * mask


X, MASK = torch.ones(3, 2, 4), torch.ones(3, 2, 4)
WRONG: dict[str, tuple[Any, list[str]]] = {
    "last size": ([((torch.ones(3, 2, 5), MASK), None)],
                  ["batch 1: x is float32[3, 2, 5], mask is float32[3, 2, 4]",
                   "embed (Linear) expects float32[..., 4] and is given float32[3, 2, 5]: RuntimeError"]),
    "a later batch": ([((X, MASK), None), ((torch.ones(3, 5, 4), MASK), None)],
                      ["batch 2: x is float32[3, 5, 4], but float32[3, 2, 4] in batch 1. ",
                       "conv (Conv1d) expects float32[N, 2, L] and is given float32[3, 5, 4]"]),
    "dtype": ([((X.half(), MASK), None)],
              ["x is float16[3, 2, 4]", "expects float32[..., 4] and is given float16[3, 2, 4]"]),
    "names": ([{"x": X, "msk": MASK}],
              ["it is Two.forward(x, mask), and the batch gives x float32[3, 2, 4], msk float32[3, 2, 4]"]),
    "number": ([((X, MASK, MASK), None)], ["too many positional arguments", "several inputs are a tuple"]),
    "targets for an input": ([(X, MASK)], ["missing a required argument: 'mask'", "((a, b), targets)"]),
    "not a tensor": ([(("text", MASK), None)], ["x is str", "embed (Linear)", "TypeError"]),
    "the model's own error": ([((X, MASK.long()), None)], ["ValueError: the mask counts (at", "test_refusal.py:"]),
    "no values": ([((X[:0], MASK[:0]), None)], ["nothing was measured: x is float32[0, 2, 4]"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_the_model_does_not_take(name: str) -> None:
    batches, words = WRONG[name]
    with pytest.raises(CalibrationError) as raised:
        calibrate(Two(), batches)
    for word in words:
        assert word in str(raised.value)


def test_a_function_and_a_loss() -> None:
    def double(x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)

    with pytest.raises(CalibrationError, match=r"batch 1: x is float32\[2, 4\]. RuntimeError"):
        calibrate(double, [torch.ones(2, 4)])

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).mean()

    with pytest.raises(CalibrationError, match=r"batch 1: the batch has no targets. TypeError: .* \(at .*refusal.py:"):
        calibrate(nn.Linear(4, 1), [torch.ones(2, 4)], loss)
    with pytest.raises(CalibrationError, match=r"batch 1: the targets are float32\[3\]. RuntimeError: The size"):
        calibrate(nn.Linear(4, 4), [(torch.ones(2, 4), torch.ones(3))], loss)


def test_a_batch_with_nan_is_reported() -> None:
    model, bad = nn.Linear(4, 1), torch.full((2, 4), float("nan"))
    with pytest.warns(AmpWarning, match="output of batch 2, which has NaN in its inputs, is NaN"):
        calibrate(model, [torch.ones(2, 4), bad])
    with pytest.warns(AmpWarning, match=r"the loss of batch 1 \(and of 1 more\) is NaN"):
        calibrate(model, [(torch.ones(2, 4), bad)] * 2, lambda output, targets: (output - targets).mean())


def test_a_model_in_low_precision_is_refused() -> None:
    with pytest.raises(CalibrationError, match=r"parameters of the model are bfloat16: .*model.float\(\)"):
        calibrate(nn.Linear(4, 1).bfloat16(), [torch.ones(2, 4, dtype=torch.bfloat16)])
