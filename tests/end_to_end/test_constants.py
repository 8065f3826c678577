"""A constant that the low dtype cannot hold never reaches a low-precision op (docs/design.md#traps).

Every template below computes something finite in fp32 from ``y``, the result of a linear layer, and a constant that
fp16 (or bf16) would turn to inf or to 0. One row of ``y`` is zero, so that an eps is what it is there for.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from amp_compiler import amp_compile
from amp_compiler.inspect.data import Row
from amp_compiler.passes import order
from helpers import BF16, F16, F32, LOW, ExportMixed, context, each, pre_dispatch

Template = Callable[[Tensor, Tensor], Tensor]
MIN, TINY = torch.finfo(F32).min, torch.finfo(F32).tiny
INF = float("inf")
LEVELS = ("auto", "O1", "O2", "O3")

SCALARS: dict[str, Template] = {
    "masked_fill_min": lambda y, m: y.masked_fill(m, MIN),
    "masked_fill_softmax": lambda y, m: y.masked_fill(m, -1e9).softmax(-1),
    "masked_fill_logsumexp": lambda y, m: y.masked_fill(m, -1e9).logsumexp(-1),
    "masked_fill_amax": lambda y, m: y.masked_fill(m, -1e9).amax(-1),
    "masked_fill_inf": lambda y, m: y.masked_fill(m, -INF),
    "masked_fill_equal": lambda y, m: (y.masked_fill(m, -1e9) == -1e9) * y,
    "masked_fill_in_place": lambda y, m: (y * 1).masked_fill_(m, -1e9).softmax(-1),
    "where": lambda y, m: torch.where(m, -1e9, y),
    "clamp": lambda y, m: y.abs().clamp(min=1e-8),
    "clamp_tiny_log": lambda y, m: y.abs().clamp(min=TINY).log(),
    "clamp_max": lambda y, m: (y * 1e4).clamp(max=1e5),
    "clamp_in_place": lambda y, m: y.abs().clamp_(min=1e-8),
    "add_eps": lambda y, m: y.abs() + 1e-8,
    "add_tiny": lambda y, m: y.abs() + TINY,
    "add_65520": lambda y, m: y + 65520,
    "add_alpha": lambda y, m: torch.add(y, y, alpha=1e5),
    "subtract_from": lambda y, m: 1e5 - y,
    "mul_small": lambda y, m: y * 1e-8,
    "mul_large": lambda y, m: y * 1e5,
    "div_large": lambda y, m: y / 1e9,
    "div_small": lambda y, m: y / 1e-8,
    "divide_by": lambda y, m: 1e5 / (y + 10),
    "scale": lambda y, m: y * (1 / 4**0.5),
    "mask_times": lambda y, m: (y - 1e9 * m.float()).softmax(-1),
    "attention_by_hand": lambda y, m: ((y @ y.t()) / 2.0 + (1 - m.float()) * MIN).softmax(-1) @ y,
    "addmm": lambda y, m: torch.addmm(y, y, y, beta=1e-8, alpha=1e5),
    "baddbmm": lambda y, m: torch.baddbmm(y[None], y[None], y[None], alpha=1e-8, beta=1e-8),
    "addcmul": lambda y, m: torch.addcmul(y, y, y, value=1e5),
    "addcdiv": lambda y, m: torch.addcdiv(y * 0, y, y + 10, value=1e-8),
    "lerp": lambda y, m: torch.lerp(y * 0, y, 1e-8),
    "pow": lambda y, m: (y.abs() + 1).pow(1e-8),
    "pow_base": lambda y, m: torch.pow(1e5, y.tanh() / 2),
    "threshold": lambda y, m: F.threshold(y, 1e-8, -1e9),
    "softplus": lambda y, m: F.softplus(y, beta=1e-4, threshold=1e5),
    "softplus_beta": lambda y, m: F.softplus(y, beta=1e-8, threshold=20),
    "hardtanh": lambda y, m: F.hardtanh(y * 1e4, -1e5, 1e5),
    "hardtanh_small": lambda y, m: F.hardtanh(y.abs(), 1e-8, 6.0),
    "leaky_relu": lambda y, m: F.leaky_relu(y, 1e-8),
    "elu": lambda y, m: F.elu(y, 1e5),
    "pad": lambda y, m: F.pad(y, (1, 1), value=-1e9),
    "nan_to_num": lambda y, m: torch.nan_to_num(y.masked_fill(m, INF), posinf=1e9),
    "scatter": lambda y, m: y.scatter(1, m.long(), -1e9),
    "index_fill": lambda y, m: y.index_fill(1, torch.tensor([0]), -1e9),
    "compare": lambda y, m: (y.abs() > 1e-8) * y,
    "huber": lambda y, m: F.huber_loss(y, y + 1, delta=1e5),
    "smooth_l1": lambda y, m: F.smooth_l1_loss(y, y + 1, beta=1e-8),
    "cross_entropy": lambda y, m: F.cross_entropy(y.masked_fill(m, -1e9), torch.zeros(4, dtype=torch.int64)),
}
EPS: dict[str, Template] = {
    "layer_norm": lambda y, m: F.layer_norm(y, (4,), torch.ones(4), torch.zeros(4), eps=1e-12),
    "group_norm": lambda y, m: F.group_norm(y.view(4, 4, 1), 2, torch.ones(4), torch.zeros(4), eps=1e-12),
    "batch_norm": lambda y, m: F.batch_norm(y, None, None, training=True, eps=1e-12),
    "rms_norm": lambda y, m: F.rms_norm(y, (4,), eps=1e-8),
    "normalize": lambda y, m: F.normalize(y, dim=-1, eps=1e-12),
    "cosine_similarity": lambda y, m: F.cosine_similarity(y, y * 2, dim=-1, eps=1e-8),
    "pairwise_distance": lambda y, m: F.pairwise_distance(y, y.flip(0), eps=1e-8),
    "log": lambda y, m: (y.softmax(-1) + 1e-10).log(),
    "sqrt": lambda y, m: (y.abs() + 1e-8).sqrt(),
    "standardize": lambda y, m: (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 1e-8),
    "norm_by_hand": lambda y, m: y / (y.norm(dim=-1, keepdim=True) + 1e-8),
    "rms_by_hand": lambda y, m: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rms_by_hand_12": lambda y, m: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-12),
    "inverse_by_hand": lambda y, m: y * (1 / (y.abs().sum(-1, keepdim=True) + 1e-8)),
    "inverse_of_clamp": lambda y, m: 1 / y.abs().clamp(min=1e-8),
    "atan2": lambda y, m: torch.atan2(y, y.abs() + 1e-8),
}
TENSORS: dict[str, Template] = {
    "where": lambda y, m: torch.where(m, torch.tensor(-1e9), y),
    "list": lambda y, m: y + torch.tensor([0.0, 1e5, -1e9, 1e-8]),
    "list_with_inf": lambda y, m: y + torch.tensor([0.0, 1e5, -INF, 1e-8]),
    "clamp": lambda y, m: y.abs().clamp(min=torch.tensor(1e-8)),
    "expand": lambda y, m: y + torch.tensor(1e5).expand(4, 4),
    "stack": lambda y, m: y + torch.stack([torch.tensor(v) for v in (1e5, -1e9, 1e-8, 0.0)]),
    "index": lambda y, m: y + torch.tensor([0.0, 1e5])[m.long()],
    "index_put": lambda y, m: y.index_put((torch.tensor([0]),), torch.tensor(-1e9)),
    "mask_times": lambda y, m: (y + m.float() * torch.tensor(-1e9)).softmax(-1),
    "hypot": lambda y, m: torch.hypot(y, torch.tensor(1e-8)),
    "prelu": lambda y, m: F.prelu(y, torch.tensor([1e-8])),
    "matmul": lambda y, m: y @ torch.tensor([[1e-8] * 4] * 4),
    "pos_weight": lambda y, m: F.binary_cross_entropy_with_logits(y, m.float(), pos_weight=torch.tensor(1e5)),
    "full": lambda y, m: y + torch.full((4,), 1e5),
    "full_negated": lambda y, m: y - (-torch.full((4,), 1e5)),
    "full_gather": lambda y, m: y + torch.full((4, 4), 1e5).gather(1, m.long()),
    "full_cat": lambda y, m: torch.cat([y, torch.full((4, 1), -1e9)], 1).softmax(-1),
    "full_like": lambda y, m: y + torch.full_like(y, 1e5),
    "new_full": lambda y, m: y + y.new_full((4,), 1e5),
    "fill": lambda y, m: y + torch.empty(4, 4).fill_(1e5),
    "ones_times": lambda y, m: y + torch.ones(4) * 1e5,
    "ones_times_twice": lambda y, m: y + torch.ones(4) * 1e4 * 100,
    "ones_over": lambda y, m: y + torch.ones(4) / 1e-8,
    "scalar_tensor": lambda y, m: y * torch.scalar_tensor(1e-8),
    "exp": lambda y, m: y * torch.exp(torch.tensor(20.0)),
    "rsqrt": lambda y, m: y * torch.rsqrt(torch.tensor(4e-12)),
    "triu": lambda y, m: (y + torch.triu(torch.ones(4, 4) * MIN, 1)).softmax(-1),
    "weight": lambda y, m: F.linear(y, torch.full((4, 4), 1e5)),
    "bias": lambda y, m: F.linear(y, torch.eye(4), torch.full((4,), 1e5)),
    "cond": lambda y, m: torch.cond(m.any(), lambda a, b: a + b, lambda a, b: a - b, (y, torch.full((4,), 1e5))),
}
TABLES: dict[str, Template] = {
    "arange": lambda y, m: y + torch.arange(0.0, 1e5, 25000.0),
    "arange_int": lambda y, m: y + torch.arange(99996, 100000),
    "arange_cast": lambda y, m: y + torch.arange(99996, 100000).float(),
    "linspace": lambda y, m: y * torch.linspace(0, 1e5, 4),
    "linspace_small": lambda y, m: y.abs() + torch.linspace(1e-8, 1e-9, 4),
    "logspace": lambda y, m: y + torch.logspace(0, 5, 4),
    "rope": lambda y, m: y * (torch.arange(99996.0, 1e5)[:, None] * 10000 ** (-torch.arange(4.0) / 4)).cos(),
    "rope_outer": lambda y, m: y * torch.outer(torch.arange(99996.0, 1e5), 10000 ** -(torch.arange(4.0) / 4)).sin(),
    "rope_matmul": lambda y, m: y * (torch.arange(99996, 100000).float()[:, None] @ torch.full((1, 4), 0.1)).cos(),
    "sinusoid": lambda y, m: y + torch.sin(torch.arange(99996.0, 1e5)[:, None] * torch.exp(torch.arange(4.0) * -2.0)),
}
ATTENTION: dict[str, Template] = {
    "masked_fill": lambda y, m: attend(y, torch.zeros(4, 4).masked_fill(m, -1e9)),
    "min_triu": lambda y, m: attend(y, torch.full((4, 4), MIN).triu(1)),
    "all_masked": lambda y, m: attend(y, torch.full((4, 4), -1e9)),
    "masked_row": lambda y, m: attend(y, torch.zeros(4, 4).masked_fill(m.t(), -1e9)),
    "one_minus": lambda y, m: attend(y, (1 - m.float()) * MIN),
    "scale": lambda y, m: F.scaled_dot_product_attention(y[None], y[None], y[None], scale=1e-8),
}
ALL = {
    f"{kind}_{name}": template
    for kind, table in (("scalar", SCALARS), ("eps", EPS), ("tensor", TENSORS), ("table", TABLES), ("sdpa", ATTENTION))
    for name, template in table.items()
}  # fmt: skip
#: what the report must name, at O2 and O3 in fp16
NAMED = {
    "scalar_masked_fill_min": "-3.40282e+38", "scalar_where": "-1e+09", "scalar_clamp": "1e-08",
    "scalar_add_65520": "65520", "scalar_mul_large": "100000", "scalar_addmm": "1e-08", "scalar_pad": "-1e+09",
    "scalar_threshold": "1e-08", "scalar_nan_to_num": "1e+09", "scalar_scatter": "-1e+09",
    "scalar_index_fill": "-1e+09", "tensor_full": "100000", "tensor_list": "1e+09", "tensor_full_like": "100000",
    "tensor_new_full": "100000", "sdpa_masked_row": "-1e+09", "eps_normalize": "1e-12", "table_linspace": "100000",
}  # fmt: skip
#: templates that also go through both front ends, which take some 50 ms each; the rest is in the sweep of the passes
THROUGH = (
    *NAMED, "scalar_masked_fill_inf", "scalar_scale", "scalar_masked_fill_in_place", "eps_layer_norm",
    "eps_rms_by_hand_12", "tensor_where", "tensor_mask_times", "tensor_matmul", "tensor_cond", "table_rope_outer",
)  # fmt: skip
#: cos of a large angle: where the product of two constants is low, as the level says, the error is of the order of 1
TURNS = ("table_rope", "table_rope_outer", "table_rope_matmul", "table_sinusoid")
#: the gradient has terms of 1/eps that cancel in fp32 and are inf in fp16, whatever happens to the constant
CANCELS = ("eps_standardize", "eps_rms_by_hand")


def attend(y: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(y[None], y[None], y[None], attn_mask=mask)


class One(nn.Module):
    """One template behind a linear layer of its own, so that its rows and its gradient are its own."""

    def __init__(self, template: Template, weight: Tensor) -> None:
        super().__init__()
        self.template = template
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.template(F.linear(x, self.weight), m)


class Many(nn.Module):
    """Templates in one graph: one compilation for each level and dtype."""

    def __init__(self, names: Iterable[str], weight: Tensor) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: One(ALL[name], weight) for name in names})

    def forward(self, x: Tensor, m: Tensor) -> dict[str, Tensor]:
        return {name: part(x, m) for name, part in self.parts.items()}


@dataclass(frozen=True)
class Result:
    """What one template gives: its output, the gradient of the weight, its rows."""

    out: Tensor
    grad: Tensor
    rows: tuple[Row, ...] = ()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x with a zero row, a weight, and a mask with two of four columns masked."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)
    x[1] = 0
    return x, weight, torch.tensor([[False, True, False, True]]).expand(4, 4).contiguous()


def total(out: Tensor) -> Tensor:
    """A loss that leaves out what is infinite in fp32 as well; its gradients are of the order of 1."""
    return torch.where(out.isfinite(), out, 0.0).mean()


@functools.cache
def reference(name: str) -> tuple[Result, float]:
    """The template in fp32, and the largest gradient that reaches the linear layer."""
    x, weight, m = inputs()
    weight.requires_grad_()
    y = F.linear(x, weight)
    y.retain_grad()
    out = ALL[name](y, m)
    total(out).backward()
    assert weight.grad is not None
    assert y.grad is not None
    return Result(out.detach(), weight.grad), float(y.grad.abs().max())


@functools.cache
def through(front: str, level: str) -> dict[str, Result]:
    """The templates of ``THROUGH`` through one front end, in fp16."""
    x, weight, m = inputs()
    model = Many(THROUGH, weight)
    if front == "dynamo":
        fast = amp_compile(model, level, dtype=F16, backend="eager", fullgraph=True)
        out = fast(x, m)
        rows, parameters = fast.report().rows, dict(model.named_parameters())
    else:
        mixed = ExportMixed(model, (x, m), level=level, dtype=F16)
        out = mixed(x, m)
        rows, parameters = tuple(mixed.rows), dict(mixed.module.named_parameters())
    torch.stack([total(value) for value in out.values()]).sum().backward()
    found = {}
    for name, value in out.items():
        grad = parameters[f"parts.{name}.weight"].grad
        assert grad is not None
        found[name] = Result(value.detach(), grad, tuple(r for r in rows if r.module == f"parts.{name}"))
    return found


@functools.cache
def captured() -> fx.GraphModule:
    """All templates as one graph of pre-dispatch ATen, traced once for all levels."""
    x, weight, m = inputs()

    def program(x: Tensor, m: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(t(F.linear(x, w), m) for t, w in zip(ALL.values(), weights, strict=True))

    return pre_dispatch(program, x, m, *(weight.clone() for _ in ALL), parameters=range(2, len(ALL) + 2))


@functools.cache
def swept(level: str, low: torch.dtype) -> dict[str, Result]:
    """All templates after the forward passes at a level."""
    gm = copy.deepcopy(captured())
    order.build().forward.run(gm, context(level, low), [], graph="forward")
    x, weight, m = inputs()
    weights = [weight.clone().requires_grad_() for _ in ALL]
    out = gm(x, m, *weights)
    torch.stack([total(value) for value in out]).sum().backward()
    return {n: Result(o.detach(), w.grad) for n, o, w in zip(ALL, out, weights, strict=True) if w.grad is not None}


def check_output(name: str, ours: Tensor, low: torch.dtype) -> None:
    """No inf, no NaN and no lost eps that the fp32 model does not have, and an error of some eps.

    Bound: ``y`` is a sum of 4 products of rounded factors, each of magnitude below 8, so it is off by at most
    3 eps · 4 · 8 < 100 eps; the templates have slopes of about their largest output over the largest ``y`` (3).
    """
    fp32 = reference(name)[0].out
    finite = fp32.isfinite()
    assert ours.dtype is F32
    assert torch.equal(ours.isfinite(), finite), f"{ours} against {fp32}"
    assert torch.equal(ours[~finite], fp32[~finite])
    if "softmax" not in name and "attention" not in name:  # a probability may round to 0
        assert torch.equal(ours == 0, fp32 == 0), f"{ours} against {fp32}"
    if name not in TURNS:
        error = (ours - fp32)[finite].abs().max()
        assert error <= 100 * torch.finfo(low).eps * fp32[finite].abs().max()


def check_gradient(name: str, ours: Tensor, low: torch.dtype) -> None:
    """Finite where fp32's is. A gradient that itself exceeds the low dtype where it enters the linear layer is no
    matter of constants."""
    fp32, largest = reference(name)
    assert ours.dtype is F32
    if largest < torch.finfo(low).max / 4 and name not in CANCELS:
        assert torch.equal(ours.isfinite(), fp32.grad.isfinite()), f"{ours} against {fp32.grad}"


SHORT = {BF16: "bf16", F16: "fp16"}.__getitem__


def sweep(level: str, low: torch.dtype) -> Any:
    marks = [] if low is F16 or level == "O2" else [pytest.mark.zoo]  # bf16 has fp32's range: few constants matter
    return pytest.param(level, low, marks=marks, id=f"{level}-{SHORT(low)}")


@pytest.mark.parametrize(("level", "low"), [sweep(level, low) for level in LEVELS for low in LOW])
def test_finite_where_fp32_is(level: str, low: torch.dtype) -> None:
    """Outputs, and gradients where they fit."""
    found = swept(level, low)
    each(ALL, lambda name: check_output(name, found[name].out, low))
    each(ALL, lambda name: check_gradient(name, found[name].grad, low))


def check_named(name: str, rows: tuple[Row, ...]) -> None:
    """The report names the constant."""
    kept = [r for r in rows if r.rule == "constant"]
    assert kept, [str(r) for r in rows]
    assert {r.precision for r in kept} == {"float32"}
    assert any(NAMED[name] in r.reason and "float16" in r.reason for r in kept), [r.reason for r in kept]


def check_low(name: str, rows: tuple[Row, ...]) -> None:
    assert {r.precision for r in rows if r.op in ("linear", "masked_fill", "mul")} == {"float16"}


@pytest.mark.parametrize(("front", "level"), [("dynamo", "O2"), ("export", "O2"), ("export", "O3")])
def test_through_a_front_end_in_fp16(front: str, level: str) -> None:
    """All is finite, the report names the constants, and what fits (-inf and a scale) stays low."""
    found = through(front, level)
    each(THROUGH, lambda name: check_output(name, found[name].out, F16))
    each(THROUGH, lambda name: check_gradient(name, found[name].grad, F16))
    # at O2 the whole of normalize is fp32, because its norm is
    each(set(NAMED) - ({"eps_normalize"} if level == "O2" else set()), lambda name: check_named(name, found[name].rows))
    if level == "O2":
        reasons = [r.reason.partition(" (")[0] for r in found["eps_normalize"].rows]
        assert "reads the fp32 result of linalg_vector_norm" in reasons
        each(("scalar_masked_fill_inf", "scalar_scale"), lambda name: check_low(name, found[name].rows))


# ------------------------------------------------------------------------------------------------ buffers


class Buffered(nn.Module):
    """Constants as buffers: inputs of the graph, whose values may change after capture."""

    def __init__(self, mask: Tensor, eps: float) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)
        self.register_buffer("mask", torch.zeros(4, 4).masked_fill(mask, -1e9))
        self.register_buffer("eps", torch.tensor(eps))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return (y + self.mask).softmax(-1), y.abs() + self.eps


@pytest.mark.parametrize(("front", "level"), [("dynamo", "O2"), *(("export", level) for level in LEVELS)])
def test_a_mask_in_a_buffer(level: str, front: str) -> None:
    """Below O2 an op with a buffer is fp32 (widest input), so eps and mask are safe. At O2 and O3 a buffer is
    rounded as an input is: the mask may become -inf, which masks as well."""
    x, _, m = inputs()
    model = Buffered(m, 1e-8)
    run = (
        amp_compile(model, level, dtype=F16, backend="eager")
        if front == "dynamo" else ExportMixed(model, (x,), level=level, dtype=F16)
    )  # fmt: skip
    probabilities, positive = run(x)
    assert bool(probabilities.isfinite().all())
    assert torch.equal(probabilities == 0, m)
    if level in ("auto", "O1"):
        assert bool((positive > 0).all())


# ------------------------------------------------------------------------------------------------- regions


@pytest.mark.parametrize("front", ["dynamo", "export"])
@pytest.mark.parametrize("kind", ["precision", "autocast", "set_precision"])
def test_a_constant_in_a_region_of_another_low_dtype(kind: str, front: str) -> None:
    """The level's dtype is bf16, which holds 1e5; the region's fp16 does not."""
    from amp_compiler import precision, set_precision

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, bias=False)

        def inside(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            offset = torch.full((4,), 1e5)
            return (y + offset) * 1 + y.masked_fill(y > 0, -1e9) * torch.tensor(1.0)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "precision":
                with precision("float16"):
                    return self.inside(x)
            if kind == "autocast":
                with torch.autocast("cpu", dtype=F16):
                    return self.inside(x)
            return self.inside(x)

    x, _, _ = inputs()
    model = Region()
    if kind == "set_precision":
        set_precision(model, "float16")
    run = (
        amp_compile(model, "O2", dtype=BF16, backend="eager")
        if front == "dynamo" else ExportMixed(model, (x,), level="O2", dtype=BF16)
    )  # fmt: skip
    assert bool(run(x).isfinite().all())


def test_a_constant_goes_into_a_checkpoint() -> None:
    def body(a: Tensor, b: Tensor) -> Tensor:
        return (a + b).sin() + b

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            offset = torch.full((4,), 1e5)
            return torch.utils.checkpoint.checkpoint(body, self.fc(x), offset, use_reentrant=False)

    x, _, _ = inputs()
    model = Checkpointed()
    out = amp_compile(model, "O2", dtype=F16, backend="eager")(x)
    assert bool(out.isfinite().all())
    out.mean().backward()
    assert bool(model.fc.weight.grad.isfinite().all())


# ------------------------------------------------------------------------------------------------ property

#: templates of (y, c) with |y| <= 1 whose result is at most |c| + 1, so that only the constant can overflow
SIMPLE: dict[str, Callable[[Tensor, float], Any]] = {
    "add": lambda y, c: y + c,
    "rsub": lambda y, c: c - y,
    "mul": lambda y, c: y * c,
    "masked_fill": lambda y, c: y.masked_fill(y > 0.5, c),
    "where": lambda y, c: torch.where(y > 0.5, c, y),
    "clamp": lambda y, c: y.clamp(min=-abs(c), max=abs(c)),
    "hardtanh": lambda y, c: F.hardtanh(y, -abs(c), abs(c)),
    "threshold": lambda y, c: F.threshold(y, 0.5, c),
    "pad": lambda y, c: F.pad(y, (0, 1), value=c),
    "full": lambda y, c: y + torch.full((4,), c),
    "full_like": lambda y, c: torch.maximum(y, torch.full_like(y, c)),
    "new_full": lambda y, c: y * y.new_full((4,), c),
    "tensor": lambda y, c: y + torch.tensor([0.0, c, 1.0, -c]),
    "ones": lambda y, c: y + torch.ones(4) * c,
    "expanded": lambda y, c: y + torch.full((1,), c).expand(4, 4),
    "addcmul": lambda y, c: torch.addcmul(y, y, y, value=c),
    "index_fill": lambda y, c: y.index_fill(0, torch.tensor([1]), c),
    "leaky_relu": lambda y, c: F.leaky_relu(y, c),
    "linspace": lambda y, c: y * torch.linspace(0, c, 4),
}


def check_constant(exponent: float, negative: bool, low: torch.dtype, level: str) -> None:
    """Finite where fp32 is; off by at most 8 eps of the largest term (3 roundings of y and of the constant, one of
    the result), or by 2 of the smallest subnormal numbers where the low dtype holds the constant as one."""
    constant = float(torch.tensor(10.0**exponent * (-1 if negative else 1), dtype=torch.float64).to(F32))
    x, eye = torch.linspace(-1, 1, 16).view(4, 4), torch.eye(4)

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return tuple(template(F.linear(x, w), constant) for template in SIMPLE.values())

    gm = pre_dispatch(program, x, eye)
    order.build().forward.run(gm, context(level, low), [], graph="forward")
    info = torch.finfo(low)
    for name, ours, fp32 in zip(SIMPLE, gm(x, eye), program(x, eye), strict=True):
        finite = fp32.isfinite()
        assert torch.equal(ours.isfinite(), finite), f"{name} {constant:g}: {ours} against {fp32}"
        largest = abs(constant) if name == "mul" else max(abs(constant), 1.0)
        bound = 8 * info.eps * largest + 2 * info.smallest_normal * info.eps
        assert bool(((ours - fp32)[finite].abs() <= bound).all()), f"{name} {constant:g}: {ours} against {fp32}"


any_constant = given(
    st.one_of(st.floats(-44, -7.5), st.floats(-8, 5), st.floats(4.8, 38.4)),
    st.booleans(),
    st.sampled_from((F16, F16, BF16)),
    st.sampled_from(("O2", "O3", "auto", "O1")),
)


@any_constant
@settings(max_examples=10)
def test_any_constant(exponent: float, negative: bool, low: torch.dtype, level: str) -> None:
    check_constant(exponent, negative, low, level)


@pytest.mark.zoo
@any_constant
@settings(max_examples=30)
def test_any_constant_more(exponent: float, negative: bool, low: torch.dtype, level: str) -> None:
    check_constant(exponent, negative, low, level)
