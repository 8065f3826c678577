"""Accelerate: what ``prepare`` gives is our own loop, bit for bit, and what users of Accelerate complain of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from integrations.hf_runs import ACCUMULATE, CLIP, DECAY, RATE, fresh_state, own_curve, same_weights
from integrations.trainer_loops import Curve, make_batches, make_model
from torch import Tensor, nn

from amp_compiler import ArgumentError, DynamicLossScaler, ParallelError, ScalerError, amp_compile
from amp_compiler.integrations.accelerate import amp_module, prepare

__all__ = ["fresh_state"]


def make_linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


INPUTS = torch.linspace(-1, 1, 12).reshape(3, 4)


def state_of(optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy(optimizer.state_dict())


def equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal_states, one, other))
    return bool(one == other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_equals_our_own_loop(dtype: torch.dtype) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    prepared, stepper, mover = prepare(accelerator, model, optimizer, scheduler, dtype=dtype)
    curve = Curve()
    for tokens, labels in make_batches(100):
        with accelerator.accumulate(prepared):
            loss = nn.functional.cross_entropy(prepared(tokens), labels)
            curve.losses.append(float(loss.detach()))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            stepper.step()
            mover.step()
            stepper.zero_grad()
        if accelerator.sync_gradients:
            curve.scales.append(accelerator.scaler.get_scale() if accelerator.scaler else 1.0)
            curve.rates.append(optimizer.param_groups[0]["lr"])
    own = own_curve(dtype)
    assert curve.losses == own.losses
    assert curve.scales == own.scales
    assert curve.rates == own.rates
    assert same_weights(own, model)
    low = "float16" if dtype is torch.float16 else "bfloat16"
    assert amp_module(prepared).report().by_precision[low] > 20
    assert accelerator.unwrap_model(prepared) is model


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_leaves_weights_optimizer_and_scheduler(fused: bool) -> None:
    model = make_linear()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    accelerator = Accelerator(cpu=True)
    scaler = DynamicLossScaler(init_scale=1024.0)
    prepared, stepper, mover = prepare(
        accelerator, model, optimizer, scheduler, dtype=torch.float16, loss_scaler=scaler
    )

    def update(factor: float) -> None:
        accelerator.backward(prepared(INPUTS).sum() * factor)
        stepper.step()
        mover.step()
        stepper.zero_grad()

    update(1.0)
    assert not accelerator.optimizer_step_was_skipped
    before, state, rate = copy.deepcopy(model.state_dict()), state_of(optimizer), optimizer.param_groups[0]["lr"]
    assert rate == 5e-3
    update(1e35)
    assert accelerator.optimizer_step_was_skipped
    assert stepper.step_was_skipped
    assert equal_states(dict(model.state_dict()), dict(before))
    assert equal_states(optimizer.state_dict(), state)
    assert optimizer.param_groups[0]["lr"] == rate
    assert accelerator.scaler.get_scale() == 512.0
    update(1.0)
    assert not accelerator.optimizer_step_was_skipped
    assert optimizer.param_groups[0]["lr"] == 2.5e-3
