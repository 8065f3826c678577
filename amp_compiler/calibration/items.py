"""The ops of a model that a search decides on, with what each is worth and how dangerous it is in low precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import ir
from ..common.errors import CalibrationError
from ..cost.devices import Device, find
from ..cost.model import CostModel
from ..ir.flops import node_flops
from ..policy import CallRule, Policy, Rule, call_name
from ..policy.calibrated import Bounds
from ..policy.ops.row import OpClass
from .calibration import Calibration

OBJECTIVES = ("flops", "bytes")
Objective = str | Device
#: the rules by which an op is low that a rule for the call comes before
_FREE = frozenset({Rule.TABLE, Rule.LEVEL, Rule.WHITE_LIST, Rule.FOLLOW_LIST, Rule.FP32_INSIDE, Rule.MODULE_RULE})
#: without a calibration, what is on the black list is suspected first
_BY_CLASS = {OpClass.LOW: 0.0, OpClass.FOLLOW: 1.0, OpClass.FP32: 2.0}


@dataclass(frozen=True, slots=True)
class Item:
    """One op whose precision is searched. The calls that one rule of a policy names are one item, in all graphs.

    Attributes:
        module: The path of the module that calls it.
        op: Its name.
        number: Which of the module's calls of the op it is.
        node: The name of its first node.
        source: The line of the user's code.
        cost: What it is worth in low precision, in the unit of the objective.
        danger: Larger means that low precision is expected to hurt more; only the order counts.
        suspect: True if its values are known not to fit the low-precision dtype.
        range: What was measured of it, in words.
    """

    module: str
    op: str
    number: int
    node: str
    source: str
    cost: float
    danger: float
    suspect: bool = False
    range: str = ""

    @property
    def name(self) -> str:
        """How reports name it: ``encoder.0:add#1``."""
        return call_name(self.module, self.op, self.number)

    def rule(self, reason: str = "") -> CallRule:
        """Return the rule that keeps it in fp32."""
        return CallRule(self.module, self.op, "float32", self.number, reason)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for a journal."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Work:
    """The ops that a policy runs in low precision, and the cost of all ops, also of those that cannot be low."""

    items: tuple[Item, ...]
    total: float

    def share(self, low: Iterable[Item]) -> float:
        """Return the share of the work that is low if these items are, from 0 to 1."""
        return sum(item.cost for item in low) / self.total if self.total else 0.0


def worth(objective: Objective, low: torch.dtype) -> Callable[[fx.Node], float]:
    """Return a function that tells what an op is worth in low precision: its FLOPs, the bytes of its results, or the
    seconds that it saves on a device, without the casts around it."""
    if objective == "flops":
        return lambda node: float(node_flops(node))
    if objective == "bytes":
        return lambda node: float(_bytes(node))
    model = CostModel(find(objective))
    return lambda node: max(model.seconds(node, torch.float32) - model.seconds(node, low), 0.0)


def find_work(graphs: Sequence[fx.GraphModule], objective: Objective, low: torch.dtype = torch.float16) -> Work:
    """Return the ops that are low in the rewritten ``graphs`` and that a rule can keep in fp32, in graph order."""
    value = worth(objective, low)
    found: dict[tuple[str, str, int], Item] = {}
    total = 0.0
    for gm in graphs:
        for _, inner in ir.all_graphs(gm):
            for node in inner.graph.nodes:
                known = ir.decision(node)
                if node.op != "call_function" or known is None or known.rule is Rule.INSERTED:
                    continue
                cost = value(node)
                total += cost
                free = known.rule in _FREE and known.cls in _BY_CLASS and ir.CALL in node.meta
                if not free or known.precision not in ir.LOW_DTYPES:
                    continue
                module, op, number = ir.module_path(node), ir.op_name(node), node.meta[ir.CALL]
                danger = _BY_CLASS[known.cls or OpClass.KEEP]
                item = Item(module, op, number, node.name, ir.source_line(node), cost, danger)
                old = found.setdefault((module, op, number), item)
                if old is not item:
                    found[module, op, number] = dataclasses.replace(old, cost=old.cost + cost)
    if not total:  # nothing of what the objective counts: every op counts the same
        items = tuple(dataclasses.replace(item, cost=1.0) for item in found.values())
        return Work(items, float(len(items)))
    return Work(tuple(found.values()), total)


def _bytes(node: fx.Node) -> int:
    values = [v for v in ir.tensor_outputs(node) if v is not None and v.is_floating_point()]
    return sum(ir.nbytes(v) for v in values) if not ir.is_getitem(node) else 0


def with_calibration(work: Work, calibration: Calibration, dtype: torch.dtype) -> Work:
    """Return the same ops with the danger that a calibration has measured.

    Ops with a value, an operand or a gradient that does not fit are suspects and the most dangerous ones; the others
    are ordered by sensitivity per gain.
    """
    rows = {call_name(row.module, row.op, row.number): row for row in calibration.rows}
    known = sum(item.name in rows for item in work.items)
    if work.items and known < len(work.items) / 2:
        raise CalibrationError(
            f"The calibration has rows for {known} of the {len(work.items)} ops of this model: it was made for another "
            "one. Call calibrate with this model."
        )
    bounds = Bounds(dtype, margin=1.0)
    found = []
    for item in work.items:
        row = rows.get(item.name)
        if row is not None:
            why = bounds.forward(row) or bounds.backward(row, calibration.scale) or bounds.cancels(row)
            gain = 1 / len(work.items) + (item.cost / work.total if work.total else 0.0)
            danger = row.sensitivity / gain if why is None else bounds.excess(row)
            item = dataclasses.replace(item, danger=danger, suspect=why is not None,
                                       range=why or f"reaches {row.max_abs:.3g}")  # fmt: skip
        found.append(item)
    return dataclasses.replace(work, items=tuple(found))


def order(work: Work) -> list[int]:
    """Return the numbers of the items from the least to the most dangerous; the cheaper of two equals is the more
    dangerous."""
    places = range(len(work.items))
    key = {i: (item.suspect, item.danger, -item.cost) for i, item in enumerate(work.items)}
    return sorted(places, key=lambda i: key[i])


def by_module(work: Work, ordered: Sequence[int]) -> list[list[int]]:
    """Return the items of each module, in the order of danger; the modules are in the order of their most dangerous
    op."""
    groups: dict[str, list[int]] = {}
    for number in ordered:
        groups.setdefault(work.items[number].module, []).append(number)
    place = {number: i for i, number in enumerate(ordered)}
    return sorted(groups.values(), key=lambda group: place[group[-1]])


def policy_for(base: Policy, items: Iterable[Item], reasons: Mapping[Item, str] | None = None) -> Policy:
    """Return ``base`` with these items in fp32."""
    return base.with_calls(item.rule((reasons or {}).get(item, "")) for item in items)
