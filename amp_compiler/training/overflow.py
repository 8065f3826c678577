"""Where a run went to inf or NaN: the failed batch once more, op by op, forward and backward, with a check after each.

The batch runs through the rewritten forward graph in an interpreter. Hooks look at the gradient of every value, so an
op of the backward is named by the op of the forward that it belongs to, with the user's module and source line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .. import graph as g
from ..policy import dtype_name


@dataclass(frozen=True)
class Overflow:
    """What ``explain_overflow`` found; prints as a short text. False in a condition if nothing overflowed.

    ``phase``: "forward", "backward", "input" (the batch was not finite), "parameter" (a weight was not), or "" .
    """

    message: str
    phase: str = ""
    op: str = ""
    node: str = ""
    module: str = ""
    source: str = ""
    dtype: str = ""
    value: str = ""  # "inf", "-inf" or "nan"
    parameters: tuple[str, ...] = ()  # whose gradients are not finite
    batch: int = 0  # which micro-batch of the update
    scale: float = 1.0

    def __bool__(self) -> bool:
        return bool(self.phase)

    def __str__(self) -> str:
        return self.message


@dataclass
class Seen:
    """One value of the graph that was run with checks."""

    node: fx.Node
    value: str  # "" if finite
    inputs: list[fx.Node]
    largest: float
    gradient: str | None = None  # None until the backward came by
    order: int = 0  # of its gradient


@dataclass
class Probe:
    """Runs graphs node by node while ``looking``, and remembers what it saw."""

    looking: bool = False
    seen: dict[fx.Node, Seen] = field(default_factory=dict)
    gradients: int = 0

    def begin(self) -> None:
        self.looking, self.seen, self.gradients = True, {}, 0

    def end(self) -> Probe:
        """Stop looking; what was seen goes to the caller."""
        self.looking = False
        return Probe(False, self.seen, self.gradients)

    def run(self, graph: fx.GraphModule, args: Sequence[Any]) -> Any:
        return _Watching(graph, self).run(*args)

    def watch(self, node: fx.Node, result: Any) -> None:
        tensors = [t for t in pytree.tree_leaves(result) if _is_float(t)]
        value = next((kind for t in tensors if (kind := _kind(t))), "")
        largest = max((float(_largest(t)) for t in tensors), default=0.0)
        seen = self.seen[node] = Seen(node, value, list(node.all_input_nodes), largest)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._gradient(seen, gradient))

    def _gradient(self, seen: Seen, gradient: Tensor) -> None:
        self.gradients += 1
        if not seen.gradient:
            seen.gradient, seen.order = _kind(gradient), self.gradients

    def culprit(self, loss_is_finite: bool) -> tuple[str, fx.Node] | None:
        """(phase, node) of the first value that is not finite though all that it was made of is."""
        if not loss_is_finite:
            first = self._first_forward()
            if first is not None:
                return first
        bad = [s for s in self.seen.values() if s.gradient]
        if not bad:
            return self._first_forward()
        earliest = min(bad, key=lambda s: s.order)
        return "backward", self._differentiated(earliest)

    def _first_forward(self) -> tuple[str, fx.Node] | None:
        """Walk back from the last value that is not finite: a mask of -inf that softmax made finite is no cause."""
        bad = [s for s in self.seen.values() if s.value]
        if not bad:
            return None
        node = bad[-1].node
        while True:
            causes = [n for n in self.seen[node].inputs if n in self.seen and self.seen[n].value]
            if not causes:
                return ("input" if node.op == "placeholder" else "forward"), node
            node = causes[0]

    def _differentiated(self, seen: Seen) -> fx.Node:
        """The op whose backward made this value's gradient: of those that read the value, the one whose own gradient
        had come in finite, the latest first (autograd goes backward)."""
        readers = [u for u in seen.node.users if u in self.seen]
        finite = [u for u in readers if self.seen[u].gradient == ""]
        return (finite or readers or [seen.node])[-1]


class _Watching(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, probe: Probe) -> None:
        super().__init__(graph)
        self.probe = probe

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "placeholder" and _is_float(result) and result.is_leaf and result.requires_grad:
            result = result.view_as(result)  # a hook on the user's parameter itself would stay there
        if n.op != "output":
            self.probe.watch(n, result)
        return result


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _kind(tensor: Tensor) -> str:
    values = tensor.detach()
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    if values.numel() == 0 or bool(values.isfinite().all()):
        return ""
    if bool(values.isnan().any()):
        return "nan"
    return "inf" if values.is_complex() or bool((values == float("inf")).any()) else "-inf"


def _largest(tensor: Tensor) -> float:
    values = tensor.detach()
    values = values.coalesce().values() if values.layout is torch.sparse_coo else values
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def explain(
    probe: Probe, loss: Tensor, hit: Iterable[str], *, batch: int, batches: int, scale: float, finite_unscaled: bool
) -> Overflow:
    """Put into words what the probe saw. ``finite_unscaled``: with a scale of 1 all gradients are finite."""
    parameters = tuple(hit)
    found = probe.culprit(bool(loss.detach().isfinite().all()))
    of = f", micro-batch {batch + 1} of {batches}" if batches > 1 else ""
    if found is None:
        return Overflow(f"No value that is not finite was found when the batch ran again (scale {scale:g}{of}).",
                        scale=scale, batch=batch)  # fmt: skip
    phase, node = found
    seen = probe.seen[node]
    tensor = next((v for v in g.tensor_outputs(node) if v is not None), None)
    dtype = dtype_name(tensor.dtype) if tensor is not None else ""
    op, module, source = g.op_name(node), g.module_path(node), g.source_line(node)
    if phase == "input":
        own = bool(node.meta.get(g.PARAMETER))
        phase = "parameter" if own else "input"
        value = seen.value
        first = f"The {'parameter' if own else 'input'} '{node.name}' holds {value} before any op has run{of}."
        advice = ("The weights went bad in an earlier update: load an earlier checkpoint." if own
                  else "Look at the data of this batch.")  # fmt: skip
    else:
        value = seen.value if phase == "forward" else _gradient_kind(probe, node)
        made = "gives" if phase == "forward" else "gives, in its backward,"
        first = f"The first value that is not finite{of}: {op} ({dtype}) {made} {value}."
        advice = _advice(phase, op, module, dtype, scale, finite_unscaled)
    lines = [first]
    if module:
        lines.append(f"  module: {module}")
    if source:
        lines.append(f"  source: {source}")
    if phase != "input" and (inputs := _inputs(probe, node)):
        lines.append(f"  inputs: {inputs}")
    if parameters:
        shown = ", ".join(parameters[:5]) + (f" and {len(parameters) - 5} more" if len(parameters) > 5 else "")
        lines.append(f"  parameters hit: {shown}")
    lines.append(advice)
    return Overflow("\n".join(lines), phase, op, node.name, module, source, dtype, value, parameters, batch, scale)


def _gradient_kind(probe: Probe, node: fx.Node) -> str:
    kinds = (probe.seen[n].gradient for n in (*node.all_input_nodes, node) if n in probe.seen)
    return next((k for k in kinds if k), "a value that is not finite")


def _inputs(probe: Probe, node: fx.Node) -> str:
    parts = [f"{n.name} up to {probe.seen[n].largest:.3g}" for n in node.all_input_nodes if n in probe.seen]
    return ", ".join(parts)


def _advice(phase: str, op: str, module: str, dtype: str, scale: float, finite_unscaled: bool) -> str:
    if phase == "backward" and finite_unscaled and scale > 1:
        return (
            f"With a scale of 1 this batch is finite: the scale of {scale:g} was too large, which is how a dynamic "
            "scaler finds its value. There is nothing to do unless it goes on."
        )
    limit = " (the largest float16 is 65504)" if dtype == "float16" else ""
    keep = f"exclude=['{module}'] or " if module else ""
    if dtype in ("float16", "bfloat16"):
        return f"Keep it in fp32{limit}: {keep}black_list=['{op}']" + (
            ", or use dtype=torch.bfloat16." if dtype == "float16" else "."
        )
    return (
        "It is computed in fp32 already: look at the model (a division by zero, a log of zero), its data or its "
        "learning rate."
    )
