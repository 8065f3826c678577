"""What is shown of a model is what would run: every op is run again on fakes, whatever the environment says."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import fx

from amp_compiler import Policy, ir
from amp_compiler.common.errors import VerifyError
from amp_compiler.inspection import inspect_model
from amp_compiler.passes import order
from amp_compiler.rewrite.base import Context

LAST = order.INFERENCE[-1]


def lies(gm: fx.GraphModule, ctx: Context) -> bool:
    """A value whose note says another dtype than torch gives: by the rules nobody sees it."""
    LAST.run(gm, ctx)
    (node,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.relu.default]
    node.meta["val"] = ir.retype(node.meta["val"], torch.float32)
    assert "AMP_VERIFY" not in os.environ
    return True


def test_verified_deeply_without_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMP_VERIFY")
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    policy = Policy(dtype=torch.bfloat16)
    inspect_model(model, (x,), policy=policy, graph="inference")
    monkeypatch.setattr(order, "INFERENCE", (*order.INFERENCE[:-1], dataclasses.replace(LAST, run=lies)))
    with pytest.raises(VerifyError, match=r"relu.*float32"):
        inspect_model(model, (x,), policy=policy, graph="inference")
