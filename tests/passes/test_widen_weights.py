"""widen_weights: products with a stored weight run in fp32 between two roundings, on a CPU that wants it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from amp_compiler import Policy, convert_model, ir
from amp_compiler.capture.program import functional, weights_of
from amp_compiler.common.errors import PipelineError
from amp_compiler.passes.widen_weights import PASS
from amp_compiler.rewrite import facts
from amp_compiler.rewrite.base import Context
from amp_compiler.rewrite.pipeline import Pipeline
from helpers import BF16, F16, F32, LOW, check_pass, context, ops


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_CPU_KERNELS", "wide")


class Functional:
    """A converted model's graph in functional ATen, to call with its weights."""

    def __init__(self, model: nn.Module, *inputs: Tensor, dtype: torch.dtype = BF16) -> None:
        program = functional(convert_model(model.eval(), inputs, dtype=dtype).exported_program)
        assert isinstance(program.graph_module, fx.GraphModule)
        self.gm, self.weights, self.inputs = program.graph_module, weights_of(program), inputs
        self.ctx = Context(Policy("O2", dtype), weights=self.weights)

    def __call__(self) -> Any:
        given = iter(self.inputs)
        places = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            found = self.gm(*(self.weights.value(n) if n in self.weights else next(given) for n in places))
        return found if len(found) > 1 else found[0]


X = torch.randn(3, 4)


def test_a_linear_layer_reads_a_transposed_fp32_copy() -> None:
    given = Functional(nn.Linear(4, 2), X)
    check_pass(PASS, given.gm, given.ctx, """
        input p_bias_f32: f32[2]
        input p_weight_t_f32: f32[4, 2]
        input input: f32[3, 4]
        _to_copy: bf16[3, 4] = cast(input, bf16)
        _to_copy_default: f32[3, 4] = cast(_to_copy, f32)
        addmm: f32[3, 2] = addmm(p_bias_f32, _to_copy_default, p_weight_t_f32)
        _to_copy_default_1: bf16[3, 2] = cast(addmm, bf16)
        _to_copy_1: f32[3, 2] = cast(_to_copy_default_1, f32)
        return _to_copy_1
    """, modified=True)  # fmt: skip


def exact(model: nn.Module, low: torch.dtype, *inputs: Tensor) -> Tensor:
    """Low operands, exact sums, one rounding."""
    wide = {name: value.to(low).double() for name, value in model.state_dict().items()}
    rounded = tuple(x.to(low).double() for x in inputs)
    result: Tensor = torch.func.functional_call(model.double(), wide, rounded)
    return result.float().to(low).float()


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_numbers_are_low_operands_fp32_sums_and_one_rounding(kind: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(16, 8) if kind == "linear" else nn.Conv2d(3, 4, 3)
    x = torch.randn(5, 16) if kind == "linear" else torch.randn(2, 3, 6, 6)
    given = Functional(model, x, dtype=low)
    check_pass(PASS, given.gm, given.ctx, modified=True)
    # fp32 sums may fall on the other side of a rounding: one unit in the last place of the low dtype
    torch.testing.assert_close(given(), exact(model, low, x), rtol=torch.finfo(low).eps, atol=1e-3)


class Shared(nn.Module):
    """One weight in two products, one input for both, behind two views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), F.linear(x.view(2, 2, 4), self.fc.weight)


def test_one_copy_of_a_weight_and_one_of_an_input() -> None:
    given = Functional(Shared(), torch.randn(4, 4))
    before = given()
    check_pass(PASS, given.gm, given.ctx, modified=True)
    names = [given.weights[n].path for n in given.gm.graph.nodes if n in given.weights]
    assert names == ["fc.weight_t_f32"]
    widened = [n for n in given.gm.graph.nodes if ir.is_float_cast(n) and ir.cast_dtype(n) is F32]
    products = ops(given.gm, "mm")
    assert len(products) == 2
    assert len([n for n in widened if any(p in _below(n) for p in products)]) == 1
    for ours, theirs in zip(given(), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-3)


def _below(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for user in node.users:
        found |= {user} | (_below(user) if user.target in (torch.ops.aten.view.default,) else set())
    return found


def test_a_product_of_two_computed_values_stays() -> None:
    class Scores(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, x.transpose(1, 2))

    given = Functional(Scores(), torch.randn(2, 3, 4))
    check_pass(PASS, given.gm, given.ctx, modified=False)


def test_a_cpu_with_units_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Functional(nn.Linear(4, 2), X)
    monkeypatch.setenv("AMP_CPU_KERNELS", "native")
    check_pass(PASS, given.gm, given.ctx, modified=False)


def test_without_weights_or_with_autocasts_policy_it_does_nothing() -> None:
    given = Functional(nn.Linear(4, 2), X)
    assert PASS.run(given.gm, context()) is False
    assert PASS.run(given.gm, Context(Policy.torch("cpu", BF16), weights=given.weights)) is False


def test_it_needs_a_functional_graph() -> None:
    with pytest.raises(PipelineError, match="needs 'functional'"):
        Pipeline((PASS,), (facts.CAPTURED,))


@given(st.integers(1, 3), st.integers(1, 8), st.booleans(), st.sampled_from([BF16, F16]))
@settings(max_examples=6)
def test_any_sizes(rows: int, width: int, bias: bool, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(width, 3, bias=bias), torch.randn(rows, 2, width)
    given = Functional(model, x, dtype=low)
    check_pass(PASS, given.gm, given.ctx, modified=True)
    torch.testing.assert_close(given(), exact(model, low, x), rtol=torch.finfo(low).eps, atol=1e-3)
