"""A part of a model is compiled already, and the model is compiled again: the part keeps its own level, dtype and
lists, the rest gets the outer's, in one graph; nothing is silently fp32, and no object of the user's is changed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import Policy, amp_compile, compile_train_step, convert_model, precision, set_precision
from amp_compiler.common.errors import PolicyError

BF16, F16 = torch.bfloat16, torch.float16
FRONTS = ("amp_compile", "step", "convert")


def block() -> nn.Sequential:
    """At O1 the linear layer is low and the GELU fp32; at O2 and O3 both are low."""
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


class Outer(nn.Module):
    """``part`` between two layers: a submodule, or anything else that can be called."""

    def __init__(self, part: Any, scope: Any = None) -> None:
        super().__init__()
        self.first, self.last = block(), block()
        self.part = part
        self.scope = scope

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.scope is None:
            x = self.part(x)
        else:
            with self.scope():
                x = self.part(x)
        return self.last(x)


def batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def inner(target: Any, level: str = "O1", **options: Any) -> Any:
    return amp_compile(target, level, **{"dtype": BF16, "backend": "eager", **options})


@dataclass
class Run:
    """A model compiled again and run once."""

    report: Any
    graphs: int

    def precision(self, module: str) -> list[str]:
        """Of each op of a module and those below it, in order."""
        rows = [r for r in self.report.rows if r.module == module or r.module.startswith(f"{module}.")]
        return [r.precision for r in rows if r.op not in ("view", "to")]


def run(model: nn.Module, front: str = "amp_compile", level: str = "O2", **options: Any) -> Run:
    options = {"dtype": BF16, **options}
    before = [(m, dict(m.__dict__)) for m in model.modules()]
    if front == "convert":
        made: Any = convert_model(model.eval(), (batch(),), level=level, **options)
        made(batch())
    elif front == "step":
        made = compile_train_step(
            model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), level, backend="eager", **options
        )
        made(batch(), torch.zeros(3, 4))
    else:
        made = amp_compile(model, level, backend="eager", **options)
        made(batch()).sum().backward()
    assert all(
        {k: v for k, v in m.__dict__.items() if k not in ("training", "_compiled")}
        == {k: v for k, v in known.items() if k not in ("training", "_compiled")}
        for m, known in before
    ), "an object of the user's was changed"
    return Run(made.report(), 1 if front == "convert" else len(made.graphs))


LOW = ["bfloat16", "bfloat16"]
O1 = ["bfloat16", "float32"]


# ------------------------------------------------------------------------------------------- where it can be


def as_method() -> nn.Module:
    made = block()
    made.forward = inner(made.forward)
    return made


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @amp_compile(level="O1", dtype=BF16)
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.fc(x))


def patched() -> nn.Module:
    made = inner(block())
    old = made.forward
    made.forward = lambda *args: old(*args)
    return made


PLACES: dict[str, tuple[Callable[[], Any], str]] = {
    "a child": (lambda: inner(block()), "part"),
    "in a Sequential": (lambda: nn.Sequential(nn.Identity(), nn.Sequential(inner(block()))), "part.1.0"),
    "a method": (as_method, "part"),
    "a decorated method": (Decorated, "part"),
    "a patched forward": (patched, "part"),
    "in another compiled part": (lambda: inner(nn.Sequential(inner(block()), nn.Tanh()), "O3"), "part.0"),
    "in what torch.compile made": (
        lambda: torch.compile(nn.Sequential(inner(block())), backend="eager"), "part._orig_mod.0"),
}  # fmt: skip


CASES = [
    *((place, "amp_compile") for place in PLACES), ("a child", "step"), ("a child", "convert"), ("a method", "convert"),
    ("in another compiled part", "step"), ("in another compiled part", "convert"), ("a patched forward", "step"),
    ("in what torch.compile made", "convert"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "front"), CASES)
def test_a_compiled_part_keeps_its_level(place: str, front: str) -> None:
    make, path = PLACES[place]
    found = run(Outer(make()), front)
    assert found.graphs == 1
    assert found.precision("first") == LOW
    assert found.precision("last")[:2] == LOW
    assert found.precision(path) == O1
    assert not found.report.not_captured


def test_parts_that_no_module_holds() -> None:
    """A list, a closure, a function."""
    held, free = [inner(block())], inner(block(), "O3")

    @amp_compile(level="O1", dtype=BF16)
    def function(x: Tensor) -> Tensor:
        return torch.tanh(x @ x.T @ x)

    found = run(Outer(lambda x: function(free(held[0](x)))))
    assert found.graphs == 1
    precisions = [r.precision for r in found.report.rows if r.op in ("linear", "gelu", "tanh", "matmul")]
    assert precisions == [*LOW, *O1, *LOW, "bfloat16", "bfloat16", "float32", *LOW]


def test_the_root_is_a_sequential() -> None:
    found = run(nn.Sequential(nn.Linear(4, 4), inner(block()), nn.Linear(4, 4)), "step")
    assert found.graphs == 1
    assert [found.precision(name)[0] for name in ("0", "1.0", "1.1", "2")] == ["bfloat16"] * 2 + ["float32", "bfloat16"]


def test_a_part_that_is_used_twice() -> None:
    part = inner(block())
    found = run(Outer(nn.Sequential(part, part)))
    assert found.precision("part.0") == O1 * 2


def test_models_that_torch_compile_has_seen_are_captured_as_if_it_had_not() -> None:
    own = block()
    own.compile(backend="eager")
    for front in FRONTS:
        for part in (torch.compile(block(), backend="eager"), own):
            found = run(Outer(part), front)
            assert found.graphs == 1
            assert found.precision("part") == LOW


# --------------------------------------------------------------------------------------- the numbers are right


@pytest.mark.parametrize(("outer", "level"), [("O1", "O3"), ("O3", "O1"), ("auto", "O2"), ("O2", "O0"), ("O0", "O2")])
def test_the_same_bits_as_three_models_in_a_row(outer: str, level: str) -> None:
    """Forward and gradients, against parts that are compiled apart, with fp32 between them."""
    model = Outer(block())
    twin = copy.deepcopy(model)
    model.part = inner(model.part, level)
    whole = amp_compile(model, outer, dtype=BF16, backend="eager")
    parts = [inner(twin.first, outer), inner(twin.part, level), inner(twin.last, outer)]
    x = batch()
    y = x
    for part in parts:
        y = part(y)
    out = whole(x)
    assert torch.equal(out, y)
    out.square().sum().backward()
    y.square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name


def test_a_part_in_the_other_dtype_gets_the_limits_of_its_own() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return torch.softmax(y.masked_fill(y > 0, torch.finfo(y.dtype).min), -1)

    torch.manual_seed(0)
    model = Outer(inner(Masked(), "O2", dtype=F16))
    fast = amp_compile(model, "O2", dtype=BF16, backend="eager")
    assert torch.allclose(fast(batch()), model(batch()), atol=0.05)
    precisions = {r.module: r.precision for r in fast.report().rows if r.op == "linear"}
    assert precisions == {"first.0": "bfloat16", "part.fc": "float16", "last.0": "bfloat16"}
    text = str(fast.graphs[0].code)
    assert "-65504" in text
    assert "-3.38" not in text


def test_a_wide_value_of_the_part_stays_wide_outside() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.pow(2).sum(-1, keepdim=True)

    class Divides(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.fc, self.part = nn.Linear(4, 4), part

        def forward(self, x: Tensor) -> Tensor:
            return self.part(self.fc(x)) * 2.0

    fast = amp_compile(Divides(inner(Norm(), "O1")), "O2", dtype=F16, backend="eager")
    assert torch.isfinite(fast(batch() * 1e4)).all()
    assert [r.precision for r in fast.report().rows if r.op == "mul"] == ["float32"]


# ------------------------------------------------------------------------------------ lists, rules, marks, regions


@pytest.mark.parametrize("front", FRONTS)
def test_lists_and_module_rules_of_the_part_hold_in_it(front: str) -> None:
    model = Outer(inner(nn.Sequential(block(), block()), "O3", black_list=["gelu"], exclude=["1"]))
    found = run(model, front, "O1", white_list=["gelu"])
    assert found.precision("first") == LOW
    assert found.precision("part.0") == ["bfloat16", "float32"]
    assert found.precision("part.1") == ["float32", "float32"]


def test_what_the_outer_names_wins_over_the_parts_level() -> None:
    model = Outer(inner(nn.Sequential(block(), block()), "O3"))
    assert run(model, exclude=["part.1"]).precision("part") == [*LOW, "float32", "float32"]
    set_precision(model.part[0], "float32")
    assert run(model).precision("part") == ["float32", "float32", *LOW]
    assert run(Outer(inner(block()), lambda: precision("float32"))).precision("part") == ["float32", "float32"]


def test_the_part_wins_over_autocast_around_it() -> None:
    found = run(Outer(inner(block(), "O3"), lambda: torch.autocast("cpu", enabled=False)))
    assert found.precision("part") == LOW


def test_a_part_that_is_switched_off_is_as_if_it_were_not_compiled() -> None:
    part = inner(block())
    part.enabled = False
    model = Outer(part)
    fast = amp_compile(model, "O3", dtype=BF16, backend="eager")
    fast(batch())
    assert Run(fast.report(), 1).precision("part") == LOW
    part.enabled = True
    fast(batch())
    assert Run(fast.report(graph=1), 1).precision("part") == O1


def test_hooks_of_the_part_run() -> None:
    part = inner(block())
    part.register_forward_hook(lambda module, args, out: out * 0)
    model = Outer(part)
    assert torch.allclose(
        amp_compile(model, dtype=BF16)(batch()), model.last(torch.zeros(3, 4)).expand(3, 4), atol=0.05
    )


# --------------------------------------------------------------------------- kinds of policies, graph breaks


def test_two_kinds_of_policies_are_refused() -> None:
    model = Outer(nn.Sequential(inner(block(), policy=Policy.torch("cpu", BF16), level="auto")))
    for front in FRONTS:
        with pytest.raises(PolicyError, match=r"part 'part\.0' was compiled with.*Policy\.torch\('cpu'\).*original"):
            run(model, front)
    with pytest.raises(PolicyError, match=r"compiled with Policy\.torch\('cpu'\).*level 'O1'"):
        run(Outer(as_method()), policy=Policy.torch("cpu", BF16), level="auto")
    hidden = [inner(block())]
    with pytest.raises(PolicyError, match=r"cannot be in one graph"):
        run(Outer(lambda x: hidden[0](x)), policy=Policy.torch("cpu", BF16), level="auto")


def test_two_parts_as_autocast_would_run_them() -> None:
    model = Outer(block())
    with torch.autocast("cpu", BF16):
        expected = model(batch())
    model.part = inner(model.part, "auto", policy=Policy.torch("cpu", BF16))
    fast = amp_compile(model, "auto", policy=Policy.torch("cpu", BF16), keep_output_dtypes=False, backend="eager")
    assert torch.equal(fast(batch()), expected)


@pytest.mark.parametrize("front", ["amp_compile", "step"])
@pytest.mark.filterwarnings("ignore::amp_compiler.common.errors.AmpWarning")
def test_a_graph_break_in_the_part(front: str) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = block(), block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model = Outer(Breaks())
    twin = copy.deepcopy(model)
    model.part = inner(model.part, "O1")
    parts = [inner(twin.first, "O2"), inner(twin.part, "O1"), inner(twin.last, "O2")]
    y = parts[2](parts[1](parts[0](batch())))
    if front == "step":
        step = compile_train_step(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), "O2",
                                  dtype=BF16, loss_scaler=None)  # fmt: skip
        assert torch.equal(step(batch(), torch.zeros(3, 4)).loss, nn.functional.mse_loss(y, torch.zeros(3, 4)))
    else:
        fast = amp_compile(model, "O2", dtype=BF16, backend="eager")
        assert torch.equal(fast(batch()), y)
        assert "part was compiled by itself" in " ".join(fast.report().notes)
    assert {r.precision for r in model.part.report().rows if r.op == "gelu"} == {"float32"}


def test_a_torch_compile_of_the_users_around_the_part_in_code_that_is_not_captured() -> None:
    """That trace is not ours: the part must not take it for one, or it would run in fp32."""
    part = inner(block(), "O3", keep_output_dtypes=False)
    seen: list[torch.dtype] = []

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = torch.compile(nn.Sequential(part), backend="eager")

        @torch.compiler.disable
        def forward(self, x: Tensor) -> Tensor:
            y = self.wrapped(x)
            seen.append(y.dtype)
            return y.float()

    amp_compile(Outer(Plain()), "O1", dtype=BF16, backend="eager")(batch())
    assert seen == [BF16]
    assert part.report().by_precision == {"bfloat16": 2}
