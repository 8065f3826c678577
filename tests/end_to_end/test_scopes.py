"""Precision that the model's own code chooses: scopes, nested autocast, marks on modules, and which one wins.

Every model here goes through both front ends. References are written by hand with explicit casts; where a whole
scope is one dtype they must be equal in every bit, gradients included.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_compiler import AmpWarning, Policy, amp_compile, precision, set_precision
from amp_compiler.inspect.data import Row
from helpers import BF16, F16, F32, ExportMixed, in_turn

FRONTS = ("dynamo", "export")
Scope = Callable[[], Any]

#: name -> (context manager, the dtype that a linear layer runs in there)
REGIONS: dict[str, tuple[Scope, str]] = {
    "p32": (lambda: precision("float32"), "float32"),
    "pbf": (lambda: precision("bfloat16"), "bfloat16"),
    "p16": (lambda: precision("float16"), "float16"),
    "off": (lambda: torch.autocast("cpu", enabled=False), "float32"),
    "abf": (lambda: torch.autocast("cpu", dtype=BF16), "bfloat16"),
    "a16": (lambda: torch.autocast("cpu", dtype=F16), "float16"),
}
MARKS = ("float32", "bfloat16", "float16")


class Through:
    """A model through one of the front ends, with what is to be looked at."""

    def __init__(self, front: str, model: nn.Module, *args: Tensor, level: str = "O2", **options: Any) -> None:
        options.setdefault("policy", Policy(level, BF16))
        fast = amp_compile(model, backend="eager", **options | {"level": options["policy"].level})
        self.fast: Any = fast
        if front == "export":
            self.fast = ExportMixed(model, args, policy=fast.policy)
        self.out = self.fast(*args)
        self.rows: list[Row] = list(fast.report().rows) if front == "dynamo" else self.fast.rows
        owner = model if front == "dynamo" else self.fast.module
        self.parameters = dict(owner.named_parameters())

    def precision(self, module: str, op: str = "linear") -> str:
        """The precision of the only such op in a module."""
        (row,) = [r for r in self.rows if r.module == module and r.op == op]
        return row.precision

    def grads(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


class Sub(nn.Module):
    def __init__(self, scope: Scope | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scope = scope or contextlib.nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.scope():
            return self.fc(x)


class Net(nn.Module):
    """a, then sub inside the outer scope, which may open one of its own, then z."""

    def __init__(self, outer: Scope | None = None, inner: Scope | None = None) -> None:
        super().__init__()
        self.a, self.sub, self.z = nn.Linear(4, 4), Sub(inner), nn.Linear(4, 4)
        self.outer = outer or contextlib.nullcontext

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with self.outer():
            x = self.sub(x)
        return self.z(x)


def x34() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def by_hand(model: nn.Module, x: Tensor, middle: torch.dtype, around: torch.dtype = BF16) -> Tensor:
    """``Net`` with every cast written out: a and z in ``around``, sub.fc in ``middle``."""
    for name, dtype in (("a", around), ("sub.fc", middle), ("z", around)):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        x = F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
    return x.float()


def check_by_hand(run: Through, model: nn.Module, x: Tensor, middle: torch.dtype) -> None:
    """Output and gradients are those of ``by_hand``, in every bit."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    expected = by_hand(twin, x, middle)
    assert torch.equal(run.out, expected)
    tangent = torch.randn(run.out.shape, generator=torch.Generator().manual_seed(2))
    run.out.backward(tangent)
    expected.backward(tangent)
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(run.grads()[name], parameter.grad), name


DTYPES = {"float32": F32, "bfloat16": BF16, "float16": F16}


# -------------------------------------------------------------------------------------------- one region


@pytest.mark.parametrize(
    ("kind", "place", "front"),
    in_turn(("p32", "p16", "off", "a16"), ("around the call", "in the submodule"), FRONTS),
)
def test_one_region_forward_and_backward(kind: str, place: str, front: str) -> None:
    """Bit-equal to explicit casts; the region ends where it ends."""
    scope, expected = REGIONS[kind]
    model = Net(scope) if place == "around the call" else Net(None, scope)
    x = x34()
    run = Through(front, model, x)
    assert [run.precision(m) for m in ("a", "sub.fc", "z")] == ["bfloat16", expected, "bfloat16"]
    check_by_hand(run, model, x, DTYPES[expected])


@pytest.mark.parametrize("kind", ["p32", "p16", "off", "a16"])
def test_the_backward_of_a_scope_is_in_its_precision(kind: str) -> None:
    """The joint graph: products and their gradients have the scope's dtype, and no other low dtype is there."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with REGIONS[kind][0]():
                return self.fc(x)

    run = Through("dynamo", Only(), x34().requires_grad_())
    text = next(r.text for r in run.fast.history if r.graph == "joint" and r.name == "fold_casts")
    products = [line for line in text.splitlines() if " = mm(" in line]
    short = {"float32": "f32", "float16": "f16"}[REGIONS[kind][1]]
    assert len(products) == 3, text
    assert all(f": {short}[" in line for line in products), text
    assert "bf16" not in text


@pytest.mark.parametrize("front", FRONTS)
def test_the_black_list_inside_a_low_scope(front: str) -> None:
    """``precision("bfloat16")`` runs every op low, also one that the table or the user keeps in fp32: the scope is
    the inner word. In ``torch.autocast(dtype=bf16)`` the lists hold, as they do in torch."""

    class Lists(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with precision("bfloat16"):
                first = torch.exp(x) @ x.t()
            with torch.autocast("cpu", dtype=BF16):
                second = torch.log_softmax(x, -1) @ x.t()
            return first, second

    run = Through(front, Lists(), x34(), level="O1", black_list=["exp"])
    found = [(r.op, r.precision) for r in run.rows if r.op in ("exp", "log_softmax", "matmul")]
    assert sorted(found) == sorted(
        [("exp", "bfloat16"), ("matmul", "bfloat16"), ("log_softmax", "float32"), ("matmul", "bfloat16")]
    )


# -------------------------------------------------------------------------------------- which one is inside


KINDS = ("p32", "pbf", "off", "a16")  # one of each, and each differs from the level's way with a linear layer or a mark


class Nested(nn.Module):
    """Every kind of region inside one of the outer kind: opened here (``b``) and in a submodule (``sub``)."""

    def __init__(self, outer: str) -> None:
        super().__init__()
        self.outer = REGIONS[outer][0]
        self.a, self.z = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b = nn.ModuleDict({kind: nn.Linear(4, 4) for kind in KINDS})
        self.sub = nn.ModuleDict({kind: Sub(REGIONS[kind][0]) for kind in KINDS})

    def forward(self, x: Tensor) -> Tensor:
        with self.outer():
            x = self.a(x)
            for kind, layer in self.b.items():
                with REGIONS[kind][0]():
                    x = layer(x)
                x = self.sub[kind](x)
            return self.z(x)


@pytest.mark.parametrize(("outer", "front"), in_turn(KINDS, FRONTS))
def test_the_inner_region_wins(outer: str, front: str) -> None:
    """Scopes and autocast regions in each other; after an inner one ends the outer one holds again."""
    run = Through(front, Nested(outer), x34())
    assert [run.precision(m) for m in ("a", "z")] == [REGIONS[outer][1]] * 2
    for kind in KINDS:
        assert run.precision(f"b.{kind}") == REGIONS[kind][1], kind
        assert run.precision(f"sub.{kind}.fc") == REGIONS[kind][1], kind
    run.out.sum().backward()
    assert all(bool(g.isfinite().all()) and g.dtype is F32 for g in run.grads().values())


class Grid(nn.Module):
    """A module for each kind of region and each mark, the region opened around the call or in its forward."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        names = [f"{kind}_{mark}" for kind in KINDS for mark in MARKS if REGIONS[kind][1] != mark]
        self.cells = nn.ModuleDict({name: Sub(REGIONS[name.split("_")[0]][0] if inside else None) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for name, cell in self.cells.items():
            if self.inside:
                x = cell(x)
            else:
                with REGIONS[name.split("_")[0]][0]():
                    x = cell(x)
        return x


@pytest.mark.parametrize(
    ("inside", "how", "front"), in_turn((True, False), ("set_precision", "with_modules"), FRONTS)
)
def test_a_region_and_a_mark(inside: bool, how: str, front: str) -> None:
    """A region in the forward of a marked module is the inner one; a marked module called in a region is."""
    model, policy = Grid(inside), Policy("O2", BF16)
    for name, cell in model.cells.items():
        mark = name.split("_")[1]
        if how == "set_precision":
            set_precision(cell, mark)
        else:
            policy = policy.with_modules({f"cells.{name}": mark})
    run = Through(front, model, x34(), policy=policy)
    for name in model.cells:
        kind, mark = name.split("_")
        assert run.precision(f"cells.{name}.fc") == (REGIONS[kind][1] if inside else mark), name
    run.out.sum().backward()
    assert all(bool(g.isfinite().all()) for g in run.grads().values())


@pytest.mark.parametrize("front", FRONTS)
def test_region_mark_region(front: str) -> None:
    """Three deep: the mark on fc, inside the scope that sub opens, inside the one around the call."""
    model = Net(REGIONS["p16"][0], REGIONS["off"][0])
    set_precision(model.sub, "float32")
    set_precision(model.sub.fc, "bfloat16")
    assert Through(front, model, x34()).precision("sub.fc") == "bfloat16"
    set_precision(model.sub.fc, None)
    assert Through(front, model, x34()).precision("sub.fc") == "float32"


# ------------------------------------------------------------------------------------- forms of precision


@precision("float32")
def careful(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


class DecoratedFunction(Sub):
    def forward(self, x: Tensor) -> Tensor:
        return careful(x, self.fc.weight, self.fc.bias)


class DecoratedMethod(Sub):
    @precision("float32")
    def body(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class DecoratedForward(Sub):
    @precision("float32")
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class EarlyReturn(Sub):
    def forward(self, x: Tensor) -> Tensor:
        with precision("float32"):
            if x.dim() == 2:
                return self.fc(x)
            x = x * 2
        return x


class EarlyReturnAutocast(Sub):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            if x.dim() == 2:
                return self.fc(x)
            x = x * 2
        return x


class Stacked(Sub):
    def forward(self, x: Tensor) -> Tensor:
        with precision("bfloat16"), torch.autocast("cpu", dtype=F16), precision("float32"):
            return self.fc(x)


class Raises(Sub):
    """A scope left by an exception ends too."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            with precision("float16"):
                raise ValueError
        except ValueError:
            pass
        with precision("float32"):
            return self.fc(x)


FORMS = (DecoratedFunction, DecoratedMethod, DecoratedForward, EarlyReturn, EarlyReturnAutocast, Stacked, Raises)


@pytest.mark.parametrize(("form", "front"), in_turn(FORMS, FRONTS))
def test_forms(form: type[Sub], front: str) -> None:
    """The scope is over with the function: z is low again, and everything is bit-equal to explicit casts."""
    model, x = Net(), x34()
    model.sub = form()
    check_by_hand(Through(front, model, x), model, x, F32)


@pytest.mark.parametrize("front", FRONTS)
def test_forward_of_the_model_itself_is_decorated(front: str) -> None:
    class Root(Net):
        @precision("float32")
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model, x = Root(), x34()
    run = Through(front, model, x)
    assert {r.precision for r in run.rows if r.op == "linear"} == {"float32"}
    assert torch.equal(run.out, model(x))


def test_outside_of_a_compiled_model_it_does_nothing() -> None:
    x, w, b = x34(), torch.randn(4, 4), torch.randn(4)
    with precision("float16"):
        assert torch.equal(careful(x, w, b), F.linear(x, w, b))


def test_a_name_that_is_no_precision() -> None:
    with pytest.raises(ValueError, match="choose 'float32'"), precision("float8"):
        pass


@pytest.mark.parametrize("front", FRONTS)
def test_ops_that_only_move_values_keep_their_gradient_in_the_scope(front: str) -> None:
    """``expand`` in an fp32 scope: its backward is a sum of 512 terms. In fp32 it is exact here; rounded to bf16 before
    or within the sum it is not."""

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1, bias=False)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            y = self.fc(x)
            with precision("float32"):
                return (y.expand(512, 1) * scale).sum()

    model, x = Moves(), torch.ones(1, 1)
    scale = (1 + torch.arange(512.0) * 2**-9).view(512, 1)  # 10 bits each: bf16 holds 8
    run = Through(front, model, x, scale)
    run.out.backward()
    expected = scale.sum().to(BF16).float()  # the linear layer is low, and so is the gradient that enters it
    assert torch.equal(run.grads()["fc.weight"].view(()), expected)


# --------------------------------------------------------------------------------------- bodies of other ops


class InCheckpoint(nn.Module):
    """A region inside the body of a checkpoint, and one around it."""

    def __init__(self, kind: str, inside: bool) -> None:
        super().__init__()
        self.a, self.sub, self.z = nn.Linear(4, 4), Sub(REGIONS[kind][0] if inside else None), nn.Linear(4, 4)
        self.outer = contextlib.nullcontext if inside else REGIONS[kind][0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with self.outer():
            x = checkpoint(self.sub, x, use_reentrant=False)
        return self.z(x)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("kind", ["p32", "off", "a16"])
def test_a_checkpoint(kind: str, inside: bool) -> None:
    model, x = InCheckpoint(kind, inside), x34()
    run = Through("dynamo", model, x)
    check_by_hand(run, model, x, DTYPES[REGIONS[kind][1]])


@pytest.mark.parametrize(("kind", "inside", "front"), in_turn(("p32", "off", "a16"), (True, False), FRONTS))
def test_a_branch(kind: str, inside: bool, front: str) -> None:
    """A region in one branch of cond holds there only; one around cond holds in both."""
    scope, expected = REGIONS[kind]

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, p: Tensor) -> Tensor:
            def one(x: Tensor, w: Tensor) -> Tensor:
                with scope() if inside else contextlib.nullcontext():
                    return torch.mm(x, w).float()

            def other(x: Tensor, w: Tensor) -> Tensor:
                return torch.matmul(x, w).float()

            with contextlib.nullcontext() if inside else scope():
                return torch.cond(p, one, other, (x, self.w)).sin()

    run = Through(front, Branch(), x34(), torch.tensor(True))
    found = {r.op: r.precision for r in run.rows if r.op in ("mm", "matmul")}
    assert found == {"mm": expected, "matmul": "bfloat16" if inside else expected}
    run.out.sum().backward()
    assert bool(run.grads()["w"].isfinite().all())


class Custom(torch.autograd.Function):
    """The author's own precision, forward and backward, as torch.amp offers it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


@pytest.mark.parametrize("kind", ["none", "p16", "off"])
def test_custom_fwd_and_custom_bwd(kind: str) -> None:
    """A custom function is the author's: fp32 inside, whatever is around it, or reported as not captured."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            with contextlib.nullcontext() if kind == "none" else REGIONS[kind][0]():
                return Custom.apply(x, self.w)

    model, x = Model(), x34()
    run = Through("dynamo", model, x)
    y = F.linear(x.to(BF16), model.a.weight.to(BF16), model.a.bias.to(BF16)).float()
    assert torch.equal(run.out, y @ model.w)
    tangent = torch.randn(3, 4)
    run.out.backward(tangent)
    assert torch.equal(run.grads()["w"], y.t() @ tangent)


@pytest.mark.parametrize("kind", ["p32", "off"])
def test_a_graph_break_in_a_region_is_reported(kind: str) -> None:
    """Documented: what Dynamo cannot capture runs as it is; it must be said, and what runs must be right."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with REGIONS[kind][0]():
                x = self.first(x)
                torch._dynamo.graph_break()
                return self.second(x)

    model, x = Broken(), x34()
    fast = amp_compile(model, "O2", dtype=BF16, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fast(x)
    assert torch.equal(out, model(x))
    assert fast.report().not_captured
    assert {r.precision for r in fast.report().rows if r.op == "linear"} <= {"float32"}
    assert fast.report().rows or [w for w in caught if issubclass(w.category, AmpWarning)]


# ----------------------------------------------------------------------------------------- marks on modules


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


DEEP = ("block.0", "block.1.0", "block.1.1", "head")


def deep(front: str, model: nn.Module, **options: Any) -> list[str]:
    with torch.no_grad():
        run = Through(front, model, x34(), **options)
    return [{"float32": "32", "bfloat16": "bf", "float16": "16"}[run.precision(m)] for m in DEEP]


@pytest.mark.parametrize("front", FRONTS)
def test_the_innermost_mark_wins(front: str) -> None:
    model = Deep()
    set_precision(model, "float32")
    set_precision(model.block, "float16")
    set_precision(model.block[1], "bfloat16")
    set_precision(model.block[1][0], "float32")
    assert deep(front, model) == ["16", "32", "bf", "32"]
    set_precision(model.block[1], None)
    assert deep(front, model) == ["16", "32", "16", "32"]
    for module in model.modules():
        set_precision(module, None)
    assert deep(front, model) == ["bf", "bf", "bf", "bf"]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_mark_survives_a_copy(how: str) -> None:
    model = Deep()
    set_precision(model.block[1], "float32")
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    set_precision(model.block[1], None)
    assert deep("export", twin) == ["bf", "32", "32", "bf"]
    assert deep("export", model) == ["bf", "bf", "bf", "bf"]
    assert list(twin.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("front", FRONTS)
def test_a_shared_module_is_marked_wherever_it_is_called(front: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.between = nn.Linear(4, 4)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.between(self.first(x)))

    model = Shared()
    set_precision(model.again, "float32")
    run = Through(front, model, x34())
    assert [r.precision for r in run.rows if r.op == "linear"] == ["float32", "bfloat16", "float32"]


@pytest.mark.parametrize("front", FRONTS)
def test_a_module_that_is_called_twice_in_different_regions(front: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with precision("float32"):
                x = self.fc(x)
            x = self.fc(x)
            with torch.autocast("cpu", dtype=F16):
                return self.fc(x).float()

    run = Through(front, Twice(), x34())
    found = [r.precision for r in run.rows if r.op == "linear"]
    assert sorted(found) == ["bfloat16", "float16", "float32"]


@pytest.mark.parametrize("front", FRONTS)
def test_exclude_and_rules(front: str) -> None:
    """The last matching rule counts; set_precision wins over a rule on the same module."""
    model = Deep()
    assert deep("export", model, exclude=["block.1"]) == ["bf", "32", "32", "bf"]
    assert deep("export", model, exclude=[nn.Linear]) == ["32", "32", "32", "32"]
    assert deep(front, model, exclude=[Deep]) == ["32", "32", "32", "32"]
    policy = Policy("O2", BF16).with_modules({"block": "float32", "block.1": "float16", "block.1.1": "bfloat16"})
    assert deep("export", model, policy=policy) == ["32", "16", "bf", "bf"]
    set_precision(model.block[0], "bfloat16")
    assert deep(front, model, policy=policy) == ["bf", "16", "bf", "bf"]


def test_marks_come_before_lists() -> None:
    model, front = Deep(), "export"
    set_precision(model.block[1], "bfloat16")
    assert deep(front, model, black_list=["linear"]) == ["32", "bf", "bf", "32"]
    set_precision(model.block[1], "float32")
    assert deep(front, model, white_list=["linear"]) == ["bf", "32", "32", "bf"]


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("mark", ["float32", "float16"])
def test_a_marked_module_is_bit_equal_to_casts_by_hand(mark: str, front: str) -> None:
    model, x = Net(), x34()
    set_precision(model.sub, mark)
    check_by_hand(Through(front, model, x), model, x, DTYPES[mark])


def test_marks_count_when_a_function_calls_the_module() -> None:
    """``amp_compile`` of a function: its modules have no path, and a mark must not be lost without a word."""
    model = Deep()
    set_precision(model.head, "float32")

    def call(x: Tensor) -> Tensor:
        return model(x)

    fast = amp_compile(call, "O2", dtype=BF16, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast(x34())
    found = [r.precision for r in fast.report().rows if r.op == "linear"]
    said = [w for w in caught if issubclass(w.category, AmpWarning)] or fast.report().notes
    assert found == ["bfloat16"] * 3 + ["float32"] or said


@pytest.mark.parametrize("level", ["O1", "auto", "O3"])
def test_a_scope_counts_at_every_level(level: str) -> None:
    run = Through("export", Net(REGIONS["p32"][0]), x34(), level=level)
    assert [run.precision(m) for m in ("a", "sub.fc", "z")] == ["bfloat16", "float32", "bfloat16"]
