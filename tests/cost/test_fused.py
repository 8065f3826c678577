"""Which products ``amp::cast_matmul`` computes on a GPU: the estimate behind the choice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_compiler.cost.fused import OF_TARGET, cast_seconds, fused_seconds, library_seconds, target_here
from amp_compiler.cost.products import Product
from amp_compiler.kernels.cast_matmul_configs import TARGETS

SIZES = st.integers(1, 1024).map(lambda n: 16 * n)


def product(m: int, n: int, k: int) -> Product:
    return Product(m, n, k, aligned=(n, k))


def test_every_target_has_a_device() -> None:
    assert OF_TARGET.keys() == TARGETS.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_rows_are_ours_and_many_the_librarys(target: str) -> None:
    """Few rows wait for the weight, which a cast reads and writes once more; many rows hide the cast."""
    few, many = product(16, 11008, 4096), product(1 << 16, 11008, 4096)
    assert fused_seconds(few, target, "right") < 0.7 * library_seconds(few, target, 11008 * 4096)
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
