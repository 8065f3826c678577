"""Calls in memory: our kernels where the CPU wants them, fp32 copies that can be switched off, a pure artifact."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from amp_compiler import ArgumentError, convert_model, load_converted
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


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return self.fc(x) * 0 + self.n


@pytest.mark.usefixtures("wide")
def test_state_is_kept_between_calls() -> None:
    converted = convert_model(Counts().eval(), (torch.randn(3, 4),), dtype=F16)
    x = torch.randn(3, 4)
    with torch.inference_mode():
        assert converted(x)[0, 0].item() == 1
    assert converted(x)[0, 0].item() == 2
    with torch.no_grad():
        assert converted(x)[0, 0].item() == 3


@pytest.mark.usefixtures("wide")
def test_a_copy_has_a_state_of_its_own() -> None:
    x = torch.randn(3, 4)
    converted = convert_model(Counts().eval(), (x,), dtype=F16)
    assert [converted(x)[0, 0].item() for _ in range(2)] == [1, 2]
    copied = copy.deepcopy(converted)
    assert [copied(x)[0, 0].item() for _ in range(2)] == [3, 4]
    assert converted(x)[0, 0].item() == 3


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("low", LOW)
def test_a_call_with_sizes_that_were_checked_gives_what_the_first_one_gave(low: torch.dtype) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, scale: float, more: dict[str, Tensor | None]) -> dict[str, Any]:
            left, right = self.one(x), self.two(more["y"])
            return {"sum": (left + right).relu() * scale, "parts": [left, (right, x)], "none": more["z"]}

    args = (torch.randn(3, 6), 0.5, {"y": torch.randn(3, 6), "z": None})
    batch = {0: Dim("batch")}
    shapes = (batch, None, {"y": batch, "z": None})
    converted = convert_model(Branches().eval(), args, dtype=low, dynamic_shapes=shapes)
    module = converted.exported_program.module()
    for number in (3, 5, 3, 5, 3):
        given = (torch.randn(number, 6), 0.5, {"y": torch.randn(number, 6), "z": None})
        found, again = converted(*given), converted(*given)
        for result in (found, again):
            assert result["none"] is None
            assert result["parts"][1][1] is given[0]
            assert result["sum"].dtype is torch.float32
        flat = [pytree.tree_leaves(value) for value in (found, again, module(*given))]
        assert all(torch.equal(one, two) for one, two in zip(*flat[:2], strict=True) if one is not None)
        assert all(snr(one, two) > 30 for one, two in zip(flat[0], flat[2], strict=True) if one is not None)
    with pytest.raises(AssertionError, match="Guard failed"):
        converted(torch.randn(3, 6), 0.5, {"y": torch.randn(4, 6), "z": None})
    with pytest.raises((AssertionError, RuntimeError)):
        converted(args[0], 0.25, args[2])
    with pytest.raises(ArgumentError, match="nested"):
        converted(args[0], 0.5, args[2]["y"])


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


class Recurrent(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True, **more)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, (h, c) = self.lstm(x)
        return out, h, c


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("more", [{"num_layers": 2}, {"bidirectional": True, "bias": False}, {"proj_size": 3}], ids=str)
def test_an_lstm_runs_in_layers_of_ours(
    low: torch.dtype, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, x = Recurrent(**more).eval(), torch.randn(2, 5, 6)
    convert_model(model, (x,), dtype=low).save(tmp_path / "lstm.pt2")
    for setting, ours in (("wide", "proj_size" not in more), ("native", False)):
        monkeypatch.setenv("AMP_CPU_KERNELS", setting)
        converted = load_converted(tmp_path / "lstm.pt2")
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                found = converted(x)
            least = 30 if low is BF16 else 45
            assert all(snr(one, other) > least for one, other in zip(found, model(x), strict=True))
            assert any(event.key == "amp::lstm_layer" for event in profile.key_averages()) is ours
        assert foreign_ops(converted.exported_program) == []
