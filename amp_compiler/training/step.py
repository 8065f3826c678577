"""``TrainStep``: forward, loss, backward, loss scaling, clipping and the optimizer in one call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..common.errors import ArgumentError
from ..inspect.report import Report
from ..kernels.all_finite import all_finite
from ..kernels.norm import total_norm
from ..parallel.engine import Engine
from ..parallel.shards import local_of, without_gradients
from ..policy import Policy, dtype_name
from ..rewrite.records import Record
from ..runtime.arguments import call_arguments
from ..runtime.options import Options
from ..runtime.work import Work
from .arguments import check_optimizer
from .checkpoint import Run, collect, restore
from .failures import has_own_gradients
from .health import Health
from .health_watch import HealthWatch
from .loss_watch import LossWatch
from .masters import LowWeights
from .overflow import Overflow
from .owner import Owner
from .probe import Watcher
from .rerun import explain_last_update
from .results import StepResult
from .running import Running
from .scaler_base import LossScaler
from .scaler_state import host_value
from .scalers import DynamicLossScaler
from .stuck import warn_if_stuck
from .underflow import Underflow, explain_underflow, run_in_fp32
from .update import apply_update, take_step
from .window import Batch, Window, clip_, multiply_

#: the window that a model's gradients belong to; weak, as the step owns it and it may refer back to the model
_WAITING: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Window]] = weakref.WeakKeyDictionary()
_NOTHING = contextlib.nullcontext()


class TrainStep:
    """A compiled training step, made by ``compile_train_step``. Call it with a batch.

    It trains the model's own parameters. Their ``.grad`` holds the unscaled gradients of the last update until the next
    update begins, so ``zero_grad`` is not needed.

    Examples:
        >>> import torch
        >>> from amp_compiler import compile_train_step
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = compile_train_step(model, torch.nn.functional.mse_loss, optimizer, accumulate_steps=2)
        >>> batch = torch.ones(3, 4), torch.zeros(3, 1)
        >>> [bool(step(*batch).updated) for _ in range(3)]
        [False, True, False]
        >>> bool(step.flush().updated)
        True
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Any] | None,
        optimizer: torch.optim.Optimizer,
        options: Options,
        scaler: LossScaler | None,
        accumulate_steps: int,
        max_grad_norm: float | None,
        return_output: bool = False,
        engine: Engine | None = None,
        master_weights: bool | str = True,
        *,
        health_every: int | None = None,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.scaler, self.accumulate_steps, self.max_grad_norm = scaler, accumulate_steps, max_grad_norm
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._window = Window(accumulate_steps, self._device)
        self._owner, self._engine = Owner(model, loss_fn, optimizer), engine or Engine()
        self._weights = LowWeights(master_weights)
        self._weights.attach(optimizer)
        self._window.wide = master_weights is not False and not has_own_gradients(self._owner)
        self._running = Running(self._owner, options, self._window, self._engine, return_output)
        self._loss = torch.full((), float("nan"), device=self._device)  # of the last batch
        self._loss_finite = self._loss.isfinite()
        self._loss_watch = LossWatch(self._device)
        self._health = HealthWatch(health_every)
        self._on_host = self._device.type == "cpu"  # the host reads flags without waiting
        self._one = torch.ones((), device=self._device)
        self._false = torch.zeros((), dtype=torch.bool, device=self._device)
        self._true = torch.ones((), dtype=torch.bool, device=self._device)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. It may be replaced between updates by another one for the same parameters."""
        return self._owner.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, self.model)
        self._weights.hand_over(self._owner.optimizer, optimizer)
        self._weights.attach(optimizer)
        self._owner.optimizer = optimizer

    # ------------------------------------------------------------------------------------------- calling

    def __call__(self, inputs: Any, targets: Any = None) -> StepResult:
        args, kwargs = call_arguments(inputs)
        if torch.is_inference_mode_enabled():
            raise ArgumentError("A training step was called under torch.inference_mode(): call it outside of that.")
        window, device = self._window, self._device
        self._owner.look()
        other = waiting() if (waiting := _WAITING.get(self.model)) is not None else None
        if window.done == 0 and other is not None and other is not window and other.done:
            raise ArgumentError(
                "Another training step of this model is in the middle of an update, and its gradients would be lost: "
                "call its flush() first, or let it finish its accumulate_steps."
            )
        if other is not window:
            _WAITING[self.model] = weakref.ref(window)
        scale = None if self.scaler is None or window.done else self.scaler.scale_on(device).clone()
        before = window.begin(scale)
        try:
            batch = Batch(args, kwargs, targets, window.done, window.found)
            with _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
                loss, extra, output = self._running(batch, device)
            batch.found, batch.rng = window.found, window.rng
            finite = self._is_finite(loss)
            batch.loss_finite = self._loss_finite = finite if isinstance(finite, Tensor) else self._flag(finite)
            window.batches.append(batch)
        except BaseException:
            window.abandon(before)
            raise
        window.end()
        self._loss = loss
        self._loss_watch.see(finite, first=window.done == 1)
        ends = window.done == window.size
        if ends and self._engine.reduces_outside:
            self._reduce()
        result = self._update(loss) if ends else self._result(loss, self._norm(), updated=False)
        return result if extra is output is None else dataclasses.replace(result, extra=extra, output=output)

    def flush(self) -> StepResult | None:
        """Update the weights from the batches that are waiting, if they are fewer than ``accumulate_steps``.

        For the end of an epoch. The update uses the mean over the batches that are there, and the result's loss is that
        of the last one. Returns None if no batch is waiting.
        """
        window = self._window
        if window.done == 0:
            return None
        with torch.no_grad():
            multiply_(self._gradients(), window.size / window.done)
        if self._engine.reduces_outside:
            self._reduce()
        return self._update(self._loss.detach())

    def _reduce(self) -> None:
        """Average the gradients over the processes, where no graph has done it: of a step in pieces, of a flush, and of
        parameters that only an earlier micro-batch has used."""
        done = self._window.reduced
        left = {name: p for name, p in self._owner.named_trained().items() if name not in done}
        if done and all(p.grad is None for p in left.values()):
            return
        self._window.widen(left.values())
        self._engine.reduce_(left)
        with torch.no_grad():
            self._window.see_reduced(all_finite(self._gradients()), self._owner.state())

    def _update(self, loss: Tensor) -> StepResult:
        window, optimizer = self._window, self._owner.optimizer
        norm = self._norm()
        if window.found is not None and window.size > 1:  # user code may have changed a sum since it was checked
            window.found = torch.maximum(window.found, norm.isfinite().logical_not().to(window.found.dtype))
        found = window.found
        overflowed = bool(host_value(found)) if found is not None and self._on_host else None
        result = self._result(loss, norm, updated=True, overflowed=overflowed)
        window.done = 0  # whatever happens below, the next batch begins a new update
        if self.max_grad_norm is not None:
            clip_(self._gradients(), result.grad_norm, self.max_grad_norm, reads=self._on_host)
        self._health.begin(optimizer, self._owner, window)
        with self._weights.updating(optimizer) if self._weights.takes(optimizer) else _NOTHING:
            if found is None:
                take_step(optimizer)
            else:
                _, taken = apply_update(optimizer, found, overflowed=overflowed)
        if found is None:
            if self._loss_watch.asks:
                self._loss_watch.end(norm.isfinite(), host_has_waited=False)
        else:
            assert self.scaler is not None
            self.scaler.adapt(found if found.dim() == 0 else found.view(()), overflowed)
            self._loss_watch.end(result.updated, host_has_waited=taken is not None)
            warn_if_stuck(self.scaler, self._explain, waited=taken is False)
        self._health.end(self._owner, window, self._look)
        window.narrow(self._owner.parameters())
        return result

    def _result(self, loss: Tensor, norm: Tensor, *, updated: bool, overflowed: bool | None = None) -> StepResult:
        """Return the result of a call. ``overflowed``: whether a gradient was not finite, if the host knows."""
        window = self._window
        scale = self._one if window.scale is None else window.scale
        if not updated or window.found is None:
            skipped, now = self._flag(False), self._flag(updated)
        elif overflowed is not None:
            skipped, now = self._flag(overflowed), self._flag(not overflowed)
        else:
            now = (skipped := window.found.ne(0).view(())).logical_not()
        return StepResult(loss, skipped, scale, norm, now, self._loss_finite)

    def _is_finite(self, loss: Tensor) -> Tensor | bool:
        if self._on_host and loss.device.type == "cpu":  # one read instead of four ops
            return math.isfinite(host_value(loss))
        return loss.isfinite().reshape(())

    def _flag(self, value: bool) -> Tensor:
        return (self._true if value else self._false).clone()  # a result is the caller's, who may write to it

    def _gradients(self) -> list[Tensor]:
        return [local_of(p.grad) for p in self._owner.parameters() if p.grad is not None]

    def _norm(self) -> Tensor:
        gradients = [gradient for p in self._owner.parameters() if (gradient := p.grad) is not None]
        return self._engine.norm(gradients, self._norm_of)

    def _norm_of(self, gradients: Sequence[Tensor]) -> Tensor:
        if not gradients:
            return torch.zeros_like(self._one)
        return total_norm(gradients, self._device, as_torch=self.max_grad_norm is not None)

    # ------------------------------------------------------------------------------------------- looking

    @property
    def policy(self) -> Policy:
        """The ``Policy`` that is used."""
        return self._running.options.policy

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten forward graphs, one for each capture."""
        return [piece.graph for piece in self._running.state.pieces]

    @property
    def joint_graphs(self) -> list[fx.GraphModule]:
        """Forward, backward and loss scaling as they run, one per capture; empty if the model runs in pieces."""
        return [piece.joint for piece in self._running.state.pieces if piece.joint is not None]

    @property
    def history(self) -> list[Record]:
        """Every stage of every graph, the joint graph included: ``name``, ``seconds``, ``modified``, ``text``."""
        return list(self._running.state.history)

    def report(self, graph: int | None = None, *, inputs: Any = None, targets: Any = None) -> Report:
        """Report every op of the forward with its precision and reason. Casts are counted over forward and backward.

        Args:
            graph: The index of one graph, to report that graph alone.
            inputs: The inputs of a batch. If given, a step that runs in pieces computes its loss once more, and
                ``report().work`` holds the share of the forward's work that is captured (see ``AmpModule.report``).
            targets: The targets of that batch.
        """
        if inputs is not None:
            if self._running.captured is None:
                raise ArgumentError("report(inputs=...) looks at a step that has run: call it with a batch first.")
            if self._running.pieces is not None:
                args, kwargs = call_arguments(inputs)
                captured = self._running.pieces.captured
                self._running.state.measure(lambda: captured(args, kwargs, targets), self.model)
            else:
                self._running.state.work = Work({"captured": 1.0, "autocast": 0.0, "float32": 0.0})
        return self._health.noted(self._running.state.report(self.policy, graph), self._window, self.policy.low)

    def explain_overflow(self) -> Overflow:
        """Explain a skipped update, or a loss that is not finite.

        The batch that failed runs once more, op by op. The result names the first op, module and source line that gave
        inf or NaN, in the forward or the backward, and the parameters whose gradients it reached; it prints as a short
        text and is False in a condition if nothing overflowed. The state of the run is not changed.
        """
        self._loss_watch.look()
        lost = any(b.lost() for b in self._window.batches) and bool(all_finite(self._gradients()))
        # without a scaler the weights may have been updated from what is not finite
        if self.scaler is None and not lost and self._engine.part is None:
            return Overflow("There is no loss scaler, so no gradient is checked: compile with loss_scaler='dynamic'.")
        return self._explain()

    def explain_underflow(self) -> Underflow:
        """Explain which gradients are flushed to zero in low precision at the present loss scale.

        The last batch runs once more, in fp32. The result names the first op of the backward whose gradients are hit,
        the parameters with their shares, and the scale that would save them; it prints as a short text and is False in
        a condition if nothing is flushed. The state of the run is not changed. With ``parallel=Sharded(...)`` all
        processes must call it together.
        """
        with self._engine.gathered() as whole:
            given = (self._owner, self._window, self.policy.low, whole)
            return explain_underflow(self._running.captured, self._running.probe, *given)

    def health(self) -> Health:
        """Tell how much of the training is lost to rounding: per parameter the share of updates that are too small to
        move it and of gradients that are flushed to zero at the present scale, per op the share of results near the
        limits of their dtype, and what to do about each.

        With ``health_every=n`` of ``compile_train_step``, every n-th update is sampled, and the figures are those of
        the last samples. Otherwise they are those of the last update: its batch runs once more in fp32, and an update
        by the gradients that are there is made on a copy of the optimizer. The result prints as a short text, is False
        in a condition if nothing is worth a line, and has ``to_json()`` and ``to_html()``. The state of the run is not
        changed. With ``parallel=Sharded(...)`` all processes must call it together.
        """
        look = self._look if self._window.batches and self._running.captured is not None else None
        updating = LowWeights(self._weights.method).updating  # of its own, whose random numbers are not the run's
        return self._health.health(self.optimizer, self._owner, self._window, self.policy.low, look, updating)

    def _look(self, watcher: Watcher) -> None:
        """Run the last batch once more, in fp32."""
        captured = self._running.captured
        assert captured is not None
        with self._engine.gathered() as whole:
            run_in_fp32(captured, self._running.probe, self._owner, self._window, whole, watcher)

    def _explain(self) -> Overflow:
        floor = self.scaler._floor if isinstance(self.scaler, DynamicLossScaler) else None
        with self._engine.gathered() as whole:
            given = (self._owner, self._window, floor, self._engine.together, whole)
            return explain_last_update(self._running.captured, self._running.probe, *given)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Give the model whole parameters for a while, to evaluate or export it.

        With ``parallel=Sharded(...)`` a process has a part of each parameter, and the model cannot be called by itself.
        Inside ``with step.gathered() as model:`` it can. What is written to its parameters there is kept; write the
        same in every process. All processes must enter it together. Without ``Sharded`` the model is as it always is.
        """
        with self._engine.gathered():
            yield self.model

    # ------------------------------------------------------------------------------------- checkpointing

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to continue bit for bit.

        That is the model, the optimizer, the scaler, the gradients of waiting batches and the random generators. Save
        it with ``torch.save``; a data loader and a scheduler have states of their own. As in torch, the tensors are
        those of the model and the optimizer: use ``copy.deepcopy`` to keep them while training continues.
        """
        self._loss_watch.look()
        if self.scaler is not None:
            warn_if_stuck(self.scaler, self._explain, waited=True)
        return collect(self._run_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, which ``state_dict()`` returned. If it does not fit, a ``CheckpointError`` says why,
        and nothing is changed.
        """
        restore(self._run_state(), state)

    def _run_state(self) -> Run:
        return Run(self._owner, self.scaler, self._window, self._device, self.policy, self._weights, self._engine.part)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        """Return an independent step with copies of model, optimizer and scaler, captured again at its first call."""
        parts = (self.model, self.loss_fn, self.optimizer, self.scaler)
        with without_gradients(self._owner.parameters(), memo):
            model, loss_fn, optimizer, scaler = copy.deepcopy(parts, memo)
        own = (self.accumulate_steps, self.max_grad_norm, self._running.return_output)
        owner = Owner(model, loss_fn, optimizer)
        engine = self._engine.copied(owner.named_parameters(), list(owner.modules()), optimizer)
        more = (engine, self._weights.method)
        twin = TrainStep(
            model, loss_fn, optimizer, self._running.options, scaler, *own, *more, health_every=self._health.every
        )
        twin._weights.load_state_dict(self._weights.state_dict())
        memo[id(self)] = twin
        window = self._window
        for name in ("number", "done", "scale", "found", "saved", "widened"):
            setattr(twin._window, name, copy.deepcopy(getattr(window, name), memo))
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("A TrainStep holds compiled code and cannot be pickled: save step.state_dict() instead.")

    def __repr__(self) -> str:
        scaler = "no loss scaling" if self.scaler is None else type(self.scaler).__name__
        return (
            f"TrainStep(level={self.policy.level!r}, dtype={dtype_name(self.policy.low)}, {scaler}, "
            f"{type(self.optimizer).__name__}, accumulate_steps={self.accumulate_steps})"
        )
