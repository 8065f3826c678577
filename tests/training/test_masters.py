"""Updates of low-precision parameters, around the optimizers of torch: masters, stochastic rounding, compensation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler
from amp_compiler.common.gradients import allow_gradients
from amp_compiler.common.torch_names import pytree
from amp_compiler.training.masters import COMPENSATION, MASTER, LowWeights
from amp_compiler.training.update import apply_update
from helpers import BF16, F16, F32

Make = Callable[[Any], torch.optim.Optimizer]
optim = torch.optim

#: every optimizer of torch that needs no closure, in every implementation it has
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.01),
    "SGD foreach momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "SGD maximize": lambda p: optim.SGD(p, lr=0.01, maximize=True, weight_decay=0.1),
    "Adam": lambda p: optim.Adam(p, foreach=False),
    "Adam foreach amsgrad": lambda p: optim.Adam(p, foreach=True, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, fused=True),
    "Adam capturable rate": lambda p: optim.Adam(p, lr=torch.tensor(0.001), foreach=False),
    "AdamW": lambda p: optim.AdamW(p, foreach=False, maximize=True),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True, maximize=True),
    "Adamax": lambda p: optim.Adamax(p, foreach=False),
    "Adamax foreach": lambda p: optim.Adamax(p, foreach=True),
    "NAdam": lambda p: optim.NAdam(p, foreach=False),
    "NAdam foreach": lambda p: optim.NAdam(p, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, foreach=False),
    "RAdam foreach": lambda p: optim.RAdam(p, foreach=True),
    "Adadelta": lambda p: optim.Adadelta(p, foreach=False),
    "Adadelta foreach": lambda p: optim.Adadelta(p, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, foreach=False),
    "Adagrad foreach": lambda p: optim.Adagrad(p, foreach=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, fused=True),
    "ASGD": lambda p: optim.ASGD(p, foreach=False),
    "ASGD foreach": lambda p: optim.ASGD(p, foreach=True),
    "RMSprop": lambda p: optim.RMSprop(p, foreach=False, momentum=0.5, centered=True),
    "RMSprop foreach": lambda p: optim.RMSprop(p, foreach=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.001, foreach=False),
    "Rprop foreach": lambda p: optim.Rprop(p, lr=0.001, foreach=True),
    "Adafactor": lambda p: optim.Adafactor(p, foreach=False),
    "Adafactor foreach": lambda p: optim.Adafactor(p, foreach=True),
    "Muon": lambda p: optim.Muon(p),
    "SparseAdam": lambda p: optim.SparseAdam(p),
}
STEPS = 4


def start(dtype: torch.dtype, seed: int = 0) -> list[nn.Parameter]:
    """Three matrices of values that bf16 can represent; the last never gets a gradient."""
    source = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(4, 5, generator=source).to(BF16).to(dtype)) for _ in range(3)]


def gradient(step: int, number: int, *, sparse: bool = False) -> Tensor:
    source = torch.Generator().manual_seed(10 * step + number)
    values = torch.randn(4, 5, generator=source)
    return torch.where(torch.arange(4)[:, None] < 2, values, 0.0).to_sparse(1) if sparse else values


def train(make: Make, dtype: torch.dtype, method: bool | str, steps: int = STEPS) -> tuple[list[nn.Parameter], Any]:
    parameters = start(dtype)
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = make(groups)
    weights = LowWeights(method)
    weights.attach(optimizer)
    for step in range(steps):
        for number, parameter in enumerate(parameters[:2]):
            allow_gradients(parameter, F32)
            parameter.grad = gradient(step, number, sparse=isinstance(optimizer, optim.SparseAdam))
        with weights.updating(optimizer):
            optimizer.step()
    return parameters, optimizer


def test_every_optimizer_of_torch_is_here() -> None:
    classes = {name for name in dir(optim) if isinstance(getattr(optim, name), type)} - {"Optimizer", "LBFGS"}
    assert {name.split()[0] for name in OPTIMIZERS} == classes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_are_the_weights_of_an_fp32_run_with_every_optimizer(name: str) -> None:
    make = OPTIMIZERS[name]
    low, optimizer = train(make, BF16, True)
    wide, reference = train(make, F32, True)
    for ours, theirs in zip(low[:2], wide[:2], strict=True):
        assert torch.equal(optimizer.state[ours][MASTER], theirs)
        assert torch.equal(ours, theirs.to(BF16))
        own = {key: value for key, value in optimizer.state[ours].items() if key != MASTER}
        assert own.keys() == reference.state[theirs].keys()
        for key, value in own.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(reference.state[theirs][key])), key
    assert low[2] not in optimizer.state or MASTER not in optimizer.state[low[2]]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in low]

    lossy, _ = train(make, BF16, "kahan")
    for ours, theirs in zip(lossy[:2], wide[:2], strict=True):
        # half a unit for the weight's own rounding, and per step 2**-9 of half a unit for that of the compensation
        unit = torch.finfo(BF16).eps * theirs.abs().clamp(min=1e-3) * 2
        assert ((ours.float() - theirs).abs() <= unit * (0.5 + STEPS * 2.0**-9)).all()
    noisy, _ = train(make, BF16, "stochastic")
    for ours, theirs in zip(noisy[:2], start(BF16)[:2], strict=True):
        assert not torch.equal(ours, theirs)


# ------------------------------------------------------------------------------------------ one weight, many ways


def one(method: bool | str, dtype: torch.dtype = BF16, **options: Any) -> tuple[nn.Parameter, Any, LowWeights]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=dtype))
    optimizer = torch.optim.SGD([weight], **{"lr": 1e-3, **options})
    weights = LowWeights(method)
    weights.attach(optimizer)
    return weight, optimizer, weights


def update(weight: nn.Parameter, optimizer: torch.optim.Optimizer, weights: LowWeights, times: int = 1) -> None:
    for _ in range(times):
        weight.grad = torch.ones_like(weight)
        with weights.updating(optimizer):
            optimizer.step()


def test_masters_follow_what_somebody_else_writes_and_only_there() -> None:
    weight, optimizer, weights = one(True)
    update(weight, optimizer, weights)
    weight.data[1] = 16.0  # counts up no version
    update(weight, optimizer, weights)
    wanted = torch.tensor([0.998, 15.999, 3.998, 7.998])
    assert torch.allclose(optimizer.state[weight][MASTER], wanted, rtol=0, atol=1e-6)
    weight.data = torch.full((4,), 3.0, dtype=BF16)  # as module.to(...) does
    update(weight, optimizer, weights)
    assert torch.allclose(optimizer.state[weight][MASTER], torch.full((4,), 2.999), rtol=0, atol=1e-6)


def test_a_compensation_is_dropped_if_somebody_else_writes() -> None:
    weight, optimizer, weights = one("kahan")
    update(weight, optimizer, weights, 3)
    assert bool((optimizer.state[weight][COMPENSATION] != 0).all())
    with torch.no_grad():
        weight.copy_(torch.tensor([1.0, 0.0, -4.0, 0.5]))
    update(weight, optimizer, weights)
    total = weight.double() + optimizer.state[weight][COMPENSATION].double()
    exact = torch.tensor([1.0, 0.0, -4.0, 0.5], dtype=torch.float64) - 1e-3
    assert bool(((total - exact).abs() <= 2.0**-16 * exact.abs()).all())
    # through .data only what cannot belong to the new value is dropped
    weight.data[0] = 1e-3
    update(weight, optimizer, weights)
    assert abs(weight[0].item()) < 1e-5


@pytest.mark.parametrize("method", [True, "stochastic", "kahan"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_changes_nothing(method: Any, fused: bool) -> None:
    weight = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(BF16))
    optimizer = torch.optim.Adam([weight], lr=1e-3, fused=fused)
    weights = LowWeights(method)
    update(weight, optimizer, weights, 4)
    before = copy.deepcopy((weight.detach(), optimizer.state_dict()["state"], weights.state_dict()))
    weight.grad = torch.full_like(weight, float("inf"))
    with weights.updating(optimizer):
        apply_update(optimizer, torch.ones(1))
    after = weight.detach(), optimizer.state_dict()["state"], weights.state_dict()
    for ours, theirs in zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was() -> None:
    weight, optimizer, weights = one(True, momentum=0.9)
    update(weight, optimizer, weights)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ZeroDivisionError), weights.updating(optimizer):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["params"][0] is weight
    for key, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before[0][key])


@pytest.mark.parametrize("method", [True, "kahan"])
def test_torchs_own_checkpoints_keep_fp32(method: Any) -> None:
    """The state of the optimizer is all that a trainer saves: torch would round it to bf16."""
    first, second = one(method, momentum=0.9), one(method, momentum=0.9)
    update(*first, times=3)
    file = io.BytesIO()
    torch.save((first[0].detach(), first[1].state_dict()), file)
    file.seek(0)
    values, state = torch.load(file)
    with torch.no_grad():
        second[0].copy_(values)
    second[1].load_state_dict(state)
    assert second[1].state[second[0]]["momentum_buffer"].dtype == F32
    for run in (first, second):
        update(*run, times=3)
    assert torch.equal(first[0], second[0])
    for key, value in first[1].state[first[0]].items():
        assert torch.equal(value, second[1].state[second[0]][key]), key


def test_state_from_before_masters() -> None:
    """An optimizer that has run on the bf16 weights themselves has bf16 state, which is widened."""
    weight, optimizer, weights = one(True, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    old = copy.deepcopy(optimizer.state_dict())
    assert old["state"][0]["momentum_buffer"].dtype == BF16
    optimizer.load_state_dict(old)
    update(weight, optimizer, weights)
    assert optimizer.state[weight]["momentum_buffer"].dtype == F32
    assert torch.allclose(optimizer.state[weight]["momentum_buffer"], torch.full((4,), 1.9), rtol=1e-6)
    # and back: with False everything is in the parameter's dtype again, as torch's optimizers need it
    LowWeights(False).attach(optimizer)
    assert {key: value.dtype for key, value in optimizer.state[weight].items()} == {"momentum_buffer": BF16}
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_another_optimizer_goes_on_with_the_masters() -> None:
    weight, optimizer, weights = one(True)
    update(weight, optimizer, weights)
    other = torch.optim.Adam([weight], lr=1e-3)
    weights.hand_over(optimizer, other)
    master = other.state[weight][MASTER].clone()
    assert MASTER not in optimizer.state[weight]
    update(weight, other, weights)
    assert torch.allclose(other.state[weight][MASTER], master - 1e-3, rtol=0, atol=1e-6)
    assert other.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq", MASTER}


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler("cpu", 4.0), DynamicLossScaler(4.0)], ids=["torch", "ours"])
def test_a_users_loop_in_fp16(scaler: Any) -> None:
    """torch refuses to unscale fp16 gradients; those of masters are fp32. Schedulers and hooks see their optimizer."""
    weight, optimizer, weights = one(True, F16, lr=1e-5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen: list[torch.dtype] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(o.param_groups[0]["params"][0].dtype))
    allow_gradients(weight, F32)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((weight * torch.ones(4, dtype=F16)).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 100.0)
        with weights.updating(optimizer):
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert seen == [F32, F32]
    assert torch.allclose(optimizer.state[weight][MASTER], torch.tensor([1.0, 2, 4, 8]) - 1.5e-5, rtol=0, atol=1e-6)


def test_processes_that_round_alike() -> None:
    first, second = one("stochastic"), one("stochastic")
    torch.manual_seed(1)  # the global generator is not used
    update(*first, times=20)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    update(*second, times=20)
    assert torch.equal(first[0], second[0])
    assert torch.equal(torch.get_rng_state(), before)
