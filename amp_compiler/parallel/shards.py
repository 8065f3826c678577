"""One divided parameter: the ``DTensor`` that the user and the optimizer have, and what stands for it in a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.gradients import set_gradient

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_MARK = "amp_divided"


@dataclass(eq=False)
class Shard:
    """A parameter of which each process holds some rows.

    ``stand_in`` has the shape of the whole parameter and no memory: Dynamo reads shapes and dtypes from it, and no op
    ever runs on it. ``places``: the modules that hold the parameter, each with its attribute.
    """

    name: str
    parameter: nn.Parameter  # a DTensor
    stand_in: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def local(self) -> Tensor:
        """The rows of this process. The same object at every call, unlike ``to_local()``: gradients hang on it."""
        rows: Tensor = self.parameter._local_tensor  # type: ignore[attr-defined]
        return rows

    def take(self) -> Tensor:
        """The rows of this process as a graph takes them, with the rows of the gradient so far."""
        gradient: Any = self.parameter.grad
        if gradient is None:
            self.local.grad = None
        else:
            set_gradient(self.local, gradient._local_tensor)
        return self.local

    def give(self) -> None:
        """Hand the gradient's rows to the parameter."""
        local, held = self.local, self.parameter.grad
        rows, local.grad = local.grad, None
        if rows is None:
            self.parameter.grad = None
        elif held is None or held._local_tensor is not rows:  # type: ignore[attr-defined]
            set_gradient(self.parameter, self.wrap(rows))

    def wrap(self, rows: Tensor) -> Tensor:
        """Rows of this process as a ``DTensor`` like the parameter."""
        from torch.distributed.tensor import DTensor

        like: Any = self.parameter
        return DTensor.from_local(
            rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def show(self, tensor: nn.Parameter) -> None:
        """Let the modules hold ``tensor``. By ``setattr``: recurrent layers keep a list of their weights by it."""
        for module, key in self.places:
            setattr(module, key, tensor)


def divide(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """This process's rows of what the first process has; a number is the same in all."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Rows

    placement = Rows(0) if tensor.dim() else Replicate()
    found = distribute_tensor(tensor.detach().contiguous(), mesh, [placement])
    rows = found.to_local()
    if rows.untyped_storage().nbytes() > rows.numel() * rows.element_size():  # a view would keep the whole in memory
        found._local_tensor = rows.clone()
    return found


def is_divided(parameter: Tensor) -> bool:
    """True for a parameter that a compiled training step has divided."""
    return _MARK in parameter.__dict__


def mark_divided(parameter: Tensor) -> None:
    """Let ``is_divided`` know; a copy of the parameter has the mark too."""
    setattr(parameter, _MARK, True)


def make_stand_in(like: Tensor) -> nn.Parameter:
    """A parameter of the same shape, dtype and device that has no memory."""
    found = nn.Parameter(
        torch.empty(like.shape, dtype=like.dtype, device=like.device), requires_grad=like.requires_grad
    )
    found.untyped_storage().resize_(0)
    return found


@contextlib.contextmanager
def without_gradients(parameters: Sequence[Tensor], memo: dict[int, Any]) -> Iterator[None]:
    """For a deep copy inside: torch leaves out the gradient of a ``Parameter``, and cannot copy that of a ``DTensor``,
    so copies get theirs afterwards. ``memo``: id -> copy."""
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    try:
        for parameter, _ in held:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
    for parameter, gradient in held:
        set_gradient(memo[id(parameter)], gradient.detach().clone())


def local_of(tensor: Tensor) -> Tensor:
    """The rows of this process of a ``DTensor``; any other tensor itself."""
    rows: Tensor = getattr(tensor, "_local_tensor", tensor)
    return rows
