"""Code that Dynamo does not capture: a loop that logs, wrappers, builtins, other people's code.

Its products run in low precision, it sees the dtypes that it would see without us, and nothing of the user's changes.
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpWarning, Policy, amp_compile, compile_train_step, precision, set_precision
from helpers import in_turn

BF16, F16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOG = logging.getLogger("tests.uncaptured")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    LOG.setLevel(logging.CRITICAL)
    with warnings.catch_warnings(action="ignore"):
        yield
    torch._dynamo.reset()
    assert _len_torch_function_stack() == 0
    assert not torch.is_autocast_enabled("cpu")


def is_rounded(value: Tensor, dtype: torch.dtype = BF16) -> bool:
    """Whether every number is one of the low dtype: what a product that ran low gives."""
    return value.dtype is FP32 and torch.equal(value, value.to(dtype).float())


def precisions(compiled: Any, op: str = "linear") -> dict[str, str]:
    """module → precision of every row of an op."""
    return {row.module: row.precision for row in compiled.report().rows if row.op == op}


def as_autocast(model: Callable[..., Any], *args: Any, dtype: torch.dtype = BF16) -> Any:
    with torch.autocast("cpu", dtype=dtype):
        return model(*args)


# --------------------------------------------------------------------------------------------- the user's cases


class Logs(nn.Module):
    """A loop that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            LOG.warning("layer %d gets %s", i, x.dtype)
            x = torch.relu(layer(x))
            if x.dtype is not FP32:
                raise TypeError(f"the code sees {x.dtype}")
        return x


class Wrapper(nn.Module):
    """What a monitoring tool puts around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            LOG.warning("begin")
            self.calls.append(threading.get_ident())
            return self.model(*args, **kwargs)
        finally:
            LOG.warning("end")


class Builtin(nn.Module):
    """Layers that a builtin calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        LOG.warning("reduce")
        return functools.reduce(lambda value, layer: layer(value), sorted(self.layers, key=lambda layer: 0), x)


class Disabled(nn.Module):
    """Other people's code that asks not to be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.weight


class Breaks(nn.Module):
    """A graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        print("", end="")
        return self.second(x.relu())


class Functional(nn.Module):
    """Products by functions, in a frame that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            LOG.warning("step")
            x = F.linear(x, self.weight, self.bias)
            self.seen.append(x.dtype)
            x = x @ self.weight
            x = torch.einsum("ij,jk->ik", x, self.weight)
            x = x.matmul(self.weight.t())
        return x


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a loop that logs": (Logs, {"layers.0", "layers.1"}),
    "a wrapper": (lambda: Wrapper(sequential()), {"model.0", "model.2"}),
    "a wrapper of a loop": (lambda: Wrapper(Logs()), {f"model.layers.{i}" for i in range(2)}),
    "a Sequential root": (lambda: nn.Sequential(nn.Linear(8, 8), Logs(), nn.Linear(8, 8)),
                          {"0", "2", *(f"1.layers.{i}" for i in range(2))}),
    "a builtin": (Builtin, {"layers.0", "layers.2"}),
    "a break in the middle": (Breaks, {"first", "second"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_run_low_and_nothing_of_the_model_changes(name: str) -> None:
    make, layers = CASES[name]
    model, x = make(), torch.randn(4, 8, requires_grad=True)
    before = {path: dict(m.__dict__) for path, m in model.named_modules()}
    call = nn.Module.__call__
    fast = amp_compile(model, "O1", dtype=BF16)
    for _ in range(3):
        out = fast(x)
    assert precisions(fast) == dict.fromkeys(layers, "bfloat16")
    assert not torch.equal(out, model(x))
    torch.testing.assert_close(out, model(x), rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())
    assert {path: set(m.__dict__) for path, m in model.named_modules()} == {p: set(d) for p, d in before.items()}
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert nn.Module.__call__ is call
    pickle.loads(pickle.dumps(model))
    copy.deepcopy(model)
    assert fast.report().not_captured


@pytest.mark.parametrize(("name", "dtype"), in_turn((*CASES, "disabled", "functional"), (BF16, F16)))
def test_policy_torch_is_autocast(name: str, dtype: torch.dtype) -> None:
    class Free(Logs):  # the loop that logs, without its check of the dtype
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                LOG.warning("%s", x.dtype)
                x = torch.relu(layer(x))
            return x

    makers = {**{k: make for k, (make, _) in CASES.items() if "loop" not in k and "root" not in k},
              "disabled": Disabled, "functional": Functional}  # fmt: skip
    model, x = makers.get(name, Free)(), torch.randn(4, 8)
    expected = as_autocast(model, x, dtype=dtype)
    expected.float().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    fast = amp_compile(model, policy=Policy.torch("cpu", dtype), keep_output_dtypes=False)
    out = fast(x)
    assert out.dtype is expected.dtype
    assert torch.equal(out, expected)
    out.float().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("make", [Functional, Disabled])
def test_what_is_left_runs_under_autocast_and_sees_fp32(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(4, 8)
    fast = amp_compile(model, dtype=BF16)
    for _ in range(2):
        out = fast(x)
    assert is_rounded(out)
    assert not torch.equal(out, model(x))
    if isinstance(model, Functional):
        assert set(model.seen) == {FP32}


def test_ddp_around_a_sequential() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model, x = nn.parallel.DistributedDataParallel(sequential()), torch.randn(4, 8)
        fast = amp_compile(model, dtype=BF16)
        fast(x).sum().backward()
        assert precisions(fast) == {"module.0": "bfloat16", "module.2": "bfloat16"}
        assert all(p.grad is not None for p in model.parameters())
        step = compile_train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), dtype=BF16)
        losses = [float(step(x, torch.zeros(4, 8)).loss) for _ in range(5)]
        assert losses[-1] < losses[0]
        assert set(precisions(step).values()) == {"bfloat16"}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("keep", "dtype"), in_turn((True, False), (BF16, F16)))
def test_low_values_do_not_meet_fp32_parameters(keep: bool, dtype: torch.dtype) -> None:
    """addmv, mv, dot and index_put_ refuse two dtypes; autocast fails here and fp32 does not."""

    class Mixed(Breaks):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            print("", end="")
            y = torch.addmv(h[0], self.second.weight, h[1])
            LOG.warning("between")
            y = y + torch.mv(self.second.weight, h[0]) * torch.dot(h[0], self.second.bias)
            total = torch.zeros(8)
            total[torch.tensor([0, 1])] = y[:2]
            return torch.lerp(total, y, 0.5)

    model, x = Mixed(), torch.randn(4, 8)
    out = amp_compile(model, dtype=dtype, keep_output_dtypes=keep)(x)
    torch.testing.assert_close(out.float(), model(x), rtol=0.1, atol=0.1)


def test_the_result_may_be_low_and_what_is_between_is_not() -> None:
    model = Breaks()
    out = amp_compile(model, dtype=BF16, keep_output_dtypes=False)(torch.randn(4, 8))
    assert out.dtype is BF16
    step = amp_compile(Logs(), dtype=BF16, keep_output_dtypes=False)
    step(torch.randn(4, 8))  # raises if its code sees bfloat16


def test_what_is_handed_over_twice() -> None:
    """Two casts that give their source back, which a break makes outputs of one graph: both keep the dtype."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.type_as(w), x.type_as(w)
        print("", end="")
        return first.clone(), second + 1

    x = torch.randn(3, 4)
    out = amp_compile(program, "O3", dtype=BF16)(x, torch.randn(4))
    torch.testing.assert_close(out, (x, x + 1), rtol=0.01, atol=0.01)


# ------------------------------------------------------------------------------------------------- an interpreter


class Interpreter(nn.Module):
    """Runs a program over its own layers, as network fuzzers and pipeline tools do."""

    def __init__(self, program: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.program = program
        self.params = nn.ParameterDict({"w": torch.randn(8, 8) / 3, "k": torch.randn(8, 8, 3) / 5})
        self.layers = nn.ModuleDict({
            "linear": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "gru": nn.GRU(8, 8, batch_first=True),
            "attention": nn.MultiheadAttention(8, 2, batch_first=True), "block": sequential(),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for number, (name, argument) in enumerate(self.program):
            LOG.warning("%d %s %s", number, name, argument)
            x = getattr(self, f"run_{name}")(x, argument)
        return x

    def run_layer(self, x: Tensor, name: str) -> Tensor:
        layer = self.layers[name]
        LOG.warning("layer")
        if name == "attention":
            return layer(x, x, x)[0]
        return layer(x)[0] if name == "gru" else layer(x)

    def run_product(self, x: Tensor, name: str) -> Tensor:
        for _ in range(1):  # a break in a loop: the frame is skipped
            LOG.warning("product")
        if name == "conv":
            return F.conv1d(x.transpose(1, 2), self.params["k"], padding=1).transpose(1, 2)
        return x @ self.params["w"]

    def run_function(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)


PROGRAMS: list[list[tuple[str, Any]]] = [
    [("layer", "linear"), ("function", torch.relu), ("product", "matmul"), ("layer", "norm")],
    [("product", "conv"), ("function", torch.tanh), ("layer", "block"), ("function", torch.softmax)],
    [("layer", "attention"), ("product", "matmul"), ("layer", "gru"), ("function", torch.abs)],
]


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.zoo)])
def test_an_interpreter_is_low_where_autocast_is(number: int) -> None:
    program = [(name, functools.partial(a, dim=-1) if a is torch.softmax else a) for name, a in PROGRAMS[number]]
    model, x = Interpreter(program), torch.randn(2, 4, 8)
    fast = amp_compile(model, "auto", dtype=BF16)
    shares = fast.report(inputs=x).work
    assert shares is not None
    assert shares["float32"] == 0
    assert shares["captured"] + shares["autocast"] == pytest.approx(1)
    assert (shares["autocast"] > 0) == any(name == "product" for name, _ in program)
    assert fast.report().low_flops_share == 1
    torch.testing.assert_close(fast(x), as_autocast(model, x).float(), rtol=0.05, atol=0.05)


# ------------------------------------------------------------------------------------------------- the neighbourhood


@pytest.mark.parametrize("scale", [1e-6, 300.0])
def test_fp16_with_tiny_and_large_values(scale: float) -> None:
    """Finite where autocast is: a product's result is rounded once, and fp32 code goes on from there."""
    model, x = Functional(), torch.randn(4, 8) * scale
    model.weight.data /= 3
    out, expected = amp_compile(model, dtype=F16)(x), as_autocast(model, x, dtype=F16)
    assert torch.equal(out.isfinite(), expected.isfinite())
    torch.testing.assert_close(out, expected.float(), rtol=0.05, atol=1e-2 * scale)


def test_exceptions_come_through_and_leave_nothing() -> None:
    class Fails(Functional):
        def forward(self, x: Tensor, fail: bool) -> Tensor:
            for _ in range(1):
                LOG.warning("step")
                x = F.linear(x, self.weight)
                if fail:
                    raise KeyError("the user's own")
            return x

    model, x = Wrapper(Fails()), torch.randn(4, 8)
    fast = amp_compile(model, dtype=BF16)
    for fail in (True, False, True, False):
        if fail:
            with pytest.raises(KeyError, match="the user's own"):
                fast(x, True)
        else:
            assert is_rounded(fast(x, False))
        assert _len_torch_function_stack() == 0
        assert model.model(x, False).dtype is FP32
        assert not is_rounded(model(x, False))
    wrong = torch.randn(4, 7)
    with pytest.raises(RuntimeError, match="shape"):
        fast(wrong, False)
    assert is_rounded(fast(x, False))


def test_threads_do_not_see_each_other() -> None:
    """While one thread is in uncaptured code of a compiled model, others run theirs as they are, or compiled."""
    model, x = Functional(), torch.randn(4, 8)
    fast, expected = amp_compile(model, dtype=BF16), model(x)
    low = fast(x)
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):
                LOG.warning("wait")
                inside.set()
                assert go_on.wait(60)
                x = x @ x.t()
            return x

    waiting, results = amp_compile(Waits(), dtype=BF16), []
    thread = threading.Thread(target=lambda: results.append(waiting(x)))
    thread.start()
    assert inside.wait(60)
    try:
        assert torch.equal(model(x), expected)
        assert _len_torch_function_stack() == 0
        assert torch.equal(fast(x), low)
    finally:
        go_on.set()
        thread.join()
    assert is_rounded(results[0])
    several: list[Tensor] = []
    threads = [threading.Thread(target=lambda: several.append(fast(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(several) == 4
    assert all(torch.equal(out, low) for out in several)


def test_enabled_false_runs_the_original() -> None:
    model, x = Functional(), torch.randn(4, 8)
    fast = amp_compile(model, dtype=BF16)
    low = fast(x)
    fast.enabled = False
    assert torch.equal(fast(x), model(x))
    fast.enabled = True
    assert torch.equal(fast(x), low)
    untouched = amp_compile(Functional(), "O0")
    assert torch.equal(untouched(x), untouched.original(x))


def test_lists_rules_marks_and_scopes_hold() -> None:
    x = torch.randn(4, 8)
    assert not is_rounded(amp_compile(Functional(), dtype=BF16, black_list=["linear", "matmul", "einsum"])(x))
    inner = Logs()
    set_precision(inner, "float32")
    model = Wrapper(inner)
    assert torch.equal(amp_compile(model, dtype=BF16)(x), model(x)), "set_precision of a module that is not captured"
    model = Logs()
    fast = amp_compile(model, dtype=BF16, exclude=["layers.1"])
    fast(x)
    assert precisions(fast) == {"layers.0": "bfloat16", "layers.1": "float32"}
    model = Wrapper(Functional())
    assert torch.equal(amp_compile(model, dtype=BF16, exclude=["model"])(x), model(x)), "functions in such a module"

    class Scoped(Functional):
        def forward(self, x: Tensor) -> Tensor:
            with precision("float32"):
                for _ in range(1):
                    LOG.warning("in the scope")
                    first = x @ self.weight
            with torch.autocast("cpu", enabled=False):
                LOG.warning("in the region")
                second = F.linear(x, self.weight)
            LOG.warning("after")
            return torch.stack([first, second, x.matmul(self.weight)])

    model = Scoped()
    first, second, third = amp_compile(model, dtype=BF16)(x)
    expected = model(x)
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    assert is_rounded(third)


def test_modes_of_the_user_stay_in_order() -> None:
    """A mode that plain code opens is above ours; code that is compiled in it sees the user's alone."""
    seen: list[str] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    class Opens(Functional):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                LOG.warning("step")
                with Sees():
                    x = helper(x @ self.weight)
                x = x @ self.weight
            return x

    def helper(x: Tensor) -> Tensor:
        return x.sin()

    out = amp_compile(Opens(), dtype=BF16)(torch.randn(4, 8))
    assert is_rounded(out)
    assert any("matmul" in name for name in seen)


def test_functions_that_the_user_has_compiled() -> None:
    """torch.compile in uncaptured code sees none of our modes, and the code around it goes on as it was."""
    weight, graphs = torch.randn(8, 8), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    inner = torch.compile(lambda x: x.sin() @ weight, backend=backend)

    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                LOG.warning("step")
                x = inner(x)
                x = x @ weight
            return x

    out = amp_compile(Calls(), dtype=BF16)(torch.randn(4, 8))
    assert is_rounded(out)
    assert len(graphs) == 1
    assert all(len(targets) == 2 for targets in graphs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_in_uncaptured_code(reentrant: bool) -> None:
    """What the backward computes once more must be what the forward computed."""

    class Checkpoints(Functional):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                LOG.warning("step")
                x = checkpoint(self.block, x, use_reentrant=reentrant)
                x = x @ self.weight
            return x

        def block(self, x: Tensor) -> Tensor:
            return torch.tanh(F.linear(x, self.weight, self.bias))

    model, x = Checkpoints(), torch.randn(4, 8, requires_grad=True)
    for policy in (None, Policy.torch("cpu", BF16)):
        fast = amp_compile(model, dtype=BF16) if policy is None else amp_compile(model, policy=policy)
        out = fast(x)
        out.float().sum().backward()
        assert not torch.equal(out.float(), model(x))
        assert all(p.grad is not None for p in model.parameters())


def test_one_compiled_model_inside_anothers_uncaptured_code() -> None:
    x = torch.randn(4, 8)
    inner = amp_compile(Functional(), dtype=F16)
    expected = inner(x)

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            LOG.warning("outer")
            return torch.stack([inner(x), inner.original(x)])

    outer = amp_compile(Outer(), dtype=BF16)
    assert torch.equal(outer(x)[0], expected)


def test_modules_that_forward_makes_are_not_kept() -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            LOG.warning("make")
            torch.manual_seed(1)
            return nn.Linear(8, 8)(x)

    fast, x = amp_compile(Makes(), dtype=BF16), torch.randn(4, 8)
    for _ in range(3):
        assert is_rounded(fast(x))
    assert len(fast.graphs) <= 1


def test_generate_calls_the_compiled_forward() -> None:
    class Generates(Logs):
        def generate(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self(x)
            return x

    model, x = Generates(), torch.randn(4, 8)
    fast = amp_compile(model, dtype=BF16)
    assert torch.equal(fast.generate(x), fast(fast(x)))
    assert set(precisions(fast).values()) == {"bfloat16"}


def test_after_another_compilation_has_skipped_the_same_code() -> None:
    """Dynamo remembers for the whole process which code it skips."""
    model, x = Wrapper(Logs()), torch.randn(4, 8)
    torch.compile(model, backend="eager")(x)
    fast = amp_compile(model, dtype=BF16)
    fast(x)
    assert precisions(fast) == {"model.layers.0": "bfloat16", "model.layers.1": "bfloat16"}


def test_more_shapes_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo gives a frame up that was compiled for many signatures: then one graph serves all sizes."""
    monkeypatch.setattr("amp_compiler.capture.dynamo.RECOMPILE_LIMIT", 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    fast = amp_compile(model, dtype=BF16, dynamic=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", AmpWarning)
        for rows in range(2, 7):
            for _ in range(2):
                assert is_rounded(fast(torch.randn(rows, 8)))
        known = len(fast.graphs)
        for rows in range(7, 20):
            assert is_rounded(fast(torch.randn(rows, 8)))
    (said,) = (str(w.message) for w in told if issubclass(w.category, AmpWarning))
    assert re.search(r"compiled for 2 different shapes.*dynamic=False.*dynamic=True", said)
    assert len(fast.graphs) == known, "one graph serves all other sizes"
    assert fast.report(inputs=torch.randn(33, 8)).work == {"captured": 1.0, "autocast": 0.0, "float32": 0.0}
    assert any("which is the limit" in note for note in fast.report().notes)


def test_more_values_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python value that changes at every call: in the end it is plain Python with low products, and it says so."""
    monkeypatch.setattr("amp_compiler.capture.dynamo.RECOMPILE_LIMIT", 2)
    weight = torch.randn(8, 8)
    fast = amp_compile(lambda x, mode: (x @ weight) * len(mode), dtype=BF16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", AmpWarning)
        for number in range(8):
            assert is_rounded(fast(torch.randn(4, 8), "a" * 2**number))
    _, said = (str(w.message) for w in told if issubclass(w.category, AmpWarning))
    assert re.search(r"even with dynamic sizes.*plain Python.*TORCH_LOGS=recompiles", said)
    assert len(fast.graphs) == 4


class Tries(nn.Module):
    """Goes on after an op that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = x + torch.ones(5)
        except RuntimeError:
            y = x
        return self.layer(y) @ self.weight


def test_an_exception_that_the_models_code_handles() -> None:
    torch.manual_seed(0)
    model, x = Tries(), torch.randn(4, 8)
    fast = amp_compile(model, dtype=BF16)
    with warnings.catch_warnings(action="ignore", category=AmpWarning):
        for _ in range(5):
            torch.testing.assert_close(fast(x), model(x), rtol=0.02, atol=0.05)
        report = fast.report(inputs=x)
    assert report.work is not None
    assert report.work["float32"] == 0
    if report.work["captured"] < 1:  # torch 2.13; since 2.14 Dynamo captures such code
        assert any("raises an exception while it is traced" in note for note in report.notes)


@torch.compiler.disable
def foreign(x: Tensor) -> Tensor:
    return x @ x


def test_a_disabled_function_after_a_graph_has_run() -> None:
    """Graphs go through the same wrapper as disabled functions, which Dynamo was told to skip by then."""

    def skipped(x: Tensor) -> Tensor:
        for _ in range(1):
            LOG.warning("not captured")
            x = captured(x)
        return x

    def captured(x: Tensor) -> Tensor:
        return (x @ x).relu()

    policy = Policy.torch("cpu", BF16)
    fast = amp_compile(lambda x: (skipped(x), foreign(x)), policy=policy, keep_output_dtypes=False)
    for _ in range(2):
        assert [t.dtype for t in fast(torch.randn(4, 4))] == [BF16, BF16]


def test_a_product_in_place_in_uncaptured_code_is_told() -> None:
    def code(x: Tensor) -> Tensor:
        for _ in range(1):
            LOG.info("not captured")
            out = torch.zeros(4, 4).addmm_(x, x)
        return out

    with pytest.warns(AmpWarning, match=r"addmm_ runs in float32.*in place.*out = torch\.zeros"):
        amp_compile(code, dtype=BF16)(torch.randn(4, 4))


def test_a_checkpoint_in_uncaptured_code_says_why_it_is_fp32() -> None:
    layer = nn.Linear(4, 4)

    def code(x: Tensor) -> Tensor:
        for _ in range(1):
            LOG.info("not captured")
            x = checkpoint(lambda x: F.linear(x, layer.weight), x, use_reentrant=False)
        return x

    with pytest.warns(AmpWarning, match=r"linear runs in float32.*torch\.utils\.checkpoint computes it again"):
        amp_compile(code, dtype=BF16)(torch.randn(4, 4, requires_grad=True))


# ----------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("make", [Logs, Functional, lambda: Wrapper(sequential())])
def test_a_training_step_in_pieces(make: Callable[[], nn.Module]) -> None:
    model = make()
    for p in model.parameters():
        p.data /= 2
    batch = torch.randn(16, 8), torch.randn(16, 8)
    step = compile_train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.01), dtype=F16)
    losses = [float(step(*batch).loss) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert {p.grad.dtype for p in model.parameters()} == {FP32}
    if not isinstance(model, Functional):
        assert set(precisions(step).values()) == {"float16"}


# ------------------------------------------------------------------------------------------------------- shares


def test_a_product_in_fp32_is_told_with_module_and_line() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):
                LOG.warning("step")
            return torch.mv(self.weight, x)  # the line

    model = nn.Sequential(Inner(), nn.Tanh())
    fast, x = amp_compile(model, dtype=BF16), torch.randn(8)
    with pytest.warns(AmpWarning, match=r"mv runs in float32.* in 0, .*test_uncaptured\.py:\d+ in forward: .*the line"):
        fast(x)
    with warnings.catch_warnings(action="error"):
        fast(x)  # once is enough
    assert torch.equal(fast(x), model(x))
    assert any("mv runs in float32" in note for note in fast.report().notes)


def test_the_report_tells_the_shares_of_work() -> None:
    class Both(Functional):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1):
                LOG.warning("step")
                x = self.fc(x)
            x = x @ self.weight
            return x * torch.mv(self.weight, self.bias)  # no list of autocast's has mv

    model, x = Both(), torch.randn(4, 8)
    fast = amp_compile(model, dtype=BF16)
    assert fast.report().work is None
    with pytest.warns(UserWarning, match=r"(?s)float32.*mv.*test_uncaptured\.py:\d+") as caught:
        report = fast.report(inputs=x)
    total = 2 * 4 * 64 + 2 * 4 * 64 + 2 * 64
    assert report.work == {"captured": 512 / total, "autocast": 512 / total, "float32": 128 / total}
    assert any("torch.mv" in str(w.message) for w in caught)
    assert "captured" in str(report)
    assert fast.report().work == report.work
    assert type(report).from_json(report.to_json()).work == report.work


def test_counting_changes_nothing_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    fast, x = amp_compile(model, dtype=BF16), torch.randn(4, 8)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    work = fast.report(inputs=(x,)).work
    assert work == {"captured": 1.0, "autocast": 0.0, "float32": 0.0}
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert fast.report(inputs={"input": x}).work == work
