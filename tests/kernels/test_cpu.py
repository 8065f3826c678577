"""The choice between torch's own low-precision kernels and ours, for each kind of work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import amp_compile, convert_model
from amp_compiler.kernels import build, capability, cpu
from amp_compiler.kernels.cpu import Work

BF16, F16 = torch.bfloat16, torch.float16


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.choose(torch.bfloat16, "wide").wide
    assert cpu.choose(torch.bfloat16, "python").wide
    assert not cpu.choose(torch.float16, "native").wide
    monkeypatch.setenv(cpu.SETTING, "fast")
    with pytest.raises(ValueError, match="AMP_CPU_KERNELS='fast' is not one of"):
        cpu.runs_wide(torch.float16)
    native, wide = cpu.measure(torch.bfloat16)
    assert native > 0
    assert wide > 0


@pytest.mark.parametrize(
    ("units", "measured", "wide"),
    [(False, (1.0, 2.0), True), (True, (1.0, 2.0), False), (True, (1.0, 0.95), False), (True, (1.0, 0.5), True)],
    ids=["no-units", "native-is-faster", "no-clear-difference", "wide-is-faster"],
)
def test_capability_decides_first(
    units: bool, measured: tuple[float, float], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_units", lambda dtype: units)
    monkeypatch.setattr(cpu, "measure", lambda dtype: measured)
    cpu.choose.cache_clear()
    chosen = cpu.choose(torch.bfloat16)
    cpu.choose.cache_clear()
    assert chosen.wide is wide
    assert ("no bfloat16 units" in chosen.reason) is (not units)
    assert ("measured" in chosen.reason) is units


# ------------------------------------------------------------------------------------- a CPU with bf16 units


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """This CPU as one with AVX512-BF16 and no AMX, whose products are faster natively. A test may add features."""
    features = [*capability.features(), "avx512_bf16"]
    features = [name for name in features if not name.startswith("amx")]
    monkeypatch.setenv(cpu.SETTING, "auto")
    monkeypatch.setattr(capability, "features", lambda: tuple(features))
    monkeypatch.setattr(cpu, "measure", lambda dtype: (1.0, 2.0))
    cpu.choose.cache_clear()
    yield features
    cpu.choose.cache_clear()


def test_each_kind_of_work_has_its_own_choice(units: list[str]) -> None:
    assert {work: cpu.runs_wide(BF16, work) for work in Work} == {
        Work.PRODUCT: False, Work.CONVOLUTION: False, Work.ATTENTION: True, Work.LSTM: True,
    }  # fmt: skip
    assert "only AMX" in cpu.reason(BF16, Work.ATTENTION)
    assert cpu.any_runs_wide(BF16)
    assert all(cpu.runs_wide(F16, work) for work in Work)  # no fp16 units


@pytest.mark.parametrize(("measured", "wide"), [((1.0, 2.0), False), ((2.0, 1.0), True)], ids=["native", "wide"])
def test_attention_is_measured_where_there_is_amx(
    units: list[str], measured: tuple[float, float], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    units.append("amx_bf16")
    monkeypatch.setattr(cpu, "measure_attention", lambda dtype: measured)
    assert cpu.runs_wide(BF16, Work.ATTENTION) is wide
    assert "measured attention" in cpu.reason(BF16, Work.ATTENTION)


def test_attention_can_be_measured() -> None:
    assert all(seconds > 0 for seconds in cpu.measure_attention(BF16))


@pytest.mark.parametrize("asked", ["native", "wide"])
def test_a_setting_holds_for_all_kinds_of_work(asked: str) -> None:
    assert {cpu.choose(BF16, asked, work).wide for work in Work} == {asked == "wide"}


@pytest.mark.parametrize(
    ("sizes", "takes"),
    [
        ((1, 9, 4096, 4096), True), ((1, 8, 4096, 4096), False), ((1, 1, 128, 128), False),
        ((1, 64, 128, 128), False), ((1, 65, 128, 128), True), ((64, 64, 64, 64), True), ((4, 64, 64, 64), False),
    ],
    ids=str,
)  # fmt: skip
def test_the_sizes_that_units_are_for(sizes: tuple[int, ...], takes: bool) -> None:
    assert cpu.takes_units(sizes) is takes


def test_a_symbolic_size_counts_as_large() -> None:
    sizes: list[Any] = []

    def look(gm: Any, inputs: Any) -> Any:
        sizes.extend(n for n in inputs if isinstance(n, torch.SymInt))
        return gm

    torch.compile(lambda x: x + 1, backend=look, dynamic=True)(torch.ones(3, 4))
    assert sizes
    assert cpu.takes_units((1, sizes[0], 4, 4))
    assert not cpu.takes_units((1, 4, sizes[0], 4))  # few rows, however long they are


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 512)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def kernels(model: Any) -> dict[str, str]:
    return {kernel.op: kernel.reason for kernel in model.report().kernels}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_model_gets_units_for_what_they_are_for(units: list[str], trains: bool) -> None:
    if not build.prepare().loaded:
        pytest.skip("the kernels cannot be compiled here")
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(4, 64, 64)
    fast = amp_compile(model, dtype=BF16, backend="eager")
    with torch.set_grad_enabled(trains):
        out = fast(x)
        if trains:
            out.sum().backward()
    found = kernels(fast)
    assert "amp::wide_scaled_dot_product_flash_attention_for_cpu" in found
    assert ("amp::wide_scaled_dot_product_flash_attention_for_cpu_backward" in found) is trains
    assert "amp::cast_matmul" not in found  # 256 rows
    assert torch.allclose(out, model(x), atol=0.05)


def test_few_rows_do_not_take_units(units: list[str]) -> None:
    if not build.prepare().loaded:
        pytest.skip("the kernels cannot be compiled here")
    model, x = nn.Linear(64, 512).eval(), torch.randn(1, 64)
    fast, converted = amp_compile(model, dtype=BF16, backend="eager"), convert_model(model, (x,), dtype=BF16)
    with torch.no_grad():
        outs = fast(x), converted(x)
    assert "too few rows" in kernels(fast)["amp::cast_matmul"]
    assert " cast_matmul(" in converted.history[-1].text
    assert torch.equal(*outs)
    assert torch.allclose(outs[0], model(x), atol=0.02)


def test_an_lstm_runs_compiled_beside_units(units: list[str]) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 16, batch_first=True), torch.randn(2, 5, 8)
    fast = amp_compile(model, dtype=BF16, backend="eager")
    out, _ = fast(x)
    assert "amp::lstm_layer" in kernels(fast)
    assert torch.allclose(out, model(x)[0], atol=0.02)
