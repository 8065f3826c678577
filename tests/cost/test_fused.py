"""Which products ``amp::cast_matmul`` computes on a GPU: the estimate behind the choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_compiler.cost.fused import (
    OF_TARGET,
    PROCESSORS,
    cast_seconds,
    fused_estimate,
    fused_seconds,
    library_seconds,
    sustained,
    target_here,
)
from amp_compiler.cost.products import Product
from amp_compiler.cost.table import DEVICES
from amp_compiler.kernels.cast_matmul_configs import TARGETS

SIZES = st.integers(1, 1024).map(lambda n: 16 * n)


def product(m: int, n: int, k: int) -> Product:
    return Product(m, n, k, aligned=(n, k))


def test_every_target_has_a_device() -> None:
    assert OF_TARGET.keys() == PROCESSORS.keys() == TARGETS.keys()


@pytest.mark.parametrize(
    ("target", "gigahertz"), [("sm_80", 1.41), ("sm_86", 1.70), ("sm_90", 1.98), ("sm_100", 1.98), ("gfx942", 2.1)]
)
def test_lanes_and_rates_give_the_clock_of_the_data_sheet(target: str, gigahertz: float) -> None:
    device = DEVICES[OF_TARGET[target]]
    clock = device.peak["fp32"] / (2 * PROCESSORS[target].lanes * device.sms)
    assert clock / 1e9 == pytest.approx(gigahertz, abs=0.01)


@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_has_an_estimate(target: str) -> None:
    """None is faster than tensor cores at their rate; memory limits a few rows, and something else many."""
    few, many = product(16, 11008, 4096), product(1 << 14, 4096, 4096)
    assert fused_estimate(few, target, "right").limit == "memory"
    peak = DEVICES[OF_TARGET[target]].peak["fp16"] * sustained(target, "fp16")
    for config in TARGETS[target].configs:
        for side in ("left", "right"):
            for dtype in (torch.float16, torch.bfloat16):
                found = fused_estimate(many, target, side, dtype, config)
                assert found.seconds >= many.flops / peak
                assert found.limit != "memory"
                assert found.programs >= 1


def test_bf16_takes_more_instructions_on_amd() -> None:
    """gfx942 has an instruction that rounds to fp16 and none that rounds to bf16."""
    shape = product(8192, 4096, 4096)
    config = TARGETS["gfx942"].configs[0]
    fp16, bf16 = (fused_estimate(shape, "gfx942", "right", d, config) for d in (torch.float16, torch.bfloat16))
    assert bf16.seconds >= fp16.seconds


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_rows_are_ours_and_many_the_librarys(target: str) -> None:
    """Few rows wait for the weight, which a cast reads and writes once more; many rows hide the cast. On sm_86 tensor
    cores are so slow, with fp32 sums, that our kernel hides its conversions behind them: there both are equal."""
    few, many = product(16, 11008, 4096), product(1 << 16, 11008, 4096)
    assert fused_seconds(few, target, "right") < 0.7 * library_seconds(few, target, 11008 * 4096)
    if target == "sm_86":
        assert fused_estimate(many, target, "right").limit == "tensor cores"
    else:
        assert fused_seconds(many, target, "right") > library_seconds(many, target, 11008 * 4096)


@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(TARGETS)), st.sampled_from(["left", "right"]))
def test_bounds(m: int, n: int, k: int, target: str, wide: str) -> None:
    """Nothing is faster than its launch, or than reading its operands once; a cast costs what it moves."""
    seconds = fused_seconds(product(m, n, k), target, wide)
    numbers = m * k if wide == "left" else k * n
    without = library_seconds(product(m, n, k), target, 0)
    assert seconds >= cast_seconds(target, numbers) * 4 / 6 * 0.99 - 3e-6
    assert library_seconds(product(m, n, k), target, numbers) == pytest.approx(without + cast_seconds(target, numbers))


def test_without_a_gpu_there_is_no_target() -> None:
    assert target_here(torch.device("cpu")) is None
