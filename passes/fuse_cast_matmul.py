"""fuse_cast_matmul: let a matrix product round its operands as it reads them, and return a weight gradient in fp32.

1. ``mm(cast(x, bf16), t(cast(w, bf16)))``  →  ``cast_matmul(x, t(w), None, bf16, bf16)``; likewise ``addmm`` with its
   bias, and ``bmm``. A cast is absorbed only if its source is an input of the graph (which exists anyway) or has no
   other reader, and only if all readers of the low copy are such products: where a low copy is needed, it is read.
   On a GPU a cast also stays where our kernel would take longer than the cast and the library's products, as estimated
   from the GPU's data sheet (``amp_compiler/cost/fused.py``).
2. ``unscale([t(mm(g, x): bf16)])``, ``return cast(mm(g, x): bf16, f32)``  →  ``cast_matmul(g, x, None, bf16, f32)``, in
   the backward: a gradient that is wanted in fp32 keeps the fp32 sum of the product, and is never rounded to low;
   likewise one that is cast to fp32 to be sent to other processes
3. on a CPU that computes low-precision products in fp32 (``kernels/cpu.py``), every product of low operands is
   replaced; on a CPU with low-precision units, only those that are too small for them
4. ``bmm(q, view(clone(transpose(k))))``  →  ``cast_matmul(q, transpose(view(clone(k))), …)``: our kernel reads an
   operand in either order, so a copy that is needed need not be a transposing one, which takes several times as long

Off with ``Policy.torch``, whose results are bit-identical to autocast's. On a GPU under Inductor, products are left as
they are: it fuses casts by itself.

Requires: folded. Ensures: folded, fused. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.cost.fused import cast_seconds, fused_seconds, library_seconds, target_here
from amp_compiler.cost.products import products
from amp_compiler.kernels import cast_matmul as _defines_cast_matmul  # noqa: F401
from amp_compiler.kernels.cpu import product_reason, product_runs_wide
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import FOLDED, FUSED
from amp_compiler.rewrite.facts.functional import PRODUCTS, product_sizes, takes_bias

aten = torch.ops.aten
#: ops that only change the order of the elements: a cast commutes with them, and a product reads through them
_VIEWS = {aten.t.default, aten.transpose.int, aten.permute.default}
_SHAPES = {aten.view.default, aten._unsafe_view.default}


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.policy.autocast_device is not None:
        return False
    graph = gm.graph
    devices = ("cpu", "cuda") if ctx.backend == "eager" else ("cpu",)
    found = [n for n in graph.nodes if n.target in PRODUCTS and _is_low_product(n, devices)]
    _copy_in_order(graph, found)
    wide = {n: out for n in found if (out := _wide_reader(n)) is not None}
    absorbed = {c for c in _absorbable(found) if _pays(c, wide)}
    absorbed = {c for c in absorbed if not any(ir.LEFT in reader.meta for reader in _final_readers(c))}
    modified = False
    for node in found:
        operands = _operands(node)
        fuses = node in wide or any(_cast_behind(x) in absorbed for x in operands if x is not None)
        if fuses or node.meta["val"].device.type == "cpu":
            _replace(graph, node, operands, absorbed, node in wide)
            modified = True
    if modified:
        graph.eliminate_dead_code()
        gm.recompile()
    return modified


def _is_low_product(node: fx.Node, devices: Sequence[str]) -> bool:
    value = ir.tensor_of(node)
    if value is None or value.dtype not in ir.LOW_DTYPES or value.device.type not in devices:
        return False
    if not takes_bias(node) or node.kwargs:
        return False
    # On a CPU with low-precision units, torch's own products are faster, except for small ones.
    return value.device.type != "cpu" or product_runs_wide(value.dtype, product_sizes(node))


def _operands(node: fx.Node) -> list[fx.Node | None]:
    """Return (left, right, bias)."""
    if node.target is aten.addmm.default:
        bias, left, right = node.args
    else:
        (left, right), bias = node.args, None
    return [x if isinstance(x, fx.Node) else None for x in (left, right, bias)]


# ------------------------------------------------------------------------------------ copies of operands


def _copy_in_order(graph: fx.Graph, found: list[fx.Node]) -> None:
    """Apply rule 4 to the products on a CPU."""
    taking = {n for n in found if n.meta["val"].device.type == "cpu"}
    for view in list(graph.nodes):
        source = _transposed_by_copy(view)
        if source is None or not all(reader in taking for reader in _final_readers(view)):
            continue
        copy, shape = view.args
        mode = ir.fake_mode(graph)
        with graph.inserting_before(copy):
            new = ir.call(graph, mode, copy.target, (source,), copy.kwargs)
            new.meta = {**copy.meta, "val": new.meta["val"]}
        with graph.inserting_before(view):
            shown = ir.call(graph, mode, view.target, (new, [*shape[:-2], shape[-1], shape[-2]]), {})
            last = len(shape) - 1  # permute: Inductor has no code for a transpose, which it decomposes while it traces
            turned = ir.call(graph, mode, aten.permute.default, (shown, [*range(last - 1), last, last - 1]), {})
        for node in (shown, turned):
            node.meta = {**view.meta, "val": node.meta["val"]}
        for reader in list(view.users):
            if _is_turned(reader):
                reader.replace_all_uses_with(shown)
        view.replace_all_uses_with(turned)


def _transposed_by_copy(view: fx.Node) -> fx.Node | None:
    """Return x where the node is ``view(clone(transpose(x)))``, x has its elements in the order of its rows, and the
    view leaves rows and columns as they are; None for other nodes."""
    copy = view.args[0] if view.target in _SHAPES else None
    if not isinstance(copy, fx.Node) or copy.target is not aten.clone.default or len(copy.users) != 1:
        return None
    if copy.kwargs.get("memory_format") is not torch.contiguous_format:
        return None
    wanted, copied = ir.tensor_of(view), ir.tensor_of(copy)
    if wanted is None or copied is None or wanted.dim() < 3 or not ir.same_sizes(wanted.shape[-2:], copied.shape[-2:]):
        return None
    turned = copy.args[0]
    while isinstance(turned, fx.Node) and turned.target is aten.expand.default and _same_shape(turned, turned.args[0]):
        turned = turned.args[0]
    if not isinstance(turned, fx.Node) or not _is_turned(turned):
        return None
    source = turned.args[0]
    value = ir.tensor_of(source) if isinstance(source, fx.Node) else None
    if value is None or ir.concrete(value.stride(-1)) != 1:
        return None
    return source  # type: ignore[return-value]


def _is_turned(node: fx.Node) -> bool:
    """True if the node swaps the last two dimensions."""
    value = ir.tensor_of(node)
    if value is None or node.target not in _VIEWS:
        return False
    last = [value.dim() - 1, value.dim() - 2]
    if node.target is aten.permute.default:
        order = [d % value.dim() for d in node.args[1]]  # type: ignore[union-attr,operator]
        return order == [*range(value.dim() - 2), *last]
    return node.target is aten.transpose.int and sorted(d % value.dim() for d in node.args[1:]) == last[::-1]  # type: ignore[operator]


def _same_shape(node: fx.Node, other: Any) -> bool:
    one, two = ir.tensor_of(node), ir.tensor_of(other) if isinstance(other, fx.Node) else None
    return one is not None and two is not None and ir.same_sizes(one.shape, two.shape)


# ------------------------------------------------------------------------------------- casts of operands


def _cast_behind(node: fx.Node | None) -> fx.Node | None:
    """Return the cast from fp32 that an operand is, possibly through a view; None if it isn't one."""
    while node is not None and node.target in _VIEWS:
        source = node.args[0]
        node = source if isinstance(source, fx.Node) else None
    if node is None or not ir.is_float_cast(node):
        return None
    return node if ir.cast_source(node).meta["val"].dtype is torch.float32 else None


def _final_readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.target in _VIEWS:
            yield from _final_readers(user)
        else:
            yield user


def _absorbable(products: list[fx.Node]) -> set[fx.Node]:
    casts = {c for n in products for x in _operands(n) if (c := _cast_behind(x)) is not None}
    taking = set(products)
    return {
        c for c in casts
        if (ir.cast_source(c).op == "placeholder" or len(ir.cast_source(c).users) == 1 == len(list(_final_readers(c))))
        and all(reader in taking for reader in _final_readers(c))
    }  # fmt: skip


def _pays(cast: fx.Node, wide: Mapping[fx.Node, fx.Node]) -> bool:
    """True if products that round what this cast rounds take no longer than the cast and the library's products. They
    are marked if not. A product that is wanted in fp32 is ours in any case."""
    target = target_here(cast.meta["val"].device)
    readers = [reader for reader in _final_readers(cast) if reader not in wide]
    if target is None or not readers:
        return True
    ours, theirs = 0.0, cast_seconds(target, prod(ir.concrete(size) for size in cast.meta["val"].shape))
    for reader in readers:
        left, _, bias = _operands(reader)
        if bias is not None and _cast_behind(bias) is cast:
            return True
        for product in products(reader):
            side, low = "left" if _cast_behind(left) is cast else "right", cast.meta["val"].dtype
            ours += fused_seconds(product, target, side, low)
            theirs += library_seconds(product, target, 0, low)
    if ours > theirs:
        for reader in readers:
            reader.meta[ir.LEFT] = (
                f"left to the library: on {target} a cast and its product take {theirs * 1e6:,.0f} µs together, "
                f"amp::cast_matmul {ours * 1e6:,.0f} µs (estimated)"
            )
    return ours <= theirs


def _without_cast(graph: fx.Graph, node: fx.Node, cast: fx.Node, product: fx.Node) -> fx.Node:
    """Return the operand without the cast, with the same view of its source. If the product is in the backward, a view
    from the forward is marked as the backward's too: torch's partitioners rely on that mark."""
    if node is cast:
        return ir.cast_source(cast)
    source = _without_cast(graph, node.args[0], cast, product)  # type: ignore[arg-type]
    new = graph.call_function(node.target, (source, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
    new.meta = {**node.meta, "val": ir.retype(node.meta["val"], torch.float32)}
    ir.inherit_placement(new, product)
    return new


# ------------------------------------------------------------------------------------------- fp32 results


def _wide_reader(node: fx.Node) -> fx.Node | None:
    """Return the cast to fp32 or the unscale that is the only reader of the product, possibly through a view."""
    while len(node.users) == 1:
        (user,) = node.users
        if ir.op_name(user) == "amp::unscale" and node.meta["val"].dtype in ir.LOW_DTYPES:
            return user
        if ir.is_float_cast(user) and ir.cast_dtype(user) is torch.float32:
            if ir.OF_GRADIENT in user.meta:
                return user
            of_backward = user.meta.get("partitioner_tag") == "is_backward"
            return user if of_backward and all(u.op == "output" for u in user.users) else None
        if user.target not in _VIEWS:
            return None
        node = user
    return None


def _replace(
    graph: fx.Graph, node: fx.Node, operands: list[fx.Node | None], absorbed: set[fx.Node], wide: bool
) -> None:
    low = node.meta["val"].dtype
    reasons = [f"computed in float32: {product_reason(low)}"] if node.meta["val"].device.type == "cpu" else []
    with graph.inserting_before(node):
        given: list[Any] = []
        for operand in operands:
            cast = _cast_behind(operand)
            takes = operand is not None and cast is not None and cast in absorbed
            given.append(_without_cast(graph, operand, cast, node) if takes and operand and cast else operand)
        if any(new is not old for new, old in zip(given, operands, strict=True)):
            reasons.append("rounds an operand as it reads it")
        if wide:
            reasons.append("its result is wanted in float32")
        out = torch.float32 if wide else low
        new = graph.call_function(torch.ops.amp.cast_matmul.default, (*given, low, out))
    new.meta = dict(node.meta)
    new.meta["val"] = ir.retype(node.meta["val"], out)
    new.meta[ir.KERNEL] = "; ".join(reasons)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    if wide:
        _widen_readers(graph, new)


def _widen_readers(graph: fx.Graph, node: fx.Node) -> None:
    """Make the views of a product that is now fp32 fp32 too, and remove casts to fp32, which do nothing any more."""
    for user in list(node.users):
        if user.target in _VIEWS:
            user.meta["val"] = ir.retype(user.meta["val"], torch.float32)
            _widen_readers(graph, user)
        elif ir.is_cast(user):
            user.replace_all_uses_with(node)
            graph.erase_node(user)


PASS = Pass("fuse_cast_matmul", Dialect.FUNCTIONAL, requires=(FOLDED,), ensures=(FOLDED, FUSED), run=run)
