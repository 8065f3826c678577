"""fold_casts: only what is provably redundant goes, and no output changes by a bit."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler import ir
from amp_compiler.common.errors import PipelineError, VerifyError
from amp_compiler.passes.fold_casts import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from amp_compiler.rewrite.verify import verify
from helpers import (
    BF16,
    F16,
    F32,
    aten,
    casts,
    check_pass,
    context,
    find,
    functional,
    joint,
    ops,
    same,
    unchanged,
)

F64 = torch.float64


def values(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    """Ordinary numbers with inf, NaN, signed zero, a tiny and a large one among them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    flat = x.view(-1)
    special = torch.tensor([float("inf"), float("nan"), -0.0, 1e-10, -7e4, 257.0])
    count = min(len(special), max(len(flat) - 2, 0))
    flat[:count] = special[:count]
    return x.to(dtype)


# ------------------------------------------------------------------------------------- rule 1: chains


def test_low_to_fp32_to_low_is_the_identity() -> None:
    x = values(2, 4, dtype=BF16)
    gm = functional(lambda x: x.float().bfloat16() + 1, x)
    check_pass(PASS, gm, inputs=[x], modified=True, expected_text="""
        input x_1: bf16[2, 4]
        add: bf16[2, 4] = add.Tensor(x_1, 1)
        return add
    """)  # fmt: skip


@pytest.mark.parametrize("low", [BF16, F16])
def test_fp32_to_low_to_fp32_rounds_and_stays(low: torch.dtype) -> None:
    x = values(2, 4)
    unchanged(PASS, functional(lambda x: x.to(low).float() + 1, x), inputs=[x])


CHAINS = [  # source, through, target, does the middle cast go?
    (torch.bool, F32, BF16, True),
    (torch.uint8, F32, BF16, True),
    (torch.int8, F32, F16, True),
    (torch.int64, F32, BF16, False),
    (torch.int32, F32, BF16, False),
    (torch.int16, BF16, F32, False),
    (torch.int32, F64, F32, True),
    (torch.int64, F64, F32, False),
    (BF16, F32, F16, True),
    (BF16, F16, F32, False),
    (F16, BF16, F16, False),
    (F16, F64, BF16, True),
    (F32, F64, BF16, True),
    (F64, F32, F64, False),
    (F64, F32, BF16, False),
    (F16, F32, F64, True),
]


@pytest.mark.parametrize(("source", "through", "target", "folds"), CHAINS, ids=str)
def test_a_chain_folds_only_over_a_lossless_first_cast(
    source: torch.dtype, through: torch.dtype, target: torch.dtype, folds: bool
) -> None:
    if source.is_floating_point:
        x = values(4, 4, dtype=source)
    elif source is torch.bool:
        x = torch.tensor([True, False])
    else:
        bounds = torch.iinfo(source)
        x = torch.tensor(
            [0, 1, -1 if bounds.min < 0 else 3, bounds.max, bounds.max - 1, bounds.min], dtype=source
        )
        x = torch.cat([x, torch.tensor([16777217, 33554435, 2**53 + 1]).to(source)])
    gm = functional(lambda x: x.to(through).to(target).neg(), x)
    check_pass(PASS, gm, inputs=[x], modified=folds)
    assert len([n for n in gm.graph.nodes if ir.is_cast(n)]) == 2 - folds


def test_a_lossless_cast_with_other_readers_stays_for_them() -> None:
    x = values(2, 4, dtype=BF16)
    gm = functional(lambda x: (x.float().bfloat16() * 2, x.float().exp()), x)
    check_pass(PASS, gm, inputs=[x], expected_text="""
        input x_1: bf16[2, 4]
        _to_copy: f32[2, 4] = cast(x_1, f32)
        mul: bf16[2, 4] = mul.Tensor(x_1, 2)
        exp: f32[2, 4] = exp(_to_copy)
        return mul, exp
    """)  # fmt: skip


def test_a_copy_to_another_device_or_layout_is_no_cast() -> None:
    x = values(2, 4, dtype=BF16)

    def fn(x: Tensor) -> Tensor:
        wide = aten._to_copy(x, dtype=F32, memory_format=torch.contiguous_format)
        return aten._to_copy(wide, dtype=BF16) + 1

    unchanged(PASS, functional(fn, x), inputs=[x])


# -------------------------------------------------------------------------------------- rule 2: copies


def test_equal_casts_of_one_value_are_one() -> None:
    x = values(2, 4)
    gm = functional(lambda x: (x.bfloat16() + 1, x.bfloat16() * 2, x.half() * 2), x)
    check_pass(PASS, gm, inputs=[x], modified=True, expected_text="""
        input x_1: f32[2, 4]
        _to_copy: bf16[2, 4] = cast(x_1, bf16)
        add: bf16[2, 4] = add.Tensor(_to_copy, 1)
        mul: bf16[2, 4] = mul.Tensor(_to_copy, 2)
        _to_copy_2: f16[2, 4] = cast(x_1, f16)
        mul_1: f16[2, 4] = mul.Tensor(_to_copy_2, 2)
        return add, mul, mul_1
    """)  # fmt: skip


def test_casts_of_equal_looking_but_different_values_stay_two() -> None:
    x, y = values(4), values(4, seed=1)
    unchanged(PASS, functional(lambda x, y: (x.bfloat16() + 1, y.bfloat16() + 1), x, y), inputs=[x, y])


def test_gradients_keep_their_bits() -> None:
    x, w = values(4, 4, seed=3).nan_to_num(1.0, 2.0), torch.randn(4, 4)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        wide = x.half().float()
        return (wide.relu().half() @ w.half()).float() + (wide.reshape(4, 4).half() @ w.half()).float()

    gm = joint(fn, x, w)
    before = len(casts(gm))
    check_pass(PASS, gm, inputs=[x, w], modified=True)
    assert len(casts(gm)) < before


# ---------------------------------------------------------------------------------------- rule 3: sink


def test_a_lossless_cast_sinks_below_a_view() -> None:
    x = values(2, 4, dtype=BF16)
    gm = functional(lambda x: x.float().view(8).bfloat16() + 1, x)
    check_pass(PASS, gm, inputs=[x], modified=True, expected_text="""
        input x_1: bf16[2, 4]
        view: bf16[8] = view(x_1, [8])
        add: bf16[8] = add.Tensor(view, 1)
        return add
    """)  # fmt: skip


EXACT_CALLS: dict[str, Any] = {
    "relu": torch.relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "t": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 1),
    "tril": torch.tril,
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x.neg()]),
    "clamp": lambda x: x.clamp(-1.0, 2.0),
    "hardtanh": torch.nn.functional.hardtanh,
    "where": lambda x: torch.where(x.isnan(), x, -x),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "masked_fill": lambda x: x.masked_fill(x.isnan(), 0.5),
    "masked_fill_inf": lambda x: x.masked_fill(x.isnan(), float("-inf")),
    "index": lambda x: x[torch.tensor([1, 0, 1])],
    "gather": lambda x: x.gather(1, torch.zeros(4, 2, dtype=torch.int64)),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 1), value=0.25),
    "expand": lambda x: x.unsqueeze(0).expand(3, 4, 4),
    "repeat": lambda x: x.repeat(2, 1),
    "amax": lambda x: x.amax(1),
    "max_pool": lambda x: torch.nn.functional.max_pool1d(x.unsqueeze(0), 2),
    "slice": lambda x: x[:, ::2],
    "select": lambda x: x[1],
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "copysign": lambda x: torch.copysign(x, x.flip(0)),
    "slice_scatter": lambda x: aten.slice_scatter(x, x[:1], 0, 0, 1),
    "constant_tensor": lambda x: torch.where(x.isnan(), torch.full((), -3.4e38), x),
}


@pytest.mark.parametrize("low", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", EXACT_CALLS)
def test_moving_a_cast_across_an_exact_op_changes_no_bit(name: str, low: torch.dtype) -> None:
    call = EXACT_CALLS[name]
    narrow, wide = values(4, 4, dtype=low), values(4, 4)
    check_pass(PASS, functional(lambda x: call(x.float()).to(low) * 1, narrow), inputs=[narrow])
    check_pass(
        PASS,
        functional(lambda x: (call(x.float()).to(low) * 1, call(x.float()).exp()), narrow),
        inputs=[narrow],
    )
    check_pass(PASS, functional(lambda x: call(x).to(low) * 1, wide), inputs=[wide])
    check_pass(PASS, functional(lambda x: (x.to(low) * 1, call(x).to(low) * 1), wide), inputs=[wide])


def test_a_cast_does_not_sink_where_it_would_write_more_bytes() -> None:
    """The fp32 result of the expand has another reader: one small cast is cheaper than one large one."""
    x = values(1, 4, dtype=BF16)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float().expand(4, 4)
        return wide.bfloat16() * 1, wide.exp()

    unchanged(PASS, functional(fn, x), inputs=[x])


def test_a_cast_sinks_past_other_readers_where_that_saves_bytes() -> None:
    x = values(4, 4, dtype=BF16)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        part = x.float()[0]
        return part.bfloat16() * 1, part.exp()

    gm = functional(fn, x)
    check_pass(PASS, gm, inputs=[x], modified=True)
    (cast,) = casts(gm)
    assert ir.tensor_of(cast).shape == (4,)


def test_casts_of_two_low_dtypes_do_not_sink() -> None:
    x, y = values(4, dtype=BF16), values(4, dtype=F16)
    unchanged(
        PASS, functional(lambda x, y: torch.cat([x.float(), y.float()]).bfloat16() + 1, x, y), inputs=[x, y]
    )


def test_a_rounding_arithmetic_op_stops_a_cast() -> None:
    x = values(4, 4, dtype=BF16)
    unchanged(PASS, functional(lambda x: (x.float() * 1.5).bfloat16() + 1, x), inputs=[x])
    unchanged(PASS, functional(lambda x: x.float().sum(0).bfloat16() + 1, x), inputs=[x])


@pytest.mark.parametrize("low", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("fill", [-3.4e38, 1e-8, 0.1, 70000.0, 257.0, 70000, 257, 2049, 16777217])
def test_a_scalar_that_the_low_dtype_does_not_hold_stops_a_cast(fill: float, low: torch.dtype) -> None:
    """A Python float and a Python int alike; with an fp32 reader beside, no bit of its value may change."""
    x, mask = values(4, 4, dtype=low), torch.eye(4) > 0

    def fn(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        filled = x.float().masked_fill(mask, fill)
        return filled.to(low) * 1, filled[0] * 1

    check_pass(PASS, functional(fn, x, mask), inputs=[x, mask])
    check_pass(PASS, functional(lambda x, m: fn(x, m)[0], x, mask), inputs=[x, mask])
    wide = values(1, 4)
    check_pass(PASS, functional(lambda x, m: fn(x.expand(4, 4), m)[0], wide, mask), inputs=[wide, mask])


def test_masked_fill_of_the_fp32_minimum_never_sinks() -> None:
    x, mask = values(4, 4, dtype=F16), torch.eye(4) > 0
    unchanged(
        PASS, functional(lambda x, m: x.float().masked_fill(m, -3.4e38).half() * 1, x, mask), inputs=[x, mask]
    )


def test_an_integer_operand_is_not_rounded_to_low() -> None:
    """maximum(bf16, int64) gives bf16: 257 would become 256 for the fp32 reader."""
    x, n = torch.zeros(8, dtype=BF16), torch.full((8,), 257)

    def fn(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = torch.maximum(x.float(), n)
        return top.bfloat16() * 1, aten._to_copy(top, dtype=BF16).neg(), top * 1

    check_pass(PASS, functional(fn, x, n), inputs=[x, n])


# ---------------------------------------------------------------------------------------- rule 4: rise


def test_a_rounding_rises_above_an_expansion() -> None:
    x = values(1, 8)
    gm = functional(lambda x: x.repeat(4, 1).bfloat16() + 1, x)
    check_pass(PASS, gm, inputs=[x], modified=True, expected_text="""
        input x_1: f32[1, 8]
        _to_copy_default: bf16[1, 8] = cast(x_1, bf16)
        repeat: bf16[4, 8] = repeat(_to_copy_default, [4, 1])
        add: bf16[4, 8] = add.Tensor(repeat, 1)
        return add
    """)  # fmt: skip


def test_a_rounding_does_not_rise_where_it_costs_as_much() -> None:
    x = values(4, 8)
    unchanged(PASS, functional(lambda x: x.view(32).bfloat16() + 1, x), inputs=[x])
    unchanged(PASS, functional(lambda x: x[:2].bfloat16() + 1, x), inputs=[x])


def test_a_rounding_does_not_rise_past_an_fp32_reader() -> None:
    x = values(1, 8)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.repeat(4, 1)
        return wide.bfloat16() + 1, wide.exp()

    unchanged(PASS, functional(fn, x), inputs=[x])


def test_two_roundings_to_different_dtypes_do_not_rise() -> None:
    x = values(1, 8)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.repeat(4, 1)
        return wide.bfloat16() + 1, wide.half() + 1

    unchanged(PASS, functional(fn, x), inputs=[x])


def test_a_rounding_does_not_rise_above_a_comparison_or_an_index() -> None:
    """Rounding makes ties: the gradient of relu, or an argmax, would change."""
    x, y = torch.full((4, 4), 1e-10), torch.ones(1, 4)

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return aten.threshold_backward(y.expand(4, 4), x, 0).half() + 1, x.argmax(1)

    unchanged(PASS, functional(fn, x, y), inputs=[x, y])


def test_a_cast_that_is_there_already_is_used() -> None:
    x = values(4, 8)
    gm = functional(lambda x: (x.bfloat16() + 1, x.t().bfloat16() * 2), x)
    check_pass(PASS, gm, inputs=[x], modified=True)
    assert len(casts(gm)) == 1


def test_a_long_chain_is_folded_in_one_run() -> None:
    """One sweep carries a rounding over one op; a second run must still find nothing to do."""
    x = values(1, 2)

    def fn(x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.nn.functional.pad(x, (0, 1))
        return x.bfloat16() + 1

    check_pass(PASS, functional(fn, x), inputs=[x])


# -------------------------------------------------------------------------------- strides, sizes, writes

STRIDED = {
    "expanded": (lambda x: x[:1].expand(4, 8), (32,)),
    "columns": (lambda x: x[:, :4], (16,)),
    "steps": (lambda x: x[:, ::2], (16,)),
    "diagonal": (lambda x: x.diagonal(), (2, 2)),
    "windows": (lambda x: x.unfold(1, 4, 2), (12, 4)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_a_view_behind_a_cast_still_works(name: str) -> None:
    """A cast gives a dense tensor; without it, the view that follows could not be taken."""
    take, shape = STRIDED[name]
    wide, narrow = values(4, 8), values(4, 8, dtype=BF16)
    check_pass(PASS, functional(lambda x: aten.view(take(x).bfloat16(), shape) + 1, wide), inputs=[wide])
    check_pass(
        PASS, functional(lambda x: aten.view(take(x.float()).bfloat16(), shape) + 1, narrow), inputs=[narrow]
    )
    check_pass(
        PASS, functional(lambda x: aten.view(take(x).float().bfloat16(), shape) + 1, narrow), inputs=[narrow]
    )
    gm = functional(lambda x: (x.bfloat16() + 1, aten.view(take(x).bfloat16(), shape) + 1), wide)
    check_pass(PASS, gm, inputs=[wide])


def test_a_transposed_input_keeps_its_strides() -> None:
    x = values(4, 8, dtype=BF16).t()
    gm = functional(lambda x: aten.view(x.float().t().bfloat16(), (32,)) + 1, x)
    check_pass(PASS, gm, inputs=[x], modified=True)
    assert not casts(gm)


def test_symbolic_sizes_fold_by_rules_1_and_2_only() -> None:
    x = values(3, 8, dtype=BF16)

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.float().bfloat16() + 1, x.float().exp(), x.float().view(-1).bfloat16() + 1

    gm = functional(fn, x, dynamic=True)
    check_pass(PASS, gm, inputs=[x], modified=True)
    assert len(casts(gm)) == 2  # one up for exp and view, one down
    other = values(5, 6, dtype=BF16)
    same(gm(other), (other + 1, other.float().exp(), other.view(-1) + 1))


def mutating(fn: Any, *inputs: Tensor) -> torch.fx.GraphModule:
    gm = functional(fn, *inputs)
    assert any(ir.mutated_args(n) for n in gm.graph.nodes), "the graph should write to an input"
    return gm


def test_casts_of_a_written_input_are_frozen() -> None:
    """copy_ at the end: a cast before it and a cast after it are two values."""
    x = values(4, dtype=F32)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        before = x.bfloat16()
        aten.copy_(x, x + 1)
        return before * 1, x.bfloat16() * 1

    check_pass(PASS, mutating(fn, x), inputs=[x], modified=False)


def test_a_copy_of_a_written_input_is_not_the_input() -> None:
    x = values(4, dtype=BF16)

    def fn(x: Tensor) -> Tensor:
        old = x.float().bfloat16()
        aten.copy_(x, x + 1)
        return old

    check_pass(PASS, mutating(fn, x), inputs=[x])


def test_a_copy_of_a_view_of_a_written_input_is_not_the_view() -> None:
    """The view would show what copy_ writes at the end."""
    x = torch.arange(4.0).to(BF16)

    def fn(x: Tensor) -> Tensor:
        old = aten.view(x, (2, 2)).float().bfloat16()
        aten.copy_(x, x + 1)
        return old

    check_pass(PASS, mutating(fn, x), inputs=[x])


# ------------------------------------------------------------------------------- outputs and their memory


def outputs_apart(gm: torch.fx.GraphModule, *inputs: Tensor) -> None:
    """Each output has memory of its own, and none is an input: callers may write to them."""
    outs = gm(*inputs)
    outs = outs if isinstance(outs, (tuple, list)) else [outs]
    pointers = [t.untyped_storage().data_ptr() for t in (*outs, *inputs)]
    assert len(set(pointers)) == len(pointers), "outputs share memory that the model's own code kept apart"


def test_two_outputs_do_not_become_one_tensor() -> None:
    x = values(4)
    gm = functional(lambda x: (x.bfloat16(), x.bfloat16()), x)
    outputs_apart(gm, x)
    check_pass(PASS, gm, inputs=[x])
    outputs_apart(gm, x)


def test_an_output_does_not_become_an_input() -> None:
    x = values(4, dtype=BF16)
    gm = functional(lambda x: x.float().bfloat16(), x)
    check_pass(PASS, gm, inputs=[x])
    outputs_apart(gm, x)


def test_an_output_does_not_become_a_view_of_another() -> None:
    x = values(4, 4)
    gm = functional(lambda x: (x.bfloat16(), x.t().bfloat16()), x)
    check_pass(PASS, gm, inputs=[x])
    outputs_apart(gm, x)


# ------------------------------------------------------------------------------------- other graph shapes


def test_multiple_outputs_and_none_arguments() -> None:
    x, w = values(4, 8, seed=2), torch.randn(8)

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        norm, mean, _ = aten.native_layer_norm(x.bfloat16().float(), [8], w, None, 1e-5)
        low = aten.clamp(norm.bfloat16().float(), None, 2.0).bfloat16()
        left, right = aten.split(low, 4, 1)
        return left + right, mean

    gm = functional(fn, x, w)
    check_pass(PASS, gm, inputs=[x, w], modified=True)
    assert len(casts(gm)) == 3  # the clamp's two casts went


def test_multi_output_ops_are_no_place_for_a_cast() -> None:
    x = values(4, 8, dtype=BF16)
    unchanged(PASS, functional(lambda x: aten.split(x.float(), 4, 1)[0].bfloat16() + 1, x), inputs=[x])
    unchanged(PASS, functional(lambda x: x.float().max(1)[0].bfloat16() + 1, x), inputs=[x])


def test_subgraphs_are_folded_too() -> None:
    x = values(4, dtype=BF16)

    def branch(x: Tensor) -> tuple[Tensor]:
        return (x.float().bfloat16() + 1,)

    gm = functional(lambda p, x: torch.cond(p, branch, lambda x: (x * 2,), (x,))[0], torch.tensor(True), x)
    assert sum(len(casts(inner)) for _, inner in ir.all_graphs(gm)) == 2
    check_pass(PASS, gm, inputs=[torch.tensor(True), x], modified=True)
    assert sum(len(casts(inner)) for _, inner in ir.all_graphs(gm)) == 0


def test_the_order_is_checked_and_so_is_the_result() -> None:
    with pytest.raises(PipelineError, match="'fold_casts' needs 'past_autograd'"):
        Pipeline((PASS,), (facts.CAPTURED,))
    gm = functional(lambda x: x.float().bfloat16() + 1, values(4, dtype=BF16))
    with pytest.raises(VerifyError, match="lossless"):
        verify(gm, PASS.ensures, context(), "nothing")


# ---------------------------------------------------------------------------------------------- property

EXACT_OPS: dict[str, Any] = {
    "relu": torch.relu,
    "neg": torch.neg,
    "view": lambda x: aten.view(x, (8, 2)),
    "t": lambda x: x.t(),
    "flat": lambda x: x.reshape(-1),
    "flat_view": lambda x: aten.view(x, (-1,)),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "first": lambda x: x[..., :1],
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "flip": lambda x: x.flip(0),
    "clone": torch.clone,
    "pad": lambda x: aten.constant_pad_nd(x, [1, 0], 0.0),
    "clamp": lambda x: x.clamp(-1.0, 2.0),
    "clamp_int": lambda x: x.clamp(-3, 257),
    "fill": lambda x: x.masked_fill(x > 1, -3.4e38),
    "fill_inf": lambda x: x.masked_fill(x > 1, float("-inf")),
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b),
    "cat": lambda a, b: torch.cat([a, b]),
}
OTHER_OPS: dict[str, Any] = {
    "mul": lambda x: x * 1.5,
    "exp": torch.exp,
    "positive": lambda x: x > 0,
    "whole": lambda x: x.isfinite() * 257,
    "add": operator.add,
}
CAST_OPS: dict[str, Any] = {
    "f32": lambda x: x.to(F32),
    "bf16": lambda x: x.to(BF16),
    "f16": lambda x: x.to(F16),
}
OPS = {**EXACT_OPS, **OTHER_OPS, **CAST_OPS}
BINARY = ("maximum", "where", "cat", "add")
Step = tuple[str, int, int]
OPERAND = st.sampled_from([0, 0, 0, 1, 1, 2, 3])
STEPS = st.lists(
    st.tuples(
        st.one_of(*(st.sampled_from(sorted(group)) for group in (EXACT_OPS, CAST_OPS, CAST_OPS, OTHER_OPS))),
        OPERAND, OPERAND,
    ),
    min_size=2, max_size=9,
)  # fmt: skip


def call(name: str, known: list[Tensor], first: int, second: int) -> Tensor:
    """One op on the newest values."""
    args = [known[-1 - first % len(known)]] + ([known[-1 - second % len(known)]] if name in BINARY else [])
    return OPS[name](*args)


def sensible(steps: list[Step], *inputs: Tensor) -> list[Step]:
    """The steps that fit their operands when they are really run."""
    known, kept = list(inputs), []
    for step in steps:
        try:
            result = call(step[0], known, *step[1:])
        except (RuntimeError, IndexError, TypeError, ValueError, OverflowError):
            continue
        if result.numel() <= 1000:
            known.append(result)
            kept.append(step)
    return kept


def interpret(steps: list[Step], *inputs: Tensor) -> list[Tensor]:
    known = list(inputs)
    for step in steps:
        known.append(call(step[0], known, *step[1:]))
    return [v * 1 for v in known[len(inputs) :][-3:]]


@settings(max_examples=100)
@given(STEPS, st.sampled_from([F32, BF16, F16]))
def test_any_program_keeps_its_bits_and_gains_no_cast(steps: list[Step], dtype: torch.dtype) -> None:
    x, y = values(4, 4, dtype=dtype), values(4, 4, seed=5)
    steps = sensible(steps, x, y)
    gm = functional(lambda x, y: interpret(steps, x, y), x, y)
    count, written = len(casts(gm)), sum(ir.nbytes(ir.tensor_of(n)) for n in casts(gm))
    check_pass(PASS, gm, inputs=[x, y])
    assert len(casts(gm)) <= count
    assert sum(ir.nbytes(ir.tensor_of(n)) for n in casts(gm)) <= written


def test_the_helpers_find_what_they_name() -> None:
    gm = functional(lambda x: x.bfloat16().relu(), values(4))
    assert ops(gm, "relu") == [find(gm, "relu")]
