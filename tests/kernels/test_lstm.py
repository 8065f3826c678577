"""``amp::lstm_layer``: the numbers of its definition, the gradients of the function that it computes, any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amp_compiler.kernels.lstm import reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
op = torch.ops.amp.lstm_layer
pytestmark = pytest.mark.usefixtures("implementation")


def operands(length: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype, biases: bool = True) -> list:
    made = torch.Generator().manual_seed(length + 10 * batch + 100 * inputs + 1000 * hidden)
    shapes = [(length, batch, inputs), (batch, hidden), (batch, hidden), (4 * hidden, inputs), (4 * hidden, hidden)]
    shapes += [(4 * hidden,)] * 2 if biases else []
    found: list = [torch.randn(s, generator=made).mul(0.5).to(dtype) for s in shapes]
    return found if biases else [*found, None, None]


sizes = st.integers(1, 7)


def test_an_empty_batch() -> None:
    args = [a.requires_grad_() for a in operands(3, 0, 4, 5, BF16)]
    out, h, c, _, _ = op(*args, False)
    assert [t.shape for t in (out, h, c)] == [(3, 0, 5), (0, 5), (0, 5)]
    out.sum().backward()
    assert all(not a.grad.any() for a in args)


@settings(max_examples=40)
@given(length=sizes, batch=sizes, inputs=sizes, hidden=sizes, dtype=st.sampled_from([F32, F16, BF16]),
       biases=st.booleans(), reverse=st.booleans())  # fmt: skip
def test_it_is_its_definition(
    length: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype, biases: bool, reverse: bool
) -> None:
    args = operands(length, batch, inputs, hidden, dtype, biases)
    out, h, c, _, _ = op(*args, reverse)
    for own, wanted in zip((out, h, c), reference(*args, reverse), strict=True):
        assert own.dtype is wanted.dtype is dtype
        assert own.shape == wanted.shape
        # values are below 1 but for the cell's, which is below its start plus one a step; a state that fp32 and fp64
        # round to two neighbours is one step of the dtype apart, and weights below 2 carry that on
        bound = (4 * length * torch.finfo(dtype).eps) * (1 + length)
        assert (own - wanted).abs().max() <= bound
    assert torch.equal(h, out[0 if reverse else -1])


def loss_of(results: tuple[Tensor, ...]) -> Tensor:
    out, h, c = (r.double() for r in results[:3])
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return (out * weights).sum() + h.square().sum() + (2 * c).sin().sum()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("dtype", "roundings"), [(F32, 64), (F16, 32), (BF16, 32)])
def test_gradients_are_those_of_the_function(dtype: torch.dtype, roundings: int, reverse: bool) -> None:
    """Beside torch's own derivative of the same steps in fp64; each of five steps rounds a few times."""
    check_gradients(operands(5, 3, 4, 6, dtype), roundings, reverse)


def check_gradients(args: list, roundings: int, reverse: bool) -> None:
    dtype = args[0].dtype
    leaves = [a.clone().requires_grad_() for a in args]
    loss_of(op(*leaves, reverse)).backward()
    exact = [a.double().requires_grad_() for a in args]
    loss_of(reference(*exact, reverse)).backward()
    for own, wanted in zip(leaves, exact, strict=True):
        assert own.grad.dtype is dtype
        assert (own.grad - wanted.grad).abs().max() <= roundings * torch.finfo(dtype).eps * wanted.grad.abs().max()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dtype", "roundings"), [(F32, 64), (F16, 32), (BF16, 32)])
def test_few_rows_of_a_large_layer(dtype: torch.dtype, roundings: int, batch: int) -> None:
    """Where the weights are read as they are in memory, instead of packed."""
    args = operands(3, batch, 4, 264, dtype)
    args[4] = args[4] / 16  # sums of 264 values are as large as those of a few
    for own, wanted in zip(op(*args, False)[:3], reference(*args, False), strict=True):
        assert (own - wanted).abs().max() <= 48 * torch.finfo(dtype).eps
    check_gradients(args, roundings, True)


def test_activations_are_torchs() -> None:
    """One step whose gates are given: over the whole range, to a few units in the last place, and NaN stays NaN."""
    small = 10.0 ** torch.linspace(-30, 1, 500)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    values = torch.cat([torch.linspace(-100, 100, 1001), small, -small, special])
    n = len(values)
    zero = torch.zeros(1, n)
    bias = values.repeat(4)
    weights = torch.zeros(4 * n, 1), torch.zeros(4 * n, n)
    _, _, _, gates, _ = op(torch.zeros(1, 1, 1), zero, zero, *weights, bias, None, False)
    i, f, g, o = gates.view(4, n)
    exact = values.double()
    for own, wanted in ((i, exact.sigmoid()), (f, exact.sigmoid()), (g, exact.tanh()), (o, exact.sigmoid())):
        error = (own - wanted).abs()
        allowed = 3 * torch.finfo(F32).eps * wanted.abs() + 2e-38  # the least that exp gives is above the least number
        real = wanted.isfinite()
        assert (error[real] <= allowed[real]).all()
        assert own[~real].isnan().all()


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    args = operands(3, 2, 4, 5, BF16)
    args[4].requires_grad_()
    out, *_ = op(*args, False)
    out.sum().backward()
    assert args[4].grad is not None
    assert all(a.grad is None for i, a in enumerate(args) if i != 4)


def test_the_cell_is_not_rounded_on_its_way() -> None:
    """A gate that adds 2^-10 a step to a cell of 1: a bf16 cell would stay at 1 for ever."""
    length, big = 64, 40.0
    w = torch.zeros(4, 1, dtype=BF16)
    bias = torch.tensor([big, big, 2.0**-10, big], dtype=BF16)  # input, forget, cell, output
    start = torch.ones(1, 1, dtype=BF16)
    x = torch.zeros(length, 1, 1, dtype=BF16)
    _, _, c, _, cells = op(x, start, start, w, w, bias, None, False)
    assert torch.isclose(cells[-1], torch.tensor(1 + length * 2.0**-10), rtol=1e-4).all()
    assert c.item() == 1.0625


def test_what_only_a_backward_reads_is_left_out() -> None:
    args = operands(3, 2, 4, 5, BF16)
    whole, short = op(*args, False), op(*args, False, False)
    assert all(torch.equal(one, other) for one, other in zip(whole[:3], short[:3], strict=True))
    assert [len(x) for x in short[3:]] == [0, 0]


def test_other_dtypes_are_refused(implementation: str) -> None:
    args = [a.double() for a in operands(3, 2, 4, 5, F32)]
    told = "float32, float16 and bfloat16 on a CPU" if implementation == "compiled" else "same dtype"
    with pytest.raises(RuntimeError, match=told):
        op(*args, False)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_opcheck(dtype: torch.dtype) -> None:
    args = operands(3, 2, 4, 5, dtype)
    torch.library.opcheck(op.default, (*args, False))
    for a in args:
        a.requires_grad_()
    torch.library.opcheck(op.default, (*args, True))
