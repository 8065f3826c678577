"""The rows of a report added up by module: few lines for a large model, with repeated layers on one line.

``encoder.layer.0`` to ``encoder.layer.11`` hold the same ops in the same precisions, so they become
``encoder.layer.0-11``. Modules are expanded from the root down, the most interesting first, until the summary fills a
screen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..data import LOW, ReportData, Row

LINES = 12  # modules are expanded while there are at most this many lines,
UNIFORM_LINES = 8  # and those whose ops have a single precision up to this many
_SMALL = 16  # a module with less than one in this many of the ops isn't expanded
ROOT = "(model)"
_NUMBERED = re.compile(r"(.*?)(\d+)$")


@dataclass(frozen=True)
class ModuleSummary:
    """The contents of one line: the ops of some modules. ``alike``: how many identical layers it stands for."""

    name: str
    ops: Counter[str]
    flops: int
    low_flops: int
    casts: int
    alike: int = 1


@dataclass
class _Tree:
    """The ops of a module itself, and the modules below it."""

    ops: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    low_flops: int = 0
    casts: int = 0
    alike: int = 1
    own: list[tuple[str, str]] = field(default_factory=list)  # (op, precision), in the order of the graph
    below: dict[str, _Tree] = field(default_factory=dict)

    def at(self, path: str) -> _Tree:
        found = self
        for part in path.split(".") if path else ():
            found = found.below.setdefault(part, _Tree())
        return found

    def add(self, row: Row) -> None:
        self.own.append((row.op, row.precision))
        self.ops[row.precision] += 1
        self.flops += row.flops
        self.low_flops += row.flops if row.precision in LOW else 0

    def shape(self) -> Any:
        """Return a key that is equal for identical layers. Casts don't count: the first layer often has one more."""
        return tuple(self.own), tuple((name, tree.shape()) for name, tree in self.below.items())

    def total(self, name: str) -> ModuleSummary:
        """Summarize this module with all modules below it."""
        below = [tree.total("") for tree in self.below.values()]
        return ModuleSummary(
            name, sum((b.ops for b in below), Counter(self.ops)), self.flops + sum(b.flops for b in below),
            self.low_flops + sum(b.low_flops for b in below), self.casts + sum(b.casts for b in below), self.alike,
        )  # fmt: skip

    def itself(self, name: str) -> ModuleSummary:
        """Summarize this module without those below it."""
        return ModuleSummary(name, Counter(self.ops), self.flops, self.low_flops, self.casts, self.alike)

    def absorb(self, other: _Tree) -> None:
        """Add an identical layer."""
        self.ops += other.ops
        self.flops, self.low_flops = self.flops + other.flops, self.low_flops + other.low_flops
        self.casts += other.casts
        self.alike += other.alike
        for name, tree in other.below.items():
            self.below[name].absorb(tree)


def summarize(report: ReportData, lines: int = LINES) -> list[ModuleSummary]:
    """Summarize the modules of a report, in the order of its rows, in about ``lines`` lines with the same totals."""
    root = _Tree()
    for row in report.rows:
        root.at(row.module).add(row)
    for path, number in (report.casts_by_module or {}).items():
        root.at(path).casts += number
    _merge(root)
    return [tree.itself(name) if alone else tree.total(name) for name, tree, alone in _opened(root, lines)]


def merged_names(report: ReportData) -> dict[str, str]:
    """Return module path -> merged path, such as ``encoder.layer.3.output`` -> ``encoder.layer.0-11.output``."""
    root = _Tree()
    for row in report.rows:
        root.at(row.module).add(row)
    names = _merge(root)
    return {path: names.get(path, path) or ROOT for path in {row.module for row in report.rows}}


def _merge(tree: _Tree, path: str = "", shown: str = "") -> dict[str, str]:
    """Merge numbered neighbours that are identical; return path -> merged path."""
    names = {path: shown}
    kept: dict[str, _Tree] = {}
    for run in _runs(tree):
        name = run[0] if len(run) == 1 else f"{run[0]}-{_number(run[-1])}"
        for member in run:
            names |= _merge(tree.below[member], _join(path, member), _join(shown, name))
        first = tree.below[run[0]]
        for member in run[1:]:
            first.absorb(tree.below[member])
        kept[name] = first
    tree.below = kept
    return names


def _runs(tree: _Tree) -> Iterator[list[str]]:
    """Yield the names of the modules below, with consecutive numbered ones that are identical in one list."""
    run: list[str] = []
    shape: Any = None
    for name, below in tree.below.items():
        new = below.shape() if _NUMBERED.match(name) else None
        if run and new is not None and new == shape and _follows(run[-1], name):
            run.append(name)
            continue
        if run:
            yield run
        run, shape = [name], new
    if run:
        yield run


def _follows(before: str, name: str) -> bool:
    one, two = _NUMBERED.match(before), _NUMBERED.match(name)
    return one is not None and two is not None and one[1] == two[1] and int(one[2]) + 1 == int(two[2])


def _number(name: str) -> str:
    found = _NUMBERED.match(name)
    return found[2] if found is not None else name


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _opened(root: _Tree, lines: int) -> list[tuple[str, _Tree, bool]]:
    """Return (name, module, whether to exclude the modules below it) for each line."""
    shown = _open("", root)
    least = _interest(root)[1] / _SMALL
    while True:
        closed = [(place, name, tree) for place, (name, tree, alone) in enumerate(shown)
                  if tree.below and not alone and _interest(tree)[1] > least]  # fmt: skip
        for place, name, tree in sorted(closed, key=lambda c: _interest(c[2]), reverse=True):
            parts = _open(name, tree)
            if len(shown) - 1 + len(parts) <= (lines if _interest(tree)[0] else min(lines, UNIFORM_LINES)):
                shown[place : place + 1] = parts
                break
        else:
            return shown


def _interest(tree: _Tree) -> tuple[bool, int]:
    """Return a sort key: modules with several precisions come first, then those with the most ops."""
    total = tree.total("")
    floats = [name for name in total.ops if name != "other"]
    return len(floats) > 1, sum(total.ops.values())


def _open(path: str, tree: _Tree) -> list[tuple[str, _Tree, bool]]:
    own = [(path or ROOT, tree, True)] if tree.own or tree.casts else []
    return [*own, *(_sunk(_join(path, name), below) for name, below in tree.below.items())]


def _sunk(path: str, tree: _Tree) -> tuple[str, _Tree, bool]:
    """Skip modules that contain only one other module."""
    while not tree.own and not tree.casts and len(tree.below) == 1:
        ((name, below),) = tree.below.items()
        path, tree = _join(path, name), below
    return path, tree, False
