"""Which code is traced a second time, in low precision, and that the rest is rewritten as if it had been."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import AmpModule, AmpWarning, amp_compile, ir
from amp_compiler.capture import dtype_reads

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Reads(nn.Module):
    """Follows a dtype, names one, and uses a dtype's limit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        wide = h.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = wide.to(h.dtype)[:, :, None].squeeze(2)  # a dynamic size is sliced, a fixed one is not
        h = h.masked_fill(h < 0, torch.finfo(h.dtype).min)
        return self.second(self.dropout(torch.softmax(h, -1)))


class ByMode(Reads):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not self.training and h.dtype == torch.float16:
            h = h.clamp(-1000, 1000)
        return self.second(h)


def compiled(cls: type[nn.Module] = Reads, dtype: torch.dtype = BF16) -> AmpModule:
    torch.manual_seed(0)
    return amp_compile(cls(), level="O2", dtype=dtype, backend="eager")


def larger(fast: AmpModule) -> list[Tensor]:
    return [fast(torch.ones(2, 3, 8)), fast(torch.ones(4, 3, 8)), fast(torch.ones(4, 5, 8))]


def in_eval_mode(fast: AmpModule) -> list[Tensor]:
    torch.manual_seed(1)
    first = fast(torch.ones(2, 3, 8))
    fast.eval()
    return [first, fast(torch.ones(2, 3, 8))]


def decided(fast: AmpModule) -> list[list[tuple[str, Any, Any]]]:
    return [[(n.name, ir.decision(n), ir.origin(n)) for n in gm.graph.nodes] for gm in fast.graphs]


@pytest.mark.parametrize(("again", "dtype"), [(larger, BF16), (in_eval_mode, F16)], ids=["larger", "in eval mode"])
def test_code_that_passes_dtypes_on_needs_no_twin(
    again: Callable[[AmpModule], list[Tensor]], dtype: torch.dtype, twins: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fast = compiled(dtype=dtype)
    results = again(fast)
    assert twins == []
    assert len(fast.graphs) > 1
    with monkeypatch.context() as patch:
        patch.setattr(dtype_reads, "all_followed", lambda gm, lowered: False)
        other = compiled(dtype=dtype)
        expected = again(other)
    assert twins == [dtype] * len(fast.graphs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert decided(fast) == decided(other)
    assert [(r.name, r.modified, r.text) for r in fast.history] == [(r.name, r.modified, r.text) for r in other.history]
    assert str(fast.report()) == str(other.report())


def test_only_captures_that_branch_on_a_dtype_have_a_twin(twins: list[torch.dtype]) -> None:
    fast = compiled(ByMode, F16)
    with pytest.warns(AmpWarning, match="stays in fp32, because only in float16"):
        in_eval_mode(fast)
    assert twins == [F16]  # in training mode the code does not look at the dtype


def test_a_deleted_model_is_not_kept_alive() -> None:
    torch.manual_seed(0)
    model = Reads()
    fast, gone = amp_compile(model, level="O2", dtype=BF16, backend="eager"), weakref.ref(model.first)
    larger(fast)
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
