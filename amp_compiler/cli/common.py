"""What the commands share: options, the console, progress, and the model that a TARGET names."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import ArgumentError
from ..common.files import write_text

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from ..inspection import Inspection
    from ..policy import Policy

WIDTH = 100  # of a table that does not go to a terminal
_DEBUGGING = [False]  # True if --debug was given


def _debug(given: bool) -> bool:
    _DEBUGGING[0] = given
    return given


def debugging() -> bool:
    """True if --debug asks for tracebacks and torch's own messages."""
    return _DEBUGGING[0]


def _levels(incomplete: str) -> list[str]:
    from ..policy import LEVELS

    return [level for level in LEVELS if level.lower().startswith(incomplete.lower())]


def _passes(incomplete: str) -> list[str]:
    from ..passes.order import ALL

    return [name for name in ("capture", "autodiff", *ALL) if name.startswith(incomplete)]


def _devices(incomplete: str) -> list[str]:
    from ..cost.table import DEVICES

    return [name for name in DEVICES if name.startswith(incomplete.lower())]


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:attr, file.py:attr (a module, a class, or a function without arguments that returns "
        "a model or (model, args, kwargs)), or a saved .pt2 file",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str],
    typer.Option(
        "--input", "-i", metavar="[NAME=]SHAPE[:DTYPE[:BELOW]]",
        help="An example input, in order: 8x3x224x224, 2x16:int64:1000 (numbers below 1000), mask=2x16:bool; 8* is a "
        "size that may change. Not needed if TARGET returns (model, args).",
    ),
]  # fmt: skip
Level = Annotated[
    str, typer.Option("--level", "-l", help="O0, O1, auto, O2 or O3.", autocompletion=_levels)
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", "-d", help="float16 or bfloat16; by default float16 on CUDA, bfloat16 elsewhere.", show_default=False
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy", show_default=False,
        help="A policy file (TOML), instead of --level and --dtype. --low, --fp32 and --exclude are added to it.",
    ),
]  # fmt: skip
WhiteList = Annotated[list[str], typer.Option("--low", metavar="OP", help="An op to run in low precision.")]
BlackList = Annotated[list[str], typer.Option("--fp32", metavar="OP", help="An op to run in fp32.")]
Exclude = Annotated[list[str], typer.Option("--exclude", metavar="PATTERN", help="Modules to run in fp32.")]
Graph = Annotated[
    str,
    typer.Option(
        "--graph", "-g", help="forward (with its casts, before autodiff), inference or joint (with the backward)."
    ),
]
Capture = Annotated[str, typer.Option("--capture", help="Front end: export, dynamo, or auto (export where it works).")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME|FILE", autocompletion=_devices, show_default=False,
        help="With --level auto: a device (a100_80, or a TOML file) whose costs place the ops that may run either way.",
    ),
]  # fmt: skip
Disable = Annotated[
    list[str], typer.Option("--disable", metavar="PASS", help="A pass to leave out.", autocompletion=_passes)
]
After = Annotated[
    str | None,
    typer.Option(
        "--after", metavar="PASS", help="Stop after this pass (or capture, autodiff).", autocompletion=_passes,
        show_default=False,
    ),
]  # fmt: skip
Module = Annotated[
    str | None,
    typer.Option("--module", "-m", metavar="PATTERN", help="Only these modules: encoder.layer.0.*", show_default=False),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only, without progress and notes.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_debug, is_eager=True)
]


def examples(lines: Sequence[str]) -> str:
    """Return the end of a help text: one example per line, which click's ``\\b`` keeps from being wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def console() -> Console:
    """Return the console for results: with colours only on a terminal, and tables as wide as it."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    return Console(width=wide, highlight=False, soft_wrap=False)


def show(lines: list[Any]) -> None:
    """Print rich texts, one per line."""
    out = console()
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)


def write(text: str, path: Path | None, quiet: bool = True) -> None:
    """Write text to a file, as a whole or not at all, or to stdout."""
    if path is None:
        typer.echo(text.removesuffix("\n"))
        return
    write_text(path, text)
    if not quiet:
        typer.echo(f"{path}: {len(text.encode()):,} bytes", err=True)


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is going on: an animated line on a terminal, nothing elsewhere."""
    if quiet:
        with _quiet_logs():
            yield lambda text: None
        return
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(file=sys.stderr).status("starting") as status:
        yield lambda text: status.update(f"{text} …")


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Suppress messages that nobody asked for, such as that kernels are being compiled (see ``common/logs.py``)."""
    before = os.environ.get("AMP_LOGS")
    os.environ["AMP_LOGS"] = f"{before},quiet" if before else "quiet"
    try:
        yield
    finally:
        if before is None:
            del os.environ["AMP_LOGS"]
        else:
            os.environ["AMP_LOGS"] = before


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Suppress torch's log of the traceback of a failed trace, which we report ourselves, unless --debug was given. To
    be used after torch was imported, which sets up its loggers."""
    logger = logging.getLogger("torch")
    before = logger.level
    if not debugging():
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@dataclass(frozen=True)
class Request:
    """The options that decide what is captured and by which policy."""

    target: str
    inputs: list[str]
    level: str
    dtype: str
    policy: Path | None
    low: list[str]
    fp32: list[str]
    exclude: list[str]
    graph: str = "forward"
    capture: str = "auto"
    disable: tuple[str, ...] = ()
    device: str | None = None

    def policy_for(self, model: Any) -> Policy:
        """Return the checked policy, with its module rules resolved in the model."""
        from ..policy import DEFAULT_LEVEL, Policy
        from ..runtime.arguments import check_request

        policy = Policy.from_file(self.policy) if self.policy is not None else None
        level = policy.level if policy is not None and self.level == DEFAULT_LEVEL else self.level
        asked = check_request(
            level, self.dtype or None, policy, self.low, self.fp32, self.exclude, "eager", self.disable,
            self.device,
        )  # fmt: skip
        return asked.policy_for(model)


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Put the model in eval mode, and restore the mode of each of its modules on exit."""
    training = [module for module in model.modules() if module.training]
    try:
        yield model.eval()
    finally:
        for module in training:
            module.training = True


def inspect(request: Request, quiet: bool) -> Inspection:
    """Capture what the request names; see ``amp_compiler.inspection``."""
    with contextlib.ExitStack() as stack:
        tell = stack.enter_context(progress(quiet))
        tell("loading torch")
        from ..inspection import inspect_converted, inspect_model, inspect_program
        from ..policy import DEFAULT_LEVEL, dtype_name
        from .target import load

        tell(f"loading {request.target}")
        loaded = load(request.target, request.inputs)
        stack.enter_context(hushed())
        if loaded.program is not None:
            policy = request.policy_for(loaded.program.module())
            return inspect_program(
                loaded.program, policy=policy, graph=request.graph, disable_passes=request.disable,
                device=request.device, target=request.target, progress=tell,
            )  # fmt: skip
        if loaded.converted is not None:
            level, low = loaded.converted.policy.level, dtype_name(loaded.converted.policy.low)
            others = request.level not in (DEFAULT_LEVEL, level) or request.dtype not in ("", low)
            if others or request.policy or request.low or request.fp32 or request.exclude or request.device:
                raise ArgumentError(
                    f"A converted model contains its policy ({level}, {low}): omit --level, --dtype, --policy, "
                    "--device and the lists."
                )
            return inspect_converted(loaded.converted, graph=request.graph, target=request.target, progress=tell)
        assert loaded.model is not None
        if request.graph != "joint":
            stack.enter_context(eval_mode(loaded.model))
        return inspect_model(
            loaded.model, loaded.args, loaded.kwargs, policy=request.policy_for(loaded.model), graph=request.graph,
            capture=request.capture, dynamic_shapes=loaded.dynamic_shapes, disable_passes=request.disable,
            device=request.device, target=request.target, progress=tell,
        )  # fmt: skip
