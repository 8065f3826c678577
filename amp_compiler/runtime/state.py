"""What capturing adds to a compiled model: its graphs, the history of their passes, and what users should know."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import ir
from ..capture import dynamo
from ..common.errors import AmpWarning
from ..common.logs import log
from ..common.messages import users_frame
from ..inspect.data import Row
from ..inspect.report import Report, build_report
from ..ir.wide import Handed
from ..kernels.cast_matmul import scratch_bytes
from ..policy import Policy
from ..policy.scopes import Surroundings, modules_of, paths_of
from ..rewrite.records import Record
from .work import Work, measure, unchanged


@dataclass
class Piece:
    """One captured graph: the rewritten forward, its rows, and what its executed form costs."""

    graph: fx.GraphModule
    rows: list[Row]
    casts: tuple[int, int]
    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    joint: fx.GraphModule | None = None  # forward, backward and loss scaling of a whole training step


class _Running(threading.local):
    """The state of the call that this thread is in."""

    def __init__(self) -> None:
        #: (path, dtype) that ``set_precision`` sets around a module that is compiled by itself
        self.inherited: tuple[str, torch.dtype | None] | None = None
        #: (path, class) of the module whose forward is a frame of its own
        self.inside: tuple[str, type] | None = None
        self.entered = Surroundings.now()  # the regions around the call


@dataclass
class State:
    """Everything that capturing adds; each compiled module has its own."""

    pieces: list[Piece] = field(default_factory=list)
    history: list[Record] = field(default_factory=list)
    not_captured: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    work: Work | None = None  # measured on request
    running: _Running = field(default_factory=_Running)
    calls: ir.Calls = field(default_factory=ir.Calls)  # which call of an op each node of the graphs is
    handed: Handed = field(default_factory=Handed)  # wide values that pieces of that call returned

    def forget(self) -> None:
        """Drop the graphs: the code is going to be captured once more."""
        self.calls = ir.Calls()
        for found in (self.pieces, self.history, self.not_captured):
            found.clear()

    def missed(self, reasons: Iterable[dynamo.Reason]) -> None:
        """Record graph breaks that no captured graph reports, for example if the code before them had no tensor op."""
        for reason in reasons:
            if not any(reason in known for known in self.not_captured):
                self.not_captured.append(f"graph break: {reason.in_full()}")
                log("capture", "graph break: %s", reason)

    def leave(self, text: str) -> None:
        """Report that something runs without us: a note in the report and a warning, once each."""
        if text not in self.notes:
            log("capture", "%s", text)
            self.notes.append(text)
            warnings.warn(f"amp_compiler: {text}", AmpWarning, stacklevel=users_frame())

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def report(self, policy: Policy, graph: int | None = None) -> Report:
        """Return a report of every op with its precision and reason, over all graphs captured so far (or one)."""
        pieces = self.pieces if graph is None else [self.pieces[graph]]
        notes = list(self.notes)
        if not self.pieces and not notes:
            notes.append("nothing captured yet: call the model once with example inputs")
        return build_report(
            (row for piece in pieces for row in piece.rows), (piece.casts for piece in pieces),
            level=policy.level, dtype=policy.low, not_captured=self.not_captured, notes=notes,
            kernels=(piece.kernels for piece in pieces),
            stages=self.history if graph is None else (),
            work=None if self.work is None else self.work.shares,
            scratch_bytes=scratch_bytes(),
        )  # fmt: skip

    def measure(self, call: Callable[[], Any], target: Any) -> None:
        """Call the compiled model once more and measure which share of its work runs where. It is not changed."""
        modules = modules_of(target)
        buffers = {id(b): b for m in modules.values() for b in m.buffers(recurse=False) if b is not None}
        paths = paths_of(target)
        with unchanged(list(buffers.values())):
            self.work = measure(call, lambda graph: sum(row.flops for row in self.pieces[graph].rows), paths)
        if self.work.wide:
            warnings.warn(
                f"amp_compiler: {self.work.shares['float32']:.1%} of the work ran in float32, because it is in code "
                "that is not captured and torch.autocast does not make it low: " + "; ".join(self.work.wide),
                AmpWarning,
                stacklevel=users_frame(),
            )
