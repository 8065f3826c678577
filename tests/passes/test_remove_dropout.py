"""remove_dropout: only dropout that does nothing goes away."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler.common.errors import PipelineError
from amp_compiler.passes.remove_dropout import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import check_pass, context, ops, pre_dispatch, prepared, unchanged

X = torch.randn(2, 3, 4)


def graph(fn: object, *inputs: Tensor) -> torch.fx.GraphModule:
    assert callable(fn)
    return prepared(pre_dispatch(fn, *inputs), context(), until="mark_dtype_origin")


def test_dropout_in_eval_mode_goes() -> None:
    gm = graph(lambda x: F.dropout(x * 2, 0.5, False) + 1, X)
    check_pass(PASS, gm, inputs=[X], modified=True, expected_text="""
        input x_1: f32[2, 3, 4]
        mul: f32[2, 3, 4] = mul.Tensor(x_1, 2)
        add: f32[2, 3, 4] = add.Tensor(mul, 1)
        return add
    """)  # fmt: skip


def test_dropout_that_the_code_asks_for_stays() -> None:
    unchanged(PASS, graph(lambda x: F.dropout(x, 0.5, True) + 1, X))


def test_a_probability_of_zero_does_nothing() -> None:
    gm = graph(lambda x: F.dropout(x, 0.0, True) + 1, X)
    check_pass(PASS, gm, inputs=[X], modified=True)


def test_all_readers_and_outputs_are_kept() -> None:
    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = F.dropout(x.exp(), 0.1, False)
        return y, y + 1, F.dropout(y, 0.2, False)

    gm = graph(forward, X)
    check_pass(PASS, gm, inputs=[X], modified=True)
    assert not ops(gm, "dropout")


def test_a_write_to_its_result_is_a_write_to_its_input() -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        z = F.dropout(y, 0.5, False)
        z.mul_(3)
        return y, z

    check_pass(PASS, graph(forward, X), inputs=[X], modified=True)


def test_it_needs_a_normalized_graph() -> None:
    with pytest.raises(PipelineError, match="needs 'normalized'"):
        Pipeline((PASS,), (facts.CAPTURED,))


KINDS = [F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.feature_alpha_dropout]


@given(st.sampled_from(KINDS), st.floats(0, 0.9), st.booleans())
@settings(max_examples=10)
def test_no_value_changes(kind: object, p: float, inplace: bool) -> None:
    assert callable(kind)
    gm = graph(lambda x: kind(x + 1, p, False, inplace) * 2, X)  # type: ignore[operator]
    check_pass(PASS, gm, inputs=[X])
    assert [n for n in gm.graph.nodes if "dropout" in str(n.target)] == []
