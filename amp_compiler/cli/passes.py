"""``amp-compiler passes``: list the pipelines in order, what each pass requires and ensures, and the facts."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from . import common as c

if TYPE_CHECKING:
    from ..rewrite.base import Fact, Pass

NAME = "passes"
HELP = "List the passes of each pipeline in order, with what each requires and ensures."
EXAMPLES = ("amp-compiler passes", "amp-compiler passes --json")
EPILOG = c.examples(EXAMPLES)
#: pipeline -> when it runs
PIPELINES = {
    "forward": "on the captured graph, before autodiff",
    "joint": "on forward and backward together, after autodiff",
    "inference": "on the functional graph if no gradient is needed",
    "step": "on a whole training step, including loss scaling",
    "weights": "on the graph that makes the low copies of weights, once per update",
    "prepare": "on an exported model that is converted, before its precision is decided",
    "convert": "after prepare, before the model is saved",
    "run_converted": "on a converted model, in memory",
}


def run(as_json: c.Json = False, quiet: c.Quiet = False, debug: c.Debug = False) -> None:
    from rich.table import Table

    from ..passes import order
    from ..rewrite import facts
    from ..rewrite.base import words

    built = order.build()
    lists = {name: getattr(built, name) for name in PIPELINES}
    if as_json:
        document = {name: [row(p) for p in pipe.passes] for name, pipe in lists.items()}
        c.write(json.dumps(document, indent=1), None)
        return
    out = c.console()
    for name, pipe in lists.items():
        table = Table(
            title=f"{name}: {PIPELINES[name]} (given: {names(pipe.given)})", title_justify="left", box=None,
            title_style="bold", pad_edge=False,
        )  # fmt: skip
        for column in ("", "pass", "requires", "ensures", "needs", "does"):
            table.add_column(column, overflow="fold")
        for number, step in enumerate(pipe.passes, 1):
            needs = ", ".join(condition.needs for condition in step.when)
            table.add_row(str(number), step.name, names(step.requires), names(step.ensures), needs, purpose(step))
        out.print(table)
        out.print()
    table = Table(title="facts: checked after each pass that ensures them", title_justify="left", box=None,
                  title_style="bold", pad_edge=False)  # fmt: skip
    for column in ("fact", "of", "says"):
        table.add_column(column, overflow="fold")
    for fact in facts.ALL.values():
        table.add_row(fact.name, words(fact.dialect), fact.promise)
    out.print(table)
    out.print()
    if not quiet:
        out.print("Skip one with --disable NAME (in Python: disable_passes=[...]). AMP_LOGS=passes shows times.")


def row(step: Pass) -> dict[str, object]:
    """Return a pass as plain values."""
    from ..rewrite.base import words

    return {
        "name": step.name, "dialect": words(step.dialect), "requires": [fact.name for fact in step.requires],
        "ensures": [fact.name for fact in step.ensures], "needs": [condition.needs for condition in step.when],
        "does": purpose(step),
    }  # fmt: skip


def names(facts: tuple[Fact, ...]) -> str:
    return ", ".join(fact.name for fact in facts)


def purpose(step: Pass) -> str:
    """Return the first sentence of the pass's own file, without its name."""
    text = (sys.modules[step.run.__module__].__doc__ or "").strip().split("\n\n")[0]
    _, _, does = " ".join(text.split()).partition(": ")
    return does.split(". ")[0].rstrip(".").replace("``", "`")
