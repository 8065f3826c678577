"""What people do with a model beside calling it, and code around graph breaks: found by people who tried."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import AmpWarning, amp_compile, ir, precision, set_precision
from amp_compiler.common.errors import ArgumentError
from helpers import BF16, F16, F32, ExportMixed, ops

X = torch.randn(3, 4)


class Chatty(nn.Module):
    """A module whose forward cannot be one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


class Around(nn.Module):
    def __init__(self, region: Any = None) -> None:
        super().__init__()
        self.first, self.h, self.last, self.region = nn.Linear(4, 4), Chatty(), nn.Linear(4, 4), region

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.region is None:
            return self.last(self.h(x))
        with self.region():
            x = self.h(x)
        return self.last(x)


def precisions(fast: Any) -> dict[str, str]:
    return {row.module: row.precision for row in fast.report().rows if row.op == "linear"}


def test_a_mark_on_a_module_whose_graph_breaks() -> None:
    model = Around()
    set_precision(model.h, "float32")
    fast = amp_compile(model, dtype=BF16, backend="eager")
    fast(X)
    found = precisions(fast)
    assert (found["h.a"], found["h.b"], found["first"], found["last"]) == ("float32", "float32", "bfloat16", "bfloat16")


def test_a_mark_on_a_list_of_modules() -> None:
    """A ModuleList is never called, and is still a module."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.blocks = nn.ModuleList([nn.Linear(4, 4)])
    model.forward = lambda x: model.blocks[0](model[0](x))
    set_precision(model.blocks, "float32")
    fast = amp_compile(model, dtype=BF16, backend="eager")
    fast(X)
    assert precisions(fast) == {"0": "bfloat16", "blocks.0": "float32"}


@pytest.mark.parametrize(
    ("region", "said"),
    [
        (lambda: precision("float32"), "runs the function that contains it as plain Python"),
        (lambda: torch.autocast("cpu", enabled=False), "graph break inside a torch.autocast region"),
    ],
    ids=["precision", "autocast"],
)
def test_a_graph_break_inside_a_region_is_told_and_not_lost(region: Any, said: str) -> None:
    fast = amp_compile(Around(region), dtype=BF16, backend="eager")
    with pytest.warns(AmpWarning, match=said):
        fast(X)
    found = precisions(fast)
    assert {found.get("h.a", "float32"), found.get("h.b", "float32")} == {"float32"}
    with warnings.catch_warnings(action="error"):
        fast(X)


class Twice(nn.Module):
    """The same module outside of a scope and inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.h = Chatty()

    def forward(self, x: Tensor) -> Any:
        return self.h(x), self.inside(x)

    @precision("float32")
    def inside(self, x: Tensor) -> Tensor:
        return self.h(x)


def test_a_scope_around_a_graph_break_does_not_reuse_what_was_compiled_outside() -> None:
    model = Twice()
    fast = amp_compile(model, dtype=BF16, backend="eager")
    with pytest.warns(AmpWarning, match="runs the function that contains it as plain Python"):
        low, full = fast(X)
    assert torch.equal(full, model.h(X))
    assert not torch.equal(low, full)


def test_a_wrong_precision_is_an_error_where_it_is_written() -> None:
    with pytest.raises(ArgumentError, match="flaot32"):
        precision("flaot32")


def test_a_scope_around_the_call_is_told() -> None:
    fast = amp_compile(nn.Linear(4, 4), dtype=BF16, backend="eager")
    with pytest.warns(AmpWarning, match="around a call of it, it does nothing"), precision("float32"):
        fast(X)
    assert precisions(fast) == {"": "bfloat16"}


def test_a_branch_that_begins_with_a_cast() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x = F.linear(x, w) * 2
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float().clamp(-1, 1)
        return x + 1

    fast = amp_compile(fn, dtype=BF16, backend="eager")
    with pytest.warns(AmpWarning, match=r"\* 2: stays in fp32.*clamp"):
        fast(X, torch.randn(4, 4))
    assert ir.dtype_of(ops(fast.graphs[0], "mul")[0]) is F32


class Generator(nn.Module):
    """Calls itself from another method, as ``generate`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.steps = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    @torch.no_grad()
    def generate(self, x: Tensor, n: int = 3) -> Tensor:
        for _ in range(n):
            x = self(x)
            self.steps += 1
        return x

    def named(self) -> str:
        return super().extra_repr() + type(self).__name__

    def through_its_class(self, x: Tensor) -> Tensor:
        return type(self).generate(self, x, 1)


def test_methods_call_the_compiled_model() -> None:
    model = Generator()
    fast = amp_compile(model, dtype=BF16, backend="eager")
    out = fast.generate(X)
    assert model.steps == 3
    before = {**vars(model), "steps": 7}
    assert len(fast.graphs) == 1
    assert not torch.equal(out, model.generate(X))
    torch.testing.assert_close(out, model.generate(X), atol=0.05, rtol=0.05)
    model.steps = 6
    assert fast.named() == "Generator"
    assert torch.equal(fast.through_its_class(X), fast(X))
    assert vars(model) == before
    with pytest.raises(TypeError):
        fast.generate(X, "three")
    assert vars(model) == before | {"steps": model.steps}


def test_a_compiled_forward_put_into_its_model() -> None:
    for model in (Generator(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())):
        expected = model(X)
        model.forward = amp_compile(model.forward, dtype=BF16, backend="eager")
        out = model(X)
        assert len(model.forward.graphs) == 1
        assert model.forward.report().by_precision["bfloat16"] >= 1
        assert not torch.equal(out, expected)
        torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("tokens", [2, pytest.param(4, marks=pytest.mark.zoo)])
def test_generate_of_transformers(tokens: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    fast = amp_compile(model, dtype=BF16, backend="eager")
    ids = torch.randint(50, (2, 4))
    out = fast.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    assert out.shape == (2, 4 + tokens)
    assert fast.report().by_precision["bfloat16"] > 10
    assert "forward" not in vars(model)


class Bias(nn.Module):
    """A mask of -1e9 that was registered as a buffer; one row is masked whole."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([[0.0, -1e9, -1e9], [0.0, 0.0, -1e9], [-1e9, -1e9, -1e9]]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return torch.softmax(h @ h.t() + self.mask, -1) @ h


class FullMask(nn.Module):
    """The limit of fp32, cast to the dtype of the queries; one row is masked whole."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.fc(x)[None, None]
        lowest = torch.finfo(torch.float32).min
        mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), lowest)
        mask[2] = lowest
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask.to(q.dtype))[0, 0]


@pytest.mark.parametrize(
    ("make", "level"),
    [
        (Bias, "O1"), (Bias, "O2"), (Bias, "O3"), (FullMask, "auto"), (FullMask, "O2"),
        *(pytest.param(make, level, marks=pytest.mark.zoo)
          for make, level in ((Bias, "auto"), (FullMask, "O1"), (FullMask, "O3"))),
    ],
)  # fmt: skip
def test_a_mask_that_the_code_holds_as_a_tensor(level: str, make: Any) -> None:
    model = make()
    ours = amp_compile(model, level, dtype=F16, backend="eager")(X), ExportMixed(model, (X,), level=level, dtype=F16)(X)
    for out in ours:
        assert out.isfinite().all()
        torch.testing.assert_close(out, model(X), atol=0.02, rtol=0.02)


def test_batch_norm_with_computed_weights() -> None:
    """Its weight and statistics are fp32 in the model, so they are when the weight comes out of a low op."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            n = self.norm
            return F.batch_norm(self.fc(x), n.running_mean, n.running_var, n.weight * 1.5, n.bias + 1, True)

    for level in ("O1", "auto", "O2", "O3"):
        model = Scaled()
        fast = amp_compile(model, level, dtype=BF16, backend="eager")
        torch.testing.assert_close(fast(X), model(X), atol=0.1, rtol=0.05)


def test_sizes_that_depend_on_values_are_named_with_their_remedy() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            out, best = torch.zeros_like(x), self.gate(x).argmax(-1)
            for k, expert in enumerate(self.experts):
                (rows,) = torch.where(best == k)
                out.index_add_(0, rows, expert(x[rows]))
            return out

    fast = amp_compile(Experts(), backend="eager")
    fast(X)
    report = fast.report()
    assert any("capture_dynamic_output_shape_ops = True" in what for what in report.not_captured)
    assert {row.module: row.precision for row in report.rows if row.op == "linear"} == {
        "gate": "bfloat16", "experts.0": "bfloat16", "experts.1": "bfloat16",
    }  # fmt: skip


def test_a_scope_under_plain_torch_compile_does_nothing() -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        @precision("bfloat16")
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Scoped()
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), model(X))
