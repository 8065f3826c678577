"""mark_dtype_origin: find which dtypes and numbers in the graph the author chose, and which followed another dtype.

The graph was traced in fp32, its twin (``ctx.twin``) in low precision. The two are aligned by op, source line and
module; then, for each pair of nodes:

1. ``to(x, f32)`` in both           →  explicit: the author wants fp32 there, at every level
2. ``to(x, f32)`` and ``to(x, bf16)``  →  follows: the code wrote ``x.to(y.dtype)``; the same for ``dtype=`` arguments
3. ``-3.4e38`` and ``-65504``         →  the number is a limit of the dtype; both are recorded
4. ``torch.tensor(v, dtype=y.dtype)``, a constant of one value  →  ``full([...], v, dtype=f32)``, then as 2 and 3
5. a cast that only the twin has    →  added here, because ``if x.dtype != d: x = x.to(d)`` skipped it in fp32
6. a use of ``x.float()`` where the twin uses ``x``  →  corrected (in fp32 a tracer may confuse the two)
7. other code in one of them only (``if x.dtype == torch.float16: x = x.clamp(...)``)  →  what it touches stays fp32,
   and the user is told which line it is

It writes ``node.meta["amp_origin"]``. Code that only passes dtypes on needs no twin (``ctx.followed``): capture has
noted whose dtype each call names, and instead each op is run again on low fakes (``amp_compiler/ir/low_values.py``).
Where the code asks for no dtype there is neither, and the pass does nothing.
Requires: normalized. Ensures: origin. A second run changes nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.torch_names import pytree
from amp_compiler.ir import Origin
from amp_compiler.ir.low_values import LIFTS, asked, low_origins
from amp_compiler.policy import dtype_name
from amp_compiler.rewrite.base import Context, Dialect, Pass
from amp_compiler.rewrite.facts import NORMALIZED, ORIGIN

aten = torch.ops.aten
#: nodes of a trace that compute nothing
SILENT = ("_assert_tensor_metadata", "_enter_autocast", "_exit_autocast", "_set_grad_enabled", "scope")
Pairs = dict[fx.Node, fx.Node]
#: the name of code that a tracer generated has a different number in each trace
_GENERATED = re.compile(r"<eval_with_key>\.\d+")


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    if ctx.followed:
        modified = _spell_out(gm)
        return _write(low_origins(gm, ctx.policy.low)) or modified
    if ctx.twin is None:
        return False
    before = _structure(gm)
    modified = _Comparison(gm, ctx.twin, ctx).run()
    if _structure(gm) != before:
        gm.recompile()
    return modified


def _structure(gm: fx.GraphModule) -> list[Any]:
    return [(node, node.target, node.args, node.kwargs) for node in gm.graph.nodes]


def _write(found: Mapping[fx.Node, Origin]) -> bool:
    """Write what is known about nodes into their meta, and return whether any of it is new."""
    new = {node: origin for node, origin in found.items() if node.meta.get(ir.ORIGIN) != origin}
    for node, origin in new.items():
        node.meta[ir.ORIGIN] = origin
    return bool(new)


class _Comparison:
    """Compares one graph with its twin; graphs inside higher-order nodes are compared in the same way."""

    def __init__(self, gm: fx.GraphModule, twin: fx.GraphModule, ctx: Context) -> None:
        self.gm, self.twin, self.ctx = gm, twin, ctx
        self.low = ctx.policy.low
        self.ours: Pairs = {}  # node of the twin -> node of the graph
        self.found: dict[fx.Node, Origin] = {}
        self.added: Pairs = {}  # cast that only the twin has -> its copy in the graph
        self.by_name = {n.name: n for n in twin.graph.nodes}
        self.modified = False

    def run(self) -> bool:
        pairs, alone = self.align()
        pairs = {self.spelled_out(ours, theirs): theirs for ours, theirs in pairs.items()}
        self.ours = {theirs: ours for ours, theirs in pairs.items()}
        for ours, theirs in pairs.items():
            if ours.op == "call_function":
                self.rewire(ours, theirs)
        for ours, theirs in pairs.items():
            self.found[ours] = self.verdict(ours, theirs)
            if ir.is_higher_order(ours):
                self.bodies(ours, theirs)
        for node in alone:
            self.doubt(node, f"the model's code takes a different path in {dtype_name(self.low)}")
        for theirs in self.calls(self.twin):
            if theirs not in self.ours and not self.skipped_cast(theirs):
                self.guarded(theirs)
        self.modified |= _write(self.found)
        return self.modified

    # ----------------------------------------------------------------------------------------- alignment

    def align(self) -> tuple[Pairs, list[fx.Node]]:
        """Return pairs of nodes that are the same line's op in both graphs, and the nodes without a partner."""
        pairs: Pairs = {}
        for op in ("placeholder", "get_attr", "output"):
            mine, other = (self.of_kind(gm, op) for gm in (self.gm, self.twin))
            if len(mine) == len(other):
                pairs.update(zip(mine, other, strict=True))
            else:  # code for only one of the dtypes uses an additional parameter
                named = {n.name: n for n in other}
                pairs.update({n: named[n.name] for n in mine if n.name in named})
        mine, other = self.calls(self.gm), self.calls(self.twin)
        alone: list[fx.Node] = []
        keys = [_key(n) for n in mine], [_key(n) for n in other]
        if [name for name, *_ in keys[0]] == [name for name, *_ in keys[1]]:  # the same ops: nothing to search for
            return pairs | dict(zip(mine, other, strict=True)), []
        for left, right in _matching(*keys):
            if right is None:
                alone.append(mine[left])
            else:
                pairs[mine[left]] = other[right]
        return pairs, alone

    @staticmethod
    def of_kind(gm: fx.GraphModule, op: str) -> list[fx.Node]:
        return [n for n in gm.graph.nodes if n.op == op]

    def calls(self, gm: fx.GraphModule) -> list[fx.Node]:
        found = self.of_kind(gm, "call_function")
        return [n for n in found if getattr(n.target, "__name__", "").split(".")[0] not in SILENT]

    def bodies(self, ours: fx.Node, theirs: fx.Node) -> None:
        inner, other = ir.subgraphs(self.gm, ours), ir.subgraphs(self.twin, theirs)
        for (_, mine), (_, twin) in zip(inner, other, strict=False):
            if _Comparison(mine, twin, self.ctx).run():
                mine.recompile()
                self.modified = True

    def spelled_out(self, ours: fx.Node, theirs: fx.Node) -> fx.Node:
        """Return a constant of one value whose dtype followed another as a ``full`` node; other nodes unchanged."""
        mine, low = _lifted(self.gm, ours), _lifted(self.twin, theirs)
        if mine is None or low is None or mine.dtype is not torch.float32 or low.dtype is not self.low:
            return ours
        if not _is_of_one_value(mine) or not _is_of_one_value(low):
            return ours
        limit, of = _first(low), self.asked(ours, theirs)
        new = _as_full(self.gm, ours, mine)
        numbers = (("fill_value", limit),) if limit != float(mine.new_tensor(_first(mine)).to(self.low)) else ()
        new.meta[ir.ORIGIN] = Origin(True, self.low, numbers, of=of)
        self.modified = True
        return new

    # ------------------------------------------------------------------------------------------- verdict

    def verdict(self, ours: fx.Node, theirs: fx.Node) -> Origin:
        if ir.op_name(ours) == "full" and ir.op_name(theirs) in LIFTS and (known := ir.origin(ours)) is not None:
            return known
        mine, other = dict(ir.schema_args(ours)), dict(ir.schema_args(theirs))
        named, low = mine.get("dtype"), other.get("dtype")
        if ir.is_conversion(ours):
            named, low = _result(ours), _result(theirs)
        follows = named is torch.float32 and low is self.low
        numbers = tuple(
            (name, float(other[name])) for name, value in mine.items()
            if _is_number(value) and _is_number(other.get(name)) and value != other[name]
        )  # fmt: skip
        of = self.asked(ours, theirs) if follows else ""
        return Origin(
            follows, _result(theirs), numbers, of=of,
            numbers_of=self.asked(ours, theirs, ir.NUMBER_OF) if numbers else "",
        )  # fmt: skip

    def asked(self, ours: fx.Node, theirs: fx.Node, key: str = ir.DTYPE_OF) -> str:
        """Return the name of the node whose dtype a cast names: explicit in ``x.to(y)``, followed in the trace for
        ``x.to(y.dtype)``."""
        if key in ours.meta:
            return asked(ours, key)
        found = self.by_name.get(theirs.meta.get(key, ""))
        other = self.ours.get(found) if found is not None else None
        return other.name if other is not None else ""

    def doubt(self, node: fx.Node, why: str) -> None:
        """Keep a node in fp32 and tell the user, once per line."""
        known = self.found.get(node, Origin())
        if node.op != "call_function" or known.unsure or not any(ir.is_eligible(v) for v in ir.tensor_outputs(node)):
            return
        self.found[node] = replace(known, unsure=why)
        line = ir.source_line(node) or node.name
        if not any(note.startswith(f"{line}:") for note in self.ctx.notes):
            self.ctx.notes.append(f"{line}: stays in fp32, because {why}")

    def guarded(self, theirs: fx.Node) -> None:
        """Keep in fp32 the inputs of code that only the twin runs, since this graph lacks that code."""
        line = ir.source_line(theirs) or ir.op_name(theirs)
        for source in theirs.all_input_nodes:
            while self.skipped_cast(source) and source not in self.added:
                source = ir.cast_source(source)
            ours = self.counterpart(source)
            if ours is not None:
                self.doubt(ours, f"only in {dtype_name(self.low)}, the model's code does more with it ({line})")

    # -------------------------------------------------------------------------------------------- edges

    def rewire(self, ours: fx.Node, theirs: fx.Node) -> None:
        """Where both use the same value, but the twin before or after a cast, follow the twin."""
        mine = [n for n in pytree.tree_leaves((ours.args, ours.kwargs)) if isinstance(n, fx.Node)]
        other = [n for n in pytree.tree_leaves((theirs.args, theirs.kwargs)) if isinstance(n, fx.Node)]
        if len(mine) != len(other):
            return
        wanted = []
        for has, source in zip(mine, other, strict=True):
            want = self.counterpart(source, before=ours)
            wanted.append(want if want is not None and want is not has and _root(want) is _root(has) else has)
        if wanted != mine:
            values = iter(wanted)
            args, kwargs = pytree.tree_map_only(fx.Node, lambda _: next(values), (ours.args, ours.kwargs))
            ours.args, ours.kwargs = args, kwargs
            self.modified = True

    def counterpart(self, theirs: fx.Node, before: fx.Node | None = None) -> fx.Node | None:
        """Return the graph's node for one of the twin's; a cast that only the twin has is added, ``before`` a node."""
        found = self.ours.get(theirs) or self.added.get(theirs)
        if found is not None or before is None or not self.skipped_cast(theirs):
            return found
        source = self.counterpart(ir.cast_source(theirs), before)
        value = ir.tensor_of(source) if source is not None else None
        if source is None or value is None or value.dtype is not torch.float32:
            return source
        with self.gm.graph.inserting_before(before):
            new = self.gm.graph.create_node("call_function", aten.to.dtype, (source, torch.float32))
        new.meta.update({k: v for k, v in theirs.meta.items() if k not in ("val", ir.META, ir.ORIGIN)})
        new.meta["val"] = value
        new.meta[ir.ORIGIN] = Origin(_result(theirs) is self.low, _result(theirs), of=self.asked(new, theirs))
        self.added[theirs] = new
        self.modified = True
        return new

    def skipped_cast(self, theirs: fx.Node) -> bool:
        """True for a float cast in the twin that the graph does not have."""
        if theirs in self.ours or not ir.is_conversion(theirs) or not theirs.args:
            return False
        source = theirs.args[0]
        if not isinstance(source, fx.Node):
            return False
        return ir.is_eligible(ir.tensor_of(source)) and ir.is_eligible(ir.tensor_of(theirs))


# --------------------------------------------------------------------------------------------- constants


def _lifted(gm: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """Return the constant tensor of the code that a node stands for, or None."""
    return ir.constant(gm, node.args[0]) if node.op == "call_function" and ir.op_name(node) in LIFTS else None


def _is_of_one_value(constant: torch.Tensor) -> bool:
    return bool((constant == _first(constant)).all())


def _first(constant: torch.Tensor) -> float:
    return float(constant.flatten()[0]) if constant.numel() else 0.0


def _as_full(gm: fx.GraphModule, node: fx.Node, constant: torch.Tensor) -> fx.Node:
    """Replace a node that stands for an fp32 constant of one value by ``full``, which names its dtype."""
    with gm.graph.inserting_before(node):
        new = gm.graph.create_node(
            "call_function", aten.full.default, (list(constant.shape), _first(constant)),
            {"dtype": torch.float32, "device": constant.device, "pin_memory": False},
        )  # fmt: skip
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    return new


def _spell_out(gm: fx.GraphModule) -> bool:
    """Write the constants of one value whose dtype was that of another tensor as ``full``."""
    modified = False
    for node in list(gm.graph.nodes):
        constant = _lifted(gm, node) if ir.DTYPE_OF in node.meta else None
        if constant is not None and constant.dtype is torch.float32 and _is_of_one_value(constant):
            _as_full(gm, node, constant)
            modified = True
    if modified:
        gm.recompile()
    return modified


# ----------------------------------------------------------------------------------------------- helpers


def _key(node: fx.Node) -> tuple[str, str, str]:
    name = ir.op_name(node)
    name = "cast" if ir.is_conversion(node) else "full" if name in LIFTS else name
    name = "detach" if name == "detach_" else name  # the graph is normalized, the twin is not
    return name, _GENERATED.sub("", node.meta.get("stack_trace") or ""), ir.module_path(node)


def _matching(mine: Sequence[Any], other: Sequence[Any]) -> list[tuple[int, int | None]]:
    """Return, for each position of ``mine``, the position of its partner in ``other``, or None."""
    start = 0
    while start < min(len(mine), len(other)) and mine[start] == other[start]:
        start += 1
    found: list[tuple[int, int | None]] = [(i, i) for i in range(start)]
    if start == len(mine):
        return found
    partner: dict[int, int] = {}
    matcher = difflib.SequenceMatcher(None, mine[start:], other[start:], autojunk=False)
    for block in matcher.get_matching_blocks():
        partner.update({block.a + k: block.b + k for k in range(block.size)})
    return found + [(start + i, start + partner[i] if i in partner else None) for i in range(len(mine) - start)]


def _result(node: fx.Node) -> torch.dtype | None:
    value = ir.tensor_of(node)
    return None if value is None else value.dtype


def _root(node: fx.Node) -> fx.Node:
    """Return the value before any cast from fp32 to fp32."""
    while ir.is_conversion(node) and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        if _result(source) is not torch.float32 or _result(node) is not torch.float32:
            break
        node = source
    return node


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


PASS = Pass("mark_dtype_origin", Dialect.PRE_DISPATCH, requires=(NORMALIZED,), ensures=(ORIGIN,), run=run)
