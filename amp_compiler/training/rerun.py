"""Run the batch of a skipped update, or of a loss that is not finite, once more, with checks.

The state of the run is not changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.logs import log
from ..common.messages import first_line
from ..kernels.all_finite import all_finite
from ..policy import dtype_name
from .misfits import Misfits, misfits
from .overflow import ELSEWHERE, Circumstances, Overflow, explain
from .owner import Holder, Owner
from .probe import Probe
from .window import Batch, Window, rng_state, set_rng_state


def explain_last_update(
    captured: Callable[..., Any] | None, probe: Probe, owner: Owner, window: Window, floor: float | None, shared: bool,
    whole: Mapping[int, Tensor],
) -> Overflow:  # fmt: skip
    """Explain why the last update, or its loss, was not finite. ``captured`` runs a batch, through ``probe`` while that
    is looking; ``floor``: the smallest scale of a dynamic scaler; ``shared``: several processes average their
    gradients; ``whole``: id of a sharded parameter -> the whole one that the model holds now.
    """
    batch = next((b for b in window.batches if b.overflowed()), None)
    skipped = batch is not None
    if batch is None and (of_sum := _explain_sum(owner, window, shared)) is not None:
        return of_sum
    batch = batch or next((b for b in window.batches if b.lost()), None)
    if batch is None or captured is None:
        return Overflow(_nothing(window))
    scale = window.last_scale()
    parameters = [whole.get(id(p), p) for p in owner.parameters() if p.requires_grad]
    _, plain, _ = _look(captured, probe, owner, window, batch, parameters, 1.0)
    loss, gradients, seen = _look(captured, probe, owner, window, batch, parameters, scale)
    names = {id(tensor): name for name, tensor in {**owner.named_parameters(), **owner.buffers()}.items()}
    hit = [names.get(id(p), "?") for p, ok in zip(parameters, gradients, strict=True) if not ok]
    buffers = frozenset(id(b) for b in owner.buffers().values())
    known = Circumstances(
        names, buffers, batch.number, window.size, scale, all(plain), batch.changed(), floor is not None, skipped,
        shared, scale if floor is None else floor,
        Misfits() if all(plain) else _misfits(captured, probe, owner, window, batch, parameters, floor or scale),
    )  # fmt: skip
    return explain(seen, loss, hit, known)


def _misfits(
    captured: Callable[..., Any], probe: Probe, owner: Owner, window: Window, batch: Batch,
    parameters: Sequence[Tensor], floor: float,
) -> Misfits:  # fmt: skip
    try:
        _, _, seen = _look(captured, probe, owner, window, batch, parameters, 1.0, in_fp32=True)
    except Exception as error:  # an op without an fp32 form, too little memory: the first overflow is known anyway
        log("capture", "the batch could not run in fp32, so only its first overflow is named: %s", first_line(error))
        return Misfits()
    return misfits(seen, floor)


def _nothing(window: Window) -> str:
    if any(b.found is not None and bool(b.found) for b in window.batches):
        return "The batch that failed ran before the checkpoint that this run was resumed from; it is not available."
    if not window.batches:
        return "There is no skipped batch to explain: call explain_overflow() right after the step that was skipped."
    return "The last update was not skipped: its loss and all its gradients are finite."


def _explain_sum(owner: Owner, window: Window, shared: bool) -> Overflow | None:
    """Explain an update whose micro-batches were each finite, but whose sum of gradients is not."""
    if window.done or window.found is None or not window.batches or not bool(window.found):
        return None
    if window.batches[0].before is not None and bool(window.batches[0].before):
        return None  # it was already so when the run was resumed
    if shared:
        return Overflow(ELSEWHERE, "process", scale=float(window.scale or 1.0))
    names = {id(p): name for name, p in owner.named_parameters().items()}
    hit = [p for p in owner.parameters() if p.grad is not None and not bool(all_finite(p.grad))]
    hit_names = tuple(names.get(id(p), "?") for p in hit)
    dtype = dtype_name(hit[0].dtype) if hit else ""
    text = (
        f"The gradients of each micro-batch are finite, but their sum is not ({dtype}): {', '.join(hit_names[:5])}.\n"
        "Keep the parameters in fp32, as master weights usually are, or accumulate fewer batches. Check also that "
        "nothing writes into .grad between the batches."
    )
    return Overflow(text, "sum", dtype=dtype, parameters=hit_names, scale=float(window.scale or 1.0))


def _look(
    captured: Callable[..., Any], probe: Probe, owner: Owner, window: Window, batch: Batch,
    parameters: Sequence[Tensor], scale: float, *, in_fp32: bool = False,
) -> tuple[Tensor, list[bool], Probe]:  # fmt: skip
    """Run a batch with checks; return the loss, whether each parameter's gradient is finite, and what was seen."""
    probe.begin(in_fp32=in_fp32)
    try:
        with undisturbed(owner, window.device), torch.enable_grad():
            set_rng_state(batch.rng, window.device)
            loss = captured(*batch.copy())[0]
            gradients = torch.autograd.grad(loss * (scale / window.size), parameters, allow_unused=True)
    finally:
        seen = probe.end()
    return loss.detach(), [x is None or bool(all_finite(x)) for x in gradients], seen


@contextlib.contextmanager
def undisturbed(owner: Holder, device: torch.device) -> Iterator[None]:
    """Restore the random generators and the tensors of the model's modules on exit."""
    states = rng_state(device)
    held = [(holder, key, holder[key]) for holder, key in owner.attributes()]
    values = [(tensor, tensor.detach().clone()) for _, _, tensor in held if tensor is not None]
    plain = [(m.__dict__, dict(m.__dict__)) for m in owner.modules()]
    lists = [(v, copy.copy(v)) for _, own in plain for v in own.values() if type(v) in (list, dict, set)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for own, before in plain:
            own.update(before)
        for container, before in lists:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(before)
        for holder, key, tensor in held:
            holder[key] = tensor
        set_rng_state(states, device)
