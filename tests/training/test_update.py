"""``take_step``: hooks, the profiler and whatever is put around ``optimizer.step`` see every step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amp_compiler.training.update import take_step


def weight() -> Tensor:
    made = torch.ones(2, requires_grad=True)
    made.grad = torch.ones(2)
    return made


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_the_step(fused: bool) -> None:
    ours, torchs = weight(), weight()
    for parameter, take in ((ours, take_step), (torchs, torch.optim.Adam.step)):
        optimizer = torch.optim.Adam([parameter], fused=fused)
        for _ in range(3):
            take(optimizer)
    assert torch.equal(ours, torchs)
    assert torch.is_grad_enabled()


def test_hooks_of_the_optimizer(seen: list[str]) -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    take_step(optimizer)
    handles = [optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
               optimizer.register_step_post_hook(lambda *_: seen.append("after"))]  # fmt: skip
    take_step(optimizer)
    assert seen == ["before", "after"]
    handles[0].remove()
    take_step(optimizer)
    assert seen == ["before", "after", "after"]


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers(register: Any, seen: list[str]) -> None:
    handle = register(lambda *_: seen.append("hook"))
    try:
        take_step(torch.optim.SGD([weight()], lr=0.1))
    finally:
        handle.remove()
    assert seen == ["hook"]


def test_a_hook_may_replace_the_arguments(seen: list[str]) -> None:
    def closure() -> Tensor:
        seen.append("closure")
        return torch.zeros(())

    optimizer = torch.optim.SGD([weight()], lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, closure), kwargs))
    assert torch.equal(take_step(optimizer), torch.zeros(()))
    assert seen == ["closure"]


def test_a_scheduler_sees_the_step() -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    take_step(optimizer)
    scheduler.step()  # which warns if no step came before it, and warnings are errors here


def test_a_step_that_was_replaced(seen: list[str]) -> None:
    class Own(torch.optim.SGD):
        pass

    def announced(step: Any) -> Any:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append("step")
            return step(*args, **kwargs)

        return run

    optimizer = Own([weight()], lr=0.1)
    Own.step = announced(Own.step)  # type: ignore[method-assign]
    take_step(optimizer)
    optimizer.step = announced(optimizer.step)  # type: ignore[method-assign]
    take_step(optimizer)
    assert seen == ["step"] * 3


def test_a_subclass_that_calls_its_base(seen: list[str]) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append("own")
            return super().step(closure)

    parameter = weight()
    optimizer = Own([parameter], lr=0.5)
    optimizer.register_step_post_hook(lambda *_: seen.append("hook"))
    take_step(optimizer)
    assert seen[0] == "own"
    assert "hook" in seen
    assert parameter.tolist() == [0.5, 0.5]


def test_the_profiler_sees_the_step() -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


def test_an_error_leaves_the_grad_mode() -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)

    def fails() -> Tensor:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        take_step(optimizer, fails)
    assert torch.is_grad_enabled()
