"""The verifier: each check fails on a graph broken on purpose, and names the pass, the node and the line."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amp_compiler import ir
from amp_compiler.common.errors import VerifyError
from amp_compiler.ir import Mode
from amp_compiler.passes import insert_casts
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Fact
from amp_compiler.rewrite.verify import deep_by_default, verify
from helpers import (
    BF16,
    F16,
    F32,
    aten,
    casts,
    context,
    exported,
    find,
    functional,
    ops,
    pre_dispatch,
    prepared,
)

X, W = torch.randn(2, 4), torch.randn(4, 4)
CTX = context("O1")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(W.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = x.matmul(self.weight)
        return y.exp() + 1


def small(until: str = "") -> fx.GraphModule:
    """Exported, so that nodes know their lines; ``until``: the first pass that does not run."""
    return prepared(exported(Small(), X), CTX, until=until)


def broken(gm: fx.GraphModule, fact: Fact, *words: str, after: str = "my_pass", deep: bool = False) -> str:
    """The verifier's message, which must name the pass and contain the words."""
    with pytest.raises(VerifyError) as info:
        verify(gm, (fact,), CTX, after, deep=deep)
    message = str(info.value)
    assert f"After {after}" in message
    for word in words:
        assert word in message, message
    return message


def test_a_sound_graph_passes_every_check() -> None:
    gm = small()
    verify(gm, (facts.CAPTURED, facts.NORMALIZED, facts.ASSIGNED, facts.CAST), CTX, "all", deep=True)
    verify(functional(lambda x: x.to(BF16) + 1, X), (facts.FUNCTIONAL, facts.FOLDED), CTX, "all", deep=True)


def test_tests_verify_deeply() -> None:
    assert deep_by_default()


def test_a_failure_names_pass_node_and_source_line() -> None:
    gm = small(until="insert_casts")
    del find(gm, "exp").meta[ir.META]
    message = broken(
        gm, facts.ASSIGNED, "node 'exp'", "exp(matmul)", "has no precision", after="assign_precision"
    )
    assert "test_verify.py:" in message
    assert "in forward: return y.exp() + 1" in message
    assert "disable_passes" in message


# ------------------------------------------------------------------------------------------- well formed


def test_nodes_out_of_order() -> None:
    gm = small(until="normalize")
    find(gm, "matmul").append(find(gm, "add"))
    broken(gm, facts.CAPTURED, "not well formed", "add")


def test_no_aten_call() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    broken(gm, facts.CAPTURED, "is not an ATen call")
    gm = fx.symbolic_trace(lambda x: x.relu())
    broken(gm, facts.CAPTURED, "node 'relu'", "is not an ATen call")


def test_a_cast_in_another_spelling() -> None:
    gm = pre_dispatch(lambda x: aten._to_copy(x, dtype=BF16), X)
    broken(gm, facts.NORMALIZED, "node '_to_copy'", "not written as aten.to.dtype")


# ---------------------------------------------------------------------------------------------- assigned


def test_a_decision_without_a_reason() -> None:
    gm = small(until="insert_casts")
    ir.amend(find(gm, "add"), reason="")
    broken(gm, facts.ASSIGNED, "node 'add'", "no reason")


def test_a_level_that_is_not_honoured() -> None:
    gm = small(until="insert_casts")
    ir.amend(find(gm, "exp"), precision=BF16)
    broken(gm, facts.ASSIGNED, "node 'exp'", "the level's table says torch.float32")


def test_a_cast_of_an_argument_that_is_written() -> None:
    gm = prepared(pre_dispatch(lambda x, w: F.linear(x, w).addcmul_(x, x), X, W), CTX, until="insert_casts")
    node = find(gm, "addcmul_")
    ir.amend(node, keep_args=())
    broken(gm, facts.ASSIGNED, "node 'addcmul_'", "the write would be lost")


def test_a_written_argument_traced_back_to_another_dtype() -> None:
    """Mode TRACED casts too: y is low by now, and the op would write into a copy of it."""
    gm = prepared(pre_dispatch(lambda x, w: F.linear(x, w).addcmul_(x, x), X, W), CTX, until="insert_casts")
    node = find(gm, "addcmul_")
    ir.amend(node, mode=Mode.TRACED, keep_args=())
    broken(gm, facts.ASSIGNED, "node 'addcmul_'", "the write would be lost")


def test_comparisons_of_low_values_are_no_violation() -> None:
    """They take their inputs as they come, at O1 too."""
    prepared(pre_dispatch(lambda x, w: (F.linear(x, w) > 0, F.linear(x, w).argmax(1)), X, W), CTX, until="")


# ------------------------------------------------------------------------------------------------- cast


def test_a_missing_cast() -> None:
    gm = small()
    (matmul,) = ops(gm, "matmul")
    source = ir.cast_source(matmul.args[0])
    matmul.args = (source, matmul.args[1])
    broken(gm, facts.CAST, "node 'matmul'", "runs in torch.bfloat16", f"({source.name}) is torch.float32")


def test_a_value_that_contradicts_its_decision() -> None:
    gm = small()
    find(gm, "exp").meta["val"] = ir.retype(ir.tensor_of(find(gm, "exp")), F16)
    broken(gm, facts.CAST, "node 'exp'", "decided to return torch.float32, but its value is torch.float16")


def test_a_meta_that_lies_is_caught_by_running_again() -> None:
    """Decision and value agree with each other and not with torch: only the deep check sees it."""
    gm = small()
    node = find(gm, "add")
    node.meta["val"] = ir.retype(ir.tensor_of(node), F16)
    ir.decide(node, dataclasses.replace(ir.decision(node), mode=Mode.NATIVE, precision=F16, out=(F16,)))
    verify(gm, (facts.CAST,), CTX, "my_pass", deep=False)
    message = broken(gm, facts.CAST, "node 'add'", "returns torch.float32, but its meta says torch.float16", deep=True)
    assert "in forward: return y.exp() + 1" in message


def test_a_lying_meta_after_folding() -> None:
    gm = functional(lambda x: x.to(BF16) + 1, X)
    node = find(gm, "add")
    node.meta["val"] = ir.retype(ir.tensor_of(node), F32)
    verify(gm, (facts.FOLDED,), CTX, "fold_casts", deep=False)
    broken(
        gm,
        facts.FOLDED,
        "node 'add'",
        "returns torch.bfloat16, but its meta says torch.float32",
        after="fold_casts",
        deep=True,
    )


# ----------------------------------------------------------------------------------------------- folded


def test_a_repeated_cast_is_left() -> None:
    gm = functional(lambda x: (x.to(BF16) + 1, x.to(BF16) * 2), X)
    broken(gm, facts.FOLDED, "node '_to_copy_1'", "repeats the cast '_to_copy'", after="fold_casts")


def test_a_redundant_chain_is_left() -> None:
    gm = functional(lambda x: x.float().to(BF16) + 1, X.to(BF16))
    broken(gm, facts.FOLDED, "node '_to_copy_1'", "which is itself a lossless cast", after="fold_casts")


def test_casts_around_a_write_are_no_repetition() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x.to(BF16) * 1
        aten.copy_(x, x + 1)
        return before, x.to(BF16) * 1

    verify(functional(fn, X), (facts.FOLDED,), CTX, "fold_casts")


# --------------------------------------------------------------------------------------------- subgraphs


def branching(until: str = "") -> fx.GraphModule:
    def fn(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(p, lambda x, w: (F.linear(x, w),), lambda x, w: (x.exp(),), (x, w))[0]

    return prepared(pre_dispatch(fn, torch.tensor(True), X, W), CTX, until=until)


def body(gm: fx.GraphModule, op: str) -> fx.GraphModule:
    return next(inner for name, inner in ir.all_graphs(gm) if name and ops(inner, op))


def test_a_missing_decision_inside_cond() -> None:
    gm = branching(until="insert_casts")
    inner = body(gm, "linear")
    del ops(inner, "linear")[0].meta[ir.META]
    broken(gm, facts.ASSIGNED, "graph true_graph_0", "node 'linear'", "has no precision")


def test_a_missing_cast_inside_cond() -> None:
    gm = branching()
    (linear,) = ops(body(gm, "linear"), "linear")
    linear.args = (ir.cast_source(linear.args[0]), linear.args[1])
    broken(gm, facts.CAST, "graph true_graph_0", "runs in torch.bfloat16")


def test_a_redundant_cast_inside_cond() -> None:
    x = X.to(BF16)
    gm = functional(
        lambda p, x: torch.cond(p, lambda x: (x.float().to(BF16) + 1,), lambda x: (x * 2,), (x,))[0],
        torch.tensor(True), x,
    )  # fmt: skip
    broken(gm, facts.FOLDED, "graph true_graph_0", "lossless")


def test_a_meta_that_lies_inside_cond() -> None:
    gm = branching()
    (exp,) = ops(body(gm, "exp"), "exp")
    exp.meta["val"] = ir.retype(ir.tensor_of(exp), F16)
    ir.decide(exp, dataclasses.replace(ir.decision(exp), mode=Mode.NATIVE, precision=F16, out=(F16,)))
    broken(gm, facts.CAST, "node 'cond'", "its body 'false_graph_0' returns [torch.float16]")  # which it returns


def checkpointed() -> fx.GraphModule:
    """A graph that holds a checkpoint, as the Dynamo front end lowers it."""
    inner = pre_dispatch(lambda x, w: (F.linear(x, w).exp(),), X, W)
    graph = fx.Graph()
    places = [n for n in inner.graph.nodes if n.op == "placeholder"]
    inputs = [graph.placeholder(n.name) for n in places]
    for node, place in zip(inputs, places, strict=True):
        node.meta["val"] = place.meta["val"]
    held = graph.get_attr("wrapped")
    call = graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (held, *inputs))
    call.meta["val"] = (find(inner, "exp").meta["val"],)
    graph.output(call)
    root = nn.Module()
    root.wrapped = inner
    return fx.GraphModule(root, graph)


def test_a_broken_body_of_a_checkpoint() -> None:
    gm = prepared(checkpointed(), CTX, until="insert_casts")
    del find(gm.wrapped, "exp").meta[ir.META]
    broken(gm, facts.ASSIGNED, "graph wrapped", "node 'exp'", "has no precision")
    gm = prepared(checkpointed(), CTX, until="")
    (linear,) = ops(gm.wrapped, "linear")
    linear.args = (ir.cast_source(linear.args[0]), linear.args[1])
    broken(gm, facts.CAST, "graph wrapped", "node 'linear'", "runs in torch.bfloat16")


def test_nothing_of_this_is_a_false_alarm() -> None:
    gm = small(until="insert_casts")
    insert_casts.PASS.run(gm, CTX)
    verify(gm, (facts.ASSIGNED, facts.CAST), CTX, "insert_casts", deep=True)
    assert len(casts(gm)) == 3
