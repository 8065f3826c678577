"""Ops by name, and their arguments by schema."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..common.torch_names import HigherOrderOperator, OpOverload, pytree, schema_of
from .values import tensor_of

#: schema names of arguments whose values an op computes with (as opposed to indices, weights of a norm …)
OPERANDS = frozenset({"self", "other", "input", "tensors", "min", "max", "src", "source", "value", "values"})


@dataclass(frozen=True, slots=True)
class Signature:
    """What an op's schema says. ``aliased``: arguments that a result may share memory with, or that are written to."""

    name: str
    overload: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    aliased: tuple[str, ...]


@functools.cache  # every pass and every check needs it for every node
def signature(op: OpOverload) -> Signature:
    """Return what the schema of an op says, read once."""
    schema = schema_of(op)
    namespace, name = schema.name.split("::")
    written = (a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return Signature(
        name if namespace == "aten" else f"{namespace}::{name}",
        f"{name}.{schema.overload_name}" if schema.overload_name else name,
        tuple(a.name for a in schema.arguments),
        frozenset(written) if schema.is_mutable else frozenset(),
        tuple(a.name for a in schema.arguments if a.alias_info is not None),
    )


def op_name(node: fx.Node) -> str:
    """Return a node's op as people write it: ``linear`` for ATen, ``namespace::name`` for others."""
    target = node.target
    if isinstance(target, OpOverload):
        return signature(target).name
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if callable(target):
        return getattr(target, "__name__", str(target))
    return str(target)


def overload_name(node: fx.Node) -> str:
    """Return the name with its overload, as the dispatcher lists it: ``conv2d.padding`` or ``linear``."""
    return signature(node.target).overload if isinstance(node.target, OpOverload) else op_name(node)


def is_higher_order(node: fx.Node) -> bool:
    """True for a node whose op takes graphs (cond, checkpoint, a custom autograd function …)."""
    return node.op == "call_function" and isinstance(node.target, HigherOrderOperator)


def is_getitem(node: fx.Node) -> bool:
    """True for the selection of one output of a multi-output node."""
    return node.op == "call_function" and node.target is operator.getitem


def schema_args(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each argument given, named by the op's schema (by position if it has none)."""
    of_op = isinstance(node.target, OpOverload)
    names = signature(node.target).arguments if of_op else tuple(map(str, range(len(node.args))))
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def all_args(node: fx.Node) -> dict[str, Any]:
    """Return every argument of a node by its schema name, including those left at their default."""
    named = dict(schema_args(node))
    if isinstance(node.target, OpOverload):
        for argument in schema_of(node.target).arguments:
            if argument.has_default_value():
                named.setdefault(argument.name, argument.default_value)
    return named


def tensor_args(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Yield (argument name, node) for each argument that is a tensor, including those in lists, in order."""
    for name, value in schema_args(node):
        if isinstance(value, fx.Node):
            if tensor_of(value) is not None:
                yield name, value
        elif isinstance(value, (list, tuple)):
            for item in pytree.tree_leaves(value):
                if isinstance(item, fx.Node) and tensor_of(item) is not None:
                    yield name, item


def mutated_args(node: fx.Node) -> frozenset[str]:
    """Return the names of the arguments that a node writes to."""
    return signature(node.target).written if isinstance(node.target, OpOverload) else frozenset()


def has_integer_operand(node: fx.Node) -> bool:
    """True for arithmetic with an integer tensor, whose values low precision may not represent."""
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
