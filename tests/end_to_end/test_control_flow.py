"""Recomputation, branches, loops, gradients of one's own and layers that hide their ops: right, low, and captured.

Bounds: rounding to a dtype moves a value by at most half its eps, so after n roundings outputs and gradients are within
n · eps/2 of the largest magnitude of the fp32 model's; a wrong gradient, mask or branch is off by the order of that
magnitude itself. (Programs are smooth: at the kink of a relu a rounding may switch a whole gradient on.) Where
torch.autocast can run the program, ``Policy.torch`` must agree with it in every bit.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from amp_compiler import AmpModule, AmpWarning, Policy, amp_compile
from helpers import BF16, F16, F32, ExportMixed, in_turn

aten: Any = torch.ops.aten
#: roundings on the longest way through the programs of this file: about eight ops, each rounding inputs, weights and
#: result, forward and backward
ROUNDINGS = 32
NAMES = {BF16: "bfloat16", F16: "float16"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        yield


Seen = dict[str, Tensor | None]


def run(call: Callable[..., Any], model: Any, args: tuple[Any, ...], *, train: bool = True, seed: int = 3) -> Seen:
    """Outputs and gradients of one call, the same random numbers each time."""
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(train):
        out = [o for o in pytree.tree_leaves(call(*args)) if isinstance(o, Tensor)]
    seen: Seen = {f"output {i}": o.detach() for i, o in enumerate(out)}
    if train:
        r = torch.Generator().manual_seed(1)
        roots = [o for o in out if o.requires_grad]
        torch.autograd.backward(roots, [torch.randn(o.shape, generator=r).to(o.dtype) for o in roots])
        seen |= {f"gradient of argument {i}": a.grad for i, a in enumerate(args) if isinstance(a, Tensor)}
        if isinstance(model, nn.Module):
            seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return seen


def pairs(ours: Seen, theirs: Seen) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What both runs show under one name, dense; anything that one of them alone has is a failure."""
    assert list(ours) == list(theirs)
    for name, b in theirs.items():
        a = ours[name]
        if a is None or b is None:
            assert a is b, f"{name}: {a} against {b}"
            continue
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), f"{name}: {a.dtype} against {b.dtype}"
        yield name, *(v.to_dense() if v.is_sparse else v for v in (a, b))


def near(ours: Seen, theirs: Seen, dtype: torch.dtype, roundings: float = ROUNDINGS) -> None:
    for name, a, b in pairs(ours, theirs):
        if not b.is_floating_point():
            assert torch.equal(a, b), name
            continue
        assert a.isfinite().all() == b.isfinite().all(), name
        bound = roundings * torch.finfo(dtype).eps / 2 * float(b.abs().max())
        assert float((a - b).abs().max()) <= bound, f"{name}: off by {(a - b).abs().max()}, allowed {bound}"


def equal(ours: Seen, theirs: Seen) -> None:
    for name, a, b in pairs(ours, theirs):
        assert torch.equal(a, b), f"{name}: largest difference {(a.float() - b.float()).abs().max()}"


def compiled(target: Any, level: str, dtype: torch.dtype = BF16, **options: Any) -> AmpModule:
    chosen: dict[str, Any] = {"level": level, "dtype": dtype}
    if level == "torch":
        chosen = {"policy": Policy.torch("cpu", dtype), "keep_output_dtypes": False}
    module: AmpModule = amp_compile(target, **{**chosen, "backend": "eager", **options})
    return module


def whole(fast: AmpModule) -> None:
    """Nothing was left out without a word, and nothing at all was left out."""
    report = fast.report()
    assert report.not_captured == ()
    assert report.notes == ()
    assert len(fast.graphs) == 1


def check(
    model: Any,
    args: tuple[Any, ...],
    *,
    low: tuple[str, ...] = ("linear",),
    levels: tuple[tuple[str, torch.dtype], ...] = (("O2", F16),),
    autocast: bool = True,
    train: bool = True,
    roundings: float = ROUNDINGS,
    mkldnn: bool = True,
) -> None:
    """At some levels near the fp32 model and captured whole, with the ops in ``low`` in low precision; and
    bit-equal to torch.autocast."""

    def own(target: Any) -> Any:
        return target if isinstance(target, nn.Module) else None

    twin = copy.deepcopy(model)
    expected = run(twin, own(twin), args, train=train)
    for level, dtype in levels:
        ours = copy.deepcopy(model)
        fast = compiled(ours, level, dtype)
        near(run(fast, own(ours), args, train=train), expected, dtype, roundings)
        whole(fast)
        rows = fast.report().rows
        for op in low:
            found = [row.precision for row in rows if row.op == op]
            assert found, f"no {op} among {sorted({row.op for row in rows})}"
            assert set(found) == {NAMES[dtype]}, (op, found)
    if autocast:
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        fast = compiled(ours, "torch")
        found = run(fast, own(ours), args, train=train)

        def peer(*xs: Any) -> Any:
            with torch.autocast("cpu", dtype=BF16):
                return theirs(*xs)

        with torch.backends.mkldnn.flags(enabled=mkldnn):
            equal(found, run(peer, own(theirs), args, train=train))
        whole(fast)


#: what ``check`` compares with, for tests whose cases take turns: each needs a compilation of its own
PEERS = ("autocast", "fp32")


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


# ------------------------------------------------------------------------------------------------- checkpointing


class Block(nn.Module):
    """``inside``, checkpointed, between two linear layers."""

    def __init__(self, inside: nn.Module, *, wrap: bool = True, **options: Any) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(8, 8), inside, nn.Linear(8, 4)
        self.wrap, self.options = wrap, {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        return self.last(checkpoint(self.inside, x, **self.options) if self.wrap else self.inside(x))


class Dropped(nn.Module):
    """Half is dropped: the factor 2 is exact, so that torch.compile's own gradient of dropout is autocast's."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(8, 16), nn.Linear(16, 8), inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))
        return y if self.inner is None else checkpoint(self.inner, y, use_reentrant=False) + y


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)
CHECKPOINTS: dict[str, Callable[[], nn.Module]] = {
    "nested, with dropout": lambda: Block(Dropped(Dropped())),
    "a policy of what to save": lambda: Block(Dropped(), context_fn=SELECTIVE),
    "reentrant": lambda: Block(Dropped(), use_reentrant=True),
    "relu in place": lambda: Block(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))),
}


@pytest.mark.parametrize(("name", "peer"), in_turn(tuple(CHECKPOINTS), PEERS))
def test_checkpoint(name: str, peer: str) -> None:
    levels = () if peer == "autocast" else (("O2", F16),)
    check(CHECKPOINTS[name](), (floats(5, 8),), levels=levels, autocast=peer == "autocast")


def test_checkpoint_in_eval_without_gradients() -> None:
    check(Block(nn.Sequential(nn.ReLU(inplace=True), Dropped())).eval(), (floats(5, 8),), train=False)


def test_checkpoint_saves_less() -> None:
    """Checkpointing that recomputes nothing would be right too, and useless."""
    kept = []

    def note(value: Tensor) -> Tensor:
        kept[-1] += value.numel() if value.is_floating_point() else 0
        return value

    for wrap in (True, False):
        fast = compiled(Block(nn.Sequential(Dropped(), Dropped()), wrap=wrap), "O2")
        fast(floats(64, 8))  # compiled before we look: a hook on saved tensors is no part of the model
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            fast(floats(64, 8))
    assert 0 < kept[0] < kept[1]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def block(self, x: Tensor, factor: int, nothing: None) -> tuple[Any, ...]:
        y = self.fc(x)
        return y, y.exp(), x, factor, nothing

    def forward(self, x: Tensor) -> Any:
        a, b, c, factor, _ = checkpoint(self.block, x, 2, None, use_reentrant=False)
        return self.out(a + c * factor), b


def test_checkpoint_with_several_outputs_and_no_tensors() -> None:
    check(Pair(), (floats(5, 8),), levels=(("O3", F16),))


@pytest.mark.parametrize("where", ["in two regions", "twice in one region"])
def test_weight_shared_by_checkpointed_regions(where: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if where == "in two regions":
                once = checkpoint(self.fc, x, use_reentrant=False).tanh()
                return checkpoint(self.fc, once, use_reentrant=False)
            return checkpoint(lambda v: self.fc(self.fc(v).tanh()), x, use_reentrant=False)

    # autocast keeps one low copy of the weight for all regions and adds up its gradients in it; here each region
    # casts for itself, and they add up in fp32: nearer to the truth, and not bit-equal
    check(Shared(), (floats(5, 8),), autocast=False)


def test_batch_norm_inside_a_checkpoint() -> None:
    """Its statistics are updated once a call: recomputing must not count as a second one."""
    inside = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8))
    x = floats(16, 8)
    model = Block(inside)
    twin = copy.deepcopy(model)
    fast = compiled(model, "O2")
    twin.wrap = False  # torch's own checkpoint without a compiler updates them again when it recomputes
    near(run(fast, model, (x,)), run(twin, twin, (x,)), BF16)
    whole(fast)
    norm, expected = model.inside[1], twin.inside[1]
    assert int(norm.num_batches_tracked) == 1
    for ours, theirs in ((norm.running_mean, expected.running_mean), (norm.running_var, expected.running_var)):
        assert ours.dtype is F32
        # mean and variance of values below 1, a tenth of which is taken over, after three roundings
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3 * torch.finfo(BF16).eps)


# --------------------------------------------------------------------------------------------- branches and loops


class Branches(nn.Module):
    """Both branches have weights; one gives a value that had been low, the other one that had been fp32."""

    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.deep = nn.Linear(8, 8), nn.Linear(8, 8), deep

    def yes(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.deep:
            return torch.cond(x.sum() > 1e9, self.no, lambda x, y: (self.a(x) * 2, y + 1), (x, y))
        return self.a(x).relu(), y + 1

    def no(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(x).exp().clamp(max=3.0), y.sin()

    def forward(self, p: Tensor, x: Tensor) -> Any:
        first, second = torch.cond(p, self.yes, self.no, (x, self.a(x)))
        return first * 2, self.b(second)


@pytest.mark.parametrize(("p", "level", "dtype"), [(True, "O1", F16), (False, "O2", BF16)])
def test_cond(p: bool, level: str, dtype: torch.dtype) -> None:
    check(Branches(), (torch.tensor(p), floats(5, 8)), levels=((level, dtype),), autocast=False)


def test_cond_in_cond() -> None:
    model, args = Branches(deep=True), (torch.tensor(True), floats(5, 8))
    check(model, args, levels=(("O3", F16),), autocast=False, train=False)


class Loop(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Any:
        from torch._higher_order_ops import scan, while_loop
        from torch._higher_order_ops.map import map as map_

        if self.kind == "while_loop":
            _, y = while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, torch.tanh(self.fc(y))), (torch.tensor(0), self.fc(x))
            )
            return self.fc(y)
        if self.kind == "map":
            return self.fc(map_(lambda row: torch.relu(self.fc(row)), self.fc(x)))

        def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(self.fc(h) + row)
            return new, new.exp()

        last, rows = scan(step, torch.zeros(2, 8), self.fc(x), dim=0)
        return self.fc(last), rows


@pytest.mark.parametrize(
    ("kind", "train", "level"),
    [("while_loop", False, "O1"), ("scan", True, "auto"), ("map", True, "O2")],
)
def test_loop(kind: str, train: bool, level: str) -> None:
    dtype = BF16 if level == "auto" else F16
    check(Loop(kind), (floats(4, 2, 8),), levels=((level, dtype),), autocast=False, train=train)


def test_associative_scan_is_right_and_said_not_to_be_rewritten() -> None:
    """On CPU torch takes it apart with torch.func inside the graph, which cannot be lowered."""
    from torch._higher_order_ops import associative_scan

    def program(x: Tensor, w: Tensor) -> Tensor:
        return associative_scan(torch.mul, x @ w, dim=0, combine_mode="generic")

    args = (floats(4, 8).detach(), floats(8, 8, seed=1).detach())
    fast = compiled(program, "O2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        found = run(fast, None, args, train=False)
    near(found, run(program, None, args, train=False), BF16)
    low = [row for row in fast.report().rows if row.op == "matmul" and row.precision == "bfloat16"]
    assert low or fast.report().notes


# --------------------------------------------------------------------------------------- gradients of one's own


class Several(torch.autograd.Function):
    """New style; three outputs, one of them an index; a backward that nobody could derive."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x @ w, (x * 2).sum(-1), x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, _: Any) -> Any:
        x, w, product = ctx.saved_tensors
        to_w = x.t() @ first.to(x.dtype) if ctx.needs_input_grad[1] else None
        return 3 * first @ w.t().to(first.dtype) + second[:, None] * 0.5 + product, to_w


class KeepsOutput(torch.autograd.Function):
    """Saves its output, holds a number, gets no gradient for its second output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        y = torch.exp(x.clamp(max=1.0))
        ctx.save_for_backward(y)
        ctx.factor = 2.5
        return y, x.clone()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return first * y * ctx.factor + second, None


class WritesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class CarefulExp(torch.autograd.Function):
    """As authors write them for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.exp() * 2


class Between(nn.Module):
    """``middle(x, w)`` between two linear layers."""

    def __init__(self, middle: Callable[[Tensor, Tensor], Any], *, frozen: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(8, 8), nn.Linear(8, 4), middle
        self.w = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=not frozen)

    def forward(self, x: Tensor) -> Any:
        out = self.middle(self.a(x), self.w)
        return (self.b(out[0]), *out[1:]) if isinstance(out, tuple) else self.b(out)


def dirty(x: Tensor, w: Tensor) -> Tensor:
    WritesInput.apply(x)
    return x + 1


def recomputed(x: Tensor, w: Tensor) -> Any:
    return checkpoint(lambda x, w: Several.apply(x, w)[0], x, w, use_reentrant=False)


FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "several outputs, one not differentiable": lambda: Between(Several.apply),
    "a weight that needs no gradient": lambda: Between(Several.apply, frozen=True),
    "a saved output": lambda: Between(KeepsOutput.apply),
    "writes to its input": lambda: Between(dirty),
    "inside a checkpoint": lambda: Between(recomputed),
    "custom_fwd with cast_inputs": lambda: Between(lambda x, w: CarefulExp.apply(x)),
}


@pytest.mark.parametrize(("name", "peer"), in_turn(tuple(FUNCTIONS), PEERS))
def test_custom_function(name: str, peer: str) -> None:
    if "custom_fwd" in name and peer == "autocast":
        pytest.skip("custom_fwd casts under a real autocast only, and there is none when a model is captured")
    levels = () if peer == "autocast" else (("O3", BF16),)
    check(FUNCTIONS[name](), (floats(5, 8),), levels=levels, autocast=peer == "autocast")


def test_custom_function_keeps_fp32_inside() -> None:
    """At the levels its ops are the author's business: they see fp32, as when they were traced."""
    fast = compiled(Between(Several.apply), "O3")
    fast(floats(5, 8))
    rows = {row.op: row.precision for row in fast.report().rows}
    assert rows["linear"] == "bfloat16"
    assert rows["matmul"] == "float32"


# ------------------------------------------------------------------------------------------------------ custom ops


@torch.library.custom_op("amp_test_control::scale", mutates_args=())
def scale(x: Tensor, factor: float) -> Tensor:
    assert x.dtype is F32, f"a kernel for fp32 was called with {x.dtype}"
    return x * factor


@scale.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def scale_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.amp_test_control.scale(grad, 5.0), None


scale.register_autograd(scale_backward, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("amp_test_control::bump", mutates_args=("x",))
def bump(x: Tensor, by: Tensor) -> None:
    assert (x.dtype, by.dtype) == (F32, F32), f"a kernel for fp32 was called with {x.dtype} and {by.dtype}"
    x.add_(by)


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.amp_test_control.scale(x, 3.0)


def bumped(x: Tensor, w: Tensor) -> Tensor:
    torch.ops.amp_test_control.bump(x, x @ w)
    return x


def bumped_fp32(x: Tensor, w: Tensor) -> Tensor:
    y = x.cumsum(0)
    torch.ops.amp_test_control.bump(y[1:], (x @ w)[1:])
    return y


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_custom_op_keeps_its_dtypes_forward_and_backward(level: str) -> None:
    check(Between(scaled), (floats(5, 8),), levels=((level, F16),), autocast=False)


@pytest.mark.parametrize("middle", [bumped, bumped_fp32], ids=["low target", "view of a fp32 target"])
def test_custom_op_that_writes(middle: Any) -> None:
    """Neither may the write be lost, nor may the kernel see another dtype."""
    check(Between(middle), (floats(5, 8),), levels=(("O1", BF16),), low=("matmul",), autocast=False, train=False)


# ----------------------------------------------------------------------------------------------- recurrent layers


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 5, **options)
        width = (options.get("proj_size") or 5) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        given = (state if isinstance(self.rnn, nn.LSTM) else state[0]) if state else None
        y, last = self.rnn(x, given)
        return self.out(y), last


#: a model and the shapes of its inputs; each time step rounds once more, so the bound is twice the usual one
RECURRENT: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "lstm, two directions, states": (
        lambda: Recurrent(nn.LSTM, bidirectional=True), ((2, 3, 6), (2, 3, 5), (2, 3, 5))
    ),
    "lstm with a projection": (lambda: Recurrent(nn.LSTM, proj_size=4), ((2, 3, 6),)),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    """Taken apart into its ops; equal to autocast on torch's own cells (its fused oneDNN LSTM is another algorithm)."""
    make, shapes = RECURRENT[name]
    args = tuple(floats(*shape, seed=i) for i, shape in enumerate(shapes))
    # torch's C++ cell multiplies by a view of weight_hr, which autocast casts anew in each step; the decomposition
    # that makes it differentiable uses the weight itself
    projected = name == "lstm with a projection"
    check(make(), args, levels=(("O2", F16),), roundings=2 * ROUNDINGS, mkldnn=False, autocast=not projected)


@pytest.mark.parametrize("kind", [nn.LSTM, *(pytest.param(k, marks=pytest.mark.zoo) for k in (nn.GRU, nn.RNN))])
def test_dropout_between_two_recurrent_layers(kind: Any) -> None:
    """The same random numbers at every level, others in each call, as many zeros as asked for, and none in eval mode.
    (torch.compile leaves this dropout out: torch 2.13 tests for the last layer the wrong way round.)"""
    model, args = Recurrent(kind, num_layers=2, dropout=0.5), (floats(2, 3, 6),)
    twin = copy.deepcopy(model)
    fast = compiled(twin, "O0")
    expected = run(fast, twin, args)
    near(run(compiled(model, "auto", F16), model, args), expected, F16, 2 * ROUNDINGS)
    assert not torch.equal(fast(*args)[0], fast(*args)[0])
    for layer in (model.rnn, twin.rnn):
        nn.init.zeros_(layer.weight_hh_l1)
        layer.eval()
    assert torch.equal(fast(*args)[0], fast(*args)[0])
    torch.testing.assert_close(fast(*args)[0], twin(*args)[0])


def test_dropout_drops_the_share_that_it_says() -> None:
    """Seen through a second layer that adds up what the first gives: rnn_relu, weights of one."""
    rnn = nn.RNN(1, 512, num_layers=2, dropout=0.25, nonlinearity="relu", bias=False)
    for name, weight in rnn.named_parameters():
        nn.init.constant_(weight, 0.0 if "hh" in name else 1.0)
    out, _ = compiled(rnn, "O0")(torch.ones(1, 1, 1))
    kept = out.flatten()[0].item() * 0.75 / 512
    assert abs(kept - 0.75) < 5 * (0.25 * 0.75 / 512) ** 0.5  # five standard deviations


def test_an_lstm_is_one_op_for_sequences_of_any_length() -> None:
    """The second length compiles for any; black_list=["lstm"] keeps it in fp32, but for the order of sums torch's."""
    model = Recurrent(nn.LSTM, num_layers=2, bidirectional=True)
    fast = compiled(model, "O2", F16)
    for length in (2, 5, 9, 4):
        x = floats(length, 3, 6).detach()  # of one that needs a gradient Dynamo itself unrolls the steps
        own, wanted = fast(x)[0], model(x)[0]
        assert (own - wanted).abs().max() <= 2 * ROUNDINGS * torch.finfo(F16).eps / 2 * wanted.abs().max()
    rows = [row for row in fast.report().rows if row.module == "rnn" and "lstm" in row.op]
    assert len(fast.graphs) == 2
    assert [row.precision for row in rows] == ["float16"] * 8  # two graphs, two layers, two directions
    kept = compiled(model, "O2", F16, black_list=["lstm"])
    kept(floats(4, 3, 6))
    assert {row.precision for row in kept.report().rows if "lstm" in row.op} == {"float32"}
    torch.testing.assert_close(kept(floats(4, 3, 6))[1], model(floats(4, 3, 6))[1])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 5, bidirectional=True), nn.Linear(10, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        y, _ = self.rnn(pack_padded_sequence(x, lengths, enforce_sorted=False))
        y, lengths = pad_packed_sequence(y)
        return self.out(y), lengths


def test_packed_sequences_are_right_and_what_is_not_captured_is_said() -> None:
    model, args = Packed(), (floats(3, 4, 6), torch.tensor([3, 1, 2, 3]))
    twin = copy.deepcopy(model)
    fast = compiled(model, "O2", F16)
    with pytest.warns(AmpWarning, match="lstm runs in float32, .* in rnn, "):
        found = run(fast, model, args)
    near(found, run(twin, twin, args), F16, 2 * ROUNDINGS)
    report = fast.report()
    assert [row.precision for row in report.rows if row.module == "out"] == ["float16"]
    captured = [row for row in report.rows if row.module == "rnn" and row.precision == "float16"]
    assert captured or report.not_captured


# ------------------------------------------------------------------------------------------------------- attention


class SelfAttention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(16, 4, batch_first=True), weights

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Any:
        out = self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=self.weights)
        return out if self.weights else out[0]


class EncoderLayer(nn.Module):
    """The feed-forward part rounds as often as the attention: the usual bound for both together."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.5, activation="gelu", **options)

    def forward(self, x: Tensor, padding: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return self.layer(x, src_mask=mask, src_key_padding_mask=padding)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


MASKS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "bool padding": (PADDING, None),
    "float mask": (None, as_float(CAUSAL)),
    "both, bool": (PADDING, CAUSAL),
    "both, float": (as_float(PADDING), as_float(CAUSAL)),
}


@pytest.fixture
def slow_path() -> Iterator[None]:
    """torch's fused layer in eval mode is another algorithm: autocast is compared without it, as we capture it."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(was)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize(
    ("case", "peer"),
    in_turn(
        (
            ("bool padding", True, False),
            ("float mask", False, True),
            ("both, bool", True, True),
            ("both, float", False, False),
        ),
        PEERS,
    ),
)
def test_multihead_attention(case: tuple[str, bool, bool], peer: str) -> None:
    masks, weights, train = case
    levels = () if peer == "autocast" else (("O2", F16),) if train else (("auto", F16),)
    args = (floats(2, 5, 16), *MASKS[masks])
    check(SelfAttention(weights).train(train), args, levels=levels, train=train, autocast=peer == "autocast")


def test_encoder_layer_in_training() -> None:
    check(EncoderLayer(norm_first=True), (floats(2, 5, 16), *MASKS["both, bool"]), levels=(("O1", F16),))


@pytest.mark.parametrize("masks", ["bool padding", "float mask"])
def test_encoder_layer_in_eval_against_the_fast_path(masks: str) -> None:
    """The uncompiled layer takes the fused op, ours is captured op by op; padded positions are nobody's business
    (torch's fused encoder may write zeros there)."""
    padding, mask = MASKS[masks]
    model, x = EncoderLayer().eval(), floats(2, 5, 16).detach()
    fast = compiled(copy.deepcopy(model), "O2", F16)
    with torch.no_grad():
        expected, found = model(x, padding, mask), fast(x, padding, mask)
    valid = ~padding if padding is not None else torch.ones(2, 5, dtype=torch.bool)
    near({"valid": found[valid]}, {"valid": expected[valid]}, F16)
    whole(fast)
    ops = [row.op for row in fast.report().rows]
    assert "linear" in ops
    assert not [op for op in ops if "fwd" in op or "native_multi_head" in op]


# ------------------------------------------------------------------------------------------------ sparse gradients


class Looked(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(8, 3)

    def forward(self, *args: Any) -> Tensor:
        return self.out(self.table(*args))


IDS = torch.tensor([[1, 2, 2], [0, 5, 1]])
TABLES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "embedding, sparse": (lambda: nn.Embedding(10, 8, sparse=True), (IDS,)),
    "embedding, padded": (lambda: nn.Embedding(10, 8, padding_idx=0, scale_grad_by_freq=True), (IDS,)),
    "embedding, renormed": (lambda: nn.Embedding(10, 8, max_norm=1.0), (IDS,)),
    "bag, sum": (lambda: nn.EmbeddingBag(10, 8, mode="sum"), (IDS,)),
    "bag, mean, offsets": (lambda: nn.EmbeddingBag(10, 8, mode="mean"), (IDS.view(-1), torch.tensor([0, 2]))),
    "bag, max": (lambda: nn.EmbeddingBag(10, 8, mode="max"), (IDS,)),
    "bag, weighted": (lambda: nn.EmbeddingBag(10, 8, mode="sum"), (IDS, None, floats(2, 3))),
    "bag, sparse": (lambda: nn.EmbeddingBag(10, 8, mode="sum", sparse=True), (IDS,)),
}


@pytest.mark.parametrize(("name", "peer"), in_turn(tuple(TABLES), PEERS))
def test_embedding(name: str, peer: str) -> None:
    """Gradients are sparse where the model's are, and fp32."""
    make, args = TABLES[name]
    torch.manual_seed(0)
    check(Looked(make()), args, levels=() if peer == "autocast" else (("O3", F16),), autocast=peer == "autocast")


# -------------------------------------------------------------------------------------------- the export front end

EXPORTED: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "cond": (Branches, (torch.tensor(True), floats(5, 8))),
    "custom op": (lambda: Between(scaled), (floats(5, 8),)),
    "custom op that writes": (lambda: Between(bumped_fp32), (floats(5, 8),)),
    "while_loop": (lambda: Loop("while_loop"), (floats(4, 2, 8),)),
    "scan": (lambda: Loop("scan"), (floats(4, 2, 8),)),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported(name: str) -> None:
    make, args = EXPORTED[name]
    torch.manual_seed(0)
    model = make().eval()
    level, dtype = ("O1", F16) if list(EXPORTED).index(name) % 2 else ("O2", BF16)
    mixed = ExportMixed(model, args, level=level, dtype=dtype)
    near(run(mixed, None, args, train=False), run(model, None, args, train=False), dtype)
    assert {row.precision for row in mixed.rows if row.op == "linear"} == {NAMES[dtype]}
