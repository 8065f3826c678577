"""A gradient that is not finite: the update is left out and leaves no trace, whatever holds state."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from amp_compiler import DynamicLossScaler, compile_train_step
from amp_compiler.common.errors import ArgumentError
from helpers import F16
from training_helpers import INF, as_on_a_gpu, bad, batches, differences, fused_adamw, sgd, state

optim = torch.optim


def norm_network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def make(model: nn.Module, optimizer: Any = sgd, **kwargs: Any) -> Any:
    return compile_train_step(model, F.mse_loss, optimizer(model.parameters()), **{"level": "O0", **kwargs})


# ------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Any] = {
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.1, fused=True, weight_decay=0.1),
    "Adam fused amsgrad": lambda p: optim.Adam(p, lr=0.1, fused=True, amsgrad=True, maximize=True),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.1, foreach=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "AdamW fused, lr a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=1),
    "Muon": lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, fused=True),
    "SGD fused momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True, weight_decay=0.1),
    "SGD fused nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD fused dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
}
_NO_CLOSURE_LESS_USE = {"LBFGS", "SparseAdam"}  # tested below


def test_the_list_of_optimizers_is_all_of_torch() -> None:
    classes = {
        n for n, c in vars(optim).items() if isinstance(c, type) and issubclass(c, optim.Optimizer) and n != "Optimizer"
    }
    assert classes == {name.split()[0].rstrip(",") for name in OPTIMIZERS} | _NO_CLOSURE_LESS_USE


def used(values: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's entries that say something: a step count of 0 and zeros are as good as no entry."""
    return {
        k: v for k, v in values.items()
        if not k.startswith("optimizer.") or (torch.count_nonzero(torch.as_tensor(v)) > 0)
    }  # fmt: skip


def test_a_skipped_update_is_as_if_the_batch_had_never_been_there() -> None:
    """For every optimizer: bad batches first, in the middle and last, against a run without them. One step is compiled
    and its optimizer exchanged, because a capture takes longer than all that is tested here."""
    model = norm_network()
    step = make(model)
    good = batches(4, (5, 3), (5, 2))
    start = copy.deepcopy(model.state_dict())
    failed: dict[str, Any] = {}
    for name, optimizer in OPTIMIZERS.items():
        runs = []
        for with_bad in (False, True):
            model.load_state_dict(start)
            step.optimizer = optimizer(list(model.parameters()))
            skipped = []
            for batch in good:
                if with_bad:
                    before = used(state(model, step.optimizer))
                    skipped.append(bool(step(*bad(batch)).skipped))
                    if names := differences(used(state(model, step.optimizer)), before):
                        failed.setdefault(name, []).append(("changed by a skipped update", len(skipped), names))
                skipped.append(bool(step(*batch).skipped))
            assert skipped == ([True, False] * 4 if with_bad else [False] * 4)
            runs.append(state(model, step.optimizer))
        if names := differences(*runs):
            failed.setdefault(name, []).append(("another result", names))
        if not differences({k: runs[0][k] for k in start}, dict(start)):
            failed.setdefault(name, []).append(("did not train at all", []))
    assert failed == {}


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ArgumentError, match=r"LBFGS .* closure"):
        make(model, optim.LBFGS)


def test_sparse_gradients() -> None:
    """An embedding with sparse=True: equal to the loop by hand, and a skip leaves it as it was."""
    optimizer = optim.SparseAdam

    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(6, 3, sparse=True)

        def forward(self, ids: Tensor, factor: Tensor) -> Tensor:
            return self.table(ids) * factor

    model, twin = Bad(), Bad()
    step = make(model, optimizer, accumulate_steps=2)
    theirs = optimizer(twin.parameters())
    one, source = torch.ones(()), torch.Generator().manual_seed(1)
    given = [((torch.randint(6, (4,), generator=source), one), torch.randn(4, 3, generator=source)) for _ in range(4)]
    for i, (x, y) in enumerate(given):
        if i % 2 == 0:
            theirs.zero_grad()
        (F.mse_loss(twin(*x), y) / 2).backward()
        if i % 2:
            theirs.step()
    step(*given[0])
    before = state(model, step.optimizer)
    assert bool(step((given[0][0][0], torch.tensor(INF)), given[0][1]).skipped)
    assert differences(state(model, step.optimizer), before) == []
    for batch in given:
        step(*batch)
    assert differences(state(model, step.optimizer), state(twin, theirs)) == []
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.is_sparse
    step(*given[0])
    assert not bool(step.flush().skipped)


def test_sparse_gradients_are_clipped() -> None:
    model = nn.Embedding(6, 3, sparse=True)
    step = make(model, sgd, max_grad_norm=0.01)
    result = step(torch.tensor([1, 1, 2]), torch.ones(3, 3))
    assert float(result.grad_norm) > 0.1
    assert float(model.weight.grad.coalesce().values().norm()) == pytest.approx(0.01, rel=1e-4)


# --------------------------------------------------------------------------------------- state of the model


class Stateful(nn.Module):
    """Keeps state in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("unsaved", torch.zeros((), dtype=torch.int64), persistent=False)
        self.steps = torch.zeros(())
        self.last, self.before_last = torch.ones(4), torch.zeros(4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.student = nn.Linear(4, 4)
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.broken:
            torch._dynamo.graph_break()
        mean = x.detach().mean(0)
        with torch.no_grad():
            self.written.mul_(0.5).add_(mean)
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        self.unsaved += 1
        self.replaced = self.replaced * 0.5 + mean
        self.steps = self.steps + 1
        self.before_last, self.last = self.last, mean
        return self.student(x) + self.teacher(x) + self.written + self.replaced + self.before_last


@pytest.mark.parametrize(
    ("size", "broken"), [(1, False), (3, False), (3, True)], ids=["whole", "whole, three batches", "pieces"]
)
@pytest.mark.filterwarnings("ignore:amp_compile. the training step is not one graph")
def test_all_state_of_the_model_is_restored(size: int, broken: bool) -> None:
    """With accumulation, what the earlier micro-batches of the skipped update wrote is undone too."""
    model = Stateful()
    model.broken = broken
    step = make(model, accumulate_steps=size)
    good = batches(size, (5, 3), (5, 4))
    for batch in good:
        step(*batch)
    before = state(model, step.optimizer)
    assert float(model.steps) == float(model.unsaved) == size
    for at in range(size):  # which micro-batch is the bad one
        for i, batch in enumerate(good):
            result = step(*(bad(batch) if i == at else batch))
            assert bool(result.skipped) == (i == size - 1)
        assert differences(state(model, step.optimizer), before) == []
    for batch in good:
        assert not bool(step(*batch).skipped)
    assert "steps" in [name.strip(".") for name in differences(state(model), before)]
    assert float(model.steps) == 2 * size
    assert (step.joint_graphs == []) == broken


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.first = nn.Linear(3, 3), None
        self.by_name, self.by_place = {"mean": torch.zeros(3)}, [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        self.by_name["mean"] = self.by_name["mean"] + mean
        self.by_place[0] = self.by_place[0] - mean
        self.first = mean if self.first is None else self.first
        return self.out(x) + self.by_name["mean"] + self.first


def test_state_in_containers() -> None:
    """In a dict, in a list, and in an attribute that held None."""
    model = Containers()
    step = make(model)
    (good,) = batches(1, (4, 3))
    assert bool(step(*bad(good)).skipped)
    assert model.first is None
    step(*good)
    before = copy.deepcopy((model.first, model.by_name["mean"], model.by_place[0]))
    assert bool(step(*bad(good)).skipped)
    for kept, now in zip(before, (model.first, model.by_name["mean"], model.by_place[0]), strict=True):
        assert torch.equal(kept, now)


def test_spectral_norm_is_restored() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    step = make(model)
    (good,) = batches(1, (2, 3))
    step(*good)
    before = state(model)
    assert bool(step(*bad(good)).skipped)
    assert differences(state(model), before) == []


def test_state_that_only_a_later_batch_of_the_update_wrote() -> None:
    model = norm_network()
    step = make(model, accumulate_steps=3)
    good = batches(3, (5, 3), (5, 2))
    before = state(model)
    model.eval()
    step(*good[0])
    model.train()
    step(*good[1])
    assert bool(step(*bad(good[2])).skipped)
    assert differences(state(model), before) == []


class Bank(nn.Module):
    """A memory whose shape changes: the newest six rows that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.memory = torch.cat([self.memory, x.detach()])[-6:]
        return self.out(x) + self.memory.mean(0)


@pytest.mark.filterwarnings("ignore:amp_compile. the training step is not one graph")
def test_a_buffer_that_changes_its_shape() -> None:
    model = Bank()
    step = make(model)
    good = batches(2, (4, 3))
    step(*good[0])
    before = state(model)
    assert bool(step(*bad(good[1])).skipped)
    assert differences(state(model), before) == []
    step(*good[1])
    assert torch.equal(model.memory, torch.cat([good[0][0], good[1][0]])[-6:])


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.out(x)


def test_data_that_the_model_writes_to_is_not_put_back() -> None:
    model = WritesItsInput()
    step = make(model, level="O2")
    x = torch.tensor([[1.0, 2.0, INF]])
    assert bool(step(x, torch.zeros(1, 3)).skipped)
    assert x.tolist() == [[2.0, 3.0, INF]]


class Centers(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        self.center.lerp_(output.detach().mean(0), 0.1)
        return ((output - targets - self.center) * self.temperature).pow(2).mean()


@pytest.mark.parametrize("hooked", [False, True], ids=["whole", "pieces"])
@pytest.mark.filterwarnings("ignore:amp_compile. the training step is not one graph")
def test_the_loss_is_a_module_with_state(hooked: bool) -> None:
    model, loss = nn.Linear(3, 3), Centers()
    if hooked:
        model.weight.register_hook(lambda grad: None)
    step = compile_train_step(model, loss, sgd([*model.parameters(), *loss.parameters()]), level="O0")
    (good,) = batches(1, (4, 3))
    step(*good)
    assert loss.temperature.item() != 1.0
    assert bool(loss.center.any())
    before = state(loss)
    assert bool(step(*bad(good)).skipped)
    assert differences(state(loss), before) == []


# -------------------------------------------------------------------------------------------- no host sync


def in_fused_kernel(event: Any) -> bool:
    """torch's fused Adam and Adagrad on CPU read their own step counts inside the kernel; those lie on the host."""
    while event is not None and not event.name.startswith("aten::_fused_"):
        event = event.cpu_parent
    return event is not None


@pytest.mark.parametrize("size", [1, 3])
def test_fused_optimizers_make_the_host_wait_for_nothing(size: int) -> None:
    model = norm_network()
    step = make(model, fused_adamw, level="O2", accumulate_steps=size, max_grad_norm=1.0)
    good = batches(size, (5, 3), (5, 2))
    run = [*good[:-1], bad(good[-1]), *good]
    for batch in run:  # capture
        step(*batch)
    fused_sgd = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    adagrad = optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    for optimizer in (step.optimizer, fused_sgd, adagrad):
        step.optimizer = optimizer
        cpu = torch.profiler.ProfilerActivity.CPU
        with as_on_a_gpu(step), torch.profiler.profile(activities=[cpu]) as profile:
            results = [step(*batch) for batch in run]
        waits = [e for e in profile.events() if e.name == "aten::_local_scalar_dense" and not in_fused_kernel(e)]
        assert waits == [], type(optimizer).__name__
        assert any(e.name.startswith("aten::_fused_") for e in profile.events())
        assert [bool(r.skipped) for r in results] == [i == size - 1 for i in range(2 * size)]


# ---------------------------------------------------------------------------------------------- schedulers


def test_schedulers_hear_nothing_false_and_their_rates_count() -> None:
    """The first update is skipped; every scheduler then goes on as in a loop by hand, without a warning."""
    makers: dict[str, Any] = {
        "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
    }
    model = nn.Linear(3, 2)
    step = make(model)
    good = batches(4, (5, 3), (5, 2))
    start = copy.deepcopy(model.state_dict())
    step(*good[0])
    for name, scheduler in makers.items():
        for fused in (False, True):
            model.load_state_dict(start)
            twin = copy.deepcopy(model)
            ours, theirs = (optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=fused) for m in (model, twin))
            step.optimizer = ours
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                mine = scheduler(ours)
                assert bool(step(*bad(good[0])).skipped)
                mine.step()
                for x, y in good:
                    step(x, y)
                    mine.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = scheduler(theirs)
                other.step()
                for x, y in good:
                    theirs.zero_grad()
                    F.mse_loss(twin(x), y).backward()
                    theirs.step()
                    other.step()
            assert mine.get_last_lr() == other.get_last_lr(), name
            assert differences(state(model), state(twin)) == [], name


def test_reduce_on_plateau_takes_the_steps_loss() -> None:
    model = nn.Linear(3, 2)
    step = make(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(step.optimizer, factor=0.5, patience=0)
    (good,) = batches(1, (5, 3), (5, 2))
    for _ in range(3):
        scheduler.step(step(*good).loss + len(scheduler.get_last_lr()))
    step(*good)
    step.optimizer.param_groups[0]["lr"] = 0.0
    before = state(model)
    step(*good)
    assert differences(state(model), before) == []


# ----------------------------------------------------------------------------------------------- the scale


def test_the_scale_falls_and_grows_and_is_the_one_that_was_used() -> None:
    model = nn.Linear(3, 2)
    scaler = DynamicLossScaler(init_scale=8.0, growth_interval=2, backoff_factor=0.25, growth_factor=4.0)
    step = make(model, loss_scaler=scaler)
    (good,) = batches(1, (5, 3), (5, 2))
    kinds = [good, good, bad(good), bad(good), good, bad(good), good, good, good]
    results = [step(*batch) for batch in kinds]
    assert [float(r.scale) for r in results] == [8.0, 8.0, 32.0, 8.0, 2.0, 2.0, 1.0, 1.0, 4.0]
    assert [bool(r.skipped) for r in results] == [False, False, True, True, False, True, False, False, False]
    assert scaler.get_scale() == 4.0
    assert step.scaler is scaler


def test_a_gradient_too_large_for_fp16_is_skipped_until_the_scale_fits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    step = make(model, level="O2", dtype=F16, loss_scaler=DynamicLossScaler(init_scale=2.0**30))
    (good,) = batches(1, (4, 8))
    results = [step(*good) for _ in range(20)]
    skipped = [bool(r.skipped) for r in results]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert [float(r.scale) for r in results[: sum(skipped)]] == [2.0 ** (30 - i) for i in range(sum(skipped))]
    assert all(bool(r.loss.isfinite()) for r in results)


def test_one_bad_value_in_one_gradient_is_enough() -> None:
    class OneBad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.root = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor([1.0, 1.0, 0.0]))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.fine + self.root.sqrt()  # the derivative of sqrt at 0 is inf, the loss is finite

    model = OneBad()
    step = make(model)
    result = step(*batches(1, (2, 3))[0])
    assert bool(result.skipped)
    assert bool(result.loss.isfinite())
    assert not bool(result.grad_norm.isfinite())
    assert model.fine.tolist() == [1.0, 1.0, 1.0]


class Exchanges(nn.Module):
    """Two buffers that change places, a count, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("one", torch.zeros(2))
        self.register_buffer("other", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.one.clone()
        self.one.copy_(self.other)
        self.other.copy_(kept)
        return self.norm(self.line(x)) + self.one


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("scaler", ["dynamic", None])
def test_new_state_is_written_and_that_of_a_skipped_update_is_not(reads: bool, scaler: str | None) -> None:
    torch.manual_seed(0)
    model = Exchanges()
    plain = copy.deepcopy(model)
    step = compile_train_step(model, F.mse_loss, sgd(model.parameters()), dtype=torch.bfloat16, loss_scaler=scaler)
    step._window.reads_flags = reads
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    for number in range(1, 4):
        plain(x)
        step(x, y)
        assert int(model.norm.num_batches_tracked) == number
        assert torch.equal(model.one, plain.one)
        assert torch.equal(model.other, plain.other)
    if scaler is not None:
        before = copy.deepcopy(model.state_dict())
        assert bool(step(x, y * float("inf")).skipped)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
