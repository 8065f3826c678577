"""Graphs that are kept as Dynamo captured them, so that another policy needs no further capture.

A search compiles one model by many policies that differ in rules for single calls. Dynamo's graph, its guards and the
lowered graph are the same for all of them; only the passes and AOTAutograd run again. ``Kept.is_closed`` tells for
which graphs that is so; a model with any other is captured anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from .. import ir
from ..capture.again import copy_captured, inputs_again, tracing_again
from ..capture.frames import belongs_to_us, unwatched
from ..ir.nesting import has_parts

belongs_to_us(__file__)


@dataclass(frozen=True)
class Lowered:
    """A graph as the passes take it, and what only Dynamo knows of it: the fields of ``Context`` of the same names."""

    graph: fx.GraphModule
    keep: bool
    marked: dict[str, torch.dtype]
    twin: fx.GraphModule | None
    around: tuple[str, torch.dtype | None] | None
    followed: bool = False


class Kept:
    """A lowered graph that no pass has changed, with the fakes of its inputs."""

    def __init__(self, lowered: Lowered, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self.lowered, self.inputs = lowered, inputs_again(example_inputs)
        self.is_closed = _is_closed(lowered, gm, self.inputs)

    def copy(self) -> Lowered:
        """Return a copy that passes may change."""
        twin = self.lowered.twin
        return replace(self.lowered, graph=copy_captured(self.lowered.graph),
                       twin=twin if twin is None else copy_captured(twin))  # fmt: skip


def _is_closed(lowered: Lowered, gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """True if the graph can be compiled again by itself: all sizes are numbers, so that no further guard can come of
    it; nothing in it was compiled for a policy of its own; and no input is wide or low by another graph's policy."""
    places = [n for n in lowered.graph.graph.nodes if n.op == "placeholder"]
    fixed = all(isinstance(v, torch.Tensor) and all(type(size) is int for size in v.shape) for v in inputs)
    marked = any(ir.WIDE in place.meta or ir.LOW_INPUT in place.meta for place in places)
    return fixed and not marked and not has_parts(gm) and lowered.around is None


class Owner(Protocol):
    """The back end that compiles kept graphs."""

    @property
    def state(self) -> Any: ...

    def make(
        self, lowered: Callable[[], Lowered], unchanged: Callable[..., Any], example_inputs: Sequence[Any]
    ) -> Callable[..., Any]: ...


class Switch:
    """What Dynamo runs for a kept graph: the graph by the policy that its back end has now."""

    def __init__(self, owner: Owner, kept: Kept, run: Callable[..., Any]) -> None:
        self._owner, self._kept, self._run, self._state = weakref.ref(owner), kept, run, owner.state

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        if owner is not None and owner.state is not self._state:
            self._compile(owner)
        return self._run(*args)

    @unwatched
    def _compile(self, owner: Owner) -> None:
        with tracing_again(self._kept.lowered.graph):
            self._run = owner.make(self._kept.copy, self._kept.lowered.graph.forward, self._kept.inputs)
        self._state = owner.state
