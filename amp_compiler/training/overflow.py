"""The result of ``explain_overflow``: the first op that gave inf or NaN, where it is, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from .. import ir
from ..policy import Rule, dtype_name
from .misfits import Misfits
from .probe import Probe, Seen, alone_is_finite, is_float, largest


@dataclass(frozen=True)
class Overflow:
    """What ``explain_overflow`` found; prints as a short text. False in a condition if nothing overflowed.

    ``phase``: "forward", "backward", "input" (the batch was not finite), "parameter" or "buffer" (the model was not),
    "sum" (only the sum of micro-batches was not finite), "process" (another process's gradients were not), "unknown"
    (it did not happen again), or "" (nothing did).
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
    batch: int = 0  # which micro-batch of the update, from 0
    scale: float = 1.0
    exclude: tuple[str, ...] = ()  # modules to keep in fp32, against all overflows of this batch
    black_list: tuple[str, ...] = ()  # ops, likewise

    def __bool__(self) -> bool:
        return bool(self.phase)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Circumstances:
    """What is known apart from the graph. ``names``: id of a tensor → its path in the model. ``finite_unscaled``: with
    a scale of 1 all gradients of the batch are finite. ``changed``: the batch's tensors were written to since it ran.
    ``adapts``: the scale is a dynamic scaler's. ``skipped``: the update was skipped; if False, only the loss was not
    finite. ``shared``: the gradients are averaged over several processes. ``floor``: the smallest scale that the scaler
    takes. ``misfits``: everything in the batch that does not fit, not only the first value."""

    names: Mapping[int, str]
    buffers: frozenset[int]
    batch: int
    batches: int
    scale: float
    finite_unscaled: bool
    changed: bool
    adapts: bool = True
    skipped: bool = True
    shared: bool = False
    floor: float = 1.0
    misfits: Misfits = field(default_factory=Misfits)


ELSEWHERE = (
    "The update was skipped because the gradients of another process were not finite; those of this process's batches "
    "are. Call explain_overflow() in every process, right after the step: one of them names the op."
)


def explain(probe: Probe, loss: Tensor, hit: Iterable[str], known: Circumstances) -> Overflow:
    """Describe in words what the probe saw."""
    found = probe.culprit(bool(loss.detach().isfinite().all()))
    of = f", micro-batch {known.batch + 1} of {known.batches}" if known.batches > 1 else ""
    if found is None and known.shared and known.skipped and not known.changed:
        return Overflow(ELSEWHERE, "process", scale=known.scale, batch=known.batch)
    if found is None:
        why = "its tensors were written to since" if known.changed else "the model or the batch has changed since"
        what = "The update was skipped" if known.skipped else "The loss was not finite"
        text = f"{what}{of}, but when the batch ran again everything was finite: {why}."
        return Overflow(text, "unknown", scale=known.scale, batch=known.batch)
    phase, seen = found
    answer = _of_input(seen, known, of) if phase == "input" else _of_op(probe, phase, seen, known, of)
    parameters = tuple(hit)
    lines = [answer.message]
    if answer.module:
        lines.append(f"  module: {answer.module}")
    if answer.source:
        lines.append(f"  source: {answer.source}")
    if phase != "input" and (inputs := _inputs(probe, seen)):
        lines.append(f"  inputs: {inputs}")
    if parameters:
        shown = ", ".join(parameters[:5]) + (f" and {len(parameters) - 5} more" if len(parameters) > 5 else "")
        lines.append(f"  gradients hit: {shown}")
    lines.append(answer.advice)
    if phase != "input" and (more := known.misfits.advice()):
        lines.append(more)
    return Overflow(
        "\n".join(lines), answer.phase, answer.op, seen.node.name, answer.module, answer.source, answer.dtype,
        answer.value, parameters, known.batch, known.scale, known.misfits.exclude, known.misfits.black_list,
    )  # fmt: skip


@dataclass(frozen=True)
class _Answer:
    message: str
    advice: str
    phase: str
    value: str
    op: str = ""
    module: str = ""
    source: str = ""
    dtype: str = ""


def _of_input(seen: Seen, known: Circumstances, of: str) -> _Answer:
    given = seen.args[0]
    name = known.names.get(id(given))
    dtype = dtype_name(seen.result.dtype)
    if name is None:
        text = f"{_argument(seen.node.name)} holds {seen.value} before any op has run{of}."
        return _Answer(text, "Look at the data of this batch.", "input", seen.value, dtype=dtype)
    kind = "buffer" if id(given) in known.buffers else "parameter"
    text = f"The {kind} {name} holds {seen.value} before any op has run{of}."
    advice = f"The model's {kind} went bad earlier: load an earlier checkpoint."
    return _Answer(text, advice, kind, seen.value, module=name.rpartition(".")[0], dtype=dtype)


def _argument(name: str) -> str:
    """Return how the user knows the input ``args_0``."""
    if match := re.fullmatch(r"args_(\d+)", name):
        return f"Argument {match[1]} of the model"
    return f"The input {name.removeprefix('kwargs_')}"


def _of_op(probe: Probe, phase: str, seen: Seen, known: Circumstances, of: str) -> _Answer:
    """Blame the op itself, or, for a cast that we inserted, the op whose value did not fit."""
    cast = seen if ir.is_float_cast(seen.node) else None
    if cast is not None and not _written_by_user(cast.node):
        if phase == "forward":
            return _of_cast(probe, cast, of)
        readers = [s for s in probe.readers(cast.node) if s.gradient is not None]
        seen = readers[-1] if readers else seen
    node = seen.node
    op = ir.op_name(node).removeprefix("higher_order::")
    maker = probe.seen.get(cast.sources[0]) if phase == "backward" and cast is not None and cast.sources else None
    dtype = next((t.dtype for t in _tensors(maker or seen)), None)  # the gradient of a cast has the dtype of its input
    name = "" if dtype is None else dtype_name(dtype)
    own = next((dtype_name(t.dtype) for t in _tensors(seen)), name)
    value = seen.value if phase == "forward" else _gradient_kind(probe, seen)
    what = ("a custom autograd function" if op == "autograd_function_apply" else op) + f" ({own})"
    made = f"{what} gives" if phase == "forward" else f"the backward of {what} gives"
    text = f"First non-finite value{of}: {made} {value}."
    module = ir.module_path(node)
    if maker is not None and not known.finite_unscaled:
        place, by = ir.module_path(maker.node), ir.op_name(maker.node)
        lists = [f"exclude=['{place}']"] * bool(place) + [f"black_list=['{by}']"] + ["dtype=torch.bfloat16"]
        where = f" (module {place})" if place else ""
        text = f"First non-finite value{of}: the gradient that {what} passes to {by}{where} is {value} in {name}."
        advice = f"The gradient overflows when it is cast to {name}: {', or '.join(lists)}."
    else:
        advice = _advice(phase, seen, op, module, name, known)
    return _Answer(text, advice, phase, value, op, module, users_line(node), name)


def _of_cast(probe: Probe, cast: Seen, of: str) -> _Answer:
    """Name the op that produced a value too large for the precision of the op that reads it."""
    maker = probe.seen[cast.sources[0]] if cast.sources and cast.sources[0] in probe.seen else cast
    readers = probe.readers(cast.node)
    reader, low = (readers[0].node if readers else cast.node), dtype_name(cast.result.dtype)
    is_input = maker.node.op == "placeholder"
    op, module = ("" if is_input else ir.op_name(maker.node)), ir.module_path(maker.node)
    if is_input:
        largest_value = f"{largest(maker.result):.3g}"
        text = f"{_argument(maker.node.name)} holds numbers up to {largest_value}, which {low} cannot hold{of}."
        advice = "Normalise the data of this batch, or use dtype=torch.bfloat16."
        return _Answer(text, advice, "input", cast.value, dtype=low)
    text = (
        f"First non-finite value{of}: {op} gives up to {largest(maker.result):.3g}, which {low} cannot "
        f"hold where {ir.op_name(reader)} reads it."
    )
    place = ir.module_path(reader)
    keep = f"exclude=['{place}'] or " if place else ""
    advice = f"Keep {ir.op_name(reader)} in fp32: {keep}black_list=['{ir.op_name(reader)}']"
    advice += ", or use dtype=torch.bfloat16." if low == "float16" else "."
    return _Answer(text, advice, "forward", cast.value, op, module, users_line(maker.node), low)


def _written_by_user(node: fx.Node) -> bool:
    known = ir.decision(node)
    return known is None or known.rule is not Rule.INSERTED


def _tensors(seen: Seen) -> list[Tensor]:
    results = seen.result if isinstance(seen.result, (tuple, list)) else [seen.result]
    return [t for t in results if is_float(t)]


def _gradient_kind(probe: Probe, seen: Seen) -> str:
    kinds = (s.gradient_kind for n in seen.sources if (s := probe.seen.get(n)) is not None)
    return next((k for k in kinds if k), seen.gradient_kind or "nan")


def _inputs(probe: Probe, seen: Seen) -> str:
    parts = []
    for node in seen.sources:
        source = probe.seen.get(node)
        if source is not None and _tensors(source):
            parts.append(f"{node.name} up to {max(largest(t) for t in _tensors(source)):.3g}")
    return ", ".join(parts)


def users_line(node: fx.Node) -> str:
    """Return the user's line, without the names that Dynamo gives to the rest of a function after a graph break."""
    if f"{os.sep}amp_compiler{os.sep}training{os.sep}" in ir.source_line(node):
        return "the loss function"  # one of torch's own, called by us
    return re.sub(r"torch_dynamo_resume_in_(\w+?)_at_\d+", r"\1", ir.source_line(node))


def _advice(phase: str, seen: Seen, op: str, module: str, dtype: str, known: Circumstances) -> str:
    if phase == "backward" and known.finite_unscaled and known.scale > 1 and not known.adapts:
        return (
            f"With a scale of 1 this batch is finite: the fixed scale of {known.scale:g} is too large. Use a smaller "
            "one, or loss_scaler='dynamic'."
        )
    if phase == "backward" and known.finite_unscaled and known.scale > 1 and known.scale <= known.floor:
        return (
            f"With a scale of 1 this batch is finite, but the scale of {known.scale:g} is the smallest that the scaler "
            "may take: lower its min_scale."
        )
    if phase == "backward" and known.finite_unscaled and known.scale > 1:
        return (
            f"With a scale of 1 this batch is finite: the scale of {known.scale:g} was too large, which is how a "
            "dynamic scaler finds its value. There is nothing to do unless it persists."
        )
    is_low = dtype in ("float16", "bfloat16")
    if not is_low or alone_is_finite(seen, torch.float32, phase) is False:
        return (
            "It would be the same in fp32: look at the model (a division by zero, a log or square root of zero, a row "
            "that is masked out), its data or its learning rate."
        )
    limit = " (the largest float16 is 65504)" if dtype == "float16" else ""
    lists = [f"exclude=['{module}']"] * bool(module) + [f"black_list=['{op}']"] * (op != "autograd_function_apply")
    lists += ["dtype=torch.bfloat16"] * (dtype == "float16")
    return f"Keep it in fp32{limit}: {', or '.join(lists)}."
