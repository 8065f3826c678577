"""Which products ``amp::cast_matmul`` computes on a GPU: the estimate behind the choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_compiler.cost.fused import (
    OF_TARGET,
    cast_seconds,
    fused_estimate,
    fused_seconds,
    library_seconds,
    shape_of,
    sustained,
    target_here,
)
from amp_compiler.cost.model import CACHE, STREAMED, SUSTAINED
from amp_compiler.cost.products import Product
from amp_compiler.cost.table import DEVICES
from amp_compiler.kernels import cast_matmul_estimate as kernel
from amp_compiler.kernels.cast_matmul_configs import TARGETS

SIZES = st.integers(1, 1024).map(lambda n: 16 * n)


def product(m: int, n: int, k: int) -> Product:
    return Product(m, n, k, aligned=(n, k))


def test_every_target_has_a_device() -> None:
    assert OF_TARGET.keys() == TARGETS.keys()


#: multiplications and additions in fp32 that a processor does in one clock
LANES = {"sm_80": 64, "sm_86": 128, "sm_90": 128, "sm_100": 128, "gfx942": 128}


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_estimate_and_the_cost_model_have_the_same_data_sheets(target: str) -> None:
    """The kernels are below the cost model and cannot ask it, so some figures are written twice."""
    device, rates = DEVICES[OF_TARGET[target]], kernel.RATES[target]
    assert TARGETS[target].processors == device.sms
    assert rates.bandwidth * kernel.GIGA == device.bandwidth
    assert rates.clock * kernel.GIGA == pytest.approx(device.peak["fp32"] / (2 * LANES[target] * device.sms), rel=2e-3)
    assert device.launch == kernel.LAUNCH
    assert STREAMED == kernel.STREAMED
    assert CACHE == kernel.CACHE
    assert sustained(target, "fp16") < 1
    if target == "sm_86":
        assert sustained(target, "fp16") == pytest.approx(SUSTAINED["fp16"])


@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_has_an_estimate(target: str) -> None:
    """None is faster than tensor cores at their rate; memory limits a few rows, and something else many."""
    few, many = product(16, 11008, 4096), product(1 << 14, 4096, 4096)
    assert fused_estimate(few, target, "right").limit == "memory"
    peak = DEVICES[OF_TARGET[target]].peak["fp16"] * sustained(target, "fp16")
    for config in TARGETS[target].configs:
        for side in ("left", "right"):
            for dtype in (torch.float16, torch.bfloat16):
                found = kernel.estimate(shape_of(many, side, dtype), target, config, 1)
                assert found.seconds >= many.flops / peak
                assert found.limit != "memory"
                assert found.programs >= 1


def test_bf16_takes_more_instructions_on_amd() -> None:
    """gfx942 has an instruction that rounds to fp16 and none that rounds to bf16."""
    shape = product(8192, 4096, 4096)
    config = TARGETS["gfx942"].configs[0]
    fp16, bf16 = (kernel.estimate(shape_of(shape, "right", d), "gfx942", config, 1)
                  for d in (torch.float16, torch.bfloat16))  # fmt: skip
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


def test_operands_that_are_not_aligned_get_what_the_kernel_will_choose() -> None:
    odd = fused_estimate(Product(4096, 4099, 4099, aligned=(4099, 4099)), "sm_90", "right")
    assert odd.config.takes_unaligned
    assert not fused_estimate(product(4096, 4096, 4096), "sm_90", "right").config.takes_unaligned


def test_without_a_gpu_there_is_no_target() -> None:
    assert target_here(torch.device("cpu")) is None
