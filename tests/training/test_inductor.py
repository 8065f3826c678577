"""backend="inductor": the whole step compiled, forward and backward, with the same updates up to rounding."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_compiler import compile_train_step


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_inductor_updates_as_eager_does(accumulate_steps: int) -> None:
    """And it skips a batch that is not finite, and puts the statistics back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    batches = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(4)]
    trained = {}
    for backend in ("eager", "inductor"):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, fused=True)
        step = compile_train_step(
            own, F.mse_loss, optimizer, level="O0", backend=backend, accumulate_steps=accumulate_steps
        )
        for batch in batches:
            step(*batch)
        assert len(step.joint_graphs) == 1
        before = copy.deepcopy(own.state_dict())
        for _ in range(accumulate_steps):
            result = step(torch.full((6, 4), float("inf")), batches[0][1])
        assert bool(result.skipped)
        assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
        trained[backend] = own.state_dict()
    for name, value in trained["eager"].items():
        # fp32 on both sides: sums in another order, over four small batches
        torch.testing.assert_close(trained["inductor"][name], value, rtol=1e-4, atol=1e-5)
