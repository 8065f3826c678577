"""A pass: a small named rewrite that declares what must hold before it and what holds after it.

Both are declared as ``Fact`` objects (``facts/``), each with a check that proves it on a graph.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch
from torch import fx

from amp_compiler import ir
from amp_compiler.common.errors import VerifyError
from amp_compiler.ir.weights import Weights
from amp_compiler.policy import Policy

from .reduction import Reduction
from .sharding import Sharding


class Dialect(enum.Enum):
    """The two kinds of FX graph that passes work on."""

    PRE_DISPATCH = "pre-dispatch ATen"
    FUNCTIONAL = "functional ATen"


def words(dialect: Dialect | None) -> str:
    """Return how to name the dialect of a pass or a fact; None stands for either."""
    return dialect.value if dialect is not None else "ATen in either dialect"


class Named(Protocol):
    """Something with a name."""

    @property
    def name(self) -> str: ...


class Costs(Protocol):
    """What ops and casts cost on a device; ``cost.CostModel`` tells it."""

    @property
    def device(self) -> Named: ...

    @property
    def fused(self) -> bool:
        """True if element-wise ops, casts among them, are part of their neighbours' kernels."""

    def seconds(self, node: fx.Node, dtype: torch.dtype | None = None) -> float: ...

    def backward_seconds(self, node: fx.Node, dtype: torch.dtype | None = None) -> float: ...

    def cast_seconds(self, value: torch.Tensor, to: torch.dtype) -> float: ...


@dataclass(frozen=True)
class Context:
    """What a pass may know in addition to the graph."""

    policy: Policy
    keep_output_dtypes: bool = True
    #: path -> precision of each module that ``set_precision`` marked
    module_precision: Mapping[str, torch.dtype] = field(default_factory=dict)
    #: the same code traced in low precision (``capture/twin.py``), if it can depend on dtypes
    twin: fx.GraphModule | None = None
    #: (kind, dtype) of a region that plain Python opened around the whole graph
    around: tuple[str, torch.dtype | None] | None = None
    #: in a conversion, the values of parameters, buffers and constants, which no longer change
    weights: Weights | None = None
    #: what runs the graph: "eager" or "inductor"
    backend: str = "eager"
    #: verify by running every op again on fakes, whatever ``AMP_VERIFY`` says: for graphs that are displayed
    deep: bool = False
    #: a training step: gradients of several micro-batches are added up for each update
    accumulates: bool = False
    #: a training step: the loss is multiplied by a scale, and the gradients are divided by it
    scales_loss: bool = True
    #: a training step: some parameters are stored in low precision, and their updates are made in fp32
    updates_in_fp32: bool = False
    #: a training step: a part of the forward runs again in the backward (activation checkpointing)
    recomputes: bool = False
    #: a training step: whoever runs the graph leaves the model's state as it was if an update is skipped
    restores_outside: bool = False
    #: a training step: how its gradients are averaged over processes; None in a single process, and in the graph of a
    #: micro-batch that does not end an update
    reduction: Reduction | None = None
    #: a training step: how its parameters are divided among processes
    sharding: Sharding | None = None
    #: a converted model: memory may be spent on fp32 copies of its low weights
    caches_weights: bool = True
    #: what ops cost on the device that the user named; None if they named none
    costs: Costs | None = None
    #: a forward graph: it will be differentiated
    differentiated: bool = False
    #: the code asks for dtypes, and the graph says of which tensors, so that no twin is needed (``ir/low_values.py``)
    followed: bool = False
    #: what passes want the user to know; the caller warns and puts it into the report
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """What a check looks at: the stage that ran last, and the name of the graph if it is inside another."""

    after: str
    graph: str = ""

    def fail(self, what: str, node: fx.Node | None = None) -> NoReturn:
        """Raise the error of a fact that does not hold. ``what``: a predicate for the node, or a whole clause."""
        where = f"{self.after}, graph {self.graph}" if self.graph else self.after
        if node is None:
            raise VerifyError(f"After {where}: {what}", pass_name=self.after)
        source = ir.source_line(node)
        raise VerifyError(
            f"After {where}: node '{node.name}' ({ir.format_node(node)}): {what}"
            + (f" It comes from {source}." if source else ""),
            pass_name=self.after, node=node.name, source=source,
            hint="This is a bug in a pass: switch the pass off with disable_passes and report the graph.",
        )  # fmt: skip


Check = Callable[[fx.GraphModule, Context, Place], None]


@dataclass(frozen=True)
class Fact:
    """A property of a graph, and how to prove it.

    ``check`` raises through ``Place.fail`` if the fact does not hold. It runs after every pass that ensures the fact,
    in users' runs too, so it is linear in the number of nodes. ``deep`` is a check that takes longer or that not all
    valid graphs pass: it runs only with ``AMP_VERIFY=deep``, which also runs every op again after every pass.
    """

    name: str
    #: the dialect of the graphs that it can hold on; None: either
    dialect: Dialect | None
    #: what it says, for readers of ``passes/README.md``
    promise: str
    check: Check
    deep: Check | None = None
    #: the pass that establishes it; empty if capture or autodiff does
    made_by: str = ""
    #: False if it is about the outermost graph only, not about the graphs inside it
    inside: bool = True


@dataclass(frozen=True)
class Condition:
    """A condition for a pass that no graph shows, such as the backend or what the user asked for."""

    #: worded to follow "needs"
    needs: str
    holds: Callable[[Context], bool]
    #: True if it holds only where a user asks for the pass: a run without it has nothing to tell of the pass
    asked: bool = False


@dataclass(frozen=True)
class Pass:
    """A rewrite in place: ``run(graph module, context)`` returns whether it changed anything.

    The pipeline checks when it is built that each fact of ``requires`` is ensured by an earlier pass, or given, and
    after the pass that each fact of ``ensures`` holds. ``dialect`` is that of the graphs it works on, None for either.
    ``when``: the conditions under which it applies (``conditions.py``).
    """

    name: str
    dialect: Dialect | None
    requires: tuple[Fact, ...]
    ensures: tuple[Fact, ...]
    run: Callable[[fx.GraphModule, Context], bool]
    when: tuple[Condition, ...] = ()

    def is_asked(self, ctx: Context) -> bool:
        """False for a pass that somebody has to ask for, and nobody did."""
        return all(condition.holds(ctx) for condition in self.when if condition.asked)

    def unmet(self, ctx: Context) -> str:
        """Return the condition that is not met; "" if the pass applies."""
        return next((condition.needs for condition in self.when if not condition.holds(ctx)), "")
