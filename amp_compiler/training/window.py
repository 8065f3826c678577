"""The window of one update: the micro-batches whose gradients are summed, and what a skipped update must restore."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..common.gradients import LOW, allow_gradients, set_gradient
from ..common.torch_names import foreach_add_, foreach_mul_, foreach_zero_, pytree
from ..kernels.sharded import local_parts


@dataclass
class Batch:
    """One micro-batch as it was given, kept until the next window so that an overflow can be explained."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: Any
    number: int = 0  # in its window, from 0
    before: Tensor | None = None  # the window's overflow flag before this batch
    found: Tensor | None = None  # and after it
    loss_finite: Tensor | bool = True
    rng: Sequence[Tensor] = ()  # the states of the random generators before this batch; empty if it draws no numbers

    def __post_init__(self) -> None:
        self.tensors = tensors_in(self.args, self.kwargs, self.targets)
        self.versions = [t._version for t in self.tensors]

    def overflowed(self) -> bool:
        """True if this batch was the first in its window whose gradients were not finite."""
        return self.found is not None and self.before is not None and bool(self.found) and not bool(self.before)

    def lost(self) -> bool:
        """True if its loss was not finite."""
        return not bool(self.loss_finite)

    def changed(self) -> bool:
        """True if its tensors were written to since it was passed in."""
        return self.versions != [t._version for t in self.tensors]

    def copy(self) -> tuple[Any, Any, Any]:
        """Return a copy to run once more, which the model may write to."""

        def own(value: Any) -> Any:
            return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

        copied: tuple[Any, Any, Any] = pytree.tree_map(own, (self.args, dict(self.kwargs), self.targets))
        return copied


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values(), targets):
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:  # flattening a tree takes ten times as long as the rest
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


@dataclass(frozen=True)
class Held:
    """An attribute, the tensor that it held before the window, and that tensor's value then."""

    holder: dict[str, Any]
    key: str
    tensor: Any
    value: Any


@dataclass
class Window:
    """The state between two updates. ``size``: micro-batches per update."""

    size: int
    device: torch.device
    number: int = 0  # of the update
    done: int = 0  # micro-batches so far
    scale: Tensor | None = None  # None: no loss scaling
    found: Tensor | None = None  # the overflow flag: not 0 if a gradient so far was not finite
    #: the values before the window of those tensors of the model that are written to, by name
    saved: dict[str, Tensor] = field(default_factory=dict)
    #: attributes that the model may rebind
    held: dict[tuple[int, str], Held] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    #: names of the parameters whose gradients the graph of the last micro-batch has averaged over processes
    reduced: frozenset[str] = frozenset()
    #: gradients of low-precision parameters are fp32, as their update is
    wide: bool = False

    def __post_init__(self) -> None:
        self.adding = False  # the batch in progress adds to the sums in place
        self.rng: Sequence[Tensor] = ()  # of the batch in progress, as in ``Batch``
        self.widened = False  # a parameter may have a gradient that is wider than the parameter
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self.no_overflow = torch.zeros(1, device=self.device)  # never written to
        self.reads_flags = self.device.type == "cpu"  # the host reads the overflow flag without waiting

    def begin(self, scale: Tensor | None) -> dict[str, Any]:
        """Begin a micro-batch, which ``end`` or ``abandon`` must end; the first begins a new window. Return what
        ``abandon`` needs."""
        before = self.__dict__.copy()
        if self.done == 0:
            self.number += 1
            self.saved, self.held, self.batches, self.reduced = {}, {}, [], frozenset()
            self.scale = scale
            self.found = None if scale is None else self.no_overflow
        self.rng = ()
        return before

    def abandon(self, before: dict[str, Any]) -> None:
        """End a micro-batch that has failed, and leave everything as it was."""
        adding = self.adding
        self.__dict__.update(before)
        self.adding = False
        if adding:  # the sums hold a part of this batch
            self.done = 0

    def end(self) -> None:
        """End a micro-batch."""
        self.adding = False
        if self.held:
            self._put_back_attributes()
        self.done += 1

    def release(self, parameters: Iterable[Tensor]) -> None:
        """Free the gradients of the last update, before the first batch of the next one makes new ones."""
        for parameter in parameters:
            parameter.grad = None

    def gradient_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter's gradient."""
        return torch.float32 if self.wide and parameter.dtype in LOW else parameter.dtype

    def widen(self, parameters: Iterable[Tensor]) -> None:
        """Let low-precision parameters have fp32 gradients, whoever makes them, if their update is fp32."""
        for parameter in parameters if self.wide else ():
            if parameter.dtype in LOW:
                allow_gradients(parameter, torch.float32)
                self.widened = True

    @contextlib.contextmanager
    def hidden(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Take wide gradients away from their parameters until ``show`` is called, at the latest at the end: Dynamo
        (torch 2.13) traces no tensor whose gradient has another dtype."""
        if not self.widened:
            yield
            return
        self._hidden = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
        for parameter, _ in self._hidden:
            parameter.grad = None
        try:
            yield
        finally:
            self.show()

    def show(self) -> None:
        """Give the gradients back that ``hidden`` has taken."""
        for parameter, gradient in self._hidden:
            set_gradient(parameter, gradient)
        self._hidden = []

    def narrow(self, parameters: Iterable[Tensor]) -> None:
        """Round wide gradients to the dtype of their parameters, when an update no longer needs them."""
        if self.widened:
            self.widened = False
            wide = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
            for parameter, gradient in wide:
                set_gradient(parameter, gradient.to(parameter.dtype))

    def begin_sums(self, parameters: Sequence[Tensor]) -> None:
        """Give a gradient of zeros to each of the parameters that has none, for batches to add to."""
        self.adding = bool(parameters)
        new = [p for p in parameters if p.grad is None]
        for parameter in new:
            set_gradient(parameter, torch.empty_like(parameter, dtype=self.gradient_dtype(parameter)))
        if new:
            foreach_zero_([p.grad for p in new if p.grad is not None])

    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add the unscaled gradients of one micro-batch to ``.grad``."""
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            total = parameter.grad
            if total is None:
                set_gradient(parameter, _like(gradient, parameter))
            elif _are_alike(total, gradient):
                sums.append(total)
                parts.append(gradient)
            else:
                set_gradient(parameter, total + gradient)
        if sums:
            foreach_add_(local_parts(sums), local_parts(parts))

    def hold(self, attributes: Iterable[tuple[dict[str, Any], str]]) -> None:
        """Remember the values of attributes that a micro-batch may assign to."""
        for holder, key in attributes:
            if (id(holder), key) not in self.held:
                tensor = holder.get(key)
                value = tensor
                if isinstance(tensor, Tensor) and self.size > 1:  # it may be written to before it is replaced
                    value = tensor.detach().clone()
                self.held[id(holder), key] = Held(holder, key, tensor, value)

    def see_reduced(self, finite: Tensor, state: Mapping[str, Tensor]) -> None:
        """Note whether gradients are finite that were reduced after the last micro-batch was done, and put the model's
        state back if they are not: another process may be the one whose gradients overflowed."""
        if self.found is None:
            return
        self.found = torch.maximum(self.found, finite.logical_not().to(self.found.dtype))
        bad = self.skipped()
        assert bad is not None
        for name in self.saved.keys() & state.keys():
            state[name].copy_(torch.where(bad, self.saved[name], state[name]))
        self._put_back_attributes()

    def last_scale(self) -> float:
        """Return the scale of the loss as a number, which waits for the device; 1 without loss scaling."""
        return 1.0 if self.scale is None else float(self.scale)

    def skipped(self) -> Tensor | None:
        """Return a bool tensor, True if a gradient of this window was not finite; None without loss scaling."""
        return None if self.found is None else self.found.ne(0).view(())

    def _put_back_attributes(self) -> None:
        changed = [h for h in self.held.values() if h.holder.get(h.key) is not h.tensor]
        bad = self.skipped() if changed else None
        if bad is None:
            return
        for held in changed:
            old, new = held.value, held.holder.get(held.key)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype):
                held.holder[held.key] = torch.where(bad, old, new).detach()
            elif bool(bad):  # a different shape or type: only the host can choose
                held.holder[held.key] = old


def _are_alike(total: Tensor, gradient: Tensor) -> bool:
    """Whether one can be added to the other in place: both dense, and shards of the same parts if they are DTensors."""
    dense = total.layout is torch.strided and gradient.layout is torch.strided
    return dense and getattr(total, "placements", None) == getattr(gradient, "placements", None)


def _like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient with the parameter's strides, as autograd would: torch's fused optimizers rely on them."""
    dense = gradient.layout is torch.strided and parameter.layout is torch.strided
    if not dense or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def multiply_(tensors: Sequence[Tensor], factor: Any) -> None:
    """Multiply all tensors by a number in place, including sparse ones."""
    dense = [t for t in tensors if t.layout is torch.strided]
    if dense:
        foreach_mul_(local_parts(dense), factor)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            tensor.mul_(factor)


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float, *, reads: bool) -> None:
    """Scale the gradients down to the norm ``limit`` in place, by the formula of ``torch.nn.utils.clip_grad_norm_``.
    ``reads``: the host may read the norm without waiting; gradients of a smaller norm are left alone then."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    known: Any = factor.tolist() if reads else None
    if known != 1.0:
        multiply_(gradients, factor)


def rng_state(device: torch.device) -> list[Tensor]:
    """Return the state of the random generators that a batch can draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_rng_state(states: Sequence[Tensor], device: torch.device) -> None:
    """Restore what ``rng_state`` has returned; nothing if it is empty."""
    if not states:
        return
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
