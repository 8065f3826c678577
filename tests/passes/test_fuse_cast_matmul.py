"""fuse_cast_matmul and lower_kernels: casts go into the products that read them, and a CPU computes low ops in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_compiler import Policy, ir
from amp_compiler.common.errors import PipelineError
from amp_compiler.kernels import cpu
from amp_compiler.passes import fold_casts, fuse_cast_matmul, lower_kernels, scale_loss
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, F16, F32, casts, check_pass, context, functional, joint, step_graph

X, W, B = torch.randn(4, 3), torch.randn(5, 3), torch.randn(5)
FUSE, LOWER = fuse_cast_matmul.PASS, lower_kernels.PASS


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.SETTING, "wide")


def ops(gm: fx.GraphModule) -> list[str]:
    return [ir.op_name(n) for n in gm.graph.nodes if n.op == "call_function" and not ir.is_getitem(n)]


def folded(fn: Any, *inputs: Tensor) -> fx.GraphModule:
    gm = functional(fn, *inputs)
    fold_casts.PASS.run(gm, context())
    return gm


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b.to(BF16), x.to(BF16), w.to(BF16).t())


def test_casts_of_inputs_go_into_the_product() -> None:
    check_pass(FUSE, folded(linear, X, W, B), modified=True, expected_text="""
        input x_1: f32[4, 3]
        input w_1: f32[5, 3]
        input b_1: f32[5]
        t_default: f32[3, 5] = t(w_1)
        cast_matmul_default: bf16[4, 5] = cast_matmul(x_1, t_default, b_1, bf16, bf16)
        return cast_matmul_default
    """)  # fmt: skip


def test_the_numbers_are_a_low_products() -> None:
    gm = check_pass(FUSE, folded(linear, X, W, B), modified=True)
    low = [t.to(BF16).double() for t in (X, W, B)]
    exact = low[0] @ low[1].t() + low[2]
    error = (gm(X, W, B).double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + 1e-5).all())  # half an ulp of bf16, and fp32's sums of four


def test_a_low_copy_that_is_needed_elsewhere_is_read() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        low = x.to(BF16)
        return low @ w.to(BF16).t(), low.sin()

    gm = check_pass(FUSE, folded(fn, X, W), modified=True)
    assert [ir.cast_source(n).name for n in casts(gm)] == ["x_1"]
    product = next(n for n in gm.graph.nodes if ir.op_name(n) == "amp::cast_matmul")
    assert product.args[0].meta["val"].dtype is BF16
    assert product.args[1].meta["val"].dtype is F32


def test_a_value_of_the_graph_is_not_kept_wide_for_two_readers() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        low = x.sin().to(BF16)
        return low @ w.to(BF16).t(), low @ w.to(BF16).t() * 2

    gm = check_pass(FUSE, folded(fn, X, W), modified=True)
    assert [ir.cast_source(n).name for n in casts(gm)] == ["sin"]


def test_fp32_products_stay() -> None:
    check_pass(FUSE, folded(lambda x, w: x @ w.t(), X, W), modified=False)


def test_low_operands_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to fuse: only a CPU that computes in fp32 takes it."""
    gm = folded(lambda x, w: x @ w.t(), X.to(BF16), W.to(BF16))
    monkeypatch.setenv(cpu.SETTING, "native")
    check_pass(FUSE, gm, modified=False)
    monkeypatch.setenv(cpu.SETTING, "wide")
    check_pass(FUSE, gm, modified=True)
    assert "amp::cast_matmul" in ops(gm)


def test_scaled_sums_stay() -> None:
    fn = lambda x, w, b: torch.addmm(b.to(BF16), x.to(BF16), w.to(BF16).t(), beta=2)  # noqa: E731
    check_pass(FUSE, folded(fn, X, W, B), modified=False)


def test_autocasts_own_numerics_are_left_alone() -> None:
    torch_policy = context(policy=Policy.torch("cpu", BF16))
    assert FUSE.run(folded(linear, X, W, B), torch_policy) is False
    conv = folded(lambda x, w: torch.conv1d(x, w), torch.randn(1, 2, 5).half(), torch.randn(3, 2, 2).half())
    assert LOWER.run(conv, torch_policy) is False


def test_a_weight_gradient_comes_out_in_fp32() -> None:
    w = W.clone().requires_grad_()
    gm = step_graph(lambda w, x: (x.to(BF16) @ w.to(BF16).t()).float().pow(2).mean(), w, X)
    scale_loss.PASS.run(gm, context())
    fold_casts.PASS.run(gm, context())
    check_pass(FUSE, gm, modified=True)
    (unscale,) = [n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale"]
    assert [n.meta["val"].dtype for n in unscale.args[0]] == [F32]
    assert all(ir.cast_source(n).name not in ("p0", "p1") for n in casts(gm))


def test_a_gradient_that_something_else_reads_is_rounded() -> None:
    gm = folded(lambda x, w: (lambda y: (y.float(), y.sin()))(x.to(BF16) @ w.to(BF16).t()), X, W)
    check_pass(FUSE, gm, modified=True)
    assert next(n for n in gm.graph.nodes if ir.op_name(n) == "amp::cast_matmul").meta["val"].dtype is BF16


@settings(max_examples=20)
@given(batch=st.integers(0, 3), low=st.sampled_from([BF16, F16]), turned=st.booleans(), seed=st.integers(0, 50))
def test_any_product(batch: int, low: torch.dtype, turned: bool, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (batch,) if batch else ()
    a, b = torch.randn(*shape, 4, 3), torch.randn(*shape, 5, 3) if turned else torch.randn(*shape, 3, 5)

    def fn(a: Tensor, b: Tensor) -> Tensor:
        right = b.to(low).transpose(-1, -2) if turned else b.to(low)
        return torch.bmm(a.to(low), right) if batch else torch.mm(a.to(low), right)

    gm = check_pass(FUSE, folded(fn, a, b), modified=True)
    assert casts(gm) == []
    wide = b.to(low).float()
    exact = (a.to(low).float() @ (wide.transpose(-1, -2) if turned else wide)).to(low)
    torch.testing.assert_close(gm(a, b), exact, rtol=torch.finfo(low).eps, atol=1e-6)  # sums in another order


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Attention written by hand: heads that lie side by side are copied apart for the product."""
    q, k = (x.view(2, 6, 3, 4).transpose(1, 2) for x in (q, k))
    return q @ k.transpose(-1, -2)


Q, K = torch.randn(2, 6, 12).to(BF16), torch.randn(2, 6, 12).to(BF16)


def test_an_operand_is_copied_in_its_own_order() -> None:
    check_pass(FUSE, folded(scores, Q, K), modified=True, expected_text="""
        input q_1: bf16[2, 6, 12]
        input k_1: bf16[2, 6, 12]
        view: bf16[2, 6, 3, 4] = view(q_1, [2, 6, 3, 4])
        transpose: bf16[2, 3, 6, 4] = transpose.int(view, 1, 2)
        view_1: bf16[2, 6, 3, 4] = view(k_1, [2, 6, 3, 4])
        transpose_1: bf16[2, 3, 6, 4] = transpose.int(view_1, 1, 2)
        expand: bf16[2, 3, 6, 4] = expand(transpose, [2, 3, 6, 4])
        clone: bf16[2, 3, 6, 4] = clone(expand, memory_format=torch.contiguous_format)
        _unsafe_view: bf16[6, 6, 4] = _unsafe_view(clone, [6, 6, 4])
        clone_default: bf16[2, 3, 6, 4] = clone(transpose_1, memory_format=torch.contiguous_format)
        _unsafe_view_default: bf16[6, 6, 4] = _unsafe_view(clone_default, [6, 6, 4])
        permute_default: bf16[6, 4, 6] = permute(_unsafe_view_default, [0, 2, 1])
        cast_matmul_default: bf16[6, 6, 6] = cast_matmul(_unsafe_view, permute_default, None, bf16, bf16)
        _unsafe_view_2: bf16[2, 3, 6, 6] = _unsafe_view(cast_matmul_default, [2, 3, 6, 6])
        return _unsafe_view_2
    """)  # fmt: skip


def test_a_transposed_copy_that_something_else_reads_stays() -> None:
    def fn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (x.view(2, 6, 3, 4).transpose(1, 2) for x in (q, k))
        turned = k.transpose(-1, -2).reshape(6, 4, 6)
        return torch.bmm(q.reshape(6, 6, 4), turned), turned.view(-1)

    gm = check_pass(FUSE, folded(fn, Q, K), modified=True)
    torch.testing.assert_close(gm(Q, K), fn(Q, K))


def test_the_backward_reads_the_same_copy() -> None:
    fn = lambda q, k: scores(q.to(BF16), k.to(BF16))  # noqa: E731
    gm = joint(fn, Q.float(), K.float())
    fold_casts.PASS.run(gm, context())
    before = ops(gm).count("aten::clone")
    expected = gm(Q.float(), K.float())
    check_pass(FUSE, gm, modified=True)
    found = [n for n in gm.graph.nodes if ir.op_name(n) == "aten::clone"]
    assert len(found) == before
    for node in found:  # none reads its source across its rows
        assert node.args[0].meta["val"].stride(-1) == 1
    torch.testing.assert_close(gm(Q.float(), K.float()), expected)


@settings(max_examples=20)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), rows=st.integers(1, 5), width=st.integers(1, 5),
    left=st.booleans(), dynamic=st.booleans(), low=st.sampled_from([BF16, F16]),
)  # fmt: skip
def test_copies_in_any_order(
    batch: int, heads: int, rows: int, width: int, left: bool, dynamic: bool, low: torch.dtype
) -> None:
    def fn(q: Tensor, k: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (heads, width)).transpose(1, 2) for x in (q, k))
        return q.transpose(-1, -2) @ k if left else q @ k.transpose(-1, -2)

    q, k = torch.randn(2, batch, rows, heads * width).to(low)
    gm = functional(fn, q, k, dynamic=dynamic)
    fold_casts.PASS.run(gm, context())
    check_pass(FUSE, gm, modified=True)
    torch.testing.assert_close(gm(q, k), fn(q, k), rtol=2 * torch.finfo(low).eps, atol=1e-3)


# ---------------------------------------------------------------------------------------- lower_kernels


def test_convolution_and_attention_are_lowered() -> None:
    # small integers, whose sums are exact in any order
    image, kernel = torch.randint(-3, 4, (1, 2, 5, 5)).half(), torch.randint(-3, 4, (3, 2, 3, 3)).half()
    heads = torch.randn(1, 2, 4, 8).half()

    def fn(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.conv2d(x, w), torch.nn.functional.scaled_dot_product_attention(q, q, q)

    gm = check_pass(LOWER, folded(fn, image, kernel, heads), modified=True)
    attention = "amp::wide_scaled_dot_product_flash_attention_for_cpu"
    assert [op for op in ops(gm) if op.startswith("amp::")] == ["amp::wide_convolution", attention]
    got, wide = gm(image, kernel, heads), fn(image.float(), kernel.float(), heads.float())
    assert torch.equal(got[0], wide[0].half())
    torch.testing.assert_close(got[1], wide[1].half(), rtol=torch.finfo(torch.half).eps, atol=1e-6)  # another order


def test_a_layer_computes_for_a_backward_only_what_something_reads() -> None:
    sizes = (3, 2, 4), (2, 5), (2, 5), (20, 4), (20, 5)
    args = [torch.randn(size).half() for size in sizes]

    def forward(*args: Tensor) -> Tensor:
        return torch.ops.amp.lstm_layer(*args, None, None, False)[0] * 2

    def saving(*args: Tensor) -> tuple[Tensor, Tensor]:
        out, _, _, gates, _ = torch.ops.amp.lstm_layer(*args, None, None, False)
        return out, gates

    gm = check_pass(LOWER, folded(forward, *args), modified=True)
    (layer,) = (node for node in gm.graph.nodes if node.target is torch.ops.amp.lstm_layer.default)
    assert layer.kwargs == {"keeps": False}
    assert torch.equal(gm(*args), forward(*args))
    gm = check_pass(LOWER, folded(saving, *args), modified=False)
    assert torch.equal(gm(*args)[1], saving(*args)[1])


def test_native_and_fp32_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    image, kernel = torch.randn(1, 2, 5), torch.randn(3, 2, 3)
    check_pass(LOWER, folded(torch.conv1d, image, kernel), modified=False)
    monkeypatch.setenv(cpu.SETTING, "native")
    check_pass(LOWER, folded(torch.conv1d, image.half(), kernel.half()), modified=False)


def test_they_come_after_folding() -> None:
    for pass_ in (FUSE, LOWER):
        with pytest.raises(PipelineError, match="needs 'folded'"):
            Pipeline((pass_,), (facts.FUNCTIONAL,))
