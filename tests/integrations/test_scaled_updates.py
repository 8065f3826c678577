"""``ScaledUpdates``: in any order of backward, clipping and steps, the updates are those without loss scaling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, ScalerError
from amp_compiler.integrations.scaled_updates import ScaledUpdates

ACTIONS = st.tuples(st.sampled_from(["backward", "clip", "step", "zero"]), st.sampled_from([0, 1, 2]))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([0.5, 3.0]))]


def loss_of(params: list[nn.Parameter], which: int, factor: int) -> Tensor:
    """Of the first, the second, or both."""
    used = params if which == 2 else params[which : which + 1]
    return sum((p.square().sum() for p in used), torch.zeros(())) * factor


@given(st.lists(ACTIONS, max_size=14), st.booleans())
def test_any_order_is_right(program: list[tuple[str, int]], early: bool) -> None:
    """The scale changes with every update, by powers of two, so that no bit may differ; also if the update is made as
    soon as an optimizer has stepped."""
    ours, plain = parameters(), parameters()
    scaler = DynamicLossScaler(init_scale=2.0**4, growth_interval=1)
    updates = ScaledUpdates(scaler)
    mine = [torch.optim.SGD([p], 2.0**-6, momentum=0.5) for p in ours]
    theirs = [torch.optim.SGD([p], 2.0**-6, momentum=0.5) for p in plain]
    for number, (action, which) in enumerate(program, 1):
        pairs = [(mine[n], theirs[n], plain[n]) for n in ([0, 1] if which == 2 else [which])]
        if action == "backward":
            updates.begin_backward(mine)
            scaler.scale(loss_of(ours, which, number)).backward()
            loss_of(plain, which, number).backward()
        for one, other, parameter in pairs if action != "backward" else ():
            if action == "clip" and parameter.grad is not None:
                updates.unscale(one)
                nn.utils.clip_grad_value_(one.param_groups[0]["params"], 0.5)
                nn.utils.clip_grad_value_([parameter], 0.5)
            elif action == "step":
                updates.step(one)
                if early:
                    updates.finish()
                other.step()
            elif action == "zero":
                one.zero_grad()
                other.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(ours, plain, strict=True))
    updates.end()
    assert updates.skipped == 0


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_backward_without_loss_scaling(good: int) -> None:
    """Forgotten from the beginning, or after some updates that were right."""
    (weight, _), updates = parameters(), ScaledUpdates(scaler := DynamicLossScaler(), True, "trainer.backward(loss)")
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(good):
        updates.begin_backward()
        scaler.scale(weight.square().sum()).backward()
        updates.step(optimizer)
        optimizer.zero_grad()
    before = weight.detach().clone()
    weight.square().sum().backward()
    message = r"SGD come from a backward without loss scaling.*trainer\.backward\(loss\)"
    for act in (updates.unscale, updates.step):
        with pytest.raises(ScalerError, match=message):
            act(optimizer)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("clips", [False, True])
def test_a_backward_without_loss_scaling_into_gradients_that_were_set_to_zero(clips: bool) -> None:
    """The tensors of the gradients stay the same: only autograd knows that something was added."""
    (weight, _), updates = parameters(), ScaledUpdates(scaler := DynamicLossScaler())
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.5)

    def good() -> None:
        updates.begin_backward()
        with updates.scaling():
            scaler.scale(weight.square().sum()).backward()

    good()
    updates.step(optimizer)
    updates.step(optimizer)  # the same gradients twice: not a mistake
    optimizer.zero_grad(set_to_none=False)
    updates.step(optimizer)  # nor is a step by the momentum alone
    before = weight.detach().clone()
    weight.square().sum().backward()
    if clips:
        nn.utils.clip_grad_norm_([weight], 0.1)
    for _ in range(2):
        with pytest.raises(ScalerError, match="come from a backward without loss scaling"):
            updates.step(optimizer)
    assert torch.equal(weight, before)
    optimizer.zero_grad(set_to_none=False)
    good()
    updates.step(optimizer)
    assert not torch.equal(weight, before)


def test_one_of_two_backwards_without_loss_scaling() -> None:
    """A gradient that is the sum of a scaled and an unscaled one cannot be unscaled. Gradients that were looked at, and
    set to zero before the backward, are not a mistake."""
    weights, scaler = parameters(), DynamicLossScaler()
    updates, optimizer = ScaledUpdates(scaler), torch.optim.SGD(weights, 0.1)

    def good() -> None:
        updates.begin_backward([optimizer])
        with updates.scaling():
            scaler.scale(loss_of(weights, 2, 1)).backward()

    for to_none in (False, True):
        good()
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(weights, 2, 1).backward()
        optimizer.zero_grad(set_to_none=to_none)
        good()
        updates.step(optimizer)
        optimizer.zero_grad(set_to_none=to_none)
        good()
        loss_of(weights, 1, 1).backward()
        with pytest.raises(ScalerError, match="come from a backward without loss scaling"):
            updates.unscale(optimizer)
        good()
        with pytest.raises(ScalerError, match="come from a backward without loss scaling"):
            updates.step(optimizer)
        optimizer.zero_grad(set_to_none=to_none)
    good()
    scaler.scale(loss_of(weights, 1, 1)).backward()  # scaled by hand
    updates.step(optimizer)


def test_the_hooks_are_taken_away() -> None:
    weights, scaler = parameters(), DynamicLossScaler()
    updates, optimizer = ScaledUpdates(scaler), torch.optim.SGD(weights, 0.1)
    updates.begin_backward([optimizer])
    assert all(p._post_accumulate_grad_hooks for p in weights)
    updates.end()
    assert not any(p._post_accumulate_grad_hooks for p in weights)
