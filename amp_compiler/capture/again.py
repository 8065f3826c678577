"""Compile a captured graph once more, after Dynamo has finished with it.

torch 2.13 internals: ``torch._guards.tracing`` (AOTAutograd asks it for the fake mode of its inputs, which has to be
that of the graph's values) and ``_dynamo_source`` on placeholders (AOTAutograd reads from it which inputs are
parameters; ``fx`` does not copy it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import ir


def copy_captured(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a lowered graph that AOTAutograd takes as it takes the original."""
    copy = ir.copy_graph(gm)
    for old, new in zip(gm.graph.nodes, copy.graph.nodes, strict=True):
        source: Any = getattr(old, "_dynamo_source", None)
        if source is not None:
            new._dynamo_source = source
    return copy


def inputs_again(example_inputs: Sequence[Any]) -> list[Any]:
    """Return the fakes of a graph's inputs while Dynamo compiles it, to compile it with later."""
    from .lower import fakify

    return fakify(example_inputs)[0]


@contextlib.contextmanager
def tracing_again(gm: fx.GraphModule) -> Iterator[None]:
    """Compile a lowered graph inside of this, as inside of Dynamo."""
    with torch._guards.tracing(torch._guards.TracingContext(ir.fake_mode(gm.graph))):
        yield
