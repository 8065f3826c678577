"""Turn what a user writes (``"linear"``, ``F.linear``, ``torch.ops.aten.linear``) into the name of a table row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...common.errors import UnknownOpError
from ...common.messages import suggestion
from ...common.torch_names import OpOverload, OpOverloadPacket, schema_of, schemas_of
from .row import Row
from .table import ALIASES, ROWS

OpLike = str | Callable[..., Any]

#: torch functions whose name differs from the ATen op that they run
FUNCTION_NAMES = {
    "cross_entropy": "cross_entropy_loss",
    "multi_head_attention_forward": "scaled_dot_product_attention",
    "softmin": "softmax",
    "__matmul__": "matmul",
    "truediv": "div",
}
#: other names of one op: listing one of them lists all of them
EQUIVALENT = {
    "nll_loss": "nll_loss_nd", "nll_loss2d": "nll_loss_nd",
    "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub",
    "_softmax": "softmax", "special_softmax": "softmax", "_log_softmax": "log_softmax",
    "special_log_softmax": "log_softmax", "clip": "clamp", "absolute": "abs", "negative": "neg",
    "concat": "cat", "concatenate": "cat", "arccos": "acos", "arcsin": "asin", "arctan": "atan",
    "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "native_batch_norm": "batch_norm",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "native_dropout": "dropout", "special_expit": "sigmoid",
}  # fmt: skip


@functools.cache
def rows_by_name() -> dict[str, Row]:
    """Return the table as a mapping, including aliases (functional and backward forms)."""
    rows = {row.name: row for row in ROWS}
    rows.update({alias: rows[name] for alias, name in ALIASES.items()})
    return rows


def find_row(name: str) -> Row | None:
    """Return the row that governs an op; an in-place op (``relu_``) has its plain op's row."""
    rows = rows_by_name()
    found = rows.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = rows.get(name[:-1])
    return found


def canonical(op: OpLike) -> str:
    """Return the name under which lists and policies keep an op.

    >>> import torch
    >>> canonical("aten.linear"), canonical(torch.nn.functional.linear), canonical(torch.ops.aten.linear)
    ('linear', 'linear', 'linear')
    """
    if type(op).__name__ == "CustomOpDef":  # what torch.library.custom_op returns
        op = getattr(op, "_opoverload")  # noqa: B009 (no public name leads to it)
    if isinstance(op, OpOverload):
        return _known(_from_qualified(schema_of(op).name), op)
    if isinstance(op, OpOverloadPacket):
        return _known(_from_qualified(op._qualified_op_name), op)
    if isinstance(op, str):
        return _known(_from_qualified(op), op)
    name = getattr(op, "__name__", None)
    if not callable(op) or name is None:
        raise UnknownOpError(
            f"{op!r} is not an op: pass a name such as 'linear', a function such as "
            "torch.nn.functional.linear, or torch.ops.aten.linear."
        )
    return _known(FUNCTION_NAMES.get(name, name), op)


def _from_qualified(text: str) -> str:
    name = text.strip().removeprefix("torch.ops.").replace("::", ".")
    if name.startswith("aten."):
        return name.removeprefix("aten.").split(".")[0]
    namespace, dot, rest = name.partition(".")
    if dot and _exists(namespace, rest.split(".")[0]):
        return f"{namespace}::{rest.split('.')[0]}"
    if dot and _exists("aten", namespace):  # "linear.default"
        return namespace
    return name


def _exists(namespace: str, name: str) -> bool:
    return bool(schemas_of(f"{namespace}::{name}"))


def _known(name: str, given: OpLike) -> str:
    name = FUNCTION_NAMES.get(name, name) if not _exists("aten", name) else name
    row = find_row(name)
    if "::" in name or row is not None or _exists("aten", name):
        plain = row.name if row is not None and row.name + "_" == name else name
        return EQUIVALENT.get(plain, plain)
    rule = (
        "Ops are named as in torch.ops.aten; "
        "a custom op is 'namespace::name' and must be registered before the policy is created."
    )
    raise UnknownOpError(f"Unknown op {given!r}.", hint=f"{suggestion(name, rows_by_name(), most=3)} {rule}".strip())
