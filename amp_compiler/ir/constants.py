"""Constants of a model's code: which values of a graph hold them, and whether a dtype can represent them.

A non-zero constant that a dtype rounds to inf or 0 must not reach an op of that dtype, and neither may integers
(positions) that it cannot distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.torch_names import OpOverload, pytree, schema_of, without_dispatch_modes

#: names of float arguments that are values of the result, not settings of the computation (an eps, a momentum)
VALUE_ARGUMENTS = ("value", "fill_value", "posinf", "neginf", "nan", "threshold", "min_val", "max_val")
#: ops that compute with their eps in the dtype of their input
EPS_ARGUMENTS = {"cosine_similarity": "eps", "pairwise_distance": "eps"}
#: ops that keep 1 / sqrt(eps) for the backward, in the dtype of their input
KEEP_RSTD = ("layer_norm", "group_norm", "instance_norm", "rms_norm", "batch_norm")
#: ops by which a scalar argument becomes a value of the result
PLACE = frozenset({
    "add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "maximum", "minimum", "pad",
    "constant_pad_nd", "threshold", "hardtanh", "nan_to_num", "scatter", "index_fill", "full_like", "new_full",
})  # fmt: skip
#: ops of one argument that turn a small value into a large one: result = value ** exponent
POWERS = {"reciprocal": -1.0, "rsqrt": -0.5, "sqrt": 0.5}
#: tensors with more elements are not examined
LARGEST = 1 << 20
UNINITIALIZED = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class Held:
    """A constant among the values of a tensor.

    ``lost_in``: dtypes that round some of its integers to others. ``placed``: an op combined it with other values (an
    eps that is added). ``once``: it matters to the op that uses it, but not to later ones.
    """

    value: float
    lost_in: tuple[torch.dtype, ...] = ()
    placed: bool = False
    once: bool = False

    def survives(self, dtype: torch.dtype) -> bool:
        return dtype not in self.lost_in and fits(self.value, dtype)


#: the limits of a dtype, as ``torch.finfo`` names them
LIMITS = ("min", "max", "eps", "tiny", "smallest_normal", "resolution")


def is_limit(value: object, dtype: torch.dtype) -> bool:
    """True for a number that is one of the limits of a dtype."""
    return isinstance(value, (int, float)) and any(value == getattr(torch.finfo(dtype), name) for name in LIMITS)


def limit_in(value: float, dtype: torch.dtype, other: torch.dtype) -> float:
    """Return a limit of ``dtype`` (its largest or smallest number, its eps) as that of ``other``; other values
    unchanged."""
    if dtype is other:
        return value
    mine, theirs = torch.finfo(dtype), torch.finfo(other)
    return next((float(getattr(theirs, n)) for n in LIMITS if value == getattr(mine, n)), value)


def fits(value: float, dtype: torch.dtype) -> bool:
    """True unless rounding to ``dtype`` turns a finite value into inf, or a non-zero value into 0."""
    if value == 0 or not math.isfinite(value):
        return True
    rounded = float(torch.tensor(value, dtype=torch.float64).to(dtype))
    return rounded != 0 and math.isfinite(rounded)


def scalars(node: fx.Node, creation: bool, instead: dict[str, float], *, in_result: bool = False) -> list[float]:
    """Return the Python numbers that take part in an op's arithmetic or end up in its result.

    ``instead``: values for arguments that are a different number in low precision. ``in_result``: without numbers that
    the op only keeps for its backward.
    """
    if not isinstance(node.target, OpOverload):
        return []
    kinds = {a.name: str(a.type) for a in schema_of(node.target).arguments}
    name_of_op = ir.op_name(node)
    found = []
    for name, value in ir.all_args(node).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        computes = kinds.get(name, "") in ("Tensor", "number", "Optional[number]") and not creation
        if computes or name in VALUE_ARGUMENTS or (creation and name == "s") or EPS_ARGUMENTS.get(name_of_op) == name:
            found.append(instead.get(name, float(value)))
        if name == "eps" and name_of_op in KEEP_RSTD and value > 0 and not in_result:
            found.append(float(value) ** -0.5)
    return found


def hardest(value: torch.Tensor) -> list[Held]:
    """Return the values of a constant tensor that are hardest to represent: the largest and the smallest magnitude."""
    if not value.dtype.is_floating_point or value.numel() == 0 or value.layout is not torch.strided:
        return []
    plain = value.detach()
    finite = plain[plain.isfinite() & (plain != 0)].abs()
    if not finite.numel():
        return []
    lost: tuple[torch.dtype, ...] = ()
    if bool((finite == finite.round()).all()):
        lost = tuple(low for low in ir.LOW_DTYPES if bool((finite.to(low).to(finite.dtype) != finite).any()))
    return [Held(float(finite.max()), lost), Held(float(finite.min()), lost)]


def evaluate(
    gm: fx.GraphModule, unknown: set[fx.Node], instead: Callable[[fx.Node], dict[str, float]]
) -> dict[fx.Node, torch.Tensor]:
    """Return the value of every node that depends on no input, if it is small and not random.

    ``unknown``: nodes that are written to, so that they have no single value. ``instead(node)``: numbers to use instead
    of the node's own.
    """
    known: dict[fx.Node, torch.Tensor] = {}
    with torch.no_grad(), without_dispatch_modes():
        for node in gm.graph.nodes:
            if node in unknown:
                continue
            if node.op in ("get_attr", "placeholder"):
                constant = ir.constant(gm, node)
                if constant is not None and constant.numel() <= LARGEST:
                    known[node] = constant.cpu()
            elif node.op == "call_function" and _is_computable(node, known):
                value = _call(node, known, instead(node))
                if isinstance(value, torch.Tensor):
                    known[node] = value
    return known


def _is_computable(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> bool:
    target, value = node.target, ir.tensor_of(node)
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable or value is None:
        return False
    name = ir.op_name(node)
    if name in UNINITIALIZED or "::" in name or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return all(a in known for a in node.all_input_nodes) and math.prod(map(ir.concrete, value.shape)) <= LARGEST


def _call(node: fx.Node, known: dict[fx.Node, torch.Tensor], instead: dict[str, float]) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return known[value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return ir.concrete(value) if isinstance(value, torch.SymInt) else value

    names = iter([name for name, _ in ir.schema_args(node)])
    given = [instead.get(next(names), v) for v in node.args]
    named = {k: instead.get(k, v) for k, v in node.kwargs.items()}
    try:
        return node.target(*pytree.tree_map(plain, given), **pytree.tree_map(plain, named))  # type: ignore[operator]
    except Exception:
        return None  # treat the op as unknown, like one that depends on an input

