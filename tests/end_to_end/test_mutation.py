"""Writes in place, views of what is written, buffers and inputs that a model changes: as in the uncompiled model.

Most programs here compute with small whole numbers, which fp32, bf16 and fp16 all hold exactly; ``Exact`` checks that
of every value of the uncompiled run, forward and backward. So nothing is ever rounded, the compiled model must agree
in every bit at every level, and a difference is a lost write, a wrong alias or a write that came too late.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from amp_compiler import AmpWarning, Policy, amp_compile, ir, precision
from amp_compiler.rewrite.verify import verify
from helpers import BF16, F16, F32, FORWARD, ExportMixed, context, pre_dispatch

LEVELS = ("O1", "auto", "O2", "O3")
POLICIES = (*LEVELS, "torch")
LOW = {BF16: "bfloat16", F16: "float16"}
Program = Callable[[Any, Tensor], Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)  # a model that only runs as it did before was not tested
        yield


# ------------------------------------------------------------------------------------- exact by construction


class Exact(TorchDispatchMode):
    """Fails on a float value that fp32, bf16 and fp16 do not all hold exactly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" not in str(func):
            for value in pytree.tree_leaves(out):
                if isinstance(value, Tensor) and value.dtype is F32:
                    for low in LOW:
                        assert torch.equal(value.to(low).float(), value), f"{func} gives a value that {low} rounds"
        return out


def ints(*shape: int, largest: int = 2, seed: int = 0) -> Tensor:
    r = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=r).float()


class Net(nn.Module):
    """A linear layer, a tied one, state of every kind, and a program that uses them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.fc = nn.Linear(4, 4)
        self.conv = nn.Conv1d(3, 3, 1)
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(ints(*p.shape, largest=1, seed=seed))
        self.register_buffer("state", ints(4, seed=7))
        self.register_buffer("cache", torch.zeros(6, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([[True, False, False, True]] * 3))
        self.register_buffer("where", torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)


def run(call: Callable[..., Any], model: nn.Module, *, train: bool, calls: int = 2) -> dict[str, Any]:
    """Everything that one can see of a few calls: outputs, the inputs and buffers afterwards, the gradients."""
    seen: dict[str, Any] = {}
    for index in range(calls):
        leaf = ints(3, 4, seed=20 + index).requires_grad_(train)
        with torch.set_grad_enabled(train):
            x = leaf * 1  # no leaf, so that a model may write to it while it needs a gradient
            out = call(x)
            flat = [o for o in pytree.tree_leaves(out) if isinstance(o, Tensor)]
            differentiable = [o for o in flat if o.requires_grad]
            if differentiable:
                tangents = [ints(*o.shape, largest=1, seed=30 + i) for i, o in enumerate(differentiable)]
                torch.autograd.backward(differentiable, tangents)
        seen |= {f"call {index}: output {i}": o.detach().clone() for i, o in enumerate(flat)}
        seen |= {f"call {index}: input": x.detach().clone(), f"call {index}: gradient of the input": leaf.grad}
        seen |= {f"call {index}: {name}": b.detach().clone() for name, b in model.named_buffers()}
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return seen


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, b in theirs.items():
        a = ours[name]
        if a is None or b is None:
            # AOTAutograd gives zeros where autograd gives None
            assert (a is b) or not (a if b is None else b).any(), f"{name}: {a} against {b}"
            continue
        assert a.dtype == b.dtype, f"{name}: {a.dtype} against {b.dtype}"
        assert torch.equal(a, b), f"{name}:\n{a}\nagainst the uncompiled model's\n{b}"


CASES: dict[str, Program] = {}
INFERENCE: dict[str, Program] = {}  # programs that torch itself refuses to differentiate


def case(program: Program) -> Program:
    CASES[program.__name__] = program
    return program


def inference(program: Program) -> Program:
    INFERENCE[program.__name__] = program
    return program


# ---------------------------------------------------------------------------------- results of low ops, written to


@case
def write_to_a_column_of_a_low_result(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y[:, 0] = 0
    y.add_(1)
    return y


@case
def write_through_a_flat_view(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.view(-1).mul_(2)
    return y


@case
def write_through_a_view_of_a_view(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.t()[1:].unsqueeze(0)[0, 0].add_(3)
    return y * 1, y[:, 1]


@case
def view_read_after_its_base_is_written(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    part = y[:, 1:]
    y.mul_(2)
    return part + 1, y.clone()


@inference
def base_read_before_and_after_a_write(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    before, through = y + 1, m.fc(y)
    y.relu_()
    return before, through, m.fc(y)


@case
def relu_in_place_after_conv(m: Any, x: Tensor) -> Any:
    return F.relu(m.conv(x[None]), inplace=True)[0] + 1


@case
def chain_of_writes(m: Any, x: Tensor) -> Any:
    return m.fc(x).mul_(2).add_(1).clamp_(-3, 3).neg_().abs_().sub_(1)


@case
def masked_writes(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.masked_fill_(m.mask, -4.0)
    y[m.mask.logical_not()] = 5.0
    y[y > 4] = -1.0
    y.masked_scatter_(m.mask, x)
    return y


@case
def indexed_writes(m: Any, x: Tensor) -> Any:
    y, i = m.fc(x), m.where[:, None].expand(3, 2)
    y[m.where] = x
    y.index_put_((m.where[:2],), x[:2], accumulate=True)
    y.scatter_(0, i, x[:, :2])
    y.scatter_add_(0, i, x[:, 2:])
    y.index_add_(0, m.where, x)
    y.index_copy_(0, m.where[:1], x[:1])
    y.index_fill_(1, m.where[:1], 3.0)
    return y


@case
def copies_between_dtypes(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.copy_(x.double())
    wide = torch.zeros(3, 4, dtype=torch.float64)
    wide.copy_(m.fc(y))
    whole = torch.zeros(3, 4, dtype=torch.int64)
    whole.copy_(m.fc(x).detach())
    low = torch.zeros(3, 4, dtype=BF16)
    low.copy_(m.fc(x))
    return y, wide, whole, low


@case
def fp32_written_from_low(m: Any, x: Tensor) -> Any:
    z = x.cumsum(0)
    z.add_(m.fc(x))
    z.addcmul_(m.fc(x), x)
    z[:, 0] = m.fc(x)[:, 0]
    return z


@case
def out_arguments(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        z, w = torch.zeros(3, 4), torch.empty(3, 4)
        torch.mul(x, x, out=z)
        torch.add(m.fc(x), x, out=w)
        torch.matmul(x, m.fc.weight, out=z)
    return z.add_(1), w


@case
def zeroed_then_filled(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.zero_()
    y[1] = x[1]
    y[:, 2].fill_(2)
    return y


@case
def written_through_detach(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    d = y.detach()
    d.zero_()
    d[0] = 1
    return y + d


@case
def written_through_data(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.data.add_(1)
    return y


@case
def added_to_itself(m: Any, x: Tensor) -> Any:
    y, z = m.fc(x), x * 1
    y += y
    z += z
    y[:, 1:] = y[:, :-1].clone()
    y[0] = y[1]
    y.copy_(y)
    return y, z, torch.cat([y, y]), torch.addcmul(x, x, x), torch.einsum("ij,kj->ik", y, y)


@inference
def multiplied_by_itself(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.mul_(y)
    x.mul_(x)
    return torch.mul(x, x), y


@case
def expanded_then_its_base_is_written(m: Any, x: Tensor) -> Any:
    y = m.fc(x)[:, :1].contiguous()
    wide = y.expand(3, 4)
    y.add_(1)
    return wide + 1


@inference
def parts_are_written(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    first, second = y.chunk(2, 1)
    first.add_(second)
    one, three = y.split([1, 3], 1)
    three[:, 0].add_(one[:, 0])
    y.unbind(0)[1].mul_(2)
    for part in torch.tensor_split(y, 2):
        part.sub_(1)
    return y, first.clone()


@case
def several_outputs(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    first, second = y.split(2, 1)
    largest, at = y.max(1)
    top, order = y.topk(2, 1)
    columns = y.unbind(1)
    _, mean = torch.var_mean(y[:, :1].expand(3, 4), 1)
    return first + 1, second, largest, at.shape, top, order.shape, columns[0] + columns[3], y.sort(1)[0], mean


@case
def none_arguments(m: Any, x: Tensor) -> Any:
    y = F.linear(x, m.fc.weight, None)
    y.clamp_(min=None, max=2)
    y.clamp_(-1, None)
    return y[None, :, None]


@case
def python_scalars(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y *= 2
    y -= 1
    y += True
    y = (3 - y).div_(2).floor_()
    return y.clamp_(0, 4)


@case
def shapes_changed_in_place(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.unsqueeze_(0)
    y.squeeze_(0)
    y.t_()
    y.add_(1)
    return y.transpose_(0, 1)


# ------------------------------------------------------------------------------------------------ inputs, outputs


@inference
def input_is_written(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    x.add_(y)
    return y


@inference
def input_slice_is_written(m: Any, x: Tensor) -> Any:
    x[:, 1] = m.fc(x)[:, 0]
    x[0].mul_(2)
    return m.fc(x)


@case
def input_is_overwritten_by_a_low_result(m: Any, x: Tensor) -> Any:
    x.copy_(m.fc(torch.ones(3, 4)))
    x[1:].add_(1)
    return x


@case
def input_and_a_view_of_it_are_returned(m: Any, x: Tensor) -> Any:
    y = F.linear(x.clone(), m.fc.weight)
    x.add_(1)
    return x, x[0], y


@case
def one_output_twice_and_a_view_of_it(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    return y, y, y.view(-1), x


@case
def a_cast_that_does_nothing_is_written(m: Any, x: Tensor) -> Any:
    """``.float()`` of a fp32 tensor is that tensor."""
    y = F.linear(x.clone(), m.fc.weight)
    y.float().add_(1)
    x.type_as(m.fc.weight).add_(1)
    return y * 1


@case
def the_same_storage_twice_in_a_reduction(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.sum_to_size(3, 4).add_(1)
    y.contiguous().add_(1)
    return y * 1


# -------------------------------------------------------------------------------------------------------- buffers


@case
def buffer_is_added_to(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    m.state.add_(y.detach().amax(0))
    m.count += 1
    return y + m.state


@case
def buffer_is_reassigned(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    m.state = m.state * 0.5 * 2 + y.detach().amax(0)
    m.count = m.count + 1
    return y


@case
def cache_written_by_slice(m: Any, x: Tensor) -> Any:
    y = m.fc(x).detach()
    m.cache[1:4] = y
    m.cache[4:6, :2] = y[:2, :2]
    return F.linear(m.cache[:4], m.fc.weight)


@case
def cache_written_by_index_copy(m: Any, x: Tensor) -> Any:
    y = m.fc(x).detach()
    m.cache.index_copy_(0, m.where, y)
    m.cache[:, 3].fill_(1)
    return m.cache @ m.fc.weight


@case
def cache_rolled(m: Any, x: Tensor) -> Any:
    y = m.fc(x).detach()
    m.cache.copy_(m.cache.roll(-3, 0))
    m.cache[-3:].copy_(y)
    return m.cache.clone()


@case
def buffer_written_through_a_view(m: Any, x: Tensor) -> Any:
    square, y = m.state.view(2, 2), m.fc(x)
    square[0].copy_(y.detach()[0, :2])
    m.state[3] = 2
    return y * square.view(-1)


@case
def buffer_used_low_before_and_after_a_write(m: Any, x: Tensor) -> Any:
    y = F.linear(x, m.fc.weight, m.state)
    m.state.copy_(y.detach()[0].clamp(-2, 2))
    m.state[0].add_(1)
    return y, F.linear(x, m.fc.weight, m.state)


@case
def parameter_written_between_two_uses(m: Any, x: Tensor) -> Any:
    """One cast of a parameter is enough only while nobody writes to it."""
    x = x.detach()
    first = m.fc(x)
    with torch.no_grad():
        m.fc.weight[0].mul_(-1)
        m.fc.bias.detach().view(2, 2)[0].add_(1)
    return first, m.fc(x)


@case
def tied_weights(m: Any, x: Tensor) -> Any:
    ids = torch.tensor([0, 2, 3])
    return F.linear(F.embedding(ids, m.fc.weight), m.fc.weight) + F.linear(x, m.fc.weight)


# ------------------------------------------------------------------------------- constants that fp16 cannot hold


@case
def large_constant_by_mask(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y[m.mask] = -(2.0**20)
    return torch.maximum(y, x) * 1


@case
def large_constant_then_arithmetic(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y.masked_fill_(m.mask, -(2.0**20))
    z = y * 1
    return z, z.clamp(-4, 4)


@case
def large_constant_by_slice(m: Any, x: Tensor) -> Any:
    y = m.fc(x)
    y[:, 0] = 2.0**17
    y[:, 1].fill_(-(2.0**17))
    y[0].copy_(torch.full((4,), 2.0**17))
    return y * 1


LARGE = [name for name in CASES if name.startswith("large")]
#: what is written to there must stay fp32, and so the op that makes it
WIDE = (*LARGE, "a_cast_that_does_nothing_is_written", "the_same_storage_twice_in_a_reduction")
ALL = {**CASES, **INFERENCE}
#: torch.export traces with gradients, where torch refuses such writes, and does not see ``.data``
NOT_EXPORTABLE = ("parts_are_written", "written_through_data")
#: torch.autocast, which "torch" reproduces, makes a copy there, refuses two dtypes in one scatter, or gives inf
NOT_AUTOCAST = ("a_cast_that_does_nothing_is_written", "indexed_writes", *LARGE)


def policy(index: int, name: str) -> Policy:
    """The policy for a case: they take turns, so that all cases together meet all levels in both dtypes."""
    level, dtype = POLICIES[index % 5], (BF16, F16)[index // 5 % 2]
    if name in LARGE:
        dtype = F16
    if level == "torch" and name not in NOT_AUTOCAST:
        return Policy.torch("cpu", dtype)
    return Policy("O2" if level == "torch" else level, dtype)


def reference(name: str, model: Net, train: bool) -> dict[str, Any]:
    if name in LARGE:  # fp16 does not hold these constants: those ops have to stay in fp32
        return run(model, model, train=train)
    with Exact():
        return run(model, model, train=train)


def products(rows: Any) -> set[str]:
    return {row.precision for row in rows if row.op in ("linear", "conv1d")}


@pytest.mark.parametrize(("index", "name"), list(enumerate(ALL)), ids=list(ALL))
def test_as_uncompiled(index: int, name: str) -> None:
    """Through amp_compile: outputs, inputs, buffers and gradients are equal, and the model was really rewritten."""
    chosen, train = policy(index, name), name in CASES and index % 3 != 0
    model = Net(ALL[name])
    expected = reference(name, copy.deepcopy(model), train)
    fast = amp_compile(model, policy=chosen, backend="eager")
    assert_equal(run(fast, model, train=train), expected)
    report = fast.report()
    assert report.not_captured == report.notes == ()
    assert len(fast.graphs) == 1
    assert products(report.rows) == {LOW[chosen.low]} or (name in WIDE and products(report.rows))


@pytest.mark.parametrize("name", [name for name in ALL if name not in NOT_EXPORTABLE])
def test_as_uncompiled_when_exported(name: str) -> None:
    chosen, train = policy(list(ALL).index(name) + 2, name), name in CASES  # not the policy of the test above
    model = Net(ALL[name])
    expected = reference(name, copy.deepcopy(model), train)
    mixed = ExportMixed(model, (ints(3, 4),), policy=chosen)
    found = run(mixed, mixed.module, train=train)
    assert_equal({key: found.get(key) for key in expected}, expected)
    assert products(mixed.rows) == {LOW[chosen.low]} or (name in WIDE and products(mixed.rows))


# ---------------------------------------------------------------------------------------- every view, every write

#: expressions that give back memory of ``y``; a write to one must reach ``y``
VIEWS = (
    "y.view(-1)", "y.view_as(torch.empty(4, 3))", "y.reshape(12)", "y.reshape_as(torch.empty(2, 6))", "y.flatten()",
    "y.ravel()", "y.unflatten(1, (2, 2))", "y.t()", "y.T", "y.mT", "y.H", "y.transpose(0, 1)", "y.swapaxes(0, 1)",
    "y.permute(1, 0)", "y.movedim(0, 1)", "y.unsqueeze(0)", "y[None].squeeze(0)", "y.select(0, 1)", "y[1:, ::2]",
    "y.narrow(1, 1, 2)", "y.diagonal()", "y.unfold(1, 2, 2)", "y.as_strided((3,), (4,))", "y.expand(3, 4)",
    "y.broadcast_to((3, 4))", "y.detach()", "torch.ops.aten.alias(y)", "y.contiguous()", "y.real", "y.resolve_conj()",
    "torch.atleast_2d(y)", "y.chunk(2, 1)[0]", "y.split([1, 3], 1)[1]", "y.tensor_split(2)[0]", "y.hsplit(2)[0]",
    "y.unbind(1)[2]", "torch.broadcast_tensors(y, y)[0]", "torch.meshgrid(y[0], y[1], indexing='ij')[0][:, 0]",
    "torch.view_as_complex(y.view(3, 2, 2)).real", "torch.ops.aten._reshape_alias(y, [12], [1])", "y.sum_to_size(3, 4)",
    "y.view(torch.float32)", "F.alpha_dropout(y, training=False)", "torch.positive(y)",
)  # fmt: skip
#: writes to ``y``, a low tensor; ``x`` is fp32
WRITES = (
    "y.add_(x)", "y.sub_(x, alpha=2)", "y.mul_(x)", "y.div_(2)", "y.copy_(x)", "y.fill_(3)", "y.zero_()", "y.relu_()",
    "y.clamp_(-1, 1)", "y.clamp_min_(0)", "y.neg_()", "y.abs_()", "y.sign_()", "y.floor_()", "y.round_()",
    "y.square_()",     "y.addcmul_(x, x)", "y.addcdiv_(x, torch.ones(3, 4))", "y.lerp_(x, 0.5)", "y.fmod_(2)",
    "y.remainder_(2)", "y.masked_fill_(x > 0, 1)", "y.masked_scatter_(x > 0, x)", "y.index_fill_(0, i, 2)",
    "y.index_add_(0, i, x[:2])", "y.index_copy_(0, i, x[:2])", "y.index_put_((i,), x[:2])", "y.scatter_(0, j, x)",
    "y.scatter_add_(0, j, x)", "y.scatter_reduce_(0, j, x, 'amax')", "y.scatter_(0, j, 2.0)", "y.addmm_(x, w)",
    "y.tril_()", "y.triu_()", "y.cumsum_(0)", "y.transpose_(0, 1).transpose_(0, 1)",
    "F.hardtanh_(y)", "F.threshold_(y, 0, 1)", "F.leaky_relu_(y, 0.5)", "y.heaviside_(x.clamp(0, 1))", "y.trunc_()",
    "y.put_(i, x[0, :2])", "y.fill_diagonal_(2)", "y.clip_(max=1)", "y.nan_to_num_()", "y.bernoulli_(1.0)",
    "y.logical_not_()", "y.gt_(x)", "y.copysign_(x)", "y.clamp_(x - 1, x + 1)", "y.ldexp_(i[0])",
    "torch.add(x, x, out=y)", "torch.cat([x[:1], x[1:]], out=y)", "torch.mm(x, w, out=y)",
)  # fmt: skip


def rewritten(fn: Callable[..., Any], inputs: tuple[Tensor, ...], level: str, dtype: torch.dtype) -> fx.GraphModule:
    """``fn`` traced and through the forward passes, each verified."""
    gm, ctx = pre_dispatch(fn, *inputs), context(level, dtype)
    for step in FORWARD:
        step.run(gm, ctx)
        verify(gm, step.ensures, ctx, step.name, deep=True)
    return gm


@pytest.mark.parametrize(
    ("what", "level", "dtype"),
    [("views", "O1", F16), ("views", "O2", BF16), ("writes", "auto", BF16), ("writes", "O3", F16)],
)
def test_every_view_and_every_write_of_a_low_tensor(what: str, level: str, dtype: torch.dtype) -> None:
    """Each on a tensor of its own, in one graph, so that all of them are quick to try."""
    texts = VIEWS if what == "views" else WRITES
    x, w = ints(3, 4, seed=5), torch.eye(4)
    w[0, 1] = 1
    i, j = torch.tensor([2, 0]), torch.arange(3)[:, None].expand(3, 4).flip(0)
    scope = {"torch": torch, "F": F}

    def program(x: Tensor, w: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
        results = []
        for text in texts:
            y = F.linear(x, w)
            found = eval(text, scope, {"x": x, "w": w, "i": i, "j": j, "y": y})
            if what == "views":
                found.add_(1)
            results.append(y * 1)
        return results

    expected = program(x, w, i, j)
    gm = rewritten(program, (x, w, i, j), level, dtype)
    found = gm(x.clone(), w, i, j)
    assert [t for t, a, b in zip(texts, found, expected, strict=True) if not torch.equal(a, b)] == []
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and ir.op_name(n) == "linear"]
    low = [n for n in calls if ir.dtype_of(n) is dtype]
    assert len(low) > len(texts) * 3 // 4, "most results must really be low"


# ------------------------------------------------------------------------------------------------- random programs

VIEWED = (
    "{0}.t()", "{0}[1:]", "{0}[:, :2]", "{0}[0]", "{0}.reshape(-1)", "{0}.view(-1)", "{0}.unsqueeze(0)",
    "{0}.transpose(-1, -2)", "{0}.chunk(2, -1)[0]", "{0}.expand(2, 4, 4)[0]", "{0}.detach()", "{0}.diagonal()",
    "{0}.select(-1, 1)", "{0}.as_strided((2, 2), (4, 1))",
)  # fmt: skip
COMPUTED = (
    "F.linear({0}, w, b)", "{0} @ w", "{0} + {1}", "{0} * 1", "torch.relu({0})", "torch.cat([{0}, {1}])[:4]",
    "{0}.clone()", "{0}.amax(0)", "torch.where({0} > {1}, {0}, {1})", "F.linear({0}, w) - {1}",
)  # fmt: skip
WRITTEN = (
    "{0}.add_(1)", "{0}.relu_()", "{0}.neg_()", "{0}.mul_(-1)", "{0}.clamp_(-4, 4)", "{0}.zero_()", "{0}.copy_({1})",
    "{0}.add_({1})", "{0}.sub_({1})", "{0}.masked_fill_({0} > 1, 2)", "{0}.index_fill_(0, i, 3)", "{0}.fill_(2)",
    "{0}.index_add_(0, i, {1}[:2].clone())", "{0}.addmm_(w, w)", "buffer.copy_({0})", "buffer.add_({0})",
)  # fmt: skip
INPUTS = ("x", "w", "b", "buffer", "i")


def inputs(train: bool) -> dict[str, Tensor]:
    """Weights are signed permutations: products of whole numbers stay small."""
    w = torch.eye(4)[torch.tensor([2, 0, 3, 1])] * torch.tensor([1.0, -1.0, 1.0, 1.0])
    found = {"x": ints(4, 4), "w": w, "b": ints(4, largest=1, seed=1), "buffer": ints(4, 4, seed=2)}
    if train:
        found = {name: value.requires_grad_(name != "buffer") for name, value in found.items()}
    return {**found, "i": torch.tensor([1, 0])}


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Lines over inputs, views and results, in which about every second one writes to memory."""
    scope: dict[str, Any] = {"torch": torch, "F": F, **inputs(False)}
    lines, made = ["v0 = F.linear(x, w, b)"], ["v0"]
    exec(lines[0], scope)
    for _ in range(draw(st.integers(4, 12))):
        kind = draw(st.sampled_from([VIEWED, COMPUTED, WRITTEN, WRITTEN]))
        text = draw(st.sampled_from(kind))
        names = [draw(st.sampled_from([*made, *made, "x"])) for _ in range(2)]
        line = text.format(*names)
        name = f"v{len(made)}"
        try:
            exec(line if kind is WRITTEN else f"{name} = {line}", scope)
        except Exception:  # torch refuses it: shapes, overlapping memory
            continue
        lines.append(line if kind is WRITTEN else f"{name} = {line}")
        if kind is not WRITTEN:
            made.append(name)
    returns = ", ".join(f"{name}.clone()" for name in made)
    return "\n    ".join(("def program(x, w, b, buffer, i):", "x = x * 1", *lines, f"return ({returns},)"))


def function(text: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(text, scope)
    made: Callable[..., Any] = scope["program"]
    return made


def observe(call: Callable[..., Any], train: bool) -> dict[str, Any]:
    given_ = inputs(train)
    with torch.set_grad_enabled(train):
        out = call(*given_.values())
    roots = [o for o in out if o.requires_grad]
    if roots:
        torch.autograd.backward(roots, [ints(*o.shape, largest=1, seed=3) for o in roots])
    seen = {f"output {index}": o.detach() for index, o in enumerate(out)}
    seen |= {f"{name} afterwards": value.detach() for name, value in given_.items()}
    return seen | {f"gradient of {name}": value.grad for name, value in given_.items()}


common = settings(
    derandomize=True, deadline=None, database=None,
    phases=[Phase.generate],  # shrinking takes minutes; the program that failed is short already
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip


def expected_of(text: str, train: bool) -> dict[str, Any]:
    """What the program does in fp32; programs that torch cannot differentiate or that round are thrown away."""
    try:
        with warnings.catch_warnings(), Exact():
            warnings.simplefilter("ignore")
            return observe(function(text), train)
    except (RuntimeError, AssertionError):
        return reject()


def through_the_passes(text: str, level: str, dtype: torch.dtype) -> None:
    expected = expected_of(text, train=False)
    gm = rewritten(function(text), tuple(inputs(False).values()), level, dtype)
    assert_equal(observe(gm, train=False), expected)


def through_amp_compile(text: str, level: str, dtype: torch.dtype, train: bool) -> None:
    expected = expected_of(text, train)
    torch._dynamo.reset()
    fast = amp_compile(function(text), level, dtype=dtype, backend="eager")
    assert_equal(observe(fast, train), expected)
    assert fast.report().by_precision[LOW[dtype]] > 0


@settings(common, max_examples=20)
@given(programs(), st.sampled_from(LEVELS), st.sampled_from([BF16, F16]))
def test_random_writes_through_the_forward_passes(text: str, level: str, dtype: torch.dtype) -> None:
    through_the_passes(text, level, dtype)


@pytest.mark.zoo
@settings(common, max_examples=40)
@given(programs(), st.sampled_from(LEVELS), st.sampled_from([BF16, F16]))
def test_more_random_writes_through_the_forward_passes(text: str, level: str, dtype: torch.dtype) -> None:
    through_the_passes(text, level, dtype)


@settings(common, max_examples=6)
@given(programs(), st.sampled_from(LEVELS), st.sampled_from([BF16, F16]), st.booleans())
def test_random_writes_through_amp_compile(text: str, level: str, dtype: torch.dtype, train: bool) -> None:
    through_amp_compile(text, level, dtype, train)


@pytest.mark.zoo
@settings(common, max_examples=12)
@given(programs(), st.sampled_from(LEVELS), st.sampled_from([BF16, F16]), st.booleans())
def test_more_random_writes_through_amp_compile(text: str, level: str, dtype: torch.dtype, train: bool) -> None:
    through_amp_compile(text, level, dtype, train)


# --------------------------------------------------------------------------------------------------- kinds of state


def test_batch_norm_statistics() -> None:
    """Three steps and then eval: the counter is exact, the statistics fp32 and near those of fp32.

    The input of the norm was rounded three times (input, weight, result) and is below 4; a variance doubles an error
    and the two passes over the norm's result stay out of it.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.5), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)
    )
    for level, dtype in (("O1", BF16), ("O3", F16)):
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        fast = amp_compile(ours, level, dtype=dtype, backend="eager")
        bound = 3 * torch.finfo(dtype).eps * 4
        for step in range(3):
            x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(step))
            fast(x).sum().backward()
            theirs(x).sum().backward()
            for name, value in theirs[1].named_buffers():
                found = getattr(ours[1], name)
                assert found.dtype == value.dtype
                torch.testing.assert_close(found, value, rtol=0, atol=bound if value.is_floating_point() else 0)
        before = copy.deepcopy(ours[1].state_dict())
        torch.testing.assert_close(fast.eval()(x), theirs.eval()(x), rtol=0, atol=4 * bound)
        assert all(torch.equal(value, before[name]) for name, value in ours[1].state_dict().items())


class Decoder(nn.Module):
    """Self-attention over a cache, one token a call."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.fc.weight)
        self.register_buffer("keys", torch.zeros(1, 5, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def forward(self, token: Tensor) -> Tensor:
        self.keys.index_copy_(1, self.position, self.fc(token))
        self.position += 1
        return torch.bmm(self.fc(token), self.keys.transpose(1, 2))


def test_key_cache_over_several_calls() -> None:
    model = Decoder()
    twin = copy.deepcopy(model)
    fast = amp_compile(model, "O2", dtype=F16, backend="eager")
    with torch.no_grad():
        for step in range(5):
            token = ints(1, 1, 4, seed=step)
            assert torch.equal(fast(token), twin(token))
            assert torch.equal(model.keys, twin.keys)
            assert int(model.position) == step + 1
    assert len(fast.graphs) == 1
    assert {row.precision for row in fast.report().rows if row.op in ("linear", "bmm")} == {"float16"}


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(256.0))
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        self.average = self.average * 0.5 + self.fc(x).detach().mean()
        return self.fc(x)


@pytest.mark.parametrize("keep", [True, False], ids=["outputs as before", "outputs as they come"])
def test_state_that_is_reassigned_stays_fp32(keep: bool) -> None:
    """What a model keeps between calls adds up over thousands of them: 256 + 1 is 256 in bf16, for ever."""
    model = Counter()
    fast = amp_compile(model, "O2", dtype=BF16, backend="eager", keep_output_dtypes=keep)
    for _ in range(3):
        fast(torch.ones(2, 4))
    assert model.steps.dtype is F32
    assert model.average.dtype is F32
    assert float(model.steps) == 259.0
    assert len(fast.graphs) == 1


def test_a_tied_weight_is_cast_once() -> None:
    model = Net(CASES["tied_weights"])
    fast = amp_compile(model, "auto", dtype=BF16, backend="eager")
    fast(ints(3, 4))
    (graph,) = fast.graphs
    casts = [n for n in graph.graph.nodes if ir.is_float_cast(n) and "fc_weight" in ir.cast_source(n).name]
    assert len(casts) == 1


# -------------------------------------------------------------------------------------------------- shared memory


def aliases(x: Tensor, out: Any) -> list[list[bool]]:
    values = [x, *pytree.tree_leaves(out)]
    storage = [v.untyped_storage().data_ptr() for v in values]
    return [[a == b for b in storage] for a in storage]


SHARED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the input": lambda x, w: (x, x @ w),
    "views of the input": lambda x, w: (x.t(), x[0], x @ w),
    "the input, written to": lambda x, w: (x.add_(1), x[1:], x @ w),
    "one result twice": lambda x, w: [y := x @ w, y],
    "a result and a view of it": lambda x, w: [y := x @ w, y[0], y.t()],
    "views of one result": lambda x, w: list((x @ w).unbind(0)),
}


@pytest.mark.parametrize("name", SHARED)
def test_outputs_share_memory_as_with_plain_torch_compile(name: str) -> None:
    """A write to one output then shows in the others, as in the model."""
    program, w = SHARED[name], torch.eye(4)
    x = ints(4, 4)
    expected = aliases(x, torch.compile(program, backend="aot_eager")(x, w))
    torch._dynamo.reset()
    x = ints(4, 4)
    out = amp_compile(program, "O2", dtype=BF16, backend="eager")(x, w)
    assert aliases(x, out) == expected


@pytest.mark.parametrize("level", ["auto", "O3"])
def test_inputs_that_share_memory(level: str) -> None:
    def program(x: Tensor, part: Tensor, w: Tensor) -> Tensor:
        part.mul_(2)
        y = x @ w
        x.add_(1)
        return y + part

    w = torch.eye(4)
    x, y = ints(4, 4), ints(4, 4)
    expected = program(y, y[0], w)
    fast = amp_compile(program, level, dtype=F16, backend="eager")
    assert torch.equal(fast(x, x[0], w), expected)
    assert torch.equal(x, y)


# ------------------------------------------------------------------------------------------- what the user asked for


def scoped(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with precision("float32"):
        y.mul_(2)
        y.view(-1).addcmul_(x.view(-1), x.view(-1))
    with precision("bfloat16"):
        x.addcmul_(y, y)
        x[0].sub_(1)
    with torch.autocast("cpu", enabled=False):
        y.add_(x)
    return y


@pytest.mark.parametrize("level", ["O3", "torch"])
def test_no_scope_and_no_list_loses_a_write(level: str) -> None:
    """Regions and lists ask for a precision of ops that write; the tensor that they write to stays the tensor."""
    x, y, w = ints(4, 4), ints(4, 4), torch.eye(4)
    expected = scoped(y, w)
    policy = Policy.torch("cpu", BF16) if level == "torch" else Policy(level, BF16)
    for lists in ({}, {"low": ["mul", "addcmul"]}, {"fp32": ["mul", "add", "sub"]}):
        torch._dynamo.reset()
        given_ = x.clone()
        fast = amp_compile(scoped, policy=policy.with_ops(**lists), backend="eager")
        assert torch.equal(fast(given_, w), expected)
        assert torch.equal(given_, y)
