"""Fake values in another dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from amp_compiler import ir

F16 = torch.float16


@st.composite
def strided(draw):
    """A tensor of up to four dimensions: permuted, cut, expanded, empty, or none of these."""
    sizes = draw(st.lists(st.integers(0, 5), max_size=4))
    x = torch.empty(sizes)
    if draw(st.booleans()):
        x = x.permute(draw(st.permutations(range(x.dim()))))
    if sizes and draw(st.booleans()):
        x = x[..., : draw(st.integers(0, 3))]
    if draw(st.booleans()):
        x = x.expand(3, *x.shape)
    return x


@given(strided(), st.booleans())
def test_only_the_dtype_changes(x, inside):
    mode = FakeTensorMode()
    fake = mode.from_tensor(x)
    if inside:
        with mode:
            low = ir.retype(fake, F16)
    else:
        low = ir.retype(fake, F16)
    assert type(low) is type(fake)
    assert low.fake_mode is mode
    assert (low.dtype, low.device, low.shape) == (F16, fake.device, fake.shape)
    assert low.stride() == fake.stride()
    assert fake.dtype is torch.float32
    with mode:  # and it can be computed with
        assert (low + low).dtype is F16


@pytest.mark.parametrize("turned", [False, True])
def test_symbolic_sizes_are_kept_without_a_guard(turned):
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.empty(6, 5, 4), symbolic_context=context)
    if turned:
        with mode:
            fake = fake.transpose(0, 1)
    before = list(shapes.guards)
    low = ir.retype(fake, F16)
    assert shapes.guards == before
    assert [str(n) for n in (*low.shape, *low.stride())] == [str(n) for n in (*fake.shape, *fake.stride())]
    assert low.device.type == "cpu"
    assert low.dtype is F16


def test_while_something_else_is_traced_nothing_is_recorded_on_another_device():
    fake = FakeTensorMode().from_tensor(torch.empty(2, 3))
    made = []

    def traced(x):
        made.append(ir.retype(fake, F16))
        return x + 1

    graph = make_fx(traced)(torch.ones(2)).graph
    assert made[0].device.type == "cpu"
    assert not [n for n in graph.nodes if "meta" in str(n.kwargs)]
