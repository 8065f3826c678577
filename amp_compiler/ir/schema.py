"""Ops by name, and their arguments by schema."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ..common.torch_names import HigherOrderOperator, OpOverload, pytree, schema_of
from .values import tensor_of

#: schema names of arguments whose values an op computes with (as opposed to indices, weights of a norm …)
OPERANDS = frozenset({"self", "other", "input", "tensors", "min", "max", "src", "source", "value", "values"})


def op_name(node: fx.Node) -> str:
    """A node's op as people write it: ``linear`` for ATen, ``namespace::name`` for others."""
    target = node.target
    if isinstance(target, OpOverload):
        namespace, name = schema_of(target).name.split("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if callable(target):
        return getattr(target, "__name__", str(target))
    return str(target)


def overload_name(node: fx.Node) -> str:
    """``conv2d.padding`` or ``linear``: the name with its overload, as the dispatcher lists it."""
    target = node.target
    if isinstance(target, OpOverload):
        name = schema_of(target).name.split("::")[1]
        return f"{name}.{schema_of(target).overload_name}" if schema_of(target).overload_name else name
    return op_name(node)


def is_higher_order(node: fx.Node) -> bool:
    """True for a node whose op takes graphs (cond, checkpoint, a custom autograd function …)."""
    return node.op == "call_function" and isinstance(node.target, HigherOrderOperator)


def is_getitem(node: fx.Node) -> bool:
    """True for the selection of one output of a multi-output node."""
    return node.op == "call_function" and node.target is operator.getitem


def schema_args(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """(name, value) of each argument given, named by the op's schema (positions where it has none)."""
    if isinstance(node.target, OpOverload):
        names = [a.name for a in schema_of(node.target).arguments]
    else:
        names = [str(i) for i in range(len(node.args))]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def all_args(node: fx.Node) -> dict[str, Any]:
    """Every argument of a node by its schema name, those left at their default included."""
    named = dict(schema_args(node))
    if isinstance(node.target, OpOverload):
        for argument in schema_of(node.target).arguments:
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
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return frozenset()
    return frozenset(
        a.name for a in schema_of(node.target).arguments if a.alias_info is not None and a.alias_info.is_write
    )


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
