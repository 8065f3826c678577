"""The verifier: checks what each pass promises on its result.

A failure names the pass, the node and the user's source line. ``deep`` also runs every op again on fake
tensors and compares dtypes (in tests and the CLI; ``AMP_VERIFY=deep`` switches it on everywhere): that
costs as much as lowering, so by default dtypes are checked by rule.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch import fx

from .. import ir
from .base import Context, Fact, Place
from .repropagate import repropagate

DEEP = "AMP_VERIFY"


def deep_by_default() -> bool:
    """True if ``AMP_VERIFY=deep`` is set; unset and empty are False."""
    asked = os.environ.get(DEEP, "")
    if asked not in ("", "deep"):
        raise ValueError(f"{DEEP}={asked!r} is not one of: deep.")
    return bool(asked)


def verify(
    gm: fx.GraphModule, facts: Iterable[Fact], ctx: Context, after: str, *, deep: bool | None = None, rerun: bool = True
) -> None:
    """Check that ``facts`` hold on ``gm`` and on the graphs inside it.

    ``deep``: also run the facts' deep checks and every op again; ``AMP_VERIFY`` decides if it is None. ``rerun``: False
    for a graph that has not changed since its ops were last run again.
    """
    deep = (ctx.deep or deep_by_default()) if deep is None else deep
    facts = tuple(facts)
    for name, inner in ir.all_graphs(gm):
        place = Place(after, name)
        _well_formed(inner, place)
        for fact in facts:
            if name and not fact.inside:
                continue
            fact.check(inner, ctx, place)
            if deep and fact.deep is not None:
                fact.deep(inner, ctx, place)
    if deep and rerun:
        repropagate(gm, after)


def _well_formed(gm: fx.GraphModule, place: Place) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        place.fail(f"the graph is not well formed: {error}")
