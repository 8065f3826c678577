"""The function that a training step captures: the loss of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..capture.dynamo import with_own_code
from ..common.errors import ArgumentError
from .results import marked, split

_NOT_COMPILED = (
    "parallel=Sharded(...) gathers parameters inside the compiled graph, and Dynamo is switched off here "
    "(TORCHDYNAMO_DISABLE, or torch.compiler.set_stance): switch it on."
)


def loss_function(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any] | None, *, mark: bool, output: bool, divided: bool
) -> Callable[..., Any]:
    """What is captured: the loss of one batch, what came with it, and the model's output if it is wanted.

    ``mark``: the loss is marked in the graph. ``divided``: the model's parameters are stand-ins without memory, so that
    nothing but Dynamo may call this.
    """

    def loss_of(args: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> Any:
        if divided and not torch.compiler.is_compiling():
            raise ArgumentError(_NOT_COMPILED)
        given = model(*args, **kwargs)
        answer = given if loss_fn is None else loss_fn(given, targets)
        loss, extra = split(answer, from_model=loss_fn is None)
        if mark:
            loss = marked(loss)
        return loss, extra, given if output else None

    return with_own_code(loss_of)  # Dynamo remembers changing sizes by it
