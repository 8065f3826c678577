"""Every model of the zoo at every level and dtype: finite, close to fp32, and every op as the policy says.

The full matrix has the marker ``zoo``; the cases of ``TRAPS`` run without it, with as few layers as show the trap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from amp_compiler import amp_compile, ir
from amp_compiler.ir.wide import why_wide
from amp_compiler.policy import Policy
from amp_compiler.policy.ops.row import OpClass
from zoo.models import ZOO, Inputs

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = ("auto", "O1", "O2")
DTYPES = (BF16, F16)
Case = tuple[str, str, torch.dtype]

ONE_LAYER = {"num_hidden_layers": 1}
#: what runs in every test run, and the trap that it stands for
TRAPS: tuple[Case, ...] = (
    ("gpt2-sdpa", "O2", F16),  # sdpa with a mask, some queries see masked keys only; weights stored transposed
    ("llama-sdpa", "O2", BF16),  # RMSNorm's casts to float32 and back; rotary tables under autocast(enabled=False)
    ("mixtral-batched", "auto", BF16),  # top-k routing, gathered weights
    ("convnext", "O2", BF16),  # depthwise convolution, layer scale
    ("resnet", "O2", F16),  # batch norm and its running statistics; max pool
)
#: their sizes where they are smaller than the model's in the full matrix
SHALLOW: dict[str, dict[str, Any]] = {
    "gpt2-sdpa": {"n_layer": 1}, "llama-sdpa": ONE_LAYER, "mixtral-batched": ONE_LAYER,
}  # fmt: skip

#: where Dynamo breaks the graph, by a part of the report's text, and why: all of it is code of the models
LAYERDROP = {"Data-dependent branching": "draws a random number in each training step, to skip a layer or not"}
HIDDEN_STATES = {
    "Unsupported context manager": "collects inner states of the model in a context variable",
    "setattr() on unsupported type": "sets that variable",
}
CTC = {
    "labels.max() >= self.config.vocab_size": "checks the values of the labels",
    "hidden_states.requires_grad = True": "makes the input of the convolutions need a gradient",
    "labels.masked_select(labels_mask)": "the number of labels depends on their values",
    "torch.backends.cudnn.flags": "switches a backend off around the loss",
}
EXPERTS = {
    "self.context_var.get()": "collects the router's logits in a context variable",
    "nonzero()": "loops over the experts that got a token",
}
BREAKS: dict[str, dict[str, str]] = {
    "opt": LAYERDROP, "bart": LAYERDROP, "pegasus": LAYERDROP, "marian": LAYERDROP, "whisper": LAYERDROP,
    "wav2vec2": LAYERDROP | CTC, "hubert": LAYERDROP | CTC,
    "segformer": HIDDEN_STATES, "mixtral-loop": HIDDEN_STATES | EXPERTS,
}  # fmt: skip
#: ops whose slope or result jumps: a rounding before them can turn a gradient on or off
KINKS = frozenset({"relu", "relu_", "relu6", "leaky_relu", "max_pool2d", "max_pool2d_with_indices", "abs", "clamp",
                   "clamp_min", "topk", "amax", "max", "hardtanh"})  # fmt: skip
LOSS_SCALE = 2.0**10  # keeps small gradients out of fp16's subnormals; exact to undo


# ------------------------------------------------------------------------------------------------ running


@dataclass(frozen=True)
class Run:
    """One forward and backward: all float outputs, the main one, and the gradients by name."""

    outputs: dict[str, Tensor]
    main: Tensor
    gradients: dict[str, Tensor]


def run(call: Any, model: nn.Module, inputs: Inputs, scale: float = 1.0) -> Run:
    """Call a model (or its compiled form), go back from its loss, undo the scale in fp32."""
    result = call(**inputs)
    (result.loss * scale).backward()
    outputs = {name: value.detach() for name, value in tensors(result) if value.is_floating_point()}
    main = next(value for name, value in outputs.items() if "logits" in name)
    gradients = {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}
    return Run(outputs, main, gradients)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output with its path, caches of keys and values included."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}.{index}")
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value), path)


def make(name: str, shallow: bool) -> tuple[nn.Module, Inputs]:
    return ZOO[name](**SHALLOW.get(name, {}) if shallow else {})


@functools.cache
def reference(name: str, shallow: bool) -> Run:
    """The model as it is, in fp32."""
    model, inputs = make(name, shallow)
    return run(model, model, inputs)


# ------------------------------------------------------------------------------------------------- bounds


def error(ours: Tensor, theirs: Tensor) -> float:
    """The error in norm, relative to ``theirs``."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """All gradients as one vector."""
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def nodes(graphs: list[fx.GraphModule]) -> Iterator[fx.Node]:
    """Every call in the graphs and in the graphs inside them."""
    for gm in graphs:
        for _, inner in ir.all_graphs(gm):
            yield from (n for n in inner.graph.nodes if n.op == "call_function")


def chain(graphs: list[fx.GraphModule]) -> int:
    """The most roundings to the low dtype on any path from an input to an output; pieces of a model follow each
    other, so theirs add up."""
    return sum(_chain(gm) for gm in graphs)


def _chain(gm: fx.GraphModule) -> int:
    length: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        before = max((length[n] for n in node.all_input_nodes), default=0)
        value, known = ir.tensor_of(node), ir.decision(node)
        moves = known is not None and known.cls is OpClass.EXACT
        rounds = node.op == "call_function" and value is not None and value.dtype in ir.LOW_DTYPES and not moves
        inner = [_chain(body) for _, body in ir.subgraphs(gm, node)] if ir.is_higher_order(node) else []
        length[node] = before + rounds + max(inner, default=0)
    return max(length.values(), default=0)


def bounds(graphs: list[fx.GraphModule], dtype: torch.dtype) -> tuple[float, float]:
    """Bounds on the relative error of the output and of the gradient; one formula for all models.

    A rounding has a relative error of at most eps/2. An op on the chain rounds up to three times (two operands and
    the result), independently: sqrt(3) eps/2, less than eps. Errors of the n links of the longest chain are
    independent too and add up like sqrt(n), if a link hands errors on as they are (norms and residual sums
    do): output <= eps sqrt(n).
    A gradient goes through the chain and back, 2n links, and each step back multiplies two inexact factors, the
    gradient and a saved value: sqrt(2) each, together 2 times that. Where slopes jump (relu, max pool, top-k), a value
    that is off by a relative e is on the wrong side for a share of about e of all units. Their gradients are wrong
    altogether, which is sqrt(e) in norm, and comes on top.
    """
    output = torch.finfo(dtype).eps * math.sqrt(chain(graphs))
    kinks = any(ir.op_name(n) in KINKS and ir.is_eligible(ir.tensor_of(n.args[0])) for n in nodes(graphs))
    return output, 2 * output + (math.sqrt(output) if kinks else 0.0)


# ------------------------------------------------------------------------------------------------- policy

#: rules that come before an op's class: what the model's code says,
ASKED = frozenset({"region", "asked", "explicit_dtype", "untouched", "already_low", "neutral"})
#: and what would go wrong; a matrix product or convolution has none of these
NEEDED = frozenset({"constant", "in_place", "view", "fp32_only", "unsure"})
#: rules for nodes that have no class: casts, new tensors, integers, selections of outputs, higher-order ops
NO_CLASS = frozenset({"author", "follows", "inserted", "creation", "no_float", "getitem", "transparent", "sealed",
                      "opaque", "native"})  # fmt: skip


def outside_policy(graphs: list[fx.GraphModule], policy: Policy) -> list[str]:
    """The ops whose values, as they stand in the graphs, are not what class and level allow."""
    return [f"{ir.format_node(n)}  # {ir.decision(n)}" for n in nodes(graphs) if not _allowed(n, policy)]


def _before_casts(node: fx.Node) -> fx.Node:
    while (known := ir.decision(node)) is not None and known.rule == "inserted":
        node = ir.cast_source(node)
    return node


def _allowed(node: fx.Node, policy: Policy) -> bool:
    known = ir.decision(node)
    if known is None or not known.reason:
        return False
    choice = policy.classify(ir.op_name(node))
    if known.rule in NO_CLASS or known.rule in ASKED or (known.rule in NEEDED and choice.cls is not OpClass.LOW):
        return True
    inputs = {v.dtype for name, a in ir.tensor_args(node) if (v := ir.tensor_of(a)) is not None and ir.is_eligible(v)
              and name not in known.keep_args}  # fmt: skip
    results = {v.dtype for v in ir.tensor_outputs(node) if v is not None and ir.is_eligible(v)}
    low, wide, seen = {policy.low}, {F32}, inputs | results
    if known.rule == "wide":
        makes_scalar = all(v is None or v.dim() == 0 for v in ir.tensor_outputs(node))
        reads_wide = any(why_wide(_before_casts(a)) for _, a in ir.tensor_args(node))
        return policy.level == "O2" and seen == wide and (reads_wide or makes_scalar)
    if known.rule == "fp32_inside":
        return policy.level == "O2" and choice.row is not None and choice.row.fp32_inside and seen == low
    if choice.cls is OpClass.LOW:
        return seen == low
    if choice.cls is OpClass.FP32:
        return seen == wide
    if choice.cls is OpClass.FOLLOW and not ir.returns_non_float(node):
        return seen == {"O1": wide, "O2": low}.get(policy.level, seen) and len(seen) == 1
    if choice.cls is OpClass.KEEP:
        return choice.rule == known.rule
    return len(inputs) <= 1 and (results <= inputs or ir.returns_non_float(node))


# -------------------------------------------------------------------------------------------------- tests


def title(name: str, level: str, dtype: torch.dtype) -> str:
    return f"{name}-{level}-{str(dtype).removeprefix('torch.')}"


MATRIX = [(name, level, dtype) for name in ZOO for level in LEVELS for dtype in DTYPES]


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "level", "dtype"), MATRIX, ids=[title(*case) for case in MATRIX])
def test_model(name: str, level: str, dtype: torch.dtype) -> None:
    check(name, level, dtype, shallow=False)


@pytest.mark.parametrize(("name", "level", "dtype"), TRAPS, ids=[title(*case) for case in TRAPS])
def test_trap(name: str, level: str, dtype: torch.dtype) -> None:
    check(name, level, dtype, shallow=True)


def check(name: str, level: str, dtype: torch.dtype, *, shallow: bool) -> None:
    model, inputs = make(name, shallow)
    compiled = amp_compile(model, level=level, dtype=dtype, backend="eager")
    ours, theirs = run(compiled, model, inputs, LOSS_SCALE), reference(name, shallow)

    report = compiled.report()
    expected = BREAKS.get(name, {})
    unexplained = [text for text in report.not_captured if not any(part in text for part in expected)]
    assert report.rows
    assert not unexplained
    assert not [note for note in report.notes if "runs unchanged" in note]
    for part in expected:
        assert any(part in text for text in report.not_captured), f"no graph break any more at {part!r}"
    assert not outside_policy(compiled.graphs, compiled.policy)

    assert ours.outputs.keys() == theirs.outputs.keys()
    assert ours.gradients.keys() == theirs.gradients.keys()
    for key, value in {**ours.outputs, **ours.gradients}.items():
        assert value.isfinite().all(), key
    assert {k: v.dtype for k, v in ours.outputs.items()} == {k: v.dtype for k, v in theirs.outputs.items()}

    output, gradient = bounds(compiled.graphs, dtype)
    seen = torch.ones(ours.main.shape[:1], dtype=torch.bool)
    mask = inputs.get("attention_mask")
    if name in BREAKS and mask is not None and mask.shape == ours.main.shape[:2]:
        # where the mask leaves its graph, nothing tells what it will meet: it holds the low dtype's limit, which is
        # finite everywhere, and the weights of a query that sees masked keys only are not equal any more
        seen = mask.bool()
    assert error(ours.main[seen], theirs.main[seen]) <= output
    assert error(flat(ours.gradients), flat(theirs.gradients)) <= gradient
