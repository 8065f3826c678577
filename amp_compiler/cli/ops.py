"""``amp-compiler ops``: the op table, or the rows of some ops, each with its class and the reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from . import common as c

if TYPE_CHECKING:
    from ..policy.ops.row import Row

NAME = "ops"
HELP = "List the op table: the class of each op, and why."
EXAMPLES = ("amp-compiler ops softmax layer_norm", "amp-compiler ops --json")
EPILOG = c.examples(EXAMPLES)
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="ops by name, such as softmax; all if none is given")
]
_CLASSES = "\nLOW: white list. FP32: black list. FOLLOW: other arithmetic. EXACT: follows its input. KEEP: never cast."


def run(names: Names = None, as_json: c.Json = False, quiet: c.Quiet = False, debug: c.Debug = False) -> None:
    from rich.table import Table

    from ..policy.ops.table import ROWS

    rows = [(row.name, row) for row in ROWS] if not names else [(name, find(name)) for name in names]
    if as_json:
        document = [{"op": name, "class": row.cls.value, "reason": row.reason, "fp32_inside": row.fp32_inside}
                    for name, row in rows]  # fmt: skip
        c.write(json.dumps(document, indent=1), None)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("op", "class", "why"):
        table.add_column(column, overflow="fold")
    for name, row in rows:
        inside = "; torch's kernel computes in fp32 inside" if row.fp32_inside else ""
        table.add_row(name, row.cls.name, row.reason + inside)
    c.console().print(table)
    if not quiet:
        c.console().print(_CLASSES)


def find(name: str) -> Row:
    """The row of an op; an op that torch does not have is an error that suggests one."""
    from ..policy.ops.names import canonical, find_row
    from ..policy.ops.row import OpClass, Row

    op = canonical(name)
    return find_row(op) or Row(op, OpClass.KEEP, "not in the table, so it is never cast; a list can change that")
