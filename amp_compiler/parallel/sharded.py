"""Divided parameters: every process has some rows of each parameter, of its gradient and of the optimizer's state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import ir
from ..common.errors import ArgumentError, CaptureError
from ..rewrite.reduction import Reduction
from ..rewrite.sharding import Sharding
from .agreement import change_together, check_agreement, facts_of, next_key
from .engine import Engine
from .shards import Shard, divide, local_of, make_stand_in, mark_divided
from .spec import Sharded, process_group

#: parameters and gradients that are smaller share a collective: one of this size takes about as long to send over a
#: fast link as the latency of a collective is
BUCKET_BYTES = 4 << 20


#: id of a parameter -> the parameter, and the modules and attributes that hold it
Places = dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]


class ShardEngine(Engine):
    """What a compiled training step asks of a ``Sharded``."""

    together = True

    def __init__(self, spec: Sharded, key: str | None = None) -> None:
        self.spec, self.group = spec, process_group(spec.mesh)
        self.size, self.part = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.shards: list[Shard] = []
        self.layouts: list[Any] = []
        self.key = next_key() if key is None else key
        self._by_stand_in: dict[int, Shard] = {}

    def begin(
        self, state: Sequence[Tensor], named: Mapping[str, Tensor], modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer, facts: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Check that all processes agree, give all of them the first one's values, and divide the parameters."""
        check_agreement(self.group, facts, "at compile_train_step")
        names = {id(parameter): name for name, parameter in named.items()}
        found = _by_parameter(modules)
        strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in found]
        if strange:
            raise ArgumentError(
                f"The optimizer has a tensor of the shape {list(strange[0].shape)} that is not a parameter of the "
                "model's modules, and Sharded divides those only.",
                hint="Make it an nn.Parameter of the model, or of a loss function that is a module.",
            )
        with torch.no_grad():
            for tensor in state:
                if not isinstance(tensor, nn.Parameter):
                    dist.broadcast(tensor.detach(), group=self.group, group_src=0)
        self.divide(found, names, optimizer)

    def copied(self, named: Mapping[str, Tensor], modules: Sequence[nn.Module], optimizer: Any) -> ShardEngine:
        """The same for a copy of the model, whose parameters are divided already."""
        twin = ShardEngine(self.spec, f"{self.key}/copy")
        twin.divide(_by_parameter(modules), {id(parameter): name for name, parameter in named.items()}, optimizer)
        return twin

    def divide(self, found: Places, names: Mapping[int, str], optimizer: torch.optim.Optimizer) -> None:
        """Replace every parameter by a divided one, in the modules and in the optimizer, one at a time."""
        mesh = self._mesh(next((p.device for p, _ in found.values()), torch.device("cpu")))
        for key in list(found):
            old, places = found.pop(key)
            shard = self._shard(old, names[key], mesh)
            shard.places = places
            shard.show(shard.parameter)
            self.shards.append(shard)
            _replace(optimizer, old, shard.parameter, mesh)
        self._by_stand_in = {id(shard.stand_in): shard for shard in self.shards}

    def _mesh(self, device: torch.device) -> DeviceMesh:
        if isinstance(self.spec.mesh, DeviceMesh):
            return self.spec.mesh
        return DeviceMesh.from_group(self.group, device.type)

    def _shard(self, old: nn.Parameter, name: str, mesh: DeviceMesh) -> Shard:
        from torch.distributed.tensor import DTensor

        if isinstance(old, DTensor):  # divided by an earlier step
            return Shard(name, old, make_stand_in(old))
        parameter = nn.Parameter(divide(old, mesh), requires_grad=old.requires_grad)
        parameter.__dict__.update(old.__dict__)
        mark_divided(parameter)
        return Shard(name, parameter, make_stand_in(old))

    # ----------------------------------------------------------------------------------------- the graph

    def sharding(self) -> Sharding:
        """What the passes ``gather_parameters`` and ``scatter_gradients`` have to know."""
        reduction = Reduction(self.group.group_name, self.size, self.spec.reduce_dtype, BUCKET_BYTES)
        assert self.part is not None
        return Sharding(reduction, self.part, self.spec.reshard_after_forward)

    def among(self, inputs: Sequence[Any]) -> dict[int, Shard]:
        """Place -> the divided parameter that an input of a captured graph stands for."""
        found = {i: self._by_stand_in.get(id(given)) for i, given in enumerate(inputs)}
        return {i: shard for i, shard in found.items() if shard is not None}

    def captured(self, graph: fx.GraphModule, joint: fx.GraphModule) -> None:
        """Called for each graph: all processes must have the same collectives."""
        layout = joint.meta.get(ir.GATHERS), joint.meta.get(ir.SCATTERS)
        if not self.layouts:
            check_agreement(self.group, facts_of(graph), "in their first step")
        elif layout not in self.layouts:
            change_together(self.group, f"{self.key}/{len(self.layouts)}", layout,
                            "other parameters are read or get gradients than in earlier steps")  # fmt: skip
        if layout not in self.layouts:
            self.layouts.append(layout)

    def broken(self, reason: str) -> None:
        """Called when the step cannot be one graph."""
        if not self.layouts:
            check_agreement(self.group, {"the captured graph": f"none ({reason})"}, "in their first step")
        raise CaptureError(
            f"parallel=Sharded(...) needs the training step as one graph, and it is not: {reason}.",
            hint="Take that code out of the model's forward, or use parallel=DataParallel(), or torch's fully_shard "
            "with amp_compile.",
        )

    # ------------------------------------------------------------------------------------ around a call

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Inside, the modules hold what Dynamo is to capture."""
        for shard in self.shards:
            shard.stand_in.requires_grad_(shard.parameter.requires_grad)  # the user may freeze a parameter at any time
        with self._showing([(shard, shard.stand_in) for shard in self.shards]):
            yield

    @contextlib.contextmanager
    def gathered(self) -> Iterator[dict[int, nn.Parameter]]:
        """Inside, the modules hold whole parameters: id of the divided one -> whole. All processes must take part. What
        is written to a whole parameter is taken over: each process keeps its rows of what it has written."""
        whole = []
        with torch.no_grad():
            for shard in self.shards:
                full = shard.parameter.full_tensor()  # type: ignore[attr-defined]
                whole.append((shard, nn.Parameter(full, requires_grad=shard.parameter.requires_grad)))
        versions = [parameter._version for _, parameter in whole]
        with self._showing(whole):
            yield {id(shard.parameter): parameter for shard, parameter in whole}
        with torch.no_grad():
            for (shard, parameter), version in zip(whole, versions, strict=True):
                if parameter._version != version:
                    shard.local.copy_(self._rows(parameter))

    def _rows(self, whole: Tensor) -> Tensor:
        """The rows of this process, as ``torch.chunk`` divides them."""
        if not whole.dim():
            return whole
        sharding = self.sharding()
        first = min(sharding.rank * sharding.chunk(whole.shape[0]), whole.shape[0])
        return whole[first : first + sharding.own_rows(whole.shape[0])]

    @contextlib.contextmanager
    def _showing(self, shown: Sequence[tuple[Shard, nn.Parameter]]) -> Iterator[None]:
        try:
            for shard, tensor in shown:
                shard.show(tensor)
            yield
        finally:
            for shard, _ in shown:
                shard.show(shard.parameter)

    def norm(self, gradients: Sequence[Tensor], norm: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """The norm of the whole gradients. ``norm`` gives that of the rows of this process."""
        from torch.distributed.tensor import DTensor

        rows: list[Tensor] = []
        held: list[Tensor] = []  # whole in every process
        for gradient in gradients:
            divided = isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements)
            (rows if divided else held).append(local_of(gradient))
        square = norm(rows).double().square()
        dist.all_reduce(square, group=self.group)
        if held:
            square = square + norm(held).double().square()
        total: Tensor = square.sqrt().float()
        return total


def _by_parameter(modules: Iterable[nn.Module]) -> Places:
    """Every parameter, by its id, and all places that hold it."""
    found: Places = {}
    for module in {id(m): m for m in modules}.values():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), (parameter, []))[1].append((module, key))
    return found


def _replace(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter, mesh: DeviceMesh) -> None:
    """Let an optimizer train ``new`` in the place of ``old``, with what it has of the old one's state."""
    if old is new:
        return
    for group in optimizer.param_groups:
        group["params"][:] = [new if p is old else p for p in group["params"]]
    if old in optimizer.state:
        state = optimizer.state.pop(old)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == old.shape and value.dim():
                state[key] = divide(value, mesh)
        optimizer.state[new] = state
