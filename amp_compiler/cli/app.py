"""The application: its commands, and how errors are shown."""

from __future__ import annotations

import contextlib
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import typer.core

from ..common.errors import AmpError, AmpWarning, PipelineError, VerifyError
from . import calibrate, common, convert, doctor, dump, explain, ops, passes, plan, predict, search

BAD_REQUEST, FAILURE = 2, 1
#: click's base class of all errors about arguments; newer releases of typer include their own click
_USAGE: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Group(typer.core.TyperGroup):
    """Turns errors into one line and an exit code: 2 for a wrong request, 1 for a failure inside the package."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _USAGE):
            raise
        except BrokenPipeError:
            sys.stderr.close()  # the reader (head, less) has seen enough
            raise typer.Exit(0) from None
        except Exception as error:  # the one place that turns any failure into a line: see the class
            if common.debugging():
                traceback.print_exc()
            ours = isinstance(error, AmpError) and not isinstance(error, (PipelineError, VerifyError))
            text = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, AmpError):
                text = f"{type(error).__name__}: {text}"
            if not ours:
                text += " (an error inside amp-compiler: --debug shows where)"
            typer.echo(f"amp-compiler: error: {text}", err=True)
            raise typer.Exit(BAD_REQUEST if ours else FAILURE) from None


@contextlib.contextmanager
def _warnings() -> Iterator[None]:
    """Show our warnings as one line each, and others only with --debug."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if common.debugging() or issubclass(category, AmpWarning):
            typer.echo(f"amp-compiler: note: {str(message).removeprefix('amp_compiler: ')}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Show how mixed precision changes a PyTorch model, and explain why.",
)
for command in (dump, explain, ops, predict, plan, calibrate, search, convert, passes, doctor):
    app.command(command.NAME, help=command.HELP, epilog=command.EPILOG)(command.run)


def _version(given: bool) -> None:
    if given:
        from .. import __version__

        typer.echo(f"amp-compiler {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the application itself."""
