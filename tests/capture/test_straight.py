"""``straight_line``: the same results as the graph, the same ops with the same arguments, and inputs freed in time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_compiler.capture.straight import BINDINGS, straight_line
from helpers import functional

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """Records each op with all of its arguments, those left to their defaults included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        full = list(args) + [kwargs.get(a.name, a.default_value) for a in func._schema.arguments[len(args) :]]
        self.calls.append((func, [_plain(value) for value in full]))
        return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0 and value._is_zerotensor() is False and value.dtype in (torch.float64, torch.int64):
            return value.item()  # a number that torch has wrapped
        return tuple(value.shape), value.dtype
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


x, y, square = torch.randn(3, 4), torch.randn(4, 5), torch.rand(4, 4) + 0.5
batch = torch.randn(2, 3, 4)
#: op -> calls of it, with as few arguments as it takes and with others
CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.mm.default: [((x, y), {})],
    aten.bmm.default: [((batch, batch.transpose(1, 2)), {})],
    aten.addmm.default: [((torch.randn(5), x, y), {}), ((torch.randn(5), x, y), {"beta": 0.5, "alpha": 2})],
    aten.baddbmm.default: [((torch.randn(2, 3, 3), batch, batch.transpose(1, 2)), {"beta": 0})],
    aten.convolution.default: [
        ((torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {})
    ],
    aten.transpose.int: [((batch, 0, -1), {})],
    aten.permute.default: [((batch, [2, 0, 1]), {})],
    aten.view.default: [((x, [2, 6]), {}), ((x, [-1]), {})],
    aten.expand.default: [((torch.randn(1, 4), [3, 4]), {}), ((torch.randn(1), [-1]), {})],
    aten.unsqueeze.default: [((x, -1), {})],
    aten.squeeze.dim: [((torch.randn(3, 1), 1), {})],
    aten.select.int: [((batch, 1, -1), {})],
    aten.cat.default: [(([x, x],), {}), (([x, x], 1), {})],
    aten.clone.default: [((x,), {}), ((x,), {"memory_format": torch.contiguous_format})],
    aten.add.Tensor: [((x, x), {}), ((x, 2), {}), ((x, x), {"alpha": 3})],
    aten.sub.Tensor: [((x, x), {}), ((x, 0.5), {}), ((x, x), {"alpha": 3})],
    aten.mul.Tensor: [((x, x), {}), ((x, 2.5), {})],
    aten.div.Tensor: [((x, x), {}), ((x, 3), {})],
    aten.pow.Tensor_Scalar: [((x, 2), {}), ((x, 0.5), {})],
    aten.gelu.default: [((x,), {}), ((x,), {"approximate": "tanh"})],
    aten.where.self: [((x > 0, x, -x), {})],
    aten.sum.dim_IntList: [((x, [0]), {}), ((x, [0, 1], True), {}), ((x, [1]), {"dtype": torch.float64})],
    aten.mean.dim: [((x, [0]), {}), ((x, [-1], True), {})],
    aten.native_layer_norm.default: [((x, [4], None, None, 1e-5), {})],
    aten.embedding.default: [((x, torch.tensor([0, 2])), {}), ((x, torch.tensor([0, 2]), 1), {})],
    aten._softmax.default: [((x, -1, False), {})],
    aten._log_softmax.default: [((x, -1, False), {})],
    aten._softmax_backward_data.default: [((x, x, -1, torch.float32), {})],
    aten._log_softmax_backward_data.default: [((x, x, -1, torch.float32), {})],
}


UNSCALE = torch.ops.amp.unscale_.default


def test_unscaling_without_the_dispatcher_does_the_same() -> None:
    given = [torch.tensor([2.0, 4.0]), torch.tensor([float("inf")]), torch.tensor([1.0], dtype=torch.float16)]
    results = []
    for call in (UNSCALE, BINDINGS[UNSCALE]):
        gradients, flag = [g.clone() for g in given], torch.zeros(1)
        with torch.no_grad():
            results.append([call(gradients, torch.tensor(0.5), flag), flag, *gradients])
    assert results[0][0].item() == 1.0
    assert results[0][2].tolist() == [1.0, 2.0]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("op", [op for op in BINDINGS if op is not UNSCALE], ids=str)
def test_a_binding_calls_the_same_op_with_the_same_arguments(op: Any) -> None:
    for args, kwargs in CALLS.get(op, [((square,), {})]):
        with torch.no_grad(), Seen() as direct:
            expected = op(*args, **kwargs)
        with torch.no_grad(), Seen() as bound:
            result = BINDINGS[op](*args, **kwargs)
        assert bound.calls == direct.calls
        assert len(direct.calls) == 1
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_it_gives_what_the_graph_gives_and_empties_its_inputs() -> None:
    def forward(x: Tensor, w: Tensor, unused: Tensor) -> tuple[Any, ...]:
        low = x.to(torch.bfloat16)
        top, places = torch.topk(x @ w, 2)
        return low.float() + 1, top, places, x[:, 1:], torch.full((2,), float("inf")), None

    gm = functional(forward, x, y, x)
    inputs = [x.clone(), torch.randn(4, 4), x]
    expected, run = gm(*inputs), straight_line(gm)
    assert run is not None
    results = run(inputs)
    assert inputs == []
    for one, other in zip(results, expected, strict=True):
        assert one is None if other is None else torch.equal(one, other)


def test_an_input_is_freed_after_its_last_use() -> None:
    alive: list[bool] = []
    gm = functional(lambda x, w: ((x * 2) @ w).relu(), x, y)
    (relu,) = [n for n in gm.graph.nodes if n.target is aten.relu.default]
    given = torch.randn(3, 4)
    watched = weakref.ref(given)

    def relu_and_look(value: Tensor) -> Tensor:
        alive.append(watched() is not None)
        return value.relu()

    relu.target = relu_and_look
    run = straight_line(gm)
    assert run is not None
    inputs = [given, y]
    del given
    run(inputs)
    assert alive == [False]


@pytest.mark.parametrize(
    ("kwargs", "dtypes"),
    [
        ({"dtype": torch.bfloat16}, (torch.float32, torch.bfloat16)),
        ({"dtype": torch.float32, "layout": torch.strided, "device": torch.device("cpu")},
         (torch.float16, torch.float32)),
        ({"dtype": torch.float32}, (torch.float32, torch.float32)),  # a copy
        ({"dtype": torch.float16, "memory_format": torch.contiguous_format}, (torch.float32, torch.float16)),
        ({"dtype": torch.float64}, (torch.float32, torch.float64)),
    ],
)  # fmt: skip
def test_casts_keep_strides_and_copy(kwargs: Any, dtypes: Any) -> None:
    source = torch.randn(4, 3, 2).transpose(0, 2).to(dtypes[0])
    graph = fx.Graph()
    place = graph.placeholder("x")
    place.meta["val"] = source
    graph.output((graph.call_function(aten._to_copy.default, (place,), kwargs),))
    run = straight_line(fx.GraphModule(nn.Module(), graph))
    assert run is not None
    (result,) = run([source])
    expected = aten._to_copy.default(source, **kwargs)
    assert result.dtype is dtypes[1]
    assert result.stride() == expected.stride()
    assert torch.equal(result, expected)
    assert result.data_ptr() != source.data_ptr()


def test_detaching_is_no_op_unless_it_is_returned() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(aten.exp.default, (given,))
    once = graph.call_function(aten.detach.default, (made,))
    twice = graph.call_function(aten.detach.default, (once,))
    graph.call_function(aten.detach.default, (twice,))  # which nothing reads
    total = graph.call_function(aten.add.Tensor, (twice, made))
    returned = graph.call_function(aten.detach.default, (given,))
    graph.output((total, returned))
    run = straight_line(fx.GraphModule({}, graph))
    assert run is not None
    value = torch.randn(3)
    with Seen() as seen:
        total_value, own = run([value])
    assert [op for op, _ in seen.calls] == [aten.exp.default, aten.add.Tensor, aten.detach.default]
    assert torch.equal(total_value, 2 * value.exp())
    assert own is not value
    assert own.data_ptr() == value.data_ptr()


def test_a_detached_value_is_freed_after_its_last_use() -> None:
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(aten.exp.default, (given,))
    detached = graph.call_function(aten.detach.default, (made,))
    read = graph.call_function(aten.sum.dim_IntList, (detached, [0]))
    kept: list[weakref.ref[Tensor]] = []
    graph.call_function(lambda value: kept.append(weakref.ref(value)), (detached,))
    later = graph.call_function(lambda value: value if kept[0]() is None else None, (read,))
    graph.output(later)
    run = straight_line(fx.GraphModule({}, graph))
    assert run is not None
    assert run([torch.ones(2)]) is not None


def test_graphs_that_call_modules_are_left_to_torch() -> None:
    assert straight_line(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))) is None


_STEPS = {
    "mul": lambda v, w: v * w, "add": lambda v, w: v + 1, "low": lambda v, w: v.bfloat16().float(),
    "t": lambda v, w: v.t(), "mm": lambda v, w: v @ w, "sum": lambda v, w: v - v.sum(0, keepdim=True),
    "softmax": lambda v, w: torch.softmax(v, -1), "halves": lambda v, w: torch.cat(v.chunk(2), 1).reshape(4, 4),
}  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=6))
def test_any_chain_gives_what_the_graph_gives(names: list[str]) -> None:
    def forward(v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = v
        for name in names:
            v = _STEPS[name](v, w)
        return v, first * 2

    gm = functional(forward, square, square + 1)
    run = straight_line(gm)
    assert run is not None
    for one, other in zip(run([square, square + 1]), gm(square, square + 1), strict=True):
        assert torch.equal(one, other)


_MORE = {
    **_STEPS, "relu": lambda v, w: v.relu(), "sub": lambda v, w: v - w, "twice": lambda v, w: v + v,
    "turned": lambda v, w: v + v.t(), "row": lambda v, w: v * v[:1], "part": lambda v, w: v[:, :2].relu().repeat(1, 2),
    "wide": lambda v, w: v[:1] + v, "silu": lambda v, w: torch.nn.functional.silu(v),
    "exp": lambda v, w: (-v.abs()).exp(),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(_MORE)), st.integers(0, 3), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 9),
)
def test_writing_over_operands_changes_nothing(names: list[tuple[str, int, bool]], kept: int) -> None:
    """Any program that reads older values again, also by views: results are the graph's, inputs stay as they are."""

    def forward(v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values = [v]
        for name, back, mixed in names:
            value = _MORE[name](values[-1 - min(back, len(values) - 1)], w)
            values.append(value + values[0] if mixed else value)
        return values[-1], values[min(kept, len(values) - 1)] * 2, values[min(kept, len(values) - 1)]

    inputs = [square / 16, square / 8 + 1]
    copies = [x.clone() for x in inputs]
    gm = functional(forward, *inputs)
    expected = gm(*inputs)
    run = straight_line(gm)
    assert run is not None
    for one, other in zip(run(list(inputs)), expected, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert one.stride() == other.stride()
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))


def test_an_operand_that_nothing_reads_is_written_over() -> None:
    def forward(v: Tensor, w: Tensor) -> Tensor:
        return ((v @ w) + v).relu() * w  # three results in the memory of the product

    run = straight_line(functional(forward, square, square))
    assert run is not None
    with torch.profiler.profile() as profile:
        run([square, square])
    called = {event.key for event in profile.key_averages()}
    assert {"aten::add_", "aten::relu_", "aten::mul_"} <= called
    assert not called & {"aten::add", "aten::relu", "aten::mul"}
