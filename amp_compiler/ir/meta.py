"""The annotations that the compiler writes on a graph and its nodes: the keys of ``meta``, and their values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..policy.ops.row import OpClass
from ..policy.rules import Rule

META = "amp"  # node.meta key of the Decision
PARAMETER = "amp_parameter"  # node.meta key, True on an input that is a leaf and needs a gradient
NESTED = "amp_nested"  # node.meta key of the policy of a part that was compiled by itself (see nesting.py)
REGION = "amp_region"  # node.meta key of the precision region around a node (see passes/normalize.py)
FOLLOWED = "amp_followed"  # gm.meta key: True if no DTYPE_OF or NUMBER_OF of Dynamo's graph was lost in lowering
DTYPE_OF = "amp_dtype_of"  # node.meta key: name of the node whose dtype this one names
NUMBER_OF = "amp_number_of"  # node.meta key: name of the node whose dtype's limit (torch.finfo) is a number here
OF_INPUT = "<input>"  # in place of the name of an input that nothing but its dtype is read of
CALL = "amp_call"  # node.meta key: which of its module's calls of its op a node is, counted from 0
STATE = "amp_state"  # gm.meta key: (output, input) positions of what the model keeps between calls
CONSTANT = "amp_constant"  # node.meta key: the value of an input that is a constant of the model's code
CLOSED = "amp_closed"  # gm.meta key: a body that no pass may look into
OUTPUT_DTYPES = "amp_output_dtypes"  # gm.meta key: the dtypes of the model's outputs, where tracing lost them
KERNEL = "amp_kernel"  # node.meta key: why one of our ops replaces an ATen op
LEFT = "amp_left"  # node.meta key: why none of our ops replaces this product
LOSS = "amp_loss"  # gm.meta key: the output that is the loss, in the graph of a training step
ROLE = "amp_role"  # node.meta key of the Role of an input of a joint graph; gm.meta key: those of its outputs
RESTORED = "amp_restored"  # gm.meta key: the Roles of outputs that a skipped update must leave as they were
WEIGHTS = "amp_weights"  # gm.meta key: the graph that makes the low copies of weights, once per update
NAMES = "amp_names"  # gm.meta key: position of each parameter among the forward's inputs -> its name in the model
BUCKETS = "amp_buckets"  # gm.meta key: the names of the parameters whose gradients are reduced together
SHARDED = "amp_sharded"  # gm.meta key: place of each divided parameter among the forward's inputs -> its name
GATHERS = "amp_gathers"  # gm.meta key: the ``Gather`` of each all-gather, in the order in which they start
SCATTERS = "amp_scatters"  # gm.meta key: the names of the parameters whose gradients are reduce-scattered together
OF_GRADIENT = "amp_of_gradient"  # node.meta key, True on the cast of a finished gradient before it leaves the graph
PATH = "amp_path"  # node.meta key on an input that is a parameter or buffer: its path in the model
ORIGIN = "amp_origin"  # node.meta key of the Origin (see passes/mark_dtype_origin.py)
SETTLED = "amp_settled"  # gm.meta key: every value is what its op returns, inside of autocast regions too
PLACED = "amp::placed"  # the op that stands for a call that moves a DTensor (see capture/placed.py)
LOW_INPUT = "amp_low_input"  # node.meta key on an input whose values another graph of the call made low: their dtype
WIDE = "amp_wide"  # node.meta key on an input that counts as wide: what made it so (see wide.py)


class Mode(enum.Enum):
    """The dtypes that the arguments of a node must have."""

    CAST = "cast"  # every float argument is cast to the node's precision
    TRACED = "traced"  # every float argument has the dtype that it was traced with
    NATIVE = "native"  # arguments stay as they are; torch's own type promotion applies


class Because(NamedTuple):
    """A reason in words, and the names of the nodes that it comes from."""

    reason: str
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The precision of one node and why. ``out`` holds the dtype of each output tensor (None: no float).

    ``reason`` is for people, ``rule`` is the rule that decided, and ``causes`` names the nodes whose precision, value
    or dtype led to it, the most important first; ``explain`` follows them. ``named``: the new value of the node's own
    dtype argument. ``numbers``: new values of number arguments; ``limit`` says so in words. ``wide``: for each output,
    what made it wide, or an empty text (see ``wide.py``). ``either``: the rules allow both precisions; noted only where
    the costs of a device are to choose between them (``passes/place_neutral.py``).
    """

    mode: Mode
    precision: torch.dtype | None
    reason: str
    rule: Rule
    cls: OpClass | None = None
    out: tuple[torch.dtype | None, ...] = ()
    keep_args: tuple[str, ...] = ()
    named: torch.dtype | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    wide: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    limit: str = ""
    either: bool = False


def decision(node: fx.Node) -> Decision | None:
    """Return the decision on ``node``, or None before ``assign_precision`` has run."""
    found = node.meta.get(META)
    assert found is None or isinstance(found, Decision)
    return found


def decide(node: fx.Node, value: Decision) -> None:
    """Write ``value`` on ``node``."""
    node.meta[META] = value


def amend(node: fx.Node, **changes: Any) -> None:
    """Change some fields of the decision on ``node``."""
    node.meta[META] = replace(node.meta[META], **changes)


@dataclass(frozen=True, slots=True)
class Origin:
    """What the twin, the trace of the same code in low precision, reveals about one node.

    ``follows``: the dtype that the node names was another tensor's, so it is not the author's explicit choice.
    ``of``: the name of that tensor's node, if known. ``twin``: the dtype of its result in the twin. ``numbers``:
    (argument, value) of each number that differs in low precision (``torch.finfo(x.dtype).min``); ``numbers_of``: the
    name of the node whose dtype was read there, if known. ``unsure``: why the node must stay as it was traced, or an
    empty text.
    """

    follows: bool = False
    twin: torch.dtype | None = None
    numbers: tuple[tuple[str, float], ...] = ()
    unsure: str = ""
    of: str = ""
    numbers_of: str = ""


def origin(node: fx.Node) -> Origin | None:
    """Return what the twin reveals about ``node``, or None if there is no twin."""
    found = node.meta.get(ORIGIN)
    assert found is None or isinstance(found, Origin)
    return found


@dataclass(frozen=True, slots=True)
class Role:
    """What an input or output of a training step's graph is for.

    Inputs: ``primal`` (input number ``index`` of the forward), ``constant``, ``tangent`` (the loss's gradient),
    ``scale``, ``found`` (1 if an earlier micro-batch was not finite), ``saved`` (primal ``index`` before the
    update), ``low`` (the low copy of primal ``index``), ``sum`` (its gradients so far, added to in place).
    Outputs: ``mutation`` (the new value of primal ``index``), ``output`` (of the forward), ``gradient`` (of primal
    ``index``), ``total`` (the sum of its gradients over all micro-batches and processes), ``found``.
    """

    kind: str
    index: int = 0
    name: str = ""
