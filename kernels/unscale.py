"""``amp::unscale``: divide gradients by the loss scale, in fp32, and check whether one of them was not finite.

    unscale(Tensor[] grads, Tensor inv_scale, Tensor found) -> (Tensor[] unscaled, Tensor found_out)

    unscale_(Tensor(a!)[] grads, Tensor inv_scale, Tensor found) -> Tensor

The first is functional: it writes to none of its inputs and its outputs share no memory with them. The second changes
the gradients in place. The function ``unscale_`` is for training loops, and writes the flag in place too.

``found`` is fp32 with one element, 0.0 or 1.0, as torch's optimizers and ``torch._amp_update_scale_`` expect it;
found_out is 1.0 if ``found`` is, or if a gradient, before it was unscaled, has a number that is not finite.

Both are one pass: a kernel checks and multiplies each value as it loads it (on a CPU ours in ``cpp/multi_tensor.h``,
with all threads, where it is built; otherwise torch's, with one thread). The functional form runs it on the new fp32
copies. For fp32 gradients, a multiplication into new memory and a separate check would be no faster (1M values, one
core: 540 µs against 510): most of the time goes into the new memory itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_compiler.common.torch_names import foreach_unscale_, is_dtensor

from . import registry
from .all_finite import LOW, numbers
from .gpu import DTYPES, uses_triton
from .sharded import agree_on_largest, local_parts

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

_LIBRARY = torch.library.Library("amp", "FRAGMENT")
_LIBRARY.define("unscale(Tensor[] grads, Tensor inv_scale, Tensor found) -> (Tensor[] unscaled, Tensor found_out)")
_LIBRARY.define("unscale_(Tensor(a!)[] grads, Tensor inv_scale, Tensor found) -> Tensor")


def unscale(grads: Sequence[Tensor], inv_scale: Tensor, found: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the gradients times ``inv_scale`` as new tensors, fp16 and bf16 ones in fp32, and the flag.

    >>> unscale([torch.tensor([4.0], dtype=torch.float16)], torch.tensor(0.5), torch.zeros(1))
    ([tensor([2.])], tensor([0.]))
    """
    result: tuple[list[Tensor], Tensor] = torch.ops.amp.unscale.default(list(grads), inv_scale, found)
    return result


def reference(grads: Sequence[Tensor], inv_scale: Tensor, found: Tensor) -> tuple[list[Tensor], Tensor]:
    """The definition of the op, in plain torch."""
    unscaled = []
    found = found.clone()
    for grad in grads:
        grad = _merged(grad)
        finite = numbers(grad).isfinite().all()
        found = torch.where(finite.to(found.device), found, torch.ones_like(found))
        wide, factor = _copy(grad), inv_scale.reshape(()).to(grad.device)
        if wide.is_complex():  # part by part: inf times a complex number is NaN in the other part
            unscaled.append(torch.view_as_complex(torch.view_as_real(wide) * factor))
        else:
            unscaled.append(wide * factor)
    return unscaled, found


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found: Tensor) -> None:
    """Multiply the gradients by ``inv_scale`` in place and set ``found`` to 1.0 if one was not finite before.

    Each keeps its dtype: an fp16 gradient is multiplied in fp32 and rounded to fp16 again, where small values vanish.
    Lists of several dtypes, layouts and devices are fine, and there is no host sync.
    """
    _write(grads, inv_scale, found)


def _write(grads: Sequence[Tensor], inv_scale: Tensor, found: Tensor) -> None:
    if not registry.loaded() and found.is_cpu and inv_scale.is_cpu and _are_plain(grads):
        if grads:
            foreach_unscale_(list(grads), found, inv_scale)
        return
    if any(type(grad) is not Tensor and is_dtensor(grad) for grad in grads):
        _write(local_parts(grads), inv_scale, found)
        agree_on_largest(found, grads)
        return
    if registry.loaded() and inv_scale.device.type == found.device.type == "cpu":
        increment_version(grads)  # the compiled kernel writes to memory that autograd does not see
        grads = torch.ops.amp_cpu.unscale_(grads, found, inv_scale)  # the rest have another dtype, layout or device
    groups: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}
    for grad in grads:
        if grad.layout is torch.sparse_coo and grad.dtype in LOW and not grad.is_coalesced():
            grad.copy_(grad.coalesce())
        values = numbers(grad)
        if grad.is_conj():
            raise TypeError("a conjugated view cannot be unscaled in place; call resolve_conj() on the gradient.")
        groups.setdefault(values.device, {}).setdefault(values.dtype, []).append(values)
    for device, by_dtype in groups.items():
        flag = found if device == found.device else torch.zeros_like(found, device=device)
        factor = inv_scale.to(device, non_blocking=True)
        if uses_triton(device):
            from .multi_tensor_triton import unscale_ as launch

            known = [values for dtype, group in by_dtype.items() if dtype in DTYPES for values in group]
            by_dtype = {dtype: group for dtype, group in by_dtype.items() if dtype not in DTYPES}
            if known:
                launch(known, factor, flag)
        for group in by_dtype.values():
            foreach_unscale_(group, flag, factor)
        if flag is not found:
            found.copy_(torch.maximum(found, flag.to(found.device, non_blocking=True)))


def _are_plain(grads: Sequence[Tensor]) -> bool:
    """True for the usual gradients on a CPU: a list that torch's kernel takes as it is."""
    for grad in grads:
        if type(grad) is not Tensor or grad.dtype is not torch.float32 or not grad.is_cpu:
            return False
        if grad.layout is not torch.strided:
            return False
    return True


def _merged(grad: Tensor) -> Tensor:
    return grad.coalesce() if grad.layout is torch.sparse_coo and grad.dtype in LOW else grad


def _copy(grad: Tensor) -> Tensor:
    wide = _WIDE.get(grad.dtype)
    copy = grad.clone() if wide is None else grad.to(wide)
    return copy.resolve_conj()


def _unscale(grads: list[Tensor], inv_scale: Tensor, found: Tensor) -> tuple[list[Tensor], Tensor]:
    copies = [_copy(_merged(grad)) for grad in grads]
    found = found.clone()
    unscale_(copies, inv_scale, found)
    return copies, found


def in_place(grads: list[Tensor], inv_scale: Tensor, found: Tensor) -> Tensor:
    """The op ``amp::unscale_`` without a dispatcher, for code that runs without gradients."""
    found = found.clone()
    _write(grads, inv_scale, found)
    return found


def _fake(grads: list[Tensor], inv_scale: Tensor, found: Tensor) -> tuple[list[Tensor], Tensor]:
    return [torch.empty_like(grad, dtype=_WIDE.get(grad.dtype, grad.dtype)) for grad in grads], torch.empty_like(found)


_LIBRARY.impl("unscale", _unscale, "CompositeExplicitAutograd")
torch.library.register_fake("amp::unscale", _fake, lib=_LIBRARY)
_LIBRARY.impl("unscale_", torch.no_grad()(in_place), "CompositeExplicitAutograd")
torch.library.register_fake("amp::unscale_", lambda grads, inv_scale, found: torch.empty_like(found), lib=_LIBRARY)
