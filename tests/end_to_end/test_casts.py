"""Casts that really run, forward and backward, against torch.autocast in the same process.

A cast is any write of float values to memory in another float dtype, whatever op does it
(``amp_compiler.profile``). Each side runs once before it is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile
from amp_compiler.profile import CastCount, count_casts
from networks import NETWORKS, BertLike

BF16 = torch.bfloat16


def training_casts(run: Callable[..., Tensor], model: nn.Module, args: tuple[Tensor, ...]) -> CastCount:
    """Casts of a second forward and backward. The gradient that comes in has the output's dtype, as from a
    loss, so that no cast of the test's own is counted."""
    tangent: list[Tensor] = []

    def step() -> None:
        for tensor in (*model.parameters(), *args):
            tensor.grad = None
        out = run(*args)
        if not tangent:
            tangent.append(torch.ones_like(out))
        out.backward(tangent[0])

    step()
    return count_casts(step)


def autocast_casts(model: nn.Module, args: tuple[Tensor, ...]) -> CastCount:
    twin = copy.deepcopy(model)

    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            out: Tensor = twin(*inputs)
        return out

    # with mkldnn autocast runs one fused LSTM, another algorithm (DESIGN §2)
    with torch.backends.mkldnn.flags(enabled=not any(isinstance(m, nn.LSTM) for m in model.modules())):
        return training_casts(run, twin, args)


@pytest.mark.parametrize("name", NETWORKS)
def test_never_more_than_autocast_at_the_same_precisions(name: str) -> None:
    torch._dynamo.reset()
    model, args = NETWORKS[name]()
    theirs = autocast_casts(model, args)
    fast = amp_compile(model, policy=Policy.torch("cpu", BF16), backend="eager", keep_output_dtypes=False)
    ours = training_casts(fast, model, args)
    assert ours.number <= theirs.number, f"{ours} against {theirs}"
    assert ours.bytes <= theirs.bytes, f"{ours} against {theirs}"


def test_bert_at_O2_casts_much_less_than_autocast() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = BertLike(layers=4, hidden=128, heads=4, intermediate=512, seq=64)
    args = (torch.randint(1000, (8, 64)),)
    theirs = autocast_casts(model, args)
    ours = training_casts(amp_compile(model, "O2", dtype=BF16, backend="eager"), model, args)
    assert ours.number <= 0.65 * theirs.number, f"{ours} against {theirs}"
    assert ours.bytes <= 0.40 * theirs.bytes, f"{ours} against {theirs}"


def test_the_report_counts_what_runs() -> None:
    """The totals of the report are those of the profiler, on a network whose casts are all nodes."""
    torch._dynamo.reset()
    model, args = NETWORKS["dense"]()
    fast = amp_compile(model, "auto", dtype=BF16, backend="eager")
    ran = training_casts(fast, model, args)
    report = fast.report()
    assert (report.casts, report.cast_bytes) == (ran.number, ran.bytes)
