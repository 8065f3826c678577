"""Casts and ops counted at run time, against counts made by hand."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from amp_compiler.inspect.profile import CastCount, _cast_bytes, count_casts, count_ops
from networks import BertLike

BF16 = torch.bfloat16
X = torch.ones(4, 3)
LOW = X.to(BF16)


@pytest.mark.parametrize(
    ("program", "number", "written"),
    [
        pytest.param(lambda: X.to(BF16), 1, 12 * 2, id="to"),
        pytest.param(lambda: X.to(BF16).float(), 2, 12 * 2 + 12 * 4, id="there and back"),
        pytest.param(lambda: X.to(torch.float16).to(BF16), 2, 24 + 24, id="half to bfloat16"),
        pytest.param(lambda: X.double(), 1, 12 * 8, id="to double"),
        pytest.param(lambda: X.to(torch.float8_e4m3fn), 1, 12, id="to float8"),
        pytest.param(lambda: X.t().to(BF16), 1, 24, id="not contiguous"),
        pytest.param(lambda: X[:1].expand(4, 3).to(BF16), 1, 24, id="expanded"),
        pytest.param(lambda: torch.tensor(1.0).to(BF16), 1, 2, id="0-dim"),
        pytest.param(lambda: X + LOW, 1, 12 * 4, id="mixed add"),
        pytest.param(lambda: X.clone().add_(LOW), 1, 12 * 4, id="mixed add in place"),
        pytest.param(lambda: X.clone().copy_(LOW), 1, 12 * 4, id="copy_"),
        pytest.param(lambda: torch.cat([X, LOW]), 1, 12 * 4, id="mixed cat"),
        pytest.param(lambda: torch.where(X > 0, X, LOW), 1, 12 * 4, id="mixed where"),
        pytest.param(lambda: torch.exp(X, out=torch.empty(4, 3, dtype=BF16)), 1, 24, id="out="),
        pytest.param(lambda: LOW.softmax(-1, dtype=torch.float32), 1, 12 * 4, id="softmax(dtype)"),
        pytest.param(lambda: LOW.log_softmax(-1, dtype=torch.float32), 1, 12 * 4, id="log_softmax(dtype)"),
        pytest.param(lambda: LOW.sum(dtype=torch.float32), 1, 12 * 4, id="sum(dtype)"),
        pytest.param(lambda: LOW.sum(0, dtype=torch.float32), 1, 12 * 4, id="sum(dim, dtype)"),
        pytest.param(lambda: LOW.mean(0, dtype=torch.float32), 1, 12 * 4, id="mean(dtype)"),
        pytest.param(lambda: LOW.prod(0, dtype=torch.float32), 1, 12 * 4, id="prod(dtype)"),
        pytest.param(lambda: LOW.cumsum(0, dtype=torch.float32), 1, 12 * 4, id="cumsum(dtype)"),
        pytest.param(lambda: torch.linalg.vector_norm(LOW, dtype=torch.float32), 1, 12 * 4, id="norm(dtype)"),
        pytest.param(lambda: F.mse_loss(X, LOW, reduction="none"), 1, 12 * 4, id="mixed loss"),
        pytest.param(lambda: torch._foreach_add([X, X], [LOW, LOW]), 2, 2 * 12 * 4, id="foreach"),
        pytest.param(lambda: LOW * torch.tensor(2.0), 1, 2, id="0-dim operand"),
    ],
)
def test_casts(program: Callable[[], object], number: int, written: int) -> None:
    assert count_casts(program) == CastCount(number, written)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda: None, id="nothing"),
        pytest.param(lambda: X.to(torch.float32), id="to its own dtype"),
        pytest.param(lambda: X.clone(), id="clone"),
        pytest.param(lambda: LOW.t().contiguous(), id="contiguous"),
        pytest.param(lambda: torch.arange(3).float(), id="int to float"),
        pytest.param(lambda: (X > 0).to(BF16), id="bool to float"),
        pytest.param(lambda: X.to(torch.int32), id="float to int"),
        pytest.param(lambda: X.to(torch.complex64), id="float to complex"),
        pytest.param(lambda: torch.empty(0, 3).to(BF16), id="empty"),
        pytest.param(lambda: torch.empty(0, 3) + torch.empty(0, 3, dtype=BF16), id="empty mixed add"),
        pytest.param(lambda: X.to("meta").to(BF16), id="meta"),
        pytest.param(lambda: (X * 2.5, LOW * 2.5, 2.5**LOW), id="Python numbers"),
        pytest.param(lambda: torch.zeros_like(X, dtype=BF16), id="created in another dtype"),
        pytest.param(lambda: F.layer_norm(LOW, (3,), torch.ones(3), torch.zeros(3)), id="mixed layer norm"),
        pytest.param(lambda: F.linear(LOW, LOW), id="low linear"),
    ],
)
def test_no_casts(program: Callable[[], object]) -> None:
    assert count_casts(program) == CastCount(0, 0)


def linear_step(x: torch.Tensor, *layers: torch.nn.Linear, cache: bool = True) -> None:
    with torch.autocast("cpu", BF16, cache_enabled=cache):
        for layer in layers:
            x = layer(x)
    x.backward(torch.ones_like(x))


def test_linear_under_autocast() -> None:
    # Forward: x (4, 3), weight (5, 3) and bias (5) to bf16. Backward: their gradients to fp32.
    layer, x = torch.nn.Linear(3, 5), torch.ones(4, 3, requires_grad=True)
    count = count_casts(lambda: linear_step(x, layer))
    assert count == CastCount(6, (12 + 15 + 5) * 2 + (12 + 15 + 5) * 4)
    assert count.by_op == {"aten::linear": 3, "aten::to": 3}


def test_autocast_casts_a_weight_once() -> None:
    layer = torch.nn.Linear(3, 3)
    # x, weight, bias down; back up the gradients of weight and bias.
    cached = count_casts(lambda: linear_step(X, layer, layer))
    assert cached == CastCount(5, (12 + 9 + 3) * 2 + (9 + 3) * 4)
    # Without the cache weight and bias go down twice and their gradients up twice.
    uncached = count_casts(lambda: linear_step(X, layer, layer, cache=False))
    assert uncached == CastCount(9, (12 + 2 * (9 + 3)) * 2 + 2 * (9 + 3) * 4)


def test_bert_under_autocast() -> None:
    # A layer: weight and bias of six linears, the input of query, key, value and up, two mixed residual
    # adds. Then weight and bias of pooler and classifier, and the pooler's input. Each again backward.
    layers = 2
    model = BertLike(layers=layers, hidden=8, heads=2, intermediate=16, vocab=10, seq=4)

    def step() -> None:
        with torch.autocast("cpu", BF16):
            out = model(torch.zeros(2, 4, dtype=torch.long))
        out.backward(torch.ones_like(out))

    count = count_casts(step)
    assert count.number == 2 * (layers * (12 + 4 + 2) + 4 + 1)
    hidden, wide, stream = 8, 16, 2 * 4 * 8  # stream: elements of the residual stream
    linears = layers * (4 * (hidden + 1) * hidden + (hidden + 1) * wide + (wide + 1) * hidden)
    heads = (hidden + 1) * hidden + (hidden + 1) * 4
    down = linears + heads + layers * 4 * stream + 2 * hidden  # the pooler reads the first of four positions
    up = layers * 2 * stream
    assert count.bytes == down * (2 + 4) + up * (4 + 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_first_call_of_a_compiled_function_counts_like_any_other(backend: str) -> None:
    layer, x = torch.nn.Linear(3, 5), torch.ones(4, 3, requires_grad=True)
    torch._dynamo.reset()
    step = torch.compile(lambda: F.linear(x.to(BF16), layer.weight.to(BF16)).float().sum(), backend=backend)
    first = count_casts(lambda: step().backward())
    # Forward: x, weight down, output (4, 5) up. Backward: its gradient down, those of x and weight up.
    assert first == CastCount(6, (12 + 15) * 2 + 20 * 4 + 20 * 2 + (12 + 15) * 4)
    assert count_casts(lambda: step().backward()) == first
    torch._dynamo.reset()


class Nested(torch.autograd.Function):
    """A backward that runs a backward, `depth` levels deep; autograd moves deep ones to other threads."""

    threads: set[int] = set()  # noqa: RUF012

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Nested.threads.add(threading.get_ident())
        if ctx.depth == 0:
            return grad.to(BF16).float(), None
        with torch.enable_grad():
            x = torch.zeros(3, requires_grad=True)
            Nested.apply(x, ctx.depth - 1).sum().backward()
        return grad + x.grad, None


def test_other_threads_of_autograd() -> None:
    x = torch.zeros(3, requires_grad=True)
    assert count_casts(lambda: Nested.apply(x, 100).sum().backward()) == CastCount(2, 3 * 2 + 3 * 4)
    assert len(Nested.threads) > 1


def test_many_events() -> None:
    def program() -> None:
        for _ in range(5000):
            X.to(BF16)

    assert count_casts(program) == CastCount(5000, 5000 * 24)


def test_cast_seen_by_a_dispatch_mode_counts_once() -> None:
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Passing():
        assert count_casts(lambda: X.to(BF16)) == CastCount(1, 24)
        assert count_casts(lambda: X.clone().copy_(LOW)) == CastCount(1, 48)


def test_half_to_float_softmax() -> None:
    """Only CUDA has it, so the record of it is made by hand."""
    half = SimpleNamespace(dtype=torch.float16, sizes=[4, 3], device=torch.device("cuda"))
    for name in ("aten::_softmax", "aten::_log_softmax"):
        for flag, written in ((True, 48), (False, 0)):
            event = SimpleNamespace(extra_fields=SimpleNamespace(inputs=[half, -1, flag]))
            assert _cast_bytes(name, event) == written


def test_an_exception_passes_through_and_the_next_count_works() -> None:
    def failing() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        count_casts(failing)
    assert count_casts(lambda: X.to(BF16)).number == 1


def test_ops_are_those_that_a_dispatch_mode_sees() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.GELU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )
    x, target = torch.ones(2, 3, 4, 4), torch.tensor([0, 1])

    def step() -> None:
        with torch.autocast("cpu", BF16):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        model.zero_grad()

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view and not func.name().startswith("aten::empty"):
                self.seen[func.name().partition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    with Count() as mode:
        step()
    assert count_ops(step) == mode.seen


def test_views_and_allocations_are_no_work() -> None:
    assert count_ops(lambda: (X.t().reshape(-1)[1:], torch.empty(3), X.view(-1).detach())) == {
        "aten::clone": 1
    }


def test_composite_ops_are_taken_apart() -> None:
    assert count_ops(lambda: F.linear(X, torch.ones(5, 3))) == {"aten::ones": 1, "aten::mm": 1}
    assert count_ops(lambda: X.mean()) == {"aten::mean": 1}
    assert count_ops(lambda: X + LOW) == {"aten::add": 1}
