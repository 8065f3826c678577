"""How a training step runs one micro-batch: as one graph if the model allows it, else in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..capture.dynamo import is_capture_failure
from ..common.errors import ArgumentError, CaptureError, PipelineError, VerifyError
from ..common.torch_names import dispatch_mode
from ..parallel.engine import Engine
from ..rewrite.verify import deep_by_default
from ..runtime.captured import Captured
from ..runtime.options import Options
from ..runtime.state import State
from .failures import is_exchanged_by_autograd, is_ours, located, needs_autograd, reason_of, users_mistake
from .of_batch import loss_function
from .owner import Owner
from .penalty import told_of_double_backward
from .pieces import PieceBackend, Pieces
from .probe import Probe
from .results import Answer, detached
from .whole import WholeStep
from .window import Batch, Window


class Running:
    """Captures the loss of a batch at the first call and runs it. Gradients and new state go into the window.

    ``state`` is what was captured; ``pieces`` is None while the step is one graph.
    """

    def __init__(self, owner: Owner, options: Options, window: Window, engine: Engine, return_output: bool) -> None:
        self.owner, self.options, self.window, self.engine = owner, options, window, engine
        self.return_output = return_output
        self.state, self.probe = State(), Probe()
        self.whole: Captured | None = None
        self.pieces: Pieces | None = None

    @property
    def captured(self) -> Captured | None:
        """The captured loss, to run a batch once more; None before the first call."""
        return self.whole if self.pieces is None else self.pieces.captured

    def __call__(self, batch: Batch, device: torch.device) -> Answer:
        args, kwargs, targets = batch.args, batch.kwargs, batch.targets
        try:
            loss, extra, output = self._run(args, kwargs, targets, batch.tensors)
        except Exception as error:
            if not is_capture_failure(error) or self.engine.part is not None:
                raise
            mistake = users_mistake(self._function(mark=False), (args, kwargs, targets), self.owner, device)
            if mistake is None:
                raise
            raise mistake from None
        if extra is not None or output is not None:
            policy = self.options.policy
            low = None if policy.autocast_device is None else policy.low
            extra, output = detached(extra, low), detached(output, low)
        return Answer(loss.detach(), extra, output)

    def _run(self, args: tuple[Any, ...], kwargs: Any, targets: Any, tensors: Sequence[Tensor]) -> Any:
        if self.pieces is not None:
            return self.pieces(args, kwargs, targets)
        if dispatch_mode() is not None:
            raise ArgumentError(
                "A training step cannot be captured under a TorchDispatchMode (a FLOP counter, a debug mode), "
                "because Dynamo compiles nothing there. Call it outside of the mode, or count with torch.profiler."
            )
        whole = self.whole
        reason = needs_autograd(self.owner, tensors, first=whole is None)
        if reason is None:
            whole = whole or self._capture_whole()
            try:
                if self.engine.part is None and not self.window.widened:  # a small model's call is as long as these two
                    found = whole(args, kwargs, targets)
                else:
                    with self.engine.stand_ins(), self.window.hidden(self.owner.parameters()):
                        found = whole(args, kwargs, targets)
                self.whole = whole
                return found
            except (CaptureError, PipelineError, VerifyError) as error:
                if deep_by_default() and is_ours(error):
                    raise
                reason = reason_of(error, args, kwargs, targets)
        return self._start_pieces(reason, args, kwargs, targets)

    def _capture_whole(self) -> Captured:
        options = dataclasses.replace(self.options, fullgraph=True)
        backend = WholeStep(self.owner, options, self.state, self.window, self.probe, self.engine)
        return Captured(self._function(mark=True), self.owner.model, options, self.state, backend, wide=_targets)

    def _start_pieces(self, reason: str, args: tuple[Any, ...], kwargs: Any, targets: Any) -> Answer:
        """Run a model that cannot be one graph in pieces; if that succeeds, later calls do the same."""
        state, model = State(), self.owner.model
        backend = PieceBackend(model, self.options, state, self.probe)
        captured = Captured(self._function(mark=False), model, self.options, state, backend, wide=_targets)
        pieces = Pieces(captured, self.owner, self.window)
        self.engine.broken(reason)
        with told_of_double_backward():
            found = pieces(args, kwargs, targets)
        self.pieces, self.state = pieces, state
        tell = state.note if is_exchanged_by_autograd(self.owner) else state.leave  # that is as the user asked for
        tell(
            "the training step is not one graph, so it runs in pieces, with backward() and loss scaling outside of "
            f"them: {located(reason, state.not_captured)}"
        )
        return found

    def _function(self, *, mark: bool) -> Callable[..., Any]:
        divided, owner = self.engine.part is not None, self.owner
        return loss_function(owner.model, owner.loss_fn, mark=mark, output=self.return_output, divided=divided)


def _targets(args: Any, kwargs: Any, targets: Any) -> Any:
    """Return those arguments of a captured step that count as wide values: the targets."""
    return targets
