"""The dynamo front end: what is captured, where it says it came from, and the traps of torch 2.13
(docs/design.md#capture)."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpModule, AmpWarning, Policy, amp_compile, precision
from amp_compiler.capture import settings
from amp_compiler.common.errors import CaptureError
from networks import NETWORKS, Quantize, Recurrent

BF16, FP32 = torch.bfloat16, torch.float32
LEVELS = ["O0", "O1", "auto", "O2", "O3"]
POLICIES = [*LEVELS, "torch"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(target: Callable[..., Any], level: str = "auto", **options: Any) -> AmpModule:
    """At a level, or with ``Policy.torch`` for the level "torch"."""
    chosen = {"policy": Policy.torch("cpu", BF16)} if level == "torch" else {"level": level}
    module: AmpModule = amp_compile(target, **{"dtype": BF16, "backend": "eager", **chosen, **options})
    return module


def rows(module: AmpModule) -> dict[str, str]:
    """op → precision; the op must occur once."""
    found = [(row.op, row.precision) for row in module.report().rows]
    assert len(dict(found)) == len(found), found
    return dict(found)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


# ------------------------------------------------------------------------------------------- when it runs


def test_nothing_is_captured_before_the_first_call() -> None:
    calls = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                calls.append("eager")
            return x @ x

    fast = compiled(Watched())
    assert fast.graphs == []
    assert fast.history == []
    assert "nothing captured yet" in str(fast.report())
    fast(torch.randn(4, 4))
    assert len(fast.graphs) == 1
    assert calls == []


def test_new_dtype_shape_and_mode_compile_again_and_old_ones_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    fast = compiled(model, dynamic=False)
    fast.eval()
    for x, graphs in (
        (torch.randn(2, 4), 1),
        (torch.randn(2, 4), 1),  # the same signature
        (torch.randn(3, 4), 2),  # a new shape
        (torch.randn(3, 4), 2),
        (torch.randn(2, 4), 2),  # an old one
        (torch.randn(2, 4).requires_grad_(), 3),
    ):
        fast(x)
        assert len(fast.graphs) == graphs
    fast.train()
    fast(torch.randn(2, 4))
    assert len(fast.graphs) == 4
    assert "dropout" in {row.op for row in fast.report(3).rows}
    fast.eval()
    fast(torch.randn(2, 4))
    assert len(fast.graphs) == 4
    double = compiled(lambda x: x * 2, "O2")
    assert double(torch.ones(2)).dtype is FP32
    assert double(torch.ones(2, dtype=torch.float64)).dtype is torch.float64
    assert double(torch.ones(2, dtype=torch.int64)).dtype is torch.int64
    assert len(double.graphs) == 3


def test_one_graph_for_several_batch_sizes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    fixed, last = compiled(copy.deepcopy(model), "O2", dynamic=False), torch.randn(16, 4)
    expected = fixed(last)
    for how in ("dynamic=True", "mark_dynamic", "second size"):
        torch._dynamo.reset()
        fast = compiled(model, "O2", dynamic=True if how == "dynamic=True" else None)
        for x in (torch.randn(3, 4), torch.randn(5, 4), torch.randn(9, 4), last.clone()):
            if how == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 0)
            out = fast(x)
            out.sum().backward()
            assert out.shape == (len(x), 2), how
        assert torch.equal(out, expected), how
        # without a word, Dynamo takes the first size for fixed and the second for a sign that it is not
        assert len(fast.graphs) == (2 if how == "second size" else 1), how


def test_many_instances_of_one_class_do_not_use_up_the_limit() -> None:
    for level in LEVELS * 2:  # Dynamo's own limit is 8
        fast = compiled(nn.Linear(4, 4), level)
        with torch.no_grad():
            fast(torch.randn(2, 4))
        assert len(fast.graphs) == 1
        assert fast.report().notes == ()


# ------------------------------------------------------------------------------------- where it came from


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()))
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(4, 4)}) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block["fc"](x)
        return self.head(x)


def test_module_paths_are_those_of_named_modules() -> None:
    fast = compiled(Nested())
    fast(torch.randn(2, 4))
    found = [(row.op, row.module) for row in fast.report().rows]
    assert found == [
        ("linear", "stem.0"), ("linear", "stem.1.0"), ("gelu", "stem.1.1"), ("linear", "blocks.0.fc"), ("add", ""),
        ("linear", "blocks.1.fc"), ("add", ""), ("linear", "head"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["conv_bn", "encoder", "shared_weights", "graph_break"])
def test_every_op_has_a_module_and_a_line(name: str) -> None:
    model, args = NETWORKS[name]()
    fast = compiled(model, "O2")
    with torch.no_grad():
        fast(*args)
    report = fast.report()
    paths = dict(model.named_modules())
    assert {row.module for row in report.rows} <= set(paths)
    for row in report.rows:
        if row.op in ("linear", "layer_norm", "batch_norm", "conv2d", "embedding"):
            assert row.op == {"Embedding": "embedding", "Conv2d": "conv2d", "LayerNorm": "layer_norm"}.get(
                type(paths[row.module]).__name__, row.op
            )
            assert row.module, row
        assert ".py:" in row.source, row


def test_function_has_lines_and_no_module() -> None:
    def function(x: Tensor) -> Tensor:
        y = x @ x  # the line that is looked for
        return y.exp()

    fast = compiled(function)
    fast(torch.randn(3, 3))
    first, second = fast.report().rows
    assert (first.module, second.module) == ("", "")
    assert "test_dynamo.py:" in first.source
    assert first.source.endswith("in function: y = x @ x  # the line that is looked for")
    assert second.source.endswith("in function: return y.exp()")


# ------------------------------------------------------------------------------- gradients of one's own


class Twice(torch.autograd.Function):
    """Two inputs, two outputs, a number, and a backward that no tracer could guess."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        ctx.factor = factor
        return a @ b, a + b

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        return 7 * first + a, ctx.factor * second - b, None


@pytest.mark.parametrize("policy", POLICIES)
def test_custom_gradient_is_the_functions_own(policy: str) -> None:
    """The derivative of ``round`` is zero; ``Quantize`` says otherwise: 1 inside of ±1 and 0.5 outside. ``Twice`` has
    several inputs and outputs."""

    def program(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return Quantize.apply(x * 1.0), *Twice.apply(a, b, 3.0)

    # small integers: exact in every dtype
    a, b = (torch.randint(-3, 4, (4, 4)).float().requires_grad_() for _ in range(2))
    x = torch.tensor([-2.0, -0.5, 0.25, 3.0], requires_grad=True)
    fast = compiled(program, policy)
    rounded, first, second = fast(x, a, b)
    tangents = [torch.ones_like(rounded), torch.ones_like(first), torch.full_like(second, 2.0)]
    torch.autograd.backward([rounded, first, second], tangents)
    assert torch.equal(rounded.float(), x.detach())
    assert torch.equal(x.grad, torch.tensor([0.5, 1.0, 1.0, 0.5]))
    assert torch.equal(first.float(), (a @ b).detach())
    assert torch.equal(a.grad, 7 + a.detach())
    assert torch.equal(b.grad, 6 - b.detach())


# ------------------------------------------------------------------------------------------ checkpointing


class Checkpointed(nn.Module):
    def __init__(self, wrap: bool, dropout: float) -> None:
        super().__init__()
        self.wrap = wrap
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.body, x, use_reentrant=False) if self.wrap else self.body(x)
        return self.out(torch.relu(y))


@pytest.mark.parametrize(
    ("policy", "dropout"),
    [
        ("auto", 0.5), ("O2", 0.0), ("torch", 0.5),
        *(pytest.param(policy, dropout, marks=pytest.mark.zoo)
          for policy, dropout in (("auto", 0.0), ("O2", 0.5), ("torch", 0.0))),
    ],
)  # fmt: skip
def test_checkpoint_gives_the_gradients_it_gives_without(policy: str, dropout: float) -> None:
    """The recomputed forward has the precisions, and the random numbers, of the first one."""
    results = []
    for wrap in (True, False):
        torch.manual_seed(0)
        model, x = Checkpointed(wrap, dropout), normal(5, 8)
        fast = compiled(model, policy)
        torch.manual_seed(3)
        out = fast(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
        linear = [row for row in fast.report().rows if row.op == "linear"]
        assert [row.precision for row in linear] == ["bfloat16"] * 3
        assert {row.module for row in linear} == {"body.0", "body.3", "out"}
        assert len(fast.graphs) == 1
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------- branches


@pytest.mark.parametrize(
    "policy", ["auto", "O3", "torch", *(pytest.param(policy, marks=pytest.mark.zoo) for policy in ("O0", "O1", "O2"))]
)
def test_cond_runs_both_ways_with_gradients(policy: str) -> None:
    def program(p: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(p, lambda x: torch.relu(x @ w), lambda x: x.tanh() * 2, (x,))

    fast = compiled(program, policy)
    for p in (torch.tensor(True), torch.tensor(False)):
        x, w = normal(4, 4), normal(4, 4)
        y, v = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        fast(p, x, w).sum().backward()
        (torch.relu(y @ v) if p else y.tanh() * 2).sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=0.05, atol=0.1)
        if p:
            torch.testing.assert_close(w.grad, v.grad, rtol=0.05, atol=0.1)
    assert len(fast.graphs) == 1
    assert fast.report().not_captured == ()


# -------------------------------------------------------------------------------------------------- scopes


@precision("float32")
def careful(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.mark.parametrize("policy", ["auto", "O2", "O3", "torch"])
def test_precision_scope(policy: str) -> None:
    """A product inside the scope is fp32, and so are its gradients, whatever is around it: by ``with``, by the
    decorator, and nested."""

    def program(*given: Tensor) -> tuple[Tensor, ...]:
        x, w, y, v, z, u = given
        with precision("float32"):
            first = torch.mm(x, w)
        with precision("bfloat16"), precision("float32"):
            third = torch.bmm(z, u)
        return first, careful(y, v), third

    fast, given = compiled(program, policy), [normal(*([4, 4] if i < 4 else [1, 4, 4])) for i in range(6)]
    outs = fast(*given)
    tangents = [torch.randn(out.shape) for out in outs]
    torch.autograd.backward(outs, tangents)
    assert rows(fast) == {"mm": "float32", "matmul": "float32", "bmm": "float32"}
    for form, (out, tangent) in enumerate(zip(outs, tangents, strict=True)):
        x, w = given[2 * form : 2 * form + 2]
        assert torch.equal(out, x @ w), form
        assert torch.equal(x.grad, tangent @ w.detach().mT), form
        assert torch.equal(w.grad, x.detach().mT @ tangent), form


def test_innermost_scope_wins_and_ends_where_it_ends() -> None:
    def program(x: Tensor) -> Tensor:
        x = torch.exp(x * 1)
        with precision("float32"):
            x = torch.matmul(x, x)
            with precision("bfloat16"):
                x = torch.sin(x)
            x = torch.bmm(x[None], x[None])
        return torch.mm(x[0], x[0])

    fast = compiled(program, "O1")
    fast(torch.randn(4, 4))
    found = {row.op: row.precision for row in fast.report().rows}
    assert [found[op] for op in ("exp", "matmul", "sin", "bmm", "mm")] == [
        "float32", "float32", "bfloat16", "float32", "bfloat16",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", ["auto", "O2", "torch"])
def test_nested_autocast(policy: str) -> None:
    """``enabled=False`` is fp32; another dtype replaces the low one inside."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = torch.matmul(x, w)
        with torch.autocast("cpu", enabled=False):
            second = torch.mm(x, w)
        with torch.autocast("cpu", dtype=torch.float16):
            third = F.linear(x, w)
            with torch.autocast("cpu", enabled=False):
                fourth = torch.addmm(w, x, w)
        return first, second, third, fourth

    fast, x, w = compiled(program, policy, keep_output_dtypes=False), normal(4, 4), normal(4, 4)
    out = fast(x, w)
    assert [o.dtype for o in out] == [BF16, FP32, torch.float16, FP32]
    assert rows(fast) == {"matmul": "bfloat16", "mm": "float32", "linear": "float16", "addmm": "float32"}
    assert torch.equal(out[1], torch.mm(x, w))
    assert torch.equal(out[2], F.linear(x.half(), w.half()))
    torch.autograd.backward(out[1], torch.ones(4, 4))
    assert torch.equal(x.grad, torch.ones(4, 4) @ w.detach().t())


def test_called_inside_the_users_autocast_the_policy_wins() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    expected = compiled(model, "O0")(x)
    fast = compiled(model, "O0")
    with torch.autocast("cpu", dtype=BF16):
        with pytest.warns(AmpWarning, match="its own policy wins"):
            out = fast(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            fast(x)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(out, expected)


# ------------------------------------------------------------------------- layers that hide their ops


@pytest.mark.parametrize(
    ("kind", "training"), [(nn.RNN, True), (nn.GRU, True), (nn.GRU, False)], ids=["rnn", "gru", "gru in eval"]
)
def test_recurrent_layers_are_captured_op_by_op(kind: Any, training: bool) -> None:
    model = Recurrent(kind, 1)
    fast = compiled(model.train(training))
    out = fast(normal(2, 2, 16))
    if training:
        out.sum().backward()
        assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())
    report = fast.report()
    linear = [row for row in report.rows if row.op in ("linear", "matmul", "mm", "addmm") and row.module == "rnn"]
    assert linear
    assert {row.precision for row in linear} == {"bfloat16"}
    assert report.not_captured == ()


def test_transformer_layer_in_eval_is_captured_op_by_op() -> None:
    model, args = NETWORKS["torch_encoder"]()
    fast = compiled(model.eval())
    with torch.no_grad():
        out = fast(*args)
    ops = [row.op for row in fast.report().rows]
    assert not [op for op in ops if "fwd" in op or "native_multi_head" in op]
    assert ops.count("linear") >= 2 * 4
    assert ops.count("layer_norm") == 2 * 2
    with torch.no_grad():
        torch.testing.assert_close(out, model(*args), rtol=0.05, atol=0.05)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)


@pytest.mark.parametrize("fastpath", [True, False])
@pytest.mark.parametrize("model", [nn.Linear(4, 4), Fails()], ids=["works", "fails"])
def test_settings_of_the_user_are_restored(model: nn.Module, fastpath: bool) -> None:
    rnn, mkldnn = torch._dynamo.config.allow_rnn, torch._C._get_mkldnn_enabled()
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fastpath)
    try:
        fast = compiled(model)
        if isinstance(model, Fails):
            with pytest.raises(Exception, match=r"shape|size|mat1"):
                fast(torch.randn(2, 4))
        else:
            fast(torch.randn(2, 4))
        assert torch.backends.mha.get_fastpath_enabled() == fastpath
        assert torch._dynamo.config.allow_rnn == rnn
        assert torch._C._get_mkldnn_enabled() == mkldnn
        with torch.backends.mkldnn.flags(enabled=False):
            torch._dynamo.reset()
            if not isinstance(model, Fails):
                compiled(model)(torch.randn(2, 4))
            assert not torch._C._get_mkldnn_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


# ------------------------------------------------------------------------------------------ with no gradient


def test_no_grad_takes_the_inference_path_and_folds() -> None:
    fast, x = compiled(nn.Linear(4, 4)), torch.randn(2, 4)
    with torch.no_grad():
        out = fast(x)
    assert not out.requires_grad
    assert [r.graph for r in fast.history if r.name == "fold_casts"] == ["inference"]
    assert fast(x).requires_grad
    assert [r.graph for r in fast.history if r.name == "fold_casts"] == ["inference", "joint"]
    with torch.inference_mode():
        assert torch.equal(fast(x), out)


# ------------------------------------------------------------------------------------- what is not captured


def test_graph_breaks_are_listed_with_their_line() -> None:
    model, args = NETWORKS["graph_break"]()
    fast = compiled(model)
    fast(*args)
    (what,) = fast.report().not_captured
    assert "graph break" in what
    assert "networks.py:" in what
    assert len(fast.graphs) == 2
    assert [row.precision for row in fast.report().rows if row.op == "linear"] == ["bfloat16"] * 2


def test_break_inside_a_scope_is_reported() -> None:
    """A break inside ``precision`` makes Dynamo skip the frame: what still runs is right, and it is said."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with precision("float32"):
                x = self.first(x)
                torch._dynamo.graph_break()
                return self.second(x)

    model, x = Broken(), torch.randn(2, 4)
    fast = compiled(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fast(x)
    assert torch.equal(out, model(x)), "the scope says fp32, captured or not"
    report = fast.report()
    assert report.not_captured or [w for w in caught if issubclass(w.category, AmpWarning)]
    assert report.not_captured, "the report must say it too"


def test_frame_that_dynamo_skips_is_reported() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.out = Opaque(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inside(x))

    model, x = Outer(), torch.randn(2, 4)
    fast = compiled(model)
    out = fast(x)
    report = fast.report()
    assert {row.module for row in report.rows} == {"out"}
    assert len(report.not_captured) >= 1
    assert torch.equal(out, model.to(BF16)(x.to(BF16)).float()), "the layer inside runs under autocast"


def test_model_of_plain_python_is_reported() -> None:
    @torch.compiler.disable
    def opaque(x: Tensor) -> Tensor:
        return x @ x

    fast, x = compiled(lambda x: opaque(x)), torch.randn(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(fast(x), (x.to(BF16) @ x.to(BF16)).float())
    assert fast.graphs == []
    assert "no tensor op was captured" in str(fast.report())


def test_fullgraph_refuses_a_break() -> None:
    model, args = NETWORKS["graph_break"]()
    with pytest.raises(CaptureError, match="must be a single graph"):
        compiled(model, fullgraph=True)(*args)


@pytest.fixture
def knows_of_no_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings._Frozen, "by_user", False)


@pytest.mark.usefixtures("knows_of_no_frozen_objects")
def test_objects_that_the_user_has_frozen_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are counted once: that takes as long as a collection, and a model may have hundreds of frames."""
    count, counted = gc.get_freeze_count, []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or count())
    models = [amp_compile(nn.Linear(4, 4), backend="eager") for _ in range(3)]
    gc.freeze()
    try:
        for fast in models:
            fast(torch.ones(2, 4))
        assert len(counted) == 1
        assert count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("knows_of_no_frozen_objects")
def test_nothing_is_left_frozen() -> None:
    gc.unfreeze()

    def fail(x: Tensor) -> Tensor:
        return x.reshape(3, 7)

    for function in (nn.Linear(4, 4), fail):
        with contextlib.suppress(RuntimeError):
            amp_compile(function, backend="eager")(torch.ones(2, 4))
    assert gc.get_freeze_count() == 0
