"""``amp::unscale`` and its in-place twin against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import profile

from amp_compiler.kernels.unscale import _unscale, reference, unscale, unscale_

INF, NAN = math.inf, math.nan
F16, BF16, F32, F64, C64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64

pytestmark = pytest.mark.usefixtures("implementation")


def flag(value: float = 0.0, shape: tuple[int, ...] = (1,)) -> Tensor:
    return torch.full(shape, value)


def equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, layout and values, NaN equal to NaN."""
    if a.dtype != b.dtype or a.layout != b.layout or a.shape != b.shape:
        return False
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "out"), [(F16, F32), (BF16, F32), (F32, F32), (F64, F64), (C64, C64)])
def test_dtypes(dtype: torch.dtype, out: torch.dtype) -> None:
    (result,), found = unscale([torch.tensor([[8.0, -2.0]], dtype=dtype)], torch.tensor(0.25), flag())
    assert result.dtype == out
    assert torch.equal(result, torch.tensor([[2.0, -0.5]], dtype=out))
    assert found.tolist() == [0.0]


def test_small_fp16_values_survive_in_fp32() -> None:
    (result,), _ = unscale([torch.tensor([1.0], dtype=F16)], torch.tensor(2.0**-30), flag())
    assert result.item() == 2.0**-30


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64, C64])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_found(dtype: torch.dtype, value: float) -> None:
    bad = torch.tensor([1.0, value], dtype=dtype)
    for grads in ([bad], [torch.ones(2), bad], [bad, torch.ones(2)]):
        assert unscale(grads, torch.tensor(0.5), flag())[1].tolist() == [1.0]


def test_found_before_stays_found() -> None:
    assert unscale([torch.ones(2)], torch.tensor(0.5), flag(1.0))[1].tolist() == [1.0]
    assert unscale([], torch.tensor(0.5), flag(1.0))[1].tolist() == [1.0]
    assert unscale([], torch.tensor(0.5), flag())[1].tolist() == [0.0]


def test_only_the_values_before_count() -> None:
    """A scale below 1 can push a finite gradient over the edge: the model is not to blame."""
    (result,), found = unscale([torch.tensor([3e38])], torch.tensor(4.0), flag())
    assert result.item() == INF
    assert found.tolist() == [0.0]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_shape_of_the_flag(shape: tuple[int, ...]) -> None:
    assert unscale([torch.ones(2)], torch.tensor(0.5), flag(shape=shape))[1].shape == shape


@pytest.mark.parametrize("inv_scale", [torch.tensor(0.5), torch.tensor([0.5])])
def test_shape_of_the_scale(inv_scale: Tensor) -> None:
    assert unscale([torch.ones(2)], inv_scale, flag())[0][0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("inverse", [1.0, 0.5])
def test_functional(inverse: float) -> None:
    grads = [torch.ones(3), torch.ones(3, dtype=F64), torch.ones(2, dtype=C64), torch.ones(2, dtype=F16), sparse(F32)]
    found, versions = flag(), [g._version for g in grads]
    results, found_out = unscale(grads, torch.tensor(inverse), found)
    assert [g._version for g in grads] == versions
    assert found._version == 0
    for result in (*results, found_out):
        (result._values() if result.is_sparse else result).fill_(7.0)
    assert all((g.to_dense() <= 2).all() for g in grads if not g.is_complex())
    assert found.tolist() == [0.0]


def test_memory_format_is_kept() -> None:
    grads = [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(3, 5, dtype=F16).t()]
    results, _ = unscale(grads, torch.tensor(0.5), flag())
    assert [r.stride() for r in results] == [g.stride() for g in grads]


def sparse(dtype: torch.dtype, values: tuple[float, ...] = (1.0, 1.0), indices: tuple[int, ...] = (1, 1)) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([indices]), torch.tensor(values, dtype=dtype), (4,), check_invariants=True
    )


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_sparse(dtype: torch.dtype) -> None:
    (result,), found = unscale([sparse(dtype)], torch.tensor(0.25), flag())
    assert result.is_sparse
    assert result.to_dense().tolist() == [0.0, 0.5, 0.0, 0.0]
    assert found.tolist() == [0.0]


def test_sparse_entries_that_overflow_together() -> None:
    grad = sparse(F16, (64000.0, 64000.0))
    assert unscale([grad], torch.tensor(0.25), flag())[1].tolist() == [1.0]
    found = flag()
    unscale_([grad], torch.tensor(0.25), found)
    assert found.tolist() == [1.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_csr() -> None:
    (result,), _ = unscale([torch.eye(2).to_sparse_csr()], torch.tensor(0.5), flag())
    assert result.to_dense().tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_conjugate() -> None:
    grad = torch.tensor([1 + 2j]).conj()
    assert unscale([grad], torch.tensor(0.5), flag())[0][0].tolist() == [0.5 - 1j]
    with pytest.raises(TypeError, match="resolve_conj"):
        unscale_([grad], torch.tensor(0.5), flag())


# ------------------------------------------------------------------------------------------ in place


def test_in_place_with_all_kinds() -> None:
    grads = [
        torch.ones(2, dtype=F16),
        torch.ones(2, dtype=BF16),
        torch.ones(2),
        torch.ones(2, dtype=F64),
        torch.ones(2, dtype=C64),
        sparse(F16),
        sparse(F32),
        torch.ones(4, 4)[::2, ::2],
    ]
    dtypes, found = [g.dtype for g in grads], flag(shape=())
    unscale_(grads, torch.tensor(0.25), found)
    assert [g.dtype for g in grads] == dtypes
    assert found.item() == 0.0
    for grad in grads[:5]:
        assert grad.tolist() == [0.25, 0.25]
    assert [g.to_dense().tolist() for g in grads[5:7]] == [[0.0, 0.5, 0.0, 0.0]] * 2
    assert (grads[7] == 0.25).all()


def test_in_place_accumulates_the_flag() -> None:
    found = flag()
    unscale_([torch.tensor([NAN])], torch.tensor(0.5), found)
    unscale_([torch.ones(1)], torch.tensor(0.5), found)
    assert found.tolist() == [1.0]


def test_in_place_on_gradients_with_history() -> None:
    weight = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    unscale_([grad], torch.tensor(0.5), flag())
    assert grad.tolist() == [1.5, 1.5]


def test_no_read_on_the_host() -> None:
    with profile() as trace:
        unscale([torch.ones(3), torch.tensor([INF], dtype=F16)], torch.tensor(0.5), flag())
        unscale_([torch.ones(3), torch.tensor([INF], dtype=F16)], torch.tensor(0.5), flag())
    assert "aten::_local_scalar_dense" not in {event.key for event in trace.key_averages()}


# ------------------------------------------------------------------------------------------ graphs


def test_fake() -> None:
    with FakeTensorMode():
        grads = [torch.empty(2, 3, dtype=F16, device="cuda").t(), torch.empty(4, dtype=F64, device="cuda")]
        results, found = torch.ops.amp.unscale(grads, torch.tensor(0.5, device="cuda"), torch.zeros(1, device="cuda"))
    assert [(r.dtype, r.shape, r.stride(), r.device.type) for r in results] == [
        (F32, (3, 2), (1, 3), "cuda"),
        (F64, (4,), (1,), "cuda"),
    ]
    assert (found.dtype, found.shape) == (F32, (1,))


def test_in_a_graph() -> None:
    def step(x: Tensor, inv_scale: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), found = unscale([x], inv_scale, found)
        return grad, found

    graph = make_fx(step, tracing_mode="symbolic")(torch.ones(3, dtype=F16), torch.tensor(0.5), flag())
    assert torch.ops.amp.unscale.default in [n.target for n in graph.graph.nodes]
    grad, found = graph(torch.tensor([4.0, INF], dtype=F16), torch.tensor(0.25), flag())
    assert grad.tolist() == [1.0, INF]
    assert found.tolist() == [1.0]


def test_compiled() -> None:
    compiled = torch.compile(lambda x, s, f: unscale([x * 2, x], s, f), backend="aot_eager", fullgraph=True)
    (doubled, plain), found = compiled(torch.tensor([1.0, NAN]), torch.tensor(0.5), flag())
    assert equal(doubled, torch.tensor([1.0, NAN]))
    assert equal(plain, torch.tensor([0.5, NAN]))
    assert found.tolist() == [1.0]


def test_op() -> None:
    grads = [torch.ones(2), torch.ones(2, 3).t().half(), torch.ones(2, dtype=F64)]
    torch.library.opcheck(torch.ops.amp.unscale.default, (grads, torch.tensor(0.5), flag()))
    torch.library.opcheck(torch.ops.amp.unscale_.default, (grads, torch.tensor(0.5), flag()))


numbers = st.sampled_from([0.0, -0.0, 1.0, -2.5, 6e-8, 60000.0, 3e38, 1e-45, INF, -INF, NAN])


@given(
    st.lists(st.tuples(st.sampled_from([F16, BF16, F32, F64, C64]), st.lists(numbers, max_size=4)), max_size=4),
    st.sampled_from([1.0, 2.0**-16, 1 / 3, 4.0, 1e-38]),
    st.sampled_from([0.0, 1.0]),
)
def test_like_the_reference(spec: list[tuple[torch.dtype, list[float]]], inverse: float, before: float) -> None:
    grads = [torch.tensor(values, dtype=F64).to(dtype) for dtype, values in spec]
    inv_scale = torch.tensor(inverse)
    expected, expected_found = reference(grads, inv_scale, flag(before))
    results, found = unscale(grads, inv_scale, flag(before))
    assert torch.equal(found, expected_found)
    for result, want in zip(results, expected, strict=True):
        assert equal(result, want)
    in_place, found = [g.clone() for g in grads], flag(before)
    unscale_(in_place, inv_scale, found)
    assert torch.equal(found, expected_found)
    for result, want, grad in zip(in_place, expected, grads, strict=True):
        assert equal(result, want.to(grad.dtype))


def test_several_devices() -> None:
    """On fakes of a device that this build can hold: devices meet only where they may, and no value is read."""
    with FakeTensorMode():
        grads = [
            torch.empty(3, device="lazy:0"),
            torch.empty(2, device="lazy:1", dtype=F16),
            torch.empty(2, device="lazy:1", dtype=C64),
            torch.empty(2),
        ]
        inv_scale, found = torch.ones((), device="lazy:0"), torch.zeros(1, device="lazy:1")
        unscale_(grads, inv_scale, found)
        results, found_out = _unscale(grads, inv_scale, found)
    assert [r.device for r in results] == [g.device for g in grads]
    assert found_out.device == found.device
