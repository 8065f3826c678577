"""Models that are not one graph train all the same, and the report says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, Policy, compile_train_step
from amp_compiler.common.errors import AmpWarning
from helpers import BF16, F16
from training_helpers import Loop, bad, batches, differences, gradients, sgd, state, trains_like

expected = pytest.mark.filterwarnings("ignore:amp_compile. the training step is not one graph")
GOOD = batches(4, (5, 3), (5, 2))


class Broken(nn.Module):
    """Batch norm and dropout before and after a break."""

    def __init__(self, kind: str = "print") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.second, self.other = nn.Linear(4, 2), nn.Linear(4, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)))
        if self.kind == "item":
            assert x.sum().item() != 1.5
        elif self.kind == "branch":
            if x.sum() > 0:
                return self.other(self.drop(x))
        elif self.kind == "raise" and x.shape[0] == 1:
            raise KeyError("the user's own")
        elif self.kind == "print":
            print("forward")
        return self.second(self.drop(x))


def make(model: nn.Module, **kwargs: Any) -> Any:
    return compile_train_step(model, F.mse_loss, sgd(model.parameters()), **{"level": "O0", **kwargs})


@pytest.mark.parametrize("kind", ["item", "branch"])  # those below break the graph by print
def test_trains_like_the_loop_by_hand(kind: str) -> None:
    """Dropout masks, batch norm, accumulation and clipping included; one warning, one note, no joint graph."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step = trains_like(Broken(kind), GOOD, seed=3, accumulate_steps=2, max_grad_norm=0.1)
    told = [str(w.message) for w in seen if issubclass(w.category, AmpWarning)]
    assert len(told) == 1
    assert "in pieces" in told[0]
    report = step.report()
    assert len(report.notes) == 1
    assert "not one graph" in report.notes[0]
    assert "raised:" not in report.notes[0]  # the cause, not the wrapping
    assert report.not_captured
    assert step.joint_graphs == []
    assert len(step.graphs) >= 2
    assert {r.module for r in report.why("linear")} >= {"first", "second"}
    assert "scale_loss" not in {r.name for r in step.history if r.modified}


@expected
def test_the_policy_holds_in_pieces_and_an_overflow_is_skipped() -> None:
    model = Broken("print")
    scaler = DynamicLossScaler(init_scale=2.0**30, growth_interval=100)
    step = make(model, level="O2", dtype=F16, loss_scaler=scaler)
    results = []
    for _ in range(20):
        before = state(model)
        results.append(step(*GOOD[0]))
        assert (differences(state(model), before) == []) == bool(results[-1].skipped)
    skipped = [bool(r.skipped) for r in results]
    assert skipped[0]
    assert not skipped[-1]
    assert float(results[1].scale) == 2.0**29
    assert {r.precision for r in step.report().why("linear")} == {"float16"}
    assert {x.dtype for x in gradients(model).values() if x is not None} == {torch.float32}


@expected
def test_gradient_hooks_are_called() -> None:
    """A hook waits for autograd, so the model is not run as one graph; the loop by hand calls it as often."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    models[1].load_state_dict(models[0].state_dict())
    calls: list[list[str]] = [[], []]
    for model, seen in zip(models, calls, strict=True):
        model.weight.register_hook(lambda grad, seen=seen: seen.append("hook") or grad * 2)
        model.bias.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("after"))
    step, loop = make(models[0]), Loop(models[1], F.mse_loss, sgd(models[1].parameters()))
    for batch in GOOD[:2]:
        step(*batch)
        loop(*batch)
    assert sorted(calls[0]) == sorted(calls[1]) == ["after", "after", "hook", "hook"]
    assert differences(state(models[0]), state(models[1])) == []
    assert "gradient hook" in step.report().notes[0]


@expected
def test_module_hooks_are_called() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    seen: list[str] = []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    step = make(model)
    step(*GOOD[0])
    assert seen == ["forward", "backward"]


@expected
def test_a_hook_that_comes_in_the_middle_of_an_update() -> None:
    """The window began as one graph and goes on in pieces: gradients add up, and a skip restores all of it."""
    for overflows in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        twin.load_state_dict(model.state_dict())
        step = make(model, accumulate_steps=2)
        loop = Loop(twin, F.mse_loss, sgd(twin.parameters()), accumulate_steps=2)
        before = state(model)
        step(*GOOD[0])
        loop(*GOOD[0])
        assert len(step.joint_graphs) == 1
        model[0].weight.register_hook(lambda grad: None)
        result = step(*(bad(GOOD[1]) if overflows else GOOD[1]))
        assert bool(result.skipped) == overflows
        if overflows:
            assert differences(state(model), before) == []
        else:
            loop(*GOOD[1])
            assert differences(state(model), state(twin)) == []


# ------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize("kind", ["print", "none"])
@expected
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_batch_that_does_not_fit(kind: str) -> None:
    """RuntimeError as in eager; gradients, buffers and weights are as before, and the step goes on as if it had never
    come, without capturing anything anew."""
    model, twin = Broken(kind), Broken(kind)
    step, loop = make(model), Loop(twin, F.mse_loss, sgd(twin.parameters()))
    torch.manual_seed(0)
    step(*GOOD[0])
    before, held, graphs = state(model), gradients(model), len(step.graphs)
    for wrong in ((torch.zeros(5, 7), GOOD[0][1]), (GOOD[0][0], torch.zeros(3, 9))):
        with pytest.raises(RuntimeError):
            step(*wrong)
        assert differences(state(model), before) == []
        assert differences(gradients(model), held) == []
    torch.manual_seed(1)
    step(*GOOD[1])
    torch.manual_seed(0)
    loop(*GOOD[0])
    torch.manual_seed(1)
    loop(*GOOD[1])
    assert differences(state(model), state(twin)) == []
    assert (step.joint_graphs == []) == (kind == "print")
    assert len(step.graphs) == graphs


@expected
def test_exceptions_of_the_users_own_code_come_through() -> None:
    model = Broken("raise")
    step = make(model)
    one = GOOD[0][0][:1], GOOD[0][1][:1]
    model.eval()  # batch norm refuses a single row in training
    with pytest.raises(KeyError, match="the user's own"):
        step(*one)
    model.train()
    step(*GOOD[0])
    assert not bool(step(*GOOD[1]).skipped)
    assert len(step.joint_graphs) == 1
    assert step.report().notes == ()

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError("in the loss")

    broken = compile_train_step(model, loss, sgd(model.parameters()), level="O0")
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        broken(*GOOD[0])


def test_a_computed_tensor_that_is_marked_for_gradients() -> None:
    """A frozen embedding whose hook calls ``requires_grad_()``, as ``enable_input_require_grads`` of Transformers has
    it: the warning says what, where in the user's code, and what to do."""

    def mark(module: nn.Module, given: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    hook = model[0].register_forward_hook(mark)
    optimizer = sgd(model[2].parameters())
    batch = torch.tensor([[0, 1], [2, 4]]), torch.ones(2, 2)
    step = compile_train_step(model, F.mse_loss, optimizer, dtype=BF16)
    where = r"requires_grad_\(\).*test_pieces\.py:\d+ in mark: output\.requires_grad_"
    with pytest.warns(AmpWarning, match=where) as told:
        step(*batch)
    assert "remove the call" in str(told[0].message)
    hook.remove()
    whole = compile_train_step(model, F.mse_loss, optimizer, dtype=BF16)
    whole(*batch)  # the advice helps
    assert len(whole.joint_graphs) == 1
    assert whole.report().notes == ()


@pytest.mark.parametrize(("kind", "line"), [("item", r"assert x\.sum"), ("branch", r"if x\.sum"), ("print", "print")])
def test_the_warning_says_where_the_graph_breaks(kind: str, line: str) -> None:
    with pytest.warns(AmpWarning, match=rf"not one graph.*test_pieces\.py:\d+ in forward: {line}"):
        make(Broken(kind))(*GOOD[0])


@expected
def test_a_number_that_changes_every_time() -> None:
    """A float among the inputs, as a schedule in the model's own code has it: equal results, however it is run."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.out(x) * factor

    step = trains_like(Scaled(), [((x, 0.5 + i / 8), y) for i, (x, y) in enumerate(GOOD)])
    for note in step.report().notes:
        assert "raised:" not in note


@expected
def test_autocast_parity_with_overflow_in_pieces() -> None:
    """Against autocast and GradScaler, with a batch that overflows in the middle."""
    model, twin = Broken("print").eval(), Broken("print").eval()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, twin)]
    step = compile_train_step(model, F.mse_loss, optimizers[0], policy=Policy.torch("cpu", BF16), accumulate_steps=2)
    loop = Loop(twin, F.mse_loss, optimizers[1], BF16, accumulate_steps=2)
    for batch in (*GOOD, GOOD[0], bad(GOOD[1]), *GOOD[:2]):
        step(*batch)
        loop(*batch)
    assert differences(state(model, optimizers[0]), state(twin, optimizers[1])) == []
    assert step.scaler.get_scale() == loop.scaler.get_scale() == 2.0**15
