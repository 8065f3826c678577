"""The batches of a run, epoch by epoch, and how to find the same place in them once more."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import ArgumentError
from ..common.gradients import LOW
from ..common.torch_names import pytree
from ..runtime.arguments import split_batch

_ENDLESS = (itertools.cycle, itertools.count, itertools.repeat)


class Feed:
    """Gives the batches of a loader on the model's device. ``steps``: the most batches per epoch."""

    def __init__(self, loader: Iterable[Any], steps: int | None, device: torch.device, name: str = "loader") -> None:
        if isinstance(loader, (Tensor, Mapping, str)) or not isinstance(loader, Iterable):
            raise ArgumentError(
                f"{name} must be an iterable of (inputs, targets), not {type(loader).__name__}: for a single batch "
                "write [(inputs, targets)]."
            )
        self.loader, self.steps, self.device, self.name = loader, steps, device, name
        known = _length(loader)
        if known == 0:
            raise ArgumentError(f"The {name} has no batches: its length is 0.")
        self.length = known if steps is None else steps if known is None else min(steps, known)
        if self.length is None and isinstance(loader, _ENDLESS):
            raise ArgumentError(f"The {name} never ends: say by steps= how many batches an epoch has.")
        self.once = isinstance(loader, Iterator)  # an epoch goes on where the one before has stopped
        self.done = 0  # batches of this epoch
        self.taken = 0  # batches of all epochs
        self.start: dict[str, Any] = {}  # the random generators at the start of the epoch
        self._waiting: Iterator[Any] | None = None  # of an epoch that is resumed

    def check_epochs(self, epochs: int) -> None:
        """Raise if there can be no second epoch."""
        if self.once and self.steps is None and epochs > 1:
            way = ", or say by steps= how many batches an epoch has" if self.name == "loader" else ""
            raise ArgumentError(
                f"The {self.name} is an iterator, which gives its batches once, so there is nothing left for a second "
                f"epoch: pass a list or a DataLoader{way}."
            )

    def epoch(self, number: int) -> Iterator[tuple[Any, Any]]:
        """Yield (inputs, targets) of an epoch, counted from 0; the rest of it if it is resumed."""
        if self._waiting is None:
            self.done = 0
            self.start = random_state(self.loader)
            self._waiting = self._iterator(number)
        source, self._waiting = self._waiting, None
        while self.steps is None or self.done < self.steps:
            batch = next(source, _END)
            if batch is _END:
                return
            self.done, self.taken = self.done + 1, self.taken + 1
            yield _on(self.device, split_batch(batch, self.done))

    def _iterator(self, number: int) -> Iterator[Any]:
        for part in (self.loader, getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):  # as a DistributedSampler has
                set_epoch(number)
        return iter(self.loader)

    # ------------------------------------------------------------------------------------------ checkpoints

    def state(self, *, between: bool) -> dict[str, Any]:
        """Return where the run is. ``between``: between two epochs."""
        broken_off = between and self.done == self.steps  # its own state may be that of the middle of an epoch
        own = self.loader.state_dict() if _has_state(self.loader) and not broken_off else None  # type: ignore[attr-defined]
        return {
            "done": 0 if between else self.done,
            "taken": self.taken,
            "start": {} if between else self.start,
            "now": random_state(self.loader),
            "loader": own,
        }

    def restore(self, state: Mapping[str, Any], number: int) -> None:
        """Find the same place. A loader with a ``state_dict`` is asked for it. Any other runs from the start of the
        epoch, with the random generators as they were then, and the batches that were used are dropped."""
        self.done, self.taken, self.start = state["done"], state["taken"], dict(state["start"])
        if _has_state(self.loader) and state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._waiting = self._iterator(number) if self.done else None
        elif self.done or self.once:
            set_random_state(self.start, self.loader)
            self._waiting = self._iterator(number)
            skipped = self.taken if self.once else self.done
            if sum(1 for _ in itertools.islice(self._waiting, skipped)) < skipped:
                raise ArgumentError(
                    f"The {self.name} has fewer batches than the {skipped} that the checkpoint has used: pass the same "
                    "loader."
                )
        else:
            set_random_state(state["now"], self.loader)
        set_random_state({name: value for name, value in state["now"].items() if name != "generators"}, self.loader)


class _End:
    pass


_END: Any = _End()


def check_names(model: nn.Module, inputs: Any) -> None:
    """Raise if a dict of inputs has entries that the model does not take: it is called with all of them."""
    if not isinstance(inputs, Mapping):
        return
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    if others := [name for name in inputs if name not in parameters]:
        raise ArgumentError(
            f"The inputs are a dict, with which the model is called, and forward() of {type(model).__name__} takes no "
            f"{', '.join(map(repr, others))}. If that is for the loss, make batches of (inputs, targets), for example "
            "by collate_fn= of the DataLoader; otherwise leave it out of the batch."
        )


def in_dtype_of(model: nn.Module, inputs: Any) -> Any:
    """Return the inputs with fp32 tensors in the dtype of the model's parameters, if that is a low-precision one."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) != 1 or LOW.isdisjoint(dtypes):
        return inputs
    (low,) = dtypes

    def cast(value: Any) -> Any:
        return value.to(low) if isinstance(value, Tensor) and value.dtype is torch.float32 else value

    return pytree.tree_map(cast, inputs)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _has_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _on(device: torch.device, batch: tuple[Any, Any]) -> tuple[Any, Any]:
    def moved(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) and value.device != device else value

    found: tuple[Any, Any] = pytree.tree_map(moved, batch)
    return found


# ------------------------------------------------------------------------------------------ random generators


def random_state(loader: Any) -> dict[str, Any]:
    """Return the state of every generator that a loader may draw from: torch's, Python's, NumPy's if it is loaded, and
    those of the loader, its samplers and its data set."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (str(kind), [int(key) for key in keys], *rest)
    found["generators"] = [generator.get_state() for generator in _generators(loader)]
    return found


def set_random_state(state: Mapping[str, Any], loader: Any) -> None:
    """Set what ``random_state`` returned."""
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "python" in state:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(state["numpy"]))
    for generator, value in zip(_generators(loader), state.get("generators", ()), strict=False):
        generator.set_state(value)


def _generators(loader: Any) -> list[torch.Generator]:
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    holders = (loader, sampler, batches, getattr(batches, "sampler", None), getattr(loader, "dataset", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
