"""``explain_overflow`` names the op, its module and line, the phase and the parameters hit, and disturbs nothing."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpWarning, DynamicLossScaler, StaticLossScaler, TrainStep, compile_train_step

INF, NAN = math.inf, math.nan
ALL, FIRST = ("before.weight", "before.bias", "after.weight", "after.bias"), ("before.weight", "before.bias")
FP16, SAME_IN_FP32 = r"Keep it in fp32 \(the largest float16 is 65504\)", "It would be the same in fp32"
X, Y = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(1, 0, 6).view(3, 2)


class Inner(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Network(nn.Module):
    """A function between two layers, two modules deep."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(4, 4), nn.Sequential(Inner(body)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x)))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


def start(model: nn.Module, loss: Any = mse, scaler: Any = 128.0, **kwargs: Any) -> TrainStep:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    return compile_train_step(model, loss, optimizer, dtype=torch.float16, loss_scaler=scaler, **kwargs)


def network(body: Callable[..., Tensor] = F.relu) -> Network:
    torch.manual_seed(0)
    return Network(body)


def line(function: Callable[..., Any]) -> str:
    """Where its code says "here"."""
    lines, first = inspect.getsourcelines(function)
    return f"test_overflow.py:{first + next(i for i, text in enumerate(lines) if '# here' in text)} "


# ------------------------------------------------------------------------------------------------ which op


@dataclass(frozen=True)
class Case:
    body: Callable[..., Tensor]
    phase: str
    op: str
    dtype: str
    value: str
    advice: str
    module: str = "block.0"
    hit: tuple[str, ...] | None = None  # None: all that come before, and, in the forward, after it


CASES: list[Case] = []


def case(*expected: str, **more: Any) -> Callable[[Any], Any]:
    def note(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CASES.append(Case(body, *expected, **more))
        return body

    return note


@case("forward", "exp", "float16", "inf", r"exclude=\['after'\] or black_list=\['linear'\], or use dtype")
def too_large_for_its_reader(x: Tensor) -> Tensor:
    return torch.exp(x.abs() + 20)  # here: exp is kept in fp32, the next layer reads fp16


@case("forward", "matmul", "float16", "inf", FP16 + r": exclude=\['block.0'\], or black_list=\['matmul'\]")
def matmul(x: Tensor) -> Tensor:
    large = x.abs() + 500
    return large @ torch.full((4, 4), 200.0)  # here


@case("forward", "log", "float32", "inf", SAME_IN_FP32)
def log_of_zero(x: Tensor) -> Tensor:
    return torch.log(x * 0)  # here


@case("forward", "div", "float16", "nan", SAME_IN_FP32)
def zero_by_zero_beside_dropout(x: Tensor) -> Tensor:
    kept = F.dropout(torch.ones_like(x), 0.5)
    return F.dropout(x * 0, 0.5) / (kept - kept)  # here


@case("forward", "div", "float16", "nan", SAME_IN_FP32)
def beside_a_harmless_mask(x: Tensor) -> Tensor:
    weights = torch.softmax(torch.full((4, 4), -INF).triu(1)[:3] + x, -1)
    return weights * 0 / (x - x)  # here


@case("forward", "softmax", "float16", "nan", "a row that is masked out", hit=ALL[2:])  # masked: no gradient
def fully_masked_row(x: Tensor) -> Tensor:
    masked = x.masked_fill(torch.ones(4, dtype=torch.bool), -INF)
    return torch.softmax(masked, -1)  # here


@case("backward", "sqrt", "float16", "inf", SAME_IN_FP32)
def square_root_of_zero(x: Tensor) -> Tensor:
    return torch.sqrt(x * 0)  # here


@case("backward", "sqrt", "float32", "inf", SAME_IN_FP32)
def norm_of_zero(x: Tensor) -> Tensor:
    squares = (x * 0).pow(2).sum(-1, keepdim=True)
    return x + squares.sqrt()  # here


@case("backward", "sqrt", "float16", "nan", SAME_IN_FP32)
def where_hides_it_from_the_forward(x: Tensor) -> Tensor:
    zero = x * 0
    root = torch.sqrt(zero)  # here
    return torch.where(zero > 0, root, x)


@case("backward", "sqrt", "float16", "inf", SAME_IN_FP32)
def two_readers_of_one_value(x: Tensor) -> Tensor:
    zero = x * 0
    root = torch.sqrt(zero)  # here
    return root + torch.sin(zero)


@case("forward", "log", "float32", "inf", SAME_IN_FP32)
def in_a_checkpoint(x: Tensor) -> Tensor:
    def inside(y: Tensor) -> Tensor:
        z = y - y
        return torch.log(z)  # here

    return checkpoint(inside, x, use_reentrant=False)


@case("backward", "sqrt", "float16", "inf", SAME_IN_FP32)
def in_the_backward_of_a_checkpoint(x: Tensor) -> Tensor:
    def inside(y: Tensor) -> Tensor:
        z = y - y
        return torch.sqrt(z) + y  # here

    return checkpoint(inside, x, use_reentrant=False)


class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


@case("backward", "autograd_function_apply", "float32", "inf", SAME_IN_FP32)
def custom_backward(x: Tensor) -> Tensor:
    return Careless.apply(x)  # here


@case("forward", "log", "float32", "inf", SAME_IN_FP32, module="*")
def after_a_graph_break(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return torch.log(y - y)  # here


@case("backward", "sqrt", "float16", "inf", SAME_IN_FP32, module="*")
def backward_after_a_graph_break(x: Tensor) -> Tensor:
    y = x * 0
    torch._dynamo.graph_break()
    return torch.sqrt(y)  # here


@pytest.mark.filterwarnings("ignore:.*not one graph")
@pytest.mark.parametrize("wanted", CASES, ids=lambda wanted: wanted.body.__name__)
def test_which_op(wanted: Case) -> None:
    step = start(network(wanted.body))
    assert bool(step(X, Y).skipped)
    found = step.explain_overflow()
    assert found
    kind = found.value.removeprefix("-")
    assert (found.phase, found.op, found.dtype, kind) == (wanted.phase, wanted.op, wanted.dtype, wanted.value)
    assert wanted.module in (found.module, "*")
    assert line(wanted.body) in found.source
    assert found.parameters == (wanted.hit or (ALL if wanted.phase == "forward" else FIRST))
    assert (found.batch, found.scale) == (0, 128.0)
    assert re.search(wanted.advice, str(found))
    assert found.source in str(found)
    assert f"{found.op} " in str(found) or found.op == "autograd_function_apply"
    assert "higher_order" not in str(found)


def in_the_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.log((output - output).float()).mean()  # here


def test_in_the_loss_function() -> None:
    step = start(network(), in_the_loss)
    step(X, Y)
    found = step.explain_overflow()
    assert (found.phase, found.op, found.module, found.parameters) == ("forward", "log", "", ALL)
    assert line(in_the_loss) in found.source


@pytest.mark.parametrize("scale", [2.0**30, 128.0])
def test_gradients_that_fp16_cannot_hold(scale: float) -> None:
    """The scale was too large; or the gradient is, whatever the scale."""
    step = start(network(lambda x: x * (1.0 if scale > 128 else 3e4)), scaler=DynamicLossScaler(scale))
    assert bool(step(X, Y).skipped)
    found = step.explain_overflow()
    assert (found.phase, found.dtype, found.scale) == ("backward", "float16", scale)
    assert set(FIRST) <= set(found.parameters)
    assert ("With a scale of 1 this batch is finite: the scale of 1.07374e+09 was" in str(found)) is (scale > 128)
    assert "the same in fp32" not in str(found)


# ------------------------------------------------------------------------------------------------ which value


class Masked(nn.Module):
    """Attention weights with a mask of -inf, batch norm and dropout."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2))
        self.drop, self.breaks, self.calls = nn.Dropout(0.3), breaks, 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.head(self.drop(torch.softmax(mask + x, -1)))  # here


MASK = torch.zeros(3, 4).index_fill(1, torch.tensor([0]), -INF)


def with_bad(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[1] = value
    return tensor


def test_which_value_was_bad_before_any_op() -> None:
    step = start(Masked(), accumulate_steps=4)
    model = step.model
    good, nan, inf = ((X, MASK), Y), ((with_bad(X, NAN), MASK), Y), ((with_bad(X, INF), MASK), Y)

    def update(*given: Any) -> Any:
        skipped = [bool(step(*batch).skipped) for batch in given]
        assert skipped[-1]
        return step.explain_overflow()

    found = update(good, inf, good, nan)  # the first of two
    assert (found.phase, found.value, found.batch, found.op, found.source) == ("input", "inf", 1, "", "")
    assert "Argument 0 of the model holds inf before any op has run, micro-batch 2 of 4" in str(found)
    assert "Look at the data" in str(found)

    found = update(good, good, good, ((X, MASK), with_bad(Y, NAN)))
    assert (found.phase, found.value, found.batch) == ("input", "nan", 3)
    assert "targets" in str(found)

    found = update(good, good, ((X, torch.full_like(MASK, -INF)), Y), good)
    assert (found.phase, found.op, found.value, found.batch) == ("forward", "softmax", "nan", 2)
    assert line(Masked.forward) in found.source
    assert "a row that is masked out" in str(found)

    mine = with_bad(X, NAN)
    for batch in (good, ((mine, MASK), Y), good, good):
        last = step(*batch)
    assert bool(last.skipped)
    mine.zero_()
    found = step.explain_overflow()
    assert (bool(found), found.phase, found.batch) == (True, "unknown", 1)
    assert "written to since" in str(found)

    saved = copy.deepcopy(model.state_dict())
    model.head[0].weight.data[0, 0] = NAN
    found = update(good, good, good, good)
    assert (found.phase, found.value, found.module, found.batch) == ("parameter", "nan", "head.0", 0)
    assert "The parameter head.0.weight holds nan" in str(found)
    assert "load an earlier checkpoint" in str(found)
    model.load_state_dict(saved)

    model.norm.eval()
    model.norm.running_mean[2] = NAN
    found = update(good, good, good, good)
    assert (found.phase, found.value, found.module) == ("buffer", "nan", "norm")
    assert "norm.running_mean" in str(found)
    model.load_state_dict(saved)
    model.norm.train()

    for batch in (good,) * 4:
        last = step(*batch)
    assert not bool(last.skipped)
    assert not step.explain_overflow()


def test_only_the_sum_is_not_finite() -> None:
    """fp16 parameters without masters have fp16 gradients: each of 48000, their sum beyond 65504."""
    model = nn.Linear(4, 2, bias=False).half()
    with pytest.warns(AmpWarning, match="master_weights=False"):
        step = start(model, lambda output, _: output.float().sum() * 32000, scaler=1.0, accumulate_steps=2,
                     master_weights=False)  # fmt: skip
    given = torch.ones(3, 4, dtype=torch.float16)
    assert not bool(step(given).skipped)
    assert bool(model.weight.grad.isfinite().all())
    assert bool(step(given).skipped)
    assert bool(model.weight.isfinite().all())
    found = step.explain_overflow()
    assert (found.phase, found.dtype, found.parameters) == ("sum", "float16", ("weight",))
    assert "their sum is not" in str(found)


def test_an_overflow_from_before_a_checkpoint() -> None:
    """Its batch is not in the checkpoint: no other batch is blamed."""
    first, second = (start(network(), accumulate_steps=2) for _ in range(2))
    first(with_bad(X, INF), Y)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert bool(second(X, Y).skipped)
    found = second.explain_overflow()
    assert (found.op, found.parameters) == ("", ())
    assert "before the checkpoint" in str(found)


@pytest.mark.parametrize(
    ("scaler", "skip", "answer"),
    [
        ("dynamic", None, "There is no skipped batch to explain"),
        (StaticLossScaler(8.0), False, "The last update was not skipped"),
        (None, True, "There is no loss scaler, so no gradient is checked"),
    ],
)
def test_nothing_to_explain(scaler: Any, skip: bool | None, answer: str) -> None:
    step = start(network(), scaler=scaler)
    if skip is not None:
        step(with_bad(X, INF) if skip else X, Y)
    found = step.explain_overflow()
    assert not found
    assert (found.phase, found.op, found.parameters) == ("", "", ())
    assert str(found).startswith(answer)


# ------------------------------------------------------------------------------------------------ nothing is disturbed


class Busy(Masked):
    """Also counts its calls and writes to its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.breaks:
            self.count()
        return super().forward(x.mul_(1.5), mask)

    @torch.compiler.disable
    def count(self) -> None:
        self.calls += 1


def snapshot(step: TrainStep) -> list[Any]:
    window, model = step._window, step.model
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
    tensors += [x for state in step.optimizer.state.values() for x in state.values()]
    tensors += [window.found, window.scale, *window.saved.values()]
    return [copy.deepcopy(tensors), step.scaler.state_dict(), window.done, window.number, model.calls]


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*not one graph")
@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_disturbed(breaks: bool) -> None:
    runs = []
    for explain in (False, True):
        step = start(Busy(breaks), scaler=DynamicLossScaler(2.0**14, growth_interval=2), accumulate_steps=2)
        hooks = [len(p._backward_hooks or ()) for p in step.model.parameters()]
        torch.manual_seed(3)
        seen = []
        for i in range(8):
            x = torch.linspace(-1, i, 12).view(3, 4)
            if i == 3:
                x[0, 1] = INF
            result = step((x, MASK), Y * (2000 if i == 4 else 1))
            before, batch = snapshot(step), x.clone()
            if explain:
                assert bool(step.explain_overflow()) is (bool(result.skipped) or i == 4)
                same(snapshot(step), before)
                same(x, batch)
            seen += [result.loss, result.skipped, result.scale, result.grad_norm, x]
        assert [bool(s) for s in seen[1::5]] == [False, False, False, True, False, True, False, False]
        assert [len(p._backward_hooks or ()) for p in step.model.parameters()] == hooks
        runs.append((seen, snapshot(step)))
        torch._dynamo.reset()
    same(*runs)
