"""amp_compile with the kernels of a CPU that has no low-precision units: the same numerics, within their rounding."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

from amp_compiler import Policy, amp_compile, count_casts
from amp_compiler.inspect.profile import count_ops
from amp_compiler.kernels import cast_matmul, cpu
from helpers import BF16, F16, LOW
from networks import NETWORKS

#: an op of each kind: products, convolution, attention, recurrence, shared weights, a custom function
NAMES = ("dense", "conv_bn", "encoder", "gru", "shared_weights", "custom_function", "llama")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "wide")


def trained(name: str, dtype: torch.dtype, level: str, **options: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, args = NETWORKS[name]()
    run = model if level == "fp32" else amp_compile(model, level=level, dtype=dtype, **options)
    out = run(*(a.detach() for a in args)).float()
    out.pow(2).mean().backward()
    return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / (exact.norm() + 1e-12))


@pytest.mark.parametrize("name", NAMES)
def test_as_near_to_fp32_as_the_native_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels round less often than torch's own, never more: at most half as far again from fp32 as these."""
    dtype = BF16 if NAMES.index(name) % 2 else F16
    exact, exact_grads = trained(name, dtype, "fp32")
    ours, our_grads = trained(name, dtype, "O2")
    monkeypatch.setenv(cpu.SETTING, "native")
    native, native_grads = trained(name, dtype, "O2")
    eps = torch.finfo(dtype).eps
    assert error(ours, exact) <= 1.5 * error(native, exact) + eps
    assert len(our_grads) == len(exact_grads)
    for mine, theirs, true in zip(our_grads, native_grads, exact_grads, strict=True):
        assert mine.dtype is torch.float32
        assert error(mine, true) <= 1.5 * error(theirs, true) + eps


@pytest.mark.parametrize("dtype", LOW)
def test_no_low_product_is_left_to_torch(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    compiled, x = amp_compile(model, level="O2", dtype=dtype), torch.randn(3, 4)
    compiled(x).sum().backward()
    ops = count_ops(lambda: compiled(x).sum().backward())
    assert ops["amp::cast_matmul"] == 5
    assert not {"aten::mm", "aten::addmm"} & set(ops)
    casts = count_casts(lambda: compiled(x).sum().backward())
    assert not any(name.startswith("amp::") for name in casts.by_op)


def test_conversions_inside_a_kernel_are_counted_apart() -> None:
    compiled, x = amp_compile(nn.Conv2d(1, 2, 3), level="O2", dtype=BF16), torch.randn(2, 1, 4, 4)
    compiled(x)
    casts = count_casts(lambda: compiled(x))
    assert casts.inside[0] == 4  # two operands, the bias, the result
    assert not any(name.startswith("amp::") for name in casts.by_op)


def test_switched_off_by_name() -> None:
    model, x = nn.Linear(4, 8), torch.randn(3, 4)
    compiled = amp_compile(model, dtype=BF16, disable_passes=["fuse_cast_matmul", "lower_kernels"])
    compiled(x)
    assert "amp::cast_matmul" not in count_ops(lambda: compiled(x))


def test_with_autocasts_policy_they_are_off() -> None:
    model, x = nn.Linear(4, 8), torch.randn(3, 4)
    compiled = amp_compile(model, policy=Policy.torch("cpu", BF16), keep_output_dtypes=False)
    with torch.autocast("cpu", BF16):
        expected = copy.deepcopy(model)(x)
    assert torch.equal(compiled(x), expected)


def test_inference_folds_weights_into_the_product() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    compiled = amp_compile(model, level="O2", dtype=F16)
    with torch.no_grad():
        compiled(x)
        assert count_casts(lambda: compiled(x)).number == 1  # the result, back to fp32


def test_the_report_says_which_kernels_run_and_why() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    compiled = amp_compile(model, level="O2", dtype=BF16)
    compiled(torch.randn(2, 1, 4, 4)).sum().backward()
    report = compiled.report()
    counts = {k.op: 0 for k in report.kernels}
    for kernel in report.kernels:
        counts[kernel.op] += kernel.count
        assert "AMP_CPU_KERNELS=wide" in kernel.reason
    assert counts == {"amp::cast_matmul": 3, "amp::wide_convolution": 1, "amp::wide_convolution_backward": 1}
    assert any("rounds an operand as it reads it" in k.reason for k in report.kernels)
    assert "kernel: 1 × amp::wide_convolution: computed in float32" in str(report)
    assert '"op": "amp::cast_matmul"' in report.to_json()


def test_scratch_memory_is_bounded_told_and_given_back() -> None:
    """Operands while they are fp32 lie in memory that is kept for the next call, but not what is large."""
    fast, x = amp_compile(nn.Conv2d(8, 8, 3, padding=1), dtype=F16), torch.randn(1, 8, 64, 64)

    def in_a_thread() -> None:
        for size in (64, 32, 64):
            fast(x[..., :size])
        during.append(fast.report())

    fast(x)
    before, during = fast.report().scratch_bytes, []
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    (told,) = during
    assert before > 0
    assert before <= told.scratch_bytes <= before + 4 * x.numel() * x.element_size(), "once for each thread and use"
    assert f"kernels keep in this process, for all models: {told.scratch_bytes / 2**20:.1f} MiB" in str(told)
    for _ in range(500):  # the thread's memory goes when the system ends it, which may be later than join() returns
        if fast.report().scratch_bytes == before:
            break
        time.sleep(0.01)
    assert fast.report().scratch_bytes == before
    fast(torch.randn(1, 8, 1600, 1600))  # 82 MB, more than what is kept
    assert fast.report().scratch_bytes <= before + cast_matmul.KEPT
