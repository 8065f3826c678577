"""``torch.vmap`` inside a model: plain ops with precisions of their own, and the gradients of the uncompiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

from amp_compiler import amp_compile
from helpers import BF16, F16, in_turn


class Masked(nn.Module):
    """Attention whose mask is made by a vmap of a vmap, as mask functions of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[0])
        mask = vmap(vmap(lambda a, b: a >= b, (None, 0)), (0, None))(i, i)
        h = self.fc(x)
        return (h @ h.t()).masked_fill(~mask, -1e9).softmax(-1)


class PerRow(nn.Module):
    """A product, an exponential and a branch of several outputs for each row."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.fc, self.mix, self.recompute = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 4), recompute

    def rows(self, x: Tensor) -> Tensor:
        both = vmap(lambda a: (a @ self.mix, (a * 0.1).exp()), out_dims=(0, 1))(x)
        return both[0] + both[1].t()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return self.fc(checkpoint(self.rows, h, use_reentrant=False) if self.recompute else self.rows(h))


class Scan(nn.Module):
    """A recurrence over time as an associative scan, which torch writes with vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan

        decay, new = torch.sigmoid(self.gate(x)), self.value(x)
        step = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        return associative_scan(step, (decay, new), dim=0, combine_mode="generic")[1]


MODELS = (Masked, PerRow, lambda: PerRow(recompute=True), Scan)


@pytest.mark.parametrize(("make", "way"), in_turn(MODELS, (("auto", BF16), ("O2", F16))))
def test_outputs_and_gradients(make: Any, way: tuple[str, torch.dtype]) -> None:
    torch.manual_seed(0)
    level, dtype = way
    model, x = make(), torch.randn(6, 8)
    compiled = amp_compile(model, level, dtype=dtype, backend="eager")

    def run(call: Any) -> list[Tensor]:
        model.zero_grad()
        out = call(x)
        out.pow(2).sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    theirs, ours = run(model), run(compiled)
    # a chain of about ten low ops; each rounding is at most eps / 2 of the largest value
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 10 * torch.finfo(dtype).eps * b.abs().max()
    report = compiled.report()
    assert report.not_captured == ()
    assert report.notes == ()
    assert report.by_precision[str(dtype).removeprefix("torch.")] >= 2


def test_ops_of_a_vmap_have_rows() -> None:
    compiled = amp_compile(PerRow(), "O2", dtype=BF16, backend="eager")
    compiled(torch.randn(6, 8))
    rows = {row.op: row for row in compiled.report().rows}
    assert rows["exp"].precision == "float32"
    assert rows["mm" if "mm" in rows else "matmul"].precision == "bfloat16"
    assert "vmap(" in rows["exp"].source
