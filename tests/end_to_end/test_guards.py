"""Every trap of docs/design.md#traps: the behaviour is right, and a check of it fails when the guard is switched off.

``TRAPS`` maps a name to a small check, to what switches its guard off, and to how the check notices: by an assertion
of its own or by the verifier, unless another error is named. A check that cannot fail protects nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from amp_compiler import AmpModule, AmpWarning, Policy, amp_compile, ir, precision
from amp_compiler.capture import (
    autodiff,
    dtype_reads,
    dynamo,
    export,
    higher_order,
    interpreter,
    lower,
    origin,
    recurrent,
    twin,
)  # fmt: skip
from amp_compiler.capture import settings as capture
from amp_compiler.capture.followed import Reading
from amp_compiler.common.errors import VerifyError
from amp_compiler.ir import Decision, Mode, constants, decisions
from amp_compiler.passes import fold_casts, insert_casts, mark_dtype_origin, normalize, order
from amp_compiler.passes.precision import limits as limits_module
from amp_compiler.passes.precision import writes
from amp_compiler.passes.precision.asked import Asked
from amp_compiler.passes.precision.carried import Carried
from amp_compiler.passes.precision.limits import Limits
from amp_compiler.policy import Rule
from amp_compiler.policy.ops.row import Row
from amp_compiler.runtime.captured import Captured
from amp_compiler.runtime.state import State
from helpers import BF16, F16, F32, ExportMixed, casts, context, exported, functional, ops, pre_dispatch, same

Removal = Callable[[pytest.MonkeyPatch], None]
Comparison = mark_dtype_origin._Comparison


class Trap(NamedTuple):
    check: Callable[[], None]
    removal: Removal
    noticed: tuple[type[Exception] | None, str]


TRAPS: dict[str, Trap] = {}


def trap(name: str, removal: Removal, noticed: type[Exception] | None = None, says: str = "", **options: Any) -> Any:
    """Enter a check into the table; ``options`` are arguments for it."""

    def enter(check: Callable[..., None]) -> Callable[..., None]:
        assert name not in TRAPS
        TRAPS[name] = Trap(lambda: check(**options), removal, (noticed, says))
        return check

    return enter


# ----------------------------------------------------------------------------------- switching guards off


def both(*removals: Removal) -> Removal:
    """Remove several, of which each alone would do."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        for removal in removals:
            removal(patch)

    return remove


def gives(owner: Any, name: str, value: Any = None) -> Removal:
    """The function gives ``value`` and does nothing."""
    real = getattr(owner, name)
    assert callable(real)

    def remove(patch: pytest.MonkeyPatch) -> None:
        held = [m for key, m in list(sys.modules.items()) if key.startswith("amp_compiler.ir")]
        for place in {id(o): o for o in (owner, *(m for m in held if getattr(m, name, None) is real))}.values():
            patch.setattr(place, name, lambda *args, **kwargs: copy.copy(value))

    return remove


def becomes(owner: Any, name: str, value: Any) -> Removal:
    assert hasattr(owner, name)
    return lambda patch: patch.setattr(owner, name, value)


# ------------------------------------------------------------------------------------------- small models


def ints(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: no dtype rounds them."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rewritten(
    fn: Callable[..., Any], *inputs: Tensor, level: str = "O2", dtype: torch.dtype = BF16, torch_lists: bool = False,
    parameters: tuple[int, ...] = (),
) -> Any:  # fmt: skip
    """A function after the forward passes, without Dynamo; with ``torch_lists`` as torch.autocast would run it."""
    gm = pre_dispatch(fn, *inputs, parameters=parameters)
    policy = Policy.torch("cpu", dtype) if torch_lists else Policy(level, dtype)
    order.build().forward.run(gm, context(policy=policy, keep=not torch_lists), [], graph="forward")
    return gm


def as_in_fp32(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    """The rewritten function gives what the function gives, and writes what it writes."""
    gm = rewritten(fn, *inputs, **options)
    mine, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    same(gm(*mine), fn(*theirs))
    same(mine, theirs)


def compiled(target: Any, level: str = "O2", **options: Any) -> AmpModule:
    return amp_compile(target, level, **{"dtype": BF16, "backend": "eager", **options})


def through(front: str, model: nn.Module, *args: Tensor, level: str = "O2", dtype: torch.dtype = BF16) -> Any:
    """A module that has run through a front end: (a call, the rewritten graph, notes)."""
    if front == "export":
        mixed = ExportMixed(model, args, level=level, dtype=dtype)
        return mixed, mixed.graph, mixed.ctx.notes
    fast = compiled(model, level, dtype=dtype)
    fast(*args)
    assert len(fast.graphs) == 1
    return fast, fast.graphs[0], list(fast.report().notes)


def precisions(gm: Any, *names: str) -> list[torch.dtype | None]:
    return [ir.dtype_of(n) for _, inner in ir.all_graphs(gm) for name in names for n in ops(inner, name)]


class Does(nn.Module):
    """A linear layer, and ``step`` on what it gives."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step, self.fc = step, nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.copy_(normal(4, 4, seed=1))

    def forward(self, x: Tensor) -> Any:
        return self.step(self, self.fc(x))


# --------------------------------------------------------------------------------------------- written to


@trap("in-place op", gives(ir, "mutated_args", frozenset()))
def in_place() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        x.addcmul_(w, w)
        return x * 1

    as_in_fp32(fn, ints(4, 4), ints(4, 4, seed=1))


@trap("view of a mutated tensor", gives(ir.Aliases, "is_view", False))
@trap("view of a mutated tensor: what is written", gives(ir, "written_nodes", set()))
def view() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        turned = y.t()
        y.sum_to_size(4, 4).add_(1)  # gives back y itself
        return turned * 1

    as_in_fp32(fn, ints(4, 4), ints(4, 4, seed=1))


@trap("view of a mutated tensor: a cast that does nothing", gives(writes, "makers_in_fp32", {}))
def cast_as_view() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        turned = y.t()
        y.float().add_(1)
        return turned * 1

    as_in_fp32(fn, ints(4, 4), ints(4, 4, seed=1))


@trap("a cast that made a copy, and is written to", gives(ir, "written_nodes", set()))
def copy_written() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        y = x @ w
        z = y.to(BF16)
        z.add_(1)
        return y * 1, z

    as_in_fp32(fn, ints(4, 4), ints(4, 4, seed=1))


@trap("a parameter that is written between two uses", gives(ir, "written_nodes", set()))
def parameter_written() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        first = x @ w
        w.view(-1).mul_(2)
        return first, x @ w

    as_in_fp32(fn, ints(4, 4), ints(4, 4, seed=1), parameters=(1,))


# ------------------------------------------------------------------------------------- used several times


@trap("same tensor twice in one op", gives(insert_casts, "_is_parameter", True))
def twice() -> None:
    """Two casts: the two gradients are added in fp32."""
    x = normal(4, 4).requires_grad_()
    gm = rewritten(lambda x: torch.mm(x, x), x, torch_lists=True)
    tangent = normal(4, 4, seed=1).to(BF16)
    gm(x).backward(tangent)
    low = x.detach().to(BF16)
    assert torch.equal(x.grad, (tangent @ low.t()).float() + (low.t() @ tangent).float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x))


@trap("shared weights, dynamo", gives(origin, "mark_parameters"), front="dynamo")
@trap("shared weights, export", gives(insert_casts, "_is_parameter", False), front="export")
def shared_weights(front: str) -> None:
    _, gm, _ = through(front, Tied(), normal(2, 4))
    assert len([n for n in casts(gm) if "weight" in ir.cast_source(n).name]) == 1


# ---------------------------------------------------------------------------------------------- constants


def finite(fn: Callable[[Tensor], Tensor], dtype: torch.dtype = F16) -> None:
    """Finite after a linear layer, and 0 only where fp32 has a 0."""
    x, w = ints(4, 4), torch.eye(4)
    out = rewritten(lambda x, w: fn(x @ w), x, w, dtype=dtype)(x, w)
    assert out.isfinite().all()
    assert torch.equal(out == 0, fn(x @ w) == 0)


@trap("constant: a mask of -3.4e38", gives(constants, "fits", True), dtype=BF16)
def mask(dtype: torch.dtype) -> None:
    finite(lambda y: torch.where(y > 0, -3.4e38, y), dtype)


@trap("constant: eps=1e-8", gives(Carried, "misfit"))
def eps() -> None:
    finite(lambda y: y.abs() + 1e-8)


@trap("constant: a tensor of the code", gives(constants, "evaluate", {}))
def constant_tensor() -> None:
    finite(lambda y: y + torch.tensor([-1e9, 0.0, 1.0, 2.0]))


@trap("constant: what carries it", gives(Carried, "note"))
def carried() -> None:
    finite(lambda y: y.masked_fill(y > 0, -1e9) * 1.0)


@trap("constant: written into a low result", gives(writes, "makers_in_fp32", {}))
def written_constant() -> None:
    finite(lambda y: y.add_(1e9) * 1.0)


@trap("constant: integers that a low dtype cannot tell apart", gives(ir, "has_integer_operand", False))
def positions() -> None:
    x, at = torch.ones(4), torch.tensor([256, 257, 258, 259])
    as_in_fp32(lambda x, at: x * at, x, at)


# --------------------------------------------------------------------------------------- shapes of a call


def _as_traced(node: Any) -> Decision:
    out = decisions.traced(node)
    return Decision(Mode.NATIVE, out[0], "as traced", Rule.SELECTED, out=out)


@trap("multi-output op", becomes(decisions, "selected", _as_traced))
def several_outputs() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        first, second = (x @ w).split(2, 1)
        return first.exp(), second

    x, w = ints(4, 4), ints(4, 4, seed=1)
    gm = rewritten(fn, x, w)
    same(gm(x, w), fn(x, w))
    assert precisions(gm, "getitem", "exp") == [BF16, BF16, F32]


@trap("multi-output op: indices", gives(ir, "returns_non_float", False))
def indices() -> None:
    def fn(x: Tensor) -> Any:
        return x.sort().indices

    x = 1 + torch.rand(200, generator=torch.Generator().manual_seed(0)) / 2
    assert torch.equal(rewritten(fn, x)(x), fn(x))


def drop_none(patch: pytest.MonkeyPatch) -> None:
    real = ir.map_tensor_args

    def map_tensor_args(node: Any, change: Any) -> None:
        node.args = tuple([v for v in a if v is not None] if isinstance(a, (list, tuple)) else a for a in node.args)
        real(node, change)

    patch.setattr(ir, "map_tensor_args", map_tensor_args)


@trap("None arguments", drop_none)
def none_arguments() -> None:
    """``y[:, at]`` is ``index(y, [None, at])``."""

    def fn(x: Tensor, at: Tensor) -> Any:
        return F.linear(x, x, None)[:, at].clamp(None, 3)

    as_in_fp32(fn, ints(4, 4), torch.tensor([1, 0, 3, 2]))


@trap("Python scalars: no part in type promotion", becomes(decisions, "promoted", decisions.traced))
def scalars() -> None:
    x = ints(4, 4)
    gm = rewritten(lambda x: True + (3 - torch.mm(x, x) * 2.0), x, torch_lists=True)
    out = gm(x)
    assert [out.dtype, *precisions(gm, "mul", "rsub", "add")] == [BF16] * 4
    assert torch.equal(out.float(), True + (3 - x @ x * 2.0))


@trap("Python scalars: too large", gives(constants, "scalars", []))
def large_scalar() -> None:
    finite(lambda y: y * 1e5)


# ------------------------------------------------------------------------------------- what a model keeps


@trap("running statistics", becomes(Row, "keep_args", ()))
def statistics() -> None:
    def fn(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x @ w, mean, var, None, None, True, 0.5)

    x, w = ints(8, 4), ints(4, 4, seed=1)
    mine, theirs = (torch.full((4,), 3.0), torch.ones(4)), (torch.full((4,), 3.0), torch.ones(4))
    rewritten(fn, x, w, *mine)(x, w, *mine)
    fn(x, w, *theirs)
    same(mine, theirs, tolerance=1e-5)  # sums of exact values, in another order


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor([256.0]))  # a single number that is returned is fp32 anyway

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return x @ x


@trap("running statistics: a buffer that is reassigned", gives(ir, "kept_between_calls", set()))
def counter() -> None:
    model = Counter()
    fast = compiled(model)
    fast(ints(4, 4)), fast(ints(4, 4))
    assert float(model.steps) == 258.0


# ------------------------------------------------------------------------------------------ recomputation


class Checkpointed(nn.Module):
    def __init__(self, wrap: bool, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4))
        self.wrap, self.options = wrap, {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, **self.options) if self.wrap else self.body(x)


def inline(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
    return fx.Interpreter.call_function(self, target, args, kwargs)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(3)
    compiled(model)(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


@trap("dropout under recomputation", becomes(partitioners, "functionalize_rng_ops", lambda joint, fw, bw, n: (fw, bw)))
def recomputed_dropout() -> None:
    model, x = Checkpointed(True, 0.5), normal(4, 4)
    plain = Checkpointed(False, 0.5)
    plain.load_state_dict(model.state_dict())
    for ours, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(ours, theirs)


def saved(model: nn.Module) -> int:
    """How many floats the compiled model keeps for the backward."""
    kept = [0]

    def note(value: Tensor) -> Tensor:
        kept[0] += value.numel() if value.is_floating_point() else 0
        return value

    fast, x = compiled(model), normal(64, 4).requires_grad_()
    fast(x)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        fast(x)
    return kept[0]


def run_body(target: Any, args: Any, kwargs: Any, interpreter: Any) -> Any:
    return interpreter(args[0]).run(*args[1:])


@trap("activation checkpointing", becomes(higher_order, "keep_checkpoint", run_body))
@trap("activation checkpointing: lowered by us", becomes(interpreter.LoweringInterpreter, "call_function", inline),
      Exception, "_checkpoint_context_fn")  # fmt: skip
def recomputation() -> None:
    assert saved(Checkpointed(True)) < saved(Checkpointed(False))


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    wanted = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def forget_context(patch: pytest.MonkeyPatch) -> None:
    real = higher_order.keep_checkpoint

    def keep(target: Any, args: Any, kwargs: Any, interpreter: Any) -> Any:
        args[0].meta.pop("_checkpoint_context_fn", None)
        return real(target, args, kwargs, interpreter)

    patch.setattr(higher_order, "keep_checkpoint", keep)


@trap("activation checkpointing: its context", forget_context)
def checkpoint_context() -> None:
    selective = functools.partial(create_selective_checkpoint_contexts, save_products)
    assert saved(Checkpointed(True, context_fn=selective)) > saved(Checkpointed(True))


# ------------------------------------------------------------------------------------- bodies and regions


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 1e9, lambda x: x.exp(), lambda x: torch.mm(x, x), (self.fc(x),))


def open_border(gm: Any, node: Any, known: Decision) -> bool:
    return any([insert_casts._insert(inner, keep_outputs=False) for _, inner in ir.subgraphs(gm, node)])


@trap("torch.cond: its branches", gives(insert_casts, "_bodies", False), front="dynamo")
@trap("torch.cond: its border, dynamo", becomes(insert_casts, "_bodies", open_border), Exception, "but its body",
      front="dynamo")  # fmt: skip
@trap("torch.cond: its border, export", becomes(insert_casts, "_bodies", open_border), front="export")
def cond(front: str) -> None:
    model, x = Branches(), normal(4, 4)
    run, gm, _ = through(front, model, x)
    y = F.linear(x.to(BF16), model.fc.weight.to(BF16), model.fc.bias.to(BF16))
    same(run(x), torch.mm(y, y).float())
    assert precisions(gm, "exp", "mm") == [F32, BF16]


def autocast_off(m: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.mm(y, y)


def autocast_half(m: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=F16):
        y = torch.mm(y, y)
    return y * 2


def fp32_scope(m: Any, y: Tensor) -> Tensor:
    with precision("float32"):
        return torch.mm(y, y)


def no_side_effect(patch: pytest.MonkeyPatch) -> None:
    known = fx.node._side_effectful_functions - {torch.ops.amp.scope.default}
    patch.setattr(fx.node, "_side_effectful_functions", known)


def forget_regions(patch: pytest.MonkeyPatch) -> None:
    """Their ends are dropped, and the nodes between know nothing."""
    real = normalize._regions

    def regions(gm: Any, *context: Any) -> bool:
        found = real(gm, *context)
        for node in gm.graph.nodes:
            node.meta.pop(ir.REGION, None)
        return found

    patch.setattr(normalize, "_regions", regions)


@trap("nested autocast, dynamo", forget_regions, front="dynamo", step=autocast_off)
@trap("nested autocast, export", gives(export, "_inline_regions", False), front="export", step=autocast_off)
@trap("precision scope, dynamo", no_side_effect, front="dynamo", step=fp32_scope)
@trap("precision scope, dynamo: its annotation", forget_regions, front="dynamo", step=fp32_scope)
@trap("precision scope, export", forget_regions, front="export", step=fp32_scope)
def region(front: str, step: Any) -> None:
    model, x = Does(step), normal(4, 4)
    run, gm, _ = through(front, model, x)
    assert precisions(gm, "linear", "mm") == [BF16, F32]
    y = F.linear(x.to(BF16), model.fc.weight.to(BF16), model.fc.bias.to(BF16)).float()
    assert torch.equal(run(x), y @ y)


@trap("nested autocast, export: values that are low already", gives(export._Repropagate, "run_on_fakes"))
def half_region() -> None:
    _, gm, _ = through("export", Does(autocast_half), normal(4, 4))
    assert precisions(gm, "linear", "mm", "mul") == [BF16, F16, BF16]


@trap("called inside the user's autocast", becomes(Captured, "_no_autocast", lambda self: contextlib.nullcontext()))
def users_autocast() -> None:
    model, x = nn.Linear(4, 4), normal(4, 4)
    with torch.autocast("cpu", dtype=BF16):
        out = compiled(model, "O0")(x)
    assert torch.equal(out, model(x))


def runner(graph: Any) -> Any:
    def run(args: list[Any]) -> Any:
        return graph.forward(*args)

    run._boxed_call = True
    return run


@trap("called inside the user's autocast: the backward", becomes(autodiff, "_runner", runner))
def users_autocast_backward() -> None:
    x, w, tangent = normal(4, 4), normal(4, 4, seed=1).requires_grad_(), normal(4, 4, seed=2)
    out = compiled(lambda x, w: x @ w, "O0")(x, w)
    with torch.autocast("cpu", dtype=BF16):
        out.backward(tangent)
    assert torch.equal(w.grad, x.t() @ tangent)


@trap("called inside the user's autocast: export", becomes(torch._C, "_DisableAutocast", contextlib.nullcontext))
def users_autocast_export() -> None:
    with torch.autocast("cpu", dtype=BF16):
        gm = exported(nn.Linear(4, 4), normal(4, 4))
    assert [v.dtype for n in gm.graph.nodes for v in ir.tensor_outputs(n)] == [F32] * 4


# --------------------------------------------------------------------------------------------- front ends


class Own(torch.autograd.Function):
    """A gradient that is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


@trap("custom autograd.Function", becomes(interpreter.LoweringInterpreter, "call_function", inline))
def custom_function() -> None:
    x = normal(4).requires_grad_()
    compiled(lambda x: Own.apply(x * 2) + x)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 7.0))


def settings(**changes: bool) -> Removal:
    """Capture with one setting as it would be without us."""
    real = capture.capture_settings

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        with real():
            torch._dynamo.config.allow_rnn = changes.get("rnn", True)
            yield

    return becomes(capture, "capture_settings", changed)


@contextlib.contextmanager
def without_meta(mode: Any) -> Iterator[None]:
    with mode:
        yield


#: What torch says of an LSTM in bf16 that is left to oneDNN: AOTAutograd cannot differentiate it or, on a CPU without
#: AVX-512, oneDNN has none.
NO_LSTM = "tensors_saved|primitive descriptor for the LSTM"


@trap("LSTM: Dynamo skips it", settings(rnn=False))
@trap("LSTM: decompositions", becomes(recurrent, "_OPS", ()), Exception, NO_LSTM)
def lstm() -> None:
    model, x = nn.LSTM(4, 4), normal(3, 2, 4)
    fast = compiled(model)
    fast(x)[0].sum().backward()
    assert fast.report().not_captured == ()
    assert {r.precision for r in fast.report().rows if r.op == "amp::lstm_layer"} == {"bfloat16"}
    assert all(p.grad is not None for p in model.parameters())


@trap("LSTM: mkldnn", becomes(recurrent, "_lstm", torch._decomp.decompositions.lstm_impl), Exception, NO_LSTM)
def lstm_like_autocast() -> None:
    model = nn.LSTM(4, 4)
    fast = amp_compile(model, policy=Policy.torch("cpu", BF16))
    fast(normal(3, 2, 4))[0].sum().backward()
    assert {r.precision for r in fast.report().rows if r.op in ("linear", "matmul", "mm")} == {"bfloat16"}


@trap("fused encoder layer", becomes(capture, "is_handle", lambda compiler: False))
def fastpath() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    fast = compiled(model)
    with torch.no_grad():
        fast(normal(2, 3, 8))
    assert [r.op for r in fast.report().rows].count("linear") == 4


def joint_only(patch: pytest.MonkeyPatch) -> None:
    real = autodiff.compile_graph

    def compile_graph(gm: Any, inputs: Any, backend: str, joint: Any) -> Any:
        return real(gm, inputs, backend, lambda graph, kind: joint(graph, kind) if kind == "joint" else None)

    patch.setattr(autodiff, "compile_graph", compile_graph)


@trap("no_grad: passes after autodiff", joint_only)
def inference() -> None:
    fast = compiled(lambda x, w: x @ w + x @ w.t())
    with torch.no_grad():
        fast(ints(4, 4), ints(4, 4))
    assert fast.report().casts == 3  # x, w and the output, once each


@trap("where a node came from", becomes(lower, "_tracing", without_meta))
def meta() -> None:
    fast = compiled(Does(lambda m, y: y.exp()))
    fast(normal(4, 4))
    assert [(r.op, r.module) for r in fast.report().rows] == [("linear", "fc"), ("exp", "")]


# ----------------------------------------------------------------------------------- what is not captured


def broken(m: Any, y: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return y.exp()


@torch.compiler.disable
def opaque(m: Any, y: Tensor) -> Tensor:
    return y.exp()


#: what a graph says of its end, and what Dynamo's counts say if it does not
_TOLD = both(gives(dynamo, "break_reason"), gives(State, "missed"))


@trap("not captured: a graph break", _TOLD, step=broken, line="in broken: torch._dynamo.graph")
@trap("not captured: a function left out", _TOLD, step=opaque, line="return self.step(self")
def graph_break(step: Any, line: str) -> None:
    fast = compiled(Does(step))
    fast(normal(4, 4))
    assert line in " ".join(fast.report().not_captured)


def at_once(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.exp()


def in_a_scope(x: Tensor) -> Tensor:
    with precision("float32"):
        x = x @ x
        torch._dynamo.graph_break()
        return x.exp()


@trap("not captured: a graph break before any op", gives(State, "missed"), fn=at_once)
@trap("not captured: a graph break in a scope", gives(dynamo.Tally, "skipped_since"), fn=in_a_scope)
@trap("not captured: the whole model", gives(Captured, "_nothing_captured"), fn=lambda x: opaque(None, x))
def not_captured(fn: Any) -> None:
    fast, x = compiled(fn), normal(4, 4)
    assert torch.equal(fast(x), fn(x))
    assert fast.report().not_captured


# --------------------------------------------------------------------------------- dtype-dependent Python


def explicit(m: Any, y: Tensor) -> Tensor:
    return y.float() * 3


def followed(m: Any, y: Tensor) -> Tensor:
    return y.float().exp().to(y.dtype) * 3


def conditional(m: Any, y: Tensor) -> Tensor:
    y = y.float().exp()
    if y.dtype != m.fc.weight.dtype:
        y = y.to(m.fc.weight.dtype)
    return y * 3


def guarded(m: Any, y: Tensor) -> Tensor:
    y = y * 3
    if y.dtype == BF16:
        y = y.clamp(-5, 5)
    return y


def before_and_after(m: Any, y: Tensor) -> Tensor:
    z = y.float()
    return (z + 1).to(y.dtype) - y * 3


def followed_back(m: Any, y: Tensor) -> Tensor:
    return y.float().exp().to(m.fc.weight.dtype) * 3


def untouched(m: Any, y: Tensor) -> Tensor:
    z = y.float()  # nothing to do in fp32; no code here asks for a dtype, so there is no twin
    return z + y * 3


def no_neutral(patch: pytest.MonkeyPatch) -> None:
    real = Asked.note

    def note_asked(self: Any, node: Any, known: Decision) -> None:
        real(self, node, known)
        self.neutral.clear()

    patch.setattr(Asked, "note", note_asked)


NOT_FOLLOWED = gives(dtype_reads, "all_followed", False)
NO_TWIN = {"dynamo": both(NOT_FOLLOWED, gives(twin, "twin_of_frame")), "export": gives(Comparison, "run", False)}
NOT_NOTICED = becomes(Reading, "is_whole", property(lambda self: True, lambda self, value: None))
MARKED: list[tuple[str, Any, str, torch.dtype, str, Removal | None]] = [
    ("an explicit cast is honoured", explicit, "O2", F32, "both", gives(Asked, "note")),
    ("a cast that follows", followed, "O2", BF16, "both", None),
    ("a cast that fp32 skips", conditional, "O2", BF16, "both",
     becomes(Comparison, "counterpart", lambda self, theirs, before=None: self.ours.get(theirs))),
    ("a branch", guarded, "O2", F32, "both", gives(Comparison, "doubt")),
    ("a use before the cast", before_and_after, "O2", BF16, "export", gives(Comparison, "rewire")),
    ("a use before the cast", untouched, "O2", BF16, "dynamo",
     becomes(interpreter, "_apart", lambda value, proxy, tracer: value)),
    ("whose dtype", followed_back, "auto", F32, "dynamo",
     both(NOT_FOLLOWED, becomes(Reading, "follow", lambda self, constant, node: constant))),
    ("a branch that is noticed", guarded, "O2", F32, "dynamo", NOT_NOTICED),
]  # fmt: skip


def factor(front: str, step: Any, level: str, dtype: torch.dtype) -> None:
    """The precision of ``· * 3``."""
    _, gm, _ = through(front, Does(step), normal(4, 4), level=level)
    assert precisions(gm, "mul") == [dtype]


for what, step_, level_, dtype_, fronts, removal_ in MARKED:
    for front_ in ("dynamo", "export") if fronts == "both" else (fronts,):
        trap(f"dtype-dependent Python: {what}, {front_}", removal_ or NO_TWIN[front_],
             front=front_, step=step_, level=level_, dtype=dtype_)(factor)  # fmt: skip


def fill(m: Any, y: Tensor) -> Tensor:
    return y.masked_fill(y > 0, torch.finfo(y.dtype).min)


@trap("dtype-dependent Python: limits, dynamo", NO_TWIN["dynamo"], front="dynamo")
@trap("dtype-dependent Python: limits, export", NO_TWIN["export"], front="export")
@trap("dtype-dependent Python: limits follow the op", becomes(Limits, "applied", lambda self, node, new: new),
      front="export")  # fmt: skip
def limits(front: str) -> None:
    run, gm, _ = through(front, Does(fill), normal(4, 4), dtype=F16)
    (node,) = ops(gm, "masked_fill")
    assert (node.args[2], ir.dtype_of(node)) == (torch.finfo(F16).min, F16)
    assert run(normal(4, 4)).isfinite().all()


@trap("dtype-dependent Python: a tensor limit", becomes(Comparison, "spelled_out", lambda self, ours, theirs: ours))
def limit_tensor() -> None:
    model = Does(lambda m, y: torch.maximum(y, torch.tensor(torch.finfo(y.dtype).min, dtype=y.dtype)))
    _, gm, _ = through("export", model, normal(4, 4), dtype=F16)
    assert precisions(gm, "maximum") == [F16]


@trap("dtype-dependent Python: a limit that fp32 ops alone see", gives(limits_module, "kept_in_fp32", frozenset()))
def limit_in_fp32() -> None:
    def step(m: Any, y: Tensor) -> Tensor:
        return (y.float() + torch.full((4,), torch.finfo(y.dtype).min, dtype=y.dtype)).softmax(-1)

    _, gm, _ = through("export", Does(step), normal(4, 4), dtype=F16)
    assert ops(gm, "full")[0].args[1] == torch.finfo(F32).min


@trap("constants of the code alone are fp32", no_neutral)
def rotary() -> None:
    def fn(y: Tensor) -> Tensor:
        return y * (torch.linspace(0, 300, 10)[:, None] @ torch.ones(1, 1)).sin()

    as_in_fp32(fn, torch.ones(1, 1), level="auto")


@trap("the user's Python runs on a copy", becomes(export, "sharing_copy", lambda model: model))
def runs_twice() -> None:
    """torch.export itself puts a module's attributes back, and nothing below them."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = types.SimpleNamespace(calls=0)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.calls += 1
            return x.to(x.dtype) * 2  # reads a dtype: code that reads none is exported once

    model = Counting()
    ExportMixed(model, (normal(4),))
    assert model.seen.calls <= 1


# -------------------------------------------------------------------------------------- around the passes


@trap("outputs keep their dtypes", gives(insert_casts, "_restore_outputs", False))
def output_dtypes() -> None:
    assert rewritten(lambda x: x @ x, ints(4, 4))(ints(4, 4)).dtype is F32


@trap("fold: a rounding stays", gives(ir, "lossless", True))
def rounding() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.to(BF16).to(F32) + 1

    gm = functional(fn, normal(4))
    fold_casts.PASS.run(gm, context())
    same(gm(normal(4)), fn(normal(4)))


# ---------------------------------------------------------------------------------------------- the tests


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        yield


@pytest.mark.parametrize("name", TRAPS)
def test_the_behaviour(name: str) -> None:
    TRAPS[name].check()


@pytest.mark.parametrize("name", TRAPS)
def test_it_fails_without_its_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, removal, (noticed, says) = TRAPS[name]
    removal(monkeypatch)
    with pytest.raises(noticed or (AssertionError, VerifyError), match=says or None):
        check()
