"""What a pass is: a small named rewrite that says what must hold before it and what holds after it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from amp_compiler.ir.weights import Weights
from amp_compiler.policy import Policy


class Dialect(enum.Enum):
    """The two kinds of FX graph that passes take."""

    PRE_DISPATCH = "pre-dispatch ATen"
    FUNCTIONAL = "functional ATen"


@dataclass(frozen=True)
class Context:
    """What a pass may know beside the graph."""

    policy: Policy
    keep_output_dtypes: bool = True
    #: path -> precision of each module that ``set_precision`` marked
    module_precision: Mapping[str, torch.dtype] = field(default_factory=dict)
    #: the same code traced in the low dtype (``capture/twin.py``), where it can depend on dtypes at all
    twin: fx.GraphModule | None = None
    #: (kind, dtype) of a region that plain Python opened around the whole graph
    around: tuple[str, torch.dtype | None] | None = None
    #: the values of parameters, buffers and constants, in a conversion: there they do not change any more
    weights: Weights | None = None
    #: who runs the graph: "eager" or "inductor"
    backend: str = "eager"
    #: verify by running every op again on fakes, whatever ``AMP_VERIFY`` says: for graphs that are shown
    deep: bool = False
    #: what passes want the user to know; the caller warns and puts it into the report
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """A rewrite in place: ``run(graph module, context)`` returns whether it changed anything.

    ``requires`` and ``ensures`` are names of facts; the pipeline checks when it is built that each required
    fact is ensured by an earlier pass (or by capture), and the verifier knows how to check a fact on a graph.
    """

    name: str
    dialect: Dialect
    requires: tuple[str, ...]
    ensures: tuple[str, ...]
    run: Callable[[fx.GraphModule, Context], bool]

    def __post_init__(self) -> None:
        MAKERS.update({fact: self.name for fact in self.ensures if fact not in self.requires})


#: fact -> a pass that ensures it, of all passes that were imported
MAKERS: dict[str, str] = {}
