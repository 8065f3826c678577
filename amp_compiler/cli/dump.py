"""``amp-compiler dump``: show the rewritten graph, in a format of your choice."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import ArgumentError
from . import common as c

if TYPE_CHECKING:
    from ..inspect.render.diff import Difference
    from ..inspection import Inspection

NAME = "dump"
HELP = "Show a model's graph after its passes: every op, its precision and why, every cast."
FORMATS = ("text", "python", "json", "dot", "svg", "html")
EXAMPLES = (
    "amp-compiler dump model.py:make",
    "amp-compiler dump model.py:make --summary",
    "amp-compiler dump model.py:Net --input 8x16 --level O1 --format python",
    "amp-compiler dump model.py:make --graph joint --format html -o graph.html",
    "amp-compiler dump model.py:make --diff --against O3",
    "amp-compiler dump model.py:make --graph inference --after fold_casts --module 'blocks.0.*'",
)
EPILOG = c.examples(EXAMPLES)


def _formats(incomplete: str) -> list[str]:
    return [f for f in FORMATS if f.startswith(incomplete)]


def run(
    target: c.Target,
    inputs: c.Inputs = [],  # noqa: B006
    level: c.Level = "O2",
    dtype: c.Dtype = "",
    format: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", help="text (the default), python, json, dot, svg or html.", autocompletion=_formats,
            show_default=False,
        ),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", "-s", help="Print the report by module instead of every op.")
    ] = False,
    graph: c.Graph = "forward",
    after: c.After = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show what the passes changed.")] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="LEVEL|POLICY", help="With --diff: compare with this level or policy file.",
            show_default=False,
        ),
    ] = None,
    module: c.Module = None,
    policy: c.PolicyFile = None,
    low: c.WhiteList = [],  # noqa: B006
    fp32: c.BlackList = [],  # noqa: B006
    exclude: c.Exclude = [],  # noqa: B006
    device: c.Device = None,
    capture: c.Capture = "auto",
    disable: c.Disable = [],  # noqa: B006
    output: c.Output = None,
    as_json: c.Json = False,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    if as_json and format not in (None, "json"):
        raise ArgumentError(f"--json and --format {format} contradict each other: pass only one of them.")
    chosen = "json" if as_json else format or "text"
    if chosen not in FORMATS:
        raise ArgumentError(f"Unknown format {chosen!r}: choose one of {', '.join(FORMATS)}.")
    if summary and (chosen != "text" or diff or against is not None or module is not None):
        raise ArgumentError("--summary is the report of the whole model as text: omit --format, --diff, --against and "
                            "--module.")  # fmt: skip
    request = c.Request(target, inputs, level, dtype, policy, low, fp32, exclude, graph, capture, tuple(disable),
                        device)  # fmt: skip
    if diff or against is not None:
        if chosen not in ("text", "json"):
            raise ArgumentError("A difference is text or json; --format html steps through the passes instead.")
        _show_difference(_difference(request, after, against, module, quiet), chosen, output, quiet)
        return
    found = c.inspect(request, quiet).until(after)
    from ..inspect.render.text import plain

    with c.progress(quiet) as tell:
        tell(f"making {chosen}")
        if summary:
            lines = _summary(found, c.console().width if output is None else c.WIDTH)
            text = plain(lines) + "\n"
        elif chosen == "text" and output is None:
            lines = _text(found, module, c.console().width, quiet)
        else:
            text = render(found, chosen, module)
    if chosen == "text" and output is None:
        c.show(lines)
    else:
        c.write(text, output, quiet)


def render(found: Inspection, format: str, module: str | None = None) -> str:
    """Return an inspection in one of ``FORMATS``, as text."""
    from ..inspect.render import dot, python, text
    from ..inspect.render.json import graph_document
    from ..inspect.render.select import in_module

    view = found.last if module is None else in_module(found.last, module)
    title = f"{found.target}: {found.graph}, level {found.report.level}, {found.report.dtype}"
    if format == "text":
        return text.plain(_text(found, module, c.WIDTH, False)) + "\n"
    if format == "python":
        return python.source(view)
    if format == "json":
        document = graph_document(found.report, view, found.stages, target=found.target, graph=found.graph)
        return json.dumps(document, indent=1) + "\n"
    if format == "dot":
        return dot.dot(view, title)
    if format == "svg":
        return dot.svg(view, title)
    stages = found.stages
    if module is not None:
        stages = tuple(dataclasses.replace(s, view=in_module(s.view, module)) for s in stages)
    from ..inspect.render import html

    return html.page(stages, found.report, title=found.target, graph=found.graph)


def _summary(found: Inspection, width: int) -> list[Any]:
    from ..inspect.render import summary

    return summary.lines(found.report, width, hint=False)


def _text(found: Inspection, module: str | None, width: int, quiet: bool) -> list[Any]:
    from rich.text import Text

    from ..inspect.render import summary, text
    from ..inspect.render.select import in_module

    view = found.last if module is None else in_module(found.last, module)
    lines = text.table(view, width)
    return lines if quiet else [*lines, Text(), *summary.ending(found.report, width, found.graph)]


# ------------------------------------------------------------------------------------------ difference


def _difference(
    request: c.Request, after: str | None, against: str | None, module: str | None, quiet: bool
) -> Difference:
    from ..inspect.render.diff import difference
    from ..inspect.render.select import in_module

    def part(view: Any) -> Any:
        return view if module is None else in_module(view, module)

    found = c.inspect(request, quiet).until(after)
    here = f"{found.report.level}, {found.report.dtype}"
    if against is None:
        if after is not None:
            stages = [s for s in found.stages if s.graph == found.stages[-1].graph]
            before = stages[-2] if len(stages) > 1 else stages[-1]
            return difference(part(before.view), part(stages[-1].view), f"after {before.name}", f"after {after}")
        first = found.stages[0].view
        return difference(part(first), part(found.forward), "captured", here, (part(first), part(found.last)))
    other = c.inspect(_other(request, against), quiet).until(after)
    there = f"{other.report.level}, {other.report.dtype}"
    if there == here:
        here, there = f"{here} ({request.policy or 'no policy file'})", f"{there} ({against})"
    return difference(
        part(found.forward), part(other.forward), here, there, (part(found.last), part(other.last))
    )


def _other(request: c.Request, against: str) -> c.Request:
    from pathlib import Path

    from ..policy import check_level

    if against.endswith(".toml"):
        return dataclasses.replace(request, level="O2", policy=Path(against))
    return dataclasses.replace(request, level=check_level(against), policy=None)


def _show_difference(found: Difference, format: str, output: Any, quiet: bool) -> None:
    from ..inspect.render import diff
    from ..inspect.render.text import plain

    if format == "json":
        c.write(json.dumps(diff.document(found), indent=1) + "\n", output, quiet)
    elif output is not None:
        c.write(plain(diff.table(found, c.WIDTH)) + "\n", output, quiet)
    else:
        c.show(diff.table(found, c.console().width))
