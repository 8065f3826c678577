"""Count what a function does at run time: casts written to memory, ops dispatched, floating-point operations.

The counts come from ``torch.profiler``'s record of the ops that ran, so they hold for eager code,
``torch.autocast``, compiled graphs and the backward alike. (A ``TorchDispatchMode`` would make Dynamo
fall back to eager and so measure something else.) Ops that run on autograd's threads are included;
threads that the function starts by itself are not. What Dynamo does while it compiles is not counted,
so a first call counts like any other.

A kernel that Inductor generated isn't an op: casts fused into it write no memory of their own, and the
profiler sees neither casts nor products inside. The same is true of oneDNN, and of the blocks of a matrix
that our compiled `amp::cast_matmul` rounds as it packs them.
"""

from __future__ import annotations

import functools
import linecache
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ..common.torch_names import is_composite, profiler_config, schema_named
from ..kernels import registry
from ..kernels.lowering import STANDS_FOR
from .recorded_flops import event_flops

# Not exported by name in torch's stubs: the record of one op and of one tensor argument of it.
_Event = Any
_Tensor = Any

#: kernels that convert their inputs in scratch memory of their own
KERNELS = frozenset({"amp::cast_matmul", *STANDS_FOR})
_COMPILING = "(dynamo_timed)"  # how Dynamo ends the names of the phases of a compilation
_HANDED_ON = ("PythonDispatchMode", "PythonSubclass")  # the op itself did not run, Python ran it again below
_HALF_TO_FLOAT = ("aten::_softmax", "aten::_log_softmax")  # third argument: read half, write float
_FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
    | {"_unsafe_view", "_efficientzerotensor"}
)  # ops that allocate or re-label, in addition to those that the schema declares to be views


@dataclass(frozen=True, slots=True)
class CastCount:
    """The casts that ran: how many, how many bytes they wrote, and which ops asked for them.

    ``inside``: (number, bytes) of conversions to scratch memory inside our own kernels (on a CPU).
    They are not included in ``number`` and ``bytes``.

    ``by_op`` maps the outermost op around each cast to its number of casts: ``aten::linear`` for the casts
    of autocast on entry to a linear, ``aten::add`` for a sum of mixed dtypes, ``aten::_to_copy`` for a
    cast written in a graph. Two counts are equal if number and bytes are.
    """

    number: int
    bytes: int
    by_op: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    inside: tuple[int, int] = field(default=(0, 0), compare=False)


def count_casts(fn: Callable[[], object]) -> CastCount:
    """Call a function once and count its casts: writes of float values to memory in another float dtype.

    It does not matter which op writes. On a CPU all of them end in ``aten::copy_`` with two dtypes, including the one
    inside ``softmax(x, dtype=torch.float32)`` and the one that ``bf16 + fp32`` makes of its narrow operand. On CUDA,
    elementwise kernels convert in registers and write nothing extra; there ``copy_`` and softmax's half-to-float form
    are counted.

    These are not casts: copies that keep the dtype; conversions from or to integers, booleans and complex numbers;
    empty tensors; tensors on ``meta``; a Python number (a 0-dim fp64 tensor looks the same, so it is not counted
    either).

    Args:
        fn: A function without arguments.

    Returns:
        A count with ``number``, ``bytes``, ``by_op`` (the outermost op around each cast, and its number of casts) and
        ``inside``, the number and bytes of conversions to scratch memory inside this package's CPU kernels.

    Examples:
        >>> import torch
        >>> from amp_compiler import count_casts
        >>> x = torch.ones(4, 3)
        >>> count = count_casts(lambda: x.to(torch.bfloat16).float())
        >>> count.number, count.bytes
        (2, 72)
        >>> dict(count_casts(lambda: x + x.to(torch.bfloat16)).by_op)
        {'aten::to': 1, 'aten::add': 1}
    """
    return _casts(_record(fn))


def _conversions() -> tuple[int, int]:
    """Return (number, bytes) of whole tensors that the compiled kernels have converted so far, unseen by the profiler.
    """
    made: tuple[int, int] = torch.ops.amp_cpu.conversions() if registry.loaded() else (0, 0)
    return made


def count_ops(fn: Callable[[], object]) -> Mapping[str, int]:
    """Call ``fn`` once and count the ops that did work, by name, the most frequent first.

    Ops are counted at the level of a ``TorchDispatchMode``, below autograd and autocast: a composite op
    (``aten::linear``, ``aten::to``) counts as the ops that it calls, and one with a kernel of its own
    (``aten::addmm``, ``aten::_to_copy``) counts once, whatever it calls inside. Views and allocations
    do no work and are not counted.

    >>> import torch
    >>> x, w = torch.ones(4, 3), torch.ones(5, 3)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     dict(count_ops(lambda: torch.nn.functional.linear(x, w)))
    {'aten::_to_copy': 2, 'aten::mm': 1}
    """
    return _ops(_record(fn))


def count_flops(fn: Callable[[], object]) -> Mapping[torch.dtype, int]:
    """Call ``fn`` once and count the floating-point operations of its products, by the dtype of their operands.

    Counted are products, convolutions, attention, oneDNN's LSTM layers, their backward, and our own kernels for them:
    the dtype of our products is the one that they round their operands to, however the CPU adds up. Not counted are
    elementwise work, and products inside kernels that aren't ops (see above).

    >>> import torch
    >>> x, w = torch.ones(4, 3), torch.ones(5, 3)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     dict(count_flops(lambda: torch.nn.functional.linear(x, w)))
    {torch.bfloat16: 120}
    """
    return _flops(_record(fn))


@dataclass(frozen=True, slots=True)
class Profile:
    """What one call did: see ``count_casts``, ``count_ops``, ``count_flops``."""

    casts: CastCount
    ops: Mapping[str, int]
    flops: Mapping[torch.dtype, int]


def count_all(fn: Callable[[], object]) -> Profile:
    """Call ``fn`` once and count casts, ops and floating-point operations.

    >>> import torch
    >>> x = torch.ones(4, 3)
    >>> profile = count_all(lambda: x.to(torch.bfloat16) @ x.t().to(torch.bfloat16))
    >>> profile.casts.number, sum(profile.ops.values()), profile.flops[torch.bfloat16]
    (2, 3, 96)
    """
    record = _record(fn)
    return Profile(_casts(record), _ops(record), _flops(record))


@dataclass(frozen=True, slots=True)
class Product:
    """A product that ran. ``graph``: the number of the graph that it belongs to, or None. ``source`` and ``module``
    (its ``id``): where in the user's code it was called, if stacks were recorded."""

    op: str
    dtype: torch.dtype
    flops: int
    graph: int | None
    source: str = ""
    module: int = 0


def list_products(fn: Callable[[], object], *, with_stack: bool = False) -> list[Product]:
    """Call ``fn`` once and list the products that ran, in order; see ``count_flops``.

    >>> import torch
    >>> x = torch.ones(4, 3)
    >>> [(p.op, p.flops) for p in list_products(lambda: x @ x.t())]
    [('aten::mm', 96)]
    """
    return _products(_record(fn, with_stack=with_stack))


#: the beginning of the name of the range around a captured graph while products are recorded
GRAPH = "amp_compiler graph "


# ------------------------------------------------------------------------------------------------- the record


@dataclass(frozen=True, slots=True)
class _Record:
    """What the profiler recorded of one call.

    ``roots``: the tree of ops, outermost first. ``lists``: arguments of an op including lists of integers, which the
    tree omits, by the op's number. ``inside``: (number, bytes) of conversions inside compiled kernels.
    """

    roots: list[_Event]
    lists: Mapping[int, list[Any]]
    inside: tuple[int, int]


def _record(fn: Callable[[], object], *, with_stack: bool = False) -> _Record:
    profile: Any = functools.partial(torch.autograd.profiler.profile, with_stack=with_stack, with_modules=with_stack)
    before = _conversions()
    with profile(record_shapes=True, use_kineto=True, experimental_config=profiler_config()) as recorded:
        fn()
    number, written = (after - early for after, early in zip(_conversions(), before, strict=True))
    results = recorded.kineto_results
    if results is None:
        raise RuntimeError("torch.profiler recorded nothing: check that the function itself does not stop it.")
    lists = {event.correlation_id(): event.concrete_inputs() for event in results.events() if _has_lists(event.name())}
    return _Record(list(results.experimental_event_tree()), lists, (number, written))


def _has_lists(name: str) -> bool:
    return "convolution" in name


def _casts(record: _Record) -> CastCount:
    by_op: Counter[str] = Counter()
    total = 0
    inside: list[int] = []
    # The stack returns its last entry first, so ops are visited in the order in which they ran.
    stack: list[tuple[_Event, str | None]] = [(event, None) for event in reversed(record.roots)]
    while stack:
        event, outermost = stack.pop()
        name = event.name
        if name.endswith(_COMPILING):
            continue
        if outermost is None and "::" in name and not name.startswith(("autograd::", "torch::autograd")):
            outermost = name
        children = event.children
        written = 0 if _is_handed_on(children) else _cast_bytes(name, event)
        if written and outermost in KERNELS:
            inside.append(written)
            continue
        if written:
            by_op[outermost or name] += 1
            total += written
            continue  # a copy_ between devices does its cast in a copy_ inside: one cast
        stack.extend((child, outermost) for child in reversed(children))
    within = (record.inside[0] + len(inside), record.inside[1] + sum(inside))
    return CastCount(by_op.total(), total, MappingProxyType(dict(by_op)), within)


def _ops(record: _Record) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    stack = list(reversed(record.roots))
    while stack:
        event = stack.pop()
        if event.name.endswith(_COMPILING):
            continue
        children = event.children
        kind = _kind(event.name, event.overload_name)
        if kind == "kernel" and not _is_handed_on(children) and not _is_wrapper(event, children):
            counts[event.name] += 1
        elif kind != "free":
            stack.extend(reversed(children))
    return MappingProxyType(dict(counts.most_common()))


def _flops(record: _Record) -> Mapping[torch.dtype, int]:
    counts: Counter[torch.dtype] = Counter()
    for product in _products(record):
        counts[product.dtype] += product.flops
    return MappingProxyType(dict(sorted(counts.items(), key=lambda item: str(item[0]))))


def _products(record: _Record) -> list[Product]:
    products = []
    stack: list[tuple[_Event, int | None, str, int]] = [(event, None, "", 0) for event in reversed(record.roots)]
    while stack:
        event, graph, source, module = stack.pop()
        name = event.name
        if name.endswith(_COMPILING):
            continue
        if name.startswith(GRAPH):
            graph = int(name.removeprefix(GRAPH))
        caller = getattr(event.extra_fields, "caller", None)
        if caller is not None and graph is None:
            source, module = _user_line(caller) or source, _module_id(event) or module
        children = event.children
        found = None
        if "::" in name and not _is_handed_on(children) and not _is_wrapper(event, children):
            lists = record.lists.get(event.correlation_id, ())
            found = event_flops(name, getattr(event.extra_fields, "inputs", ()), lists)
        if found is None:
            stack.extend((child, graph, source, module) for child in reversed(children))
        else:  # what it calls inside is counted as its own work
            products.append(Product(name, *found, graph, source, module))
    return products


# the profiler shortens paths to what follows an entry of sys.path
_LIBRARY = ("<", "torch/", "amp_compiler/", os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))


def _user_line(caller: Any) -> str:
    """Return ``file.py:12 in forward: text of the line`` of a call, or "" if torch or this package made it."""
    file = caller.file_name
    if file.startswith(_LIBRARY):
        return ""
    text = linecache.getline(file, caller.line_number).strip()
    return f"{file}:{caller.line_number} in {caller.function_name}: {text}"


def _module_id(event: _Event) -> int:
    module = getattr(event.extra_fields, "module", None)
    return 0 if module is None else int(module.self_ptr)


def _cast_bytes(name: str, event: _Event) -> int:
    """Return the bytes that this op itself writes as a cast, or 0."""
    if name == "aten::copy_":
        to, source = event.extra_fields.inputs[:2]
        is_number = source.dtype == torch.float64 and not source.sizes
        if to.dtype != source.dtype and _is_float(to) and _is_float(source) and not is_number:
            return _bytes(to, to.dtype)
    elif name in _HALF_TO_FLOAT:
        source, _, half_to_float = event.extra_fields.inputs[:3]
        if half_to_float:
            return _bytes(source, torch.float32)
    return 0


def _is_float(tensor: _Tensor) -> bool:
    return bool(tensor.dtype.is_floating_point) and tensor.device.type != "meta"


def _bytes(tensor: _Tensor, dtype: torch.dtype) -> int:
    return int(math.prod(tensor.sizes)) * dtype.itemsize


def _is_handed_on(children: list[_Event]) -> bool:
    return any(child.name in _HANDED_ON for child in children)


def _is_wrapper(event: _Event, children: list[_Event]) -> bool:
    """True for autocast's wrapper of an op, which casts the arguments and calls the same op again."""
    return any(child.name == event.name and child.overload_name == event.overload_name for child in children)


@functools.cache
def _kind(name: str, overload: str) -> str:
    """Return ``"kernel"``, ``"free"`` (a view or an allocation) or ``"composite"`` (look at what it calls)."""
    schema = schema_named(name, overload)
    if schema is None:
        return "composite"  # not an op: an autograd node, a user's annotation
    full_name = f"{name}.{overload}" if overload else name
    if is_composite(full_name):
        return "composite"  # including those that are sometimes a view: to, reshape
    if name.partition("::")[2] in _FREE or any(_is_alias(result) for result in schema.returns):
        return "free"
    return "kernel"


def _is_alias(result: Any) -> bool:
    return result.alias_info is not None and not result.alias_info.is_write
