"""A training step of a model that breaks the graph: pieces as ``amp_compile`` makes them, loss scaling around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..backend import Backend, Captured, Options, State
from ..kernels.unscale import unscale_
from .overflow import Probe
from .whole import check_loss
from .window import Window

#: buffers of more bytes than this in all are copied only where an earlier update has written to them
_COPY_ALL = 1 << 26


class PieceBackend(Backend):
    """As under ``amp_compile``, and an overflow can be looked for."""

    def __init__(self, target: Any, options: Options, state: State, probe: Probe) -> None:
        super().__init__(target, options, state)
        self.probe = probe

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        compiled = super().run(graph, example_inputs)

        def call(*args: Any) -> Any:
            return self.probe.run(graph, args) if self.probe.looking else compiled(*args)

        return call


class Pieces:
    """Forward, ``backward()`` and unscale of one micro-batch; gradients and state are left as the whole graph would."""

    def __init__(self, captured: Captured, model: nn.Module, window: Window) -> None:
        self.captured, self.model, self.window = captured, model, window
        self.written: set[str] = set()  # buffers that an update has written to

    def __call__(self, args: tuple[Any, ...], kwargs: Any, targets: Any, parameters: Sequence[Tensor]) -> Tensor:
        window = self.window
        if window.done == 0:
            window.saved.update(self._copies())
        before = [p.grad for p in parameters]
        state = {name: (b, b._version) for name, b in self.model.named_buffers()}
        kept = dict(window.saved) if window.done == 0 else self._copies()
        try:
            for parameter in parameters:
                parameter.grad = None
            loss: Tensor = self.captured(args, kwargs, targets)
            check_loss(loss)
            with torch._C._DisableAutocast():
                scaled = loss if window.scale is None else loss * window.scale
                (scaled / window.size if window.size > 1 else scaled).backward()
        except BaseException:
            self._put_back(kept)
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise
        new = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        buffers = dict(self.model.named_buffers())
        self.written |= {
            n for n, b in buffers.items() if n in state and (b is not state[n][0] or b._version != state[n][1])
        }
        with torch.no_grad():
            gradients = [grad for _, grad in new]
            if window.scale is not None and window.found is not None:
                window.found = window.found.clone()  # the flag of the batch before stays what it was
                unscale_(gradients, window.scale.reciprocal(), window.found)
                bad = window.found.ne(0).view(())
                for name in self.written & window.saved.keys():
                    buffers[name].copy_(torch.where(bad, window.saved[name], buffers[name]))
            window.add([p for p, _ in new], gradients)
        return loss.detach()

    def _copies(self) -> dict[str, Tensor]:
        buffers = dict(self.model.named_buffers())
        if sum(b.nbytes for b in buffers.values()) > _COPY_ALL and self.window.number > 1:
            buffers = {name: b for name, b in buffers.items() if name in self.written}
        return {name: b.detach().clone() for name, b in buffers.items()}

    def _put_back(self, copies: dict[str, Tensor]) -> None:
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, copy in copies.items():
                buffers[name].copy_(copy)
