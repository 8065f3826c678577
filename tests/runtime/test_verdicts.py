"""Code that is captured again, for other sizes or in another mode, needs no second twin."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from amp_compiler import AmpModule, AmpWarning, amp_compile, ir
from amp_compiler.capture import twin
from amp_compiler.ir.verdicts import Verdicts, keys_of
from amp_compiler.runtime.backend import Backend

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Reads(nn.Module):
    """Follows a dtype, names one, and uses a dtype's limit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        wide = h.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = wide.to(h.dtype)[:, :, None].squeeze(2)  # a dynamic size is sliced, a fixed one is not
        h = h.masked_fill(h < 0, torch.finfo(h.dtype).min / 2)
        return self.second(self.dropout(torch.softmax(h, -1)))


class ByMode(Reads):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not self.training and h.dtype == torch.float16:
            h = h.clamp(-1000, 1000)
        return self.second(h)


class BySize(Reads):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * 2 if x.shape[0] > 2 else h.to(torch.float32)
        return self.second(h.to(x.dtype))


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the twins that were traced."""
    made, trace = [], twin.twin_of_frame

    def counted(policy: Any, modules: Any) -> Any:
        made.append(policy.low)
        return trace(policy, modules)

    monkeypatch.setattr(twin, "twin_of_frame", counted)
    return made


def compiled(cls: type[nn.Module] = Reads, dtype: torch.dtype = BF16) -> AmpModule:
    torch.manual_seed(0)
    return amp_compile(cls(), level="O2", dtype=dtype, backend="eager")


def larger(fast: AmpModule) -> list[Tensor]:
    return [fast(torch.ones(2, 3, 8)), fast(torch.ones(4, 3, 8)), fast(torch.ones(4, 5, 8))]


def in_eval_mode(fast: AmpModule) -> list[Tensor]:
    torch.manual_seed(1)
    first = fast(torch.ones(2, 3, 8))
    fast.eval()
    return [first, fast(torch.ones(2, 3, 8))]


def decided(fast: AmpModule) -> list[list[tuple[str, Any, Any]]]:
    return [[(n.name, ir.decision(n), ir.origin(n)) for n in gm.graph.nodes] for gm in fast.graphs]


@pytest.mark.parametrize(("again", "dtype"), [(larger, BF16), (in_eval_mode, F16)], ids=["larger", "in eval mode"])
def test_one_twin_serves_all_captures(
    again: Callable[[AmpModule], list[Tensor]], dtype: torch.dtype, twins: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fast = compiled(dtype=dtype)
    results = again(fast)
    assert twins == [dtype]
    assert len(fast.graphs) > 1
    with monkeypatch.context() as patch:
        patch.setattr(Backend, "known_verdicts", lambda self, graph: None)
        other = compiled(dtype=dtype)
        expected = again(other)
    assert len(twins) == 1 + len(fast.graphs)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert decided(fast) == decided(other)
    assert [(r.name, r.modified, r.text) for r in fast.history] == [(r.name, r.modified, r.text) for r in other.history]
    assert str(fast.report()) == str(other.report())


def test_code_that_branches_on_a_dtype_has_a_twin_for_every_capture(twins: list[torch.dtype]) -> None:
    fast = compiled(ByMode, F16)
    with pytest.warns(AmpWarning, match="stays in fp32, because only in float16"):
        in_eval_mode(fast)
    assert twins == [F16, F16]


def test_other_ops_have_a_twin_of_their_own(twins: list[torch.dtype]) -> None:
    fast = compiled(BySize)
    fast(torch.ones(2, 3, 8))
    fast(torch.ones(4, 3, 8))
    assert twins == [BF16, BF16]


def test_another_policy_has_a_twin_of_its_own(twins: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    model = Reads()
    for dtype in (BF16, F16):
        larger(amp_compile(model, level="O2", dtype=dtype, backend="eager"))
    assert twins == [BF16, F16]


def test_a_deleted_model_is_not_kept_alive() -> None:
    torch.manual_seed(0)
    model = Reads()
    fast, gone = amp_compile(model, level="O2", dtype=BF16, backend="eager"), weakref.ref(model.first)
    larger(fast)
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


# -------------------------------------------------------------------------------------------------- of one graph


def graph(value: float = 1e5, extra: bool = False) -> fx.GraphModule:
    made = fx.Graph()
    x = made.placeholder("x")
    add = made.call_function(torch.ops.aten.add.Scalar, (x, value))
    to = made.call_function(torch.ops.aten.to.dtype, (add, F32))
    last = made.call_function(torch.ops.aten.relu.default, (to,)) if extra else to
    made.output(last)
    for node in made.nodes:
        node.meta["val"] = torch.empty(2) if node.op != "output" else None
        node.meta[ir.ORIGIN] = ir.Origin()
    add.meta[ir.ORIGIN] = ir.Origin(False, BF16, (("other", 1.0),), numbers_of="x")
    to.meta[ir.ORIGIN] = ir.Origin(True, BF16, of=add.name)
    return fx.GraphModule({}, made)


def learned() -> Verdicts:
    first = graph()
    keys = keys_of(first.graph)
    assert keys is not None
    known = Verdicts(keys)
    known.learn(first)
    assert known.are_known
    return known


def without_origins(gm: fx.GraphModule) -> fx.GraphModule:
    for node in gm.graph.nodes:
        del node.meta[ir.ORIGIN]
    return gm


def test_names_are_those_of_the_new_graph() -> None:
    other = without_origins(graph())
    for node in other.graph.nodes:
        node._rename(f"new_{node.name}")
    assert learned().apply(other)
    found = {node.name: ir.origin(node) for node in other.graph.nodes}
    assert found["new_to_dtype"] == ir.Origin(True, BF16, of="new_add_scalar")
    assert found["new_add_scalar"] == ir.Origin(False, BF16, (("other", 1.0),), numbers_of="new_x")


@pytest.mark.parametrize("other", [graph(value=2e5), graph(extra=True)], ids=["number", "ops"])
def test_a_different_graph_is_left_alone(other: fx.GraphModule) -> None:
    assert keys_of(other.graph) != keys_of(graph().graph)
    assert not learned().apply(without_origins(other))
    assert all(ir.origin(node) is None for node in other.graph.nodes)


def test_nothing_is_learned_from_an_unsure_graph() -> None:
    first = graph()
    known = Verdicts(keys_of(first.graph) or ())
    next(iter(first.graph.nodes)).meta[ir.ORIGIN] = ir.Origin(unsure="another path")
    known.learn(first)
    assert not known.are_known
    assert not known.apply(first)
