"""Several batches an update: their mean, weights cast once, changes in between noticed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import compile_train_step
from amp_compiler.inspect.profile import count_casts
from amp_compiler.kernels import cpu
from helpers import BF16, F16
from training_helpers import Loop, bad, batches, differences, fused_adamw, gradients, sgd, state, trains_like


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def make(model: nn.Module, loss_fn: Any = F.mse_loss, **kwargs: Any) -> Any:
    return compile_train_step(model, loss_fn, sgd(model.parameters()), **{"level": "O0", **kwargs})


GOOD = batches(6, (5, 3), (5, 2))


@pytest.mark.parametrize("scaler", ["dynamic", None])
def test_n_batches_are_one_of_n_times_the_size(scaler: Any) -> None:
    """Mean loss, fp32: the same update up to rounding; and flush() updates by the mean of those that wait."""
    model = network()
    step = make(model, accumulate_steps=3, loss_scaler=scaler, max_grad_norm=0.1)
    before = state(model)
    for count in (3, 2, 1):
        model.load_state_dict(before)
        twin = network()
        x, y = (torch.cat([batch[i] for batch in GOOD[:count]]) for i in (0, 1))
        F.mse_loss(twin(x), y).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        results = [step(*batch) for batch in GOOD[:count]]
        if count < 3:
            assert differences(state(model), before) == []  # nothing is updated before its time
            results.append(step.flush())
        sgd(twin.parameters()).step()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(ours.grad, theirs.grad)
        torch.testing.assert_close(results[-1].grad_norm, norm)
        assert [bool(r.skipped) for r in results] == [False] * len(results)
    assert step.flush() is None


def test_the_loop_by_hand_is_the_same_in_every_bit() -> None:
    step = trains_like(network(), GOOD, optimizer=fused_adamw, accumulate_steps=3, max_grad_norm=0.1)
    assert len(step.joint_graphs) == 1


def test_gradients_in_the_middle() -> None:
    """They are what was added up so far, unscaled, fp32; the norm too. A skip does not show before the update."""
    model, twin = network(), network()
    step = make(model, accumulate_steps=3)
    for x, y in GOOD[:2]:
        (F.mse_loss(twin(x), y) / 3).backward()
        result = step(x, y)
        assert differences(gradients(model), gradients(twin)) == []
        total = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in twin.parameters()]))
        torch.testing.assert_close(result.grad_norm, total)
        assert not bool(result.skipped)
    step(*GOOD[2])
    assert all(p.grad is not None for p in model.parameters())  # still there after the update
    step(*bad(GOOD[0]))
    assert not bool(step(*GOOD[1]).skipped)
    assert bool(step(*GOOD[2]).skipped)
    assert not bool(step(*GOOD[0]).skipped)


def test_flush_of_a_bad_window_is_skipped() -> None:
    model = network()
    step = make(model, accumulate_steps=3)
    before = state(model)
    step(*GOOD[0])
    step(*bad(GOOD[1]))
    assert bool(step.flush().skipped)
    assert differences(state(model), before) == []
    for batch in GOOD[:3]:
        result = step(*batch)
    assert not bool(result.skipped)
    assert float(result.scale) == 2.0**15


def test_zero_grad_in_the_middle_forgets_what_was_added_up() -> None:
    """And flush() then has nothing to update by."""
    model, twin = network(), network()
    step = make(model, accumulate_steps=2)
    for set_to_none in (True, False):
        step(*GOOD[0])
        step.optimizer.zero_grad(set_to_none=set_to_none)
        step(*GOOD[1])
        optimizer = sgd(twin.parameters())
        optimizer.zero_grad()
        (F.mse_loss(twin(GOOD[1][0]), GOOD[1][1]) / 2).backward()
        optimizer.step()
        assert differences(state(model), state(twin)) == []
    step(*GOOD[0])
    step.optimizer.zero_grad()
    assert not bool(step.flush().skipped)
    assert differences(state(model), state(twin)) == []


# -------------------------------------------------------------------------------------------------- low copies


def test_weights_are_cast_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no cast but those of the weights goes away: n batches cost n times the rest. (Kernels that round as they read
    need no low weights at all, with one batch an update.)"""
    monkeypatch.setenv(cpu.SETTING, "native")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    step = make(model, level="O2", dtype=BF16, accumulate_steps=4)
    batch = batches(1, (2, 64))[0]
    for _ in range(4):
        step(*batch)
    counts = [count_casts(lambda: step(*batch)) for _ in range(8)]
    weights = 2 * 64 * 64 * 2
    assert [c.bytes for c in counts[:4]] == [c.bytes for c in counts[4:]]  # every update alike
    assert counts[0].bytes - counts[1].bytes == weights
    assert counts[1] == counts[2] == counts[3]
    by_one = make(copy.deepcopy(model), level="O2", dtype=BF16)
    by_one(*batch)
    assert count_casts(lambda: by_one(*batch)).bytes == counts[0].bytes


def weight_sum(output: Tensor, targets: Any) -> Tensor:
    return output.float().sum()


def change_in_place(weight: nn.Parameter, value: float) -> None:
    with torch.no_grad():
        weight.fill_(value)


def change_by_foreach(weight: nn.Parameter, value: float) -> None:
    with torch.no_grad():
        torch._foreach_mul_([weight], 0.0)
        torch._foreach_add_([weight], value)


def change_by_data(weight: nn.Parameter, value: float) -> None:
    weight.data.fill_(value)


def change_by_new_data(weight: nn.Parameter, value: float) -> None:
    weight.data = torch.full_like(weight, value)


def change_by_numpy(weight: nn.Parameter, value: float) -> None:
    weight.detach().numpy()[:] = value


def change_by_optimizer(weight: nn.Parameter, value: float) -> None:
    kept, weight.grad = weight.grad, weight.detach() - value
    for fused in (True, False):
        torch.optim.SGD([weight], lr=1.0 if fused else 0.0, fused=fused).step()
    weight.grad = kept


def test_a_weight_that_is_changed_by_hand_is_noticed() -> None:
    """Between updates, however it was changed; in the middle of one too, unless torch itself cannot know: ``.data`` and
    NumPy write past the version that a tensor counts."""
    model = nn.Linear(3, 2, bias=False)
    step = compile_train_step(
        model, weight_sum, torch.optim.SGD(model.parameters(), lr=0.0), dtype=BF16, accumulate_steps=2
    )
    x = torch.ones(1, 3)
    changes = [
        change_in_place,
        change_by_foreach,
        change_by_optimizer,
        change_by_new_data,
        change_by_data,
        change_by_numpy,
        lambda weight, value: model.load_state_dict({"weight": torch.full((2, 3), value)}),
        lambda weight, value: model.load_state_dict({"weight": torch.full((2, 3), value)}, assign=True),
    ]
    unknowable = {change_by_data, change_by_numpy}
    value, missed = 1.0, []
    step(x)
    for in_the_middle in (True, False):
        for change in changes:
            value += 1.0
            change(model.weight, value)
            noticed = float(step(x).loss) == 6 * value
            if not noticed and not (in_the_middle and change in unknowable):
                missed.append((change.__name__, "in the middle" if in_the_middle else "between updates"))
            step(x)
        step(x)  # from here on the changes fall between updates
    assert missed == []


def test_keeping_low_copies_changes_no_bit() -> None:
    """Also around a skipped update, after which the weights are what they were."""
    results = []
    for off in ((), ("hoist_weight_casts",)):
        model = network()
        step = make(model, level="O2", dtype=F16, accumulate_steps=2, disable_passes=off)
        losses = [float(step(*batch).loss) for batch in (*GOOD[:2], GOOD[0], bad(GOOD[1]), *GOOD[:4])]
        results.append({**state(model), "losses": [repr(loss) for loss in losses]})
    assert differences(*results) == []


def test_some_parameters_only_in_some_batches() -> None:
    """A parameter that only one batch of the window reached gets that gradient; one that none reached, none."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, left: bool) -> Tensor:
            return (self.left if left else self.right)(x)

    given = [((x, i % 3 != 2), y) for i, (x, y) in enumerate(GOOD)]
    step = trains_like(Routed(), given, accumulate_steps=3)
    assert step.model.never.weight.grad is None
    step.flush()
    step((GOOD[0][0], True), GOOD[0][1])
    assert step.model.right.weight.grad is None


def test_an_exception_in_the_middle_loses_nothing() -> None:
    model, twin = network(), network()
    step = make(model, accumulate_steps=2)
    loop = Loop(twin, F.mse_loss, sgd(twin.parameters()), accumulate_steps=2)
    step(*GOOD[0])
    before = gradients(model)
    with pytest.raises(RuntimeError):
        step(torch.zeros(5, 7), GOOD[0][1])
    assert differences(gradients(model), before) == []
    step(*GOOD[1])
    for batch in GOOD[:2]:
        loop(*batch)
    assert differences(state(model), state(twin)) == []


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("waiting", [1, 2])
def test_a_copy_has_the_gradients_of_the_batches_that_wait(dtype: torch.dtype, waiting: int) -> None:
    """Copied in the middle of an accumulation, both go on in the same way, independently; low weights too."""
    model = network().to(dtype)
    step = make(model, lambda y, t: F.mse_loss(y.float(), t), level="O2", dtype=BF16, accumulate_steps=3)
    given = [(x.to(dtype), y) for x, y in GOOD]
    for batch in given[:waiting]:
        step(*batch)
    twin = copy.deepcopy(step)
    assert differences(gradients(twin.model), gradients(model)) == []
    assert all(p.grad is not q.grad for p, q in zip(model.parameters(), twin.model.parameters(), strict=True))
    for batch in given[waiting:]:
        ours, theirs = step(*batch), twin(*batch)
        assert torch.equal(ours.grad_norm, theirs.grad_norm)
    step.flush(), twin.flush()
    assert differences(state(model), state(twin.model)) == []
