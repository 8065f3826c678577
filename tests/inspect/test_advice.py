"""``amp-compiler doctor`` times the kernel that a compiled graph would run, and says which it was."""

from __future__ import annotations

import pytest
import torch

from amp_compiler import amp_compile
from amp_compiler.inspect import advice
from amp_compiler.inspect.profile import count_ops
from amp_compiler.kernels import build, cpu

LOW = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "SIZE", 32)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("setting", ["wide", "python", "native"])
def test_what_is_timed_is_what_a_graph_runs(
    setting: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu.SETTING, setting)
    model, x = torch.nn.Linear(32, 32, bias=False), torch.ones(32, 32)
    fast = amp_compile(model, dtype=dtype)
    with torch.no_grad():
        fast(x)
        (product,) = [op for op in count_ops(lambda: fast(x)) if "mm" in op or "matmul" in op]
    speeds: list[advice.Speed] = []
    timed = count_ops(lambda: speeds.append(advice.measure("cpu", dtype)))
    assert speeds[0].kernel == product
    assert product in timed
    assert ("amp::cast_matmul" in timed) == (setting != "native")
    assert cpu.reason(dtype) in speeds[0].runs_on


def test_the_kernels_are_made_ready_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setenv(cpu.SETTING, "wide")
    monkeypatch.setattr(build, "prepare", lambda: done.append("prepare"))
    advice.look(done.append)
    assert done[:2] == ["compiling and loading the CPU kernels", "prepare"]
    assert sum("measuring" in text for text in done) >= 3


def test_times_are_told_against_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 10.0, 4.0, 20.0, 3.0])  # fp32; fp16 and bf16, native and ours
    monkeypatch.setenv(cpu.SETTING, "python")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(advice, "_best", lambda run, device: next(seconds))
    assert [s.of_fp32 for s in advice.look().speeds] == [1.0, 2.0, 1.5]


def padding(model: torch.nn.Module, *shape: int, gpus: tuple[advice.Gpu, ...] = ()) -> list[str]:
    fast = amp_compile(model, dtype=torch.bfloat16, backend="eager")
    fast(torch.ones(*shape))
    view = fast.history[-1].view
    return [text for text in advice.advise_model(view, gpus) if "multiple" in text]


def test_a_layer_multiplies_all_rows_of_its_input_at_once() -> None:
    """[4, 12, 24] is 48 rows, so that 12 is no dimension of the product."""
    assert padding(torch.nn.Linear(24, 24), 4, 12, 24) == []
    (told,) = padding(torch.nn.Linear(24, 24), 3, 3, 24)
    assert "pad 9 to 16 (" in told


def test_channels_are_padded_and_newer_gpus_are_told_more() -> None:
    (told,) = padding(torch.nn.Linear(24, 10), 8, 24, gpus=(advice.Gpu("A100", (8, 0), 0),))
    assert "pad 10 to 16 (" in told
    assert told.endswith("multiples of 64 are fastest.")
    (told,) = padding(torch.nn.Linear(24, 10), 8, 24, gpus=(advice.Gpu("V100", (7, 0), 0),))
    assert "64" not in told
