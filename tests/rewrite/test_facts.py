"""Every fact: a graph that has it, and one that was broken on purpose and fails its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from amp_compiler import ir
from amp_compiler.common.errors import VerifyError
from amp_compiler.common.torch_names import collectives
from amp_compiler.cost.devices import find as find_device
from amp_compiler.cost.model import CostModel
from amp_compiler.ir import Origin
from amp_compiler.kernels import cpu
from amp_compiler.passes import (
    accumulate_in_place,
    batch_casts,
    fold_casts,
    fold_views,
    freeze_parameters,
    fuse_cast_matmul,
    gather_parameters,
    hoist_weight_casts,
    lower_kernels,
    order,
    place_neutral,
    reduce_gradients,
    reduce_in_place,
    scale_loss,
    scatter_gradients,
    unscale_in_place,
    widen_gradients,
)
from amp_compiler.policy import Rule
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context, Pass
from amp_compiler.rewrite.reduction import Reduction
from amp_compiler.rewrite.sharding import Sharding
from amp_compiler.rewrite.verify import verify
from conversion_helpers import Weighted
from helpers import BF16, aten, context, find, functional, ops, pre_dispatch, prepared, step_graph

X, W, ROWS = torch.randn(2, 4), torch.randn(4, 4), torch.randn(3, 4)
IMAGE, FILTER = torch.randn(1, 2, 4, 4, dtype=BF16), torch.randn(2, 2, 3, 3, dtype=BF16)
CTX = context("O1")
AUTO = dataclasses.replace(context("auto"), costs=CostModel(find_device("a100_80")))
SHARED = dataclasses.replace(CTX, reduction=Reduction("a group", 2))
DIVIDED = dataclasses.replace(CTX, sharding=Sharding(Reduction("a group", 2, bucket_bytes=0), 0))
Graph = Callable[[], fx.GraphModule]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that computes low products in fp32."""
    monkeypatch.setenv(cpu.SETTING, "wide")


@dataclass(frozen=True)
class Case:
    """``sound`` has the fact, ``broken`` does not; ``deep``: only the deep check sees it."""

    fact: str
    sound: Graph
    broken: Graph
    says: str
    deep: bool = False
    ctx: Context = CTX


def after(pass_: Pass, make: Graph, ctx: Context = CTX) -> Graph:
    """What the pass makes of the graph; the graph as it was is the broken one."""

    def made() -> fx.GraphModule:
        gm = make()
        assert pass_.run(gm, ctx)
        return gm

    return made


def damaged(make: Graph, damage: Callable[[fx.GraphModule], None]) -> Graph:
    def made() -> fx.GraphModule:
        gm = make()
        damage(gm)
        return gm

    return made


# ------------------------------------------------------------------------------------------------ graphs


def model(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).exp()


def forward(until: str) -> Graph:
    return lambda: prepared(pre_dispatch(model, X, W), CTX, until=until)


def placed() -> fx.GraphModule:
    """Neutral ops before and behind an fp32 one, and an op of several results, placed by costs."""
    gm = pre_dispatch(lambda x, w: ((F.linear(x, w) + x).exp() * 2).split(1), X, W)
    prepared(gm, AUTO, until="insert_casts")
    assert place_neutral.PASS.run(gm, AUTO)
    return gm


def step(*passes: Pass) -> Graph:
    """A training step's graph: a linear layer in bf16, and the passes that ran on it."""

    def made() -> fx.GraphModule:
        w = nn.Parameter(W.clone())
        gm = step_graph(lambda w, x: (x.to(BF16) @ w.to(BF16)).float().sum(), w, ROWS)
        gm.meta[ir.NAMES] = {0: "weight"}
        for pass_ in passes:
            pass_.run(gm, SHARED if pass_.name.startswith("reduce_") else CTX)
        return gm

    return made


def low_step() -> fx.GraphModule:
    """A training step's graph whose weight is stored in bf16."""
    w = nn.Parameter(W.to(BF16))
    return step_graph(lambda w, x: (x.to(BF16) @ w).float().sum(), w, ROWS)


def divided(*passes: Pass) -> Graph:
    """The graph of a step whose backward reads its weight, and the passes that ran on it."""

    def made() -> fx.GraphModule:
        w = nn.Parameter(W.clone())
        gm = step_graph(lambda w, x: ((x.to(BF16) @ w.to(BF16)).tanh() @ w.to(BF16)).float().sum(), w, ROWS)
        gm.meta[ir.SHARDED] = {0: "weight"}
        for pass_ in passes:
            pass_.run(gm, DIVIDED)
        return gm

    return made


def vectors() -> fx.GraphModule:
    """Three small biases, each with a cast of its own."""
    return functional(lambda a, b, c: a.to(BF16) + b.to(BF16) + c.to(BF16), *(torch.randn(4) for _ in range(3)))


def product() -> fx.GraphModule:
    return functional(lambda x, w: torch.mm(x.to(BF16), w.to(BF16)), X, W)


def on_gpu() -> fx.GraphModule:
    """The same on a GPU that need not be there."""
    gm = product()
    with FakeTensorMode():
        for node in gm.graph.nodes:
            if (value := ir.tensor_of(node)) is not None:
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return gm


def convolution() -> fx.GraphModule:
    return functional(lambda x, w: F.conv2d(x, w), IMAGE, FILTER)


class Stored(nn.Module):
    """One weight, read rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


WEIGHTED = Weighted(Stored(), X, cast=True)
FROZEN = Weighted(Stored(), X, cast=True)
freeze_parameters.PASS.run(FROZEN.gm, FROZEN.ctx)


def follow_fp64(gm: fx.GraphModule) -> None:
    ops(gm, "to")[0].meta[ir.ORIGIN] = Origin(follows=True)


def forget_a_reason(gm: fx.GraphModule) -> None:
    ir.amend(find(gm, "exp"), reason="")


def round_what_exp_made(gm: fx.GraphModule) -> None:
    ir.amend(find(gm, "mul"), precision=BF16, rule=Rule.PLACED, either=True)


def place_what_is_fixed(gm: fx.GraphModule) -> None:
    ir.amend(find(gm, "exp"), rule=Rule.PLACED)


def give_another_dtype(gm: fx.GraphModule) -> None:
    ir.amend(find(gm, "getitem"), out=(BF16,))


def drop_a_cast(gm: fx.GraphModule) -> None:
    (linear,) = ops(gm, "linear")
    linear.args = (ir.cast_source(linear.args[0]), linear.args[1])


def forget_a_role(gm: fx.GraphModule) -> None:
    del find(gm, "p0").meta[ir.ROLE]


def multiply_by_scale(gm: fx.GraphModule) -> None:
    op = next(n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale")
    op.args = (op.args[0], find(gm, "scale"), op.args[2])
    gm.graph.eliminate_dead_code()


def add_twice(gm: fx.GraphModule) -> None:
    add = next(n for n in gm.graph.nodes if ir.op_name(n) == "addcmul_")
    with gm.graph.inserting_after(add):
        gm.graph.node_copy(add, lambda n: n)


def unscale_an_input(gm: fx.GraphModule) -> None:
    op = next(n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale_")
    op.args = ([find(gm, "p0")], *op.args[1:])


def reduce_again(gm: fx.GraphModule) -> None:
    (wait,) = ops(gm, "_c10d_functional::wait_tensor")
    with gm.graph.inserting_after(wait):
        again = gm.graph.call_function(collectives.all_reduce.default, (wait, "sum", "a group"))
    with gm.graph.inserting_after(again):
        last = gm.graph.call_function(collectives.wait_tensor.default, (again,))
    wait.replace_all_uses_with(last, delete_user_cb=lambda user: user is not again)


def wait_for_nothing(gm: fx.GraphModule) -> None:
    (wait,) = ops(gm, "_c10d_functional::wait_tensor")
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


def keep_the_flag_to_itself(gm: fx.GraphModule) -> None:
    last = next(iter(reversed(gm.graph.nodes)))
    *others, found = last.args[0]
    last.args = ((*others, found.args[0].args[0]),)


def give_whole_gradients(gm: fx.GraphModule) -> None:
    (sent,) = ops(gm, "_c10d_functional::reduce_scatter_tensor")
    sent.target, sent.args = collectives.all_reduce.default, (sent.args[0], "sum", "a group")
    last = next(iter(reversed(gm.graph.nodes)))
    (gradient,) = [n for role, n in zip(gm.meta[ir.ROLE], last.args[0], strict=True) if role.kind == "gradient"]
    gradient.meta["val"] = sent.args[0].meta["val"]


def gather_wide(gm: fx.GraphModule) -> None:
    """Put the cast of each gather behind it."""
    for gather in ops(gm, "_c10d_functional::all_gather_into_tensor"):
        cast, (wait,) = gather.args[0], gather.users
        gather.args = (cast.args[0], *gather.args[1:])
        with gm.graph.inserting_after(wait):
            again = gm.graph.call_function(aten._to_copy.default, (wait,), {"dtype": BF16})
        again.meta["val"] = wait.meta["val"]
        for node in (gather, wait):
            node.meta["val"] = ir.retype(node.meta["val"], torch.float32)
        wait.replace_all_uses_with(again, delete_user_cb=lambda user, again=again: user is not again)


def keep_what_the_forward_gathered(gm: fx.GraphModule) -> None:
    first, second = ops(gm, "_c10d_functional::wait_tensor")
    second.replace_all_uses_with(first)


def use_the_rows(gm: fx.GraphModule) -> None:
    (rows,) = [n for n in gm.graph.nodes if n.op == "placeholder" and n.meta[ir.ROLE] == ir.Role("primal", 0)]
    with gm.graph.inserting_before(next(iter(reversed(gm.graph.nodes)))):
        gm.graph.call_function(aten.exp.default, (rows,))


def never_wait(gm: fx.GraphModule) -> None:
    wait = ops(gm, "_c10d_functional::wait_tensor")[0]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


_SCATTERED = divided(scale_loss.PASS, scatter_gradients.PASS)
_GATHERED = divided(fold_casts.PASS, gather_parameters.PASS)
CASES = [
    Case("captured", lambda: pre_dispatch(model, X, W), lambda: fx.symbolic_trace(lambda x: x.relu()), "an ATen call"),
    Case(
        "normalized", forward("mark_dtype_origin"), lambda: pre_dispatch(lambda x: aten._to_copy(x, dtype=BF16), X),
        "not written as aten.to.dtype",
    ),
    Case(
        "origin", lambda: pre_dispatch(lambda x: x.double(), X),
        damaged(lambda: pre_dispatch(lambda x: x.double(), X), follow_fp64), "said to follow a dtype",
    ),
    Case("assigned", forward("insert_casts"), damaged(forward("insert_casts"), forget_a_reason), "no reason"),
    Case("placed", placed, damaged(placed, round_what_exp_made), "rounds the fp32 result of exp", ctx=AUTO),
    Case("placed", placed, damaged(placed, place_what_is_fixed), "the rules leave it no choice", ctx=AUTO),
    Case("placed", placed, damaged(placed, give_another_dtype), "not what its source gives", ctx=AUTO),
    Case("cast", forward(""), damaged(forward(""), drop_a_cast), "runs in torch.bfloat16"),
    Case("frozen", lambda: FROZEN.gm, lambda: WEIGHTED.gm, "rounds the weight w each time", ctx=WEIGHTED.ctx),
    Case(
        "functional", lambda: functional(lambda x: x.relu() + 1, X),
        lambda: functional(lambda x: (x + 1).relu_(), X), "writes in place",
    ),
    Case(
        "past_autograd", lambda: functional(lambda x: x.to(BF16), X),
        lambda: pre_dispatch(lambda x: x.to(BF16), X), "autograd has not seen",
    ),
    Case(
        "past_autograd", lambda: functional(model, X, W), lambda: pre_dispatch(model, X, W), "a composite of other ops",
        deep=True,
    ),
    Case(
        "folded", lambda: functional(lambda x: x.to(BF16) + 1, X),
        lambda: functional(lambda x: (x.to(BF16) + 1, x.to(BF16) * 2), X), "repeats the cast",
    ),
    Case(
        "viewed", lambda: functional(lambda x: x.t() + 1, X), lambda: functional(lambda x: x.t().t() + 1, X),
        "transposes t back",
    ),
    Case(
        "viewed", after(fold_views.PASS, lambda: functional(lambda x: x.view(2, 4) + 1, X)),
        lambda: functional(lambda x: x.view(2, 4) + 1, X), "shows x_1 unchanged", deep=True,
    ),
    Case("fused", after(fuse_cast_matmul.PASS, product), product, "this CPU computes in fp32"),
    Case("fused", after(fuse_cast_matmul.PASS, on_gpu), on_gpu, "a rounding that it could do itself"),
    Case("lowered", after(lower_kernels.PASS, convolution), convolution, "should be replaced by one of our kernels"),
    Case("batched", after(batch_casts.PASS, vectors), vectors, "that one cast could replace"),
    Case("step", step(), damaged(step(), forget_a_role), "without a role"),
    Case("widened", after(widen_gradients.PASS, low_step), low_step, "leaves the graph in low precision"),
    Case("scaled", step(scale_loss.PASS), damaged(step(scale_loss.PASS), multiply_by_scale), "not one over the scale"),
    Case(
        "hoisted", step(fold_casts.PASS, hoist_weight_casts.PASS), step(fold_casts.PASS),
        "casts a parameter once per micro-batch",
    ),
    Case(
        "accumulated", step(scale_loss.PASS, accumulate_in_place.PASS),
        damaged(step(scale_loss.PASS, accumulate_in_place.PASS), add_twice), "2 ops write to",
    ),
    Case(
        "accumulated", step(scale_loss.PASS, accumulate_in_place.PASS), step(scale_loss.PASS), "could do it in place"
    ),
    Case(
        "in_place", step(scale_loss.PASS, unscale_in_place.PASS),
        damaged(step(scale_loss.PASS, unscale_in_place.PASS), unscale_an_input), "the gradients are",
    ),
    Case("in_place", step(scale_loss.PASS, unscale_in_place.PASS), step(scale_loss.PASS), "could do it in place"),
    Case("reduced", step(scale_loss.PASS, reduce_gradients.PASS), step(scale_loss.PASS), "reduced 0 times"),
    Case(
        "reduced", step(scale_loss.PASS, reduce_gradients.PASS),
        damaged(step(scale_loss.PASS, reduce_gradients.PASS), reduce_again), "reduced 2 times",
    ),
    Case(
        "reduced", step(scale_loss.PASS, reduce_gradients.PASS),
        damaged(step(scale_loss.PASS, reduce_gradients.PASS), wait_for_nothing), "nothing waits for",
    ),
    Case("scattered", _SCATTERED, divided(scale_loss.PASS), "reduced 0 times", ctx=DIVIDED),
    Case("scattered", _SCATTERED, damaged(_SCATTERED, keep_the_flag_to_itself), "of this process alone", ctx=DIVIDED),
    Case("scattered", _SCATTERED, damaged(_SCATTERED, give_whole_gradients), "this process has", ctx=DIVIDED),
    Case("gathered", _GATHERED, divided(fold_casts.PASS), "as if they were all", ctx=DIVIDED),
    Case("gathered", _GATHERED, damaged(_GATHERED, use_the_rows), "as if they were all", ctx=DIVIDED),
    Case("gathered", _GATHERED, damaged(_GATHERED, gather_wide), "gathered wide", ctx=DIVIDED),
    Case("gathered", _GATHERED, damaged(_GATHERED, keep_what_the_forward_gathered), "gathered for the", ctx=DIVIDED),
    Case("gathered", _GATHERED, damaged(_GATHERED, never_wait), "not waited for once", ctx=DIVIDED),
    Case(
        "reduced_in_place", step(scale_loss.PASS, reduce_gradients.PASS, reduce_in_place.PASS),
        step(scale_loss.PASS, reduce_gradients.PASS), "could do it in place",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.fact}-{c.says.replace(' ', '_')}")
def test_a_fact_that_does_not_hold_is_found(case: Case) -> None:
    fact = facts.ALL[case.fact]
    verify(case.sound(), (fact,), case.ctx, "a pass", deep=case.deep, rerun=False)
    gm = case.broken()
    if case.deep:
        verify(gm, (fact,), case.ctx, "a pass", deep=False)
    with pytest.raises(VerifyError, match=f"After a pass.*{case.says}"):
        verify(gm, (fact,), case.ctx, "a pass", deep=case.deep, rerun=False)


def test_every_fact_has_a_case() -> None:
    """A new fact comes with a graph that lacks it, and so does a new deep check."""
    assert {c.fact for c in CASES if not c.deep} == set(facts.ALL), "add a Case to CASES"
    assert {c.fact for c in CASES if c.deep} == {name for name, fact in facts.ALL.items() if fact.deep is not None}


def test_no_two_facts_have_one_check() -> None:
    checks = [fact.check for fact in facts.ALL.values()]
    assert len(set(checks)) == len(checks)


def test_the_facts_are_those_that_passes_name() -> None:
    pipelines = vars(order.build()).values()
    named = {fact for pipe in pipelines for fact in pipe.given}
    named |= {fact for p in order.ALL.values() for fact in (*p.requires, *p.ensures)}
    assert named == set(facts.ALL.values())
    assert all(facts.ALL[fact.name] is fact and fact.promise.endswith(".") for fact in named)


@pytest.mark.parametrize("fact", facts.ALL.values(), ids=lambda f: f.name)
def test_a_fact_names_the_pass_that_makes_it(fact: Any) -> None:
    makers = {p.name for p in order.ALL.values() if fact in p.ensures and fact not in p.requires}
    assert makers == ({fact.made_by} if fact.made_by else set()), "give the Fact made_by=, the pass that ensures it"


def test_facts_of_the_outermost_graph_are_not_asked_of_those_inside() -> None:
    """A body of ``cond`` has no roles: only the step's own inputs have."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda w, x: (x @ w,), lambda w, x: (x @ w * 2,), (w, x))[0].sum()

    gm = step_graph(fn, nn.Parameter(W.clone()), ROWS)
    assert len(list(ir.all_graphs(gm))) > 2
    verify(gm, (facts.STEP, facts.FUNCTIONAL), CTX, "autodiff", deep=True)
