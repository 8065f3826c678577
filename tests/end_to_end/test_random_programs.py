"""Random straight-line programs, eagerly under torch.autocast and through our compiler: equal in every bit.

A program is Python text over a few small leaves (parameters, inputs, a 0-dim scale, a mask, indices). It is
grown line by line, and a line that torch refuses in fp32 is thrown away: what is left is a valid fp32 model,
the only kind that can be captured. All outputs and all gradients must agree (NaN equals NaN), or both raise.

Going through Dynamo costs about ten times as much as all the rest, and Dynamo is not what is tested here. So
most programs are traced by ``fx.symbolic_trace`` into a graph of torch functions, which is what Dynamo hands to
a backend, and go to the very backend object that ``amp_compile`` gives to Dynamo, under a ``TracingContext``
as Dynamo makes one. Some go the whole way, through ``amp_compile``. The marker ``zoo`` has three times as many, other
ones.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from amp_compiler import AmpWarning, Policy, amp_compile
from amp_compiler.runtime.backend import Backend
from amp_compiler.runtime.options import Options
from amp_compiler.runtime.state import State
from helpers import in_turn

LEAVES = ("x", "y", "t", "u", "w", "b", "k", "c", "s", "z", "q", "ids", "mask", "tiny")


def leaves(seed: int) -> tuple[Tensor, ...]:
    """New leaves, the same for one seed."""
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=r)

    return (
        normal(3, 4).requires_grad_(),  # x
        normal(4, 4),  # y: an input that needs no gradient
        normal(2, 3, 4).requires_grad_(),  # t
        normal(2, 4, 4).requires_grad_(),  # u
        normal(4, 4).requires_grad_(),  # w
        normal(4).requires_grad_(),  # b
        normal(4, 3, 2).requires_grad_(),  # k: a kernel for conv1d over t
        normal(3, 4).to(torch.bfloat16),  # c: low already
        normal(()).requires_grad_(),  # s: a 0-dim parameter
        normal(()),  # z: a 0-dim constant
        normal(3, 4).double(),  # q: double, never touched
        torch.randint(3, (3,), generator=r),  # ids
        normal(3, 4) > 0,  # mask
        normal(3, 4).mul(1e-6).requires_grad_(),  # tiny: its gradients and values underflow in fp16
    )


#: {0}, {1}, {2} are values; each line defines a new one
LINES = (
    # what autocast runs low
    "F.linear({0}, w, b)", "F.linear({0}, w)", "F.linear({0}, {1})", "{0} @ {1}", "{0} @ w", "torch.matmul(w, {0})",
    "torch.mm({0}, {1})", "torch.bmm({0}, {1})", "torch.addmm({0}, {1}, {2})",
    "torch.addmm(b, {0}, w, beta=0.5, alpha=2)",
    "torch.baddbmm({0}, {1}, {2})", "torch.einsum('...ij,kj->...ik', {0}, w)", "torch.einsum('bij,bjk->bik', {0}, u)",
    "F.conv1d(t, k, padding=1)", "F.conv1d({0}, k)", "F.scaled_dot_product_attention({0}, {1}, {1})",
    "F.prelu({0}, torch.abs(b[:1]))", "torch.mv({0}, b)", "torch.outer(b, {0}.reshape(-1)[:4])", "torch.dot(b, b)",
    # arithmetic with tensors, numbers and 0-dim tensors
    "{0} + {1}", "{0} * {1}", "{0} - {1}", "{0} / ({1}.abs() + 1)", "{0} * 2", "1 - {0}", "{0} / 3", "{0} + 0.1",
    "{0} * s", "{0} + z", "s - {0}", "{0} * {0}", "{0} + {0} + {0}", "torch.addcmul({0}, {1}, {1}, value=0.5)",
    "torch.lerp({0}, {1}, 0.3)", "torch.maximum({0}, {1})", "{0} + c", "{0} * tiny", "{0} + q", "{0} * mask",
    "torch.add({0}, {1}, alpha=0.3)", "-{0}", "{0}.abs()", "{0} * {1}.sum()", "{0} + {0}.mean()",
    # elementwise
    "torch.relu({0})", "F.gelu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "F.silu({0})", "F.softplus({0})",
    "F.leaky_relu({0}, 0.1)", "F.hardtanh({0})", "torch.exp({0}.clamp(-3, 3))", "torch.log({0}.abs() + 1)",
    "{0}.pow(2)", "{0} ** 2", "({0}.abs() + 1e-3).rsqrt()", "{0}.clamp(-1, 1)", "{0}.clamp(min=0.1)",
    # reductions and what runs along an axis
    "{0}.softmax(-1)", "torch.softmax({0}, 0)", "F.log_softmax({0}, -1)", "F.layer_norm({0}, (4,))",
    "F.layer_norm({0}, (4,), b, b)", "F.rms_norm({0}, (4,), b)", "F.group_norm({0}, 1)", "F.normalize({0}, dim=-1)",
    "{0}.sum(-1, keepdim=True)", "{0}.sum(0)", "{0}.mean(0, keepdim=True)", "{0}.mean()", "{0}.sum()",
    # torch.compile differentiates prod another way than eager torch does, in fp32 too
    "{0}.detach().prod(-1)",
    "{0}.var(-1, keepdim=True)", "{0}.logsumexp(-1)", "{0}.cumsum(-1)", "{0}.norm()", "{0}.amax(-1, keepdim=True)",
    "{0}.max(-1)[0]", "{0}.sort(-1)[0]", "{0}.topk(2)[0]", "torch.cdist({0}, {1})", "torch.trace({0})",
    "{0}.softmax(-1, dtype=torch.float32)", "{0}.sum(-1, dtype=torch.float64)",
    # moving values
    "torch.cat([{0}, {1}])", "torch.cat([{0}, {1}], -1)", "torch.cat([{0}, {0}])", "torch.stack([{0}, {1}])",
    "torch.where({0} > 0, {0}, {1})", "torch.where({0} > {1}, {0}, 0.5)", "torch.where(mask, {0}, {1})",
    "{0}.masked_fill({0} > 0.5, -1e4)", "{0}.masked_fill(mask, float('-inf'))", "{0}.transpose(-1, -2)",
    "{0}.transpose(0, 1).contiguous()", "{0}.reshape(-1)", "{0}.reshape(-1, 2)", "{0}.reshape(-1, 4)",
    "{0}.unsqueeze(0)", "{0}[..., 1:]", "{0}[0]", "{0}[:2]", "{0}.index_select(0, ids)", "{0}[ids]",
    "F.embedding(ids, {0})", "{0}.gather(-1, ids.expand(3, 3))", "{0}.flip(0)", "{0}.tril()", "{0}.expand(2, 3, 4)",
    "F.pad({0}, (1, 1))", "F.pad({0}, (1, 1), mode='replicate')", "F.max_pool1d({0}, 2)", "F.avg_pool1d({0}, 2)",
    "{0}.chunk(2, -1)[1]", "{0}.unbind(0)[1]",
    # the author's own casts; a dtype read from a value that may turn low is another matter
    # (docs/design.md#the-second-trace)
    "{0}.float()", "{0}.to(torch.bfloat16)", "{0}.half().float()", "{0}.to(torch.bfloat16).float()", "{0}.to(b.dtype)",
    "{0}.type_as(w)", "{0}.detach()", "{0}.clone()", "{0}.double()", "mask.float()", "mask.to(b.dtype)",
    # in place, on values that the program made
    "{0}.relu_()", "{0}.add_({1})", "{0}.mul_(2)", "{0}.mul_({1})", "{0}.clamp_(-1, 1)", "{0}.sub_({1}, alpha=0.5)",
    "{0}.add_(s)", "{0}[0].add_(1)", "{0}.div_({1}.abs().float() + 1)", "{0}.copy_({1})", "{0}.addmm_({1}, {2})",
    "{0}.masked_fill_({0} > 0, 0.25)", "{0}.zero_()", "{0}.sigmoid_()", "{0}.clone().add_({1})",
    "({0} * 1).relu_()", "({0} @ w).mul_({1})",
    # losses
    "F.mse_loss({0}, {1})", "F.l1_loss({0}, {1}, reduction='none')", "F.cross_entropy({0}, ids)",
    "F.cross_entropy({0}, {1}.softmax(-1))", "F.cross_entropy({0}, ids, label_smoothing=0.1)",
    "F.nll_loss({0}, ids)", "F.smooth_l1_loss({0}, {1})", "F.kl_div({0}, {1}.sigmoid())",
    "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())", "F.cosine_similarity({0}, {1})",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """Text to run, and the seed of its leaves."""

    lines: tuple[str, ...]
    returns: tuple[str, ...]
    seed: int

    @property
    def inputs(self) -> list[str]:
        """The leaves that the program reads."""
        words = set(re.findall(r"\w+", " ".join(self.lines)))
        return [leaf for leaf in LEAVES if leaf in words]

    def __str__(self) -> str:
        head = f"def program({', '.join(self.inputs)}):"
        return "\n    ".join((head, *self.lines, f"return ({', '.join(self.returns)},)"))

    __repr__ = __str__

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(str(self), scope)
        function: Callable[..., tuple[Tensor, ...]] = scope["program"]
        return function


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Three to eight lines that torch runs in fp32."""
    seed = draw(st.integers(0, 99))
    scope: dict[str, Any] = {"torch": torch, "F": F, **dict(zip(LEAVES, leaves(seed), strict=True))}
    lines: list[str] = []
    made: list[str] = []
    wanted = draw(st.integers(3, 8))
    for _ in range(4 * wanted):
        if len(lines) == wanted:
            break
        line = draw(st.sampled_from(LINES))
        pool = made if "_(" in line and made else [*made, *made, "x", "y", "t", "u", "w", "tiny"]
        names = [draw(st.sampled_from(pool)) for _ in range(3)]
        name = f"v{len(made)}"
        text = f"{name} = {line.format(*names)}"
        try:
            exec(text, scope)
        except Exception:  # torch refuses it: shapes, dtypes, an in-place write to a leaf
            continue
        value = scope[name]
        if not value.dtype.is_floating_point or value.numel() > 400:
            continue
        if any(scope[leaf]._version for leaf in LEAVES):
            break  # a write to a leaf through a view: AOTAutograd gives zeros where autograd gives None
        lines.append(text)
        made.append(name)
    if not made:
        lines, made = ["v0 = x @ w"], ["v0"]
    # Everything that no line reads is returned, because no graph keeps dead code: under autocast a dead use of a
    # parameter casts it early, and its three or more gradients then add up in another order.
    # Copies, because AOTAutograd makes outputs that share memory outside of its graph, with the same effect.
    read = set(re.findall(r"\bv\d+\b", " ".join(line.split(" = ")[1] for line in lines)))
    chosen = dict.fromkeys([*(name for name in made if name not in read), draw(st.sampled_from(made))])
    return Program(tuple(lines), tuple(f"{name}.clone()" for name in chosen), seed)


Result = tuple[list[Tensor], list[Tensor | None]] | Exception


def run(function: Callable[..., Sequence[Tensor]], program: Program, context: Any = None) -> Result:
    """Outputs and the gradients of all leaves, for a random gradient of each output; or the error."""
    inputs = [leaf for name, leaf in zip(LEAVES, leaves(program.seed), strict=True) if name in program.inputs]
    try:
        if context is None:
            outputs = function(*inputs)
        else:
            with context:
                outputs = function(*inputs)
        outputs = list(outputs)
        differentiable = [o for o in outputs if o.requires_grad]
        if differentiable:
            r = torch.Generator().manual_seed(1)
            # in the output's own strides: AOTAutograd would bring them there, and a sum adds up in that order
            tangents = [torch.empty_like(o).copy_(torch.randn(o.shape, generator=r)) for o in differentiable]
            torch.autograd.backward(differentiable, tangents)
    except Exception as error:
        return error
    return [o.detach() for o in outputs], [i.grad for i in inputs]


def assert_same(program: Program, ours: Result, theirs: Result) -> None:
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception), f"only autocast raises: {theirs}"
        return
    if isinstance(ours, Exception):
        raise AssertionError(f"only ours raises: {type(ours).__name__}: {ours}") from ours
    for kind, mine, yours in zip(("output", "gradient"), ours, theirs, strict=True):
        assert len(mine) == len(yours)
        for index, (a, b) in enumerate(zip(mine, yours, strict=True)):
            what = f"{kind} {program.inputs[index] if kind == 'gradient' else index}"
            if a is None or b is None:
                assert a is b, f"{what}: only one is None, ours {a}, autocast's {b}"
                continue
            assert a.dtype == b.dtype, f"{what}: {a.dtype} against autocast's {b.dtype}"
            assert a.shape == b.shape, what
            assert bool(((a == b) | (a.isnan() & b.isnan())).all()), f"{what}:\n{a}\nagainst autocast's\n{b}"


def direct(program: Program, dtype: torch.dtype) -> Callable[..., Sequence[Tensor]]:
    """The program through our backend, without Dynamo."""
    graph = fx.symbolic_trace(program.function())
    options = Options(Policy.torch("cpu", dtype), backend="eager", keep_output_dtypes=False)
    backend = Backend(program.function(), options, State())

    def compiled(*inputs: Tensor) -> Sequence[Tensor]:
        with tracing(TracingContext(FakeTensorMode(static_shapes=True))):
            callable_ = backend(graph, list(inputs))
        result: Sequence[Tensor] = callable_(*inputs)
        return result

    return compiled


dtypes = st.sampled_from([torch.bfloat16, torch.float16])
common = settings(
    derandomize=True,
    phases=[Phase.generate],  # shrinking takes minutes; add the smallest form of what is found to CASES
    deadline=None, database=None, print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip


def check(program: Program, dtype: torch.dtype, ours: Callable[..., Sequence[Tensor]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", AmpWarning)  # a program that we only pass through was not compiled
        theirs = run(program.function(), program, torch.autocast("cpu", dtype=dtype))
        assert_same(program, run(ours, program), theirs)


#: the smallest programs that once went wrong, or that random ones meet too seldom
CASES = {
    "cast that is none in fp32, then its source": ("v0 = x @ w", "v1 = v0.float()", "v2 = v0 * 2", "v3 = v1 + v2"),
    "type_as, then its source": ("v0 = x @ w", "v1 = v0.type_as(b)", "v2 = v0 * 2"),
    "to(dtype of another), then its source": ("v0 = x @ w", "v1 = v0.to(b.dtype)", "v2 = v0 * 2"),
    "in place on such a cast": ("v0 = x @ w", "v1 = v0.float().relu_()", "v2 = v0 + 1"),
    "in place on a cast that stays none": ("v0 = x * 1", "v1 = v0.float().relu_()", "v2 = v0 + 1"),
    "such a cast of a parameter, which is then used twice": ("v0 = w.float()", "v1 = F.linear(F.linear(x, w), w)"),
    "rms_norm of a low value": ("v0 = F.rms_norm(x @ w, (4,), b)",),
    "rms_norm of a parameter, which is then used twice": ("v0 = F.rms_norm(w, (4,), b)", "v1 = t @ w @ w"),
    "replicate padding is fp32": ("v0 = F.pad(x @ w, (1, 1), mode='replicate')",),
    "reflect padding is fp32": ("v0 = F.pad(t @ w, (1, 1), mode='reflect')",),
    "cosine_similarity below its eps, where torch stops the gradient": (
        "v0 = F.cosine_similarity(tiny * 1e-3, x, dim=-1)",
    ),
    "a parameter used four times": ("v0 = x @ w @ w @ w", "v1 = F.linear(v0, w)"),
    "a value used three times": ("v0 = x.softmax(-1)", "v1 = v0 @ w", "v2 = v0 @ y", "v3 = (v0 * 3) @ w + v1 + v2"),
    "a value used low three times and twice in fp32": (
        "v0 = x.tanh()", "v1 = v0 @ w + v0 @ y", "v2 = v0.exp()", "v3 = (v0 @ w) * v2 + v1 - v0",
    ),
    "a leaf seen through a view is not kept": ("v0 = x @ w.t()", "v1 = v0 @ w.t()"),
    "a leaf that needs no gradient is cast at each use": ("v0 = x @ y @ y",),
    "0-dim low against fp32": ("v0 = (x @ w).sum()", "v1 = x * v0", "v2 = (x @ w) * s"),
    "fp64 against low": ("v0 = (x @ w) + q", "v1 = (x @ w) * z.double()"),
    "in place into low from fp32": ("v0 = x @ w", "v1 = v0.add_(tiny)", "v2 = v0.mul_(x)", "v3 = v0.div_(3)"),
    "in place into fp32 from low": ("v0 = x * 1", "v1 = v0.add_(x @ w)", "v2 = v0.clamp_(-1, 1)", "v3 = v0 @ w"),
    "in place into a view": ("v0 = x @ w", "v1 = v0[0].add_(b)", "v2 = v0[:, 1:].mul_(2)", "v3 = v0 @ w"),
    "in place after a use": ("v0 = x @ w", "v1 = v0 + 1", "v2 = v0.add_(x)", "v3 = v1 * 2"),
    "masked by infinity": ("v0 = (x @ w).masked_fill(mask, float('-inf')).softmax(-1)", "v1 = v0 @ w"),
    "masked by more than fp16 holds": ("v0 = torch.where(mask, x @ w, -3e38)", "v1 = v0.softmax(-1)"),
    "stack and cat promote": ("v0 = torch.cat([x @ w, x])", "v1 = torch.stack([x @ w, tiny])", "v2 = v1 @ w"),
    "explicit dtype": ("v0 = (x @ w).softmax(-1, dtype=torch.float32)", "v1 = (x @ w).sum(-1, dtype=torch.float64)"),
    "the author's rounding": ("v0 = x.to(torch.bfloat16).float()", "v1 = v0 @ w", "v2 = v1.half().float() + x"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), in_turn(tuple(CASES), (torch.bfloat16, torch.float16)))
def test_case(case: str, dtype: torch.dtype) -> None:
    lines = CASES[case]
    names = [line.split(" = ")[0] for line in lines]
    program = Program(lines, tuple(f"{name}.clone()" for name in names), 0)
    check(program, dtype, direct(program, dtype))


def through_backend(program: Program, dtype: torch.dtype) -> None:
    # every bit is compared here; running each op again on fakes as well is left to the programs below
    with mock.patch.dict(os.environ, {"AMP_VERIFY": ""}):
        check(program, dtype, direct(program, dtype))


@pytest.mark.filterwarnings("ignore")  # torch's, about odd programs
@settings(common, max_examples=60)
@given(programs(), dtypes)
def test_backend(program: Program, dtype: torch.dtype) -> None:
    through_backend(program, dtype)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=300)
@given(programs(), dtypes)
def test_backend_more(program: Program, dtype: torch.dtype) -> None:
    through_backend(program, dtype)


def through_amp_compile(program: Program, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = amp_compile(
        program.function(), policy=Policy.torch("cpu", dtype), backend="eager", keep_output_dtypes=False
    )
    check(program, dtype, compiled)


@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=14)
@given(programs(), dtypes)
def test_amp_compile(program: Program, dtype: torch.dtype) -> None:
    through_amp_compile(program, dtype)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@settings(common, max_examples=40)
@given(programs(), dtypes)
def test_amp_compile_more(program: Program, dtype: torch.dtype) -> None:
    through_amp_compile(program, dtype)
