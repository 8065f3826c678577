"""The loss scalers: what a training loop sees of them."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import struct
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.profiler import profile

from amp_compiler.common.errors import AmpError, AmpWarning, ArgumentError, ScalerError
from amp_compiler.training.finite import all_finite
from amp_compiler.training.scaler_base import STUCK_AFTER, LossScaler
from amp_compiler.training.scalers import DynamicLossScaler, StaticLossScaler
from amp_compiler.training.update import apply_update, takes_found_inf
from training_helpers import as_on_a_gpu

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max
optim = torch.optim


def weight(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, 2.0), dtype=dtype))


def train(scaler: LossScaler, optimizer: optim.Optimizer, factor: float = 1.0) -> Any:
    """One step with the loss ``factor · Σ w²``."""
    optimizer.zero_grad()
    loss = sum((p.float() ** 2).sum() for group in optimizer.param_groups for p in group["params"])
    scaler.scale(loss * factor).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def flag(finite: bool) -> Tensor:
    return torch.tensor(finite)


def repeat(count: int, call: Callable[[], Any]) -> None:
    for _ in range(count):
        call()


def ops(trace: profile) -> set[str]:
    return {event.key for event in trace.key_averages()}


# ------------------------------------------------------------------------------------------ all_finite


def test_all_finite() -> None:
    assert all_finite([torch.ones(2), None, torch.ones(1).half()]).item() is True
    assert all_finite(torch.tensor([1.0, INF])).item() is False
    for wrong in (1.0, "x", [torch.ones(1), "x"], None):
        with pytest.raises(ArgumentError, match="gradients"):
            all_finite(wrong)


# ------------------------------------------------------------------------------------------ the peers' cases


def test_gradient_before_and_after_unscale() -> None:
    w = weight(1.0)
    scaler, optimizer = DynamicLossScaler(1024.0), optim.SGD([w], lr=0.0)
    scaler.scale((w * 2).sum()).backward()
    assert w.grad.item() == 2 * 1024.0
    scaler.unscale_(optimizer)
    assert w.grad.item() == 2.0


def test_sequence_of_scales() -> None:
    scaler = DynamicLossScaler(4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)
    scales = [scaler.get_scale()]
    for finite in (True, True, False):
        scaler.adjust(flag(finite))
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 8.0, 2.0]


def test_three_good_steps_and_a_bad_one() -> None:
    scaler, optimizer = DynamicLossScaler(128.0, growth_interval=1), optim.SGD([weight()], lr=0.1)
    for factor in (1.0, 1.0, 1.0, INF):
        train(scaler, optimizer, factor)
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("start", [LARGEST, LARGEST / 2, 2.0**127, 1e38])
def test_scale_near_the_largest_fp32(start: float, patience: int) -> None:
    scaler = DynamicLossScaler(start, growth_interval=1, overflow_patience=patience)
    for _ in range(4):
        scaler.adjust(flag(True))
        assert start <= scaler.get_scale() * 1.0001
        assert math.isfinite(scaler.get_scale())


def test_sparse_fp16_gradient_that_overflows_when_coalesced() -> None:
    w = weight(1.0, 1.0, dtype=torch.float16)
    scaler, optimizer = DynamicLossScaler(4.0), optim.SGD([w], lr=1.0)
    scaler.scale(torch.ones(1))
    indices, values = torch.tensor([[0, 0]]), torch.tensor([64000.0, 64000.0], dtype=torch.float16)
    w.grad = torch.sparse_coo_tensor(indices, values, (2,), check_invariants=True)
    scaler.step(optimizer)
    scaler.update()
    assert w.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sparse_gradient(dtype: torch.dtype) -> None:
    embedding = nn.Embedding(4, 2, sparse=True, dtype=dtype)
    nn.init.ones_(embedding.weight)
    scaler, optimizer = DynamicLossScaler(16.0), optim.SGD(embedding.parameters(), lr=0.25)
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.unscale_(optimizer)
    assert embedding.weight.grad.to_dense().sum(1).tolist() == [0.0, 4.0, 0.0, 2.0]
    scaler.step(optimizer)
    assert embedding.weight.sum(1).tolist() == [2.0, 1.0, 2.0, 1.5]


def test_several_losses_and_optimizers_one_skipped() -> None:
    a, b = weight(1.0), weight(1.0)
    scaler = DynamicLossScaler(4.0)
    first, second = optim.SGD([a], lr=0.5), optim.SGD([b], lr=0.5)
    losses = scaler.scale([a.sum(), b.sum() * INF, a.sum() + b.sum()])
    for loss in losses:
        loss.backward()
    scaler.unscale_(first)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (a.item(), b.item()) == (0.0, 1.0)
    assert scaler.get_scale() == 2.0
    first.zero_grad()
    second.zero_grad()
    scaler.scale(a.sum() + b.sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (a.item(), b.item()) == (-0.5, 0.5)
    assert scaler.get_scale() == 2.0


def test_gradient_penalty_accumulation_and_clipping() -> None:
    """Accumulate two backwards, clip true gradients."""
    w = weight(3.0, 4.0)
    scaler, optimizer = DynamicLossScaler(2.0**16), optim.SGD([w], lr=1.0)
    for _ in range(2):
        scaler.backward((w**2).sum() / 4)
    scaler.unscale_(optimizer)
    assert w.grad.tolist() == [3.0, 4.0]
    assert nn.utils.clip_grad_norm_([w], 2.5).item() == 5.0
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(w, torch.tensor([1.5, 2.0]), rtol=1e-6)  # clip_grad_norm_ adds 1e-6 to the norm


# ------------------------------------------------------------------------------------------ scale, unscale, backward


def test_scale_of_nested_values() -> None:
    pair = namedtuple("pair", "a b")
    scaler, one = StaticLossScaler(8.0), torch.ones(())
    result = scaler.scale({"x": [one, (one, one)], "y": pair(one, one * 2)})
    assert result == {"x": [8.0, (8.0, 8.0)], "y": pair(8.0, 16.0)}
    assert isinstance(result["y"], pair)
    assert list(scaler.scale(t for t in (one, one))) == [8.0, 8.0]


@pytest.mark.parametrize("wrong", [1.0, None, "ab", [torch.ones(1), 2], {"a": None}])
def test_scale_of_what_is_no_tensor(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"scale\(\) takes a tensor"):
        DynamicLossScaler().scale(wrong)


def test_backward() -> None:
    w, scaler = weight(1.0), StaticLossScaler(8.0)
    scaler.backward((w * 3).sum(), retain_graph=True)
    assert w.grad.item() == 24.0
    scaler.backward([w.sum(), (w * 2).sum()])
    assert w.grad.item() == 48.0


def test_unscale_returns_new_fp32_tensors() -> None:
    scaler = StaticLossScaler(4.0)
    grads = {"a": torch.tensor([8.0], dtype=torch.float16), "b": [torch.tensor([2.0], dtype=torch.float64), None]}
    result = scaler.unscale(grads)
    assert result == {"a": 2.0, "b": [0.5, None]}
    assert (result["a"].dtype, result["b"][0].dtype) == (torch.float32, torch.float64)
    assert grads["a"].item() == 8.0
    assert [t.item() for t in scaler.unscale(t for t in (torch.ones(1), torch.ones(1)))] == [0.25, 0.25]
    assert scaler.unscale([]) == []


def test_unscale_of_a_scaled_loss() -> None:
    w, scaler = weight(3.0), DynamicLossScaler()
    loss = scaler.unscale(scaler.scale(w.sum()))
    assert loss.item() == 3.0
    assert not loss.requires_grad


def test_unscale_of_what_is_no_float() -> None:
    for wrong in (torch.ones(1, dtype=torch.int64), 2.0, [object()]):
        with pytest.raises(ArgumentError, match=r"unscale\(\) takes"):
            DynamicLossScaler().unscale(wrong)


def test_a_loop_in_the_manner_of_mindspore() -> None:
    w, scaler = weight(1.0), DynamicLossScaler(4.0, growth_interval=1)
    for factor in (1.0, INF, 1.0):
        (grad,) = torch.autograd.grad(scaler.scale((w * factor).sum()), [w])
        finite = all_finite([grad])
        if finite:
            with torch.no_grad():
                w -= 0.25 * scaler.unscale(grad)
        scaler.adjust(finite)
    assert w.item() == 0.5
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("wrong", [None, 1.0, torch.ones(2, dtype=torch.bool)])
def test_adjust_of_what_is_no_flag(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"adjust\(\) takes a bool tensor"):
        DynamicLossScaler().adjust(wrong)


def test_scale_on_is_the_scale_itself() -> None:
    scaler = DynamicLossScaler(4.0, growth_interval=1)
    scale = scaler.scale_on("cpu")
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert scaler.scale_on(torch.device("cpu")) is scale
    scaler.adjust(flag(True))
    assert scale.item() == 8.0
    scaler.update(32.0)
    assert scale.item() == 32.0
    scaler.load_state_dict(DynamicLossScaler(64.0).state_dict())
    assert scale.item() == 64.0
    assert scaler.scale_on("cpu") is scale


def test_scale_on_another_device() -> None:
    scaler = DynamicLossScaler(4.0)
    scaler.scale_on("cpu")
    other = scaler.scale_on("meta")
    assert other.device.type == "meta"
    assert scaler.scale_on("meta") is other
    scaler.adjust(flag(True))  # copies to it
    assert scaler.scale(torch.ones(2, device="meta")).device.type == "meta"


# ------------------------------------------------------------------------------------------ no host sync


def test_only_step_of_a_plain_optimizer_reads_on_the_host() -> None:
    w = weight()
    scaler, optimizer = DynamicLossScaler(4.0, overflow_patience=2), optim.SGD([w], lr=0.1)
    for factor in (1.0, INF):
        with as_on_a_gpu(), profile() as trace:
            scaler.scale((w * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            scaler.adjust(flag(True))
            scaler.update(torch.tensor(4.0))
            scaler.update(4.0)
            scaler.unscale(w.grad)
        assert "aten::_local_scalar_dense" not in ops(trace)
    with profile() as trace:
        scaler.step(optimizer)
    (event,) = [event for event in trace.key_averages() if event.key == "aten::_local_scalar_dense"]
    assert event.count == 1


@pytest.mark.parametrize("factor", [1.0, INF])
@pytest.mark.parametrize("unscale", [False, True])
def test_fused_step_does_not_read_on_the_host(factor: float, unscale: bool) -> None:
    w = weight()
    scaler = DynamicLossScaler(4.0)
    optimizer = optim.SGD([w], lr=0.1, momentum=0.9, fused=True)
    for _ in range(2):
        with as_on_a_gpu(), profile() as trace:
            scaler.scale((w * factor).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert "aten::_local_scalar_dense" not in ops(trace)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.Adagrad])
def test_fused_step_reads_no_more_than_the_kernel_itself(kind: type[optim.Optimizer]) -> None:
    """On a CPU these kernels read their step counts, with and without a scaler."""

    def reads(step: Callable[[], Any]) -> int:
        with profile() as trace:
            step()
        return sum(event.count for event in trace.key_averages() if event.key == "aten::_local_scalar_dense")

    w = weight()
    optimizer, scaler = kind([w], lr=0.1, fused=True), DynamicLossScaler(4.0)
    w.grad = torch.ones_like(w)
    optimizer.step()
    plain = reads(optimizer.step)
    scaler.scale(w.sum()).backward()
    assert reads(lambda: scaler.step(optimizer)) == plain


@pytest.mark.parametrize("patience", [1, 2])
def test_nothing_is_read_from_an_accelerator(patience: int) -> None:
    """Fakes of a device that this build can hold: reading a value from one raises, and so do devices that meet."""
    with FakeTensorMode():
        scaler = DynamicLossScaler(4.0, overflow_patience=patience)
        params = [nn.Parameter(torch.empty(3, device=f"lazy:{i}")) for i in (0, 1)]
        optimizer = optim.SGD(params, lr=0.1)
        losses = scaler.scale([params[0].sum(), params[1].sum()])
        assert [loss.device for loss in losses] == [p.device for p in params]
        for p in params:
            p.grad = torch.empty_like(p)
        scaler.unscale_(optimizer)
        scaler.update()
        scaler.adjust(torch.empty((), dtype=torch.bool, device="lazy:1"))
        scaler.update(8.0)
        scaler.update(torch.empty((), device="lazy:1"))
        assert [t.device for t in scaler.unscale(params)] == [p.device for p in params]
        with pytest.raises(DataDependentOutputException):
            scaler.get_scale()


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("unscale", [False, True])
def test_fused_step_reads_nothing_from_an_accelerator(kind: type[optim.Optimizer], unscale: bool) -> None:
    with FakeTensorMode():
        scaler = DynamicLossScaler(4.0)
        w = nn.Parameter(torch.empty(3, device="cuda:0"))
        optimizer = kind([w], lr=0.1, fused=True)
        scaler.scale_on("cuda:0")  # no autograd: a build without CUDA cannot take it for such fakes
        w.grad = torch.empty(3, device="cuda:0")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


# ------------------------------------------------------------------------------------------ all optimizers


def optimizers() -> Iterator[Any]:
    """Every optimizer of torch.optim that needs no closure, in each of its implementations."""
    extra: dict[str, list[dict[str, Any]]] = {
        "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5},
                {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}],
        "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}],
        "AdamW": [{}, {"amsgrad": True}],
        "RMSprop": [{"momentum": 0.9, "centered": True}],
        "NAdam": [{}],
        "Adagrad": [{"lr_decay": 0.1}],
    }  # fmt: skip
    fused = {"SGD", "Adam", "AdamW", "Adagrad"}
    for name in sorted(vars(optim)):
        kind = getattr(optim, name)
        if not isinstance(kind, type) or kind in (optim.Optimizer, optim.LBFGS):
            continue
        ways = [{}] if name in ("SparseAdam", "Muon") else [{"foreach": False}, {"foreach": True}]
        ways += [{"fused": True}] if name in fused else []
        for options, way in itertools.product(extra.get(name, [{}]), ways):
            text = ",".join(f"{k}={v}" for k, v in {**options, **way}.items())
            yield pytest.param(kind, {**options, **way}, id=f"{name}({text})")


def run(kind: type[optim.Optimizer], options: dict[str, Any], plan: str, *, unscale: bool) -> tuple[list[Tensor], Any]:
    """Train by a plan of good (g) and bad (b) steps; the parameters after each good one, and the optimizer's state.

    The bad ones are left out of the count, so that good steps see the same data in any plan.
    """
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(3, 4, generator=generator))
    params = [w] if kind in (optim.Muon, optim.SparseAdam) else [w, nn.Parameter(torch.ones(5))]
    optimizer = kind(params, lr=0.05, **options)
    scaler = DynamicLossScaler(2.0**10, growth_interval=10**6, backoff_factor=0.5)
    seen = []
    for step in plan:
        good = step == "g"
        before = [p.detach().clone() for p in params]
        optimizer.zero_grad()
        loss = sum(((p + len(seen)) ** 2).sum() for p in params)
        scaler.scale(loss if good else loss * NAN).backward()
        if kind is optim.SparseAdam:
            w.grad = w.grad.to_sparse(1)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if good:
            assert not all(map(torch.equal, params, before))
            seen.append([p.detach().clone() for p in params])
        else:
            assert all(map(torch.equal, params, before))
    return list(itertools.chain(*seen)), optimizer.state_dict()["state"]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize(("kind", "options"), list(optimizers()))
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
def test_skipped_steps_leave_no_trace(kind: type[optim.Optimizer], options: dict[str, Any], unscale: bool) -> None:
    """The scale is a power of two, so that another one after a skipped step changes no bit."""
    parameters, state = run(kind, options, "ggg", unscale=unscale)
    for plan in ("bggg", "bbggg", "gbgg", "gbbgbg"):
        others, other_state = run(kind, options, plan, unscale=unscale)
        assert all(map(torch.equal, parameters, others)), plan
        assert same(state, other_state), plan


@pytest.mark.parametrize(("kind", "options"), list(optimizers()))
def test_a_skipped_first_step_leaves_a_state_like_none(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    _, state = run(kind, options, "b", unscale=False)
    for name, value in itertools.chain(*(entry.items() for entry in state.values())):
        if isinstance(value, Tensor) and name not in ("eta", "mu", "step_size", "ax"):  # those start with constants
            assert not value.any(), name


def test_fused_sgd_of_torch_itself_keeps_garbage() -> None:
    """The reason for ``_start_momentum``: if torch stops to do this, the code can go."""
    w = weight(*[1.0] * 64)
    optimizer = optim.SGD([w], lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    original = torch.empty_like

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs).fill_(123.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", poisoned)
        scaler.scale((w * INF).sum()).backward()
        scaler.step(optimizer)
    assert (optimizer.state[w]["momentum_buffer"] == 123.0).all()


def test_a_parameter_that_joins_later() -> None:
    """Its buffer starts at zero too, where torch's own fused SGD cannot go on."""
    a, b = weight(1.0), weight(1.0)
    optimizer, scaler = optim.SGD([a, b], lr=0.5, momentum=0.5, fused=True), DynamicLossScaler(4.0)
    scaler.scale(a.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(a.sum() + b.sum()).backward()
    scaler.step(optimizer)
    assert (a.item(), b.item()) == (-0.25, 0.5)


# ------------------------------------------------------------------------------------------ apply_update


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_apply_update(fused: bool, shape: tuple[int, ...]) -> None:
    w = weight(1.0)
    optimizer = optim.Adam([w], lr=0.5, fused=fused)
    for found, value in ((1.0, 1.0), (0.0, 0.5)):
        w.grad = torch.ones(1)
        result, taken = apply_update(optimizer, torch.full(shape, found))
        assert result is None
        assert taken is (None if fused else found == 0.0)
        assert w.item() == pytest.approx(value, abs=1e-6)
    assert optimizer.state[w]["step"].item() == 1.0


@pytest.mark.parametrize("fused", [False, True])
def test_apply_update_with_gradients_that_are_still_scaled(fused: bool) -> None:
    w = weight(1.0)
    optimizer = optim.SGD([w], lr=0.25, fused=fused)
    w.grad = torch.full((1,), 16.0)
    apply_update(optimizer, torch.zeros(1), grad_scale=torch.tensor(8.0))
    assert w.item() == 0.5


def test_apply_update_with_dampening_looks_once() -> None:
    w = weight(1.0)
    optimizer = optim.SGD([w], lr=0.5, momentum=0.5, dampening=0.5, fused=True)
    taken = []
    for found in (1.0, 0.0, 0.0, 1.0):
        w.grad = torch.ones(1)
        taken.append(apply_update(optimizer, torch.full((), found))[1])
    assert taken == [False, True, None, None]


@pytest.mark.parametrize("preset", [None, 2.0])
def test_attributes_are_taken_off_again(preset: float | None) -> None:
    w = weight(8.0)
    scaler, optimizer = DynamicLossScaler(4.0), optim.SGD([w], lr=1.0, fused=True)
    if preset:
        optimizer.grad_scale = torch.tensor(preset)  # as torch's scaler: a divisor of the user's own
    scaler.scale(w.sum() * 4).backward()
    scaler.step(optimizer)
    assert w.item() == (6.0 if preset else 4.0)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_attributes_are_taken_off_after_an_exception() -> None:
    w = weight(1.0)
    scaler, optimizer = DynamicLossScaler(4.0), optim.SGD([w], lr=1.0, fused=True)
    scaler.scale(w.sum()).backward()
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")
    hook.remove()
    scaler.step(optimizer)
    assert w.item() == 0.0


def test_optimizers_that_only_seem_fused() -> None:
    class Wrapper:
        """Passes reads on, as many libraries' wrappers do: attributes set on it never reach the optimizer."""

        def __init__(self, inner: optim.Optimizer) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class WantsScaler(optim.SGD):
        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            assert grad_scaler is None
            return super().step(closure)

    def mixed(w: nn.Parameter) -> optim.Optimizer:
        return optim.SGD([{"params": [w]}, {"params": [weight()], "fused": False}], lr=0.5, fused=True)

    for make in (
        lambda w: Wrapper(optim.SGD([w], lr=0.5, fused=True)),
        lambda w: WantsScaler([w], lr=0.5, fused=True),
        mixed,
    ):
        w = weight(1.0)
        optimizer, scaler = make(w), DynamicLossScaler(4.0)
        assert not takes_found_inf(optimizer)
        for factor, value in ((INF, 1.0), (1.0, 0.5)):
            optimizer.zero_grad()
            scaler.scale((w * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert w.item() == value


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_scheduler_does_not_warn_after_a_skipped_first_step(fused: bool) -> None:
    optimizer = optim.Adam([weight()], lr=0.1, fused=fused)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(DynamicLossScaler(4.0), optimizer, INF)
        scheduler.step()


def test_step_passes_arguments_and_the_result() -> None:
    class Custom(optim.SGD):
        def step(self, closure: Any = None, *, extra: int = 0) -> Any:
            super().step(closure)
            return extra + 1

    w = weight()
    scaler, optimizer = DynamicLossScaler(4.0), Custom([w], lr=0.1)
    scaler.scale(w.sum()).backward()
    assert scaler.step(optimizer, extra=2) == 3
    scaler.update()
    scaler.scale(w.sum() * INF).backward()
    assert scaler.step(optimizer, None, extra=2) is None


# ------------------------------------------------------------------------------------------ calls in a wrong order


@pytest.fixture
def stepping() -> tuple[DynamicLossScaler, optim.Optimizer]:
    """A scaler and an optimizer after a backward."""
    w = weight()
    scaler, optimizer = DynamicLossScaler(4.0), optim.SGD([w], lr=0.1)
    scaler.scale(w.sum()).backward()
    return scaler, optimizer


def test_unscale_twice(stepping: Any) -> None:
    scaler, optimizer = stepping
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=r"unscale_\(\) was already called for this SGD"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)


def test_unscale_after_step(stepping: Any) -> None:
    scaler, optimizer = stepping
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"unscale_\(\) was called after step\(\)"):
        scaler.unscale_(optimizer)


def test_step_twice(stepping: Any) -> None:
    scaler, optimizer = stepping
    scaler.step(optimizer)
    with pytest.raises(ScalerError, match=r"step\(\) was already called for this SGD"):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_step_without_gradients(fused: bool) -> None:
    w = weight(1.0)
    scaler, optimizer = DynamicLossScaler(4.0), optim.Adam([w], lr=0.1, fused=fused)
    scaled = scaler.scale(w.sum())
    with pytest.raises(
        ScalerError, match=r"no gradient at all in this Adam\. Call scale\(loss\)\.backward\(\) before it"
    ):
        scaler.step(optimizer)
    scaled.backward()
    scaler.step(optimizer)  # the error changed nothing
    scaler.update()
    assert w.item() < 1.0


def test_step_with_a_closure(stepping: Any) -> None:
    scaler, optimizer = stepping
    for call in (lambda: scaler.step(optimizer, lambda: 1.0), lambda: scaler.step(optimizer, closure=lambda: 1.0)):
        with pytest.raises(ScalerError, match="closure"):
            call()


def test_update_without_a_step() -> None:
    scaler = DynamicLossScaler()
    with pytest.raises(ScalerError, match=r"update\(\) was called before scale\(\)"):
        scaler.update()
    scaler.scale(torch.ones(1))
    with pytest.raises(ScalerError, match="has seen gradients since the last update"):
        scaler.update()


def test_before_any_scale() -> None:
    optimizer = optim.SGD([weight()], lr=0.1)
    for method in ("unscale_", "step"):
        with pytest.raises(ScalerError, match=rf"{method}\(\) was called before scale\(\)"):
            getattr(DynamicLossScaler(), method)(optimizer)


def test_no_optimizer(stepping: Any) -> None:
    for method in ("unscale_", "step"):
        with pytest.raises(ArgumentError, match=r"must be a torch\.optim\.Optimizer"):
            getattr(stepping[0], method)(nn.Linear(1, 1))


def test_errors_are_amp_errors_and_runtime_errors() -> None:
    assert issubclass(ScalerError, AmpError)
    assert issubclass(ScalerError, RuntimeError)


def test_fp16_parameters_are_allowed() -> None:
    """torch's scaler refuses; pure fp16 training needs it, and the gradient stays fp16."""
    w = weight(1.0, dtype=torch.float16)
    scaler, optimizer = DynamicLossScaler(4.0), optim.SGD([w], lr=0.5)
    scaler.scale(w.sum()).backward()
    scaler.unscale_(optimizer)
    assert (w.grad.item(), w.grad.dtype) == (1.0, torch.float16)
    scaler.step(optimizer)
    assert w.item() == 0.5


# ------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "wrong",
    [
        *({"init_scale": v} for v in (0, -1.0, INF, NAN, 1e39, 1e-45, "2", None, True, 10**400, 0.5)),
        *({"growth_factor": v} for v in (1.0, 0.5, INF, NAN, "2", True)),
        *({"backoff_factor": v} for v in (0.0, 1.0, -0.5, 2.0, NAN, None)),
        *({"growth_interval": v} for v in (0, -1, 2.0, "3", True, 2**31)),
        *({"overflow_patience": v} for v in (0, 1.5, None)),
        *({"min_scale": v} for v in (0.0, -1.0, NAN, 2.0**17, 1e-40)),
        *({"max_scale": v} for v in (0.0, INF, 2.0**15, 0.5, "1")),
    ],
    ids=str,
)
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}|not between"):
        DynamicLossScaler(**wrong)


def test_wrong_static_scale() -> None:
    for wrong in (0.0, -1.0, INF, NAN, "1", None, True):
        with pytest.raises(ArgumentError, match="scale must be"):
            StaticLossScaler(wrong)


def test_getters_and_setters() -> None:
    scaler = DynamicLossScaler()
    assert scaler.is_enabled() is True
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 2000)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    scaler.adjust(flag(True))
    assert scaler.get_scale() == 2.0**18
    scaler.adjust(flag(False))
    assert scaler.get_scale() == 2.0**16
    for name, wrong in (("growth_factor", 1.0), ("backoff_factor", 1.0), ("growth_interval", 0)):
        with pytest.raises(ArgumentError, match=name):
            getattr(scaler, f"set_{name}")(wrong)


@pytest.mark.parametrize("created", [False, True])
def test_a_shorter_interval_than_the_count(created: bool) -> None:
    """torch's scaler never grows again then."""
    scaler = DynamicLossScaler(4.0, growth_interval=100)
    for _ in range(10):
        scaler.adjust(flag(True))
    if not created:
        scaler = copy.deepcopy(scaler)
    scaler.set_growth_interval(5)
    scaler.adjust(flag(True))
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("new", [32.0, 32, torch.tensor(32.0), torch.tensor([32.0], dtype=torch.float64)])
def test_update_to_a_new_scale(new: Any) -> None:
    scaler = DynamicLossScaler(4.0)
    scaler.scale(torch.ones(1))
    scaler.update(new)
    assert scaler.get_scale() == 32.0


def test_update_to_a_wrong_scale() -> None:
    scaler = DynamicLossScaler(4.0, max_scale=64.0)
    scaler.scale(torch.ones(1))
    for wrong in (0.0, INF, NAN, -1.0, 0.5, 128.0, "1", torch.ones(2), torch.ones(1, requires_grad=True)):
        with pytest.raises(ArgumentError, match="new_scale"):
            scaler.update(wrong)
    for value, result in ((INF, 4.0), (NAN, 4.0), (0.0, 4.0), (-1.0, 4.0), (0.25, 1.0), (1000.0, 64.0)):
        scaler.update(4.0)
        scaler.update(torch.tensor(value))  # not looked at, so it is brought into the range
        assert scaler.get_scale() == result


# ------------------------------------------------------------------------------------------ rules as a model


def fp32(value: float) -> float:
    """Rounded to fp32; inf where it does not fit."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return INF


class Model:
    """The rules once more, in plain Python."""

    def __init__(self, **options: Any) -> None:
        self.options, self.scale = options, options["init_scale"]
        self.good = self.bad = self.stuck = 0

    def adjust(self, finite: bool) -> None:
        o = self.options
        self.stuck = 0 if finite else self.stuck + 1
        if finite:
            self.bad, self.good = 0, self.good + 1
            if self.good == o["growth_interval"]:
                self.good = 0
                grown = fp32(self.scale * o["growth_factor"])
                self.scale = self.scale if grown == INF else grown
        else:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == o["overflow_patience"]:
                self.bad = 0
                self.scale = fp32(self.scale * o["backoff_factor"])
        self.scale = max(self.scale, o["min_scale"])
        self.scale = min(self.scale, LARGEST if o["max_scale"] is None else o["max_scale"])


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    scales = st.floats(2.0**-120, LARGEST, width=32)
    low, start, high = sorted(draw(st.tuples(scales, scales, scales)))
    return {
        "init_scale": start,
        "growth_factor": draw(st.sampled_from([2.0, 1.1, 1e30, 1e300])),
        "backoff_factor": draw(st.sampled_from([0.5, 0.9, 1e-30, 1e-300])),
        "growth_interval": draw(st.integers(1, 3)),
        "overflow_patience": draw(st.integers(1, 3)),
        "min_scale": low,
        "max_scale": draw(st.sampled_from([None, high])),
    }


@given(options(), st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_rules(options: dict[str, Any], updates: list[bool], saved: int) -> None:
    """Growth, backoff, patience, floor and cap, with a copy and a state dict on the way."""
    scaler, model = DynamicLossScaler(**options), Model(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        for number, finite in enumerate(updates):
            if number == saved:
                state = copy.deepcopy(scaler).state_dict()
                scaler = DynamicLossScaler()
                scaler.load_state_dict(state)
                assert scaler.state_dict() == state
            scaler.adjust(flag(finite))
            model.adjust(finite)
            state = scaler.state_dict()
            assert state["scale"] == model.scale
            assert (state["_growth_tracker"], state["_stuck_tracker"]) == (model.good, model.stuck)
            assert 0 < state["scale"] < INF
            assert bool(scaler.diagnosis) is (model.stuck >= STUCK_AFTER)


def test_patience_skips_all_the_same() -> None:
    w = weight(1.0)
    scaler, optimizer = DynamicLossScaler(4.0, overflow_patience=3), optim.SGD([w], lr=0.1)
    scales = []
    for factor in (INF, INF, 1.0, INF, INF, INF):
        before = w.item()
        train(scaler, optimizer, factor)
        assert (w.item() == before) is (factor == INF)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 4.0, 4.0, 4.0, 2.0]


# ------------------------------------------------------------------------------------------ static


def test_static() -> None:
    w = weight(1.0)
    scaler, optimizer = StaticLossScaler(8.0), optim.SGD([w], lr=0.25)
    train(scaler, optimizer)
    assert w.item() == 0.5
    train(scaler, optimizer, INF)
    assert w.item() == 0.5
    assert scaler.get_scale() == 8.0
    scaler.adjust(flag(False))
    assert scaler.get_scale() == 8.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.0, 1.0, 1)


def test_static_state() -> None:
    scaler = StaticLossScaler(8.0)
    scaler.load_state_dict(StaticLossScaler(16.0).state_dict())
    assert scaler.get_scale() == 16.0
    scaler.load_state_dict(DynamicLossScaler(32.0).state_dict())
    assert scaler.get_scale() == 32.0
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(scaler.state_dict())
    w = weight()
    optimizer = optim.SGD([w], lr=0.1)
    for factor in (1.0, INF, 1.0):
        torchs.scale((w * factor).sum()).backward()
        torchs.step(optimizer)
        torchs.update()
    assert torchs.get_scale() == 32.0


# ------------------------------------------------------------------------------------------ diagnosis


def test_skipped_again_and_again() -> None:
    """One warning for each time that it happens, wherever the scale is meanwhile."""
    scaler = DynamicLossScaler(2.0**16)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            repeat(STUCK_AFTER - 1, lambda: scaler.adjust(flag(False)))
            assert scaler.diagnosis == ""
        with pytest.warns(AmpWarning, match=r"last 10 updates.*skipped") as caught:
            repeat(STUCK_AFTER, lambda: scaler.adjust(flag(False)))
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "explain_overflow" in scaler.diagnosis
        scaler.adjust(flag(True))
        assert scaler.diagnosis == ""


def test_where_the_scale_is_when_it_is_of_no_help() -> None:
    scaler = DynamicLossScaler(2.0**16)
    with pytest.warns(AmpWarning, match=r"has fallen to 64\. If it persists, the cause is the model"):
        repeat(STUCK_AFTER, lambda: scaler.adjust(flag(False)))
    scaler = DynamicLossScaler(4.0, min_scale=2.0)
    with pytest.warns(AmpWarning, match=r"floor, 2; .* cause is the model, not the scale") as caught:
        repeat(STUCK_AFTER, lambda: scaler.adjust(flag(False)))
    assert len(caught) == 1
    assert "learning rate" in scaler.diagnosis


def test_skipped_again_and_again_in_a_loop() -> None:
    scaler, optimizer = DynamicLossScaler(1.0), optim.SGD([weight()], lr=0.1)
    with pytest.warns(AmpWarning, match="at its floor") as caught:
        repeat(STUCK_AFTER + 5, lambda: train(scaler, optimizer, NAN))
    assert len(caught) == 1


def test_static_scale_of_no_help() -> None:
    scaler = StaticLossScaler(2.0**20)
    with pytest.warns(AmpWarning, match="fixed loss scale .* Lower the scale or use DynamicLossScaler"):
        repeat(STUCK_AFTER, lambda: scaler.adjust(flag(False)))


def test_a_warning_is_remembered() -> None:
    scaler = DynamicLossScaler(1.0)
    with pytest.warns(AmpWarning):
        repeat(STUCK_AFTER, lambda: scaler.adjust(flag(False)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = copy.deepcopy(scaler)
        again.adjust(flag(False))
    assert again.diagnosis


# ------------------------------------------------------------------------------------------ state


def used(scaler: DynamicLossScaler) -> DynamicLossScaler:
    for finite in (True, False, True, True):
        scaler.adjust(flag(finite))
    return scaler


KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def test_state_into_and_from_torch() -> None:
    ours = used(DynamicLossScaler(1024.0, 3.0, 0.25, 7))
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(ours.state_dict())
    state = torchs.state_dict()
    assert set(state) == KEYS
    assert state == {key: ours.state_dict()[key] for key in KEYS}
    other = DynamicLossScaler(overflow_patience=3, min_scale=0.5, max_scale=2.0**20)
    other.load_state_dict(state)
    assert {key: other.state_dict()[key] for key in KEYS} == state
    assert (other.state_dict()["overflow_patience"], other.state_dict()["min_scale"]) == (3, 0.5)


def test_state_of_torch_below_the_floor() -> None:
    scaler = DynamicLossScaler(min_scale=1.0, max_scale=2.0**17)
    state = torch.amp.GradScaler("cpu").state_dict()
    scaler.load_state_dict({**state, "scale": 0.25})
    assert scaler.get_scale() == 1.0
    scaler.load_state_dict({**state, "scale": 2.0**30})
    assert scaler.get_scale() == 2.0**17


@pytest.mark.parametrize("created", [False, True])
def test_state_round_trip(created: bool) -> None:
    scaler = used(DynamicLossScaler(1000.1, 1.7, 0.3, 3, 2, 0.1, 1e30))
    other = used(DynamicLossScaler()) if created else DynamicLossScaler()
    other.load_state_dict(pickle.loads(pickle.dumps(scaler.state_dict())))
    for finite in (True, False, False, False, True, True, True):
        assert other.state_dict() == scaler.state_dict()
        scaler.adjust(flag(finite))
        other.adjust(flag(finite))


GOOD = DynamicLossScaler().state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"state": {}, "param_groups": []},
        None,
        [("scale", 1.0)],
        *({k: v for k, v in GOOD.items() if k != key} for key in sorted(KEYS)),
        *({**GOOD, "scale": v} for v in (INF, 0.0, NAN, -1.0, "4", None, True, [4.0], 1e39)),
        *({**GOOD, "growth_factor": v} for v in (1.0, NAN, "2")),
        *({**GOOD, "backoff_factor": v} for v in (0.0, 1.0, None)),
        *({**GOOD, "growth_interval": v} for v in (0, 2.5, "2")),
        *({**GOOD, "_growth_tracker": v} for v in (-1, 0.5, None, 2**31)),
        *({**GOOD, "_overflow_tracker": v} for v in (-1, "x")),
        *({**GOOD, "_stuck_tracker": v} for v in (-1, "x")),
        *({**GOOD, "overflow_patience": v} for v in (0, None)),
        *({**GOOD, "min_scale": v} for v in (0.0, NAN, None)),
        *({**GOOD, "max_scale": v} for v in (0.0, INF, 0.5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("created", [False, True])
def test_damaged_state(wrong: Any, created: bool) -> None:
    scaler = DynamicLossScaler(1024.0, 3.0, 0.25, 7, 2, 0.5, 2.0**20)
    if created:
        used(scaler)
    before = scaler.state_dict()
    with pytest.raises(ArgumentError, match=r"load_state_dict\(\)"):
        scaler.load_state_dict(wrong)
    assert scaler.state_dict() == before
    assert StaticLossScaler(2.0).state_dict()["scale"] == 2.0


def test_state_of_a_disabled_scaler_of_torch() -> None:
    state = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    with pytest.raises(ArgumentError, match="disabled"):
        DynamicLossScaler().load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    for scaler in (used(DynamicLossScaler(1000.1, 1.7, 0.3, 3, 2, 0.1, 1e30)), StaticLossScaler(8.0)):
        before = scaler.state_dict()
        other = copied(scaler)
        assert type(other) is type(scaler)
        assert other.state_dict() == before
        if copied is not copy.copy:
            other.adjust(flag(False))
            assert scaler.state_dict() == before


def test_a_copy_in_the_middle_of_an_iteration(stepping: Any) -> None:
    scaler, optimizer = stepping
    scaler.unscale_(optimizer)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ScalerError, match="between iterations"):
            copied(scaler)
    scaler.step(optimizer)
    scaler.update()
    copy.deepcopy(scaler)


def test_repr() -> None:
    assert repr(StaticLossScaler(8.0)) == "StaticLossScaler(8)"
    assert repr(DynamicLossScaler()).startswith("DynamicLossScaler(65536, growth_factor=2, ")
