"""assign_precision: each node gets the precision that level, table, user and constants ask for, and why."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amp_compiler import Policy, ir, precision
from amp_compiler.common.errors import BannedOpError, PipelineError, VerifyError
from amp_compiler.ir import Decision, Mode
from amp_compiler.ir.constants import EPS_ARGUMENTS
from amp_compiler.passes import insert_casts
from amp_compiler.passes.precision import PASS
from amp_compiler.policy.ops.row import OpClass, Row
from amp_compiler.policy.ops.table import ROWS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import (
    BF16,
    F16,
    F32,
    LEVELS,
    LOW,
    aten,
    autocast_region,
    check_pass,
    context,
    exported,
    fakes,
    find,
    one_op,
    ops,
    pre_dispatch,
    prepared,
)

X, W = torch.randn(4, 4), torch.randn(4, 4)
MASK = torch.eye(4) > 0
MIN = torch.finfo(F32).min


def assigned(fn: Any, *inputs: Any, ctx: Context | None = None) -> torch.fx.GraphModule:
    ctx = ctx or context("O2", F16)
    return check_pass(PASS, prepared(pre_dispatch(fn, *inputs), ctx, until=PASS.name), ctx)


def decided(gm: torch.fx.GraphModule, op: str) -> Decision:
    """The decision on the only node of an op."""
    (node,) = ops(gm, op)
    found = ir.decision(node)
    assert found is not None
    return found


def prec(gm: torch.fx.GraphModule, op: str) -> torch.dtype | None:
    return decided(gm, op).precision


# ------------------------------------------------------------------------------- the table at each level

BY_TYPE: dict[str, list[Any]] = {
    "number": [1.0], "float": [0.5], "int": [1, 0, 2], "bool": [False], "List[int]": [[2], [2, 2], [1, 1]],
    "str": ["constant", "none", "reflect"], "Device": [torch.device("cpu")],
}  # fmt: skip
SHAPES = [(4, 4), (4,), (2, 4, 4), (2, 4, 4, 4), (1, 2, 4, 4, 4)]


def arguments(op: torch._ops.OpOverload, tensor: Tensor, index: int) -> list[Any] | None:
    """Required arguments for a call, or None where a type is not known here."""
    found: list[Any] = []
    for argument in op._schema.arguments:
        if argument.has_default_value() or argument.kwarg_only:
            continue
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(tensor)
        elif kind == "List[Tensor]":
            found.append([tensor, tensor])
        elif kind in BY_TYPE:
            found.append(BY_TYPE[kind][index % len(BY_TYPE[kind])])
        else:
            return None
    return found


@functools.cache
def calls() -> list[tuple[Row, Any, list[Any]]]:
    """(row, overload, arguments) of each row of the table that a generic call reaches."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # most tries fail
    mode, tensors = fakes(*(torch.ones(s) for s in SHAPES))
    found = []
    # Off, as while lowering: oneDNN takes calls of lstm that torch's own kernels do not, and which it takes
    # depends on the CPU.
    enabled, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        for row in ROWS:
            if row.cls is not OpClass.KEEP and (call := first_call(row, mode, tensors)) is not None:
                found.append((row, *call))
    finally:
        torch.backends.mkldnn.enabled = enabled
    return found


def first_call(row: Row, mode: Any, tensors: list[Tensor]) -> tuple[Any, list[Any]] | None:
    packet = getattr(aten, row.name)
    for name in packet.overloads():
        op = getattr(packet, name)
        if op._schema.is_mutable:
            continue
        for tensor in tensors:
            tried = []
            for index in range(3):
                args = arguments(op, tensor, index)
                if args is None or not any(isinstance(a, (Tensor, list)) for a in args):
                    break
                if (shown := [a for a in args if not isinstance(a, Tensor)]) in tried:
                    continue
                tried.append(shown)
                try:
                    with mode, torch.no_grad():
                        result = op(*args)
                except Exception:  # not a call that this op takes
                    continue
                values = result if isinstance(result, (tuple, list)) else [result]
                if all(isinstance(v, Tensor) for v in values):
                    return op, args
    return None


def low_flow(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """A value that is fp32 as traced and low by decision: the result of a LOW op."""
    value = ir.tensor_of(node)
    if value.dim() < 2:
        return node
    out = graph.call_function(aten.matmul.default, (node, node))
    out.meta["val"] = value
    return out


@functools.cache
def call_graph(index: int, through: Any) -> torch.fx.GraphModule:
    """The graph of one of the calls; the pass writes decisions only, so one graph serves all levels."""
    _, op, args = calls()[index]
    return one_op(op, args, through=through)


def expected(
    row: Row, level: str, low: torch.dtype, flow: torch.dtype, answers: bool, to_scalar: bool
) -> torch.dtype:
    """The table of docs/design.md#levels; a FOLLOW op without a float result takes its inputs as they come.
    ``to_scalar``: it makes one number of many, which at O2 is fp32 unless a product makes it."""
    reduces = row.cls in (OpClass.FOLLOW, OpClass.FP32) or row.name in ("amax", "amin")
    if to_scalar and level == "O2" and not answers and reduces:
        return F32
    if row.cls is OpClass.EXACT or (row.cls is OpClass.FOLLOW and answers):
        return flow
    if row.fp32_only or row.stride_bytes:
        return F32  # the matrices of these calls have rows of 4 values: 8 bytes in low precision
    if row.cls is OpClass.LOW or level == "O3":
        return low
    if row.cls is OpClass.FP32:
        return low if level == "O2" and row.fp32_inside and flow is low else F32
    return {"O1": F32, "auto": flow, "O2": low}[level]


def test_a_generic_call_reaches_most_rows() -> None:
    by_class = {cls: [row.name for row, _, _ in calls() if row.cls is cls] for cls in OpClass}
    assert len(by_class[OpClass.LOW]) >= 10
    assert len(by_class[OpClass.FP32]) >= 90
    assert len(by_class[OpClass.FOLLOW]) >= 80
    assert len(by_class[OpClass.EXACT]) >= 80


@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_class_at_every_level(level: str, low: torch.dtype) -> None:
    ctx = context(level, low)
    wrong = []
    for index, (row, op, _) in enumerate(calls()):
        for through in (None, low_flow):
            gm = call_graph(index, through)
            (node,) = [n for n in gm.graph.nodes if n.target is op][-1:]
            flows = {
                F32 if through is None or ir.tensor_of(a).dim() < 2 else low for _, a in ir.tensor_args(node)
            }
            flow = low if flows == {low} and level != "O0" else F32
            try:
                PASS.run(gm, ctx)
            except BannedOpError:
                if not (row.banned and low is F16 and level == "O3"):
                    wrong.append(f"{row.name} is refused")
                continue
            known = ir.decision(node)
            assert known is not None
            if level == "O0":
                if known.mode is Mode.CAST:
                    wrong.append(f"{row.name} is touched at O0")
                continue
            answers = any(v is not None and not v.dtype.is_floating_point for v in ir.tensor_outputs(node))
            result = ir.tensor_of(node)
            to_scalar = result is not None and result.dim() == 0
            want = expected(row, level, low, flow, answers, to_scalar)
            if row.name in EPS_ARGUMENTS and known.rule == "constant" and (level, low) == ("O3", F16):
                want = F32  # it computes with an eps of 1e-8 in the dtype of its input
            if known.mode is not Mode.CAST or known.precision is not want or not known.reason:
                wrong.append(
                    f"{row.cls.name} {op} from {flow}: {known.precision}, not {want} ({known.reason})"
                )
    assert not wrong


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_every_row_verifies_after_its_casts(level: str) -> None:
    """The dtypes that were decided are those that torch gives: every op is run again on fakes."""
    ctx, wrong = context(level, BF16), []
    for row, op, args in calls():
        gm = one_op(op, args, through=low_flow)
        try:
            PASS.run(gm, ctx)
            verify(gm, (facts.ASSIGNED,), ctx, PASS.name)
            insert_casts.PASS.run(gm, ctx)
            verify(gm, (facts.CAST,), ctx, "insert_casts", deep=True)
        except Exception as error:
            wrong.append(f"{row.cls.name} {op}: {type(error).__name__}: {str(error)[:160]}")
    assert not wrong, f"{len(wrong)} ops:\n" + "\n".join(wrong)


@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_runs_low_has_a_kernel_on_this_cpu(level: str, low: torch.dtype) -> None:
    """An op that runs in fp32 here must not be sent to a dtype in which torch cannot run it."""
    ctx, wrong = context(level, low), []
    for index, (row, op, args) in enumerate(calls()):
        if row.name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            continue  # taken apart while lowering
        gm = call_graph(index, None)
        with contextlib.suppress(BannedOpError):
            PASS.run(gm, ctx)
        node = [n for n in gm.graph.nodes if n.target is op][-1]
        if ir.decision(node).precision is low and runs(op, args, F32) and not runs(op, args, low):
            wrong.append(f"{row.cls.name} {row.name}")
    assert not wrong, f"{len(wrong)} ops: {', '.join(wrong)}"


def runs(op: Any, args: list[Any], dtype: torch.dtype) -> bool:
    """Whether a call runs on real tensors of a dtype."""
    real = pytree.tree_map_only(Tensor, lambda v: torch.full(v.shape, 0.5).to(dtype), args)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            op(*real)
    except Exception:  # torch has many ways to say that there is no kernel
        return False
    return True


@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize(("width", "columns", "precision"), [(16, 8, "low"), (12, 8, "fp32"), (16, 4, "fp32")])
def test_grouped_products_are_low_where_their_strides_allow_it(
    width: int, columns: int, precision: str, low: torch.dtype
) -> None:
    """Its kernels want strides of 16 bytes: 4 values in fp32, 8 in low precision."""
    _, (a, b, offsets, out) = fakes(
        torch.ones(6, width), torch.ones(2, width, columns), torch.tensor([2, 6], dtype=torch.int32),
        torch.ones(6, columns),
    )  # fmt: skip
    graph = torch.fx.Graph()
    places = [graph.placeholder(name) for name in ("a", "b", "offsets")]
    for place, value in zip(places, (a, b, offsets), strict=True):
        place.meta["val"] = value
    node = graph.call_function(aten._grouped_mm.default, tuple(places))
    node.meta["val"] = out  # the fake kernel of torch 2.13 takes low dtypes only
    graph.output(node)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    PASS.run(gm, context("O2", low))
    found = decided(gm, "_grouped_mm")
    assert found.precision is (low if precision == "low" else F32)
    assert ("strides of 16 bytes" in found.reason) == (precision == "fp32")


def test_the_reasons_of_a_small_graph() -> None:
    gm = assigned(lambda x, w: F.linear(x, w).exp().view(16) + 1, X, W, ctx=context("auto", BF16))
    text = [line.partition("  # ") for line in ir.format_graph(gm, reasons=True).splitlines()]
    reasons = {left.split(":")[0]: right for left, _, right in text if right}
    assert list(reasons) == ["linear", "exp", "view", "add"]
    assert reasons["add"] == "follows view, which is fp32"
    assert reasons["view"].startswith("follows its input")


# -------------------------------------------------------------------------------------------- constants

MISFITS: dict[str, Any] = {
    "masked_fill": lambda y, m: y.masked_fill(m, -3.4e38),
    "masked_fill_int": lambda y, m: y.masked_fill(m, -1000000000),
    "eps": lambda y, m: y + 1e-8,
    "clamp": lambda y, m: y.clamp(min=1e-12),
    "where": lambda y, m: torch.where(m, y, -3.4e38),
    "where_full": lambda y, m: torch.where(m, y, torch.full((4, 4), -3.4e38)),
    "constant": lambda y, m: y + torch.tensor([0.0, 1.0, 2.0, -3.4e38]),
    "constant_with_inf": lambda y, m: y + torch.tensor([0.0, float("inf"), 2.0, -3.4e38]),
    "constant_with_nan": lambda y, m: y + torch.tensor([0.0, float("nan"), 2.0, 1e-9]),
    "full": lambda y, m: y + torch.full((4, 4), -3.4e38),
    "full_expanded": lambda y, m: y + torch.full((1, 4), -3.4e38).expand(4, 4),
    "full_triu": lambda y, m: y + torch.full((4, 4), -3.4e38).triu(1),
    "full_unsqueezed": lambda y, m: y + torch.full((4,), -3.4e38)[None, :],
    "full_like": lambda y, m: torch.maximum(y, torch.full_like(y, 1e-9)),
    "scalar_tensor": lambda y, m: torch.where(m, y, torch.tensor(-3.4e38)),
    "pad": lambda y, m: F.pad(y, (1, 1), value=-3.4e38),
    "product": lambda y, m: y + (1.0 - m.float()) * MIN,  # BERT's attention mask
    "masked_fill_": lambda y, m: y.masked_fill_(m, -1e9),
    "clamp_": lambda y, m: y.clamp_(min=1e-12),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_constant_that_fp16_cannot_hold_never_becomes_inf_or_zero(name: str) -> None:
    zeros, ctx = torch.zeros(4, 4), context("O2", F16)

    def fn(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
        return MISFITS[name](F.linear(x, w), m)

    gm = assigned(fn, zeros, W, MASK, ctx=ctx)
    # what is written to in place has to be fp32 from the start
    assert prec(gm, "linear") is (F32 if name.endswith("_") else F16)
    insert_casts.PASS.run(gm, ctx)
    ours, fp32 = gm(zeros, W, MASK), fn(zeros, W, MASK)
    assert torch.equal(ours.isfinite(), fp32.isfinite()), ours
    assert torch.equal(ours == 0, fp32 == 0), ours


@pytest.mark.parametrize("name", ["masked_fill", "eps", "clamp", "where"])
def test_the_reason_names_the_constant(name: str) -> None:
    gm = assigned(lambda x, w, m: MISFITS[name](F.linear(x, w), m), X, W, MASK)
    known = decided(gm, "add" if name == "eps" else name)
    assert known.precision is F32
    assert known.rule == "constant"
    assert known.reason.endswith("is not representable in float16: kept in fp32")


@pytest.mark.parametrize(
    "fn",
    [
        lambda y, m: y.masked_fill(m, float("-inf")),
        lambda y, m: y.masked_fill(m, -6e4),
        lambda y, m: y.masked_fill(m, 0.0),
        lambda y, m: y.masked_fill(m, 1e-7),  # a subnormal of fp16
        lambda y, m: y + torch.full((4, 4), float("-inf")),
        lambda y, m: y * torch.tensor([0.0, 1.0, -2.0, 6e4]),
    ],
)
def test_a_constant_that_fits_changes_nothing(fn: Any) -> None:
    gm = assigned(lambda x, w, m: fn(F.linear(x, w), m), X, W, MASK)
    assert not [n.name for n in gm.graph.nodes if (d := ir.decision(n)) and d.rule == "constant"]
    assert [n for n in gm.graph.nodes if n.op == "call_function" and ir.decision(n).precision is F16][1:]


def test_bf16_holds_a_tiny_constant_but_not_the_fp32_minimum() -> None:
    ctx = context("O2", BF16)
    gm = assigned(lambda x, w, m: (F.linear(x, w) + 1e-8).masked_fill(m, MIN), X, W, MASK, ctx=ctx)
    assert prec(gm, "add") is BF16
    assert prec(gm, "masked_fill") is F32


# ------------------------------------------------------------------------------------------- untouched


def test_fp64_complex_integer_and_sparse_are_untouched() -> None:
    def fn(x: Tensor, w: Tensor, d: Tensor, c: Tensor, i: Tensor) -> Any:
        y = F.linear(x, w)
        return y * d, (c * c).real, c.abs() + y, i + 1, d @ d, i @ i

    d, c, i = X.double(), torch.complex(X, X), torch.ones(4, 4, dtype=torch.int64)
    gm = assigned(fn, X, W, d, c, i)
    for name, dtype in [("mul", torch.float64), ("matmul", torch.float64), ("mul_1", None), ("add_1", None)]:
        known = ir.decision(find(gm, name))
        assert known.mode is not Mode.CAST, name
        assert known.precision is dtype, name
    assert ir.decision(find(gm, "mul")).mode is Mode.TRACED
    assert ir.decision(find(gm, "matmul_1")).mode is not Mode.CAST


def test_sparse_operands_are_untouched() -> None:
    sparse = torch.eye(4).to_sparse()
    gm = assigned(lambda s, x: torch.sparse.mm(s, x), sparse, X)
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert ir.decision(node).mode is Mode.TRACED
    assert "sparse" in ir.decision(node).reason


def test_a_model_that_is_low_already_is_unchanged() -> None:
    x, w = X.to(F16), W.to(F16)
    ctx = context("O2", BF16)
    gm = assigned(lambda x, w: F.linear(x, w).softmax(-1).exp() + 1, x, w, ctx=ctx)
    decisions = [ir.decision(n) for n in gm.graph.nodes if n.op == "call_function"]
    assert {d.rule for d in decisions} == {"already_low"}
    assert {d.out for d in decisions} == {(F16,)}


def test_creation_and_random_ops_keep_their_dtype() -> None:
    gm = assigned(lambda x: (torch.zeros(4), torch.randn(4), torch.zeros_like(x), torch.arange(3)), X)
    assert all(ir.decision(n).mode is not Mode.CAST for n in gm.graph.nodes if n.op == "call_function")


def test_unlisted_ops_are_kept() -> None:
    gm = assigned(lambda x, w: F.linear(x, w).frexp()[0], X, W)
    assert decided(gm, "frexp").mode is Mode.TRACED


# ---------------------------------------------------------------------------------- in place, views, twice


def test_an_op_that_writes_runs_in_the_dtype_of_its_target() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        low = F.linear(x, w)
        wide = x.exp()
        wide.add_(low)
        wide.addcmul_(low, low)
        low.mul_(wide)
        return low.relu_() + wide

    gm = assigned(fn, X, W, ctx=context("auto", BF16))
    assert [prec(gm, op) for op in ("add_", "addcmul_", "mul_", "relu_")] == [F32, F32, BF16, BF16]
    assert decided(gm, "addcmul_").keep_args == ("self",)
    assert decided(gm, "add_").mode is Mode.NATIVE


def test_a_write_to_a_low_tensor_is_never_redirected_to_a_copy() -> None:
    """No decision may ask for a cast of an argument that the op writes to, whatever else it takes."""
    d = X.double()

    def fn(x: Tensor, w: Tensor, d: Tensor) -> Tensor:
        y = F.linear(x, w)
        y.view(-1).add_(d.view(-1))
        return y

    gm = assigned(fn, X, W, d)
    (node,) = ops(gm, "add_")
    (name, target), *_ = ir.tensor_args(node)
    assert insert_casts.wanted_dtype(ir.decision(node), name, target, ir.mutated_args(node)) is None


def test_the_same_tensor_twice() -> None:
    gm = assigned(lambda x: (x @ x, torch.cat([x, x]), x * x), X, ctx=context("auto", BF16))
    assert [prec(gm, op) for op in ("matmul", "cat", "mul")] == [BF16, F32, F32]


def test_a_shape_donor_does_not_decide_the_precision() -> None:
    """view_as and expand_as read only the shape of their second tensor."""
    gm = assigned(lambda x, w: (F.linear(x, w).view_as(x), F.linear(x, w).expand_as(x)), X, W)
    assert prec(gm, "view_as") is F16
    assert prec(gm, "expand_as") is F16


def test_multiple_outputs_and_getitem() -> None:
    gm = assigned(lambda x, w: F.linear(x, w).split(2, 1), X, W)
    assert decided(gm, "split").out == (F16, F16)
    assert ir.decision(find(gm, "getitem_1")).out == (F16,)
    gm = assigned(lambda x, w: F.linear(x, w).topk(2), X, W)
    assert decided(gm, "topk").out == (F16, torch.int64)


def test_none_arguments_and_python_scalars() -> None:
    gm = assigned(lambda x, w: F.layer_norm(F.linear(x, w, None).clamp(None, 2) * 3, (4,), None, None), X, W)
    assert [prec(gm, op) for op in ("linear", "clamp", "mul")] == [F16] * 3
    assert decided(gm, "layer_norm").rule == "fp32_inside"


def test_shared_users_each_get_their_own_decision() -> None:
    gm = assigned(
        lambda x, w: (lambda y: (y.exp(), y + 1, y @ y))(F.linear(x, w)), X, W, ctx=context("auto", BF16)
    )
    assert [prec(gm, op) for op in ("exp", "add", "matmul")] == [F32, BF16, BF16]


# ------------------------------------------------------------------------------ what a user or author says


def test_an_explicit_dtype_wins() -> None:
    gm = assigned(lambda x, w: (F.linear(x, w).softmax(-1, dtype=F32), x.sum(dtype=torch.float64)), X, W)
    assert decided(gm, "softmax").rule == "explicit_dtype"
    assert decided(gm, "softmax").out == (F32,)
    assert decided(gm, "sum").out == (torch.float64,)


def test_a_cast_of_the_author_is_honoured() -> None:
    gm = assigned(lambda x, w: F.linear(x, w).float() + F.linear(x, w).to(BF16), X, W)
    assert [ir.decision(n).out for n in ops(gm, "to")] == [(F32,), (BF16,)]
    assert {ir.decision(n).rule for n in ops(gm, "to")} == {"author"}


def test_conditional_rules() -> None:
    policy = Policy("O2", F16).with_conditional(
        [("softplus", "beta", [2]), ("gelu", "approximate", ["tanh"])]
    )

    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return F.gelu(y, approximate="tanh"), F.gelu(y)

    gm = assigned(fn, X, W, ctx=context(policy=policy))
    tanh, plain = ops(gm, "gelu")
    assert ir.decision(tanh).precision is F32
    assert "approximate='tanh'" in ir.decision(tanh).reason
    assert ir.decision(plain).precision is F16


def test_lists_of_the_user() -> None:
    policy = Policy("O1", BF16).with_ops(low=["exp"], fp32=["linear"], follow=["matmul"])
    gm = assigned(lambda x, w: (F.linear(x, w), x.exp(), x @ w), X, W, ctx=context(policy=policy))
    assert [prec(gm, op) for op in ("linear", "exp", "matmul")] == [F32, BF16, F32]
    assert decided(gm, "linear").reason == "on your black list"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


def test_module_rules_and_marks() -> None:
    def run(ctx: Context) -> list[Decision]:
        gm = check_pass(PASS, prepared(exported(Net(), X), ctx, until=PASS.name), ctx)
        return [ir.decision(n) for n in gm.graph.nodes if ir.op_name(n) in ("linear", "softmax")]

    plain = run(context("O1", BF16))
    assert [d.precision for d in plain] == [BF16, F32, BF16]
    ruled = run(context(policy=Policy("O1", BF16).with_modules({"inner.*": "float32"})))
    assert [d.precision for d in ruled] == [F32, F32, BF16]
    assert ruled[0].reason == "module rule 'inner.*': float32"
    marked = run(context("O1", BF16, modules={"inner.1": F16, "last": F32, "inner.0": F32}))
    assert [d.precision for d in marked] == [F32, F16, F32]
    assert marked[0].rule == "set_precision"


def test_regions() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        with precision("float16"):
            y = y.exp()
        return F.linear(y.neg(), w)

    ctx, gm = context("O1", BF16), pre_dispatch(fn, X, W)
    autocast_region(gm, "linear_1", "linear_1", enabled=False)
    check_pass(PASS, prepared(gm, ctx, until=PASS.name), ctx)
    assert prec(gm, "exp") is F16
    assert [ir.decision(n).precision for n in ops(gm, "linear")] == [BF16, F32]
    assert ir.decision(ops(gm, "linear")[1]).reason == "torch.autocast(enabled=False) region"


def test_an_autocast_region_chooses_the_low_dtype_only() -> None:
    ctx, gm = context("O1", BF16), pre_dispatch(lambda x, w: F.linear(x, w).exp(), X, W)
    autocast_region(gm, "linear", "exp", dtype=F16)
    check_pass(PASS, prepared(gm, ctx, until=PASS.name), ctx)
    assert [prec(gm, "linear"), prec(gm, "exp")] == [F16, F32]


def test_a_banned_op_names_the_safe_form() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.binary_cross_entropy(F.linear(x, w).sigmoid(), torch.ones(4, 4))

    with pytest.raises(BannedOpError, match="binary_cross_entropy_with_logits"):
        assigned(fn, X, W, ctx=context("O3", F16))
    assert prec(assigned(fn, X, W, ctx=context("O2", F16)), "binary_cross_entropy") is F32


def test_bodies_of_cond_are_decided() -> None:
    def fn(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(p, lambda x, w: (F.linear(x, w),), lambda x, w: (x.exp(),), (x, w))[0]

    gm = assigned(fn, torch.tensor(True), X, W)
    bodies = [inner for name, inner in ir.all_graphs(gm) if name]
    assert [prec(bodies[0], "linear"), prec(bodies[1], "exp")] == [F16, F32]


# ------------------------------------------------------------------------------------------- wide values


def reasons(gm: torch.fx.GraphModule) -> dict[str, str]:
    return {n.name: ir.decision(n).reason for n in gm.graph.nodes if n.op == "call_function"}


def low_ops(gm: torch.fx.GraphModule) -> list[str]:
    """Names of the nodes that run low, in order."""
    return [n.name for n in gm.graph.nodes if n.op == "call_function" and ir.decision(n).precision is F16]


def test_what_reads_the_result_of_an_fp32_op_is_fp32_and_says_why() -> None:
    gm = assigned(lambda x, w: (F.linear(x, w).sum(-1, keepdim=True) + 1).view(4).sqrt() * 2, X, W)
    assert low_ops(gm) == ["linear"]
    found = reasons(gm)
    assert found["add"] == "reads the fp32 result of sum"  # and its line, in a graph that a front end captured
    assert found["view"].startswith("follows its input")
    assert found["mul"] == found["sqrt"] == found["add"]


def test_a_product_reads_it_rounded_and_makes_nothing_wide() -> None:
    gm = assigned(lambda x, w: F.linear(x.exp(), w) + 1, X, W)
    assert low_ops(gm) == ["linear", "add"]


def test_inputs_parameters_and_neutral_ops_of_them_are_not_wide() -> None:
    assert low_ops(assigned(lambda x, w: (x + w).tanh() * x, X, W)) == ["add", "tanh", "mul"]


def test_what_is_fp32_inside_and_low_is_not_wide_but_is_where_it_reads_a_wide_value() -> None:
    gm = assigned(lambda x, w: (F.linear(x, w).softmax(-1) + 1, F.linear(x, w).exp().softmax(-1) + 1), X, W)
    assert low_ops(gm) == ["linear", "softmax", "add", "linear_1"]


def test_a_wide_weight_of_a_norm_is_not_rounded() -> None:
    gm = assigned(lambda x, w: F.softmax(F.linear(x, w), -1) + F.rms_norm(F.linear(x, w), (4,), w[0].exp()), X, W)
    assert ir.decision(ops(gm, "rms_norm")[0]).precision is F32


def test_the_lists_of_the_user_make_and_unmake_wide_values() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).pow(3) * 2 + F.linear(x, w).tanh() * 3

    plain = assigned(fn, X, W)
    assert low_ops(plain) == ["linear", "linear_1", "tanh", "mul_1"]
    white = assigned(fn, X, W, ctx=context(policy=Policy("O2", F16).with_ops(low=["pow"])))
    assert [n for n in reasons(white) if n not in low_ops(white)] == []
    black = assigned(fn, X, W, ctx=context(policy=Policy("O2", F16).with_ops(low=["pow", "add"], fp32=["tanh"])))
    assert [n for n in reasons(black) if n not in low_ops(black)] == ["tanh", "mul_1"]
    conditional = Policy("O2", F16).with_conditional([("gelu", "approximate", ["tanh"])])
    gm = assigned(lambda x, w: F.gelu(x, approximate="tanh") + 1, X, W, ctx=context(policy=conditional))
    assert low_ops(gm) == []


def test_a_cast_that_follows_a_dtype_ends_the_chain_and_one_of_the_authors_does_not() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), X

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            return h.exp().to(x.dtype) * 2, h.exp().to(torch.float32) * 3

    from helpers import ExportMixed

    rows = {r.node: r.precision for r in ExportMixed(Ends(), (x,), dtype=F16).rows}
    assert (rows["mul"], rows["mul_1"]) == ("float16", "float32")


SCALARS: dict[str, Any] = {
    "mean": lambda y: y.mean(), "dot": lambda y: torch.dot(y[0], y[1]), "max": lambda y: y.max(),
    "amax": lambda y: y.amax(), "sum": lambda y: y.sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
def test_one_number_made_of_many_is_wide(name: str) -> None:
    gm = assigned(lambda x, w: F.linear(x, w) * SCALARS[name](F.linear(x, w)), X, W)
    assert prec(gm, name) is prec(gm, "mul") is F32


def test_a_returned_scalar_is_fp32_whatever_it_is_made_of() -> None:
    gm = assigned(lambda x, w: (lambda y: y[0, 0] * 2 + (y[0] @ y[1]).tanh())(F.linear(x, w)), X, W)
    assert [prec(gm, op) for op in ("linear", "mul", "add", "tanh", "matmul")] == [F16, F32, F32, F32, F32]
    inner = assigned(lambda x, w: (lambda y: y * (y[0, 0] * 2).tanh())(F.linear(x, w)), X, W)
    assert low_ops(inner)[-3:] == ["mul", "tanh", "mul_1"]


def test_constants_of_the_code_are_not_wide_but_what_is_counted_in_an_input_is() -> None:
    gm = assigned(lambda x, w, m: x * torch.arange(4.0).exp() + x / m.float().sum(-1), X, W, MASK)
    assert [ir.decision(n).precision for n in ops(gm, "mul")] == [F16]
    assert prec(gm, "div") is F32


def test_several_results_and_complex_ones_stay_wide() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        var, mean = torch.var_mean(y, -1)
        return var + 1, mean * 2, y.exp().split(2)[1] - 1, torch.fft.rfft(y).abs() * 3

    assert low_ops(assigned(fn, X, W)) == ["linear"]


def test_an_in_place_write_of_a_wide_value_makes_its_target_wide() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        total = y + x  # low by itself
        total.add_(y.exp())
        return total * 2

    gm = assigned(fn, X, W)
    assert low_ops(gm) == ["linear"]
    assert reasons(gm)["add"].startswith("the fp32 result of exp")
    assert reasons(gm)["add"].endswith("is written into its result")


def test_a_product_that_is_written_into_stays_low_as_under_autocast() -> None:
    gm = assigned(lambda x, w: F.linear(x, w).add_(x.exp()), X, W)
    assert low_ops(gm) == ["linear", "add_"]


def test_wide_values_enter_and_leave_the_bodies_of_cond() -> None:
    def fn(p: Tensor, x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        wide, low = torch.cond(p, lambda a, b: (a.exp(), b + 1), lambda a, b: (a * 2, b * 2), (y, y))
        into = torch.cond(p, lambda a, b: (a * b,), lambda a, b: (b * 2,), (x.exp(), y))[0]
        return wide * 2, low * 2, into * 3

    gm = assigned(fn, torch.tensor(True), X, W)
    bodies = [inner for name, inner in ir.all_graphs(gm) if name]
    assert [low_ops(body) for body in bodies] == [["add"], ["mul", "mul_1"], [], ["mul"]]
    assert [ir.decision(n).precision for n in ops(gm, "mul")] == [F32, F16, F32]


def test_a_number_among_the_operands_of_cond_shifts_nothing() -> None:
    """Dynamo hands sizes that have changed to a body as numbers, behind its tensors."""

    def fn(p: Tensor, x: Tensor, w: Tensor) -> Any:
        return torch.cond(p, lambda a, b: (a * b,), lambda a, b: (b * 2,), (x.exp(), F.linear(x, w)))[0]

    ctx = context("O2", F16)
    gm = prepared(pre_dispatch(fn, torch.tensor(True), X, W), ctx, until=PASS.name)
    cond = ops(gm, "higher_order::cond")[0]
    for _, body in ir.subgraphs(gm, cond):
        last = [n for n in body.graph.nodes if n.op == "placeholder"][-1]
        with body.graph.inserting_after(last):
            body.graph.placeholder("size").meta["val"] = 4
        body.recompile()
    cond.args = (*cond.args[:3], (*cond.args[3], 4))
    PASS.run(gm, ctx)
    assert [ir.decision(ops(body, "mul")[0]).precision for _, body in ir.subgraphs(gm, cond)] == [F32, F16]


def test_a_loop_hands_wide_values_to_its_next_round() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            start = (torch.zeros((), dtype=torch.int64), F.linear(x, w))
            return torch.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, (a * 2).exp()), start)[1] + 1

    ctx = context("O2", F16)
    gm = check_pass(PASS, prepared(exported(Loop(), X, W), ctx, until=PASS.name), ctx)
    body = next(inner for name, inner in ir.all_graphs(gm) if ops(inner, "exp"))
    assert low_ops(body) == []
    assert prec(gm, "add") is F32


def test_the_verifier_finds_a_wide_value_that_is_rounded() -> None:
    ctx = context("O2", F16)
    gm = assigned(lambda x, w: x.exp() + 1, X, W, ctx=ctx)
    (add,) = ops(gm, "add")
    ir.amend(add, precision=F16, out=(F16,), rule="table")
    with pytest.raises(VerifyError, match="rounds the fp32 result of exp"):
        verify(gm, (facts.ASSIGNED,), ctx, "a test")


# ------------------------------------------------------------------------------------------ requirements


def test_a_violated_requirement_is_named() -> None:
    with pytest.raises(VerifyError, match=r"not written as aten\.to\.dtype"):
        check_pass(PASS, pre_dispatch(lambda x: aten._to_copy(x, dtype=BF16), X))
    with pytest.raises(PipelineError, match=r"'assign_precision' needs 'normalized'.*'normalize' ensures it"):
        Pipeline((PASS,), (facts.CAPTURED,))


# ---------------------------------------------------------------------------------------------- property

OPS: dict[str, Any] = {
    "linear": lambda x, w: F.linear(x, w),
    "exp": lambda x, w: x.exp(),
    "add": lambda x, w: x + w,
    "eps": lambda x, w: x + 1e-8,
    "relu": lambda x, w: x.relu(),
    "softmax": lambda x, w: x.softmax(-1),
    "float": lambda x, w: x.float(),
    "half": lambda x, w: x.half(),
    "double": lambda x, w: x.double().sum().float() + w,
    "argmax": lambda x, w: w[x.argmax(0)],
    "split": lambda x, w: torch.cat(x.split(2)),
    "mul_": lambda x, w: x.clone().mul_(w),
}


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=7),
    st.sampled_from(LEVELS),
    st.sampled_from(LOW),
)
def test_any_program_every_node_has_a_reason_and_no_value_changes(
    steps: list[str], level: str, dtype: torch.dtype
) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        for step in steps:
            x = OPS[step](x.float() if step == "linear" else x, w)
        return x

    ctx = context(level, dtype)
    gm = prepared(pre_dispatch(fn, X, W), ctx, until=PASS.name)
    before = ir.format_graph(copy.deepcopy(gm))
    check_pass(PASS, gm, ctx)
    assert ir.format_graph(gm) == before, "it only annotates"
    for node in gm.graph.nodes:
        known = ir.decision(node)
        if node.op == "call_function":
            assert known is not None
            assert known.reason
            assert len(known.out) == len(ir.tensor_outputs(node))
            traced = [v.dtype for v in ir.tensor_outputs(node) if v is not None]
            assert all(a is b or {a, b} <= set(ir.ELIGIBLE) for a, b in zip(known.out, traced, strict=True))
            assert known.mode is not Mode.CAST or level != "O0"
