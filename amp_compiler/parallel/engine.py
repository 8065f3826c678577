"""What a compiled training step asks of the way in which processes train together; here: of a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from ..rewrite.reduction import Reduction
from ..rewrite.sharding import Sharding

if TYPE_CHECKING:
    from .shards import Shard


class Engine:
    """A single process. The engines of several processes override what differs; this module stays light to import."""

    #: several processes train together
    together = False
    #: gradients are reduced after the last micro-batch where no graph has done it (``reduce_``)
    reduces_outside = False
    #: of this process, where each has a part of the parameters
    part: int | None = None

    def reduction(self, *, of_sums: bool) -> Reduction | None:
        """How the graph that ends an update averages its gradients; ``of_sums``: those of several micro-batches."""
        return None

    def sharding(self) -> Sharding | None:
        """How parameters are divided."""
        return None

    def among(self, inputs: Sequence[Any]) -> dict[int, Shard]:
        """Place -> the divided parameter that an input of a captured graph stands for."""
        return {}

    def captured(self, graph: fx.GraphModule, joint: fx.GraphModule) -> None:
        """Called for each graph that is captured."""

    def broken(self, reason: str) -> None:
        """Called when the step cannot be one graph."""

    def reduce_(self, parameters: Mapping[str, Tensor]) -> None:
        """Average the gradients that the parameters hold, outside of a graph."""

    def stand_ins(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the modules hold what Dynamo is to capture."""
        return contextlib.nullcontext()

    def gathered(self) -> contextlib.AbstractContextManager[Mapping[int, Tensor]]:
        """Inside, the modules hold whole parameters: id of the divided one -> whole."""
        return contextlib.nullcontext({})

    def norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """The norm of all gradients, of which ``norm`` gives that of plain tensors."""
        return norm(gradients)

    def copied(self, named: Mapping[str, Tensor], modules: Sequence[nn.Module], optimizer: Any) -> Engine:
        """The engine of a copy of the model and its optimizer."""
        return self
