"""What a precision plugin does beside updates: schedulers that wait, metrics, and finding the optimizers of Fabric."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.gradients import LOW

_NEVER = sys.maxsize  # the frequency of a scheduler that waits


class HeldSchedulers:
    """Schedulers that move with steps, and wait after a skipped one until the next step begins."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, int]] = []  # and their frequencies

    def hold(self, configs: list[Any]) -> None:
        """Have the loop pass over the schedulers of ``configs``."""
        self._waiting = [(config, config.frequency) for config in configs]
        for config in configs:
            config.frequency = _NEVER

    def release(self) -> None:
        """Give them back their frequencies."""
        for config, frequency in self._waiting:
            config.frequency = frequency
        self._waiting = []

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy holds no scheduler of the original's trainer


class Metrics:
    """Gives metrics of an update, and the norm of its gradients, to a trainer's loggers at its steps of logging."""

    def __init__(self, log: bool) -> None:
        self._log = log
        self._norms: list[Tensor] = []  # one for each optimizer

    def wanted(self, trainer: Any) -> bool:
        """True if the loggers get metrics in this step."""
        return self._log and not trainer.barebones and bool(trainer._logger_connector.should_update_logs)

    def note(self, grads: list[Tensor]) -> None:
        """Note the norm of the gradients of an optimizer."""
        self._norms.append(torch.nn.utils.get_total_norm(grads))

    def send(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Send ``metrics`` and the norm of all gradients noted since the last time."""
        if self._norms:
            norm = self._norms[0] if len(self._norms) == 1 else torch.stack(self._norms).norm()
            metrics = {**metrics, "grad_norm": float(norm)}
            self._norms.clear()
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def forget(self) -> None:
        """Drop the norms of an iteration that was broken off."""
        self._norms.clear()

    def __reduce__(self) -> Any:
        return type(self), (self._log,)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Lightning's wrapper, which ``self.optimizers()`` returns."""
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    return optimizer.optimizer if names & {"LightningOptimizer", "_FabricOptimizer"} else optimizer


def live_optimizers(module: nn.Module) -> list[Optimizer]:
    """Return the optimizers that hold low-precision parameters of ``module``.

    Fabric tells a plugin of an optimizer only at its first step, when its state may have been loaded already, and torch
    rounds what it loads to the dtype of the parameters. So they are looked up among all objects, which takes some
    milliseconds, and only if there is such a parameter.
    """
    low = {id(p) for p in module.parameters() if p.requires_grad and p.dtype in LOW}
    if not low:
        return []
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer))
    own = {id(one): one for one in map(unwrapped, found)}
    return [one for one in own.values() if any(id(p) in low for group in one.param_groups for p in group["params"])]
