"""Check that all processes run the same thing, before a collective could wait forever."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import fx

from .. import ir
from ..common.errors import ParallelError


def check_agreement(group: dist.ProcessGroup, facts: Mapping[str, str], when: str) -> None:
    """Raise a ``ParallelError`` in every process if a fact differs between them. ``facts``: what it is -> its value."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(facts), group=group)
    told = []
    for name in {key: None for facts in everyone for key in facts}:
        ranks: dict[str, list[int]] = {}
        for rank, known in enumerate(everyone):
            ranks.setdefault(known.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            told += [f"{name}: " + "; ".join(f"rank {_ranks(r)} has {value}" for value, r in ranks.items())]
    if told:
        raise ParallelError(
            f"The processes that train together do not run the same thing {when}. " + ". ".join(told) + ".",
            hint="Build the same model with the same arguments in every process; pass each a batch of the same shape.",
        )


#: how long a process waits for the others to change their step as it did; they may have to compile first
PATIENCE = timedelta(seconds=60)


_STEPS = itertools.count()


def next_key() -> str:
    """Return a key of the store for a new training step: the same in every process, since all compile their steps in
    the same order."""
    return f"amp_compiler/{next(_STEPS)}"


def change_together(group: dist.ProcessGroup, key: str, change: object, reason: str) -> None:
    """Wait until every process of the group has called this with the same key, or raise a ``ParallelError``.

    A process whose step changes in the middle of a run cannot ask by a collective whether the others change theirs,
    too: they may be in one of their step, where they wait for this process. So all meet at the store that they share.
    """
    # torch 2.13 to 2.15 have no public name for the store of the default group.
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group)
    own = fingerprint(repr(change))
    store.set(f"{key}/{dist.get_rank()}", own)
    try:
        store.wait([f"{key}/{rank}" for rank in ranks], PATIENCE)
    except RuntimeError as error:
        gone = [dist.get_group_rank(group, rank) for rank in ranks if not store.check([f"{key}/{rank}"])]
        raise _changed(group, gone, reason) from error
    others = [dist.get_group_rank(group, rank) for rank in ranks if store.get(f"{key}/{rank}").decode() != own]
    if others:
        raise _changed(group, others, reason)


def _changed(group: dist.ProcessGroup, others: list[int], reason: str) -> ParallelError:
    return ParallelError(
        f"The training step of rank {dist.get_rank(group)} has changed ({reason}), and that of rank {_ranks(others)} "
        "has not, or in another way: processes that train together must do the same in every step.",
        hint="Let every process use the same parameters in each step, or train with "
        "DistributedDataParallel(model, find_unused_parameters=True).",
    )


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def fingerprint(text: str) -> str:
    """Return a short hash of a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def graph_fingerprint(gm: fx.GraphModule) -> str:
    """Return a hash that is equal for graphs with the same ops, dtypes and shapes."""
    lines = []
    for node in gm.graph.nodes:
        values = ", ".join(
            f"{value.dtype}{tuple(map(str, value.shape))}" for value in ir.tensor_outputs(node) if value is not None
        )
        lines.append(f"{node.name} = {ir.op_name(node) if node.op == 'call_function' else node.op}: {values}")
    return fingerprint("\n".join(lines))


def facts_of(graph: fx.GraphModule) -> dict[str, str]:
    """What all processes must have alike of a captured forward."""
    return {"the shapes of the batch": _shapes(graph), "the captured graph": graph_fingerprint(graph)}


def _shapes(graph: fx.GraphModule) -> str:
    """The shapes of the inputs that are not the model's own."""
    values = [
        ir.tensor_of(n) for n in graph.graph.nodes
        if n.op == "placeholder" and not n.meta.get(ir.PARAMETER) and not n.meta.get(ir.PATH)
    ]  # fmt: skip
    return " and ".join(str(tuple(map(str, value.shape))).replace("'", "") for value in values if value is not None)
