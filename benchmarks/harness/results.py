"""Rows, tables and files of one run of a benchmark."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .machine import ROOT, keep_freed_memory, machine, set_threads
from .timing import spread

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
RESULTS = ROOT / "benchmarks" / "results"
# Where the output is a file or a pipe, rich would fold the tables to 80 columns.
console = Console(width=None if sys.stdout.isatty() else 160)

Key = dict[str, str | int]


@dataclass
class Row:
    """What was measured of one thing.

    key         what it is: {"subject": "bert", "kind": "training", "dtype": "float16", "variant": "O2"}
    counts      exact, the same in every run: ops, casts, bytes, FLOPs
    samples     seconds, in the order of the rounds
    figures     anything derived or noisy: exponents, resident memory
    reference   the key of the row in the same run that times are divided by
    note        for the reader: why a figure is missing
    failed      it did not run; `note` says why
    """

    key: Key
    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    reference: Key | None = None
    note: str = ""
    failed: bool = False


def arguments(parser: argparse.ArgumentParser, rounds: int = 9, threads: int = 2) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser.add_argument("--rounds", type=positive, default=rounds, help="samples of each case, in turns")
    parser.add_argument("--threads", type=positive, default=threads, help="of torch inside an op")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where result files go")
    parser.add_argument("--name", help="of the result files (default: the script's)")
    return parser


def positive(text: str) -> int:
    """For `argparse`: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


class Run:
    """One run of a script: says what it is and where it runs, collects rows, writes the files."""

    def __init__(self, script: str, title: str, args: argparse.Namespace) -> None:
        self.script, self.args = script, args
        self.name: str = args.name or script
        self.try_out()
        set_threads(args.threads)
        keep_freed_memory()
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.machine = machine()
        self.rows: list[Row] = []
        console.print(f"[bold]{title}[/bold]")
        console.print("  ".join(f"{name}: {value}" for name, value in self.machine.items()), highlight=False)

    def try_out(self) -> None:
        """Files are written at the end, after minutes or hours: find out now whether they can be."""
        try:
            if Path(self.name).name != self.name:
                raise OSError(None, "a name, not a path")
            self.args.out.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.args.out):
                pass
        except OSError as error:
            sys.exit(f"{self.script}.py: results cannot be written to {self.args.out / self.name}: {error.strerror}")

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table; the first column is text, the others are numbers."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        console.print(table, markup=False)

    def finish(self, plot: Callable[[Path], object] | None = None) -> int:
        """Write NAME.json, NAME.csv and, if there is something to draw, NAME.svg; 1 if a row failed, else 0."""
        base: Path = self.args.out / self.name
        result = Result(self.script, self.date, self.machine, _plain(vars(self.args)), self.rows)
        result.write(base.with_name(f"{self.name}.json"))
        write_csv(base.with_name(f"{self.name}.csv"), self.rows)
        written = [".json", ".csv"]
        if plot is not None and self.rows:
            plot(base.with_name(f"{self.name}.svg"))
            written.append(".svg")
        shown = base.resolve().relative_to(ROOT) if base.resolve().is_relative_to(ROOT) else base
        console.print(f"Written: {shown} {', '.join(written)}", highlight=False)
        for row in self.rows:
            if row.failed:
                name = ", ".join(map(str, row.key.values()))
                console.print(f"{name}: failed: {row.note}", markup=False, highlight=False)
        return 1 if any(row.failed for row in self.rows) else 0


# --------------------------------------------------------------------------------------------------------- files


class BadResult(Exception):
    """A result file that cannot be read; the message is one line for the user."""


@dataclass
class Result:
    """What NAME.json holds."""

    script: str
    date: str
    machine: dict[str, str]
    arguments: dict[str, object]
    rows: list[Row]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read(path: Path) -> Result:
    """A result file, or BadResult."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
        result = Result(**{**found, "rows": [Row(**row) for row in found["rows"]]})
        for what in (result.machine, result.arguments):
            if not isinstance(what, dict):
                raise TypeError(f"machine or arguments is {what!r}")
        for row in result.rows:
            _check(row)
    except OSError as error:
        raise BadResult(f"{path}: {error.strerror or error}") from None
    except KeyError as error:
        raise BadResult(f"{path} is no result of a benchmark: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise BadResult(f"{path} is no result of a benchmark: {str(error).splitlines()[0]}") from None
    return result


def _check(row: Row) -> None:
    if not isinstance(row.key, dict) or not row.key:
        raise ValueError("a row has no key")
    if not isinstance(row.failed, bool):
        raise TypeError(f"failed is {row.failed!r}")
    for name, number in row.counts.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TypeError(f"the count {name} is {number!r}")
    for name, samples in row.samples.items():
        if not all(isinstance(sample, int | float) and 0 < sample < math.inf for sample in samples):
            raise TypeError(f"the samples of {name} are not all positive numbers")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a row: key, counts, median, min and max of each sample, figures, note."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(column for row in flat for column in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(flat)


def _flat(row: Row) -> Mapping[str, object]:
    cells: dict[str, object] = {**row.key, **row.counts}
    for name, samples in row.samples.items():
        if samples:
            found = spread(samples)
            cells |= {name: found.median, f"{name}_min": found.low, f"{name}_max": found.high}
    return {**cells, **row.figures, "note": row.note, "failed": row.failed}


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """Arguments as JSON has them; where files went is no property of a result."""
    kept = {name: value for name, value in values.items() if name not in ("out", "name")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
