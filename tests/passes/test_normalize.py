"""normalize: one spelling for casts, no tracing leftovers, regions as annotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import ir, precision
from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes.normalize import PASS, Region
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import (
    BF16,
    F16,
    F32,
    aten,
    autocast_region,
    check_pass,
    context,
    exported,
    find,
    ops,
    pre_dispatch,
    unchanged,
)

X, LOW_X = torch.randn(2, 4), torch.randn(2, 4).to(BF16)


def region(gm: torch.fx.GraphModule, name: str) -> Region | None:
    return find(gm, name).meta.get(ir.REGION)


# ----------------------------------------------------------------------------------------------- casts

SPELLINGS: dict[str, Any] = {
    "float": lambda x, y: x.float(),
    "to_dtype": lambda x, y: x.to(F32),
    "to_other": lambda x, y: x.to(y),
    "type_as": lambda x, y: x.type_as(y),
    "to_device_dtype": lambda x, y: x.to("cpu", F32),
    "_to_copy": lambda x, y: aten._to_copy(x, dtype=F32),
    "to_dtype_layout": lambda x, y: aten.to.dtype_layout(
        x, dtype=F32, layout=torch.strided, device=torch.device("cpu")
    ),
    "convert_element_type": lambda x, y: torch.ops.prims.convert_element_type(x, F32),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_cast_is_spelled_one_way(name: str) -> None:
    gm = pre_dispatch(lambda x, y: SPELLINGS[name](x, y) * 2 + y, LOW_X, X)
    check_pass(PASS, gm, inputs=[LOW_X, X])
    (cast,) = [n for n in gm.graph.nodes if ir.is_cast(n)]
    assert cast.target is aten.to.dtype
    assert cast.args == (find(gm, "x_1"), F32)
    assert not cast.kwargs
    assert len(gm.graph.nodes) == 6


def test_the_whole_text_of_a_small_graph() -> None:
    gm = pre_dispatch(lambda x, y: (x.type_as(y) + y).half(), LOW_X, X)
    check_pass(PASS, gm, inputs=[LOW_X, X], modified=True, expected_text="""
        input x_1: bf16[2, 4]
        input y_1: f32[2, 4]
        type_as: f32[2, 4] = cast(x_1, f32)
        add: f32[2, 4] = add.Tensor(type_as, y_1)
        to: f16[2, 4] = cast(add, f16)
        return to
    """)  # fmt: skip


NEAR_MISSES: dict[str, Any] = {
    "copy": lambda x: x.to(F32, copy=True),
    "device": lambda x: x.to("meta"),
    "memory_format": lambda x: x.to(F32, memory_format=torch.contiguous_format),
    "clone": lambda x: x.clone(),
    "bits": lambda x: x.view(torch.int16),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_does_more_than_cast_is_left_alone(name: str) -> None:
    unchanged(PASS, pre_dispatch(NEAR_MISSES[name], LOW_X))


def test_a_copy_stays_a_copy() -> None:
    """_to_copy to the dtype that the value has anyway: as a cast it would be an alias, and be written to."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        twin = aten._to_copy(x, dtype=F32)
        return twin.add_(1), x * 1

    check_pass(PASS, pre_dispatch(fn, X), inputs=[X])


def test_metadata_assertions_are_dropped() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(BF16) + 1

    gm = exported(Casts(), X)
    assert ops(gm, "_assert_tensor_metadata")
    check_pass(PASS, gm, modified=True)
    assert not ops(gm, "_assert_tensor_metadata")


def test_shared_users_multiple_outputs_none_and_scalars() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        wide = x.type_as(y)
        left, right = wide.split(2, 1)
        return wide * 2, left.clamp(None, 1.5), right, None, 3

    gm = pre_dispatch(fn, LOW_X, X)
    check_pass(PASS, gm, inputs=[LOW_X, X], modified=True)
    assert len(find(gm, "type_as").users) == 2


def test_casts_inside_subgraphs() -> None:
    def fn(p: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(p, lambda x, y: (x.type_as(y) + y,), lambda x, y: (y * 2,), (x, y))[0]

    gm = pre_dispatch(fn, torch.tensor(True), LOW_X, X)
    check_pass(PASS, gm, modified=True)
    targets = {n.target for _, inner in ir.all_graphs(gm) for n in inner.graph.nodes if ir.is_cast(n)}
    assert targets == {aten.to.dtype}


# --------------------------------------------------------------------------------------------- regions


def chain(x: Tensor) -> Tensor:
    return x.relu().neg().abs().exp().sin()


def test_a_region_becomes_an_annotation() -> None:
    gm = pre_dispatch(chain, X)
    autocast_region(gm, "neg", "exp", enabled=False)
    check_pass(PASS, gm, modified=True, inputs=[X], reference=chain)
    off = Region("autocast", None)
    assert [region(gm, n) for n in ("relu", "neg", "abs_1", "exp", "sin")] == [None, off, off, off, None]
    assert str(off) == "torch.autocast(enabled=False) region"


def test_nested_regions_the_innermost_counts() -> None:
    gm = pre_dispatch(chain, X)
    autocast_region(gm, "abs_1", "abs_1", dtype=F16)
    autocast_region(gm, "neg", "exp", enabled=False)
    autocast_region(gm, "relu", "sin", dtype=BF16)
    # built from the inside out: each outer pair must enclose the inner one
    order = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    assert (
        order.index("_enter_autocast_2") < order.index("_enter_autocast_1") < order.index("_enter_autocast")
    )
    check_pass(PASS, gm, modified=True)
    found = [region(gm, n).dtype for n in ("relu", "neg", "abs_1", "exp", "sin")]
    assert found == [BF16, None, F16, None, BF16]


def test_a_region_without_a_dtype_has_the_device_default() -> None:
    gm = pre_dispatch(chain, X)
    autocast_region(gm, "exp", "exp", dtype=None)
    check_pass(PASS, gm)
    assert region(gm, "exp") == Region("autocast", torch.get_autocast_dtype("cpu"))


def test_a_region_reaches_into_the_graphs_inside_it() -> None:
    """A checkpoint or cond inside autocast(enabled=False): its body runs there too."""

    def fn(p: Tensor, x: Tensor) -> Tensor:
        return torch.cond(p, lambda x: (x.exp(),), lambda x: (x.sin(),), (x,))[0]

    gm = pre_dispatch(fn, torch.tensor(True), X)
    autocast_region(gm, "cond", "cond", enabled=False)
    check_pass(PASS, gm, modified=True)
    inside = [
        n.meta.get(ir.REGION)
        for name, inner in ir.all_graphs(gm) if name
        for n in inner.graph.nodes if n.op == "call_function"
    ]  # fmt: skip
    assert inside == [Region("autocast", None)] * 2


def test_a_precision_scope_becomes_an_annotation() -> None:
    def fn(x: Tensor) -> Tensor:
        with precision("float32"):
            y = x @ x.t()
        return y.relu()

    gm = pre_dispatch(fn, X)
    check_pass(PASS, gm, modified=True, inputs=[X])
    assert region(gm, "matmul") == Region("precision", F32)
    assert region(gm, "relu") is None


def test_a_precision_scope_wins_over_an_autocast_region() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.relu()
        with precision("float16"):
            y = y.neg()
        return y.abs()

    gm = pre_dispatch(fn, X)
    autocast_region(gm, "relu", "abs_1", enabled=False)
    check_pass(PASS, gm)
    off = Region("autocast", None)
    assert [region(gm, n) for n in ("relu", "neg", "abs_1")] == [off, Region("precision", F16), off]


def test_a_graph_without_casts_and_regions_is_left_alone() -> None:
    unchanged(PASS, pre_dispatch(lambda x: (x @ x.t()).relu() + 1, X), inputs=[X])


# ------------------------------------------------------------------------------------------ requirements


def test_a_violated_requirement_is_named() -> None:
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(VerifyError, match="is not an ATen call"):
        check_pass(PASS, gm)
    with pytest.raises(PipelineError, match="'normalize' needs 'captured'"):
        Pipeline((PASS,), ())


def test_what_it_ensures_does_not_hold_before() -> None:
    gm = pre_dispatch(chain, X)
    autocast_region(gm, "neg", "exp")
    with pytest.raises(VerifyError, match="autocast region that is still a node"):
        verify(gm, PASS.ensures, context(), "nothing")
    gm = pre_dispatch(lambda x: aten._to_copy(x, dtype=F32), LOW_X)
    with pytest.raises(VerifyError, match=r"not written as aten\.to\.dtype"):
        verify(gm, PASS.ensures, context(), "nothing")


# ---------------------------------------------------------------------------------------------- property

STEP = st.sampled_from([*SPELLINGS, "half", "bfloat16", "relu", "mul", "copy", "split"])


@settings(max_examples=30)
@given(st.lists(STEP, min_size=1, max_size=6))
def test_any_chain_of_casts_keeps_its_values(steps: list[str]) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        for step in steps:
            if step in SPELLINGS:
                x = SPELLINGS[step](x, y)
            elif step == "split":
                x = torch.cat(x.split(1))
            else:
                x = {"half": x.half, "bfloat16": x.bfloat16, "relu": x.relu, "mul": lambda x=x: x * 3,
                     "copy": lambda x=x: x.to(F32, copy=True)}[step]()  # fmt: skip
        return x * 1

    gm = pre_dispatch(fn, LOW_X, X)
    check_pass(PASS, gm, inputs=[LOW_X, X])
    assert all(n.target is aten.to.dtype for n in gm.graph.nodes if ir.is_float_cast(n))
