"""batch_casts: small parameters that are cast alike are cast together, with the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_compiler import amp_compile
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes.batch_casts import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.facts.functional import LARGEST
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, F16, casts, check_pass, functional, unchanged


def numbers(*sizes: int) -> list[Tensor]:
    return [torch.randn(n, generator=torch.Generator().manual_seed(n)) * 100 for n in sizes]


def test_three_biases_are_one_cast() -> None:
    given_ = numbers(2, 3, 4)
    gm = functional(lambda a, b, c: (a.bfloat16() * 2, b.bfloat16() * 2, c.bfloat16() * 2), *given_)
    check_pass(PASS, gm, inputs=given_, modified=True, expected_text="""
        input a_1: f32[2]
        input b_1: f32[3]
        input c_1: f32[4]
        cat_default: f32[9] = cat([a_1, b_1, c_1])
        _to_copy_default: bf16[9] = cast(cat_default, bf16)
        split_with_sizes_default: (bf16[2], bf16[3], bf16[4]) = split_with_sizes(_to_copy_default, [2, 3, 4])
        getitem: bf16[2] = getitem(split_with_sizes_default, 0)
        getitem_1: bf16[3] = getitem(split_with_sizes_default, 1)
        getitem_2: bf16[4] = getitem(split_with_sizes_default, 2)
        mul: bf16[2] = mul.Tensor(getitem, 2)
        mul_1: bf16[3] = mul.Tensor(getitem_1, 2)
        mul_2: bf16[4] = mul.Tensor(getitem_2, 2)
        return mul, mul_1, mul_2
    """)  # fmt: skip


def test_two_are_too_few() -> None:
    given_ = numbers(2, 3)
    unchanged(PASS, functional(lambda a, b: (a.bfloat16() * 2, b.bfloat16() * 2), *given_), inputs=given_)


@pytest.mark.parametrize(
    "odd",
    [torch.randn(2, 2), torch.randn(LARGEST + 1), torch.randn(8)[::2], torch.randn(0)],
    ids=["matrix", "large", "strided", "empty"],
)
def test_what_is_not_small_and_flat_stays(odd: Tensor) -> None:
    given_ = [*numbers(2, 3), odd]
    gm = functional(lambda a, b, c: (a.bfloat16() * 2, b.bfloat16() * 2, c.bfloat16() * 2), *given_)
    unchanged(PASS, gm, inputs=given_)


def test_another_dtype_is_another_group() -> None:
    given_ = numbers(2, 3, 4, 5)
    gm = functional(lambda a, b, c, d: (a.half() * 2, b.bfloat16() * 2, c.half() * 2, d.half() * 2), *given_)
    check_pass(PASS, gm, inputs=given_, modified=True)
    assert len(casts(gm)) == 2


def test_what_the_caller_gets_stays_a_tensor_of_its_own() -> None:
    given_ = numbers(2, 3, 4)
    unchanged(PASS, functional(lambda a, b, c: (a.bfloat16(), b.bfloat16(), c.bfloat16()), *given_), inputs=given_)


def test_what_is_written_to_stays() -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        low = a.bfloat16() * 2, b.bfloat16() * 2, c.bfloat16() * 2
        a.copy_(low[0])
        return low

    given_ = numbers(2, 3, 4)
    unchanged(PASS, functional(fn, *given_), inputs=given_)


def test_a_value_made_in_the_graph_is_no_parameter() -> None:
    given_ = numbers(2, 3, 4)
    gm = functional(lambda *xs: tuple((x + 1).bfloat16() * 2 for x in xs), *given_)
    unchanged(PASS, gm, inputs=given_)


def test_it_needs_folded_casts_and_the_eager_backend() -> None:
    with pytest.raises(PipelineError, match="needs 'folded'"):
        Pipeline((PASS,), (facts.FUNCTIONAL,))


def test_gradients_are_the_same_bits_without_it() -> None:
    results = []
    for off in ((), ("batch_casts",)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        fast = amp_compile(model, "O2", dtype=BF16, disable_passes=off)
        fast(torch.ones(3, 8)).sum().backward()
        results.append([p.grad for p in model.parameters()])
        assert fast.history[-1].modified is (off == ())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@settings(max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=8), st.sampled_from([BF16, F16]))
def test_any_sizes_keep_their_bits(sizes: list[int], low: torch.dtype) -> None:
    given_ = numbers(*sizes)
    gm = functional(lambda *xs: tuple(x.to(low) * 3 for x in xs), *given_)
    check_pass(PASS, gm, inputs=given_, modified=True)
    assert len(casts(gm)) == 1
