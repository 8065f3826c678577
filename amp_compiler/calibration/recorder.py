"""Runs captured fp32 graphs node by node and records the range of every value, of its gradient, and the sensitivity.

Nothing of a tensor's size is kept until the backward: of each result, only the rounding errors of a sample of elements.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx

from .. import ir
from ..common.torch_names import OpOverload, pytree
from ..policy import Policy
from ..policy.ops.row import OpClass
from ..runtime.record import Range, Tally, flattened, merge, range_of
from ..training.overflow import users_line
from ..training.probe import Watching, is_float
from .row import Row

#: elements of a result whose rounding errors are kept until the backward, at least half as many
_SAMPLE = 1 << 13
#: higher-order ops whose bodies are run node by node, so that they have no row of their own
_INLINED = ("tag_activation_checkpoint", "cond", "scan", "while_loop", "wrap", "invoke_subgraph")


@dataclass
class Effect:
    """What the backward of a batch shows of one value: its gradients, and ``change``, the squared change of the loss
    that rounding the value makes, to first order. ``trained``: False if a training step computes no gradient of the
    value, as of data and frozen parameters; it is then not recorded."""

    gradient: Tally
    change: float = 0.0
    trained: bool = True
    largest_part: float = 0.0  # magnitude of the gradients that are added up to this one, where there are several


@dataclass
class Entry:
    """What is known so far of one op."""

    node: str
    result: Tally
    effect: Effect  # of its result, in this batch
    given: dict[int, tuple[int, Effect]] = field(default_factory=dict)  # of its operands in this batch, by id
    operands: dict[int, Range] = field(default_factory=dict)
    gradient: Range = field(default_factory=Range)
    gradients: dict[int, Range] = field(default_factory=dict)  # of its operands
    own_change: float = 0.0  # that rounding its result makes
    operand_change: float = 0.0
    largest_part: float = 0.0  # as in ``Effect``, over all batches

    def end_batch(self, new: Effect) -> None:
        """Add what the backward of this batch showed; ``new`` is for the next one."""
        self.gradient = self.gradient.merged(self.effect.gradient.range)
        self.own_change += self.effect.change
        self.largest_part = max(self.largest_part, self.effect.largest_part)
        for place, effect in self.given.values():
            self.gradients[place] = self.gradients.get(place, Range()).merged(effect.gradient.range)
            self.operand_change += effect.change
        self.effect, self.given = new, {}

    @property
    def cancellation(self) -> float:
        """How many times as large as the gradient of its result the parts are that this is the sum of."""
        return self.largest_part / self.gradient.max_abs if self.gradient.max_abs else 0.0

    def change(self, *, rounds_once: bool) -> float:
        """Return the squared change of the loss if the op runs low: its operands and its result are rounded."""
        return self.own_change + (0.0 if rounds_once else self.operand_change)


class Recorder:
    """Adds up what the graphs show. ``dtype``: the low-precision dtype. ``scale``: of the loss. ``held``: ids of the
    tensors that the model holds, such as buffers."""

    def __init__(self, dtype: torch.dtype, scale: float, held: frozenset[int] = frozenset()) -> None:
        self.dtype, self.scale, self.held, self.batch = dtype, scale, held, 0
        self.entries: dict[tuple[str, str, str, int | None], Entry] = {}
        self.ranges: dict[fx.Node, list[Range]] = {}  # of the graphs that are running
        self.effects: dict[fx.Node, Effect] = {}  # of the same nodes; filled by the backward
        self.uses: dict[tuple[fx.Node, fx.Node], Effect] = {}  # of a value in one of several ops that read it
        self.leaves: list[Tensor] = []  # inputs that have a gradient for the sake of the recording
        self.untrained: set[fx.Node] = set()  # their nodes
        self.parameters: dict[tuple[int, int], Range] = {}  # (id of a parameter, its version) -> its range
        self.recomputing = False

    def run(self, graph: fx.GraphModule, args: Sequence[Any]) -> Any:
        return _Recording(graph, self, keep=False).run(*self._with_gradients(graph, args))

    def _with_gradients(self, graph: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
        """Give the batch's tensors that nothing writes to a gradient: the effect of rounding them is then seen too."""
        given, written = list(args), ir.written_nodes(graph.graph)
        places = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for place, (node, value) in enumerate(zip(places, args, strict=True)):
            own = id(value) in self.held or node in written
            if is_float(value) and not value.requires_grad and not own and torch.is_grad_enabled():
                given[place] = value.detach().requires_grad_()
                self.leaves.append(given[place])
                self.untrained.add(node)
        return given

    def next_batch(self) -> None:
        self.end_batch()
        self.batch += 1
        self.ranges.clear()
        self.effects.clear()
        self.uses.clear()
        self.leaves.clear()
        self.untrained.clear()

    def end_batch(self) -> None:
        for (_, source), use in self.uses.items():
            whole = self.effects[source]
            whole.largest_part = max(whole.largest_part, use.gradient.range.max_abs)
        for entry in self.entries.values():
            entry.end_batch(self._new_effect())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Enclose ops that are computed once more, for a checkpoint's backward."""
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    def watch(self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recomputing:
            return
        tensors = [t for t in pytree.tree_leaves(result) if is_float(t)]
        if node.op != "call_function" or node.target is operator.getitem or not tensors:
            self.ranges[node] = self._of_selected(node, args) or [self._of_input(node, t) for t in tensors]
            self.effects[node] = self._of_source(node) or self._effect_of(tensors, self._of_input_node(node))
            return
        if _name(node) in _INLINED:
            self.ranges[node] = [range_of(t, self.dtype, batch=self.batch) for t in tensors]
            self.effects[node] = self._effect_of(tensors)
            return
        given = [a for _, a in ir.tensor_args(node) if self.ranges.get(a)]
        if given and _is_view(node, result, args):
            self.ranges[node], self.effects[node] = self.ranges[given[0]], self.effects[given[0]]
            return
        entry = self._entry(node)
        entry.effect.trained = any(self.effects[source].trained for source in given) or not given
        self.ranges[node] = [entry.result.see(t, self.batch) for t in tensors]
        self.effects[node] = entry.effect
        for place, source in enumerate(given):
            entry.operands[place] = merge([entry.operands.get(place, Range()), *self.ranges[source]])
            effect = self.uses.get((node, source)) or self.effects[source]
            entry.given[id(effect)] = place, effect
        self._effect_of(tensors, entry.effect)

    def apart(self, reader: fx.Node, source: fx.Node, value: Tensor) -> Tensor:
        """Return an alias of a value for one of several ops that read it, whose gradient is from this op alone."""
        alias = value.view_as(value)
        if not self.recomputing:
            effect = self.uses.get((reader, source)) or self._new_effect()
            effect.trained = self.effects[source].trained
            self.uses[reader, source] = self._effect_of([alias], effect)
        return alias

    def part(self, source: fx.Node, value: Tensor) -> Tensor:
        """Return an alias of a value for one of several places in the arguments of an op. Rounding the value changes
        all of them at once, so only the size of its gradient is seen apart."""
        alias, whole = value.view_as(value), self.effects.get(source)
        if whole is not None and not self.recomputing:

            def see(gradient: Tensor) -> None:
                found = range_of(gradient, self.dtype, self.scale, self.batch).max_abs
                whole.largest_part = max(whole.largest_part, found)

            alias.register_hook(see)
        return alias

    def _entry(self, node: fx.Node) -> Entry:
        key = ir.module_path(node), ir.op_name(node), users_line(node), node.meta.get(ir.CALL)
        if key not in self.entries:
            self.entries[key] = Entry(node.name, Tally(self.dtype), self._new_effect())
        return self.entries[key]

    def _of_selected(self, node: fx.Node, args: tuple[Any, ...]) -> list[Range] | None:
        """Return the range of one of another node's results, which is known."""
        if node.target is not operator.getitem or not isinstance(args[0], (tuple, list)):
            return None
        known = self.ranges.get(node.args[0], [])  # type: ignore[arg-type]
        return [known[args[1]]] if len(known) == len(args[0]) and isinstance(args[1], int) else None

    def _of_source(self, node: fx.Node) -> Effect | None:
        return self.effects.get(node.args[0]) if node.target is operator.getitem else None  # type: ignore[arg-type]

    def _of_input_node(self, node: fx.Node) -> Effect:
        effect = self._new_effect()
        effect.trained = node not in self.untrained
        return effect

    def _new_effect(self) -> Effect:
        return Effect(Tally(self.dtype, self.scale))

    def _effect_of(self, tensors: Sequence[Tensor], effect: Effect | None = None) -> Effect:
        """Return the effect of these tensors, which their hooks will fill in."""
        effect = effect or self._new_effect()
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._hook(effect, tensor))
        return effect

    def _of_input(self, node: fx.Node, tensor: Tensor) -> Range:
        key = id(tensor._base if tensor._base is not None else tensor), tensor._version
        if not node.meta.get(ir.PARAMETER):
            return range_of(tensor, self.dtype, batch=self.batch)
        if key not in self.parameters:
            self.parameters[key] = range_of(tensor, self.dtype, batch=self.batch)
        return self.parameters[key]

    def _hook(self, effect: Effect, tensor: Tensor) -> Callable[[Tensor | None], None]:
        """Return a hook for the gradient of a result. It holds the rounding errors of a sample, not the result."""
        with torch.no_grad():
            values, order = flattened(tensor.detach())
            step = max(values.numel() // _SAMPLE, 1) | 1  # odd, as sizes rarely are
            errors = _rounding_errors(values[::step], self.dtype)
        share = values.numel() / max(errors.numel(), 1)
        del values, tensor

        def see(gradient: Tensor | None) -> None:
            with torch.no_grad():
                if effect.trained:
                    _see(effect.gradient, gradient, self.batch)
                if gradient is not None and gradient.layout is torch.strided:
                    sample = flattened(gradient, order)[0][::step]
                    changes = (sample * errors).abs().double().square()
                    effect.change += float(changes.nan_to_num_(0.0, 0.0, 0.0).sum()) * share

        return see

    def rows(self, has_gradients: bool, has_loss: bool) -> tuple[Row, ...]:
        """Return what was recorded. Gradients that are not those of a loss only give the sensitivities."""
        self.end_batch()
        classify = Policy("O2", self.dtype).classify
        return tuple(
            Row(
                e.node, op, module, source, e.result.range,
                e.change(rounds_once=classify(op).cls is OpClass.EXACT) / self.batch if has_gradients else 0.0,
                e.gradient if has_loss else None,
                tuple(e.operands[place] for place in sorted(e.operands)), number,
                tuple(e.gradients.get(place, Range()) for place in sorted(e.operands)) if has_loss else (),
                e.cancellation if has_loss else 0.0,
            )
            for (module, op, source, number), e in self.entries.items()
        )  # fmt: skip


def _see(tally: Tally, gradient: Tensor | None, batch: int) -> None:
    """Add a gradient; autograd has none for a result of an op that nothing depends on."""
    if gradient is not None:
        tally.see(gradient, batch)


def _rounding_errors(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what rounding changes. What overflows becomes the largest number, so that its error can be compared."""
    if values.is_complex():
        return torch.zeros_like(values)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype).to(values.dtype) - values


def _is_view(node: fx.Node, result: Any, args: tuple[Any, ...]) -> bool:
    """True if the op moves all its input's values as they are, without a copy."""
    given = next((a for a in pytree.tree_leaves(args) if isinstance(a, Tensor)), None)
    if not isinstance(result, Tensor) or given is None or ir.mutated_args(node):
        return False
    same = (result.dtype, result.numel(), result.layout) == (given.dtype, given.numel(), given.layout)
    return same and result.layout is torch.strided and result.data_ptr() == given.data_ptr()


def _has_schema(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload)


def _name(node: fx.Node) -> str:
    return ir.op_name(node).removeprefix("higher_order::")


class _Recording(Watching):
    """Runs the bodies of control flow node by node, and checkpoints as checkpoints."""

    watcher: Recorder

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if n.op != "call_function" or ir.is_higher_order(n) or ir.mutated_args(n) or not _has_schema(n):
            return super().fetch_args_kwargs_from_env(n)

        times = Counter(a for a in pytree.tree_leaves((n.args, n.kwargs)) if isinstance(a, fx.Node))

        def load(source: fx.Node) -> Any:
            value = self.env[source]
            if not is_float(value) or not value.requires_grad:
                return value
            if len(source.users) > 1:
                return self.watcher.apart(n, source, value)
            return self.watcher.part(source, value) if times[source] > 1 else value

        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(fx.Node, load, (n.args, n.kwargs))
        return found

    def run_op(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if n.op == "call_function" and _has_schema(n):
            return self.call_function(n.target, args, kwargs)
        if n.op != "call_function" or not ir.is_higher_order(n) or any(_is_closed(a) for a in args):
            return super().run_op(n, args, kwargs)
        name = _name(n)
        if name == "tag_activation_checkpoint":
            return torch.utils.checkpoint.checkpoint(
                lambda *given: self.inside(args[0], given), *args[1:], use_reentrant=False,
                context_fn=lambda: (contextlib.nullcontext(), self.watcher.paused()),
            )  # fmt: skip
        if name == "cond":
            return self.inside(args[1] if bool(args[0]) else args[2], args[3] if len(args) > 3 else ())
        if name == "while_loop":
            return self._while_loop(*args, **kwargs)
        if name == "scan":
            return self._scan(*args, **kwargs)
        return super().run_op(n, args, kwargs)

    def _while_loop(self, cond: Any, body: Any, carried: Any, additional: Any = ()) -> Any:
        state = tuple(carried)
        while bool(pytree.tree_leaves(self.inside(cond, (*state, *additional)))[0]):
            state = tuple(self.inside(body, (*state, *additional)))
        return state

    def _scan(self, combine: Any, init: Any, xs: Any, additional: Any = ()) -> Any:
        carry, steps = tuple(init), []
        for index in range(xs[0].shape[0]):
            found = tuple(self.inside(combine, (*carry, *(x[index] for x in xs), *additional)))
            carry = found[: len(init)]
            steps.append(found[len(init) :])
        return (*carry, *(torch.stack(ys) for ys in zip(*steps, strict=True)))


def _is_closed(value: Any) -> bool:
    return isinstance(value, fx.GraphModule) and bool(value.meta.get(ir.CLOSED))
