"""Graphs that need no gradient are traced as AOTAutograd traces them, without it."""

import copy

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from amp_compiler import amp_compile
from amp_compiler.capture import undifferentiated


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return self.act(y), y.flatten(1), x.shape[0]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        y = self.lin(x)
        return x, x.view(-1), y[0], y.t(), self.lin.weight


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.lin(x)).softmax(-1), torch.arange(x.shape[1]) + x.shape[0]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        x[0] = 1
        return self.lin(x)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)


def described(graph: fx.GraphModule) -> list[object]:
    """Everything that a graph says: ops, arguments, values with strides, and where they came from."""
    numbers = {node: i for i, node in enumerate(graph.graph.nodes)}

    def value(node: fx.Node) -> list[object]:
        found = node.meta.get("val")
        found = found if isinstance(found, (tuple, list)) else [found]
        return [(v.dtype, str(v.shape), str(v.stride())) if isinstance(v, Tensor) else str(v) for v in found]

    return [
        (
            node.op,
            node.target if node.op == "call_function" else None,
            str(fx.map_arg((node.args, node.kwargs), lambda n: numbers[n])),  # type: ignore[arg-type]
            None if node.op == "output" else value(node),
            node.meta.get("stack_trace"),
            str(node.meta.get("nn_module_stack")),
        )
        for node in graph.graph.nodes
    ]


@pytest.fixture
def traces(monkeypatch):
    """Pairs of what we trace and what AOTAutograd traces of the same graph."""
    found = []
    plain, trace = undifferentiated.is_plain_inference, undifferentiated.functional
    given = []

    def asked(gm, example_inputs):
        given.append(example_inputs)
        return plain(gm, example_inputs)

    def both(gm):
        def keep(graph, inputs):
            found.append((described(trace(gm)), described(graph)))
            return graph.forward

        aot_autograd(fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True)(gm, given[-1])
        return trace(gm)

    monkeypatch.setattr(undifferentiated, "is_plain_inference", asked)
    monkeypatch.setattr(undifferentiated, "functional", both)
    return found


@pytest.mark.parametrize(
    ("make", "size", "dynamic", "dtype"),
    [
        (Residual, (2, 4, 6, 6), True, torch.float16),
        (Views, (3, 8), False, torch.bfloat16),
        (Drops, (4, 8), False, torch.float16),
        (encoder, (2, 5, 8), False, torch.bfloat16),
        (nn.Flatten, (2, 3, 4), True, torch.bfloat16),
    ],
)
def test_the_graph_is_that_of_aot_autograd(make, size, dynamic, dtype, traces):
    model = make().eval() if make is not Drops else make()
    compiled = amp_compile(model, dtype=dtype, dynamic=dynamic)
    with torch.no_grad():
        compiled(torch.randn(size))
        compiled(torch.randn(size[0] + 1, *size[1:]))
    assert len(traces) == (1 if dynamic else 2)
    for ours, theirs in traces:
        assert ours == theirs


def test_results_share_memory_as_in_eager_mode():
    compiled = amp_compile(Views(), dtype=torch.bfloat16)
    x = torch.randn(3, 8)
    with torch.no_grad():
        given, flat, row, turned, weight = compiled(x)
    assert given is x
    assert flat.data_ptr() == x.data_ptr()
    assert row.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr()
    assert weight is compiled.lin.weight
    assert weight.requires_grad


@pytest.mark.parametrize("grad", [False, True])
def test_what_the_model_writes_to_is_written_to(grad, traces):
    model = Writes()
    compiled = amp_compile(copy.deepcopy(model), dtype=torch.bfloat16)
    with torch.set_grad_enabled(grad):
        for times in (1, 2):
            mine, theirs = torch.zeros(3, 8), torch.zeros(3, 8)
            torch.testing.assert_close(compiled(mine), model(theirs), rtol=2e-2, atol=2e-2)
            assert torch.equal(mine, theirs)
            assert compiled.seen == times
    assert not traces


def test_statistics_of_batch_norm_are_updated_without_gradients():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    compiled, x = amp_compile(copy.deepcopy(model), dtype=torch.bfloat16), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        compiled(x)
        model(x)
    assert compiled[1].num_batches_tracked == 1
    torch.testing.assert_close(compiled[1].running_var, model[1].running_var, rtol=1e-2, atol=1e-2)


class Makes(nn.Module):
    def forward(self, x):
        return torch.ones(3) * 2


def test_graphs_without_inputs(traces):
    """A frame that only assigns attributes has an empty graph, as Lightning's steps have."""
    graph = fx.Graph()
    graph.output(())
    assert not undifferentiated.is_plain_inference(fx.GraphModule({}, graph), [])
    with torch.no_grad():
        assert torch.equal(amp_compile(Makes(), dtype=torch.bfloat16)(torch.ones(2)), torch.full((3,), 2.0))
    assert not traces


def test_with_gradients_the_same_model_is_differentiated(traces):
    compiled, x = amp_compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), dtype=torch.bfloat16), torch.randn(3, 8)
    with torch.no_grad():
        compiled(x)
    assert len(traces) == 1
    compiled(x).sum().backward()
    assert len(traces) == 1
    assert all(parameter.grad is not None for parameter in compiled.parameters())
