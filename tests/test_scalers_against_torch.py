"""Our scaler and ``torch.amp.GradScaler`` side by side, through the same random calls: equal to the last bit.

Left out is what only one of them defines: the floor, fp16 gradients, a step without gradients (torch's fused path lets
it pass), fused SGD with momentum (torch keeps garbage after a skipped first step), a first scale that fp32 cannot hold.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from amp_compiler.scalers import DynamicLossScaler

KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
KINDS: tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
)
optimizers = st.sampled_from(range(len(KINDS)))


class World:
    """A scaler with five optimizers of two parameters each."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.params = [[nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor(3.0))] for _ in KINDS]
        self.optimizers = [kind(params) for kind, params in zip(KINDS, self.params, strict=True)]

    def loss(self, chosen: set[int], factor: float, both: bool) -> Tensor:
        """A loss with the gradient ``factor`` in one element, 1 to 3 in the others."""
        losses = [(w * torch.tensor([factor, 3.0])).sum() + b * b * both for w, b in (self.params[i] for i in chosen)]
        return torch.stack(losses).sum()

    def state(self) -> dict[str, Any]:
        state = self.scaler.state_dict()
        return {key: state[key] for key in KEYS}

    def tensors(self) -> list[Tensor]:
        found = []
        for optimizer, params in zip(self.optimizers, self.params, strict=True):
            for p in params:
                found += [p.detach(), p.grad if p.grad is not None else torch.tensor([])]
                found += [value for value in optimizer.state[p].values() if isinstance(value, Tensor)]
        return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, signed zeros too; any NaN equals any other."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32)
    )


class SideBySide(RuleBasedStateMachine):
    @initialize(
        scale=st.sampled_from([2.0**16, 1000.125, 1.5 * 2.0**127]),
        growth=st.sampled_from([2.0, 1.3]),
        backoff=st.sampled_from([0.5, 0.7]),
        interval=st.integers(1, 3),
    )
    def start(self, scale: float, growth: float, backoff: float, interval: int) -> None:
        self.ours = World(DynamicLossScaler(scale, growth, backoff, interval, min_scale=2.0**-126))
        self.torchs = World(torch.amp.GradScaler("cpu", scale, growth, backoff, interval))
        self.scaled = False
        self.unscaled: set[int] = set()

    def both(self, call: Callable[[World], Any]) -> bool:
        """The same call in both worlds. Do both raise, or neither? True if neither."""
        try:
            call(self.torchs)
        except (RuntimeError, AssertionError):
            with pytest.raises(RuntimeError):
                call(self.ours)
            return False
        call(self.ours)
        return True

    def has_gradients(self, index: int) -> bool:
        return self.ours.params[index][0].grad is not None

    @rule(
        chosen=st.sets(optimizers, min_size=1),
        factor=st.sampled_from([1.0, 2.5, 1e-3, 0.0, float("inf"), float("-inf"), float("nan"), 1e30]),
        both=st.booleans(),
    )
    def backward(self, chosen: set[int], factor: float, both: bool) -> None:
        losses = []
        for world in (self.ours, self.torchs):
            scaled = world.scaler.scale(world.loss(chosen, factor, both))
            losses.append(scaled.detach())
            scaled.backward()
        assert same(*losses)
        self.scaled = True

    @rule(index=optimizers)
    def zero_grad(self, index: int) -> None:
        self.both(lambda world: world.optimizers[index].zero_grad())

    @precondition(lambda self: any(map(self.has_gradients, range(len(KINDS)))))
    @rule(index=optimizers)
    def unscale(self, index: int) -> None:
        if self.has_gradients(index):
            self.both(lambda world: world.scaler.unscale_(world.optimizers[index]))
            self.unscaled.add(index)

    @rule(index=optimizers)
    def step(self, index: int) -> None:
        if self.has_gradients(index) or index in self.unscaled:
            self.both(lambda world: world.scaler.step(world.optimizers[index]))

    @rule()
    def update(self) -> None:
        if self.both(lambda world: world.scaler.update()):
            self.unscaled = set()

    @rule(value=st.sampled_from([1.0, 8.5, 2.0**20, 3e38]), as_tensor=st.booleans())
    def update_to(self, value: float, as_tensor: bool) -> None:
        if self.both(lambda world: world.scaler.update(torch.tensor(value) if as_tensor else value)):
            self.unscaled = set()

    @rule()
    def iteration(self) -> None:
        """What a loop does, so that long sequences of updates come up."""
        self.update_to(2.0**10, False)
        self.backward({0, 1}, 1.0, True)
        self.step(0)
        self.step(1)
        self.update()

    @rule(growth=st.sampled_from([2.0, 1.3, 4.0]), backoff=st.sampled_from([0.5, 0.7]), interval=st.integers(3, 4))
    def settings(self, growth: float, backoff: float, interval: int) -> None:
        """The interval stays above the count: below it torch's scaler would never grow again."""
        for world in (self.ours, self.torchs):
            world.scaler.set_growth_factor(growth)
            world.scaler.set_backoff_factor(backoff)
            world.scaler.set_growth_interval(max(interval, world.state()["_growth_tracker"] + 1))

    @rule()
    def exchange_states(self) -> None:
        """Each loads the state of the other."""
        ours, torchs = self.ours.scaler.state_dict(), self.torchs.scaler.state_dict()
        self.ours.scaler.load_state_dict(torchs)
        self.torchs.scaler.load_state_dict(ours)

    @rule()
    def pickle(self) -> None:
        def renew(world: World) -> None:
            world.scaler = pickle.loads(pickle.dumps(world.scaler))

        self.both(renew)

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "ours"):
            return
        a, b = self.ours, self.torchs
        assert a.state() == b.state()
        assert all(map(same, a.tensors(), b.tensors()))
        assert len(a.tensors()) == len(b.tensors())
        assert a.scaler.get_scale() == b.scaler.get_scale()


SideBySide.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestSideBySide = SideBySide.TestCase
