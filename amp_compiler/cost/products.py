"""Matrix products in a node: the sizes that decide how fast a device multiplies, for both dialects of FX.

A convolution counts as the product that an implicit GEMM computes, an attention as its two products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from .. import ir
from ..ir.flops import node_flops

CONVOLUTION, ATTENTION = "convolution", "attention"
#: causal attention leaves out whole blocks of so many keys: none of a short sequence, half of a long one
SKIPPED = 128


@dataclass(frozen=True)
class Product:
    """``batch`` products of an m × k by a k × n matrix.

    ``aligned``: the sizes in elements whose values lie side by side in memory, which matrix units want to be multiples
    of 16 bytes. ``kind``: "convolution", "attention", or "" for a product of matrices. ``grouped``: a convolution by
    small groups, which ordinary units compute. ``dense3``: one of 3 × 3 places without a stride, for which there are
    algorithms with fewer multiplications.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    aligned: tuple[int, ...] = ()
    kind: str = ""
    grouped: bool = False
    dense3: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.batch


Named = dict[str, Any]


def products(node: fx.Node) -> tuple[Product, ...]:
    """The products of a node; none for an op that is neither a product nor a convolution."""
    if node.op != "call_function":
        return ()
    name = ir.op_name(node).removesuffix("_")
    name = name.removeprefix("amp::wide_") if name.startswith("amp::wide_") else name
    rule = _RULES.get(name) or _RULES.get(f"_{name}")
    named = dict(ir.schema_args(node))
    found = rule(node, named) if rule is not None else _by_flops(node)
    return tuple(p for p in found if p.flops)


def shape_of(value: Any) -> list[int]:
    """The sizes of a node's (first) tensor; empty if it has none."""
    if not isinstance(value, fx.Node):
        return []
    tensors = [t for t in ir.tensor_outputs(value) if t is not None]
    return [ir.concrete(size) for size in tensors[0].shape] if tensors else []


def _by_flops(node: fx.Node) -> list[Product]:
    flops, out = node_flops(node), shape_of(node)
    if not flops or not out:
        return []
    return [Product(max(prod(out[:-1]), 1), out[-1], max(flops // (2 * prod(out)), 1))]


def _product(m: int, n: int, k: int, batch: int = 1, kind: str = "") -> Product:
    return Product(m, n, k, batch, (n, k), kind)


def _linear(node: fx.Node, named: Named) -> list[Product]:
    out, weight = shape_of(node), shape_of(named.get("weight"))
    return [_product(prod(out[:-1]), out[-1], weight[-1])] if out and len(weight) == 2 else []


def _matmul(node: fx.Node, named: Named) -> list[Product]:
    left = next((s for key in ("mat1", "batch1", "mat", "self", "input", "a") if (s := shape_of(named.get(key)))), [])
    out = shape_of(node)
    if not left:
        return []
    if len(out) < 2:
        return [_product(prod(out), 1, left[-1])]
    right = next((s for key in ("mat2", "batch2", "other", "b") if (s := shape_of(named.get(key)))), [])
    if len(right) == 2:  # one matrix for the whole batch
        return [_product(prod(out[:-1]), out[-1], left[-1])]
    return [_product(out[-2], out[-1], left[-1], prod(out[:-2]))]


def _conv(node: fx.Node, named: Named) -> list[Product]:
    out, weight = shape_of(node), shape_of(named.get("weight"))
    if len(out) < 3 or not weight:
        return []
    if named.get("transposed") or ir.op_name(node).startswith("conv_transpose"):
        return [_conv_product(shape_of(named.get("input")), weight, named, "data")]
    return [_conv_product(out, weight, named, "forward")]


def _conv_product(out: list[int], weight: list[int], named: Named, which: str) -> Product:
    """The implicit GEMM of a convolution with this result: forward, gradient of the data or of the weight."""
    groups, stride = named.get("groups", 1), named.get("stride", 1)
    outputs, inputs, taps = weight[0] // groups, weight[1], prod(weight[2:])
    places = out[0] * prod(out[2:])
    aligned = (outputs, inputs)
    grouped = groups > 1 and min(outputs, inputs) < 16
    if which == "forward":
        sizes = (places, outputs, inputs * taps)
    elif which == "data":  # each output place sends its values back to all taps: the same work as the forward
        sizes = (places, inputs * taps, outputs)
    else:
        sizes = (outputs, inputs * taps, places)
    strided = any(s != 1 for s in (stride if isinstance(stride, (list, tuple)) else [stride]))
    return Product(*sizes, groups, aligned, CONVOLUTION, grouped, weight[2:] == [3, 3] and groups == 1 and not strided)


def _conv_backward(node: fx.Node, named: Named) -> list[Product]:
    out, weight = shape_of(named.get("grad_output")), shape_of(named.get("weight"))
    mask = named.get("output_mask", (True, True, True))
    if named.get("transposed"):
        out = shape_of(named.get("input"))
    if not out or not weight:
        return []
    kinds = [kind for kind, wanted in zip(("data", "weight"), mask, strict=False) if wanted]
    return [_conv_product(out, weight, named, kind) for kind in kinds]


def _attention(times: float) -> Callable[[fx.Node, Named], list[Product]]:
    """``times``: products of the kernel, in units of the forward's two."""

    def rule(node: fx.Node, named: Named) -> list[Product]:
        query, key, value = (shape_of(named.get(name)) for name in ("query", "key", "value"))
        if len(query) < 2 or len(key) < 2 or len(value) < 2:
            return []
        keys = max(int(key[-2] * times), 1)
        if named.get("is_causal"):
            keys = min(keys, (keys + SKIPPED) // 2)
        heads = prod(query[:-2])
        scores = _product(query[-2], keys, query[-1], heads, ATTENTION)
        return [scores, _product(query[-2], value[-1], keys, heads, ATTENTION)]

    return rule


_FORWARD = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
#: five products where the forward has two: the scores are computed again
_BACKWARD = tuple(f"{name}_backward" for name in _FORWARD)
_RULES: dict[str, Callable[[fx.Node, Named], list[Product]]] = {
    "linear": _linear,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul", "amp::cast_matmul"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose1d",
                     "conv_transpose2d", "conv_transpose3d"), _conv),
    "convolution_backward": _conv_backward,
    **dict.fromkeys(_FORWARD, _attention(1)),
    **dict.fromkeys(_BACKWARD, _attention(2.5)),
}  # fmt: skip
