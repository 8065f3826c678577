"""The training step of a model with graph breaks: pieces compiled as by ``amp_compile``, with loss scaling outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.placed import restored
from ..common.gradients import LOW
from ..common.torch_names import no_autocast
from ..kernels.unscale import unscale_
from ..runtime.backend import Backend
from ..runtime.captured import Captured
from ..runtime.options import Options
from ..runtime.state import State
from .owner import Owner
from .probe import Probe
from .results import Answer, check_loss
from .window import Window, rng_state

#: if the state has more bytes than this in total, only tensors that an earlier update has written to are copied
_COPY_ALL = 1 << 26


class PieceBackend(Backend):
    """The backend of ``amp_compile``, with a probe that can look for an overflow."""

    def __init__(self, target: Any, options: Options, state: State, probe: Probe) -> None:
        super().__init__(target, options, state)
        self.probe = probe

    def run(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        compiled = super().run(graph, example_inputs)
        with_calls = restored(graph)

        def call(*args: Any) -> Any:
            return self.probe.run(with_calls, args) if self.probe.looking else compiled(*args)

        return call


class Pieces:
    """Runs forward, ``backward()`` and unscaling of one micro-batch, with the same effects as the whole graph."""

    def __init__(self, captured: Captured, owner: Owner, window: Window) -> None:
        self.captured, self.owner, self.window = captured, owner, window
        self.written: set[str] = set()  # names of the state tensors that an update has written to

    def __call__(self, args: tuple[Any, ...], kwargs: Any, targets: Any) -> Answer:
        window, parameters = self.window, self.owner.parameters()
        window.rng = rng_state(window.device)
        state = self.owner.state()
        versions = {name: b._version for name, b in state.items()}
        kept = self._copies(state)
        window.saved = {**kept, **window.saved}
        window.hold(self.owner.attributes())
        before = [p.grad for p in parameters]
        try:
            if window.widened:  # see Window.hidden
                window.release(p for p in parameters if p.dtype in LOW)
            answer = Answer(*self.captured(args, kwargs, targets))
            check_loss(answer.loss, self.owner.loss_fn)
            loss: Tensor = answer.loss
            window.release(parameters)
            if window.done == 0:
                before = [None] * len(parameters)
            window.widen(parameters)
            with no_autocast():
                scaled = loss if window.scale is None else loss * window.scale
                (scaled / window.size if window.size > 1 else scaled).backward()
            new = [(p, p.grad) for p in parameters if p.grad is not None]
        except BaseException:
            with torch.no_grad():
                for name, copy in kept.items():
                    state[name].copy_(copy)
            raise
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        self.written |= {name for name, b in state.items() if b._version != versions[name]}
        with torch.no_grad():
            gradients = [grad for _, grad in new]
            if window.scale is not None and window.found is not None:
                window.found = window.found.clone()  # the previous batch's flag must not change
                unscale_(gradients, window.scale.reciprocal(), window.found)
                bad = window.skipped()
                assert bad is not None
                for name in self.written & window.saved.keys():
                    state[name].copy_(torch.where(bad, window.saved[name], state[name]))
            window.add([p for p, _ in new], gradients)
        return answer

    def _copies(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if sum(b.nbytes for b in state.values()) > _COPY_ALL and self.window.number > 1:
            state = {name: b for name, b in state.items() if name in self.written}
        return {name: b.detach().clone() for name, b in state.items()}
