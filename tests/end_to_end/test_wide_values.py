"""O2 does not round what an fp32 op made: norms, means, variances and losses that people write by hand.

After the products, every expression here is fp32 all the way, so it agrees with fp64 to fp32's digits; with one
rounding to a low dtype between two ops it would be off by a thousand times more, or inf, or 0.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpWarning, amp_compile
from amp_compiler.module import AmpModule
from helpers import F16, LOW, context, pre_dispatch, prepared

LOG = logging.getLogger(__name__)
EYE = torch.eye(256)
EYE4 = torch.eye(4)
TARGET = torch.linspace(-1, 1, 64 * 256).view(64, 256)
MASK = torch.arange(64 * 256).view(64, 256) % 3 > 0
CLASSES = torch.arange(64) % 256


def by_hand(kind: str) -> Callable[[Tensor], Tensor]:
    def token_losses(h: Tensor) -> Tensor:
        return F.cross_entropy(h, CLASSES, reduction="none")[:, None] * 100

    def in_a_checkpoint(h: Tensor) -> Tensor:
        total = h.pow(2).sum(-1, keepdim=True)
        return checkpoint(lambda a, b: a / b.sqrt(), h, total, use_reentrant=False)

    def in_a_branch(h: Tensor) -> Tensor:
        total = h.pow(2).sum(-1, keepdim=True)
        return torch.cond(h[0, 0] < 1e4, lambda a, b: (a / b,), lambda a, b: (a * b,), (h, total))[0]

    return {
        "norm of rows": lambda h: h / h.pow(2).sum(-1, keepdim=True).sqrt(),
        "norm of all": lambda h: h / h.pow(2).sum(),
        "masked mean": lambda h: (token_losses(h) * MASK).sum() / MASK.float().sum(),
        "sum of squares by numel": lambda h: F.mse_loss(h * 1, TARGET.to(h.dtype), reduction="sum") / h.numel(),
        "variance": lambda h: h.pow(2).sum(-1) / 256 - (h.sum(-1) / 256).pow(2),
        "softmax": lambda h: h.div(8).exp() / h.div(8).exp().sum(),
        "smoothed": lambda h: F.cross_entropy(h, CLASSES) + 0.1 * F.cross_entropy(h, CLASSES, label_smoothing=0.1),
        "scaled power": lambda h: h.pow(2) * 30,
        "mean": lambda h: h.mean() * 3,
        "dot": lambda h: torch.dot(h[0], h[0]) + 1,
        "largest": lambda h: h.max() * 1000 - h.amin() * 1000,
        "checkpoint": in_a_checkpoint,
        "branch": in_a_branch,
    }[kind]


KINDS = ("norm of rows", "norm of all", "masked mean", "sum of squares by numel", "variance", "softmax", "smoothed",
         "scaled power", "mean", "dot", "largest", "checkpoint", "branch")  # fmt: skip


class ByHand(nn.Module):
    """A product by the identity, which rounds its input to the low dtype and nothing else, and all that follows."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = x @ EYE
        return {kind: by_hand(kind)(h) for kind in KINDS}


@pytest.mark.parametrize("dtype", LOW, ids=["bf16", "f16"])
def test_expressions_by_hand_are_as_good_as_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 256) * 30
    compiled = amp_compile(ByHand(), dtype=dtype, backend="eager")
    found, exact = compiled(x), x.to(dtype).double()
    for kind, ours in found.items():
        assert ours.dtype is torch.float32, kind
        wanted = by_hand(kind)(exact)
        assert wanted.abs().max() > 1e-6
        error = float((ours.double() - wanted).abs().max() / wanted.abs().max())
        assert error < 2e-5, f"{kind}: {error}"
    neutral = [r for r in compiled.report().rows if r.op in ("add", "mul", "sqrt", "div", "sub")]
    low = {r.source.rpartition(": ")[2] for r in neutral if r.precision != "float32"}
    assert all("h.div(8)" in line or "h * 1" in line for line in low), low  # they read the product alone
    reasons = {r.reason for r in neutral}
    assert any(reason.startswith("reads the fp32 result of sum (test_wide_values.py:") for reason in reasons)


def test_gradients_are_as_good_as_those_of_level_auto() -> None:
    """The zeros of a norm in fp16 stopped training without a word."""
    torch.manual_seed(0)
    x = torch.randn(8, 256) * 100
    results = {}
    for level in ("auto", "O2"):
        leaf = x.clone().requires_grad_()
        run = amp_compile(lambda t: by_hand("norm of rows")(t @ EYE), level=level, dtype=F16, backend="eager")
        (run(leaf) * torch.arange(256.0)).sum().backward()
        results[level] = leaf.grad
    assert torch.equal(results["O2"], results["auto"])
    assert results["O2"].abs().max() > 0


# ------------------------------------------------------------------------------------------------ pieces


def test_a_wide_value_stays_wide_across_a_graph_break() -> None:
    def broken(x: Tensor) -> Tensor:
        h = x @ EYE
        total = h.pow(2).sum(-1, keepdim=True)
        torch._dynamo.graph_break()
        return h / total.sqrt()

    x = torch.randn(4, 256) * 100
    compiled = amp_compile(broken, dtype=F16, backend="eager")
    exact = by_hand("norm of rows")(x.half().double())
    for _ in range(2):
        assert float((compiled(x).double() - exact).abs().max()) < 1e-6
    assert len(compiled.graphs) == 2
    assert rows(compiled, "div") == [("float32", "reads the fp32 result of sum")]


@torch._dynamo.disable
def in_plain_python(x: Tensor) -> Tensor:
    return x.view(-1, 1)


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_that_plain_python_takes_of_a_wide_value_is_wide(grad: bool) -> None:
    def leaves_the_graph(x: Tensor) -> Tensor:
        h = x @ EYE
        return h / in_plain_python(h.pow(2).sum(-1)).sqrt()

    x = torch.randn(4, 256) * 100
    compiled = amp_compile(leaves_the_graph, dtype=F16, backend="eager")
    with torch.set_grad_enabled(grad):
        ours = compiled(x.requires_grad_(grad))
    assert float((ours.double() - by_hand("norm of rows")(x.half().double())).abs().max()) < 1e-6
    assert rows(compiled, "div") == [("float32", "reads the fp32 result of sum")]


def rows(compiled: AmpModule, op: str) -> list[tuple[str, str]]:
    return [(r.precision, r.reason.partition(" (")[0]) for r in compiled.report().rows if r.op == op]


def divide(a: Tensor, b: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return a / b


@pytest.mark.parametrize("wide_first", [False, True])
def test_code_that_two_pieces_call_is_compiled_for_both(wide_first: bool) -> None:
    """A frame that Dynamo compiled for a value that is not wide is not reused for one that is."""

    def calls_twice(x: Tensor) -> list[Tensor]:
        h = x @ EYE
        others = [h.pow(2).sum(-1, keepdim=True), h[:, :1] * 2]
        return [divide(h, other) for other in (others if wide_first else others[::-1])]

    x = torch.randn(4, 256).abs() * 100 + 1
    compiled = amp_compile(calls_twice, dtype=F16, backend="eager")
    for _ in range(2):
        small = compiled(x)[0 if wide_first else 1]
    exact = x.half().double() / x.half().double().pow(2).sum(-1, keepdim=True)
    assert float(((small.double() - exact) / exact).abs().max()) < 1e-6
    assert sorted(precision for precision, _ in rows(compiled, "div")) == ["float16", "float32"]


def test_an_input_is_not_wide_because_another_call_made_it() -> None:
    first = amp_compile(lambda x: x.exp() + 1, dtype=F16, backend="eager")
    second = amp_compile(lambda x: x * 2, dtype=F16, backend="eager")
    second(first(torch.ones(4)))
    assert rows(second, "mul")[0][0] == "float16"
    first(first(torch.ones(4)))
    assert len(first.graphs) == 1, "the result of the first call is an ordinary input of the second"


# ---------------------------------------------------------------------------------------------- property

W = torch.linspace(-1, 1, 16).view(4, 4)
#: name -> (class, function of one or two values); what is fp32 inside has a class of its own
STEPS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "product": ("white", lambda a: a @ W.to(a.dtype)),
    "exp": ("black", lambda a: a.exp()),
    "pow": ("black", lambda a: a.pow(2)),
    "log1p": ("black", lambda a: a.abs().log1p()),
    "row sum": ("black", lambda a: a.sum(-1, keepdim=True).expand(4, 4)),
    "sum": ("black", lambda a: a.sum()),
    "norm": ("black", lambda a: torch.linalg.vector_norm(a, dim=-1, keepdim=True).expand(4, 4)),
    "softmax": ("inside", lambda a: a.softmax(-1)),
    "row mean": ("inside", lambda a: a.mean(-1, keepdim=True).expand(4, 4)),
    "mean": ("black", lambda a: a.mean()),
    "add": ("neutral", lambda a, b: a + b),
    "sub": ("neutral", lambda a, b: a - b),
    "mul": ("neutral", lambda a, b: a * b),
    "div": ("neutral", lambda a, b: a / (b.abs() + 0.5)),
    "sqrt": ("neutral", lambda a: a.abs().sqrt()),
    "tanh": ("neutral", lambda a: a.tanh()),
    "scale": ("neutral", lambda a: a * 2048),
    "shrink": ("neutral", lambda a: a * 2**-12),
    "transposed": ("exact", lambda a: a.mT if a.dim() == 2 else a),
    "relu": ("exact", lambda a: a.relu()),
}
Program = list[tuple[str, int, int]]
#: how much larger the error of O2 may be than level auto's
FACTOR = 2.0


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Steps that each take one or two of the values so far, by their place from the end."""
    return [
        (draw(st.sampled_from(sorted(STEPS))), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(2, 7)))
    ]


def run(program: Program, x: Tensor, see: Callable[[str, str, Tensor, list[Tensor]], Tensor]) -> Tensor:
    """The last value of a program; ``see(name, class, result, operands)`` may replace each."""
    values = [see("x", "input", x, []), see("x", "input", x * 0.5, [])]
    for name, first, second in program:
        kind, fn = STEPS[name]
        given = [values[-min(first, len(values))], values[-min(second, len(values))]]
        given = given[: fn.__code__.co_argcount]
        if kind == "white" or "row" in name or name == "norm":
            given = [a.expand(4, 4) for a in given]
        if name == "softmax" and given[0].dim() == 0:
            given = [given[0].expand(4)]
        values.append(see(name, kind, fn(*given), given))
    return values[-1]


def plain(name: str, kind: str, result: Tensor, given: list[Tensor]) -> Tensor:
    return result


class Ranges:
    """Runs a program in fp64 and tells which values O2 rounds to low, by the rule of
    docs/design.md#values-that-are-kept-in-fp32 written down once more, and whether all these are in the low dtype's
    range."""

    def __init__(self, program: Program, x: Tensor, dtype: torch.dtype) -> None:
        self.info, self.fits, self.wide = torch.finfo(dtype), True, set()
        self.inside_low: list[bool] = []  # for each step that is fp32 inside: does it run low?
        self.keep: list[Tensor] = []  # ids are of living tensors
        self.result = run(program, x.double(), self.see)

    def see(self, name: str, kind: str, result: Tensor, given: list[Tensor]) -> Tensor:
        result = result.clone()
        self.keep.append(result)
        reads_wide = any(self.is_wide(a) for a in given)
        if kind == "inside":
            self.inside_low.append(not reads_wide)
        if kind == "black" or (reads_wide and kind != "white"):
            self.wide.add(id(result))
        else:
            self.check(result, self.info.tiny, self.info.max)
        if kind == "white":
            for a in given:
                self.check(a, self.info.tiny, self.info.max)
        # the constants and sums inside of a step, and gradual underflow of fp32, leave some room at both ends
        self.check(result, 1e-30, 1e30)
        return result

    def is_wide(self, value: Tensor) -> bool:
        base = value if value._base is None else value._base
        return id(base) in self.wide or id(value) in self.wide

    def check(self, value: Tensor, smallest: float, largest: float) -> None:
        sizes = value.abs()[value != 0]
        self.fits &= bool(value.isfinite().all()) and not (sizes.numel() and sizes.max() > largest * 0.5)
        self.fits &= not (sizes.numel() and sizes.min() < smallest * 2)


def as_auto(program: Program, inside_low: list[bool]) -> Callable[[Tensor], Tensor]:
    """The program for level auto: inputs, and results that O2 has low because they are fp32 inside, go through a
    product by the identity, which rounds them to low and changes nothing else."""

    def fn(x: Tensor) -> Tensor:
        places = iter(inside_low)

        def see(name: str, kind: str, result: Tensor, given: list[Tensor]) -> Tensor:
            if kind == "input" or (kind == "inside" and next(places)):
                return result @ EYE4
            return result

        return run(program, x, see)

    return fn


def compiled(fn: Callable[[Tensor], Tensor], x: Tensor, level: str, dtype: torch.dtype) -> Tensor:
    return prepared(pre_dispatch(fn, x), context(level, dtype), until="the end")(x)


def check(program: Program, size: int, dtype: torch.dtype) -> None:
    x = (torch.linspace(-1, 1, 16).view(4, 4) + 0.03125).mul(2.0**size).to(dtype).float()
    ranges = Ranges(program, x, dtype)
    assume(ranges.fits)
    event(f"wide values: {min(len(ranges.wide), 3)}")
    ours = compiled(lambda t: run(program, t, plain), x, "O2", dtype).double()
    auto = compiled(as_auto(program, ranges.inside_low), x, "auto", dtype).double()
    assert bool(ours.isfinite().all())
    exact = ranges.result
    assert ours.shape == auto.shape == exact.shape
    error, theirs = (float((v - exact).abs().max()) for v in (ours, auto))
    assert error <= FACTOR * theirs + 1e-6 * float(exact.abs().max()), f"{error} against {theirs}"


@settings(max_examples=30)
@given(programs(), st.integers(-6, 8), st.sampled_from(LOW))
def test_any_expression_is_finite_and_as_good_as_level_auto(program: Program, size: int, dtype: torch.dtype) -> None:
    """Wherever the values that O2 has low fit the low dtype. The reference is level auto on inputs that are low."""
    check(program, size, dtype)


@pytest.mark.zoo
@settings(max_examples=1500)
@given(programs(), st.integers(-6, 8), st.sampled_from(LOW))
def test_many_expressions(program: Program, size: int, dtype: torch.dtype) -> None:
    check(program, size, dtype)


class Skipped(nn.Module):
    """The norm is computed by code that Dynamo gives up, and used by code that it captures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        for _ in range(1):
            LOG.info("a loop that logs is not captured")
            if self.kind == "method":
                squares = h.pow(2)
            elif self.kind == "operator":
                squares = h**2
            else:
                squares = h * h
            norm = torch.sum(squares, -1, keepdim=True).sqrt()
        return self.divided(h, norm)

    def divided(self, h: Tensor, norm: Tensor) -> Tensor:
        return h / (norm * norm)


@pytest.mark.parametrize("kind", ["method", "operator", "sum"])
def test_what_uncaptured_code_made_in_fp32_stays_wide(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Skipped(kind), torch.randn(4, 16) * 500
    fast = amp_compile(model, dtype=F16)
    with warnings.catch_warnings(action="ignore", category=AmpWarning):
        out = fast(x)
    (row,) = (row for row in fast.report().rows if row.op == "div")
    assert row.precision == "float32"
    op = "sum" if kind == "sum" else "pow"
    assert row.reason == f"reads the fp32 result of {op}, in code that is not captured"
    torch.testing.assert_close(out, model(x), rtol=0.02, atol=1e-6)
    assert out.abs().max() > 1e-5
