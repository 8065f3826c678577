"""``step.health()``: updates lost to rounding, gradients flushed to zero, activations near a limit; and its samples."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import ArgumentError, StaticLossScaler, TrainStep, compile_train_step, fit
from amp_compiler.kernels import cpu
from amp_compiler.training.health import Health
from amp_compiler.training.health_watch import Movement
from training_helpers import bad, batches, differences, state

DATA = batches(8, (6, 8), (6, 2))


class Net(nn.Module):
    """``gain`` is what one activation is multiplied by."""

    def __init__(self, gain: float = 1.0, broken: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 2)
        self.gain, self.broken = gain, broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.gain
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(torch.tanh(x))


class Random(Net):
    """With batch norm, which has a state, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.relu(self.norm(self.first(x))), 0.1, self.training))


def tiny(output: Tensor, targets: Tensor) -> Tensor:
    return 1e-9 * F.mse_loss(output, targets)


def make(loss: Any = F.mse_loss, lr: float = 0.1, net: nn.Module | None = None, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = net or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return compile_train_step(model, loss, optimizer, **{"dtype": torch.float16, "loss_scaler": None, **options})


def run(step: TrainStep, number: int = 1) -> TrainStep:
    for x, y in DATA[:number]:
        step(x, y)
    return step


@pytest.fixture(scope="module")
def module_kernels() -> Iterator[None]:
    """The kernels of ``conftest.py``, for what several tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cpu.SETTING, "wide")
        yield


# ------------------------------------------------------------------------------------------------ lost updates

numbers = st.floats(-4, 4, width=16)
low = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@settings(max_examples=30)
@given(low, st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9), st.sampled_from([1.0, 1e-2, 1e-4, 1e-8]))
def test_an_update_is_lost_if_an_element_with_a_gradient_stays(
    dtype: torch.dtype, pairs: list[tuple[float, float]], lr: float
) -> None:
    weight = nn.Parameter(torch.tensor([w for w, _ in pairs], dtype=dtype))
    weight.grad = torch.tensor([g for _, g in pairs], dtype=dtype)
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=lr)
    movement = Movement(optimizer, {id(weight): "weight"})
    optimizer.step()
    movement.remove()
    ((updates, lost),) = [m.counts.tolist() for m in movement.found]
    assert updates == int((weight.grad != 0).sum())
    assert lost == int(((weight.grad != 0) & (weight == before)).sum())
    optimizer.step()
    assert len(movement.found) == 1  # it looks no longer


def test_a_large_parameter_is_sampled() -> None:
    """Half of the elements are too large for the update; every 63rd element or so is looked at."""
    weight = nn.Parameter(torch.tensor([1.0, 1e9]).repeat(500_000))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    movement = Movement(optimizer, {})
    optimizer.step()
    updates, lost = movement.found[0].counts.tolist()
    assert 2**13 <= updates <= 2**15
    assert lost / updates == pytest.approx(0.5, abs=1e-3)


def test_the_tensor_that_the_optimizer_updates_counts() -> None:
    """A master that stands in a parameter's place during the step, as with fp32 master weights."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    master = weight.detach().float().requires_grad_()
    master.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    movement = Movement(optimizer, {id(weight): "weight"})
    optimizer.param_groups[0]["params"] = [master]
    optimizer.step()
    assert [(m.name, m.dtype, m.counts.tolist()) for m in movement.found] == [("weight", "float32", [4, 0])]


@pytest.fixture(scope="module")
def still(module_kernels: None) -> Health:
    """Of a step without faults whose learning rate is zero."""
    torch._dynamo.reset()
    return run(make(lr=0.0)).health()


def test_a_learning_rate_of_zero_loses_nothing(still: Health) -> None:
    assert all(p.updates == 0 for p in still.parameters)
    assert not any("too small" in line for line in still.advice)


@pytest.mark.parametrize("every", [None, 1], ids=["on demand", "sampled"])
def test_lost_updates_of_a_step(every: int | None) -> None:
    step = make(lr=1e-9, health_every=every)
    before = state(step.model)
    run(step)
    health = step.health()
    notes = [note for note in step.report().notes if note.startswith("health: ")]
    assert notes == ([f"health: {line}" for line in health.advice] if every else [])
    for row in health.parameters:
        weight, gradient = step.model.get_parameter(row.name), step.model.get_parameter(row.name).grad
        assert gradient is not None
        assert row.updates == int(gradient.count_nonzero())
        if every:
            assert row.lost == int(((weight == before[row.name]) & (gradient != 0)).sum())
        assert row.lost_share > 0.5 or row.name.endswith("bias")
    assert health
    assert "too small even for float32, up to 100% of them: raise the learning rate" in str(health)
    assert ("too small even for float32" in step.report().to_html()) is bool(every)


# ------------------------------------------------------------------------------------- gradients and activations


@pytest.mark.parametrize("broken", [False, True])
def test_flushed_gradients_are_those_of_explain_underflow(broken: bool) -> None:
    step = run(make(tiny, net=Net(broken=broken)))
    found, health = step.explain_underflow(), step.health()
    shares = {p.name: p.flushed_share for p in health.parameters if p.flushed_share}
    assert shares == dict(found.parameters)
    assert shares
    assert found.better_scale is not None
    assert f"A scale of {found.better_scale:g} would save them" in str(health)
    if not broken:
        saved = run(make(tiny, loss_scaler=StaticLossScaler(found.better_scale)))
        assert not any(p.flushed for p in saved.health().parameters)


def test_activations_near_the_largest_number() -> None:
    health = run(make(net=Net(gain=3e4))).health()
    (mul,) = [op for op in health.ops if op.op == "mul"]
    assert mul.near_overflow > 0.4
    assert mul.dtype == "float16"
    assert "test_health.py" in mul.source
    assert "Results of mul are near the largest float16" in str(health)
    assert "black_list=['mul']" in str(health)


def test_activations_near_zero() -> None:
    """A value of 1e-6 is subnormal in fp16."""
    health = run(make(net=Net(gain=1e-6))).health()
    (mul,) = [op for op in health.ops if op.op == "mul"]
    assert mul.near_zero > 0.9
    assert "are near zero in float16" in str(health)


def test_ops_are_told_once_and_casts_of_parameters_not_at_all(still: Health) -> None:
    names = [op.name for op in still.ops]
    assert len(names) == len(set(names))
    assert {"first: the input", "first: linear", "mul", "second: linear"} <= set(names)
    assert not any("to_copy" in name or "weight" in name for name in names)
    assert not any(op.near_overflow for op in still.ops)


# ------------------------------------------------------------------------------------------------------ samples


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.trainers), True])
def test_samples_leave_the_bits_of_a_run_alone(fused: bool) -> None:
    """With dropout, batch norm, accumulation, clipping and a skipped update."""
    results = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = Random()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        step = compile_train_step(model, F.mse_loss, optimizer, dtype=torch.float16, accumulate_steps=2,
                                  max_grad_norm=0.5, health_every=every)  # fmt: skip
        torch.manual_seed(1)
        losses = [float(step(x, y).loss) for x, y in [*DATA[:4], bad(DATA[4]), *DATA[5:]]]
        results.append({**state(model, optimizer), "losses": str(losses), "draw": float(torch.rand(()))})
        if every:
            taken = step.health()
            assert (taken.samples, taken.looks, taken.every) == (4 if fused else 3, 1, 1)
            rows = {p.name: p for p in taken.parameters}
            assert 0 < rows["second.weight"].updates <= 3 * 32  # the skipped update counts for nothing
    assert differences(*results) == []


def test_the_period_and_what_is_kept() -> None:
    step = run(make(health_every=3), 8)
    health = step.health()
    assert (health.samples, health.looks) == (2, 1)
    assert "2 samples, every 3 updates" in str(health)
    assert copy.deepcopy(step)._health.every == 3
    step = make(health_every=1)
    for _ in range(5):
        run(step, 5)
    assert (step.health().samples, step.health().looks) == (16, 4)


def test_fit_passes_it_on() -> None:
    model = nn.Linear(8, 2)
    history = fit(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), DATA[:4], health_every=2)
    assert history.step is not None
    assert history.step.health().samples == 2


def test_asking_changes_nothing() -> None:
    step = make(F.mse_loss, loss_scaler="dynamic")
    step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-3)
    run(step)
    gradients = {name: p.grad for name, p in step.model.named_parameters()}
    before, draws = state(step.model, step.optimizer), torch.get_rng_state()
    first = step.health()
    assert differences(state(step.model, step.optimizer), before) == []
    assert all(p.grad is gradients[name] for name, p in step.model.named_parameters())
    assert torch.equal(torch.get_rng_state(), draws)
    assert step.health() == first


def test_what_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(health_every=1)
    assert str(step.health()).endswith("There is nothing to look at yet: run a step first.")
    assert not step.health()

    def fails(watcher: Any) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(step, "_look", fails)
    health = run(step).health()
    assert health.samples == 1
    assert health.ops == ()
    assert "could not run in fp32, so there is less to tell: not enough memory" in str(health)


def test_an_optimizer_that_cannot_be_copied() -> None:
    class Odd(torch.optim.SGD):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    step = make()
    step.optimizer = Odd(step.model.parameters(), lr=0.1)
    health = run(step).health()
    assert "compile with health_every=50" in str(health)
    assert health.ops


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_wrong_period(every: Any) -> None:
    with pytest.raises(ArgumentError, match="health_every must be a whole number of at least 1 or None"):
        make(health_every=every)


# -------------------------------------------------------------------------------------------------------- forms


@pytest.fixture(scope="module")
def ill(module_kernels: None) -> Health:
    torch._dynamo.reset()
    return run(make(tiny, lr=1e-9, net=Net(gain=3e4))).health()


def test_json(ill: Health) -> None:
    data = json.loads(ill.to_json())
    assert data["kind"] == "amp-compiler health"
    assert (data["dtype"], data["scale"], data["every"]) == ("float16", 1.0, None)
    assert [row["name"] for row in data["parameters"]] == [p.name for p in ill.parameters]
    assert data["parameters"][0]["flushed_share"] == ill.parameters[0].flushed_share
    assert data["ops"][0]["values"]["elements"] == ill.ops[0].values.elements
    assert data["advice"] == list(ill.advice)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "summary":
            self.classes.append(dict(attrs)["class"])
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html(ill: Health, tmp_path: Path) -> None:
    text = ill.to_html(tmp_path / "health.html")
    assert (tmp_path / "health.html").read_text() == text
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert len(tags.classes) == len(ill.parameters) + len(ill.ops)
    assert {"overflows", "fits"} <= set(tags.classes)
    assert "first.weight (float32)" in text
    assert "near the largest float16" in text
    assert "<svg" in text


def test_a_sound_step_says_so() -> None:
    """Values of 1e-6, which are subnormal in fp16, are normal in bf16."""
    health = run(make(lr=100.0, loss_scaler="dynamic", dtype=torch.bfloat16, net=Net(gain=1e-6))).health()
    assert not any(op.near_zero for op in health.ops)
    assert not health
    assert "No update is lost, no gradient is flushed to zero, and no activation is near a limit." in str(health)


@pytest.mark.filterwarnings("ignore::amp_compiler.common.errors.AmpWarning")
@pytest.mark.parametrize("every", [None, pytest.param(1, marks=pytest.mark.trainers)])
def test_lost_updates_are_those_of_the_masters(every: int | None) -> None:
    """bf16 weights of 1 lose every small update; fp32 masters lose none of them, and neither does the advice speak."""

    def lost(method: bool | str) -> float:
        norm = nn.LayerNorm(8, dtype=torch.bfloat16)
        options = {"dtype": torch.bfloat16, "master_weights": method, "health_every": every}
        step = make(lambda y, _: y.float().pow(3).mean(), 1e-3, norm, **options)
        step(DATA[0][0].bfloat16(), None)
        (row,) = [row for row in step.health().parameters if row.name == "weight"]
        return row.lost_share

    assert lost(False) == 1.0
    assert [lost(method) for method in (True, "stochastic", "kahan")] == [0.0, 0.0, 0.0]


def test_it_says_that_no_update_was_made() -> None:
    step = make(accumulate_steps=2)
    step(*DATA[0])
    assert "No update was made of these 1 micro-batches yet" in str(step.health())
    skipped = make(loss_scaler="dynamic")
    skipped(DATA[0][0] * float("inf"), DATA[0][1])
    assert "The last update was skipped" in str(skipped.health())
