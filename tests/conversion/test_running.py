"""Calls in memory: our kernels where the CPU wants them, fp32 copies that can be switched off, a pure artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from amp_compiler import convert_model, load_converted
from amp_compiler.capture.program import foreign_ops
from amp_compiler.kernels import registry
from conversion_helpers import snr
from helpers import BF16, F16, LOW
from networks import NETWORKS


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_CPU_KERNELS", "wide")


def encoder() -> tuple[nn.Module, Tensor]:
    model, args = NETWORKS["encoder"]()
    return model.eval(), args[0].detach()


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("low", LOW)
def test_kernels_are_used_in_memory_and_never_in_the_artifact(low: torch.dtype, tmp_path: Path) -> None:
    model, x = encoder()
    converted = convert_model(model, (x,), dtype=low)
    with pytest.MonkeyPatch.context() as patch:  # as where there is no compiler
        patch.setattr(registry, "loaded", lambda: False)
        cached = converted(x)
    # two ways to round sums that agree to fp32: as near to fp32 as each other
    assert snr(cached, model(x)) > (30 if low is BF16 else 45)
    assert converted.cached_bytes > converted.details.stored_bytes
    assert foreign_ops(converted.exported_program) == []
    converted.cache_weights = False
    assert converted.cached_bytes == 0
    fused = converted(x)
    assert converted.cached_bytes == 0
    assert snr(fused, cached) > (40 if low is BF16 else 55)
    ran = {name: record.modified for record in converted.history if record.graph == "run" for name in [record.name]}
    assert ran["fuse_cast_matmul"]
    converted.save(tmp_path / "model.pt2")
    again = load_converted(tmp_path / "model.pt2")
    assert foreign_ops(again.exported_program) == []
    assert torch.equal(again(x), fused)


@pytest.mark.usefixtures("wide")
def test_sizes_stay_dynamic() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(1, 1), nn.Conv1d(4, 2, 1)).eval()
    shapes = {"input": {0: Dim("batch"), 2: Dim("length", min=4, max=100)}}
    converted = convert_model(model, (torch.randn(2, 3, 10),), dtype=BF16, dynamic_shapes=shapes)
    for batch, length in ((1, 4), (3, 17), (5, 100)):
        x = torch.randn(batch, 3, length)
        assert snr(converted(x), model(x)) > 30
    with pytest.raises(AssertionError, match="Guard failed"):
        converted(torch.randn(2, 3, 101))


@pytest.mark.usefixtures("wide")
def test_state_is_kept_between_calls() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(4))
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            return self.fc(x) * 0 + self.n

    converted = convert_model(Counts().eval(), (torch.randn(3, 4),), dtype=F16)
    x = torch.randn(3, 4)
    with torch.inference_mode():
        assert converted(x)[0, 0].item() == 1
    assert converted(x)[0, 0].item() == 2
    with torch.no_grad():
        assert converted(x)[0, 0].item() == 3


@pytest.mark.usefixtures("wide")
def test_each_pass_can_be_switched_off() -> None:
    model, x = encoder()
    off = ["widen_weights", "fuse_cast_matmul", "lower_kernels", "fold_casts"]
    converted = convert_model(model, (x,), dtype=BF16, disable_passes=off)
    assert snr(converted(x), model(x)) > 30
    assert converted.cached_bytes == 0
    assert not any(record.modified for record in converted.history if record.name in off)


def test_on_a_cpu_with_units_torchs_kernels_run() -> None:
    model, x = encoder()
    converted = convert_model(model, (x,), dtype=BF16)
    assert torch.equal(converted(x), converted.exported_program.module()(x))
    assert converted.cached_bytes == 0
