"""What ``fit`` returns: one row per epoch, as plain data that prints as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..training.step import TrainStep


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a run.

    Attributes:
        number: Counted from 1.
        loss: The mean of the training loss over all samples.
        metrics: The means of the metrics over all training samples, by name.
        validation: The same of the validation loader, and its loss as ``"loss"``; empty if there is none.
        scale: The loss scale at the end.
        batches: How many batches there were.
        updates: How many updates of the weights.
        skipped: How many updates were skipped because a gradient was not finite.
        seconds: How long it took, validation included.
    """

    number: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    batches: int = 0
    updates: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def shown(self) -> dict[str, str]:
        """Return the figures as text, by the headings of a table."""
        figures = {"loss": self.loss, **self.metrics}
        figures |= {f"validation {name}": value for name, value in self.validation.items()}
        return {
            "epoch": str(self.number),
            **{name: f"{value:.4g}" for name, value in figures.items()},
            "scale": f"{self.scale:g}",
            "updates": str(self.updates),
            "skipped": str(self.skipped),
            "seconds": f"{self.seconds:.1f}",
        }


@dataclass
class History:
    """What ``fit`` returns. It prints as a table, and behaves as a sequence of epochs.

    Attributes:
        epochs: One ``Epoch`` per epoch that was completed: ``number``, ``loss``, ``metrics``, ``validation``,
            ``scale``, ``batches``, ``updates``, ``skipped``, ``seconds``.
        interrupted: True if Ctrl-C ended the run before its last epoch did.
        step: The ``TrainStep`` that trained the model, as for ``report()`` and ``health()``. It is not pickled.

    Examples:
        >>> import torch
        >>> from amp_compiler import fit
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> history = fit(model, torch.nn.functional.mse_loss, optimizer, [(torch.ones(3, 4), torch.zeros(3, 1))], 2)
        >>> len(history), history[-1].updates, history.interrupted
        (2, 1, False)
        >>> history[1].loss < history[0].loss
        True
    """

    epochs: list[Epoch] = field(default_factory=list)
    interrupted: bool = False
    step: TrainStep | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, index: int) -> Epoch:
        return self.epochs[index]

    def __iter__(self) -> Iterator[Epoch]:
        return iter(self.epochs)

    def to_json(self) -> str:
        """Return the epochs as JSON text. NaN and infinity are written as Python's ``json`` does."""
        rows = [dataclasses.asdict(epoch) for epoch in self.epochs]
        return json.dumps({"interrupted": self.interrupted, "epochs": rows}, indent=1)

    def __str__(self) -> str:
        rows = [epoch.shown() for epoch in self.epochs]
        names = list(dict.fromkeys(name for row in rows for name in row))
        widths = {name: max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names}
        lines = ["  ".join(f"{name:>{widths[name]}}" for name in names)] if rows else ["No epoch was completed."]
        lines += ["  ".join(f"{row.get(name, ''):>{widths[name]}}" for name in names) for row in rows]
        if self.interrupted:
            lines.append(f"Interrupted in epoch {len(self.epochs) + 1}.")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "step": None}
