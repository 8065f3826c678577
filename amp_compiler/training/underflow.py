"""``explain_underflow``: which gradients low precision flushes to zero, from which op on, and the scale that helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .. import ir
from ..policy import dtype_name
from ..runtime.record import Range, Tally, merge, sample_of
from .overflow import users_line
from .owner import Owner
from .probe import Probe, Watcher, Watching, is_float
from .rerun import undisturbed
from .window import Window, set_rng_state


@dataclass(frozen=True)
class Underflow:
    """What ``explain_underflow`` found; prints as a short text. False in a condition if nothing is flushed to zero.

    ``share``: of the non-zero gradients that are computed in low precision, the share that is flushed. ``op``,
    ``node``, ``module``, ``source``: the first op of the backward whose gradients are hit. ``parameters``: those whose
    gradients are hit, the worst first, with their shares. ``better_scale``: the scale of the loss that saves most of
    them, or None if none is better.
    """

    message: str
    share: float = 0.0
    op: str = ""
    node: str = ""
    module: str = ""
    source: str = ""
    parameters: tuple[tuple[str, float], ...] = ()
    scale: float = 1.0
    better_scale: float | None = None

    def __bool__(self) -> bool:
        return self.share > 0

    def __str__(self) -> str:
        return self.message


@dataclass
class Gradient:
    """The gradients of one value that the step holds in low precision. ``order``: when they came."""

    node: fx.Node
    tally: Tally
    parameter: str = ""
    order: int = 0


@dataclass
class Flushed:
    """Watches a graph that runs in fp32 and records the gradients of the values that the step holds in low precision.

    ``names``: of the parameters, by id. ``sampled``: of a large gradient, an even sample is enough.
    """

    scale: float
    names: Mapping[int, str]
    sampled: bool = False
    seen: list[Gradient] = field(default_factory=list)
    given: dict[fx.Node, str] = field(default_factory=dict)  # input -> the parameter that it is
    count: int = 0
    in_fp32: bool = True

    def watch(self, node: fx.Node, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if node.op == "placeholder" and is_float(result):
            self.given[node] = self.names.get(id(args[0]), "")
        traced = ir.tensor_of(node)
        if not is_float(result) or not result.requires_grad or traced is None or traced.dtype not in ir.LOW_DTYPES:
            return
        found = Gradient(node, Tally(traced.dtype, self.scale), self.parameter(node))
        self.seen.append(found)
        result.register_hook(lambda gradient: self._add(found, gradient))

    def parameter(self, node: fx.Node) -> str:
        """Return the parameter that a node is, if it is stored in low precision, or is the low-precision copy of."""
        source = node.args[0] if ir.is_float_cast(node) and node.args else node
        return self.given.get(source, "") if isinstance(source, fx.Node) else ""

    def _add(self, found: Gradient, gradient: Tensor | None) -> None:
        self.count += 1
        found.order = found.order or self.count
        if gradient is not None:
            found.tally.see(sample_of(gradient) if self.sampled else gradient)


def explain_underflow(
    captured: Callable[..., Any] | None, probe: Probe, owner: Owner, window: Window, low: torch.dtype,
    whole: Mapping[int, Tensor],
) -> Underflow:  # fmt: skip
    """Explain which gradients of the last batch are flushed to zero. ``captured`` runs a batch, through ``probe``;
    ``whole``: id of a sharded parameter -> the whole one that the model holds now."""
    if captured is None or not window.batches:
        return Underflow("There is no batch to look at: call explain_underflow() right after a step.")
    flushed = Flushed(window.last_scale(), owner.names())
    run_in_fp32(captured, probe, owner, window, whole, flushed)
    return _explain([g for g in flushed.seen if g.order and g.tally.range.nonzero], low, flushed.scale)


def run_in_fp32(
    captured: Callable[..., Any], probe: Probe, owner: Owner, window: Window, whole: Mapping[int, Tensor],
    watcher: Watcher,
) -> None:  # fmt: skip
    """Run the last batch once more, forward and backward, in fp32 and with a watcher that sees every value. The state
    of the run is not changed. The arguments are those of ``explain_underflow``."""
    batch = window.batches[-1]
    parameters = [whole.get(id(p), p) for p in owner.parameters() if p.requires_grad]
    probe.begin()
    probe.instead = lambda graph, args: Watching(graph, watcher, keep=False).run(*args)
    try:
        with undisturbed(owner, window.device), torch.enable_grad():
            set_rng_state(batch.rng, window.device)
            loss = captured(*batch.copy())[0]
            torch.autograd.grad(loss.float() / window.size, parameters, allow_unused=True)
    finally:
        probe.end()


def _explain(seen: Sequence[Gradient], low: torch.dtype, scale: float) -> Underflow:
    name = dtype_name(low)
    total = merge(g.tally.range for g in seen)
    if not total.nonzero:
        return Underflow(f"No gradient of this step is computed in {name}, so none is flushed to zero.", scale=scale)
    at = f"At the present scale of {scale:g}" if scale != 1 else "Without a loss scale"
    share = total.flushed / total.nonzero
    if not share:
        return Underflow(f"{at} no gradient is flushed to zero in {name}: the smallest, scaled, is "
                         f"{total.min_nonzero:.2g}.", scale=scale)  # fmt: skip
    first = min((g for g in seen if g.tally.range.flushed), key=lambda g: g.order)
    shares = {g.parameter: g.tally.range.flushed / g.tally.range.nonzero for g in seen if g.parameter}
    hit = sorted(((p, s) for p, s in shares.items() if s), key=lambda item: -item[1])
    better = better_scale(total, low, scale)
    node = first.node
    maker = next(iter(node.users), node) if first.parameter else node
    what = f"the parameter {first.parameter}" if first.parameter else f"the result of {ir.op_name(node)}"
    lines = [f"{at}, {share:.2g} of the gradients in {name} are flushed to zero, in the backward first those of "
             f"{what}."]  # fmt: skip
    module, source = ir.module_path(maker), users_line(maker)
    lines += [f"  module: {module}"] * bool(module) + [f"  source: {source}"] * bool(source)
    if hit:
        shown = ", ".join(f"{p} ({s:.0%})" for p, s in hit[:5]) + (f" and {len(hit) - 5} more" if len(hit) > 5 else "")
        lines.append(f"  parameters hit: {shown}")
    lines.append(scale_advice(total, better, low))
    return Underflow("\n".join(lines), share, ir.op_name(maker), node.name, module, source, tuple(hit), scale, better)


def better_scale(total: Range, low: torch.dtype, scale: float) -> float | None:
    """Return the smallest power of two that saves what can be saved without an overflow, with a margin of two."""
    if not total.max_abs:
        return None
    most = math.floor(math.log2(torch.finfo(low).max / 2 / total.max_abs))
    lost = {power: total.times(2.0**power, low).flushed for power in range(1, max(most, 0) + 1)}
    better = [power for power, count in lost.items() if count < total.flushed and count == min(lost.values())]
    return scale * 2.0 ** better[0] if better else None


def scale_advice(total: Range, better: float | None, low: torch.dtype) -> str:
    if better is None:
        return (
            f"No larger scale helps: the largest gradient, scaled, is {total.max_abs:.2g}, and {dtype_name(low)} holds "
            f"{torch.finfo(low).max:g}. Keep the ops in question in fp32 (Policy.calibrated finds them), or use "
            "dtype=torch.bfloat16."
        )
    return f"A scale of {better:g} would save them: loss_scaler=StaticLossScaler({better:g}), or 'dynamic'."
