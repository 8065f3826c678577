"""The vocabulary that capture, passes, verifier and report share: what one FX node says of precision.

Two dialects of FX pass through this module (DESIGN §2): pre-dispatch ATen, where precision is decided,
and functional ATen, which AOTAutograd gives back. A cast is spelled ``aten.to.dtype`` in the first and
``aten._to_copy`` in the second; ``is_cast`` knows both.
"""

from __future__ import annotations

import enum
import functools
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .ops.row import OpClass

aten = torch.ops.aten

DTYPE_NAMES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
LOW_DTYPES = (torch.float16, torch.bfloat16)
#: dtypes that a precision decision may change; fp64, complex and integers are never touched
ELIGIBLE = (torch.float32, *LOW_DTYPES)

META = "amp"  # node.meta key of the Decision
PARAMETER = "amp_parameter"  # node.meta key, True on an input that is a leaf and needs a gradient
NESTED = "amp_nested"  # node.meta key of the policy of a part that was compiled by itself (see nesting.py)
REGION = "amp_region"  # node.meta key of the precision region a node stands in (see passes/normalize.py)
DTYPE_OF = "amp_dtype_of"  # node.meta key: name of the node whose dtype this one names
NUMBER_OF = "amp_number_of"  # node.meta key: name of the node whose dtype's limit (torch.finfo) is a number here
STATE = "amp_state"  # gm.meta key: (output, input) positions of what the model keeps between calls
CONSTANT = "amp_constant"  # node.meta key: the value of an input that is a constant of the model's code
CLOSED = "amp_closed"  # gm.meta key: a body that no pass may look into
OUTPUT_DTYPES = "amp_output_dtypes"  # gm.meta key: what the model's outputs are, where tracing lost it
KERNEL = "amp_kernel"  # node.meta key: why an op of ours is in the place of ATen's
LOSS = "amp_loss"  # gm.meta key: the output that is the loss, in the graph of a training step
ROLE = "amp_role"  # node.meta key of the Role of an input of a joint graph; gm.meta key: those of its outputs
RESTORED = "amp_restored"  # gm.meta key: the Roles of outputs that a skipped update must leave as they were
WEIGHTS = "amp_weights"  # gm.meta key: the graph that makes the low copies of weights, once an update
PATH = "amp_path"  # node.meta key on an input that is a parameter or buffer: its path in the model
ORIGIN = "amp_origin"  # node.meta key of the Origin (see passes/mark_dtype_origin.py)
WIDE = "amp_wide"  # node.meta key on an input that counts as wide: what made it so (see wide.py)


#: composite ops that give back their input itself when there is nothing to do, without saying so in their schema
MAY_RETURN_INPUT = frozenset({
    "reshape", "contiguous", "flatten", "to", "type_as", "dropout", "feature_dropout", "alpha_dropout", "reshape_as",
    "unflatten", "ravel", "resolve_conj", "resolve_neg", "atleast_1d", "atleast_2d", "atleast_3d", "expand_as",
    "view_as", "narrow", "swapaxes", "swapdims", "moveaxis", "movedim", "broadcast_to", "pad", "real", "sum_to_size",
    "feature_alpha_dropout",
})  # fmt: skip
#: schema names of arguments whose values an op computes with (as opposed to indices, weights of a norm …)
OPERANDS = frozenset({"self", "other", "input", "tensors", "min", "max", "src", "source", "value", "values"})


class Mode(enum.Enum):
    """What the arguments of a node must look like."""

    CAST = "cast"  # every float argument is cast to the node's precision
    TRACED = "traced"  # every float argument has the dtype that it was traced with
    NATIVE = "native"  # arguments stay as they come; torch's own type promotion decides


@dataclass(frozen=True, slots=True)
class Decision:
    """The precision of one node and why. ``out`` holds the dtype of each output tensor (None: no float).

    ``named``: what the node's own dtype argument has to become. ``numbers``: new values of number arguments. ``wide``:
    for each output, what made it wide, or an empty text (see ``wide.py``).
    """

    mode: Mode
    precision: torch.dtype | None
    reason: str
    cls: OpClass | None = None
    out: tuple[torch.dtype | None, ...] = ()
    keep_args: tuple[str, ...] = ()
    rule: str = ""  # short machine-readable source of the decision: "table", "exclude", "black_list" …
    named: torch.dtype | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    wide: tuple[str, ...] = ()


def decision(node: fx.Node) -> Decision | None:
    """The decision on ``node``, or None before ``assign_precision`` ran."""
    found = node.meta.get(META)
    assert found is None or isinstance(found, Decision)
    return found


def decide(node: fx.Node, value: Decision) -> None:
    """Write ``value`` on ``node``."""
    node.meta[META] = value


def amend(node: fx.Node, **changes: Any) -> None:
    """Change some fields of the decision on ``node``."""
    node.meta[META] = replace(node.meta[META], **changes)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the twin trace tells of one node: the same code, run with every fp32 tensor in the low dtype.

    ``follows``: the dtype that the node names was another tensor's, so it is not the author's explicit choice.
    ``of``: the name of that tensor's node, if known. ``twin``: the dtype of its result in the twin. ``numbers``:
    (argument, value) of each number that is another one in the low dtype (``torch.finfo(x.dtype).min``);
    ``numbers_of``: the name of the node that was asked for its dtype there, if known. ``unsure``: why the node is to
    stay as it was traced, if so.
    """

    follows: bool = False
    twin: torch.dtype | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    unsure: str = ""
    of: str = ""
    numbers_of: str = ""


def origin(node: fx.Node) -> Origin | None:
    """The verdict of the twin trace on ``node``, or None where there was none."""
    found = node.meta.get(ORIGIN)
    assert found is None or isinstance(found, Origin)
    return found


@dataclass(frozen=True, slots=True)
class Role:
    """What an input or output of a training step's graph is for.

    Inputs: ``primal`` (an input of the forward, ``index`` its place), ``constant``, ``tangent`` (the loss's gradient),
    ``scale``, ``found`` (1 where an earlier micro-batch was not finite), ``saved`` (primal ``index`` before the
    update), ``low`` (the low copy of primal ``index``), ``sum`` (its gradients so far, added to in place).
    Outputs: ``mutation`` (the new value of primal ``index``), ``output`` (of the forward), ``gradient`` (of primal
    ``index``), ``found``.
    """

    kind: str
    index: int = 0
    name: str = ""


# ---------------------------------------------------------------------------------------------- values


def tensor_outputs(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The traced value of a node as a flat tuple; anything that is no tensor stands as None."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return (val,)
    if isinstance(val, (tuple, list)):
        return tuple(v if isinstance(v, torch.Tensor) else None for v in pytree.tree_leaves(val))
    return ()


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """The single tensor that a node stands for, or None."""
    val = node.meta.get("val")
    return val if isinstance(val, torch.Tensor) else None


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's value after rewriting: the decision's if there is one, else the traced one."""
    known = node.meta.get(META)
    if known is not None and len(known.out) == 1:
        out: torch.dtype | None = known.out[0]
        if out is not None:
            return out
    val = tensor_of(node)
    return None if val is None else val.dtype


def is_eligible(value: torch.Tensor | None) -> bool:
    """True for a dense tensor whose precision may be changed."""
    return value is not None and value.dtype in ELIGIBLE and value.layout is torch.strided


def constant(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor behind a node that stands for a constant of the model's code, or None."""
    if not isinstance(node, fx.Node):
        return None
    found = getattr(gm, str(node.target), None) if node.op == "get_attr" else node.meta.get(CONSTANT)
    return found if type(found) is torch.Tensor else None


def nbytes(value: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a (fake) tensor; a symbolic size counts with its hint."""
    total = (dtype or value.dtype).itemsize
    for size in value.shape:
        total *= concrete(size)
    return total


def concrete(size: Any) -> int:
    """An int for a possibly symbolic size: its hint, or 1 for an unbacked one."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    hint = getattr(node, "hint", None)
    return int(hint) if hint is not None else 1


def retype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor like ``value`` in another dtype."""
    mode = getattr(value, "fake_mode", None)
    if mode is None:
        return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device="meta")
    with mode, torch.no_grad():
        return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device)


def fake_mode(graph: fx.Graph) -> Any:
    """The mode that the values of a graph's nodes are fakes of."""
    values = (v for n in graph.nodes for v in tensor_outputs(n))
    return next(m for v in values if (m := getattr(v, "fake_mode", None)) is not None)


def call(graph: fx.Graph, mode: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A new node at the graph's insertion point, with the value that its op gives on fakes."""
    node = graph.call_function(target, args, kwargs)
    given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*given, **named)
    return node


def unscale_of(gm: fx.GraphModule) -> tuple[fx.Node, list[fx.Node], list[int]] | None:
    """(``amp::unscale``, the gradients that go in, the places of the outputs that come out of it) of a training step;
    None if a gradient is sparse or is rounded again behind it, as a low parameter's is."""
    op = next((n for n in gm.graph.nodes if op_name(n) == "amp::unscale"), None)
    last = next(iter(reversed(gm.graph.nodes)))
    results = pytree.tree_leaves(last.args[0])
    places = [i for i, role in enumerate(gm.meta[ROLE]) if role.kind == "gradient"]
    if op is None or not all(is_getitem(results[i]) for i in places):
        return None
    given = [n for n in pytree.tree_leaves(op.args[0]) if isinstance(n, fx.Node)]
    return None if any(n.meta["val"].layout is not torch.strided for n in given) else (op, given, places)


def add_input(graph: fx.Graph, name: str, role: Role, value: torch.Tensor) -> fx.Node:
    """A new last input of a joint graph. Its target begins as torch's partitioners know the inputs of a backward."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(f"tangents_{name}")
    node._rename(name)
    node.meta.update({"val": value, ROLE: role})
    return node


# ---------------------------------------------------------------------------------------------- casts


def is_cast(node: fx.Node) -> bool:
    """True for an explicit dtype conversion that does nothing else (no device, no layout change)."""
    if node.op != "call_function":
        return False
    if node.target is aten.to.dtype or node.target is torch.ops.prims.convert_element_type.default:
        return len(node.args) == 2 and not any(node.kwargs.values())
    return node.target is aten._to_copy.default and "dtype" in node.kwargs and _changes_only_dtype(node)


def _changes_only_dtype(node: fx.Node) -> bool:
    """``_to_copy`` as autograd writes it names the layout and device that the value has anyway."""
    source = node.args[0]
    before = tensor_of(source) if isinstance(source, fx.Node) else None
    for key, value in node.kwargs.items():
        if key == "dtype" or value is None or value is False:
            continue
        if before is None or (key, value) not in (("layout", before.layout), ("device", before.device)):
            return False
    return True


def cast_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that a cast node converts to."""
    dtype = node.kwargs["dtype"] if node.target is aten._to_copy.default else node.args[1]
    assert isinstance(dtype, torch.dtype)
    return dtype


def cast_source(node: fx.Node) -> fx.Node:
    """The node whose value a cast node converts."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def is_float_cast(node: fx.Node) -> bool:
    """True for a cast between two different float dtypes: what reports and benchmarks count."""
    if not is_cast(node):
        return False
    source, result = tensor_of(cast_source(node)), tensor_of(node)
    return (
        source is not None and result is not None and source.dtype != result.dtype
        and source.dtype.is_floating_point and result.dtype.is_floating_point
    )  # fmt: skip


def lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """True when every value of ``source`` is a value of ``target``, so that a cast changes nothing."""
    if source == target:
        return True
    exact: dict[torch.dtype, tuple[torch.dtype, ...]] = {
        torch.float16: (torch.float32, torch.float64),
        torch.bfloat16: (torch.float32, torch.float64),
        torch.float32: (torch.float64,),
        torch.bool: (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        torch.uint8: (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        torch.int8: (torch.bfloat16, torch.float16, torch.float32, torch.float64),
        torch.int16: (torch.float32, torch.float64),
        torch.int32: (torch.float64,),
    }
    return target in exact.get(source, ())


# ---------------------------------------------------------------------------------------- op names, args


def op_name(node: fx.Node) -> str:
    """A node's op as people write it: ``linear`` for ATen, ``namespace::name`` for others."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if callable(target):
        return getattr(target, "__name__", str(target))
    return str(target)


def overload_name(node: fx.Node) -> str:
    """``conv2d.padding`` or ``linear``: the name with its overload, as the dispatcher lists it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[1]
        return f"{name}.{target._schema.overload_name}" if target._schema.overload_name else name
    return op_name(node)


def is_higher_order(node: fx.Node) -> bool:
    """True for a node whose op takes graphs (cond, checkpoint, a custom autograd function …)."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def is_getitem(node: fx.Node) -> bool:
    """True for the selection of one output of a multi-output node."""
    return node.op == "call_function" and node.target is operator.getitem


def schema_args(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """(name, value) of each argument given, named by the op's schema (positions where it has none)."""
    if isinstance(node.target, torch._ops.OpOverload):
        names = [a.name for a in node.target._schema.arguments]
    else:
        names = [str(i) for i in range(len(node.args))]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def all_args(node: fx.Node) -> dict[str, Any]:
    """Every argument of a node by its schema name, those left at their default included."""
    named = dict(schema_args(node))
    if isinstance(node.target, torch._ops.OpOverload):
        for argument in node.target._schema.arguments:
            if argument.has_default_value():
                named.setdefault(argument.name, argument.default_value)
    return named


def tensor_args(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """(argument name, node) for each argument that is a tensor, lists included, in order."""
    for name, value in schema_args(node):
        if isinstance(value, fx.Node):
            if tensor_of(value) is not None:
                yield name, value
        elif isinstance(value, (list, tuple)):
            for item in pytree.tree_leaves(value):
                if isinstance(item, fx.Node) and tensor_of(item) is not None:
                    yield name, item


def mutated_args(node: fx.Node) -> frozenset[str]:
    """Names of the arguments that a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return frozenset()
    return frozenset(
        a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )


def alias_classes(graph: fx.Graph) -> dict[fx.Node, int]:
    """A number for each tensor node, equal for nodes that may share memory: views, in-place results, selections."""
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while (up := parent.setdefault(node, node)) is not node:
            parent[node] = parent.setdefault(up, up)
            node = up
        return node

    for node in graph.nodes:
        find(node)
        if is_getitem(node) and isinstance(node.args[0], fx.Node):
            parent[find(node)] = find(node.args[0])
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            named = dict(schema_args(node))
            may_return_input = op_name(node) in MAY_RETURN_INPUT
            for argument in node.target._schema.arguments:
                value = named.get(argument.name)
                shares = argument.alias_info is not None or (may_return_input and argument.name in ("self", "input"))
                if shares and isinstance(value, fx.Node):
                    parent[find(node)] = find(value)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(find(node), len(numbers)) for node in graph.nodes}


def written_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Every node whose memory some node of the graph writes to, views of it included."""
    written = {a for n in graph.nodes for name, a in tensor_args(n) if name in mutated_args(n)}
    written |= {a for n in graph.nodes if is_higher_order(n) for a in _written_by_bodies(n)}
    if not written:
        return set()
    classes = alias_classes(graph)
    touched = {classes[n] for n in written}
    return {n for n, number in classes.items() if number in touched}


def _written_by_bodies(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of a higher-order node that a graph inside it writes to."""
    owner = node.graph.owning_module
    for _, body in subgraphs(owner, node) if owner is not None else ():
        written = written_nodes(body.graph)
        yield from (given for place, given in operands(node, body) if place in written)


def operands(node: fx.Node, body: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(input of the body, argument of the higher-order node) for each input of a graph inside a node."""
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    given = [a for a in leaves if isinstance(a, fx.Node) and a.op != "get_attr"]
    yield from zip(places, given[max(len(given) - len(places), 0) :], strict=False)


def output_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Every node that shares memory with an output of the graph."""
    last = next(iter(reversed(graph.nodes)))
    results = {n for n in pytree.tree_leaves(last.args) if isinstance(n, fx.Node)}
    classes = alias_classes(graph)
    numbers = {classes[n] for n in results}
    return {n for n, number in classes.items() if number in numbers}


def output_dtypes(gm: fx.GraphModule) -> list[torch.dtype | None]:
    """The dtype of each output of a graph as it was traced; None for what is no tensor."""
    last = next(iter(reversed(gm.graph.nodes)))
    values = (tensor_of(n) if isinstance(n, fx.Node) else None for n in pytree.tree_leaves(last.args[0]))
    return [None if v is None else v.dtype for v in values]


def answers(node: fx.Node) -> bool:
    """True for an op that tells something of its inputs: a comparison, an argmax, the indices of a sort."""
    values = [v for v in tensor_outputs(node) if v is not None]
    return any(not v.dtype.is_floating_point and not v.dtype.is_complex for v in values)


def has_integer_operand(node: fx.Node) -> bool:
    """True for arithmetic with an integer tensor, whose values a low dtype may not hold."""
    for name, arg in tensor_args(node):
        value = tensor_of(arg)
        counts = value is not None and value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if name in OPERANDS and counts:
            return True
    return False


def map_tensor_args(node: fx.Node, change: Callable[[str, fx.Node], fx.Node]) -> None:
    """Replace each tensor argument by ``change(argument name, node)``, the last argument first.

    torch.autocast casts in that order too (a C++ call, whose arguments compilers evaluate from the right), and
    the order decides in which order autograd adds up gradients of a tensor that an op takes several times.
    """

    def visit(name: str, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return change(name, value) if tensor_of(value) is not None else value
        if isinstance(value, (list, tuple)):
            return pytree.tree_map_only(
                fx.Node, lambda n: change(name, n) if tensor_of(n) is not None else n, value
            )
        return value

    named = list(schema_args(node))
    changed = [visit(name, value) for name, value in reversed(named)][::-1]
    count = len(node.args)
    node.kwargs = dict(zip([name for name, _ in named[count:]], changed[count:], strict=True))
    node.args = tuple(changed[:count])


def subgraphs(gm: fx.GraphModule, node: fx.Node) -> list[tuple[str, fx.GraphModule]]:
    """The graphs that a higher-order node holds and that may be rewritten, with their names, in argument order."""
    found = []
    for value in pytree.tree_leaves((node.args, node.kwargs)):
        if isinstance(value, fx.Node) and value.op == "get_attr":
            inner = getattr(gm, str(value.target), None)
            if isinstance(inner, fx.GraphModule) and CLOSED not in inner.meta:
                found.append((str(value.target), inner))
    return found


def all_graphs(gm: fx.GraphModule, prefix: str = "") -> Iterator[tuple[str, fx.GraphModule]]:
    """``gm`` and every graph below it, each with its dotted name."""
    yield prefix, gm
    for node in gm.graph.nodes:
        if is_higher_order(node):
            for name, inner in subgraphs(gm, node):
                yield from all_graphs(inner, f"{prefix}.{name}" if prefix else name)


# ------------------------------------------------------------------------------------- where it came from


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """(module path, class) from the outermost module to the innermost; paths as ``named_modules`` has them."""
    found = node.meta.get("amp_module_stack")
    return found if found is not None else []


def module_chain(node: fx.Node) -> list[str]:
    """The paths of all modules around a node, outermost first, those included that are never called (a ModuleList)
    or that a graph break hid from the tracer."""
    found = [""]
    for path, _ in module_stack(node):
        parts = path.split(".") if path else []
        for end in range(1, len(parts) + 1):
            if (prefix := ".".join(parts[:end])) not in found:
                found.append(prefix)
    return found


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that a node came from ('' for the model itself)."""
    stack = module_stack(node)
    return stack[-1][0] if stack else ""


_TORCH = os.path.dirname(torch.__file__)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>\S+)\n\s*(?P<code>[^\n]*)')


def source_line(node: fx.Node) -> str:
    """``file.py:12 in forward: self.fc(x)`` for the innermost user frame, or ''."""
    return _innermost(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)  # asked for at each stage of a graph, and the ops of a line share their trace
def _innermost(trace: str) -> str:
    frames = _FRAME.findall(trace)
    if not frames:
        return ""
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    file, line, where, code = (own or frames)[-1]
    return f"{file}:{line} in {where}: {code.strip()}"


def inherit_origin(node: fx.Node, origin: fx.Node) -> None:
    """Give a new node the source line and module of the node that it was made for."""
    for key in ("stack_trace", "nn_module_stack", "amp_module_stack", "seq_nr", "from_node", "custom", REGION, NESTED):
        if key in origin.meta:
            node.meta[key] = origin.meta[key]


# ------------------------------------------------------------------------------------------------- text


def format_value(value: Any) -> str:
    """``bf16[8, 64]`` for a tensor, a tuple of them for several, '' for anything else."""
    if isinstance(value, torch.Tensor):
        name = DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{name}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(format_value(v) or "_" for v in value) + ")"
    return ""


def format_argument(value: Any) -> str:
    """An argument as a person would write it."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(format_argument(v) for v in value) + "]"
    return str(value)


def format_node(node: fx.Node) -> str:
    """One line of readable text for one node."""
    args = [format_argument(a) for a in node.args]
    args += [f"{k}={format_argument(v)}" for k, v in node.kwargs.items() if v is not None]
    if node.op == "output":
        values = pytree.tree_leaves(node.args[0])
        return "return " + ", ".join(format_argument(v) for v in values)
    shape = format_value(node.meta.get("val"))
    left = f"{node.name}: {shape}" if shape else node.name
    if node.op == "placeholder":
        return f"input {left}"
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    if is_cast(node):
        return (
            f"{left} = cast({cast_source(node).name}, {DTYPE_NAMES.get(cast_dtype(node), cast_dtype(node))})"
        )
    return f"{left} = {overload_name(node)}({', '.join(args)})"


def format_graph(gm: fx.GraphModule, *, reasons: bool = False) -> str:
    """The whole graph as text, one node a line, subgraphs indented below it."""
    lines = []
    for node in gm.graph.nodes:
        line = format_node(node)
        known = decision(node)
        if reasons and known is not None and node.op == "call_function" and not is_getitem(node):
            line = f"{line:<90}  # {known.reason}"
        lines.append(line)
    for name, inner in all_graphs(gm):
        if name:
            lines.append(f"graph {name}:")
            lines += ["    " + format_node(n) for n in inner.graph.nodes]
    return "\n".join(lines)
