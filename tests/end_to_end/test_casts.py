"""Casts that really run, forward and backward, against torch.autocast in the same process.

A cast is any write of float values to memory in another float dtype, whatever op does it
(``amp_compiler.profile``). Each side runs once before it is counted. That no network casts more often than autocast
at the same precisions is tested where their bits are compared (test_autocast_parity.py).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from amp_compiler import amp_compile
from amp_compiler.profile import CastCount
from helpers import training_casts
from networks import NETWORKS, BertLike

BF16 = torch.bfloat16


def autocast_casts(model: nn.Module, args: tuple[Tensor, ...]) -> CastCount:
    twin = copy.deepcopy(model)

    def run(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            out: Tensor = twin(*inputs)
        return out

    return training_casts(run, twin, args)


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
