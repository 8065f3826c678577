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

from amp_compiler import compile_train_step
from amp_compiler.common.errors import ArgumentError
from amp_compiler.training.scalers import DynamicLossScaler, StaticLossScaler

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


# ------------------------------------------------------------------------- what torch's own tests ask of a GradScaler


def torchs(*args: Any, **kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", *args, **kwargs)


MAKERS = pytest.mark.parametrize("make", [torchs, DynamicLossScaler], ids=["torch", "ours"])


def test_it_is_a_grad_scaler() -> None:
    for scaler in (DynamicLossScaler(), StaticLossScaler(2.0)):
        assert isinstance(scaler, torch.amp.GradScaler)
        public = [name for name in dir(torch.amp.GradScaler) if not name.startswith("_")]
        assert all(callable(getattr(scaler, name)) for name in public)


@MAKERS
def test_nested_iterables(make: Any) -> None:
    scaler, one = make(8.0), torch.ones(1)
    scaled = scaler.scale([one, (one * 2, [one * 3, (one * 4,)])])
    assert scaled == [8.0, (16.0, [24.0, (32.0,)])]
    assert isinstance(scaled[1], tuple)
    assert [t.item() for t in scaler.scale(t for t in (one, one * 2))] == [8.0, 16.0]
    with pytest.raises(ValueError, match="ensor"):
        scaler.scale(3.0)


@MAKERS
@pytest.mark.parametrize("lazy", [True, False])
def test_pickles_and_states(make: Any, lazy: bool) -> None:
    """A used scaler and one that was never called, through pickle and through a state dict."""
    scaler = make(3.0, 4.0, 0.5, 2)
    if not lazy:
        scaler.scale(torch.ones(1))
    again = pickle.loads(pickle.dumps(scaler))
    loaded = make(7.0, 8.0, 0.25, 9)
    loaded.load_state_dict(scaler.state_dict())
    for other in (again, loaded):
        assert type(other) is type(scaler)
        assert (other.get_scale(), other.get_growth_factor(), other.get_backoff_factor()) == (3.0, 4.0, 0.5)
        assert (other.get_growth_interval(), other._get_growth_tracker(), other.is_enabled()) == (2, 0, True)
        assert (other._get_scale_async() is None) or other._get_scale_async().item() == 3.0


@MAKERS
def test_a_gradient_penalty(make: Any) -> None:
    """``autograd.grad`` of a scaled loss, unscaled by hand, and its norm in the loss."""
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    scaler, optimizer = make(2.0**10), torch.optim.SGD([w], lr=0.5)
    loss = (w**2).sum()
    (gradient,) = torch.autograd.grad(scaler.scale(loss), [w], create_graph=True)
    penalty = (gradient / scaler.get_scale()).pow(2).sum().sqrt()
    scaler.scale(loss + penalty).backward()
    scaler.unscale_(optimizer)
    expected = 2 * torch.tensor([1.0, 2.0]) + 2 * torch.tensor([1.0, 2.0]) / 5**0.5
    torch.testing.assert_close(w.grad, expected)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(w.detach(), torch.tensor([1.0, 2.0]) - 0.5 * expected)


@MAKERS
@pytest.mark.parametrize("fused", [False, True])
def test_several_optimizers_and_clipping(make: Any, fused: bool) -> None:
    """Two optimizers, one of which overflows in the second round, gradients clipped after unscaling."""
    a, b = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([1.0]))
    first, second = torch.optim.SGD([a], lr=1.0, fused=fused), torch.optim.SGD([b], lr=1.0, fused=fused)
    scaler = make(4.0, growth_interval=1)
    for factor in (1.0, float("inf")):
        first.zero_grad()
        second.zero_grad()
        scaler.scale((a**2).sum() / 2).backward(retain_graph=True)
        scaler.scale((b * factor).sum()).backward()
        scaler.unscale_(first)
        nn.utils.clip_grad_norm_([a], 1.0)
        scaler.step(first)
        scaler.step(second)
        states = scaler._per_optimizer_states
        assert [states[id(o)]["stage"].name for o in (first, second)] == ["STEPPED", "STEPPED"]
        assert [sum(float(f) for f in scaler._found_inf_per_device(o).values()) for o in (first, second)] == [
            0.0,
            float(factor > 1),
        ]
        scaler.update()
    assert b.item() == 0.0
    torch.testing.assert_close(a.detach(), torch.tensor([1.8, 2.4]))
    assert scaler.get_scale() == 4.0  # twice as large, then half of that


@MAKERS
def test_disabled(make: Any) -> None:
    """Everything is passed through; nothing is checked and nothing is saved."""
    scaler = make(enabled=False)
    assert not scaler.is_enabled()
    losses = [torch.ones(1), (torch.ones(2),)]
    assert scaler.scale(losses) is losses
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([w], lr=0.5)
    for _ in range(2):  # no order is asked for
        scaler.update()
        scaler.unscale_(optimizer)
    w.grad = torch.tensor([float("inf")])
    scaler.step(optimizer)
    assert w.item() == -float("inf")
    w.data.fill_(1.0)
    w.grad = torch.ones(1)
    assert scaler.step(optimizer, lambda: 7.0) == 7.0
    scaler.update(2.0)
    assert w.item() == 0.5
    assert (scaler.get_scale(), scaler.state_dict(), scaler._get_growth_tracker()) == (1.0, {}, 0)
    scaler.load_state_dict({})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_disabled_in_our_own_ways() -> None:
    scaler, w = DynamicLossScaler(4.0, enabled=False), nn.Parameter(torch.ones(1))
    scaler.backward((w * 3).sum())
    assert w.grad.tolist() == [3.0]
    scaler.adjust(torch.tensor(False))
    assert scaler.unscale(w.grad) is w.grad
    assert (scaler.diagnosis, scaler.scale_on("cpu").item(), scaler.get_growth_factor()) == ("", 1.0, 2.0)
    with pytest.raises(ArgumentError, match="enabled"):
        DynamicLossScaler(enabled="no")


def test_the_device() -> None:
    scaler = DynamicLossScaler(4.0, device="cpu")
    scaler._lazy_init_scale_growth_tracker(scaler._device)  # as accelerate does
    assert (scaler._device, scaler._get_scale_async().device.type) == ("cpu", "cpu")
    scaler = DynamicLossScaler(4.0, device=torch.device("meta"))
    assert scaler.scale(torch.ones(1, device="meta")).device.type == "meta"
    assert scaler.scale_on("meta") is scaler._scale
    assert DynamicLossScaler().scale_on("meta").device.type == "meta"
    for wrong in ("gpu", 1.5):
        with pytest.raises(ArgumentError, match="device must be"):
            DynamicLossScaler(device=wrong)
    with pytest.raises(ArgumentError, match="device='cuda'"):
        DynamicLossScaler("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@MAKERS
def test_the_device_is_not_there(make: Any) -> None:
    kind = torch.amp.GradScaler if make is torchs else DynamicLossScaler
    with pytest.warns(UserWarning, match="not available.*isabl"):
        assert not kind(device="cuda").is_enabled()


def test_a_fixed_scale_has_no_factors_to_set() -> None:
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        with pytest.raises(ArgumentError, match="fixed"):
            getattr(StaticLossScaler(2.0), f"set_{name}")(3)


def test_in_a_compiled_step() -> None:
    """Ours is taken, one that is switched off is none, torch's own is refused."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = DynamicLossScaler(device="cpu")
    assert compile_train_step(model, None, optimizer, loss_scaler=ours).scaler is ours
    assert compile_train_step(model, None, optimizer, loss_scaler=DynamicLossScaler(enabled=False)).scaler is None
    with pytest.raises(ArgumentError, match="DynamicLossScaler"):
        compile_train_step(model, None, optimizer, loss_scaler=torchs())
