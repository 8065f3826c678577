"""Graphs that we must not trace run as they do without us: right numbers, a warning, a note in the report."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from amp_compiler import AmpWarning, Policy, amp_compile
from amp_compiler.common.errors import ArgumentError


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)],
                         ids=["Adam", "SGD"])  # fmt: skip
def test_a_compiled_optimizer_steps_once(make) -> None:
    """Its state is held by the graph: tracing it would write to the real tensors."""
    results = []
    for compiled in (False, True):
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optimizer = make([p])
        with warnings.catch_warnings(action="ignore", category=AmpWarning):
            step = amp_compile(optimizer.step) if compiled else optimizer.step
            for _ in range(3):
                step()
        results.append(p.detach())
    torch.testing.assert_close(results[1], results[0])


W = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
TRANSFORMS = {
    "grad": lambda x: grad(lambda w: (w**2).sum())(x),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,))[1],
    "per sample": lambda x: vmap(grad(lambda w, a: (w * a).sum()), (None, 0))(W[0], x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_inside_compiled_code(name: str) -> None:
    x = torch.arange(6.0).view(2, 3)
    fast = amp_compile(TRANSFORMS[name], "O2")
    with pytest.warns(AmpWarning, match=r"torch\.func"):
        out = fast(x)
    assert type(out) is Tensor
    torch.testing.assert_close(out, TRANSFORMS[name](x))
    assert any("torch.func" in note for note in fast.report().notes)


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 16)
    with warnings.catch_warnings(action="ignore"):
        torch.testing.assert_close(amp_compile(lambda q: flex_attention(q, q, q))(q), flex_attention(q, q, q))


@pytest.mark.parametrize("op", ["sort", "topk", "median"])
def test_indices_do_not_change_at_o2(op: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return (x.topk(20) if op == "topk" else getattr(x, op)(0)).indices

    x = 1 + torch.rand(200, generator=torch.Generator().manual_seed(0)) * 0.5
    assert torch.equal(amp_compile(fn, "O2")(x), fn(x))


def test_a_level_beside_a_policy() -> None:
    with pytest.raises(ArgumentError, match="contradicts"):
        amp_compile(nn.Linear(2, 2), level="O1", policy=Policy.default("auto"))
