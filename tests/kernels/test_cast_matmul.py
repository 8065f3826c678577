"""amp::cast_matmul on a CPU: rounded operands, fp32 sums, one rounding; against fp64 within that arithmetic's bound."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from amp_compiler.kernels.cast_matmul import cast_matmul, reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOW = (F16, BF16)

pytestmark = pytest.mark.usefixtures("implementation")


def bound(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """K + 1 additions in fp32, each off by at most 2^-24 of the sum of magnitudes, then one rounding to ``out``."""
    sizes = a.to(dtype).double().abs() @ b.to(dtype).double().abs()
    if bias is not None:
        sizes = sizes + bias.to(dtype).double().abs()
    exact = reference(a, b, bias, dtype, F32).double().abs()
    sums = (a.shape[-1] + 2) * 2.0**-24 * sizes
    return sums + (exact + sums) * torch.finfo(out).eps + torch.finfo(out).tiny


def check(a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype, out: torch.dtype) -> None:
    result = cast_matmul(a, b, bias, dtype, out)
    assert result.dtype is out
    exact = a.to(dtype).double() @ b.to(dtype).double() + (0 if bias is None else bias.to(dtype).double())
    assert bool(((result.double() - exact).abs() <= bound(a, b, bias, dtype, out)).all())


@settings(max_examples=60)
@given(
    m=st.integers(0, 9), k=st.integers(0, 17), n=st.integers(0, 9), batch=st.sampled_from([0, 1, 3]),
    kinds=st.tuples(st.sampled_from([F32, F16, BF16]), st.sampled_from([F32, F16, BF16])),
    dtype=st.sampled_from(LOW), wide=st.booleans(), biased=st.booleans(),
    turned=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_dtype_and_order(
    m: int, k: int, n: int, batch: int, kinds: tuple[torch.dtype, torch.dtype], dtype: torch.dtype, wide: bool,
    biased: bool, turned: tuple[bool, bool], seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)

    def operand(rows: int, columns: int, kind: torch.dtype, turn: bool) -> Tensor:
        shape = (columns, rows) if turn else (rows, columns)
        x = torch.randn(*((batch, *shape) if batch else shape)).to(kind)
        return x.transpose(-1, -2) if turn else x

    a, b = operand(m, k, kinds[0], turned[0]), operand(k, n, kinds[1], turned[1])
    check(a, b, torch.randn(n) if biased else None, dtype, F32 if wide else dtype)


@settings(max_examples=40)
@given(
    sizes=st.tuples(*(st.sampled_from([1, 15, 16, 17, 32, 63, 64, 65, 100, 130]) for _ in range(3))),
    kinds=st.tuples(st.sampled_from([F32, F16, BF16]), st.sampled_from([F32, F16, BF16])),
    dtype=st.sampled_from(LOW), wide=st.booleans(), biased=st.booleans(),
    turned=st.tuples(st.booleans(), st.booleans()), gaps=st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_edges_of_blocks(
    sizes: tuple[int, int, int], kinds: tuple[torch.dtype, torch.dtype], dtype: torch.dtype, wide: bool, biased: bool,
    turned: tuple[bool, bool], gaps: tuple[bool, bool],
) -> None:  # fmt: skip
    """Sizes around those that the compiled kernel works in; operands that are columns of a wider matrix."""
    torch.manual_seed(sum(sizes))

    def operand(rows: int, columns: int, kind: torch.dtype, turn: bool, gap: bool) -> Tensor:
        lines, length = (columns, rows) if turn else (rows, columns)
        x = torch.randn(lines, length + 3 * gap).to(kind)[:, :length]
        return x.t() if turn else x

    m, k, n = sizes
    a, b = operand(m, k, kinds[0], turned[0], gaps[0]), operand(k, n, kinds[1], turned[1], gaps[1])
    check(a, b, torch.randn(n) if biased else None, dtype, F32 if wide else dtype)


@settings(max_examples=30)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=80), dtype=st.sampled_from(LOW), wide=st.booleans()
)  # fmt: skip
def test_any_number_is_rounded_as_torch_rounds_it(bits: list[int], dtype: torch.dtype, wide: bool) -> None:
    """Subnormal, infinite and not a number too; by rows (short lists) and by blocks (long ones)."""
    x = torch.tensor(bits, dtype=torch.int64).to(torch.uint32).view(F32).reshape(-1, 1)
    got = cast_matmul(x, torch.ones(1, 1), None, dtype, F32 if wide else dtype)
    assert torch.equal(got.float().nan_to_num(nan=7e37), x.to(dtype).float().nan_to_num(nan=7e37))
    turned = cast_matmul(torch.ones(1, 1), x.t(), None, dtype, F32)
    assert torch.equal(turned.t().nan_to_num(nan=7e37), x.to(dtype).float().nan_to_num(nan=7e37))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), rows=st.sampled_from([5, 40, 64]), dtype=st.sampled_from(LOW))
def test_a_sum_is_rounded_as_torch_rounds_it(seed: int, rows: int, dtype: torch.dtype) -> None:
    numbers = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    parts = (numbers * torch.tensor([1.0, 2.0**-9])).to(dtype)
    got = cast_matmul(parts, torch.ones(2, 3), torch.zeros(3), dtype, dtype)
    assert torch.equal(got[:, 0], (parts[:, 0].float() + parts[:, 1].float()).to(dtype))


#: rows, sum, columns: a few rows beside long and short strips; parts of the matrix by columns and by rows; with rests
LARGE = ((1, 2500, 41), (3, 70, 9000), (8, 300, 2100), (9, 2500, 300), (16, 2057, 7), (17, 100, 700), (31, 2500, 270),
         (64, 2100, 530), (257, 2100, 300), (1030, 2050, 24))  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_sizes_of_real_layers(sizes: tuple[int, int, int], threads: int) -> None:
    """Every order of both operands, low and fp32, with and without a bias and a low-precision result."""
    torch.manual_seed(sum(sizes))
    m, k, n = sizes
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for number, (dtype, turn_a, turn_b) in enumerate(itertools.product(LOW, (False, True), (False, True))):
            left = a.to(dtype if number % 3 else F32)
            right = b.to(F32 if number % 2 else dtype)
            left = left.t().contiguous().t() if turn_a else left
            right = right.t().contiguous().t() if turn_b else right
            check(left, right, bias if number % 4 < 2 else None, dtype, dtype if number % 5 else F32)
    finally:
        torch.set_num_threads(before)


def test_one_matrix_for_a_whole_batch() -> None:
    """torch's `linear` gives an input that is turned so: the matrix is expanded, with a stride of 0."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 6, 16).transpose(0, 1), torch.randn(16, 5).expand(6, 16, 5)
    check(a, b, None, BF16, BF16)
    a, b = torch.randn(3, 6, 8, 16)[1], torch.randn(3, 16, 5)[1].expand(6, 16, 5)  # views of larger tensors
    check(a, b, None, BF16, BF16)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads(threads: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(torch.randn(200, 300), torch.randn(70, 300).t(), torch.randn(70), F16, F16)
        check(torch.randn(300, 200).t(), torch.randn(300, 70), None, BF16, F32)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=25)
@given(
    rows=st.integers(17, 300), columns=st.integers(17, 300), k=st.sampled_from([1, 64, 768, 769, 1100]),
    turned=st.booleans(), threads=st.sampled_from([1, 2, 3]), data=st.data(),
)  # fmt: skip
def test_a_result_does_not_depend_on_its_neighbours(
    implementation: str, rows: int, columns: int, k: int, turned: bool, threads: int, data: st.DataObject
) -> None:
    """Nor on the number of threads, nor on which operand is packed: a sum is added up in one order."""
    torch.manual_seed(0)
    a, b = torch.randn(rows, k), torch.randn(columns, k).t() if turned else torch.randn(k, columns)
    some, few = data.draw(st.integers(17, rows)), data.draw(st.integers(1, columns))
    if implementation == "python":  # torch's own product adds up in an order of its own: within the bound
        return check(a[:some], b[:, :few], None, BF16, F32)
    before = torch.get_num_threads()
    whole = cast_matmul(a, b, None, BF16, F32)
    torch.set_num_threads(threads)
    try:
        part = cast_matmul(a[:some], b[:, :few], None, BF16, F32)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(part, whole[:some, :few])


@settings(max_examples=60)
@given(
    sizes=st.tuples(*(st.sampled_from([1, 3, 15, 16, 17, 33, 64, 65, 130]) for _ in range(3))),
    batch=st.sampled_from([0, 1, 3]), expanded=st.booleans(), low=st.sampled_from(LOW),
    steps=st.tuples(st.booleans(), st.booleans(), st.booleans()), biased=st.booleans(), turned=st.booleans(),
    gap=st.booleans(), threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_what_follows_a_product_rounds_as_an_op_of_its_own(
    sizes: tuple[int, int, int], batch: int, expanded: bool, low: torch.dtype, steps: tuple[bool, bool, bool],
    biased: bool, turned: bool, gap: bool, threads: int,
) -> None:  # fmt: skip
    torch.manual_seed(sum(sizes))
    m, k, n = sizes
    lead = (batch,) if batch else ()
    a, b = torch.randn(*lead, m, k), torch.randn(n, k).t() if turned else torch.randn(k, n)
    if batch:
        b = b.expand(batch, k, n) if expanded else torch.randn(batch, k, n)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6e4])
    plus, times = (torch.randn(*lead, m, n + gap)[..., :n].to(low) for _ in range(2))
    for other in (plus, times):
        flat = other if gap else other.view(-1, n)
        flat[..., 0, : min(n, 6)] = special[: min(n, 6)].to(low)
    then = {"plus": plus if steps[0] else None, "times": times if steps[1] else None, "relu": steps[2]}
    bias = torch.randn(n) if biased else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = torch.ops.amp.cast_matmul(a, b, bias, low, low, **then)
        expected = torch.ops.amp.cast_matmul(a, b, bias, low, low)
    finally:
        torch.set_num_threads(before)
    expected = expected + plus if steps[0] else expected
    expected = expected * times if steps[1] else expected
    expected = expected.relu() if steps[2] else expected
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~got.isnan()
    assert torch.equal(got[number].view(torch.int16), expected[number].view(torch.int16))  # the sign of 0 too


@pytest.mark.parametrize("given", [{"plus": torch.zeros(3, 3)}, {"times": torch.zeros(2, 5, dtype=BF16)}], ids=str)
def test_what_does_not_fit_a_result_is_refused(given: dict[str, Tensor]) -> None:
    with pytest.raises(RuntimeError):
        torch.ops.amp.cast_matmul(torch.ones(3, 2), torch.ones(2, 3), None, BF16, BF16, **given)


def test_operands_are_rounded_and_the_result_once() -> None:
    a = torch.tensor([[1 + 2**-9]])  # rounds to 1 in bf16
    assert cast_matmul(a, torch.tensor([[1.0]]), None, BF16, F32).item() == 1.0
    ones = torch.ones(1, 257)
    assert cast_matmul(ones, ones.t(), None, BF16, F32).item() == 257.0  # added up in fp32
    assert cast_matmul(ones, ones.t(), None, BF16, BF16).item() == 256.0  # and then rounded to even


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e6])
def test_what_is_not_finite_shows(value: float) -> None:
    """1e6 does not fit fp16: it is infinite as an operand, as after a cast."""
    a = torch.tensor([[value, 1.0]])
    assert not cast_matmul(a, torch.ones(2, 1), None, F16, F32).isfinite().any()


@pytest.mark.parametrize("dtype", LOW)
def test_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, bias = (torch.randn(*s, requires_grad=True) for s in ((4, 3), (3, 5), (5,)))
    out = torch.randn(4, 5)
    got = torch.autograd.grad(cast_matmul(a, b, bias, dtype, dtype).float(), (a, b, bias), out)
    low = [x.detach().to(dtype).float() for x in (a, b, out)]
    expected = (low[2] @ low[1].t(), low[0].t() @ low[2], low[2].sum(0))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=8 * 2.0**-22)  # up to 5 products of numbers up to 4


def test_torch_itself_finds_nothing_wrong() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2, dtype=BF16)
    opcheck(torch.ops.amp.cast_matmul.default, (a, b, torch.randn(2), BF16, F32))
    opcheck(torch.ops.amp.cast_matmul.default, (a[None], b[None], None, BF16, BF16))
    then = {"plus": torch.randn(3, 2, dtype=BF16), "times": torch.randn(3, 2, dtype=BF16), "relu": True}
    opcheck(torch.ops.amp.cast_matmul.default, (a, b, None, BF16, BF16), then)


def test_compiled() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    run = torch.compile(lambda a, b: cast_matmul(a, b, None, F16, F32) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(a, b), cast_matmul(a, b, None, F16, F32) * 2)


def test_inference_mode_then_training() -> None:
    """Scratch memory is kept from call to call; a tensor made under inference mode cannot be written outside it."""
    shape = (37, 41)  # of no other test
    with torch.inference_mode():
        first = cast_matmul(torch.ones(shape), torch.ones(shape).t(), None, BF16, BF16)
    second = cast_matmul(torch.ones(shape, requires_grad=True), torch.ones(shape).t(), None, BF16, BF16)
    assert first.is_inference()
    assert not second.is_inference()
    assert torch.equal(first, second)
