"""``amp-compiler explain``: explain why ops have their precision, and what the casts around them cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..common.errors import ArgumentError
from . import common as c

NAME = "explain"
HELP = "Explain why ops have their precision: the chain of reasons, from the node to the rule, and the casts around it."
EXAMPLES = (
    "amp-compiler explain model.py:make --op softmax",
    "amp-compiler explain model.py:make --node linear --level O1",
    "amp-compiler explain model.py:make --module 'blocks.0.*' --graph inference",
)
EPILOG = c.examples(EXAMPLES)


def run(
    target: c.Target,
    node: Annotated[
        str | None, typer.Option("--node", "-n", metavar="NAME", help="A node by its name.", show_default=False)
    ] = None,
    op: Annotated[
        str | None, typer.Option("--op", metavar="OP", help="All nodes of an op: softmax.", show_default=False)
    ] = None,
    module: c.Module = None,
    inputs: c.Inputs = [],  # noqa: B006
    level: c.Level = "O2",
    dtype: c.Dtype = "",
    graph: c.Graph = "inference",
    policy: c.PolicyFile = None,
    low: c.WhiteList = [],  # noqa: B006
    fp32: c.BlackList = [],  # noqa: B006
    exclude: c.Exclude = [],  # noqa: B006
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="FILE", show_default=False,
                     help="Also state measured ranges. Its dtype is the default of --dtype."),
    ] = None,
    device: c.Device = None,
    capture: c.Capture = "auto",
    disable: c.Disable = [],  # noqa: B006
    as_json: c.Json = False,
    output: c.Output = None,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    if node is None and op is None and module is None:
        raise ArgumentError("There is nothing to explain: add --node NAME, --op OP or --module PATTERN.")
    if calibration is not None:
        from ..calibration.calibration import Calibration

        measured = Calibration.load(calibration)
        if not dtype and policy is None:  # its figures are about this one
            dtype = str(measured.dtype).removeprefix("torch.")
    request = c.Request(target, inputs, level, dtype, policy, low, fp32, exclude, graph, capture, tuple(disable),
                        device)  # fmt: skip
    found = c.inspect(request, quiet)
    from rich.text import Text

    from ..inspect.render import explain
    from ..inspect.render.text import plain

    view = found.forward
    runs = found.last if found.graph != "forward" else None
    nodes = explain.chosen(view, node, op, module, runs)
    told = [explain.explain(n, view, found.report.level, runs) for n in nodes]
    if calibration is not None:
        from ..calibration.measured import measured_by_name

        by_name = measured_by_name(measured, view, str(calibration))
        told = [replace(one, measured=by_name.get(one.node.origin or one.node.name, ())) for one in told]
    if as_json:
        c.write(json.dumps(explain.document(told), indent=1) + "\n", output, quiet)
        return
    lines: list[Text] = []
    for one in told:
        home = view if view.by_name.get(one.node.name) is one.node or runs is None else runs
        lines += [*explain.lines(one, home), Text()]
    if output is not None:
        c.write(plain(lines) + "\n", output, quiet)
    else:
        c.show(lines[:-1])
