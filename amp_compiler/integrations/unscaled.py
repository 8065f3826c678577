"""Notices gradients that come from a backward without loss scaling, though a trainer scales its losses."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_AT_MOST = 16  # parameters with a hook per optimizer: each costs most of a microsecond per backward


class Backwards:
    """Tells the trainer's own backwards from others, by a hook on some parameters of each optimizer that it watches.

    The gradient itself does not tell: ``zero_grad(set_to_none=False)`` leaves the tensor in its place, and a backward
    counts up its version as ``zero_()`` or clipping do. Autograd calls the hook whenever it has added to a gradient.
    """

    def __init__(self) -> None:
        self.scaled = 0  # how many losses the trainer has scaled
        self._running = _Running()
        self._watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Inside, the trainer runs a backward of a scaled loss."""
        self._running.depth += 1
        try:
            yield
        finally:
            self._running.depth -= 1

    def watch(self, optimizer: Optimizer) -> None:
        """Watch parameters from all over ``optimizer``; again, if it has more or fewer of them than before."""
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_leaf]
        known = self._watched.get(optimizer)
        if known is not None and known.of == len(trained):
            return
        if known is not None:
            known.remove()
        else:
            known = self._watched[optimizer] = _Watched(self._running)
        spread = trained[:: -(-len(trained) // _AT_MOST) or 1]
        known.handles, known.of = [p.register_post_accumulate_grad_hook(known.hook) for p in spread], len(trained)

    def unwatch(self) -> None:
        """Take the hooks away."""
        for known in self._watched.values():
            known.remove()
        self._watched.clear()

    def added(self, optimizer: Optimizer, grads: list[Tensor]) -> bool:
        """True if another backward has added to one of ``grads`` since the last step."""
        marks = self._marks(optimizer)
        return any(id(grad) in marks and marks[id(grad)][0]() is grad for grad in grads)

    def mixed(self, optimizer: Optimizer, grads: list[Tensor]) -> bool:
        """True if a part of ``grads`` is certainly not scaled: another backward has added to a gradient, and nothing
        but the trainer's backwards has written to it since."""
        marks = self._marks(optimizer)
        for grad in grads:
            known, version = marks.get(id(grad), (None, 0))
            if known is not None and known() is grad and version == grad._version:
                return True
        return False

    def forget(self, optimizer: Optimizer) -> None:
        """Forget the gradients that a step has used."""
        self._marks(optimizer).clear()

    def _marks(self, optimizer: Optimizer) -> dict[int, Any]:
        known = self._watched.get(optimizer)
        return {} if known is None else known.hook.marks


class _Running:
    depth = 0  # of the trainer's backwards


class _Hook:
    """Autograd calls it when it has added to the gradient of a parameter."""

    def __init__(self, running: _Running) -> None:
        self.running = running
        #: by id, gradients that another backward has added to, and their versions after the last addition
        self.marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __call__(self, parameter: Tensor) -> None:
        if self.running.depth and not self.marks:
            return
        grad = parameter.grad
        if grad is None:
            return
        if not self.running.depth:
            self.marks[id(grad)] = weakref.ref(grad), grad._version
        elif (known := self.marks.get(id(grad))) is not None:
            if known[0]() is grad and grad._version == known[1] + 1:  # nothing was written in between
                self.marks[id(grad)] = known[0], grad._version
            else:
                del self.marks[id(grad)]


class _Watched:
    """The hook of an optimizer's parameters, and what takes it away."""

    def __init__(self, running: _Running) -> None:
        self.hook, self.handles, self.of = _Hook(running), list[Any](), 0

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
