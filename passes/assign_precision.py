"""assign_precision: a precision and a reason on every node, in one walk from inputs to outputs.

It only annotates (``node.meta["amp"]``, a ``Decision``); no node and no traced value is changed.
For each node, the first rule that applies:

1. a cast that the author wrote: honoured as it stands
2. nothing floating-point in it, or it creates a tensor: kept
3. fp64 or complex among its inputs, or a sparse one: kept with the dtypes it was traced with
4. it writes to an argument: runs in that argument's dtype (a cast copy would lose the write)
5. a region, ``set_precision`` or module rule says a dtype: that dtype
6. everything in it is low already: kept
7. the policy's class of the op at the level (DESIGN §3), unless a constant does not fit the low dtype;
   a FOLLOW op that answers (a comparison, an argmax, a sort with its indices) takes the widest of its inputs
   at every level, because rounding them could only change the answer

With ``Policy.torch`` the lists and rules of torch.autocast replace 2 to 7.
Requires: normalized. Ensures: assigned. A second run changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from amp_compiler import graph as g
from amp_compiler.errors import BannedOpError
from amp_compiler.graph import Decision, Mode
from amp_compiler.ops import torch_lists
from amp_compiler.ops.row import OpClass
from amp_compiler.policy import Choice, dtype_name

from .base import Context, Dialect, Pass
from .normalize import Region

#: KEEP ops that hand on the values they get
MOVES = ("lift_fresh_copy", "lift_fresh", "detach_", "to", "_to_copy", "type_as")
#: names of float arguments that are values of the result, not settings of the computation (an eps, a momentum)
VALUE_ARGUMENTS = ("value", "fill_value", "posinf", "neginf", "nan", "threshold", "min_val", "max_val")
CASTS = ("to", "_to_copy", "type_as", "prims::convert_element_type")
#: in-place arithmetic that computes in the promoted dtype and rounds once into self
NATIVE_INPLACE = ("add_", "sub_", "mul_", "div_", "copy_")
#: higher-order ops whose body simply runs here: position of the body among the arguments
TRANSPARENT = {"tag_activation_checkpoint": 0, "wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
AUTOGRAD_FUNCTION = "autograd_function_apply"


def run(gm: fx.GraphModule, ctx: Context) -> bool:
    return _Assign(gm, ctx).run()


class _Assign:
    def __init__(self, gm: fx.GraphModule, ctx: Context, *, native: bool = False) -> None:
        self.gm, self.ctx, self.policy = gm, ctx, ctx.policy
        self.native = native  # a body that no policy governs (the backward of a custom function)
        self.carried: dict[fx.Node, float] = {}  # values that hold a constant which the low dtype cannot
        self.needs_fp32 = self.written_constants()

    def run(self, inputs: Sequence[torch.dtype | None] | None = None) -> bool:
        modified = False
        place = 0
        for node in self.gm.graph.nodes:
            old = g.decision(node)
            if node.op == "placeholder":
                known = inputs[place] if inputs is not None and place < len(inputs) else None
                out = (known,) if known is not None else _traced(node)
                new = Decision(Mode.NATIVE, None, "an input: keeps its dtype", out=out, rule="input")
                place += 1
            elif node.op == "get_attr":
                new = Decision(
                    Mode.NATIVE, None, "a constant: keeps its dtype", out=_traced(node), rule="input"
                )
            elif node.op == "call_function":
                new = self.decide(node)
            else:
                continue
            self.carry(node, new)
            if old != new:
                g.decide(node, new)
                modified = True
        return modified

    # ------------------------------------------------------------------------------------ one node

    def decide(self, node: fx.Node) -> Decision:
        name = g.op_name(node)
        if g.is_getitem(node):
            return _select(node)
        if g.is_higher_order(node):
            return self.higher_order(node)
        if name in CASTS:
            out = _traced(node)
            return Decision(Mode.NATIVE, out[0] if out else None, "a cast that the model's code asks for",
                            out=out, rule="author")  # fmt: skip
        floats = [(n, a) for n, a in g.tensor_args(node) if g.is_eligible(g.tensor_of(a))]
        if self.policy.level == "O0":
            return self.as_it_comes(node, "level O0: untouched", "level")
        if not floats:
            if any(v is not None and v.dtype.is_floating_point for v in g.tensor_outputs(node)):
                return self.as_it_comes(
                    node, "makes a tensor: keeps the dtype it was traced with", "creation"
                )
            return self.as_it_comes(node, "no floating-point input", "no_float")
        if self.native:
            return self.as_it_comes(
                node, "backward of a custom autograd function: takes what it gets", "native"
            )
        if self.policy.autocast_device is not None:
            return self.like_autocast(node, name, floats)
        return self.by_level(node, name, floats)

    def by_level(self, node: fx.Node, name: str, floats: list[tuple[str, fx.Node]]) -> Decision:
        choice = self.policy.classify(name)
        written = g.mutated_args(node)
        if written:
            return self.in_place(node, name, floats, written, choice)
        for _, arg in g.tensor_args(node):
            value = g.tensor_of(arg)
            if value is not None and (
                value.dtype in (torch.float64, torch.complex64, torch.complex128)
                or value.layout is not torch.strided
            ):
                what = "sparse" if value.layout is not torch.strided else dtype_name(value.dtype)
                return self.as_traced(node, f"has a {what} input, which is never touched", "untouched")
        if choice.cls is OpClass.KEEP:
            return self.as_traced(node, choice.reason, choice.rule, choice)
        if dict(g.schema_args(node)).get("dtype") is not None:
            return self.as_it_comes(
                node, "an explicit dtype= argument wins", "explicit_dtype", choice, traced_out=True
            )
        if choice.row is not None and choice.row.keep_args:
            floats = [(n, a) for n, a in floats if n not in choice.row.keep_args] or floats
        forced = self.forced_dtype(node)
        low = self.policy.low
        if forced is not None:
            dtype, reason, rule, whole = forced
            if choice.cls is OpClass.EXACT:
                return self.exact(node, floats, choice)
            if whole:
                return self.checked(node, name, dtype, reason, rule, choice, floats)
            low = dtype
        if all(a_val.dtype in g.LOW_DTYPES for _, a in floats if (a_val := g.tensor_of(a)) is not None):
            return self.as_traced(node, "low precision in the model as it was written", "already_low", choice)
        if node in self.needs_fp32:
            reason = f"the constant {self.needs_fp32[node]:g}, written into its result, does not fit {dtype_name(low)}"
            return self.cast(node, torch.float32, reason, "constant", choice)
        if choice.cls is OpClass.EXACT:
            return self.exact(node, floats, choice)
        named = g.all_args(node)
        condition = self.policy.condition_for(name, named)
        if condition is not None:
            reason = (
                f"conditional rule: {condition.op} with {condition.argument}={named[condition.argument]!r}"
            )
            return self.cast(node, torch.float32, reason, "conditional", choice)
        return self.by_class(node, name, floats, choice, low)

    def by_class(
        self, node: fx.Node, name: str, floats: list[tuple[str, fx.Node]], choice: Choice, low: torch.dtype
    ) -> Decision:
        level, cls, row = self.policy.level, choice.cls, choice.row
        flows = {g.dtype_of(a) for _, a in floats}
        answers = g.answers(node)
        if cls is OpClass.LOW or (cls is OpClass.FOLLOW and level in ("O2", "O3") and not answers):
            return self.checked(node, name, low, choice.reason, choice.rule, choice, floats)
        if cls is OpClass.FP32 and level == "O3" and choice.rule == "table":
            return self.checked(
                node, name, low, f"level O3: everything low ({choice.reason})", "level", choice, floats
            )
        if cls is OpClass.FP32:
            main = g.dtype_of(floats[0][1])
            if (
                level == "O2"
                and choice.rule == "table"
                and row is not None
                and row.fp32_inside
                and main == low
            ):
                reason = f"fp32 inside torch's kernel, low in and out: {choice.reason}"
                value = g.tensor_of(floats[0][1])
                on_cpu = value is not None and value.device.type == "cpu"
                kept = row.fp32_args_on_cpu if on_cpu else ()
                return self.cast(node, low, reason, "fp32_inside", choice, keep=kept)
            return self.cast(node, torch.float32, choice.reason, choice.rule, choice)
        if level == "O1" and not answers:
            return self.cast(
                node, torch.float32, f"level O1 keeps it in fp32: {choice.reason}", choice.rule, choice
            )
        if flows == {low}:
            return self.checked(
                node, name, low, f"all its inputs are low: {choice.reason}", choice.rule, choice, floats
            )
        source = next(a for _, a in floats if g.dtype_of(a) != low)
        return self.cast(node, torch.float32, f"follows {source.name}, which is fp32", choice.rule, choice)

    def exact(self, node: fx.Node, floats: list[tuple[str, fx.Node]], choice: Choice) -> Decision:
        dtype = _widest([g.dtype_of(a) for _, a in floats])
        if dtype in g.LOW_DTYPES:
            return self.checked(
                node,
                g.op_name(node),
                dtype,
                f"follows its input: {choice.reason}",
                choice.rule,
                choice,
                floats,
            )
        return self.cast(node, dtype, f"follows its input: {choice.reason}", choice.rule, choice)

    def checked(
        self, node: fx.Node, name: str, dtype: torch.dtype, reason: str, rule: str, choice: Choice,
        floats: list[tuple[str, fx.Node]],
    ) -> Decision:  # fmt: skip
        """A low precision, unless a constant among the arguments does not survive it."""
        if dtype in g.LOW_DTYPES:
            if choice.row is not None and choice.row.fp32_only:
                reason = "torch has no low-precision kernel for it: kept in fp32"
                return self.cast(node, torch.float32, reason, "fp32_only", choice)
            if choice.row is not None and choice.row.banned and dtype is torch.float16:
                raise BannedOpError(f"{name}: {choice.row.banned} At {g.source_line(node) or node.name}.")
            if g.has_integer_operand(node) and any(map(g.is_eligible, g.tensor_outputs(node))):
                reason = "computes with integers, which the low dtype may not hold: kept in fp32"
                return self.cast(node, torch.float32, reason, "constant", choice)
            misfit = self.misfit(node, dtype, floats)
            if misfit is not None:
                reason = f"the constant {misfit:g} is not representable in {dtype_name(dtype)}: kept in fp32"
                return self.cast(node, torch.float32, reason, "constant", choice)
        return self.cast(node, dtype, reason, rule, choice)

    def misfit(self, node: fx.Node, dtype: torch.dtype, floats: list[tuple[str, fx.Node]]) -> float | None:
        """A constant among the arguments, or carried by one of them, that ``dtype`` cannot hold."""
        for value in _scalars(node):
            if not _fits(value, dtype):
                return value
        for _, arg in floats:
            value = self.carried.get(arg, 0.0)
            if not _fits(value, dtype):
                return value
        return None

    def carry(self, node: fx.Node, known: Decision) -> None:
        """Note which values hold a constant that does not fit, so that no later op rounds it to inf or 0.

        Such constants start in constant tensors, creation ops and ops kept in fp32 for a scalar. They go through
        ops that move or select values; one that is too large also goes through arithmetic (a mask added to
        scores), one that is too small does not (the sum of an eps and something else is no eps).
        """
        low = self.policy.low
        if self.policy.autocast_device is not None or known.precision in g.LOW_DTYPES:
            return
        if node.op == "get_attr":
            held = _extremes(getattr(self.gm, str(node.target), None))
        elif node.op != "call_function":
            return
        elif known.rule in ("creation", "constant"):
            held = _scalars(node, creation=known.rule == "creation")
        else:
            held = []
        moves = known.cls is OpClass.EXACT or g.op_name(node) in MOVES
        arithmetic = known.cls is OpClass.FOLLOW
        for _, arg in g.tensor_args(node) if moves or arithmetic or known.rule == "constant" else ():
            value = self.carried.get(arg)
            if value is not None and (moves or abs(value) > 1):
                held.append(value)
        misfits = [v for v in held if not _fits(v, low)]
        if misfits:
            self.carried[node] = max(misfits, key=abs)

    def written_constants(self) -> dict[fx.Node, float]:
        """Nodes whose result is later written to, in place, with a constant that the low dtype cannot hold."""
        low, found = self.policy.low, {}
        writes = [n for n in self.gm.graph.nodes if n.op == "call_function" and g.mutated_args(n)]
        misfits = [(n, value) for n in writes if (value := self.misfit(n, low, [])) is not None]
        if misfits:
            classes = g.alias_classes(self.gm.graph)
            makers: dict[int, fx.Node] = {}
            for node in self.gm.graph.nodes:
                makers.setdefault(classes[node], node)
            found = {makers[classes[node]]: value for node, value in misfits}
        return found

    def in_place(
        self,
        node: fx.Node,
        name: str,
        floats: list[tuple[str, fx.Node]],
        written: frozenset[str],
        choice: Choice,
    ) -> Decision:
        targets = [g.dtype_of(a) for n, a in floats if n in written]
        if not targets or targets[0] is None:
            return self.as_traced(
                node, "writes in place to a tensor that is never touched", "in_place", choice
            )
        dtype = targets[0]
        reason = "writes in place: runs in the dtype of the tensor it writes to"
        if name in NATIVE_INPLACE:
            return self.as_it_comes(node, reason, "in_place", choice)
        return self.cast(node, dtype, reason, "in_place", choice, keep=tuple(written))

    # ------------------------------------------------------------------------- regions and modules

    def forced_dtype(self, node: fx.Node) -> tuple[torch.dtype, str, str, bool] | None:
        """(dtype, reason, rule, whole): what a region or a module rule says; whole is False when it only
        changes which low dtype the classes use."""
        region = node.meta.get(g.REGION)
        if isinstance(region, Region):
            if region.kind == "autocast" and region.dtype is not None:
                low = region.dtype if region.dtype in g.LOW_DTYPES else torch.float32
                return low, str(region), "region", low is torch.float32
            return region.dtype or torch.float32, str(region), "region", True
        paths = [path for path, _ in reversed(g.module_stack(node))]
        if "" not in paths:
            paths.append("")  # the model itself
        for path in paths:
            if path in self.ctx.module_precision:
                dtype = self.ctx.module_precision[path]
                return (
                    dtype,
                    f"set_precision({path or 'the model'}, {dtype_name(dtype)})",
                    "set_precision",
                    True,
                )
        if self.policy.modules:
            for path in paths:
                rule = self.policy.module_rule(path)
                if rule is not None:
                    return rule[1], f"module rule '{rule[0]}': {dtype_name(rule[1])}", "module_rule", True
        return None

    # ------------------------------------------------------------------------------ torch.autocast

    def like_autocast(self, node: fx.Node, name: str, floats: list[tuple[str, fx.Node]]) -> Decision:
        assert self.policy.autocast_device is not None
        lists = torch_lists.LISTS[self.policy.autocast_device]
        overload = g.overload_name(node)
        region = node.meta.get(g.REGION)
        low = self.policy.low
        forced = self.forced_dtype(node)
        if isinstance(region, Region) and region.kind == "autocast":
            if region.dtype is None:
                return self.as_it_comes(node, str(region), "region")
            low = region.dtype
        elif forced is not None and not g.mutated_args(node):
            return self.cast(node, forced[0], forced[1], forced[2])
        listed = self.policy.classify(name)
        if listed.rule in ("white_list", "black_list"):
            return self.cast(
                node, low if listed.cls is OpClass.LOW else torch.float32, listed.reason, listed.rule
            )
        if overload in lists["banned"]:
            raise BannedOpError(
                f"torch.autocast bans {name} on {self.policy.autocast_device}: use "
                f"binary_cross_entropy_with_logits. At {g.source_line(node) or node.name}."
            )
        if overload in lists["low"]:
            return self.cast(node, low, "torch.autocast casts it to low", "autocast")
        if overload in lists["fp32_set_dtype"]:
            if dict(g.schema_args(node)).get("dtype") is not None:
                return self.as_it_comes(
                    node, "an explicit dtype= argument wins", "explicit_dtype", traced_out=True
                )
            return self.cast(node, torch.float32, "torch.autocast runs it in fp32", "autocast")
        if overload in lists["fp32"]:
            return self.cast(node, torch.float32, "torch.autocast runs it in fp32", "autocast")
        if overload in lists["promote"]:
            widest = _widest([g.dtype_of(a) for _, a in floats])
            return self.cast(node, widest, "torch.autocast promotes it to its widest input", "autocast")
        return self.as_it_comes(
            node, "torch.autocast does not list it: torch's own type promotion", "autocast"
        )

    # -------------------------------------------------------------------------------- higher order

    def higher_order(self, node: fx.Node) -> Decision:
        name = g.op_name(node).removeprefix("higher_order::")
        bodies = [inner for _, inner in g.subgraphs(self.gm, node)]
        like_autocast = self.policy.autocast_device is not None
        if name in TRANSPARENT and bodies:
            given = node.args[TRANSPARENT[name] + 1 :]
            native = self.native or name == "wrap_with_autocast"
            _Assign(bodies[0], self.ctx, native=native).run([_flow(a) for a in given])
            return Decision(Mode.NATIVE, None, f"{name}: its body has precisions of its own",
                            out=_body_outputs(bodies[0]), rule="transparent")  # fmt: skip
        if name == AUTOGRAD_FUNCTION and len(bodies) == 2 and like_autocast and not self.native:
            forward, backward = bodies
            _Assign(forward, self.ctx).run([_flow(a) for a in node.args[2:]])
            output, saved = _output_values(forward)
            out = tuple(_flow(v) for v in pytree.tree_leaves(output))
            given_back = [*out, *(_flow(v) for v in pytree.tree_leaves(saved))]
            _Assign(backward, self.ctx, native=True).run(given_back)
            return Decision(Mode.NATIVE, None, "a custom autograd function: its forward as autocast would run it",
                            out=out, rule="transparent")  # fmt: skip
        if name == AUTOGRAD_FUNCTION:
            for body in bodies:
                _Assign(body, self.ctx, native=True).run()
            return self.as_traced(
                node, "a custom autograd function: forward and backward keep their dtypes", "opaque"
            )
        for body in bodies:
            _Assign(body, self.ctx, native=self.native).run()
        return self.as_traced(node, f"{name}: values keep their dtypes at its border, its bodies are rewritten",
                              "sealed")  # fmt: skip

    # ------------------------------------------------------------------------------------ outcomes

    def cast(
        self, node: fx.Node, dtype: torch.dtype, reason: str, rule: str, choice: Choice | None = None,
        keep: tuple[str, ...] = (),
    ) -> Decision:  # fmt: skip
        row = choice.row if choice is not None else None
        explicit = dict(g.schema_args(node)).get("dtype") is not None
        out = tuple(
            None if v is None else dtype if g.is_eligible(v) and not explicit else v.dtype
            for v in g.tensor_outputs(node)
        )
        # a module forced to fp32 casts what autocast would not touch, except arguments that never are
        kept = keep + (row.keep_args if row is not None else ())
        return Decision(Mode.CAST, dtype, reason, choice.cls if choice else None, out, kept, rule)

    def as_traced(self, node: fx.Node, reason: str, rule: str, choice: Choice | None = None) -> Decision:
        out = _traced(node)
        floats = [d for d in out if d is not None and d.is_floating_point]
        return Decision(Mode.TRACED, floats[0] if floats else None, reason, choice.cls if choice else None, out,
                        rule=rule)  # fmt: skip

    def as_it_comes(
        self, node: fx.Node, reason: str, rule: str, choice: Choice | None = None, traced_out: bool = False
    ) -> Decision:
        changed = any(
            g.dtype_of(a) != v.dtype for _, a in g.tensor_args(node) if (v := g.tensor_of(a)) is not None
        )
        out = _promoted(node) if changed and not traced_out else _traced(node)
        floats = [d for d in out if d is not None and d.is_floating_point]
        return Decision(Mode.NATIVE, floats[0] if floats else None, reason, choice.cls if choice else None, out,
                        rule=rule)  # fmt: skip


# ------------------------------------------------------------------------------------------- small facts


def _traced(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    return tuple(None if v is None else v.dtype for v in g.tensor_outputs(node))


def _flow(value: Any) -> torch.dtype | None:
    return g.dtype_of(value) if isinstance(value, fx.Node) else None


def _select(node: fx.Node) -> Decision:
    source, index = node.args
    assert isinstance(source, fx.Node)
    known = g.decision(source)
    out = _traced(node)
    if known is not None and isinstance(index, int) and len(known.out) > index and len(out) == 1:
        flat = known.out[index]
        out = (flat,) if flat is not None else out
    return Decision(
        Mode.NATIVE, out[0] if out else None, f"an output of {source.name}", out=out, rule="getitem"
    )


def _promoted(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    """The output dtypes that torch itself gives for the arguments' new dtypes: ask the op, on fakes."""

    def fake(arg: fx.Node) -> Any:
        value, dtype = arg.meta.get("val"), g.dtype_of(arg)
        if isinstance(value, torch.Tensor) and dtype is not None and value.dtype != dtype:
            return g.retype(value, dtype)
        return value

    args, kwargs = pytree.tree_map_only(fx.Node, fake, (node.args, node.kwargs))
    values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    mode = next((m for v in values if (m := getattr(v, "fake_mode", None)) is not None), None)
    assert callable(node.target)
    with torch.no_grad():
        if mode is None:
            result = node.target(*args, **kwargs)
        else:
            with mode:
                result = node.target(*args, **kwargs)
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in pytree.tree_leaves(result))


def _widest(dtypes: Sequence[torch.dtype | None]) -> torch.dtype:
    known = {d for d in dtypes if d is not None}
    return known.pop() if len(known) == 1 else torch.float32


def _scalars(node: fx.Node, creation: bool = False) -> list[float]:
    """The Python numbers that take part in an op's arithmetic or end up in its result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    kinds = {a.name: str(a.type) for a in node.target._schema.arguments}
    found = []
    for name, value in g.schema_args(node):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        kind = kinds.get(name, "")
        computes = kind in ("Tensor", "number", "Optional[number]") and not creation
        if computes or name in VALUE_ARGUMENTS or (creation and name == "s"):
            found.append(float(value))
    return found


def _extremes(value: Any) -> list[float]:
    """The largest and the smallest magnitude of a constant tensor, zeros, infs and NaNs left out."""
    if type(value) is not torch.Tensor or not value.dtype.is_floating_point or value.numel() == 0:
        return []
    finite = value.detach()[value.isfinite() & (value != 0)].abs()
    return [float(finite.max()), float(finite.min())] if finite.numel() else []


def _fits(value: float, dtype: torch.dtype) -> bool:
    """True unless rounding turns a finite value to inf, or to 0 from something else."""
    if value == 0 or not math.isfinite(value):
        return True
    rounded = float(torch.tensor(value, dtype=torch.float64).to(dtype))
    return rounded != 0 and math.isfinite(rounded)


def _output_values(gm: fx.GraphModule) -> Any:
    return next(n for n in gm.graph.nodes if n.op == "output").args[0]


def _body_outputs(gm: fx.GraphModule) -> tuple[torch.dtype | None, ...]:
    return tuple(_flow(v) for v in pytree.tree_leaves(_output_values(gm)))


PASS = Pass(
    "assign_precision", Dialect.PRE_DISPATCH, requires=("normalized",), ensures=("assigned",), run=run
)
