"""Which uses of a tensor's dtype are followed through the code, and what is known of the calls that name it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.output_graph import OutputGraph

from amp_compiler import AmpModule, amp_compile, ir
from amp_compiler.capture import dtype_reads, followed
from helpers import in_turn

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {torch.float32: "wide", torch.float16: "half", torch.bfloat16: "brain"}


class Does(nn.Module):
    """A product, and what is done with its result, which is low."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.step = nn.Linear(8, 8), step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.fc(x))


def compares(x: Tensor) -> Tensor:
    return x.clamp(1) if x.dtype == torch.float16 else x


def compares_a_name(x: Tensor) -> Tensor:
    kind = x.dtype
    y = x.float()
    if y.shape[0] > 2 and kind in (torch.float16,):
        y = y.clamp(1)
    return y


def compares_an_argument(x: Tensor) -> Tensor:
    def inner(value: Tensor, kind: torch.dtype) -> Tensor:
        return value if kind is torch.float16 else value + 1

    return inner(x, x.dtype)


def compares_a_limit(x: Tensor) -> Tensor:
    return x if torch.finfo(x.dtype).max > 1e5 else x + 1


def compares_a_size(x: Tensor) -> Tensor:
    return x if x.element_size() == 2 else x + 1


def compares_the_bits(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize == 2 else x + 1


def looks_it_up(x: Tensor) -> Tensor:
    return x if NAMES[x.dtype] == "half" else x + 1


def writes_it_down(x: Tensor) -> Tensor:
    return x if str(x.dtype).endswith("16") else x + 1


def computes_with_a_limit(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).min / 2)


def promotes(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float16))


def passes_on_what_is_no_limit(x: Tensor) -> Tensor:
    return x * torch.finfo(x.dtype).bits


def compiled(step: Callable[[Tensor], Tensor], dtype: torch.dtype = BF16) -> AmpModule:
    fast = amp_compile(Does(step), level="O2", dtype=dtype, backend="eager")
    fast(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    return fast


def origins(fast: AmpModule) -> list[tuple[str, Any]]:
    (gm,) = fast.graphs
    return [(node.name, ir.origin(node) or ir.Origin()) for node in gm.graph.nodes]


@pytest.mark.parametrize("step", [
    compares, compares_a_name, compares_an_argument, compares_a_limit, compares_a_size, compares_the_bits, looks_it_up,
    writes_it_down, computes_with_a_limit, promotes, passes_on_what_is_no_limit,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::amp_compiler.AmpWarning")
def test_code_that_looks_at_a_dtype_is_traced_in_low_precision(step: Any, twins: list[torch.dtype]) -> None:
    compiled(step)
    assert twins == [BF16]


def follows(x: Tensor) -> Tensor:
    return x.float().exp().to(x.dtype)


def by_default(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        dtype = x.dtype
    return x.float().to(dtype if dtype is not None else torch.float16)


def of_a_device(x: Tensor) -> Tensor:
    kind = x.device.type if x.device.type != "mps" else "cpu"
    return x.to(x.dtype).to(kind) * 2


def of_integers(x: Tensor) -> Tensor:
    mask = x > 0
    kind = x.dtype
    return x.float().to(kind).masked_fill(mask, 0) if mask.dtype == torch.bool and kind != torch.int64 else x


def of_floats(x: Tensor) -> Tensor:
    return x.exp().to(x.dtype) if x.is_floating_point() and x.dtype.is_floating_point else x


def of_classes(x: Tensor) -> Tensor:
    return x.float().to(x.dtype) if type(x) is Tensor else x


def through_an_object(x: Tensor) -> Tensor:
    held = {"kinds": [x.dtype, torch.float32]}
    return x.to(held["kinds"][1]).exp().to(held["kinds"][0])


def limits(x: Tensor) -> Tensor:
    x = x.masked_fill(x > 0, torch.finfo(x.dtype).min)
    return torch.where(x > 0, x, torch.finfo(x.dtype).max) * torch.finfo(x.dtype).eps


def limits_of_the_authors_dtype(x: Tensor) -> Tensor:
    return x.half().clamp(max=torch.finfo(x.half().dtype).max).float() + x.double().clamp(
        min=torch.finfo(x.double().dtype).min
    ).to(x.dtype)


def created(x: Tensor) -> Tensor:
    return x + torch.ones(8, dtype=x.dtype) + torch.full((8,), torch.finfo(x.dtype).max, dtype=x.dtype)


def a_constant(x: Tensor) -> Tensor:
    return x + torch.tensor(torch.finfo(x.dtype).min, dtype=x.dtype) + torch.tensor([1.0, 2.0], dtype=x.dtype).sum()


def written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = 3
    return x.float().to(y.dtype) + y


def of_another(x: Tensor) -> Tensor:
    wide = x.float()
    return x.exp().to(wide.dtype) + wide.to(x)


def no_dtype_named(x: Tensor) -> Tensor:
    return x.float().to(x.dtype) + x.to("cpu")


class Keeps:
    kind: torch.dtype | None = None


KEPT, UNREAD, OTHER = Keeps(), torch.ones(2), torch.ones(8)


def stores_it(x: Tensor) -> Tensor:
    KEPT.kind = x.dtype  # as a cache of keys and values does
    return x.float().exp().to(KEPT.kind)


def of_a_tensor_that_is_not_read(x: Tensor) -> Tensor:
    return x.float().exp().to(UNREAD.dtype)


def compares_two_inputs(x: Tensor) -> Tensor:
    return x.float().to(OTHER.dtype) + OTHER if OTHER.dtype == UNREAD.dtype else x


FOLLOWED = [
    follows, by_default, of_a_device, of_integers, of_floats, of_classes, through_an_object, limits,
    limits_of_the_authors_dtype, created,
    a_constant, written, of_another, no_dtype_named, stores_it, of_a_tensor_that_is_not_read, compares_two_inputs,
]  # fmt: skip


@pytest.mark.parametrize(("step", "dtype"), in_turn(FOLLOWED, (BF16, F16)))
def test_what_is_followed_is_what_the_trace_in_low_precision_shows(
    step: Any, dtype: torch.dtype, twins: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compiled(step, dtype)
    assert twins == []
    monkeypatch.setattr(dtype_reads, "all_followed", lambda gm, lowered: False)
    other = compiled(step, dtype)
    assert twins == [dtype]
    _agree(fast, other)


def _agree(fast: AmpModule, other: AmpModule) -> None:
    """The twin knows no more; whose dtype a call names it does not always know."""
    assert [name for name, _ in origins(fast)] == [name for name, _ in origins(other)]
    for (name, mine), (_, theirs) in zip(origins(fast), origins(other), strict=True):
        if name.startswith(("_tensor_constant", "output")):
            continue
        assert (mine.follows, mine.twin, mine.numbers, mine.unsure) == (
            theirs.follows, theirs.twin, theirs.numbers, theirs.unsure
        ), name  # fmt: skip
        assert mine.of == theirs.of or not theirs.of, name
        assert mine.numbers_of == theirs.numbers_of or not theirs.numbers_of, name
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(fast(x), other(x))


def test_reading_goes_on_if_dynamo_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def restart(output: Any) -> None:
        raise RestartAnalysis

    monkeypatch.setattr(OutputGraph, "compile_subgraph", restart)
    with followed.reading() as found:
        end: Any = OutputGraph.compile_subgraph
        with pytest.raises(RestartAnalysis):
            end(None)
        assert not found.is_read


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "float": Tensor.float, "softmax": lambda x: x.softmax(-1), "sum": lambda x: x.sum(-1, True),
    "half": Tensor.half, "bool": lambda x: (x > 0).to(x.dtype), "linear": lambda x: x @ torch.ones(8, 8, dtype=x.dtype),
    "limit": lambda x: x.clamp(max=torch.finfo(x.dtype).max), "wide softmax": lambda x: x.softmax(-1, dtype=F32),
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": operator.add, "to": lambda x, y: x.to(y.dtype), "like": lambda x, y: x.type_as(y),
    "where": lambda x, y: torch.where(x > 0, x, y), "created": lambda x, y: x * torch.ones(1, dtype=y.dtype),
    "sum": lambda x, y: x + y.sum(dtype=x.dtype),
}  # fmt: skip


@st.composite
def programs(draw: Any) -> Any:
    """Steps that take one or two of the values so far."""
    count = draw(st.integers(2, 6))
    steps = []
    for made in range(1, count + 1):
        of = st.integers(0, made - 1)
        kind = draw(st.sampled_from([*UNARY, *BINARY]))
        steps.append((kind, draw(of), draw(of)))
    return steps


@settings(max_examples=4)
@given(steps=programs(), dtype=st.sampled_from([BF16, F16]))
def test_random_code_that_passes_dtypes_on(steps: Any, dtype: torch.dtype) -> None:
    check_random(steps, dtype)


@pytest.mark.zoo
@settings(max_examples=100)
@given(steps=programs(), dtype=st.sampled_from([BF16, F16]))
def test_more_random_code_that_passes_dtypes_on(steps: Any, dtype: torch.dtype) -> None:
    check_random(steps, dtype)


def check_random(steps: Any, dtype: torch.dtype) -> None:
    def step(x: Tensor) -> Tensor:
        values = [x]
        for kind, one, two in steps:
            if kind in UNARY:
                values.append(UNARY[kind](values[one]))
            else:
                values.append(BINARY[kind](values[one], values[two]))
        return torch.cat([value.to(x.dtype).expand(4, 8) for value in values])  # each is read

    with pytest.MonkeyPatch.context() as patch:
        seen: list[bool] = []
        real = dtype_reads.all_followed
        patch.setattr(dtype_reads, "all_followed", lambda gm, low: seen.append(real(gm, low)) or seen[-1])
        fast = compiled(step, dtype)
        assert seen == [True]
        patch.setattr(dtype_reads, "all_followed", lambda gm, low: False)
        other = compiled(step, dtype)
    _agree(fast, other)
