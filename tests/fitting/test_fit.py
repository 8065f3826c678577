"""``fit``: the loop around a compiled training step, and nothing else."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from amp_compiler import AmpWarning, ArgumentError, History, compile_train_step, fit
from training_helpers import bad, batches, differences, state


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def mean_error(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().mean()


DATA = batches(5, (6, 4), (6, 2))


# ------------------------------------------------------------------------------------------------------ the loop


def test_equals_the_loop_by_hand() -> None:
    """Accumulation with a rest, clipping, and a scheduler that moves by the update: the same bits, and the means."""
    ours, by_hand = make(), make()
    optimizer = sgd(ours)
    torch.manual_seed(1)
    history = fit(ours, F.mse_loss, optimizer, DATA, 2, dtype="float16", accumulate_steps=2, max_grad_norm=0.5,
                  scheduler=StepLR(optimizer, 2, 0.5))  # fmt: skip

    other = sgd(by_hand)
    scheduler = StepLR(other, 2, 0.5)
    step = compile_train_step(by_hand, F.mse_loss, other, dtype="float16", accumulate_steps=2, max_grad_norm=0.5)
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        for x, y in DATA:
            result = step(x, y)
            losses.append(float(result.loss))
            if result.updated:
                scheduler.step()
        step.flush()
        scheduler.step()
    assert differences(state(ours, optimizer), state(by_hand, other)) == []
    assert [epoch.loss for epoch in history] == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5], rel=1e-12)
    assert [(e.number, e.batches, e.updates, e.skipped, e.scale) for e in history] == [
        (1, 5, 3, 0, 65536.0), (2, 5, 3, 0, 65536.0)]  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert not history.interrupted


def test_a_skipped_update_moves_no_scheduler() -> None:
    model = make()
    optimizer = sgd(model)
    data = [DATA[0], bad(DATA[1]), DATA[2]]
    history = fit(model, F.mse_loss, optimizer, data, dtype="float16", scheduler=StepLR(optimizer, 1, 0.5))
    assert (history[0].updates, history[0].skipped, history[0].scale) == (2, 1, 32768.0)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2


def test_a_scheduler_by_the_epoch_needs_an_update() -> None:
    model = make()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    given = iter([DATA[0], DATA[1], bad(DATA[0]), bad(DATA[1])])
    fit(model, F.mse_loss, optimizer, given, 2, steps=2, scheduler=scheduler, scheduler_every="epoch")
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_plateau_is_of_the_validation_loss() -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model, lr=1e-30)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    history = fit(model, F.mse_loss, optimizer, DATA[:1], 2, level="O0", scheduler=scheduler, validation=DATA[1:])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-31)
    assert scheduler.best == history[0].validation["loss"]


def test_means_are_over_samples_and_validation_leaves_no_trace() -> None:
    """A smaller last batch counts less. The loaders are shuffled, which draws from the global generator."""
    x, y = torch.randn(10, 4), torch.randn(10, 2)
    loader, held = (DataLoader(TensorDataset(x, y), 4, shuffle=True, drop_last=drop) for drop in (True, False))
    models = [make(), make()]
    found = []
    for model, validation in zip(models, (held, None), strict=True):
        torch.manual_seed(3)
        found.append(fit(model, F.mse_loss, sgd(model), loader, 2, metrics={"error": mean_error}, validation=validation,
                         level="O0"))  # fmt: skip
    assert differences(state(models[0]), state(models[1])) == []
    assert found[0][1].metrics == found[1][1].metrics
    assert found[1][1].validation == {}
    models[0].eval()
    with torch.no_grad():
        output = models[0](x)
    expected = {"loss": float(F.mse_loss(output, y)), "error": float(mean_error(output, y))}
    assert found[0][1].validation == pytest.approx(expected, rel=1e-5)


def test_training_metrics_are_of_the_outputs_that_trained() -> None:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        expected = sum(float(mean_error(model(x), y)) for x, y in DATA) / 5
    history = fit(model, F.mse_loss, sgd(model, lr=1e-30), DATA, level="O0", metrics={"error": mean_error})
    assert history[0].metrics["error"] == pytest.approx(expected, rel=1e-5)


def test_modes_are_given_back() -> None:
    """A model in evaluation mode trains, and is in evaluation mode again; a frozen norm in a training model is kept."""
    seen: list[list[bool]] = []

    def note(output: Tensor, targets: Tensor) -> float:
        seen.append([module.training for module in model.modules()])
        return 0.0

    model = make().eval()
    fit(model, F.mse_loss, sgd(model), DATA[:1], level="O0", metrics={"note": note}, validation=DATA[:1])
    assert seen == [[True] * 6, [False] * 6]
    assert not any(module.training for module in model.modules())

    model = make()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    mean = model[1].running_mean.clone()
    fit(model, F.mse_loss, sgd(model), DATA[:1], level="O0", validation=DATA[:1])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[1].running_mean, mean)


def test_the_host_waits_only_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fused optimizer, the number of times a tensor is read does not depend on the number of batches."""
    reads = 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any) -> Any:
            nonlocal reads
            reads += 1
            return method(self, *args)

        return read

    found = []
    for number in (1, 5):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        fit(model, F.mse_loss, optimizer, DATA[:1], level="O0")  # compiles nothing that is used below, but warms up
        with monkeypatch.context() as patch:
            for name in ("item", "__bool__", "__float__", "__int__"):  # the step itself uses tolist, on a CPU only
                patch.setattr(Tensor, name, counted(getattr(Tensor, name)))
            reads = 0
            fit(model, F.mse_loss, optimizer, DATA[:number], level="O0", metrics={"error": mean_error})
            found.append(reads)
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------------- batches


class Sum(nn.Module):
    """Takes two inputs, by position or by name; gives a loss itself if it gets targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor | None = None, labels: Tensor | None = None) -> Any:
        out = self.layer(a if b is None else a + b)
        return out if labels is None else F.mse_loss(out, labels)


X, Y = DATA[0]


@pytest.mark.parametrize(
    ("batch", "loss_fn"),
    [
        ([X, Y], F.mse_loss),
        (((X, 0 * X), Y), F.mse_loss),
        (({"a": X}, Y), F.mse_loss),
        ({"a": X, "labels": Y}, None),
        (X, lambda output, targets: F.mse_loss(output, Y)),
    ],
    ids=["list", "two inputs", "dict", "dict alone", "tensor"],
)
def test_every_kind_of_batch(batch: Any, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = Sum()
    expected = float(F.mse_loss(model(X), Y).detach())
    history = fit(model, loss_fn, sgd(model), [batch], level="O0", validation=[batch])
    assert history[0].loss == pytest.approx(expected, rel=1e-6)
    assert history[0].validation["loss"] < expected


def test_a_metric_of_a_batch_without_targets_gets_the_batch() -> None:
    """A dict has the labels among its entries."""

    class Both(Sum):
        def forward(self, a: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            output = self.layer(a)
            return {"loss": F.mse_loss(output, labels), "output": output}

    batch = {"a": X, "labels": Y}
    metrics = {"error": lambda output, given: F.mse_loss(output["output"], given["labels"])}
    history = fit(model := Both(), None, sgd(model), [batch], level="O0", metrics=metrics, validation=[batch])
    assert history[0].metrics["error"] == pytest.approx(history[0].loss, rel=1e-6)
    assert history[0].validation["error"] == pytest.approx(history[0].validation["loss"], rel=1e-6)


def test_low_precision_weights_with_fp32_data() -> None:
    """A training step takes fp32 inputs there, so validation has to."""
    model = nn.Linear(4, 2).bfloat16()
    history = fit(model, F.mse_loss, sgd(model), DATA, dtype="bfloat16", validation=DATA)
    with torch.no_grad():
        losses = [float(F.mse_loss(model(x.bfloat16()), y)) for x, y in DATA]
    assert history[0].validation["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    broken = nn.Linear(3, 2).bfloat16()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(broken, F.mse_loss, sgd(broken), [(x[:, :3], y) for x, y in DATA], dtype="bfloat16", validation=DATA)


def never() -> Iterator[Any]:
    yield from ()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loader": []}, "The loader has no batches: its length is 0"),
        ({"loader": never()}, r"The loader has no batches \(a generator"),
        ({"loader": X}, r"not Tensor: for a single batch write \[\(inputs, targets\)\]"),
        ({"loader": itertools.cycle(DATA)}, "never ends: say by steps="),
        ({"loader": iter(DATA), "epochs": 2}, "nothing left for a second epoch"),
        ({"loader": [(X, X, Y)]}, r"Batch 1 has 3 parts: a batch is \(inputs, targets\)"),
        ({"loader": [{"input": X, "labels": Y}]}, r"forward\(\) of Linear takes no 'labels'.*\(inputs, targets\)"),
        ({"loader": [({"x": X}, Y)]}, r"forward\(\) of Linear takes no 'x'"),
        ({"validation": [{"input": X, "labels": Y}]}, r"forward\(\) of Linear takes no 'labels'"),
        ({"validation": []}, "The validation loader has no batches"),
        ({"validation": never()}, r"The validation loader has no batches \(a generator"),
        ({"validation": iter(DATA), "epochs": 2}, "validation loader is an iterator"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"metrics": [mean_error]}, "metrics is a dict of names and functions"),
        ({"metrics": {"loss": mean_error}}, "cannot be called 'loss'"),
        ({"metrics": {"error": lambda o, t: o - t}}, r"'error' gives a tensor of the shape \[6, 2\]"),
        ({"metrics": {"error": lambda o, t: "low"}}, "'error' gives a str"),
        ({"scheduler_every": "batch"}, "scheduler_every is 'update' or 'epoch', not 'batch'"),
        ({"resume": True}, "say which file that is"),
        ({"acumulate_steps": 2}, "acumulate_steps"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_mistakes_are_told(options: dict[str, Any], told: str) -> None:
    model = nn.Linear(4, 2)
    options = {"loader": DATA, "level": "O0", **options}
    with pytest.raises((ArgumentError, TypeError), match=told):
        fit(model, F.mse_loss, sgd(model), **options)
    assert model.training


def test_an_endless_loader_with_steps() -> None:
    """It goes on where the epoch before has stopped."""
    ours, other = nn.Linear(4, 2), nn.Linear(4, 2)
    other.load_state_dict(ours.state_dict())
    history = fit(ours, F.mse_loss, sgd(ours), itertools.cycle(DATA), 2, steps=3, level="O0")
    fit(other, F.mse_loss, sgd(other), [*DATA, DATA[0]], level="O0")
    assert [epoch.batches for epoch in history] == [3, 3]
    assert differences(state(ours), state(other)) == []


def test_an_iterator_that_ends_ends_the_run() -> None:
    model = nn.Linear(4, 2)
    with pytest.warns(AmpWarning, match="ended before epoch 3"):
        history = fit(model, F.mse_loss, sgd(model), iter(DATA), 4, steps=3, level="O0")
    assert [epoch.batches for epoch in history] == [3, 2]
    assert not history.interrupted


# ------------------------------------------------------------------------------------------------------ stopping


def interrupting(at: int, how: Callable[[], None]) -> Iterator[Any]:
    for number, batch in enumerate(itertools.cycle(DATA), 1):
        if number == at:
            how()
        yield batch


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_update(capsys: pytest.CaptureFixture[str]) -> None:
    """The signal comes before batch 6, the second of epoch 2 and the first of an update of two."""
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    other.load_state_dict(model.state_dict())
    loader = interrupting(5 + 2, press_ctrl_c)
    history = fit(model, F.mse_loss, sgd(model), loader, 3, steps=5, level="O0", accumulate_steps=2)
    assert history.interrupted
    assert len(history) == 1
    assert "Interrupted in epoch 2." in str(history)
    assert "stops after this update" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step = compile_train_step(other, F.mse_loss, sgd(other), "O0", accumulate_steps=2)
    for x, y in DATA:
        step(x, y)
    step.flush()
    for x, y in DATA[:2]:
        step(x, y)
    assert differences(state(model), state(other)) == []
    fit(model, F.mse_loss, sgd(model), DATA, level="O0")  # nothing waits


def test_ctrl_c_twice_stops_at_once() -> None:
    def twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    model = make().eval()
    with pytest.raises(KeyboardInterrupt):
        fit(model, F.mse_loss, sgd(model), interrupting(2, twice), steps=4, level="O0")
    assert not any(module.training for module in model.modules())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_workers_that_die_of_ctrl_c_are_no_error() -> None:
    def die() -> None:
        press_ctrl_c()
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    model = nn.Linear(4, 2)
    assert fit(model, F.mse_loss, sgd(model), interrupting(2, die), steps=4, level="O0").interrupted


# ----------------------------------------------------------------------------------------------- what it shows


def test_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 2)
    fit(model, F.mse_loss, sgd(model), DATA, 2, level="O0")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the stream for a terminal
    monkeypatch.setattr("amp_compiler.fitting.progress._SECONDS", 0.0)
    fit(model, F.mse_loss, sgd(model), DATA, 2, level="O0", validation=DATA)
    out, err = capsys.readouterr()
    assert out == ""
    assert "epoch 2/2" in err
    assert "loss" in err


def test_a_history_prints_and_is_plain_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    model = nn.Linear(4, 2)
    history = fit(model, F.mse_loss, sgd(model), DATA, 2, level="O0", metrics={"error": mean_error}, validation=DATA,
                  progress=False)  # fmt: skip
    assert capsys.readouterr() == ("", "")
    head, first, second = str(history).splitlines()
    assert head.split() == ["epoch", "loss", "error", "validation", "loss", "validation", "error", "scale", "updates",
                            "skipped", "seconds"]  # fmt: skip
    assert len(head) == len(first) == len(second)
    assert first.split()[:2] == ["1", f"{history[0].loss:.4g}"]
    rows = json.loads(history.to_json())["epochs"]
    assert rows[1]["validation"] == history[1].validation
    assert history.step is not None
    assert history.step.model is model
    twin = pickle.loads(pickle.dumps(history))
    assert twin == history
    assert twin.step is None
    assert str(History()) == "No epoch was completed."
    assert copy.copy(history).epochs == history.epochs


# ------------------------------------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda o: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], 0.1), 1), "another optimizer"),
        (lambda o: torch.optim.lr_scheduler.StepLR, "not StepLR itself"),
        (lambda o: [torch.optim.lr_scheduler.StepLR(o, 1)], "not a list"),
    ],
)
def test_a_scheduler_that_would_not_move_this_optimizer(wrong: Any, message: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ArgumentError, match=message):
        fit(model, nn.functional.mse_loss, optimizer, [(torch.ones(1, 2), torch.ones(1, 1))],
            scheduler=wrong(optimizer))  # fmt: skip


def test_saving_needs_a_file() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match="checkpoint="):
        fit(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), [], save_every_steps=2)
