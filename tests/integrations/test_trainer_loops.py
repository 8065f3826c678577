"""The loop that the trainers are compared with does what its docstring says."""

import pytest
import torch
from integrations.trainer_loops import make_batches, make_model, own_loop

from amp_compiler import DynamicLossScaler


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.trainers), torch.float16])
def test_it_learns(dtype: torch.dtype) -> None:
    model = make_model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    curve = own_loop(model, optimizer, make_batches(1) * 40, dtype=dtype, accumulate=2, clip=1.0)
    assert len(curve.losses) == 40
    assert len(curve.scales) == 20
    assert curve.losses[-1] < 0.1 * curve.losses[0]


def test_a_skipped_update_leaves_weights_and_scheduler() -> None:
    model = make_model(layers=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = DynamicLossScaler(init_scale=2.0**40)
    curve = own_loop(model, optimizer, make_batches(1), dtype=torch.float16, scaler=scaler, scheduler=scheduler)
    assert curve.rates == [1e-2]
    assert curve.scales == [2.0**39]
    assert all(torch.equal(before[name], value) for name, value in curve.weights.items())
