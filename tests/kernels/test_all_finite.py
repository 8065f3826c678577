"""``amp::all_finite`` against its reference and against values worked out by hand."""

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

from amp_compiler.kernels.all_finite import all_finite, non_finite, reference

INF, NAN = math.inf, math.nan
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, "max", "min", "tiny"])
def test_finite(dtype: torch.dtype, value: float | str) -> None:
    limits = torch.finfo(dtype)
    number = getattr(limits, value) if isinstance(value, str) else value
    tensor = torch.full((3, 700), number, dtype=dtype)  # all at the limit: any sum of them overflows
    assert all_finite([tensor]).item() is True
    assert non_finite([tensor]).item() == 0.0
    assert torch.equal(all_finite([tensor]), reference([tensor]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 350, -1])
def test_not_finite(dtype: torch.dtype, value: float, place: int) -> None:
    tensor = torch.ones(700, dtype=dtype)
    tensor[place] = value
    for tensors in ([tensor], [torch.ones(2), tensor], [tensor, torch.ones(2)]):
        assert all_finite(tensors).item() is False
        assert non_finite(tensors).item() == 1.0
        assert reference(tensors).item() is False


def test_imaginary_part() -> None:
    tensor = torch.complex(torch.ones(2), torch.tensor([1.0, INF]))
    assert not all_finite(tensor)
    assert not all_finite(tensor.conj())


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert not all_finite(torch.tensor([INF, -INF]))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_float8(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 2.0]).to(dtype)
    assert all_finite(tensor)
    assert not all_finite(torch.tensor([1.0, NAN]).to(dtype))


def test_what_has_nothing_that_is_not_finite() -> None:
    assert all_finite([]).item() is True
    assert all_finite([None]).item() is True
    assert all_finite(torch.empty(0)).item() is True
    assert all_finite([torch.tensor([True]), torch.tensor([2**62]), torch.empty(0, 3)]).item() is True


def test_result() -> None:
    result = all_finite(torch.ones(3))
    assert (result.dtype, result.shape, result.device.type) == (torch.bool, (), "cpu")


def test_any_iterable() -> None:
    assert not all_finite(t for t in (torch.ones(1), None, torch.tensor(INF)))
    assert all_finite({"a": torch.ones(1)}.values())


@pytest.mark.parametrize("wrong", [3.0, "ab", [torch.ones(1), 2.0], None])
def test_wrong_type(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected"):
        all_finite(wrong)


def test_strides() -> None:
    base = torch.ones(6, 6)
    base[1, 1] = INF
    assert not all_finite(base.t())
    assert not all_finite(base[1::2, 1::2])
    assert all_finite(base[::2, ::2])
    assert all_finite(torch.ones(1).expand(5, 5))


def sparse(dtype: torch.dtype, values: list[float], indices: list[int]) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([indices]), torch.tensor(values, dtype=dtype), (4,), check_invariants=True
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse() -> None:
    assert all_finite(sparse(torch.float32, [1.0, 2.0], [1, 1]))
    assert not all_finite(sparse(torch.float32, [1.0, NAN], [1, 2]))
    assert not all_finite([torch.ones(2), sparse(torch.float64, [INF], [1])])
    assert all_finite(torch.eye(2).to_sparse_csr())
    assert not all_finite((torch.eye(2) * INF).nan_to_num(0.0, INF).to_sparse_csr())
    assert all_finite(torch.sparse_coo_tensor(size=(3, 3), check_invariants=True))


@pytest.mark.parametrize(("dtype", "large"), [(torch.float16, 64000.0), (torch.bfloat16, 3e38)])
def test_sparse_entries_that_overflow_together(dtype: torch.dtype, large: float) -> None:
    assert not all_finite(sparse(dtype, [large, large], [1, 1]))
    assert all_finite(sparse(dtype, [large, large], [1, 2]))
    assert all_finite(sparse(dtype, [large, -large], [1, 1]))


def test_inputs_are_not_written() -> None:
    tensors = [torch.tensor([1.0, NAN, -0.0]), sparse(torch.float16, [64000.0, 64000.0], [1, 1])]
    versions = [t._version for t in tensors]
    all_finite(tensors)
    assert [t._version for t in tensors] == versions
    assert not tensors[1].is_coalesced()


def test_no_read_on_the_host() -> None:
    with profile() as trace:
        all_finite([torch.ones(3), torch.tensor([INF]), torch.ones(2, dtype=torch.float16)])
    assert "aten::_local_scalar_dense" not in {event.key for event in trace.key_averages()}


def test_fake() -> None:
    with FakeTensorMode() as mode:
        result = torch.ops.amp.all_finite([mode.from_tensor(torch.ones(3)), mode.from_tensor(torch.ones(2).half())])
        meta = torch.ops.amp.all_finite([torch.empty(3, device="cuda"), torch.empty(2)])
    assert (result.dtype, result.shape, result.device.type) == (torch.bool, (), "cpu")
    assert meta.device.type == "cuda"


def test_in_a_graph() -> None:
    graph = make_fx(lambda x: all_finite([x, x * 2]), tracing_mode="symbolic")(torch.ones(3))
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"].count(torch.ops.amp.all_finite.default) == 1
    assert graph(torch.ones(5)).item() is True
    assert graph(torch.tensor([3e38])).item() is False


def test_compiled() -> None:
    compiled = torch.compile(lambda x: all_finite([x, x + 1]), backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(3)).item() is True
    assert compiled(torch.tensor([1.0, NAN, 2.0])).item() is False


def test_op() -> None:
    torch.library.opcheck(torch.ops.amp.all_finite.default, ([torch.ones(2), torch.ones(2).half()],))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.sampled_from([0.0, 1.0, -2.5, 60000.0, 3e38, 1e200, INF, -INF, NAN]), max_size=4),
        ),
        max_size=4,
    )
)
def test_like_the_reference(spec: list[tuple[torch.dtype, list[float]]]) -> None:
    tensors = [torch.tensor(values, dtype=torch.float64).to(dtype) for dtype, values in spec]
    assert torch.equal(all_finite(tensors), reference(tensors))
    assert non_finite(tensors).item() == float(not reference(tensors))


def test_several_devices() -> None:
    """On fakes of a device that this build can hold: devices meet only where they may, and no value is read."""
    with FakeTensorMode():
        tensors = [torch.empty(3, device="lazy:0"), torch.empty(2, device="lazy:1", dtype=torch.float16)]
        for order in (tensors, tensors[::-1]):
            found = non_finite(order)
            assert (found.device, found.dtype, found.shape) == (order[0].device, torch.float32, ())
