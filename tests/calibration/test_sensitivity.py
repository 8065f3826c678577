"""Sensitivities rank ops as brute force does: each op in low precision by itself, everything else in fp64.

``make test`` takes the first two of ``NETWORKS``, and ``make test-zoo`` the third. The other cases are all that brute
force can run, in fp64 and in one graph, with four times the batches: the squared change of a loss varies much from
batch to batch, and with 16 of them two ops within a factor of two are often in the wrong order (0.76 for ``unet``, 0.98
with 64). Left out is ``custom_function``, whose gradient is an estimate and no derivative.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from amp_compiler import amp_compile, calibrate
from amp_compiler.common.torch_names import pytree
from networks import NETWORKS

NAMES = ("dense", "conv_bn", "encoder")
OTHERS = ("torch_encoder", "decoder", "embedding", "masked_attention", "shared_weights", "unet", "resnet", "mlp_mixer")


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args).square().mean()


class OneLow(fx.Interpreter):
    """Runs a graph in fp64, and the op ``low`` in fp16."""

    def __init__(self, graph: fx.GraphModule, low: str) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.low = low

    def changed(self, given: Sequence[Tensor], exact: Mapping[fx.Node, Any]) -> float:
        """Return the loss; what is computed before the op is as in the run in fp64 alone."""
        before = itertools.takewhile(lambda node: node.name != self.low, self.graph.nodes)
        return float(self.run(*given, initial_env={node: exact[node] for node in before})[0])

    def run_node(self, n: fx.Node) -> Any:
        if n.name != self.low:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.target is torch.ops.aten.batch_norm.default:
            # A compiled model gives it its parameters and statistics in fp32. If they are fp16, torch's kernel rounds
            # the mean of a channel too, which moves all its values in one direction: 8 times the error of their mean.
            args = (_to(args[0], torch.float16), *(_to(v, torch.float32) for v in args[1:]))
        else:
            args, kwargs = pytree.tree_map(lambda v: _to(v, torch.float16), (args, kwargs))
        return pytree.tree_map(lambda v: _to(v, torch.float64), n.target(*args, **kwargs))


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def ranks(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).argsort().argsort().double()


def spearman(a: list[float], b: list[float]) -> float:
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


@pytest.mark.zoo
@pytest.mark.parametrize("name", OTHERS)
def test_ranks_as_brute_force_on_more_networks(name: str) -> None:
    check_ranks(name, 64)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.zoo] if n == "encoder" else []) for n in NAMES])
def test_ranks_as_brute_force(name: str) -> None:
    check_ranks(name, 16)


def check_ranks(name: str, number: int) -> None:
    model, args = NETWORKS[name]()
    model = Loss(model)
    torch.manual_seed(1)
    batches = [tuple(torch.randn_like(a) if a.is_floating_point() else torch.randint_like(a, int(a.max()) + 1)
                     for a in args) for _ in range(number)]  # fmt: skip
    found = calibrate(model, [(batch, None) for batch in batches])
    rows = [row for row in found.rows if row.sensitivity]
    fast = amp_compile(model, "O0", backend="eager")
    fast(*batches[0])
    (graph,) = fast.graphs
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        changes = {row.node: 0.0 for row in rows}
        for batch in batches:
            given = [_to(v.clone(), torch.float64) for v in _inputs(graph, batch, held)]
            plain = OneLow(graph, "")
            exact = float(plain.run(*given)[0])
            for row in rows:
                changes[row.node] += (OneLow(graph, row.node).changed(given, plain.env) - exact) ** 2
    assert len(rows) >= 5
    for row in rows:
        if row.op == "batch_norm":
            assert 1 / 3 < row.sensitivity / (changes[row.node] / number) < 3
    assert spearman([row.sensitivity for row in rows], list(changes.values())) >= 0.8


def _inputs(graph: fx.GraphModule, batch: tuple[Tensor, ...], held: dict[str, Tensor]) -> list[Tensor]:
    """The inputs of a captured graph: parameters and buffers by their names, the rest in order."""
    rest = iter(batch)
    named = {name.replace(".", "_"): tensor for name, tensor in held.items()}
    found = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known = next((t for name, t in named.items() if node.name.endswith(name)), None)
            found.append(known if known is not None else next(rest))
    return found
