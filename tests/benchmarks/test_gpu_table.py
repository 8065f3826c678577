"""What gpu.py computes from shapes, against a count by hand and by brute force."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark_helpers import load

pytest.importorskip("triton")

from amp_compiler.kernels.cast_matmul_configs import TARGETS
from amp_compiler.kernels.cast_matmul_estimate import Shape, choose
from amp_compiler.kernels.check_cases import PRODUCTS, matmul_case
from amp_compiler.kernels.check_compile import _loads, compile_case

gpu = load("gpu")
sizes = st.integers(1, 5000)


@given(m=sizes, k=sizes, n=sizes, target=st.sampled_from(sorted(TARGETS)), a=st.sampled_from([2, 4]))
def test_traffic_of_a_product(m: int, k: int, n: int, target: str, a: int) -> None:
    found = gpu.product(target, m, k, n, a, 2, 2)
    config, pieces = choose(Shape(m, n, k), target)
    sums = 8 * pieces * m * n if pieces > 1 else 0
    assert found.least == m * k * a + k * n * 2 + m * n * 2 + sums
    loads = 0  # of every program
    for row, column in ((r, c) for r in range(0, m, config.block_m) for c in range(0, n, config.block_n)):
        loads += (min(m, row + config.block_m) - row) * k * a + (min(n, column + config.block_n) - column) * k * 2
    assert found.most == loads + m * n * 2 + sums
    assert found.kernels == (1 if pieces == 1 else 2)


def test_one_layer_by_hand() -> None:
    """8192 rows, 768 in, 3072 out: one tile of bytes each, no K is split in the forward."""
    rows, inputs, outputs = 8192, 768, 3072
    weight, x, y = inputs * outputs, rows * inputs, rows * outputs
    ours, peer = (gpu.layer("sm_80", rows, inputs, outputs, fused=fused) for fused in (True, False))
    assert ours["forward"] == gpu.Traffic(1, 2 * x + 4 * weight + 4 * outputs + 2 * y, ours["forward"].most)
    assert peer["forward"].least == 6 * weight + 6 * outputs + 2 * x + 2 * weight + 2 * outputs + 2 * y
    assert peer["forward"].kernels == 3
    assert ours["weight's gradient"].least == 2 * x + 2 * y + 4 * weight
    assert peer["weight's gradient"].least == 2 * x + 2 * y + 2 * weight + 6 * weight
    more = ours["input's gradient"].least - peer["input's gradient"].least
    assert more == 2 * weight  # fp32 is read, and not the low copy


def launches(sizes: list[int], tensors: int, blocks: int) -> int:
    """The list as blocks, cut where a launch has `blocks` of them, or `tensors` tensors that end in it."""
    whole = [(tensor, chunk) for tensor, size in enumerate(sizes) for chunk in range(-(-size // gpu.FOREACH_CHUNK))]
    cuts, start = [0], 0
    for at, (tensor, _) in enumerate(whole):
        held = {owner for owner, _ in whole[start : at + 1]}
        last = at + 1 == len(whole) or whole[at + 1][0] != tensor
        if at + 1 - start == blocks or (len(held) == tensors and last) or at + 1 == len(whole):
            cuts.append(at + 1)
            start = at + 1
    assert all(a < b for a, b in pairwise(cuts))
    return len(cuts) - 1


@given(st.lists(st.integers(0, 5 * 65536), max_size=30), st.integers(1, 6), st.integers(1, 8))
def test_foreach_launches(sizes: list[int], tensors: int, blocks: int) -> None:
    assert gpu.foreach_launches(sizes, tensors, blocks) == launches(sizes, tensors, blocks)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];\nld.global.b32 %r5, [%rd2];", (1, 2)),
        ("@%p1 ld.global.L1::evict_last.v4.b32 {...}", (1, 1)),
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd9 + 0 ], 0x10, %r37;\ncp.async.commit_group;", (1, 1)),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd9 + 0 ], 0x4, %r37;", (0, 1)),
        ("buffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen\nglobal_load_dword v1, v2, s[0:1]", (1, 2)),
        ("ld.shared.v4.b32 {%r1}, [%r2];", (0, 0)),
    ],
)
def test_loads_are_counted(text: str, expected: tuple[int, int]) -> None:
    assert _loads(text) == expected


def test_what_a_kernel_became(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = compile_case(matmul_case("sm_80", TARGETS["sm_80"].configs[0], PRODUCTS[0]))
    assert result.unit == "mma.sync"
    assert result.instructions > 0
    assert 0 < result.loads[0] <= result.loads[1]
    assert result.binary > 1000
