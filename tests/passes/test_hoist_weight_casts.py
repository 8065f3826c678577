"""hoist_weight_casts: the low weight is an input, another graph makes it, and the numbers are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from amp_compiler import ir
from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes import fold_casts
from amp_compiler.passes.hoist_weight_casts import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import BF16, F16, check_pass, context, step_graph

ROWS = torch.arange(6.0).reshape(2, 3) / 7


def graph(fn: object, *inputs: Tensor) -> fx.GraphModule:
    gm = step_graph(fn, *inputs)  # type: ignore[arg-type]
    fold_casts.PASS.run(gm, context())
    return gm


def run(gm: fx.GraphModule, *inputs: Tensor) -> list[Tensor]:
    """As the training step runs it: first the low copies, then the graph."""
    weights = gm.meta.get(ir.WEIGHTS)
    places = [n.meta[ir.ROLE] for n in gm.graph.nodes if n.op == "placeholder"]
    low = iter(weights(*(inputs[r.index] for r in places if r.kind == "low")) if weights is not None else ())
    return list(gm(*(next(low) if r.kind == "low" else torch.ones(()) if r.kind == "tangent" else inputs[r.index]
                     for r in places)))  # fmt: skip


def weight(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, 3 * 2).reshape(shape).clone().requires_grad_()


def test_a_weight_is_cast_outside() -> None:
    w = weight(3, 2)
    gm = graph(lambda w, x: (x.to(BF16) @ w.to(BF16)).float().sum(), w, ROWS)
    before = [t.clone() for t in run(gm, w.detach(), ROWS)]
    check_pass(PASS, gm, modified=True)
    assert ir.format_graph(gm.meta[ir.WEIGHTS]).splitlines() == [
        "input p0: f32[3, 2]", "_to_copy_default: bf16[3, 2] = cast(p0, bf16)", "return _to_copy_default",
    ]  # fmt: skip
    assert next(n.name for n in gm.graph.nodes if n.op == "placeholder") == "low_p0"
    for one, other in zip(before, run(gm, w.detach(), ROWS), strict=True):
        assert torch.equal(one, other)


def test_the_batch_is_cast_inside() -> None:
    w = weight(3, 2)
    gm = check_pass(PASS, graph(lambda w, x: (x.to(BF16) @ w.to(BF16)).float().sum(), w, ROWS), modified=True)
    assert next(ir.cast_source(n).name for n in gm.graph.nodes if ir.is_float_cast(n)) == "p1"


def test_a_weight_with_two_precisions_has_two_copies() -> None:
    w = weight(3, 2)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (x.to(BF16) @ w.to(BF16)).float().sum() + (x.half() @ w.half()).float().sum() + w.sum()

    gm = graph(fn, w, ROWS)
    before = run(gm, w.detach(), ROWS)
    check_pass(PASS, gm, modified=True)
    kinds = [n.meta["val"].dtype for n in gm.graph.nodes if n.op == "placeholder" and n.meta[ir.ROLE].kind == "low"]
    assert sorted(kinds, key=str) == [BF16, F16]
    assert all(torch.equal(a, b) for a, b in zip(before, run(gm, w.detach(), ROWS), strict=True))


def test_nothing_to_hoist() -> None:
    check_pass(PASS, graph(lambda w, x: (x @ w).sum(), weight(3, 2), ROWS), modified=False)


def test_it_comes_after_folding() -> None:
    with pytest.raises(PipelineError, match="needs 'folded'"):
        Pipeline((PASS,), (facts.FUNCTIONAL, facts.STEP))


def test_a_cast_that_is_left_is_found() -> None:
    gm = graph(lambda w, x: (x.to(BF16) @ w.to(BF16)).float().sum(), weight(3, 2), ROWS)
    with pytest.raises(VerifyError, match="casts a parameter once per micro-batch"):
        verify(gm, (facts.HOISTED,), context(), "nothing")
