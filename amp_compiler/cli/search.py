"""``amp-compiler search``: find the policy with the most low-precision work that keeps a metric."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import ArgumentError
from ..common.files import check_writable
from . import common as c
from .data import Data, Kinds, evaluate_function, load_batches, relative_error

if TYPE_CHECKING:
    from ..calibration.result import Search

NAME = "search"
HELP = "Find the policy that runs the most work in low precision and keeps a metric within a tolerance of fp32."
EXAMPLES = (
    "amp-compiler search model.py:make --evaluate model.py:error --minimize --tolerance 0.01 -o policy.toml",
    "amp-compiler search model.py:make --data model.py:batches --tolerance 0.01 --journal search.jsonl",
)
EPILOG = c.examples(EXAMPLES)
#: the level to start from; that of the other commands, O2, stands for it
START = "O3"


def run(
    target: c.Target,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="How much worse than fp32 the metric may be, in its own unit.")
    ],
    evaluate: Annotated[
        str,
        typer.Option(
            "--evaluate", metavar="FILE.py:FUNCTION", show_default=False,
            help="A function that takes the compiled model and returns the metric. Without it, the metric is the error "
            "of the outputs on --data, as a share of the fp32 outputs.",
        ),
    ] = "",
    data: Data = "",
    maximize: Annotated[bool, typer.Option("--maximize/--minimize", help="Whether a larger metric is better.")] = True,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", metavar="FILE", show_default=False,
            help="A calibration of the model, which puts its ops in order. With --data it is measured.",
        ),
    ] = None,
    level: c.Level = START,
    dtype: Annotated[str, typer.Option("--dtype", "-d", help="float16 or bfloat16.")] = "float16",
    objective: Annotated[
        str, typer.Option("--objective", help="What counts as work: flops, bytes, or the time on a device (a100_80).")
    ] = "flops",
    budget: Annotated[int, typer.Option("--budget", help="How often the metric may be evaluated.")] = 50,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal", metavar="FILE", show_default=False,
            help="Write every evaluation to this file at once; a search that is started again with it continues.",
        ),
    ] = None,
    output: c.Output = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", show_default=False, help="Draw all trials and the Pareto front."),
    ] = None,
    inputs: c.Inputs = [],  # noqa: B006
    as_json: c.Json = False,
    quiet: c.Quiet = False,
    debug: c.Debug = False,
) -> None:
    if not evaluate and not data:
        raise ArgumentError("There is no metric: add --evaluate file.py:function, or --data to compare with fp32.")
    for path in (output, plot, journal):
        if path is not None:
            check_writable(path)
    with c.progress(quiet) as tell, contextlib.ExitStack() as stack:
        tell("loading torch")
        from ..calibration.calibration import Calibration
        from ..search import search_policy

        stack.enter_context(c.hushed())
        model, example = load_model(target, inputs, tell)
        stack.enter_context(c.eval_mode(model))
        known = Calibration.load(calibration) if calibration is not None else None
        batches = load_batches(data) if data else []
        metric = evaluate_function(evaluate) if evaluate else relative_error(model, batches, example)
        if batches and known is None:
            known = measured(model, batches, dtype, tell, example)
        tell("searching")
        try:
            found = search_policy(
                model, telling(metric, tell), tolerance=tolerance, maximize=maximize and bool(evaluate), dtype=dtype,
                level=level, calibration=known, objective=objective, budget=budget, journal=journal,
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = f"every evaluation so far is in {journal}: the same command continues" if journal is not None else (
                "nothing was kept; with --journal FILE, a search that is started again continues")  # fmt: skip
            typer.echo(f"amp-compiler: stopped; {kept}.", err=True)
            raise typer.Exit(130) from None  # as shells tell it
    if output is not None:
        found.to_file(output)
    if plot is not None:
        found.to_svg(plot)
    if as_json:
        c.write(found.to_json(), None)
    elif not quiet:
        c.write(str(found), None)


def load_model(target: str, inputs: Sequence[str], tell: Callable[[str], None]) -> tuple[Any, Kinds]:
    """Return the model that a TARGET names, and of its example inputs the kinds; a search needs none."""
    from ..calibration.refusal import kinds
    from .target import load

    tell(f"loading {target}")
    loaded = load(target, inputs, needs_inputs=False)
    if loaded.model is None:
        raise ArgumentError(f"{target} is a saved program already: pass the model that it was made from.")
    return loaded.model, kinds(loaded.model, loaded.args, loaded.kwargs)


def measured(model: Any, batches: Sequence[Any], dtype: str, tell: Callable[[str], None], example: Kinds) -> Any:
    """Return a calibration of the model on the batches, without a loss."""
    from ..calibration.calibrate import run_calibration

    tell("calibrating")
    return run_calibration(model, [(inputs, None) for inputs, _ in batches], None, dtype, example=example)


def telling(metric: Callable[[Any], float], tell: Callable[[str], None]) -> Callable[[Any], float]:
    """Return the same metric, which shows how often it was evaluated."""
    count = [0]

    def evaluate(compiled: Any) -> float:
        count[0] += 1
        tell(f"searching, evaluation {count[0]}")
        return metric(compiled)

    return evaluate


def by_error(
    model: Any, batches: Sequence[Any], metric: Callable[[Any], float], tolerance: float, level: str, dtype: str,
    tell: Callable[[str], None],
) -> Search:  # fmt: skip
    """Search for a policy whose outputs on the batches are within a relative error of fp32's, for ``convert``.
    ``metric``: that of ``relative_error``."""
    from ..policy import DEFAULT_LEVEL
    from ..search import search_policy

    low = dtype or "float16"
    return search_policy(
        model, telling(metric, tell), tolerance=tolerance, maximize=False, dtype=low,
        level=START if level == DEFAULT_LEVEL else level, calibration=measured(model, batches, low, tell, {}),
    )  # fmt: skip
