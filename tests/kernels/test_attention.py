"""Attention in fp16 and bf16: fp32's results, rounded once, for every layout, mask and number of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler.kernels.wide import FORMS

pytestmark = pytest.mark.usefixtures("implementation")
aten: Any = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LOW = (torch.bfloat16, torch.float16)


def heads(batch: int, number: int, length: int, width: int, layout: str, dtype: torch.dtype) -> Tensor:
    if layout == "heads first":
        return torch.randn(batch, number, length, width).to(dtype)
    if layout == "tokens first":
        return torch.randn(batch, length, number, width).to(dtype).transpose(1, 2)
    return torch.randn(batch, length, 3, number, width).to(dtype)[:, :, 1].transpose(1, 2)


LAYOUTS = st.sampled_from(["heads first", "tokens first", "part of a projection"])


def masked(kind: str, batch: int, number: int, queries: int, keys: int) -> Tensor | None:
    """0 and -inf, one row of it all -inf; or numbers for every head, or the same ones for all of them."""
    if kind == "none":
        return None
    if kind == "for all":
        mask = torch.zeros(queries, keys).masked_fill(torch.rand(queries, keys) < 0.3, float("-inf"))
        mask[0] = float("-inf")
        return mask
    mask = torch.randn(batch, 1, queries, keys)
    return mask.expand(batch, number, queries, keys) if kind == "expanded" else mask.repeat(1, number, 1, 1)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Within one rounding, and the rounding of fp32's sums of numbers up to about 10."""
    bound = exact.abs() * torch.finfo(dtype).eps + 2.0**-18
    return bool(((got.float() - exact).abs() <= bound).all())


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), queries=st.sampled_from([1, 2, 4, 5, 33]),
    keys=st.sampled_from([1, 7, 8, 40]), width=st.sampled_from([3, 8, 16, 24]), layout=LAYOUTS,
    mask=st.sampled_from(["none", "for all", "expanded", "of each head"]), causal=st.booleans(),
    scale=st.sampled_from([None, 0.2]), dtype=st.sampled_from(LOW), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_forward_is_fp32s_rounded_once(
    sizes: tuple[int, int, int], queries: int, keys: int, width: int, layout: str, mask: str, causal: bool,
    scale: float | None, dtype: torch.dtype, threads: int,
) -> None:  # fmt: skip
    torch.manual_seed(queries + keys)
    batch, key_heads, group = sizes
    q = heads(batch, key_heads * group, queries, width, layout, dtype)
    k, v = (heads(batch, key_heads, keys, width, layout, dtype) for _ in range(2))
    given_mask = None if causal else masked(mask, batch, key_heads * group, queries, keys)
    low_mask = None if given_mask is None else given_mask.to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, logs = FORMS[FORWARD](q, k, v, 0.0, causal, attn_mask=low_mask, scale=scale)
    finally:
        torch.set_num_threads(before)
    native, native_logs = FORWARD(q, k, v, 0.0, causal, attn_mask=low_mask, scale=scale)
    wide = None if low_mask is None else low_mask.float()
    exact, exact_logs = FORWARD(q.float(), k.float(), v.float(), 0.0, causal, attn_mask=wide, scale=scale)
    assert (out.dtype, logs.dtype) == (native.dtype, native_logs.dtype)
    assert (out.stride(), logs.shape) == (native.stride(), native_logs.shape)
    assert close(out, exact, dtype)
    torch.testing.assert_close(logs, exact_logs, rtol=2.0**-20, atol=2.0**-18, equal_nan=True)


def magnitudes(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logs: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of the magnitudes that the three gradients add up: each addition is off by at most 2^-24 of them, and
    two kernels by twice that. A score that is off makes its probability so much larger or smaller."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.mT * scale + (0 if mask is None else mask)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    p = (scores - logs.unsqueeze(-1)).exp() * (1 + q.abs() @ k.abs().mT * scale)
    slopes = p * (g.abs() @ v.abs().mT + (g * o).abs().sum(-1, keepdim=True)) * scale

    def of_key_heads(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2)

    return slopes @ k.abs(), of_key_heads(slopes.mT @ q.abs()), of_key_heads(p.mT @ g.abs())


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)), queries=st.sampled_from([1, 5, 33]),
    keys=st.sampled_from([1, 7, 40]), width=st.sampled_from([3, 16]), layout=LAYOUTS,
    mask=st.sampled_from(["none", "expanded", "of each head"]), causal=st.booleans(), dtype=st.sampled_from(LOW),
)  # fmt: skip
def test_backward_is_fp32s_rounded_once(
    sizes: tuple[int, int, int], queries: int, keys: int, width: int, layout: str, mask: str, causal: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(queries + keys)
    batch, key_heads, group = sizes
    q, gradient = (heads(batch, key_heads * group, queries, width, layout, dtype) for _ in range(2))
    k, v = (heads(batch, key_heads, keys, width, layout, dtype) for _ in range(2))
    given_mask = None if causal else masked(mask, batch, key_heads * group, queries, keys)
    low_mask = None if given_mask is None else given_mask.to(dtype)
    wide = None if low_mask is None else low_mask.float()
    out, logs = FORWARD(q.float(), k.float(), v.float(), 0.0, causal, attn_mask=wide)
    rest = (logs, 0.0, causal)
    got = FORMS[BACKWARD](gradient, q, k, v, out.to(dtype), *rest, attn_mask=low_mask)
    floats = [x.float() for x in (gradient, q, k, v, out.to(dtype))]
    exact = BACKWARD(*floats, *rest, attn_mask=wide)
    for mine, theirs, sizes in zip(got, exact, magnitudes(*floats, logs, causal, wide), strict=True):
        assert (mine.dtype, mine.stride()) == (dtype, theirs.stride())
        bound = theirs.abs() * torch.finfo(dtype).eps + (queries + keys + width) * 2.0**-23 * sizes
        assert ((mine.float() - theirs).abs() <= bound).all()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("queries", [1, 200])
def test_more_heads_than_are_held_at_a_time(queries: int, dtype: torch.dtype) -> None:
    """Some heads of a batch, the rest of them, and then the next batch."""
    torch.manual_seed(0)
    q = torch.randn(2, 5, queries, 64).to(dtype)
    k, v = (torch.randn(2, 5, 300, 64).to(dtype) for _ in range(2))
    mask = torch.randn(2, 5, queries, 300).to(dtype)
    out, logs = FORMS[FORWARD](q, k, v, attn_mask=mask)
    exact, exact_logs = FORWARD(q.float(), k.float(), v.float(), attn_mask=mask.float())
    assert close(out, exact, dtype)
    torch.testing.assert_close(logs, exact_logs)
    gradient = torch.randn_like(q)
    got = FORMS[BACKWARD](gradient, q, k, v, out, logs, 0.0, False, attn_mask=mask)
    floats = [x.float() for x in (gradient, q, k, v, out)]
    for mine, theirs in zip(got, BACKWARD(*floats, logs, 0.0, False, attn_mask=mask.float()), strict=True):
        assert close(mine, theirs, dtype)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("queries", [1, 8])
def test_what_is_not_finite_shows(value: float, queries: int) -> None:
    q, k = torch.ones(1, 1, queries, 8, dtype=torch.bfloat16), torch.ones(1, 1, 9, 8, dtype=torch.bfloat16)
    k[0, 0, 3, 0] = value
    assert FORMS[FORWARD](q, k, torch.ones_like(k))[0].isnan().all()
