"""Casts that really run, forward and backward, against torch.autocast in the same process.

A cast is any write of float values to memory in another float dtype, whatever op does it
(``amp_compiler.inspect.profile``). Each side runs once before it is counted. That no network casts more often than
autocast at the same precisions is tested where their bits are compared (test_autocast_parity.py).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile
from amp_compiler.inspect.profile import CastCount
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


class HandWrittenGelu(nn.Module):
    """A layer whose GELU is written with `pow`, as GPT-2's is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.044715 * torch.pow(h, 3.0)))))


def test_a_gelu_by_hand_casts_no_more_than_autocast_and_the_white_list_spares_the_rest() -> None:
    model, args = HandWrittenGelu(), (torch.randn(8, 16),)
    policy = Policy.torch("cuda", BF16)  # unfolded, this is what autocast casts on a GPU
    unfolded = amp_compile(
        model, policy=policy, backend="eager", keep_output_dtypes=False, disable_passes=["fold_casts"]
    )
    theirs = training_casts(unfolded, model, args)
    ours = training_casts(amp_compile(model, dtype=BF16, backend="eager"), model, args)
    listed = amp_compile(model, dtype=BF16, backend="eager", white_list=["pow"])
    fewest = training_casts(listed, model, args)
    assert fewest.number < ours.number <= theirs.number
    assert fewest.bytes < ours.bytes <= theirs.bytes
    assert {r.op for r in listed.report().rows if r.precision == "float32"} == {"layer_norm"}  # its input is fp32


def test_the_report_counts_what_runs() -> None:
    """The totals of the report are those of the profiler, on a network whose casts are all nodes."""
    torch._dynamo.reset()
    model, args = NETWORKS["dense"]()
    fast = amp_compile(model, "auto", dtype=BF16, backend="eager")
    ran = training_casts(fast, model, args)
    report = fast.report()
    assert (report.casts, report.cast_bytes) == (ran.number, ran.bytes)
