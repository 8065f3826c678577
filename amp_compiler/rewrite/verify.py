"""The verifier: what each pass promises, checked on its result. Facts are the names passes use.

A failure names the pass, the node and the user's source line. ``deep`` also runs every op again on fake
tensors and compares dtypes (tests and the CLI; ``AMP_VERIFY=deep`` switches it on anywhere): one such run
costs as much as lowering, so by default dtypes are checked by rule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.errors import VerifyError
from ..common.torch_names import pytree
from ..ir import Mode
from ..ir.nesting import policy_at
from ..ir.weights import moves
from ..ir.wide import why_wide
from ..policy import Rule, Treatment
from ..policy.ops.row import OpClass

DEEP = "AMP_VERIFY"


def deep_by_default() -> bool:
    """Whether ``AMP_VERIFY=deep`` is set."""
    return os.environ.get(DEEP, "") == "deep"


def verify(
    gm: fx.GraphModule, facts: tuple[str, ...], ctx: Any, after: str, *, deep: bool | None = None
) -> bool:
    """Check that ``facts`` hold on ``gm`` and on every graph inside it. Returns True if the check was a deep one."""
    for name, inner in ir.all_graphs(gm):
        where = f"{after}, graph {name}" if name else after
        _well_formed(inner, where)
        for fact in facts:
            CHECKS[fact](inner, ctx, where)
    wanted = (ctx.deep or deep_by_default()) if deep is None else deep
    if not wanted or not {"cast", "folded", "batched", "fused", "lowered", "viewed"} & set(facts):
        return False
    _repropagate(gm, after)
    return True


def _fail(where: str, node: fx.Node, what: str) -> None:
    source = ir.source_line(node)
    raise VerifyError(
        f"After {where}: node '{node.name}' ({ir.format_node(node)}): {what}"
        + (f" It comes from {source}." if source else ""),
        pass_name=where.partition(",")[0],
        node=node.name,
        source=source,
        hint="This is a bug in a pass: switch the pass off by disable_passes and report the graph.",
    )


def _well_formed(gm: fx.GraphModule, where: str) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        name = where.partition(",")[0]
        raise VerifyError(f"After {where}: the graph is not well formed: {error}", pass_name=name) from error


def _captured(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            _fail(where, node, "is no ATen call.")


def _normalized(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            _fail(where, node, "is an autocast region that is still a node.")
        if ir.op_name(node) == "amp::scope":
            _fail(where, node, "is a precision scope that is still a node.")
        if ir.is_float_cast(node) and node.target is not torch.ops.aten.to.dtype:
            _fail(where, node, "is a cast in another spelling than aten.to.dtype.")


def _origin(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """A dtype can only have followed another where the trace says fp32 and the twin the low dtype."""
    for node in gm.graph.nodes:
        known = ir.origin(node)
        if known is None or not known.follows:
            continue
        if all(v is None or v.dtype is not torch.float32 for v in ir.tensor_outputs(node)):
            _fail(where, node, "is said to follow a dtype, but its value is not fp32.")


def _assigned(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    low_dtypes = ir.LOW_DTYPES
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        known = ir.decision(node)
        if known is None or not known.reason:
            _fail(where, node, "has no precision or no reason.")
            continue
        if known.rule is Rule.TABLE and known.mode is Mode.CAST and ctx.policy.autocast_device is None:
            expected = _expected(known.cls, policy_at(node, ctx.policy)) if not ir.returns_non_float(node) else None
            if expected is not None and known.precision != expected:
                _fail(where, node, f"is {known.precision}, but the level's table says {expected}.")
        if known.mode is not Mode.NATIVE and _written_and_cast(node, known):
            _fail(where, node, "would have an argument cast that it writes to: the write would be lost.")
        if known.precision in low_dtypes and known.cls is OpClass.FP32 and known.rule is Rule.TABLE:
            _fail(where, node, "is on the black list and low.")
        if known.precision in low_dtypes and known.mode is Mode.CAST and known.rule in (Rule.TABLE, Rule.FOLLOW_LIST):
            wide = next((why for _, a in ir.tensor_args(node) if (why := why_wide(a))), "")
            if wide and known.cls is not OpClass.LOW and policy_at(node, ctx.policy).keeps_wide:
                _fail(where, node, f"rounds {wide}, which only a white-listed op may do.")


def _written_and_cast(node: fx.Node, known: ir.Decision) -> bool:
    for name, arg in ir.tensor_args(node):
        if name in ir.mutated_args(node) and name not in known.keep_args and ir.is_eligible(ir.tensor_of(arg)):
            value = ir.tensor_of(arg)
            if known.mode is Mode.CAST or (value is not None and value.dtype != ir.dtype_of(arg)):
                return True
    return False


def _expected(cls: OpClass | None, policy: Any) -> torch.dtype | None:
    if cls is OpClass.LOW:
        return None  # the low dtype may be a region's own
    return torch.float32 if policy.level_row.treatment(cls) is Treatment.FP32 else None


def _cast(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    for node in gm.graph.nodes:
        known = ir.decision(node)
        if known is None:
            continue
        values = ir.tensor_outputs(node)
        if len(values) == len(known.out):
            for value, dtype in zip(values, known.out, strict=True):
                if value is not None and dtype is not None and value.dtype != dtype:
                    _fail(where, node, f"is decided to give {dtype}, its value says {value.dtype}.")
        if ir.is_higher_order(node) and known.rule in (Rule.TRANSPARENT, Rule.SEALED):
            _same_as_bodies(gm, node, where)
        if known.mode is Mode.CAST and node.op == "call_function" and not ir.is_higher_order(node):
            for name, arg in ir.tensor_args(node):
                value = ir.tensor_of(arg)
                free = name not in known.keep_args and ir.is_eligible(value)
                if free and value is not None and value.dtype != known.precision:
                    what = f"runs in {known.precision}, but its argument '{name}' ({arg.name}) is {value.dtype}."
                    _fail(where, node, what)


def _same_as_bodies(gm: fx.GraphModule, node: fx.Node, where: str) -> None:
    """What a higher-order node gives is what the graphs inside it give, where they give as many values."""
    if ir.op_name(node) == "higher_order::autograd_function_apply":
        return  # one of its graphs is a backward
    said = [None if v is None else v.dtype for v in ir.tensor_outputs(node)]
    for name, body in ir.subgraphs(gm, node):
        gives = ir.output_dtypes(body)
        if len(gives) == len(said) and any(
            a is not None and b is not None and a != b for a, b in zip(gives, said, strict=True)
        ):
            _fail(where, node, f"gives {said}, but its body '{name}' gives {gives}.")


def _functional(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """Only ATen, and the only writes are those that give inputs their new values at the end."""
    _captured(gm, ctx, where)
    for node in gm.graph.nodes:
        for name, arg in ir.tensor_args(node):
            if name in ir.mutated_args(node) and arg.op == "call_function" and ir.op_name(node) != "copy_":
                _fail(where, node, "writes in place in a graph that should be functional.")


def _eager(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """A fact about who runs the graph, which the graph itself does not show."""


def _folded(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    seen: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    frozen = ir.written_nodes(gm.graph)
    pinned = ir.output_nodes(gm.graph)
    for node in gm.graph.nodes:
        if not ir.is_cast(node):
            continue
        source = ir.cast_source(node)
        if source in frozen or node in frozen or node in pinned:
            continue
        twin = seen.setdefault((source, ir.cast_dtype(node)), node)
        if twin is not node:
            _fail(where, node, f"repeats the cast '{twin.name}'.")
        if ir.is_cast(source) and source not in frozen:
            origin = ir.tensor_of(ir.cast_source(source))
            # a cast to a complex dtype, which an fft makes of a real input, reads the dtype that it was traced with
            movable = ir.cast_source(source) not in frozen and not ir.cast_dtype(node).is_complex
            if movable and origin is not None and ir.lossless(origin.dtype, ir.cast_dtype(source)):
                _fail(where, node, f"casts '{source.name}', which is itself a lossless cast.")


def _results(gm: fx.GraphModule) -> list[Any]:
    last = next(iter(reversed(gm.graph.nodes)))
    return pytree.tree_leaves(last.args[0], is_leaf=lambda x: x is None)


def _step(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """Every input of a training step's graph has a role, and every output."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta.get(ir.ROLE), ir.Role):
            _fail(where, node, "is an input without a role.")
    results, roles = _results(gm), gm.meta[ir.ROLE]
    if len(results) != len(roles):
        _fail(where, next(iter(reversed(gm.graph.nodes))), f"has {len(results)} values for {len(roles)} roles.")


def _scaled(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """Every gradient is scaled and unscaled exactly once, and nothing else depends on the scale.

    Each path from the loss's tangent counts how often it meets the scale and ``amp::unscale``. What autograd puts
    between is linear in the tangent, so a gradient with one of each on all its paths is the gradient itself.
    """
    if not isinstance(gm.meta.get(ir.ROLE), tuple):
        return  # a graph inside the step's
    _step(gm, ctx, where)
    inputs = {n.meta[ir.ROLE].kind: n for n in gm.graph.nodes if n.op == "placeholder"}
    tangent, scale = inputs["tangent"], inputs["scale"]
    met: dict[fx.Node, set[tuple[int, int]]] = {tangent: {(0, 0)}}
    for node in gm.graph.nodes:
        if node.op != "call_function" or ir.op_name(node) == "amp::unscale":
            continue
        times = {pair for source in node.all_input_nodes for pair in met.get(source, ())}
        if scale in node.all_input_nodes and tangent in node.all_input_nodes and ir.op_name(node) == "mul":
            times = {(scaled + 1, unscaled) for scaled, unscaled in times}
        elif scale in node.all_input_nodes:
            if ir.op_name(node) != "reciprocal" or any(ir.op_name(u) != "amp::unscale" for u in node.users):
                _fail(where, node, "uses the scale for something else than scaling and unscaling.")
        elif tangent in node.all_input_nodes:
            _fail(where, node, "uses the loss's tangent before it is scaled.")
        elif (given := _unscaled_by(node)) is not None:
            times = {(scaled, unscaled + 1) for scaled, unscaled in met.get(given, ())}
            if not times and not _is_zero(given):
                _fail(where, given, "is a gradient that does not depend on the loss's: it would be unscaled only.")
            times = times or {(1, 1)}
        if times:
            met[node] = times
    for role, node in zip(gm.meta[ir.ROLE], _results(gm), strict=True):
        times = met.get(node, set())
        if role.kind == "gradient" and times != {(1, 1)}:
            told = ", ".join(f"{s} times scaled and {u} times unscaled" for s, u in sorted(times)) or "never scaled"
            _fail(where, node, f"is the gradient of input {role.index} and is {told} on its way from the loss.")
        if role.kind in ("mutation", "output") and times:
            _fail(where, node, f"is {role.kind} {role.index} and depends on the loss's tangent.")


def _unscaled_by(node: fx.Node) -> fx.Node | None:
    """The gradient that went into ``amp::unscale`` where this node comes out: ``unscale(…)[0][i]``."""
    if not ir.is_getitem(node):
        return None
    gradients, place = node.args
    if not isinstance(gradients, fx.Node) or not ir.is_getitem(gradients) or gradients.args[1] != 0:
        return None
    op = gradients.args[0]
    if not isinstance(op, fx.Node) or ir.op_name(op) != "amp::unscale":
        return None
    given = pytree.tree_leaves(op.args[0])[int(str(place))]
    assert isinstance(given, fx.Node)
    return given


def _is_zero(node: fx.Node) -> bool:
    name, args = ir.op_name(node), dict(ir.schema_args(node))
    filled = name.startswith("full") and bool(args.get("fill_value") == 0)
    return filled or name in ("zeros", "zeros_like", "new_zeros")


def _in_place(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """What is unscaled in place is each gradient, once, and no memory that anything else holds."""
    op = next((n for n in gm.graph.nodes if ir.op_name(n) == "amp::unscale_"), None)
    if op is None:
        return
    own = pytree.tree_leaves(op.args[0])
    classes = ir.alias_classes(gm.graph)
    gradients = [n for role, n in zip(gm.meta[ir.ROLE], _results(gm), strict=True) if role.kind == "gradient"]
    if own != gradients:
        _fail(where, op, f"unscales {own}, and the gradients are {gradients}.")
    others = [n for n in gm.graph.nodes if n.op == "placeholder" and n is not op]
    others += [n for role, n in zip(gm.meta[ir.ROLE], _results(gm), strict=True) if role.kind != "gradient"]
    held = [classes[n] for n in (*own, *others)]
    for node in own:
        if held.count(classes[node]) > 1:
            _fail(where, node, "is unscaled in place and shares its memory with another input or output.")


def _accumulated(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """Each sum is added to once, by a gradient times the inverse of the scale."""
    for node in gm.graph.nodes:
        if node.op != "placeholder" or node.meta[ir.ROLE].kind != "sum":
            continue
        writes = [u for u in node.users if "self" in ir.mutated_args(u) and u.args[0] is node]
        if len(writes) != 1 or ir.op_name(writes[0].args[2]) != "reciprocal":
            _fail(where, node, f"is a sum of gradients that {len(writes)} ops write to, or not unscaled.")


def _hoisted(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """No cast of a parameter is left in the graph that runs for every micro-batch."""
    frozen = ir.written_nodes(gm.graph) | ir.output_nodes(gm.graph)
    for node in gm.graph.nodes:
        if ir.is_float_cast(node) and node not in frozen and ir.cast_source(node).op == "placeholder":
            role = ir.cast_source(node).meta.get(ir.ROLE)
            if role is not None and role.kind == "primal" and role.index in gm.meta[ir.PARAMETER]:
                _fail(where, node, "casts a parameter once a micro-batch.")


def _viewed(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """No transposition undoes another, unless the caller gets it: an input is not returned in its place."""
    returned = ir.output_nodes(gm.graph)
    for node in gm.graph.nodes:
        inner = node.args[0] if node.target is torch.ops.aten.t.default else None
        if isinstance(inner, fx.Node) and inner.target is node.target and not (
            "recompute" in node.meta or node in returned
        ):
            _fail(where, node, f"transposes {inner.name} back.")


def _frozen(gm: fx.GraphModule, ctx: Any, where: str) -> None:
    """No rounding of a weight is left to run time, but for those that the low dtype cannot hold."""
    if ctx.weights is None or ir.STATE not in gm.meta:
        return  # or a graph inside another: its inputs are no weights, though some have their names
    outputs = {n for n in pytree.tree_leaves(next(iter(reversed(gm.graph.nodes))).args) if isinstance(n, fx.Node)}
    for node in ctx.weights.fixed(gm.graph):
        if ctx.weights[node].path in ctx.weights.kept:
            continue
        for user in _moved(node):
            if ir.is_float_cast(user) and ir.cast_dtype(user) in ir.LOW_DTYPES and not (
                user in outputs or any(reader in outputs for reader in _moved(user))
            ):
                _fail(where, user, f"rounds the weight {ctx.weights[node].path} each time.")


def _moved(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a weight, also behind ops that only move its values and take nothing else."""
    for user in node.users:
        yield user
        if moves(user) and len(user.all_input_nodes) == 1:
            yield from _moved(user)


CHECKS: Mapping[str, Callable[[fx.GraphModule, Any, str], None]] = {
    "captured": _captured,
    "normalized": _normalized,
    "origin": _origin,
    "assigned": _assigned,
    "cast": _cast,
    "frozen": _frozen,
    "functional": _functional,
    "eager": _eager,
    "accumulating": _eager,
    "step": _step,
    "scaled": _scaled,
    "hoisted": _hoisted,
    "in_place": _in_place,
    "fused": _folded,
    "lowered": _folded,
    "accumulated": _accumulated,
    "folded": _folded,
    "batched": _folded,
    "viewed": _viewed,
}


def _repropagate(gm: fx.GraphModule, after: str) -> None:
    """Run every op on fakes and compare dtypes with the meta, graph by graph."""
    for name, inner in ir.all_graphs(gm):
        _Repropagate(inner, f"{after}, graph {name}" if name else after).check()


class _Repropagate(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, after: str) -> None:
        super().__init__(gm)
        self.nodes = gm.graph.nodes
        self.after = after

    def check(self) -> None:
        nodes = list(self.nodes)
        inputs = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
        tensors = [v for n in nodes for v in ir.tensor_outputs(n) if v is not None]
        mode = next((m for v in tensors if (m := getattr(v, "fake_mode", None)) is not None), None)
        if mode is None:
            return
        clean = [ir.retype(v, v.dtype) if isinstance(v, torch.Tensor) else v for v in inputs]
        with mode, torch.no_grad():
            self.run(*clean)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            value = n.meta.get("val")
            return value if isinstance(value, torch.Tensor) else super().run_node(n)
        if n.op == "call_function" and getattr(n.target, "__name__", "") == "_set_grad_enabled":
            return None
        if ir.is_higher_order(n):
            return n.meta.get("val")  # its bodies are graphs of their own
        if n.op == "call_function" and ir.op_name(n) in ("item", "_local_scalar_dense"):
            return n.meta.get("val")  # a new symbol would be one that AOTAutograd misses in the graph's results
        result = super().run_node(n)
        if n.op == "call_function":
            for got, said in zip(
                pytree.tree_leaves(result), pytree.tree_leaves(n.meta.get("val")), strict=False
            ):
                if (
                    isinstance(got, torch.Tensor)
                    and isinstance(said, torch.Tensor)
                    and got.dtype != said.dtype
                ):
                    _fail(self.after, n, f"gives {got.dtype}, its meta says {said.dtype}.")
        return result
