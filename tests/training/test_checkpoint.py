"""Save a run, go on in a new process bit for bit; a checkpoint that does not fit changes nothing.

Run as a program, this file is the new process: it goes on from every checkpoint in a directory.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amp_compiler import (
    AmpWarning,
    CheckpointError,
    DynamicLossScaler,
    Policy,
    StaticLossScaler,
    TrainStep,
    compile_train_step,
)

BAD = float("inf")


class Network(nn.Module):
    """Batch norm and dropout; ``breaks``: not one graph."""

    def __init__(self, breaks: bool = False, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.drop, self.last, self.breaks = nn.Dropout(0.3), nn.Linear(width, 2), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(self.drop(x.relu()))


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters()), "lr": 0.03}]
    return torch.optim.Adam([*groups, {"params": list(model.norm.parameters())}], lr=0.05, amsgrad=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Run:
    """One run: ``cut`` calls, a checkpoint, and on to ``calls``; the batches in ``bad`` overflow."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    cut: int
    accumulate: int = 1
    bad: tuple[int, ...] = ()
    breaks: bool = False
    scaler: Any = "dynamic"
    calls: int = 8
    clip: float | None = None

    def start(self) -> tuple[TrainStep, Any]:
        torch.manual_seed(7)
        model = Network(self.breaks)
        optimizer = self.optimizer(model)
        scaler = DynamicLossScaler(1024.0, growth_interval=3) if self.scaler == "dynamic" else self.scaler
        step = compile_train_step(
            model, nn.functional.cross_entropy, optimizer, dtype=torch.float16, loss_scaler=scaler,
            accumulate_steps=self.accumulate, max_grad_norm=self.clip,
        )  # fmt: skip
        return step, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def go(self, step: TrainStep, scheduler: Any, calls: range) -> list[Any]:
        """What every call gave, and the gradients it left."""
        seen = []
        for i in calls:
            data = torch.Generator().manual_seed(i)
            x, y = torch.randn(6, 4, generator=data), torch.randint(2, (6,), generator=data)
            if i in self.bad:
                x[0, 0] = BAD
            result = step(x, y)
            seen.append(copy.deepcopy((result.loss, result.skipped, result.scale, result.grad_norm, grads(step))))
            if (i + 1) % self.accumulate == 0:
                scheduler.step()
        return seen


RUNS = {
    "fused AdamW, right after a skipped update": Run(fused_adamw, cut=3, bad=(0, 2), clip=0.5),
    "Adam of three groups, no scaler, in the middle of a window": Run(adam, cut=3, accumulate=2, scaler=None),
    "SGD, in the middle of a window that will be skipped": Run(sgd, cut=6, accumulate=4, bad=(4,)),
    "SGD, in pieces, in the middle of a window": Run(sgd, cut=4, accumulate=3, bad=(5,), breaks=True),
}


def grads(step: TrainStep) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in step.model.named_parameters()}


def everything(step: TrainStep) -> Any:
    """All that a load could change, copied."""
    window = step._window
    return copy.deepcopy(
        (
            step.model.state_dict(),
            step.optimizer.state_dict(),
            None if step.scaler is None else (step.scaler.state_dict(), step.scaler.get_scale()),
            (window.done, window.number, window.size, window.scale, window.found, window.saved),
            grads(step),
            torch.get_rng_state(),
            [group["lr"] for group in step.optimizer.param_groups],
        )
    )


def same_bits(ours: Any, theirs: Any) -> None:
    """Equal structure, types and bits; NaN equals NaN."""
    left, structure = pytree.tree_flatten_with_path(ours)
    right, other = pytree.tree_flatten_with_path(theirs)
    assert structure == other
    for (path, a), (_, b) in zip(left, right, strict=True):
        where = pytree.keystr(path)
        assert type(a) is type(b), where
        if isinstance(a, Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), where
            assert torch.allclose(a, b, rtol=0, atol=0, equal_nan=True), where
        else:
            assert a == b or (a != a and b != b), where


# ------------------------------------------------------------------------------------------------ a new process


@pytest.mark.filterwarnings("ignore:.*not one graph")
def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMP_VERIFY", raising=False)  # bits are compared here, graphs elsewhere
    expected = {}
    for index, (name, run) in enumerate(RUNS.items()):
        step, scheduler = run.start()
        run.go(step, scheduler, range(run.cut))
        torch.save({"name": name, "step": step.state_dict(), "scheduler": scheduler.state_dict()},
                   tmp_path / f"{index}.pt")  # fmt: skip
        seen = run.go(step, scheduler, range(run.cut, run.calls))
        expected[index] = (seen, everything(step), scheduler.state_dict())
        updates = {i // run.accumulate for i in run.bad} - set(range(run.cut // run.accumulate))
        assert sum(bool(skipped) for _, skipped, *_ in seen) == len(updates)
    subprocess.run([sys.executable, __file__, str(tmp_path)], check=True)
    for index, name in enumerate(RUNS):
        resumed = torch.load(tmp_path / f"{index}.resumed.pt", weights_only=False)
        try:
            same_bits(expected[index], resumed)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def resume(directory: Path) -> None:
    """The new process."""
    torch.set_num_threads(1)
    for index, (name, run) in enumerate(RUNS.items()):
        saved = torch.load(directory / f"{index}.pt", weights_only=True)
        assert saved["name"] == name
        step, scheduler = run.start()
        torch.manual_seed(99)  # a new process draws other numbers
        step.load_state_dict(saved["step"])
        scheduler.load_state_dict(saved["scheduler"])
        seen = run.go(step, scheduler, range(run.cut, run.calls))
        torch.save((seen, everything(step), scheduler.state_dict()), directory / f"{index}.resumed.pt")


def test_a_checkpoint_is_good_for_more_than_one_load() -> None:
    run = Run(adam, cut=5, accumulate=2, bad=(3,))
    step, scheduler = run.start()
    run.go(step, scheduler, range(5))
    saved, rates = copy.deepcopy(step.state_dict()), copy.deepcopy(scheduler.state_dict())
    first = run.go(step, scheduler, range(5, 8))
    for _ in range(2):
        step.load_state_dict(saved)
        scheduler.load_state_dict(rates)
        same_bits(run.go(step, scheduler, range(5, 8)), first)


class Weighted(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls.add_(1)
        return (self.weight * (output.float() - target).pow(2)).mean()


def test_what_only_the_loss_and_the_optimizer_hold_is_saved_too() -> None:
    def start() -> tuple[TrainStep, Tensor]:
        torch.manual_seed(0)
        model, loss, extra = nn.Linear(4, 2), Weighted(), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters(), extra], lr=0.1, momentum=0.9)
        return compile_train_step(model, loss, optimizer, dtype=torch.bfloat16, accumulate_steps=2), extra

    x, y = torch.ones(3, 4), torch.ones(3, 2)
    (first, extra), (second, other) = start(), start()
    for _ in range(3):
        first(x, y)
    extra.data.mul_(5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(extra, other)
    assert float(second.loss_fn.calls) == 3
    same_bits([first(x, y).loss, *first.loss_fn.state_dict().values()],
              [second(x, y).loss, *second.loss_fn.state_dict().values()])  # fmt: skip
    assert not torch.equal(second.loss_fn.weight, torch.ones(2))


# ------------------------------------------------------------------------------------------------ damaged and foreign

Damaged = tuple[TrainStep, Any]


@pytest.fixture(scope="module")
def pair() -> Iterator[Damaged]:
    """A step in the middle of a window, and a good checkpoint of an earlier moment, in the middle of another one."""
    run = Run(adam, cut=0, accumulate=3)
    step, scheduler = run.start()
    run.go(step, scheduler, range(4))
    saved = copy.deepcopy(step.state_dict())
    run.go(step, scheduler, range(4, 8))
    yield step, saved
    torch._dynamo.reset()


def refused(step: TrainStep, state: Any, message: str = "") -> None:
    """A CheckpointError with this message, and nothing is changed."""
    before = everything(step)
    with pytest.raises(CheckpointError, match=message):
        step.load_state_dict(state)
    same_bits(everything(step), before)


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a nested value with one entry replaced, or left out if ``value`` is ``LEFT_OUT``."""
    if not path:
        return value
    key, *rest = path
    copied: Any = dict(state) if isinstance(state, dict) else list(state)
    if not rest and value is LEFT_OUT:
        del copied[key]
    else:
        copied[key] = changed(state[key], tuple(rest), value)
    return tuple(copied) if isinstance(state, tuple) else copied


LEFT_OUT, COMPLEX = object(), torch.zeros(2, dtype=torch.complex64)
GRAD_SCALER = torch.amp.GradScaler("cpu").state_dict()
WHOLE = {
    "None": (None, "dictionary, not a NoneType.*step.state_dict"),
    "a list": ([1], "dictionary, not a list"),
    "an empty one": ({}, "not a checkpoint of a training step"),
    "a scaler's": (GRAD_SCALER, "loss scaler's: load it into that object"),
    "a model's": (nn.Linear(2, 2).state_dict(), "a model's or an optimizer's: load"),
    "another version": ({"format": "amp_compiler.TrainStep", "version": 99}, "version 99"),
}
ENTRIES: dict[tuple[Any, ...], list[tuple[Any, str]]] = {
    ("model",): [(LEFT_OUT, "dictionary|model"), ({}, "model"), (None, "model")],
    ("model", "first.weight"): [(LEFT_OUT, "model"), (torch.zeros(8, 5), "first.weight"), (3, "first.weight")],
    ("model", "norm.num_batches_tracked"): [(torch.tensor(1.0), "num_batches_tracked")],
    ("optimizer",): [(None, "optimizer"), ({}, "optimizer"), ({"state": {}, "param_groups": []}, "optimizer")],
    ("optimizer", "state", 0, "exp_avg"): [(torch.zeros(3), "exp_avg"), (None, "exp_avg"), (LEFT_OUT, "state.0")],
    ("optimizer", "param_groups", 0): [(LEFT_OUT, "param_groups"), (None, "param_groups")],
    ("optimizer", "param_groups", 0, "lr"): [(LEFT_OUT, r"param_groups\[0\]"), ("x", "lr"), (None, "lr")],
    ("scaler",): [(None, "scaler"), (GRAD_SCALER, "scaler")],
    ("scaler", "scale"): [(float("nan"), "scale"), (0.0, "scale"), (float("inf"), "scale"), (-1.0, "scale")],
    ("scaler", "_growth_tracker"): [(-1, "growth_tracker"), (LEFT_OUT, "scaler")],
    ("window", "done"): [(-1, "batches are waiting"), (3, "batches are waiting"), ("x", "done"), (None, "done")],
    ("window", "size"): [(4, "accumulate_steps")],
    ("window", "scale"): [(torch.tensor(float("nan")), "scale"), (torch.tensor(0.0), "scale"), (None, "scale")],
    ("window", "found"): [(torch.zeros(3), "found"), (None, "found")],
    ("window", "gradients", "last.bias"): [(torch.zeros(3), "last.bias"), (COMPLEX, "last.bias")],
    ("rng",): [(None, "rng"), ([], "rng"), ([torch.zeros(8)], "rng"), ("x", "rng")],
    ("rng", 0): [(torch.zeros(5056), "rng"), (torch.zeros(3, dtype=torch.uint8), "rng")],
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_no_checkpoint_at_all(pair: Damaged, kind: str) -> None:
    refused(pair[0], *WHOLE[kind])


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: ".".join(map(str, path)))
def test_damaged(pair: Damaged, path: tuple[Any, ...]) -> None:
    for value, message in ENTRIES[path]:
        refused(pair[0], changed(pair[1], path, value), message)


FOREIGN: dict[str, tuple[Run, Callable[[TrainStep], Any], str]] = {
    "another model": (Run(sgd, 0), lambda _: Network(width=16), "first.weight.*8, 4.*here"),
    "a model with more": (Run(sgd, 0), lambda step: nn.Sequential(step.model), "lacks 0.first.weight"),
    "another dtype": (Run(sgd, 0), lambda step: copy.deepcopy(step.model).double(), "float32.*float64"),
    "another optimizer": (Run(fused_adamw, 0), lambda step: step.model, "AdamW as optimizer, but this step has SGD"),
    "other groups": (Run(adam, 0), lambda step: step.model, "optimizer"),
    "another scaler": (Run(sgd, 0, scaler=StaticLossScaler(2.0)), lambda step: step.model, "StaticLossScaler as"),
    "no scaler": (Run(sgd, 0, scaler=None), lambda step: step.model, "no scaler as scaler"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign(kind: str) -> None:
    run, model, message = FOREIGN[kind]
    theirs, _ = run.start()
    ours = model(theirs)
    step = compile_train_step(ours, nn.functional.cross_entropy, sgd(ours), loss_scaler=DynamicLossScaler(8.0))
    refused(step, theirs.state_dict(), message)


def test_other_groups_of_one_optimizer(pair: Damaged) -> None:
    model = Network()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    step = compile_train_step(model, nn.functional.cross_entropy, optimizer, accumulate_steps=3)
    refused(step, pair[1], r"groups have \[2, 2, 2\] parameters, those here \[6\]")


def test_made_in_the_middle_of_another_window(pair: Damaged) -> None:
    model = Network()
    step = compile_train_step(model, nn.functional.cross_entropy, adam(model), accumulate_steps=2)
    refused(step, pair[1], "update of 3 batches.*accumulate_steps=2.*saved right after an update")


def test_another_policy_is_loaded_with_a_warning() -> None:
    def make(**options: Any) -> TrainStep:
        model = nn.Linear(4, 2)
        return compile_train_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    state = make(dtype=torch.float16).state_dict()
    cases = {
        r"level O2, float16 there, level O1, float16 here": make(level="O1", dtype=torch.float16),
        r"level O2, float16 there, level O2, bfloat16 here": make(dtype=torch.bfloat16),
        r"level O2, float16 there, Policy\.torch, float16 here": make(policy=Policy.torch("cpu", torch.float16)),
        r"both level O2, float16, but with other lists or rules": make(dtype=torch.float16, black_list=["gelu"]),
    }
    for told, step in cases.items():
        with pytest.warns(AmpWarning, match=told):
            step.load_state_dict(state)
        assert torch.equal(step.model.weight, state["model"]["weight"])  # type: ignore[arg-type]
    older = {key: value for key, value in state.items() if key != "policy"}
    older["contents"] = {key: value for key, value in state["contents"].items() if not key.startswith("policy")}
    older["contents"][""] = f"dictionary of {len(older) - 1}"
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        make(dtype=torch.float16).load_state_dict(state)
        make(dtype=torch.bfloat16).load_state_dict(older)


class Stubborn(nn.Linear):
    """Its own loading code writes something, then gives up."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        raise AssertionError("not today")


@pytest.mark.parametrize("where", ["a module", "the optimizer"])
def test_code_of_the_user_that_fails_while_loading(where: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), (Stubborn if where == "a module" else nn.Linear)(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    step = compile_train_step(model, nn.functional.cross_entropy, optimizer)
    saved = copy.deepcopy(step.state_dict())
    saved["model"]["0.weight"].add_(1)
    saved["scaler"]["scale"] = 2.0
    saved["optimizer"]["param_groups"][0]["lr"] = 7.0

    def fails(*_: Any) -> None:
        raise AssertionError("not today")

    if where == "the optimizer":
        optimizer.register_load_state_dict_post_hook(fails)
    refused(step, saved, "not today")


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every entry of a nested value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


def looks(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


OTHERS = (LEFT_OUT, None, "x", -1, True, 0.5, [], {}, (), torch.zeros(3, 5), torch.tensor(1.0), torch.tensor(1),
          COMPLEX, torch.zeros(0), object())  # fmt: skip


@settings(max_examples=100)
@given(data=st.data())
def test_one_entry_of_another_type_or_shape(pair: Damaged, data: st.DataObject) -> None:
    """It is refused and nothing is changed; or it is loaded, and what is there is what was given."""
    step, saved = pair
    path = data.draw(st.sampled_from(list(paths(saved))))
    old = saved
    for key in path:
        old = old[key]
    value = data.draw(st.sampled_from([x for x in OTHERS if looks(x) != looks(old)]))
    state, before = changed(saved, path, value), everything(step)
    try:
        step.load_state_dict(state)
    except CheckpointError:
        same_bits(everything(step), before)
    else:
        same_bits(step.state_dict(), state)


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
