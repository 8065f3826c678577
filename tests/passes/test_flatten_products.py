"""flatten_products: a linear layer's rows are multiplied at once, and its bias is added in the product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from amp_compiler import Policy, amp_compile, ir
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes import flatten_products, fold_casts
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, check_pass, context, functional

PASS = flatten_products.PASS
X, W = torch.randn(3, 2, 4).to(BF16), torch.randn(5, 4).to(BF16)


def ops(gm: fx.GraphModule) -> list[str]:
    return [ir.op_name(n) for n in gm.graph.nodes if n.op == "call_function" and not ir.is_getitem(n)]


def folded(fn: Any, *inputs: Tensor) -> fx.GraphModule:
    gm = functional(fn, *inputs)
    fold_casts.PASS.run(gm, context())
    return gm


def repeated(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), w.t().expand(2, 4, 5))


def test_a_batch_of_products_with_one_matrix_is_one_product() -> None:
    check_pass(PASS, folded(repeated, X, W), modified=True, expected_text="""
        input x_1: bf16[3, 2, 4]
        input w_1: bf16[5, 4]
        transpose: bf16[2, 3, 4] = transpose.int(x_1, 0, 1)
        t: bf16[4, 5] = t(w_1)
        clone_default: bf16[2, 3, 4] = clone(transpose, memory_format=torch.contiguous_format)
        view_default: bf16[6, 4] = view(clone_default, [-1, 4])
        mm_default: bf16[6, 5] = mm(view_default, t)
        view_default_1: bf16[2, 3, 5] = view(mm_default, [2, 3, 5])
        return view_default_1
    """)  # fmt: skip


def test_rows_that_follow_each_other_are_not_copied() -> None:
    gm = check_pass(PASS, folded(lambda x, w: torch.bmm(x, w.t().expand(3, 4, 5)), X, W), modified=True)
    assert ops(gm) == ["t", "view", "mm", "view"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: torch.bmm(x, x.transpose(1, 2)),  # matrices that differ
        lambda x, w: torch.bmm(x.float(), w.float().t().expand(3, 4, 5)),  # fp32, which MKL multiplies without copies
        lambda x, w: torch.bmm(x[:0], w.t().expand(0, 4, 5)),  # nothing to multiply
        lambda x, w: (x @ w.t()) + w[:, 0].sin(),  # the author's own sum, which rounds twice
    ],
    ids=["other-matrices", "fp32", "empty", "own-sum"],
)
def test_what_stays(fn: Any) -> None:
    check_pass(PASS, folded(fn, X, W), modified=False)


def test_stays_for_the_policy_that_reproduces_autocast() -> None:
    policy = Policy.torch("cpu", BF16)
    gm = folded(repeated, X, W)
    assert not PASS.run(gm, context(policy=policy))


def test_needs_folded_casts() -> None:
    with pytest.raises(PipelineError, match="folded"):
        Pipeline((PASS,), (facts.FUNCTIONAL,))


@given(
    order=st.permutations([0, 1, 2]), sizes=st.tuples(*[st.integers(1, 4)] * 3), columns=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_any_layout_gives_the_same_numbers(order: list[int], sizes: tuple[int, ...], columns: int) -> None:
    x = torch.randn(sizes).permute(order).to(BF16)
    w = torch.randn(columns, x.shape[-1]).to(BF16)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x, w.t().expand(x.shape[0], x.shape[2], columns))

    gm = check_pass(PASS, folded(fn, x, w), modified=True)
    exact = x.double() @ w.double().t()
    assert gm(x, w).stride() == fn(x, w).stride()
    assert ((gm(x, w).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


# ------------------------------------------------------------------------------------------- in a compiled model


class Turned(nn.Module):
    """A layer that gets its input as `nn.TransformerEncoder` gives it to its layers' attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(0, 1))


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_an_input_with_another_layout_gets_the_numbers_of_a_contiguous_one(trains: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    turned, plain = Turned(), Turned()
    plain.load_state_dict(turned.state_dict())
    fast = amp_compile(turned, dtype=BF16, backend="eager", dynamic=dynamic)
    same = amp_compile(nn.Sequential(plain.fc), dtype=BF16, backend="eager", dynamic=dynamic)
    for batch in (3, 5):
        x = torch.randn(batch, 6, 16)
        with torch.set_grad_enabled(trains):
            got, expected = fast(x), same(x.transpose(0, 1).contiguous())
        assert torch.equal(got, expected)
        if trains:
            got.sum().backward()
            expected.sum().backward()
            assert turned.fc.weight.grad is not None
            assert plain.fc.weight.grad is not None
            torch.testing.assert_close(turned.fc.weight.grad, plain.fc.weight.grad)
    text = fast.history[-1].text
    assert "addmm" in text
    assert "bmm(" not in text


def test_a_transformer_encoder_has_no_batches_of_one_matrix() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    fast = amp_compile(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), dtype=BF16, backend="eager")
    with torch.inference_mode():
        fast(torch.randn(2, 5, 16))
    assert " bmm(" not in fast.history[-1].text


def test_a_half_empty_batch_runs() -> None:
    fast = amp_compile(Turned(), dtype=BF16, backend="eager", dynamic=True)
    with torch.no_grad():
        assert fast(torch.randn(4, 6, 16)).shape == (6, 4, 8)
        assert fast(torch.randn(0, 6, 16)).shape == (6, 0, 8)


def test_torchs_own_layer_agrees() -> None:
    torch.manual_seed(0)
    model = Turned()
    x = torch.randn(3, 6, 16)
    with torch.no_grad():
        exact = F.linear(x.transpose(0, 1), model.fc.weight, model.fc.bias)
        got = amp_compile(model, dtype=torch.float16, backend="eager")(x)
    torch.testing.assert_close(got, exact, atol=1e-2, rtol=1e-2)
