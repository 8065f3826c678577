"""place_neutral: what may run in either precision takes the one that is cheaper on the device, and never a lower one
than the rules allow."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import Policy, amp_compile, compile_train_step, ir, precision
from amp_compiler.common.errors import ArgumentError, PipelineError
from amp_compiler.cost.device import row
from amp_compiler.cost.devices import find as find_device
from amp_compiler.cost.model import CostModel
from amp_compiler.ir import decisions
from amp_compiler.passes import fold_casts, insert_casts
from amp_compiler.passes.place_neutral import PASS
from amp_compiler.policy import LEVELS, Level, Rule, Treatment
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, F16, F32, casts, check_pass, context, find, pre_dispatch, prepared, same, unchanged

#: a device that only moves bytes, a byte per nanosecond, and launches nothing: an op costs what it reads and writes
BYTES = row("bytes", "", fp32=1e9, fp16=1e9, bf16=1e9, tf32=None, bandwidth=1 / 0.8, sms=1, memory=1, link=1, source="",
            launch=0, host=0)  # fmt: skip
X, W, ROW = torch.randn(8, 4), torch.randn(4, 4), torch.randn(4)


def costing(dtype: torch.dtype = BF16, device: Any = BYTES, *, trained: bool = False, **options: Any) -> Context:
    ctx = context("auto", dtype, **options)
    return dataclasses.replace(ctx, costs=CostModel(find_device(device)), differentiated=trained)


def ready(fn: Callable[..., Any], *inputs: Any, ctx: Context, parameters: Sequence[int] = ()) -> fx.GraphModule:
    return prepared(pre_dispatch(fn, *inputs, parameters=parameters), ctx, until="insert_casts")


def placed(fn: Callable[..., Any], *inputs: Any, ctx: Context | None = None, **options: Any) -> dict[str, Any]:
    """The precision of every node after the pass."""
    ctx = ctx or costing()
    gm = check_pass(PASS, ready(fn, *inputs, ctx=ctx, **options), ctx)
    return precisions(gm)


def precisions(gm: fx.GraphModule) -> dict[str, Any]:
    return {n.name: known.precision for n in gm.graph.nodes if (known := ir.decision(n)) is not None}


# ---------------------------------------------------------------------------------------------- smallest


def scaled(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
    return F.linear(F.linear(x, w) * row, w)


def test_an_op_between_products_runs_low_where_a_small_cast_pays_for_it() -> None:
    ctx = costing(keep=False)
    gm = ready(scaled, X, W, ROW, ctx=ctx)
    assert precisions(gm)["mul"] is F32  # as auto has it: row is fp32
    check_pass(PASS, gm, ctx, modified=True)
    known = ir.decision(find(gm, "mul"))
    assert known is not None
    assert (known.precision, known.rule) == (BF16, Rule.PLACED)
    assert known.reason.startswith("on bytes float32 would cost ")
    reference = lambda x, w, row: F.linear(F.linear(x.bfloat16(), w.bfloat16()) * row.bfloat16(), w.bfloat16())  # noqa: E731
    check_pass(insert_casts.PASS, gm, ctx, inputs=[X, W, ROW], reference=reference, expected_text="""
        input x_1: f32[8, 4]
        input w_1: f32[4, 4]
        input row_1: f32[4]
        w_1_bf16: bf16[4, 4] = cast(w_1, bf16)
        x_1_bf16: bf16[8, 4] = cast(x_1, bf16)
        linear: bf16[8, 4] = linear(x_1_bf16, w_1_bf16)
        row_1_bf16: bf16[4] = cast(row_1, bf16)
        mul: bf16[8, 4] = mul.Tensor(linear, row_1_bf16)
        w_1_bf16_1: bf16[4, 4] = cast(w_1, bf16)
        linear_1: bf16[8, 4] = linear(mul, w_1_bf16_1)
        return linear_1
    """)


def test_the_reason_counts_what_the_other_choice_would_change() -> None:
    """In fp32: the product's result is cast up and the result down again, 32 elements each, and row is not cast."""
    ctx = costing(keep=False)
    gm = check_pass(PASS, ready(scaled, X, W, ROW, ctx=ctx), ctx)
    known = ir.decision(find(gm, "mul"))
    assert known is not None
    up_and_down, row_cast, op = 2 * 32 * 6, 4 * 6, (32 + 4 + 32) * 2
    assert known.reason == (
        f"on bytes float32 would cost {(up_and_down - row_cast + op) / 1e3:.3g} µs more: "
        "2 more casts of 192 B, 1 fewer of 8 B; the op itself 0.136 µs more"
    )


def test_readers_in_fp32_share_one_cast_of_what_all_of_them_read() -> None:
    """Three results would be cast up; one cast of what the ops read is cheaper, though they run slower then."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = F.linear(x, w)
        return torch.softmax(F.gelu(h), 0) + torch.softmax(F.silu(h), 0) + torch.softmax(torch.tanh(h), 0)

    device = dataclasses.replace(BYTES, launch=1e-6)  # so that the number of casts is what matters
    found = placed(fn, X, W, ctx=costing(device=device))
    assert (found["gelu"], found["silu"], found["tanh"]) == (F32, F32, F32)
    one = placed(lambda x, w: torch.softmax(F.gelu(F.linear(x, w)), 0), X, W, ctx=costing(device=device))
    assert one["gelu"] is BF16


def test_a_near_miss_nothing_is_free() -> None:
    """All neutral ops read what an fp32 op made."""
    ctx = costing()
    unchanged(PASS, ready(lambda x, w: F.linear(torch.softmax(x, 0) * 0.5 + 1, w), X, W, ctx=ctx), ctx)


def test_without_a_device_it_is_left_out() -> None:
    assert PASS.unmet(context("auto")) == "a device, whose costs are known"
    gm = prepared(pre_dispatch(scaled, X, W, ROW), context("auto"), until="insert_casts")
    assert not any(known.either or any(known.wide) for n in gm.graph.nodes if (known := ir.decision(n)) is not None)


def test_it_needs_decisions() -> None:
    with pytest.raises(PipelineError, match="'place_neutral' needs 'assigned'"):
        Pipeline((PASS,), ())


# ------------------------------------------------------------------------------------ ops that move values


def test_ops_that_move_values_go_with_what_they_move() -> None:
    def fn(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        return F.linear(torch.relu((F.linear(x, w) * row).view(4, 8).t()).reshape(8, 4), w)

    found = placed(fn, X, W, ROW)
    assert {found[name] for name in ("mul", "view", "t", "relu", "reshape")} == {BF16}


def test_several_outputs() -> None:
    """Both halves of a split have the precision of what is split, and each has casts of its own."""

    def fn(x: Tensor, w: Tensor, row: Tensor) -> Any:
        one, two = (F.linear(x, w) * row).split(4)
        return F.linear(one, w), F.linear(two, w)

    ctx = costing()
    gm = check_pass(PASS, ready(fn, X, W, ROW, ctx=ctx), ctx, modified=True)
    found = precisions(gm)
    assert {found[name] for name in ("mul", "split", "getitem", "getitem_1")} == {BF16}
    check_pass(insert_casts.PASS, gm, ctx)


def test_what_is_put_together_is_low_only_if_all_of_it_is() -> None:
    def both(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        return F.linear(torch.cat([F.linear(x, w) * row, F.linear(x, w) + row]), w)

    def one(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        return F.linear(torch.cat([F.linear(x, w) * row, torch.softmax(x, 0)]), w)

    assert {placed(both, X, W, ROW)[name] for name in ("mul", "add", "cat")} == {BF16}
    found = placed(one, X, W, ROW)
    assert found["cat"] is F32  # it holds a value that an fp32 op made, which only the product rounds


def test_a_comparison_reads_the_widest() -> None:
    def fn(x: Tensor, w: Tensor, row: Tensor) -> Any:
        h = F.linear(x, w) * row
        return F.linear(h, w), h > torch.softmax(x, 0)

    found = placed(fn, X, W, ROW)
    assert (found["mul"], found["gt"]) == (BF16, F32)


def test_a_cast_that_follows_a_dtype_keeps_the_one_that_the_rules_gave_it() -> None:
    """``x.to(a.dtype)``, where ``a`` is low in auto and placed in fp32."""

    def fn(x: Tensor, w: Tensor) -> Any:
        h = F.linear(x, w)
        a, b, c = F.gelu(h), F.silu(h), torch.tanh(h)
        return [torch.softmax(v, 0) for v in (a, b, c)], F.linear(x.to(F32), w)

    ctx = costing(device=dataclasses.replace(BYTES, launch=1e-6))
    gm = pre_dispatch(fn, X, W)
    find(gm, "to").meta[ir.ORIGIN] = ir.Origin(follows=True, twin=BF16, of="gelu")
    prepared(gm, ctx, until="insert_casts")
    assert precisions(gm)["gelu"] is precisions(gm)["to"] is BF16
    check_pass(PASS, gm, ctx, modified=True)
    assert (precisions(gm)["gelu"], precisions(gm)["to"]) == (F32, BF16)
    known = ir.decision(find(gm, "to"))
    assert known is not None
    assert known.reason.startswith("stays bfloat16, the dtype that the rules alone give")
    check_pass(insert_casts.PASS, gm, ctx)


# ------------------------------------------------------------------------------------------- never lower


def exempt(fn: Callable[..., Any], name: str, *inputs: Any, dtype: torch.dtype = BF16, **options: Any) -> None:
    """An op that stays in fp32, while its twin without the cause would be low."""
    ctx = costing(dtype, **options)
    gm = check_pass(PASS, ready(fn, *inputs, ctx=ctx), ctx)
    assert precisions(gm)[name] is F32
    assert ir.decision(find(gm, name)).either is False  # type: ignore[union-attr]


def test_constants_that_do_not_fit_keep_fp32() -> None:
    exempt(lambda x, w: F.linear(F.linear(x, w) + 1e30, w), "add", X, W, dtype=F16)
    exempt(lambda x, w, m: F.linear(F.linear(x, w) * m.masked_fill(m > 0, -1e30), w), "mul", X, W, ROW, dtype=F16)
    assert placed(lambda x, w, r: F.linear(F.linear(x, w) * r + 3, w), X, W, ROW, ctx=costing(F16))["add"] is F16


def test_lists_keep_fp32() -> None:
    policy = Policy("auto", BF16).with_ops(fp32=["mul"])
    exempt(scaled, "mul", X, W, ROW, policy=policy)
    follow = Policy("auto", BF16).with_ops(follow=["mul"])
    assert placed(scaled, X, W, ROW, ctx=costing(policy=follow))["mul"] is BF16


def test_values_that_an_fp32_op_made_keep_fp32() -> None:
    exempt(lambda x, w: F.linear(x.exp() * 0.5, w), "mul", X, W)
    exempt(lambda x, w: F.linear(x.exp().view(8, 4).relu() * 0.5, w), "mul", X, W)
    exempt(lambda x, w: (F.linear(x, w) * x.sum(), 1)[0], "mul", X, W)


def test_a_scope_keeps_its_dtype() -> None:
    def fn(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        h = F.linear(x, w)
        with precision("float32"):
            h = h * row
        return F.linear(h, w)

    exempt(fn, "mul", X, W, ROW)


def test_what_the_author_cast_to_fp32_keeps_it() -> None:
    exempt(lambda x, w, row: F.linear(F.linear(x, w).to(F32, copy=True) * row, w), "mul", X, W, ROW)


def test_what_is_written_to_keeps_its_dtype() -> None:
    def fn(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        h = F.linear(x, w) * row
        h += 1
        return F.linear(h, w)

    exempt(fn, "mul", X, W, ROW)


def test_a_part_with_a_policy_of_its_own_leaves_nothing_to_costs() -> None:
    """What is low there goes by other rules, and these ask what the values around it are."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(ROW.clone())
            self.first, self.part = nn.Linear(4, 4), amp_compile(nn.Linear(4, 4), level="O2", dtype=BF16)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.first(x) * self.scale)

    model = amp_compile(Outer(), level="auto", dtype=BF16, device="a100_80", backend="eager")
    model(X)
    assert not [r for r in model.report().rows if r.rule == "placed"]


# ----------------------------------------------------------------------------------------------- bodies


class Checkpointed(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.checkpoints = nn.Linear(4, 4), nn.Linear(4, 4), checkpoints
        self.scale = nn.Parameter(torch.ones(4))

    def inner(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpoints else self.inner(x)


def test_graphs_inside_of_nodes_are_placed_too() -> None:
    results = []
    for checkpoints in (False, True):
        made = amp_compile(Checkpointed(checkpoints), "auto", dtype=BF16, device="a100_80", backend="eager")
        results.append(made(X))
        assert [r.precision for r in made.report().rows if r.op == "mul"] == ["bfloat16"]
    same(*results)


# ------------------------------------------------------------------------------------------- the backward


def test_gradients_count() -> None:
    """In fp32 two values are cast, in low precision three. In training the gradients of the two are cast too, while the
    three inputs have none."""

    def fn(x: Tensor, w: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        return F.linear(F.linear(x, w) + a + b + c, w)

    device = dataclasses.replace(BYTES, launch=1e-6)  # so that the number of casts is what matters
    found = {}
    for trained in (False, True):
        ctx = costing(device=device, trained=trained)
        gm = ready(fn, X, W, *(torch.randn(8, 4) for _ in range(3)), ctx=ctx, parameters=[1])
        found[trained] = precisions(check_pass(PASS, gm, ctx))
    assert [found[False][name] for name in ("add", "add_1", "add_2")] == [F32] * 3
    assert [found[True][name] for name in ("add", "add_1", "add_2")] == [BF16] * 3


def test_a_training_step_takes_a_device() -> None:
    model = Checkpointed(False)
    step = compile_train_step(
        model, lambda out, y: F.mse_loss(out, y), torch.optim.SGD(model.parameters(), 0.1), "auto", dtype=BF16,
        backend="eager", device="a100_80",
    )  # fmt: skip
    before = float(step(X, torch.zeros(8, 4)).loss)
    assert float(step(X, torch.zeros(8, 4)).loss) < before
    assert [r.rule for r in step.report().rows if r.op == "mul"] == ["placed"]


# --------------------------------------------------------------------------------------------- front door


def test_a_wrong_device_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"Unknown device 'a100'") as error:
        amp_compile(nn.Linear(2, 2), "auto", device="a100")
    assert "a100_80" in str(error.value)
    for options in ({"level": "O2"}, {"policy": Policy.torch("cpu", BF16)}, {}):
        with pytest.raises(ArgumentError, match="has no effect with"):
            amp_compile(nn.Linear(2, 2), device="a100_80", **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Unknown device"):
        amp_compile(nn.Linear(2, 2), "auto", device=3)  # type: ignore[arg-type]


def test_wide_values_are_known_across_a_graph_break() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.softmax(x, 0)
            torch._dynamo.graph_break()
            return self.linear(x * 0.5)

    made = amp_compile(Broken(), "auto", dtype=BF16, device="a100_80", backend="eager")
    made(X)
    assert [r.precision for r in made.report().rows if r.op == "mul"] == ["float32"]


# ---------------------------------------------------------------------------------------- random programs

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "tanh": torch.tanh, "add": lambda x: x + 1, "mul": lambda x: x * 0.5, "relu": torch.relu,
    "view": lambda x: x.view(x.shape), "softmax": lambda x: torch.softmax(x, 0), "transpose": lambda x: x.t().t(),
}  # fmt: skip


def program(seed: int, length: int) -> Callable[..., tuple[Tensor, ...]]:
    """Products, fp32 ops, neutral ops and ops that move values, each on values made before."""
    rng = random.Random(seed)
    steps = [(rng.choice([*UNARY, "linear", "linear", "sum", "product", "cat"]), rng.random(), rng.random())
             for _ in range(length)]  # fmt: skip

    def run(x: Tensor, w: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for name, first, second in steps:
            one, two = (values[int(len(values) * place)] for place in (first, second))
            if name == "linear":
                values.append(F.linear(one, w))
            elif name == "sum":
                values.append(one + two)
            elif name == "product":
                values.append(one * row)
            elif name == "cat":
                values.append(torch.cat([one, two])[:8])
            else:
                values.append(UNARY[name](one))
        return tuple(values[-2:])

    return run


def seconds(gm: fx.GraphModule, costs: CostModel) -> float:
    """The time of a graph with its casts, each node by itself."""
    total = 0.0
    for node in gm.graph.nodes:
        source = node.args[0] if ir.is_cast(node) else None
        if isinstance(source, fx.Node):
            total += costs.cast_seconds(source.meta["val"], ir.cast_dtype(node))
        elif node.op == "call_function":
            total += costs.seconds(node)
    return total


def finished(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """What runs without a backward: the casts put in, and those of one value made one."""
    made = copy.deepcopy(gm)
    insert_casts.PASS.run(made, ctx)
    made.graph.eliminate_dead_code()
    fold_casts._chains_and_copies(made.graph, fold_casts._Keep(set(), ir.output_nodes(made.graph)))
    return made


def assignments(gm: fx.GraphModule, ctx: Context, most: int) -> Iterator[fx.GraphModule]:
    """The graph with every choice of precisions for the ops that may have either. If they are too many: with all of
    them low, as O2 has them, and all of them in fp32, as O1 has them."""
    low = ctx.policy.low
    known = {n: d for n in gm.graph.nodes if (d := ir.decision(n)) is not None}
    free = [n for n, d in known.items() if d.either and d.cls is not None and d.cls.value == "follow"]
    every = itertools.product((low, F32), repeat=len(free))
    for chosen in every if len(free) <= most else ([dtype] * len(free) for dtype in (low, F32)):
        wanted = dict(zip(free, chosen, strict=True))
        for node, was in known.items():
            if was.either:
                operands = [ir.dtype_of(a) for _, a in ir.tensor_args(node) if ir.is_eligible(ir.tensor_of(a))]
                dtype = wanted.get(node) or decisions.widest(operands)
                ir.decide(node, decisions.cast(node, dtype, "tried", was.rule, ctx.policy.classify(ir.op_name(node))))
        yield gm
    for node, was in known.items():
        ir.decide(node, was)


programs = {"seed": st.integers(0, 2**32), "length": st.integers(2, 14), "launch": st.sampled_from([0.0, 1e-7, 1e-6])}


@given(**programs)
@settings(max_examples=25)
def test_no_other_choice_gives_a_faster_graph(seed: int, length: int, launch: float) -> None:
    """Of all graphs that other choices would give, those of auto, O1 and O2 among them, none takes less time, with
    casts inserted and folded as always."""
    ctx = costing(device=dataclasses.replace(BYTES, launch=launch))
    assert isinstance(ctx.costs, CostModel)
    gm = ready(program(seed, length), X, W, ROW, ctx=ctx)
    others = [seconds(finished(other, ctx), ctx.costs) for other in assignments(gm, ctx, most=5)]
    usual = seconds(finished(gm, ctx), ctx.costs)
    check_pass(PASS, gm, ctx)
    ours = seconds(finished(gm, ctx), ctx.costs)
    assert ours <= min([usual, *others]) * (1 + 1e-9)


@given(dtype=st.sampled_from([BF16, F16]), **programs)
@settings(max_examples=15)
def test_never_lower_than_the_rules_allow(seed: int, length: int, launch: float, dtype: torch.dtype) -> None:
    """No op is low that would not be at a level which makes everything low that it may; and the numbers are right."""
    lowest = Level("lowest", Treatment.LOW, Treatment.FP32, Treatment.LOW_UNLESS_WIDE)
    ctx = costing(dtype, dataclasses.replace(BYTES, launch=launch))
    fn, inputs = program(seed, length), (X, W, ROW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LEVELS, "lowest", lowest)
        bound = precisions(prepared(pre_dispatch(fn, *inputs), context("lowest", dtype), until="insert_casts"))
    gm = check_pass(PASS, ready(fn, *inputs, ctx=ctx), ctx)
    found = precisions(gm)
    assert not [name for name, dtype in found.items() if dtype in ir.LOW_DTYPES and bound[name] not in ir.LOW_DTYPES]
    check_pass(insert_casts.PASS, gm, ctx, inputs=inputs, reference=fn, tolerance=0.3)
    assert all(ir.dtype_of(n) is F32 for n in casts(gm) if n.name.startswith("output"))
