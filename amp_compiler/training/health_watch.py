"""Samples the health of a training step: what its updates, gradients and activations lose to rounding.

Two measurements with different costs. Whether an update moved an element is seen by hooks around ``optimizer.step``, on
a sample of each tensor, and stays on the device until somebody asks. Gradients and activations need the numbers that
fp32 would give, so the last batch runs once more, which takes longer than a step: at every fourth sample only.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from .. import ir
from ..common.logs import log
from ..common.messages import first_line
from ..inspect.report import Report
from ..parallel.shards import local_of
from ..policy import dtype_name
from ..policy.ops.row import OpClass
from ..runtime.record import Range, Tally, merge, sample_of
from .health import Health, OpHealth, ParameterHealth
from .overflow import users_line
from .owner import Owner
from .probe import Watcher, is_float
from .underflow import Flushed
from .window import Window

_KEPT = 16  # samples: what was long ago is not the health of today
_LOOKS = 4  # samples per batch that is run once more
Look = Callable[[Watcher], None]
Updating = Callable[[Optimizer], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Moved:
    """What one update did to one parameter, as two numbers on the device: elements with a gradient, and those of them
    that stayed as they were."""

    name: str
    dtype: str
    counts: Tensor


class Movement:
    """Counts, around one ``optimizer.step()``, the elements that have a gradient and stay as they are. ``names``: by
    the ids of the parameters that the optimizer holds now; others may stand in their places during the step."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.names = [[names.get(id(p), f"optimizer.{g}.{i}") for i, p in enumerate(group["params"])]
                      for g, group in enumerate(optimizer.param_groups)]  # fmt: skip
        self.before: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.found: list[Moved] = []
        self.handles = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for place, parameter in _places(optimizer):
            gradient = None if parameter.grad is None else local_of(parameter.grad)
            if gradient is not None and gradient.layout is torch.strided:
                self.before[place] = sample_of(local_of(parameter)).clone(), _like(gradient, local_of(parameter)).ne(0)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for place, parameter in _places(optimizer):
            if place in self.before:
                value, has_gradient = self.before.pop(place)
                stayed = sample_of(local_of(parameter)).eq(value).logical_and_(has_gradient)
                counts = torch.stack([has_gradient.sum(), stayed.sum()])
                self.found.append(Moved(self.names[place[0]][place[1]], dtype_name(parameter.dtype), counts))


def _places(optimizer: Optimizer) -> list[tuple[tuple[int, int], Tensor]]:
    """Return the parameters that are updated, by their places. A learning rate of 0 moves nothing on purpose."""
    groups = [(g, group) for g, group in enumerate(optimizer.param_groups) if not _is_zero(group.get("lr"))]
    return [((g, i), p) for g, group in groups for i, p in enumerate(group["params"])]


def _is_zero(rate: Any) -> bool:
    return isinstance(rate, (int, float)) and rate == 0


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a sample of the elements of the gradient that are at the places of the parameter's sample."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
    return sample_of(gradient)


@dataclass
class Seen:
    """Watches a batch that runs in fp32: gradients of parameters, and the results that the step holds low."""

    gradients: Flushed
    results: dict[fx.Node, Tally] = field(default_factory=dict)
    in_fp32: bool = True

    def watch(self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gradients.watch(node, result, args, kwargs)
        traced = ir.tensor_of(node)
        if traced is None or traced.dtype not in ir.LOW_DTYPES or not is_float(result) or node.op != "call_function":
            return
        known = ir.decision(node)
        moves = known is not None and known.cls is OpClass.EXACT and not ir.is_float_cast(node)
        if not moves and not self.gradients.parameter(node):
            self.results.setdefault(node, Tally(traced.dtype)).see(sample_of(result))

    def ops(self) -> dict[tuple[str, str, str, str], Range]:
        """Return the ranges by op, module, source and dtype. A cast counts as a result of the op that it casts."""
        found: dict[tuple[str, str, str, str], Range] = {}
        for node, tally in self.results.items():
            source = node.args[0] if ir.is_float_cast(node) and node.args else node
            maker = source if isinstance(source, fx.Node) and source.op == "call_function" else node
            what = "the input" if maker is node and ir.is_float_cast(node) else ir.op_name(maker)
            key = what, ir.module_path(maker), users_line(maker), dtype_name(tally.dtype)
            found[key] = found.get(key, Range()).merged(tally.range)
        return found

    def parameters(self) -> dict[str, Range]:
        """Return the ranges of the gradients by parameter; "" for those of other values."""
        found: dict[str, Range] = {}
        for gradient in self.gradients.seen:
            if gradient.order:
                found[gradient.parameter] = found.get(gradient.parameter, Range()).merged(gradient.tally.range)
        return found


class HealthWatch:
    """The samples of a training step. ``every``: the period in updates; None: nothing is sampled."""

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.samples: deque[list[Moved]] = deque(maxlen=_KEPT)
        self.looks: deque[Seen] = deque(maxlen=_KEPT // _LOOKS)
        self.failure = ""
        self._movement: Movement | None = None

    def begin(self, optimizer: Optimizer, owner: Owner, window: Window) -> None:
        """Get ready for an update, if it is one that is sampled."""
        if self._movement is not None:  # the update before has failed
            self._movement.remove()
            self._movement = None
        if self.every is not None and window.number % self.every == 0:
            self._movement = Movement(optimizer, owner.names())

    def end(self, owner: Owner, window: Window, look: Look) -> None:
        """Take the sample of the update that was begun. ``look`` runs the last batch once more, with a watcher."""
        if self._movement is None or self.every is None:
            return
        movement, self._movement = self._movement, None
        movement.remove()
        if movement.found:  # else the update was skipped
            taken = 1 if window.found is None else window.found.eq(0).view(())
            self.samples.append([Moved(m.name, m.dtype, m.counts * taken) for m in movement.found])
        if (window.number // self.every - 1) % _LOOKS == 0:
            self._look(owner, window, look)

    def _look(self, owner: Owner, window: Window, look: Look) -> None:
        seen = Seen(Flushed(window.last_scale(), owner.names(), sampled=True))
        try:
            look(seen)
        except Exception as error:  # an op without an fp32 form, too little memory: the run goes on
            self.failure = f"The batch could not run in fp32, so there is less to tell: {first_line(error)}"
            log("capture", "%s", self.failure)
        else:
            self.looks.append(seen)

    # ---------------------------------------------------------------------------------------------- asking

    def health(
        self, optimizer: Optimizer, owner: Owner, window: Window, low: torch.dtype, look: Look | None,
        updating: Updating = contextlib.nullcontext,
    ) -> Health:  # fmt: skip
        """Return what was sampled; without samples, what the last update shows. ``look`` is None before a batch.
        ``updating``: what encloses an update of an optimizer."""
        notes, samples, looks = [], list(self.samples), list(self.looks)
        if not samples and window.done:
            made = f"No update was made of these {window.done} micro-batches yet"
            notes.append(f"{made}: lost updates are those that one would lose now.")
        elif not samples and window.found is not None and bool(window.found):
            notes.append("The last update was skipped, since a gradient was not finite: see step.explain_overflow().")
        if look is None and not samples:
            return Health(dtype=low, every=self.every, notes=("There is nothing to look at yet: run a step first.",))
        if not samples and (again := _once_more(optimizer, owner, updating)) is not None:
            samples = [again]
        elif not samples:
            notes.append("Lost updates are not known: compile with health_every=50, so that updates are sampled.")
        if not looks and look is not None:
            self._look(owner, window, look)
            looks = [self.looks.pop()] if self.looks else []
        notes += [self.failure] * bool(self.failure)
        every = self.every if self.samples else None
        return _health(samples, looks, low, window.last_scale(), every, tuple(notes))

    def noted(self, report: Report, window: Window, low: torch.dtype) -> Report:
        """Return the report with what the samples advise among its notes."""
        if not self.samples and not self.looks:
            return report
        found = _health(list(self.samples), list(self.looks), low, window.last_scale(), self.every, ())
        notes = [f"health: {line}" for line in found.advice]
        return dataclasses.replace(report, notes=(*report.notes, *notes)) if notes else report


def _once_more(optimizer: Optimizer, owner: Owner, updating: Updating) -> list[Moved] | None:
    """Return what an update by the present gradients would do, by that of a copy; None if there is no such copy."""
    try:
        names = owner.names()
        twin = copy.deepcopy(optimizer)
        pairs = zip(_all(twin), _all(optimizer), strict=True)
        named = {id(mine): names[id(own)] for mine, own in pairs if id(own) in names}
        for mine, own in zip(_all(twin), _all(optimizer), strict=True):
            mine.grad = None if own.grad is None else own.grad.to(mine.dtype)
        if all(p.grad is None for p in _all(twin)):
            return None
        movement = Movement(twin, named)
        with torch.no_grad(), updating(twin):
            twin.step()
        return movement.found
    except Exception as error:  # an optimizer that cannot be copied or needs more than gradients
        log("capture", "an update could not be repeated on a copy: %s", first_line(error))
        return None


def _all(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _health(
    samples: Sequence[Sequence[Moved]], looks: Sequence[Seen], low: torch.dtype, scale: float, every: int | None,
    notes: tuple[str, ...],
) -> Health:  # fmt: skip
    rows: dict[str, ParameterHealth] = {}
    moved = [m for sample in samples for m in sample]
    counts = torch.stack([m.counts for m in moved]).tolist() if moved else []  # waits for the device once
    for one, (updates, lost) in zip(moved, counts, strict=True):
        row = rows.get(one.name, ParameterHealth(one.name))
        rows[one.name] = ParameterHealth(one.name, one.dtype, row.updates + updates, row.lost + lost)
    ops: dict[tuple[str, str, str, str], Range] = {}
    gradients: dict[str, Range] = {}
    for seen in looks:
        for key, values in seen.ops().items():
            ops[key] = ops.get(key, Range()).merged(values)
        for name, values in seen.parameters().items():
            gradients[name] = gradients.get(name, Range()).merged(values)
    for name, values in gradients.items():
        row = rows.get(name, ParameterHealth(name))
        if name:
            rows[name] = ParameterHealth(name, row.dtype, row.updates, row.lost, values.nonzero, values.flushed)
    return Health(
        tuple(rows.values()), tuple(OpHealth(*key, values) for key, values in ops.items()), low, scale, len(samples),
        len(looks), every, merge(gradients.values()), notes,
    )  # fmt: skip
