"""``fit``: the training loop around ``compile_train_step``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..common.errors import AmpWarning, ArgumentError, CheckpointError
from ..common.keywords import check_keywords
from ..common.messages import users_frame
from ..parallel.spec import Sharded
from ..runtime.arguments import call_arguments
from ..training.compile import compile_train_step
from ..training.results import StepResult, split
from ..training.step import TrainStep
from . import saved
from .feed import Feed, check_names, in_dtype_of, random_state, set_random_state
from .history import Epoch, History
from .interrupts import Interrupts
from .progress import Bar
from .totals import Metrics, Totals, check_metrics


def fit(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    epochs: int = 1,
    *,
    level: str = "O2",
    dtype: torch.dtype | str | None = None,
    steps: int | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    validation: Iterable[Any] | None = None,
    scheduler: Any = None,
    scheduler_every: str = "update",
    checkpoint: str | os.PathLike[str] | None = None,
    save_every_epochs: int | None = 1,
    save_every_steps: int | None = None,
    resume: bool | str | os.PathLike[str] = False,
    progress: bool = True,
    **options: Any,
) -> History:
    """Train a model for some epochs with a compiled training step.

    This is a loop around ``compile_train_step`` and nothing else. Batches are moved to the model's device. A partial
    accumulation at the end of an epoch is used for an update. Losses and metrics are means over the samples, added up
    on the device. Ctrl-C ends the run after the update that is in progress; the history says so.

    Args:
        model: As for ``compile_train_step``. If it is in evaluation mode, it trains in training mode; every module has
            its own mode back afterwards.
        loss_fn: As for ``compile_train_step``.
        optimizer: As for ``compile_train_step``.
        loader: An iterable of ``(inputs, targets)`` as a training step takes them, such as a ``DataLoader``. A tensor
            or a dict by itself is a batch without targets.
        epochs: How often the loader is run through.
        level: As for ``amp_compile``.
        dtype: As for ``amp_compile``.
        steps: The most batches per epoch. An endless loader needs it.
        metrics: Functions of ``(output, targets)`` that return a number, by name. If a batch has no targets, they get
            the batch in their place.
        validation: A second loader, for the loss and the metrics after each epoch: of the model in evaluation mode, in
            its own precision.
        scheduler: A learning-rate scheduler of ``torch.optim.lr_scheduler``. It does not move if an update is skipped.
        scheduler_every: ``"update"`` or ``"epoch"``. ``ReduceLROnPlateau`` always moves by the epoch, by the validation
            loss, or by the training loss if there is none.
        checkpoint: The file to keep the run in. It is replaced as a whole; if that fails, a warning is given, the
            earlier file stays, and the run goes on.
        save_every_epochs: Write the file at every n-th epoch, and at the end; None for the end only.
        save_every_steps: Write it also at every n-th batch.
        resume: True to continue from ``checkpoint`` if that file exists, or the path of a file to continue from. The
            run goes on bit for bit, also in the middle of an epoch or an accumulation.
        progress: Show a progress bar if standard error is a terminal.
        **options: All other arguments of ``compile_train_step``, such as ``accumulate_steps`` and ``max_grad_norm``.

    Returns:
        A ``History`` with one row per epoch.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from amp_compiler import fit
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(10, 4), torch.tensor([0, 1] * 5))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> accuracy = lambda output, targets: (output.argmax(-1) == targets).float().mean()
        >>> history = fit(model, nn.functional.cross_entropy, optimizer, loader, 3, metrics={"accuracy": accuracy})
        >>> [epoch.updates for epoch in history], 0 <= history[-1].metrics["accuracy"] <= 1
        ([3, 3, 3], True)
    """
    check_keywords("fit()", options, fit, compile_train_step)
    numbers = {"steps": steps, "save_every_epochs": save_every_epochs, "save_every_steps": save_every_steps}
    for name, value in {"epochs": epochs, **{n: v for n, v in numbers.items() if v is not None}}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name} must be a whole number of at least 1, not {value!r}.")
    if scheduler_every not in ("update", "epoch"):
        raise ArgumentError(f"scheduler_every is 'update' or 'epoch', not {scheduler_every!r}.")
    _check_scheduler(scheduler, optimizer)
    checked = check_metrics(metrics)
    if checkpoint is not None:
        saved.check_path(checkpoint)
    elif save_every_steps is not None:
        raise ArgumentError("save_every_steps= writes the file of checkpoint=: say which file that is.")
    elif resume is True:
        raise ArgumentError("resume=True continues from the file of checkpoint=: say which file that is.")
    if checkpoint is not None and isinstance(options.get("parallel"), Sharded):
        raise ArgumentError(
            "fit() writes one file, and with parallel=Sharded(...) every process has a part of the parameters: save "
            "history.step.state_dict() by torch.distributed.checkpoint."
        )
    if checked:
        options["return_output"] = True
    step = compile_train_step(model, loss_fn, optimizer, level, dtype=dtype, **options)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    feed = Feed(loader, steps, device)
    held = None if validation is None else Feed(validation, None, device, "validation loader")
    for source in (feed, held):
        if source is not None:
            source.check_epochs(epochs)
    files = _Files(checkpoint, save_every_epochs, save_every_steps)
    run = _Run(step, feed, held, checked, _Schedule(scheduler, scheduler_every), files)
    file = checkpoint if resume is True else resume or None
    if file is not None and (resume is not True or saved.exists(file)):
        run.restore(saved.load(file))
    with _in_mode(model, True), Bar(progress, epochs) as bar, Interrupts() as interrupts:
        run.go(epochs, bar, interrupts)
    return run.history


@dataclasses.dataclass(frozen=True)
class _Files:
    """Where the run is kept, and when it is written."""

    path: str | os.PathLike[str] | None
    epochs: int | None
    steps: int | None


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise unless ``scheduler`` is None or a scheduler of this optimizer."""
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not all(callable(getattr(scheduler, n, None)) for n in ("step", "state_dict")):
        name = scheduler.__name__ if isinstance(scheduler, type) else type(scheduler).__name__
        made = f"{name} itself" if isinstance(scheduler, type) else f"a {name}"
        raise ArgumentError(
            f"scheduler must be a scheduler of torch.optim.lr_scheduler, such as StepLR(optimizer, 10), not {made}."
        )
    moved = getattr(scheduler, "optimizer", optimizer)
    if moved is not optimizer:
        raise ArgumentError(
            "The scheduler belongs to another optimizer, and would not change the learning rate of this one: make it "
            "from the optimizer that you pass here."
        )


class _Schedule:
    """A learning-rate scheduler and when it moves."""

    def __init__(self, scheduler: Any, every: str) -> None:
        self.scheduler = scheduler
        self.on_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.every = "epoch" if self.on_plateau else every

    def after_update(self, result: StepResult) -> None:
        if self.scheduler is not None and self.every == "update" and bool(result.updated):
            self.scheduler.step()

    def after_epoch(self, epoch: Epoch) -> None:
        if self.scheduler is None or self.every != "epoch" or not epoch.updates:
            return
        if self.on_plateau:
            self.scheduler.step(epoch.validation.get("loss", epoch.loss))
        else:
            self.scheduler.step()


class _Run:
    """A run and where it is."""

    def __init__(
        self, step: TrainStep, feed: Feed, validation: Feed | None, metrics: Metrics, schedule: _Schedule, files: _Files
    ) -> None:
        self.step, self.feed, self.validation, self.metrics = step, feed, validation, metrics
        self.schedule, self.files = schedule, files
        self.history = History(step=step)
        self.totals = Totals(metrics, feed.device)

    def go(self, epochs: int, bar: Bar, interrupts: Interrupts) -> None:
        """Run the epochs that are left."""
        while len(self.history) < epochs:
            number = len(self.history)
            bar.begin(number + 1, self.feed.length, self.feed.done)
            epoch = self._epoch(number, bar, interrupts)
            if epoch is None:
                self.history.interrupted = interrupts.asked()
                self._save(between=False)
                return
            self.schedule.after_epoch(epoch)
            self.history.epochs.append(epoch)
            self.totals = Totals(self.metrics, self.feed.device)
            last = len(self.history) == epochs
            if last or (self.files.epochs is not None and len(self.history) % self.files.epochs == 0):
                self._save(between=True)

    def _epoch(self, number: int, bar: Bar, interrupts: Interrupts) -> Epoch | None:
        """Train one epoch, or the rest of one; None if it was interrupted or if an iterator has no batches left."""
        totals, step = self.totals, self.step
        start = time.perf_counter() - totals.seconds
        for inputs, targets in _guarded(self.feed.epoch(number), interrupts):
            if not totals.samples:
                check_names(step.model, inputs)
            result = step(inputs, targets)
            totals.add(inputs, targets, result.loss, result.output)
            self._see(result)
            totals.waiting = (totals.waiting + 1) % step.accumulate_steps
            totals.seconds = time.perf_counter() - start
            bar.advance(number + 1, result.loss)
            if interrupts.asked() and totals.waiting == 0:
                return None
            if self.files.steps is not None and self.feed.taken % self.files.steps == 0:
                self._save(between=False)
        if interrupts.asked():
            return None
        if self.feed.done == 0 and number == 0:
            raise ArgumentError("The loader has no batches (a generator can be used only once).")
        if self.feed.done == 0:
            text = f"amp_compiler: the loader ended before epoch {number + 1}, and so does the run."
            warnings.warn(text, AmpWarning, stacklevel=users_frame())
            return None
        if (flushed := step.flush()) is not None:
            self._see(flushed)
            totals.waiting = 0
        held = self._validate(interrupts)
        if interrupts.asked():
            return None
        means = totals.means()
        scale = 1.0 if step.scaler is None else step.scaler.get_scale()
        seconds = time.perf_counter() - start
        return Epoch(number + 1, means.pop("loss"), means, held, scale, self.feed.done, int(totals.updates),
                     int(totals.skipped), seconds)  # fmt: skip

    def _see(self, result: StepResult) -> None:
        self.totals.see(result)
        self.schedule.after_update(result)

    def _validate(self, interrupts: Interrupts) -> dict[str, float]:
        """Return the loss and the metrics of the validation loader. The random generators stay as they are."""
        if self.validation is None:
            return {}
        totals, loss_fn = Totals(self.metrics, self.validation.device), self.step.loss_fn
        before = random_state(self.validation.loader)
        try:
            with self.step.gathered() as model, _in_mode(model, False), torch.no_grad():
                for inputs, targets in _guarded(self.validation.epoch(0), interrupts):
                    if not totals.samples:
                        check_names(model, inputs)
                    output = _called(model, inputs)
                    answer = output if loss_fn is None else loss_fn(output, targets)
                    loss, _ = split(answer, from_model=loss_fn is None)
                    totals.add(inputs, targets, loss, output)
                    if interrupts.asked():
                        return {}
        finally:
            set_random_state(before, self.validation.loader)
        if not totals.samples:
            raise ArgumentError("The validation loader has no batches (a generator can be used only once).")
        return totals.means()

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self, *, between: bool) -> None:
        if self.files.path is None:
            return
        scheduler = self.schedule.scheduler
        saved.save(self.files.path, {
            "step": self.step.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "epochs": [dataclasses.asdict(epoch) for epoch in self.history],
            "totals": self.totals.state(),
            "feed": self.feed.state(between=between),
        })  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``_save`` wrote. If it does not fit, nothing is changed."""
        scheduler = self.schedule.scheduler
        if (state["scheduler"] is None) != (scheduler is None):
            has, lacks = ("This run", "the checkpoint") if scheduler else ("The checkpoint", "this run")
            raise CheckpointError(f"{has} has a scheduler, and {lacks} has none. Nothing was changed.")
        before, old = random_state(self.feed.loader), copy.deepcopy(scheduler.state_dict()) if scheduler else None
        try:
            self.feed.restore(state["feed"], len(state["epochs"]))
            if scheduler is not None:
                scheduler.load_state_dict(state["scheduler"])
            self.step.load_state_dict(state["step"])
        except BaseException:
            set_random_state(before, self.feed.loader)
            if scheduler is not None:
                scheduler.load_state_dict(old)
            raise
        self.totals.restore(state["totals"])
        self.history.epochs = [Epoch(**epoch) for epoch in state["epochs"]]


def _guarded(batches: Iterator[tuple[Any, Any]], interrupts: Interrupts) -> Iterator[tuple[Any, Any]]:
    """Yield the batches. A loader that fails after Ctrl-C, as its worker processes get the signal too, just ends."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception:
            if interrupts.asked():
                return
            raise
        yield batch


def _called(model: nn.Module, inputs: Any) -> Any:
    """Call the model as it is. A training step takes fp32 inputs for a low-precision model; torch alone doesn't."""
    args, kwargs = call_arguments(inputs)
    try:
        return model(*args, **kwargs)
    except RuntimeError:
        if (low := in_dtype_of(model, inputs)) is inputs:
            raise
    args, kwargs = call_arguments(low)
    return model(*args, **kwargs)


@contextlib.contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put the model into a mode, unless it is in that already: a part that the user has frozen stays as it is."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if model.training != training:
            model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
