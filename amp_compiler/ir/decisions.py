"""Constructors for the three kinds of decisions on a node, with the dtypes of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.torch_names import OpOverload, pytree, schema_of
from ..policy import Choice, Rule
from .meta import Decision, Mode

Causes = tuple[str, ...]


def cast(
    node: fx.Node, dtype: torch.dtype, reason: str, rule: Rule, choice: Choice | None = None,
    keep: tuple[str, ...] = (), causes: Causes = (),
) -> Decision:  # fmt: skip
    """Decide that every float argument is cast to ``dtype``, except those in ``keep`` and those that the op's row
    names."""
    row = choice.row if choice is not None else None
    explicit = names_dtype(node)
    follows = not explicit and dict(ir.schema_args(node)).get("dtype") is not None
    wide = row.fp32_results if row is not None else ()
    returns = schema_of(node.target).returns if wide and isinstance(node.target, OpOverload) else ()
    names = [result.name for result in returns]
    out = tuple(
        None if v is None
        else dtype if ir.is_eligible(v) and not explicit and not (names and names[place] in wide)
        else v.dtype
        for place, v in enumerate(ir.tensor_outputs(node))
    )  # fmt: skip
    kept = keep + (row.keep_args if row is not None else ())
    named = dtype if follows else None
    cls = choice.cls if choice else None
    return Decision(Mode.CAST, dtype, reason, rule, cls, out, kept, named, causes=causes)


def as_traced(
    node: fx.Node, reason: str, rule: Rule, choice: Choice | None = None, causes: Causes = ()
) -> Decision:
    """Decide that every float argument has the dtype that it was traced with."""
    out = traced(node)
    return Decision(Mode.TRACED, _first_float(out), reason, rule, choice.cls if choice else None, out, causes=causes)


def as_it_comes(
    node: fx.Node, reason: str, rule: Rule, choice: Choice | None = None, traced_out: bool = False, causes: Causes = ()
) -> Decision:
    """Decide that arguments stay as they are; torch's own type promotion applies."""
    changed = any(ir.dtype_of(a) != v.dtype for _, a in ir.tensor_args(node) if (v := ir.tensor_of(a)) is not None)
    out = promoted(node) if changed and not traced_out else traced(node)
    return Decision(Mode.NATIVE, _first_float(out), reason, rule, choice.cls if choice else None, out, causes=causes)


def selected(node: fx.Node) -> Decision:
    """Decide for a getitem: the precision of that output of its source."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    known = ir.decision(source)
    out = traced(node)
    if known is not None and isinstance(index, int) and len(known.out) > index and len(out) == 1:
        flat = known.out[index]
        out = (flat,) if flat is not None else out
    precision, causes = out[0] if out else None, (source.name,)
    return Decision(Mode.NATIVE, precision, f"an output of {source.name}", Rule.SELECTED, out=out, causes=causes)


def traced(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of a node's results as traced."""
    return tuple(None if v is None else v.dtype for v in ir.tensor_outputs(node))


def promoted(node: fx.Node) -> tuple[torch.dtype | None, ...]:
    """Return the output dtypes that torch gives for the arguments' new dtypes, by running the op on fakes."""

    def fake(arg: fx.Node) -> Any:
        value, dtype = arg.meta.get("val"), ir.dtype_of(arg)
        if isinstance(value, torch.Tensor) and dtype is not None and value.dtype != dtype:
            return ir.retype(value, dtype)
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


def widest(dtypes: Sequence[torch.dtype | None]) -> torch.dtype:
    """Return the only dtype among them; fp32 if they differ."""
    known = {d for d in dtypes if d is not None}
    return known.pop() if len(known) == 1 else torch.float32


def names_dtype(node: fx.Node) -> bool:
    """True if the author gave an op a ``dtype=`` of their own choice."""
    known = ir.origin(node)
    return dict(ir.schema_args(node)).get("dtype") is not None and not (known is not None and known.follows)


def _first_float(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    return next((d for d in dtypes if d is not None and d.is_floating_point), None)
