"""Code that asks tensors for their dtype: an explicit choice is honoured, one that followed a dtype follows ours.

Each case runs through both front ends. The reference is what torch itself does with the same code in the low dtype.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import AmpWarning, Policy, amp_compile, ir, precision
from amp_compiler.capture import twin
from helpers import BF16, F16, F32, LOW, ExportMixed, casts, in_turn, ops, same
from networks import RMSNorm


def through_dynamo(model: nn.Module, *args: Any, level: str = "O2", dtype: torch.dtype = BF16) -> Any:
    compiled = amp_compile(model, level, dtype=dtype, backend="eager")
    compiled(*args)
    assert len(compiled.graphs) == 1
    return compiled, compiled.graphs[0], list(compiled.report().notes)


def through_export(model: nn.Module, *args: Any, level: str = "O2", dtype: torch.dtype = BF16) -> Any:
    exported = ExportMixed(model, args, level=level, dtype=dtype)
    return exported, exported.graph, exported.ctx.notes


FRONT_ENDS = pytest.mark.parametrize("capture", [through_dynamo, through_export])


class Program(nn.Module):
    """``step`` between two linear layers, so that what goes in is low, and what comes out matters."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.norm, self.step = nn.Linear(8, 8), nn.Linear(8, 8), RMSNorm(8), step

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(self, self.first(x)))


def normalized(m: Any, x: Tensor) -> Tensor:
    return m.norm(x)


def masked(m: Any, x: Tensor) -> Tensor:
    mask = torch.where(x[:, :1] > 0, 0.0, torch.finfo(x.dtype).min)
    return torch.softmax(x + mask.to(x.dtype), -1, dtype=torch.float32).to(x.dtype)


def filled(m: Any, x: Tensor) -> Tensor:
    return x + torch.full((8,), 0.5, dtype=x.dtype) + torch.zeros(8, dtype=m.first.weight.dtype)


def conditional(m: Any, x: Tensor) -> Tensor:
    y = x.float() * 2
    if y.dtype != m.first.weight.dtype:
        y = y.to(m.first.weight.dtype)
    return y + x


def as_another(m: Any, x: Tensor) -> Tensor:
    return x.float().exp().type_as(x) * 2 + x.float().sin().to(x)


def constant(m: Any, x: Tensor) -> Tensor:
    return torch.maximum(x, torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype))


# ------------------------------------------------------------------------------------ what the graph looks like


@FRONT_ENDS
def test_the_norm_of_a_llama(capture: Any) -> None:
    """Body in fp32, result back in bf16, one cast up and one down and no more."""
    _, gm, notes = capture(Program(normalized), torch.randn(4, 8))
    inside = {ir.op_name(n): ir.tensor_of(n) for n in gm.graph.nodes if ir.module_path(n) == "norm"}
    assert {name: v.dtype for name, v in inside.items() if v is not None and name != "to"} == {
        "pow": F32, "mean": F32, "add": F32, "rsqrt": F32, "mul": BF16,
    }  # fmt: skip
    (first, last) = (n for n in ops(gm, "mul"))
    assert (ir.dtype_of(first), ir.dtype_of(last)) == (F32, BF16)
    of_activations = [n for n in casts(gm) if ir.cast_source(n).op == "call_function"]
    names = [(ir.op_name(ir.cast_source(n)), ir.cast_dtype(n)) for n in of_activations]
    assert names == [("linear", F32), ("mul", BF16), ("linear", F32)]  # up, down, and the model's output
    assert notes == []


STEPS = (normalized, masked, filled, conditional, as_another, constant)


@pytest.mark.parametrize(("capture", "step", "dtype"), in_turn((through_dynamo, through_export), STEPS, LOW))
def test_as_the_low_model_would_do_it(capture: Any, step: Any, dtype: torch.dtype) -> None:
    """At O2 each op has the precision that it has in the model as torch runs it in the low dtype, up to rounding."""
    model, x = Program(step), torch.randn(6, 8)
    run, gm, notes = capture(model, x, level="O2", dtype=dtype)
    low = copy.deepcopy(model).to(dtype)(x.to(dtype)).float()
    error = (run(x) - low).abs().max() / low.abs().max()
    assert error <= 8 * torch.finfo(dtype).eps
    last = ops(gm, "linear")[-1].args[0]
    assert not ir.is_cast(last) or ir.origin(last) is not None  # what reaches the last layer is low already
    assert notes == []


@FRONT_ENDS
def test_an_explicit_cast_is_fp32_at_every_level(capture: Any) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        return (x.float() + 1) * x.to(torch.float32)

    for level in ("O1", "auto", "O2", "O3"):
        _, gm, _ = capture(Program(step), torch.randn(4, 8), level=level)
        assert {ir.dtype_of(n) for op in ("add", "mul") for n in ops(gm, op)} == {F32}, level


@FRONT_ENDS
def test_a_product_of_two_explicit_casts_is_fp32(capture: Any) -> None:
    """Rotary positions: ``inv_freq.float() @ position_ids.float()`` in bf16 would lose every position over 256."""

    def step(m: Any, x: Tensor) -> Tensor:
        angles = torch.arange(8).float()[:, None] @ m.norm.weight.float()[None, :]
        return x @ angles.to(x.dtype)

    for level in ("O1", "auto", "O2", "O3"):
        _, gm, _ = capture(Program(step), torch.randn(4, 8), level=level)
        angles, applied = ops(gm, "matmul")
        assert (ir.dtype_of(angles), ir.dtype_of(applied)) == (F32, BF16), level


@FRONT_ENDS
def test_one_explicit_operand_does_not_stop_a_linear_layer(capture: Any) -> None:
    """``self.fc(x.float())`` is written for autocast; the weight is the policy's."""
    _, gm, notes = capture(Program(lambda m, x: m.first(x.float())), torch.randn(4, 8))
    assert [ir.dtype_of(n) for n in ops(gm, "linear")] == [BF16] * 3
    assert notes == []


@FRONT_ENDS
def test_back_to_where_it_came_from_at_auto(capture: Any) -> None:
    """At auto the residual stream is fp32 and the projections are low: each norm gives back what it got."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm_low, self.fc = RMSNorm(8), RMSNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.fc(self.norm(x))
            return self.norm_low(self.fc(x)) + x

    _, gm, _ = capture(Block(), torch.randn(4, 8), level="auto")
    downs = [n for n in gm.graph.nodes if ir.is_cast(n) and ir.decision(n).rule == "follows"]
    assert [ir.module_path(n) for n in downs] == ["norm_low"]  # in fp32 there is nothing left to cast
    assert [ir.cast_dtype(n) for n in downs] == [BF16]


@FRONT_ENDS
@pytest.mark.parametrize("dtype", LOW)
def test_limits_are_those_of_the_dtype(capture: Any, dtype: torch.dtype) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        big = x.masked_fill(x > 0, torch.finfo(x.dtype).min)
        return torch.clamp(big, min=torch.finfo(x.dtype).min / 2) * torch.finfo(x.dtype).eps

    run, gm, _ = capture(Program(step), torch.randn(4, 8), dtype=dtype)
    (fill,), (clamp,), (mul,) = ops(gm, "masked_fill"), ops(gm, "clamp"), ops(gm, "mul")
    info = torch.finfo(dtype)
    assert fill.args[2] == info.min
    assert clamp.args[1] == info.min / 2
    assert mul.args[1] == info.eps
    assert all(ir.dtype_of(n) is dtype for n in (fill, clamp, mul))
    assert "limit of its dtype" in ir.decision(fill).reason
    assert run(torch.randn(4, 8)).isfinite().all()


@pytest.mark.parametrize(
    ("capture", "level", "dtype"), in_turn((through_dynamo, through_export), ("O1", "auto", "O2", "O3"), LOW)
)
def test_attention_masks_are_finite(capture: Any, level: str, dtype: torch.dtype) -> None:
    """A row that is masked whole gives NaN where the limit turns to -inf."""

    def step(m: Any, x: Tensor) -> Tensor:
        q = x.view(1, 2, -1, 4)
        mask = torch.full((1, 1, q.shape[2], q.shape[2]), torch.finfo(x.dtype).min, dtype=x.dtype)
        mask[..., 1:, :] = 0
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).reshape(x.shape)

    run, gm, _ = capture(Program(step), torch.randn(4, 8), level=level, dtype=dtype)
    assert ir.dtype_of(ops(gm, "scaled_dot_product_attention")[0]) is dtype
    assert run(torch.randn(4, 8)).isfinite().all()


@FRONT_ENDS
def test_a_limit_that_only_fp32_ops_see_stays_that_of_fp32(capture: Any) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        mask = torch.full((8,), torch.finfo(x.dtype).min, dtype=x.dtype)
        return torch.softmax(x.float() + mask, -1).to(x.dtype)

    _, gm, _ = capture(Program(step), torch.randn(4, 8), dtype=F16)
    assert ops(gm, "full")[0].args[1] == torch.finfo(F32).min
    low = lambda m, x: m.last(x + torch.full((8,), torch.finfo(x.dtype).min, dtype=x.dtype)).to(x.dtype)  # noqa: E731
    _, gm, _ = capture(Program(low), torch.randn(4, 8), dtype=F16)
    assert ops(gm, "full")[0].args[1] == torch.finfo(F16).min


# -------------------------------------------------------------------------------------- code that takes two ways


class Guarded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.dtype == torch.float16:
            y = y.clamp(-1000, 1000)  # this line
        return y + 1


class ForFp32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            x = x * 3
        return x + 1


def quietly(capture: Any, module: nn.Module, dtype: torch.dtype) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        return capture(nn.Sequential(nn.Linear(8, 8), module, nn.Linear(8, 8)), torch.randn(4, 8), dtype=dtype)


@FRONT_ENDS
def test_a_branch_on_the_dtype_is_conservative_and_named(capture: Any) -> None:
    _, gm, notes = quietly(capture, Guarded(), F16)
    assert [ir.dtype_of(n) for n in (*ops(gm, "mul"), *ops(gm, "add"))] == [F32, F16]  # only what was guarded
    assert len(notes) == 1
    assert "y = x * 2" in notes[0]
    assert "y = y.clamp(-1000, 1000)" in notes[0]
    assert "stays in fp32" in notes[0]
    _, gm, notes = quietly(capture, Guarded(), BF16)
    assert [ir.dtype_of(n) for n in (*ops(gm, "mul"), *ops(gm, "add"))] == [BF16, BF16]
    assert notes == []


@FRONT_ENDS
def test_code_for_fp32_alone_stays_fp32(capture: Any) -> None:
    _, gm, notes = quietly(capture, ForFp32(), BF16)
    assert [ir.dtype_of(n) for n in (*ops(gm, "mul"), *ops(gm, "add"))] == [F32, BF16]
    assert "x = x * 3" in notes[0]


def test_a_warning_says_it_once() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 1
            if x.dtype == torch.bfloat16:
                x = x.clamp(-5, 5)
        return x

    compiled = amp_compile(Program(step), dtype=BF16, backend="eager")
    with pytest.warns(AmpWarning, match=r"x = x \+ 1: stays in fp32") as seen:
        [compiled(torch.randn(rows, 8)) for rows in (4, 5)]
    assert len([w for w in seen if "stays in fp32" in str(w.message)]) == 1


@FRONT_ENDS
def test_a_cast_in_fp32_is_not_taken_for_its_input(capture: Any) -> None:
    """``y = x.float()`` does nothing in fp32; later uses of x must not become uses of y."""

    def step(m: Any, x: Tensor) -> Tensor:
        y = x.float()
        return (x * 2).to(x.dtype) + (y * 3).to(x.dtype)

    _, gm, _ = capture(Program(step), torch.randn(4, 8))
    by_scalar = {n.args[1]: ir.dtype_of(n) for n in ops(gm, "mul")}
    assert by_scalar == {2: BF16, 3: F32}


@FRONT_ENDS
def test_a_scope_says_what_follows(capture: Any) -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        with precision("float32"):
            y = (x * 2).to(m.first.weight.dtype) + 1
        return y.to(x.dtype)

    _, gm, _ = capture(Program(step), torch.randn(4, 8))
    assert [ir.dtype_of(n) for op in ("mul", "add") for n in ops(gm, op)] == [F32, F32]


# ------------------------------------------------------------------------------------------- the twin itself


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.kept = RMSNorm(8), 0, []
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.kept.append(x.dtype)
        self.seen += x.detach().sum(0)
        return self.norm(x)


def test_dynamo_runs_the_code_once() -> None:
    model, reference = Stateful(), Stateful()
    before = set(vars(model))
    compiled = amp_compile(model, dtype=BF16, backend="eager")
    x = torch.randn(4, 8)
    compiled(x), reference(x)
    assert (model.calls, model.kept) == (reference.calls, reference.kept) == (1, [F32])
    assert torch.equal(model.seen, reference.seen)
    assert set(vars(model)) == before
    assert all(p.dtype is F32 and type(p) is nn.Parameter for p in model.parameters())


def test_export_leaves_the_model_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = RMSNorm(8), []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(1)
            return self.norm(x)

    model = Counting()
    weight = model.norm.weight
    ExportMixed(model, (torch.randn(4, 8),))
    assert len(model.calls) <= 1  # the twin is a copy
    assert model.norm.weight is weight


def test_the_twin_takes_no_memory() -> None:
    """The copy shares the tensors; nothing of the size of the weights is allocated."""
    model = nn.Sequential(nn.Linear(8, 8))
    copied = twin.sharing_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))


def looks_at_a_dtype(x: Tensor) -> Tensor:
    return x * 2 if x.dtype == torch.float32 else x


def test_no_twin_where_no_code_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("a twin was traced")

    monkeypatch.setattr(twin, "twin_of_frame", fail)
    layers = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4), nn.LayerNorm(4)
    model = nn.Sequential(*layers)
    x = torch.randn(2, 3, 8)
    model(x)
    compiled = amp_compile(model, dtype=BF16, backend="eager")
    compiled(x).sum().backward()
    assert compiled.report().notes == ()
    amp_compile(RMSNorm(8), dtype=BF16, backend="eager")(torch.randn(4, 8))  # it only passes a dtype on
    with pytest.warns(AmpWarning, match="could not be traced in bfloat16"):
        amp_compile(looks_at_a_dtype, dtype=BF16, backend="eager")(torch.randn(4, 8))


def test_without_a_twin_the_model_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conservative: each cast to fp32 counts as the author's, and the user is told."""

    def fail(*args: Any) -> Any:
        raise RuntimeError("no way")

    monkeypatch.setattr(twin, "twin_of_frame", fail)
    model, x = Program(lambda m, x: looks_at_a_dtype(normalized(m, x))), torch.randn(4, 8)
    compiled = amp_compile(model, dtype=F16, backend="eager")
    with pytest.warns(AmpWarning, match=r"could not be traced in float16.*no way"):
        out = compiled(x)
    torch.testing.assert_close(out, model(x), rtol=0.02, atol=8 * torch.finfo(F16).eps)
    assert {ir.dtype_of(n) for n in ops(compiled.graphs[0], "mul")} == {F32}


def test_across_graph_breaks_and_sizes() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), RMSNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.fc(x))
            torch._dynamo.graph_break()
            return self.norm(self.fc(x))

    model = Broken()
    compiled = amp_compile(model, dtype=BF16, backend="eager")
    for rows in (2, 3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x), rtol=0.05, atol=0.05)
    assert len(compiled.graphs) == 4  # two pieces, with a fixed and with a symbolic size
    for gm in compiled.graphs:
        first, last = ops(gm, "mul")
        assert (ir.dtype_of(first), ir.dtype_of(last)) == (F32, BF16)


def test_o0_and_a_switched_off_pass_have_no_twin() -> None:
    model, x = RMSNorm(8), torch.randn(4, 8)
    assert torch.equal(amp_compile(model, "O0", backend="eager")(x), model(x))
    off = amp_compile(model, dtype=BF16, backend="eager", disable_passes=["mark_dtype_origin"])
    off(x)
    assert {ir.dtype_of(n) for n in ops(off.graphs[0], "mul")} == {F32}


def test_the_reason_is_in_the_report() -> None:
    # O3: at O2 the same op also reads the fp32 result of a mean, and the report says that.
    compiled = amp_compile(Program(normalized), level="O3", dtype=BF16, backend="eager")
    compiled(torch.randn(4, 8))
    reasons = {row.op: row.reason for row in compiled.report().rows if row.module == "norm"}
    assert "linear, which the model's code casts to float32" in reasons["add"]


# ----------------------------------------------------------------------------------------------- the property

UNARY = {
    "double": lambda x, y: x * 2, "shift": lambda x, y: x + 0.25, "relu": lambda x, y: x.relu(), "neg": lambda x, y: -x,
    "float": lambda x, y: x.float(), "explicit": lambda x, y: x.to(torch.float32), "follow": lambda x, y: x.to(y.dtype),
    "type_as": lambda x, y: x.type_as(y), "to_tensor": lambda x, y: x.to(y), "own": lambda x, y: x.to(x.dtype),
    "fill": lambda x, y: x + torch.full((4,), 0.5, dtype=y.dtype),
    "ones": lambda x, y: x * torch.ones(4, dtype=y.dtype),
    "limit": lambda x, y: x.clamp(min=torch.finfo(x.dtype).min / 4),
    "conditional": lambda x, y: x if x.dtype == y.dtype else x.to(y.dtype),
    "like": lambda x, y: torch.ones_like(x) - x, "new": lambda x, y: x.new_full((4,), 0.125) + x,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul, "sub": torch.sub}
LINES = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 9), st.integers(0, 9))


class Random(nn.Module):
    """A program over a parameter and an input; each line takes earlier values."""

    def __init__(self, lines: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.lines = lines

    def forward(self, x: Tensor) -> Tensor:
        values = [x * self.weight, x + self.weight]
        for name, a, b in self.lines:
            left, right = values[a % len(values)], values[b % len(values)]
            values.append(UNARY[name](left, self.weight) if name in UNARY else BINARY[name](left, right))
        return values[-1] + values[-2]


any_program = given(
    st.lists(LINES, min_size=1, max_size=8),
    st.sampled_from(LOW),
    st.sampled_from([through_dynamo, through_export]),
)  # fmt: skip


@settings(max_examples=9)
@any_program
def test_elementwise_programs_at_o2_are_the_low_model_bit_by_bit(
    lines: list[tuple[str, int, int]], dtype: torch.dtype, capture: Any
) -> None:
    check_program(lines, dtype, capture)


@pytest.mark.zoo
@settings(max_examples=25)
@any_program
def test_more_elementwise_programs(lines: list[tuple[str, int, int]], dtype: torch.dtype, capture: Any) -> None:
    check_program(lines, dtype, capture)


def check_program(lines: list[tuple[str, int, int]], dtype: torch.dtype, capture: Any) -> None:
    """At O2 elementwise ops are low, so the program is what torch computes in the low dtype: the same explicit casts
    in fp32, the same casts back, the same promotions."""
    torch._dynamo.reset()
    model, x = Random(lines), torch.linspace(-3, 2, 12).view(3, 4)
    run, _, notes = capture(model, x, level="O2", dtype=dtype)
    low = copy.deepcopy(model).to(dtype)(x.to(dtype))
    assert notes == []
    assert torch.equal(run(x), low.float())


def test_policy_torch_leaves_limits_to_torch() -> None:
    """``Policy.torch`` does what autocast does; there ``finfo(x.dtype)`` of a fp32 value is fp32's."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(8, 8), RMSNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.fc(self.norm(x)))
            return torch.softmax(h + torch.finfo(x.dtype).min * (x > 0), -1) @ h.to(x.dtype).t()

    model, x = Net(), torch.randn(4, 8)
    ours = amp_compile(model, policy=Policy.torch("cpu", BF16), backend="eager", keep_output_dtypes=False)
    out = ours(x)
    out.float().sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=BF16):
        theirs = model(x)
    theirs.float().sum().backward()
    assert torch.equal(out, theirs)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


class Disentangled(nn.Module):
    """Attention as DeBERTa has it: the limit of the query's dtype, put into scores whose dtype may be another."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked, self.query, self.key = asked, nn.Linear(8, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        scores = query @ key.mT / 8**0.5
        if self.asked == "query":
            scores = scores.masked_fill(mask, torch.finfo(query.dtype).min)
        elif self.asked == "fp32 value":  # low scores with a limit that they do not hold: kept in fp32 by a sum
            scores = (scores + self.bias[0] * torch.ones(4, 4)).masked_fill(mask, torch.finfo(x.dtype).min)
        elif self.asked == "low value, fp32 scores":
            scores = scores.exp().masked_fill(mask, torch.finfo(query.dtype).min)
        else:
            limit = torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype)
            scores = torch.where(mask, limit, scores)
        return scores.softmax(-1)


@pytest.mark.parametrize(
    ("asked", "dtype"), in_turn(["query", "fp32 value", "low value, fp32 scores", "made"], LOW)
)
def test_policy_torch_follows_a_number_to_the_tensor_that_was_asked(asked: str, dtype: torch.dtype) -> None:
    """Row 0 is masked whole: its weights tell the limits apart."""
    torch.manual_seed(0)
    model, x, mask = Disentangled(asked), torch.randn(4, 8), torch.eye(4) > 0
    mask[0] = True
    ours = amp_compile(model, policy=Policy.torch("cpu", dtype), backend="eager", keep_output_dtypes=False)
    with torch.autocast("cpu", dtype=dtype):
        theirs = model(x, mask)
    same(ours(x, mask), theirs)


@pytest.mark.zoo
def test_policy_torch_runs_deberta_as_autocast_does() -> None:
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    model = DebertaV2Model(DebertaV2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, relative_attention=True, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ))  # fmt: skip
    ids, mask = torch.randint(50, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    ours = amp_compile(model, policy=Policy.torch("cpu", BF16), backend="eager", keep_output_dtypes=False)
    with torch.autocast("cpu", dtype=BF16):
        theirs = model(ids, attention_mask=mask).last_hidden_state
    same(ours(ids, attention_mask=mask).last_hidden_state, theirs)
