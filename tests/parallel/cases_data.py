"""What two ranks do with ``DataParallel``; ``test_data.py`` says what must come of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Broken, Switch
from torch import nn
from worker_settings import by_rule

from amp_compiler import DataParallel, DynamicLossScaler, ParallelError, compile_train_step


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


#: what was asked for -> (the model's state before, what came of it): some cases differ in what the ranks send only
_MEANS: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}


def _mean_of_single(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    """The gradients of one update of a single process, averaged over the ranks."""
    asked, state = f"{type(model).__name__} {sorted(options.items())}", copy.deepcopy(model.state_dict())
    if asked in _MEANS:
        before, means = _MEANS[asked]
        assert before.keys() == state.keys()
        assert all(torch.equal(before[name], value) for name, value in state.items())
        return means
    alone = copy.deepcopy(model)
    step = _compile(alone, **options)
    with by_rule():
        for number in range(options.get("accumulate_steps", 1)):
            step(*_batch(number))
    means = {}
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        mean = parameter.grad.clone().div_(dist.get_world_size())
        dist.all_reduce(mean)
        means[name] = mean
    _MEANS[asked] = state, means
    return means


def _compile(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return compile_train_step(model, nn.functional.cross_entropy, optimizer, **options)


def gradients(make: Callable[[], nn.Module] = sequential, **options: Any) -> dict[str, Any]:
    """One update: are the gradients the mean of single processes', and is the model low?"""
    torch.manual_seed(dist.get_rank())  # rank 0's parameters must win
    model = make()
    spec = options.pop("spec", DataParallel())
    step = _compile(model, parallel=spec, **options)
    before = copy.deepcopy(model)
    means = _mean_of_single(before, **options)
    for number in range(options.get("accumulate_steps", 1)):
        result = step(*_batch(number))
    unequal = [n for n, p in model.named_parameters() if p.grad is None or not torch.equal(p.grad, means[n])]
    close = all(torch.allclose(p.grad, means[n], rtol=2e-2, atol=1e-3) for n, p in model.named_parameters()
                if p.grad is not None)  # fmt: skip
    return {
        "unequal": unequal, "close": close, "updated": bool(result.updated), "norm": float(result.grad_norm),
        "by_precision": {str(k): v for k, v in step.report().by_precision.items()},
        "sum": float(sum(p.double().sum() for p in model.parameters())),
    }  # fmt: skip


def overflow(make: Callable[[], nn.Module] = sequential, **options: Any) -> dict[str, Any]:
    """Inf on rank 1 only, in the first micro-batch."""
    model = make()
    scaler = DynamicLossScaler(init_scale=64.0)  # low enough for every batch but the bad one
    step = _compile(model, parallel=DataParallel(), dtype=torch.float16, loss_scaler=scaler, **options)
    size = options.get("accumulate_steps", 1)
    with by_rule():  # graphs as in the cases of gradients
        for number in range(size):
            step(*_batch(number))
    before = copy.deepcopy(step.state_dict())
    for number in range(size):
        x, y = _batch(number)
        if dist.get_rank() == 1 and number == 0:
            x = x * 1e30
        result = step(x, y)
    told = step.explain_overflow()
    after = step.state_dict()
    changed = [name for name, value in after["model"].items() if not torch.equal(value, before["model"][name])]
    for place, state in after["optimizer"]["state"].items():
        held = before["optimizer"]["state"][place]
        changed += [f"optimizer {place} {key}" for key, value in state.items() if not torch.equal(value, held[key])]
    return {"skipped": bool(result.skipped), "scale": step.scaler.get_scale(), "changed": changed,
            "phase": told.phase, "told": str(told), "was": before["scaler"]["scale"]}  # fmt: skip


def used_later(accumulate: int = 1, used: tuple[bool, ...] = (False, True)) -> dict[str, Any]:
    """A parameter that all processes use in some steps only."""
    model = Switch()
    step = _compile(model, parallel=DataParallel(), dtype=torch.bfloat16, accumulate_steps=accumulate)
    alone = copy.deepcopy(model)
    other = _compile(alone, dtype=torch.bfloat16, accumulate_steps=accumulate)
    x, y = _batch(0)
    unequal: list[str] = []
    for both in used:
        alone.load_state_dict(model.state_dict())
        ended = bool(step((x, both), y).updated)
        with by_rule():
            other((x, both), y)
        if not ended:
            continue
        for (name, parameter), twin in zip(model.named_parameters(), alone.parameters(), strict=True):
            if twin.grad is None:
                unequal += [] if parameter.grad is None else [name]
                continue
            mean = twin.grad.clone().div_(dist.get_world_size())
            dist.all_reduce(mean)
            unequal += [] if parameter.grad is not None and torch.equal(parameter.grad, mean) else [name]
    return {"unequal": unequal, "graphs": len(step.joint_graphs)}


def flush() -> dict[str, Any]:
    """Two of three micro-batches, then ``flush``."""
    model = sequential()
    step = _compile(model, parallel=DataParallel(), accumulate_steps=3, dtype=torch.bfloat16)
    alone = copy.deepcopy(model)
    other = _compile(alone, accumulate_steps=3, dtype=torch.bfloat16)
    for number in range(2):
        step(*_batch(number))
        with by_rule():
            other(*_batch(number))
    step.flush()
    other.flush()
    unequal = []
    for (name, parameter), twin in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert twin.grad is not None
        mean = twin.grad.clone().div_(dist.get_world_size())
        dist.all_reduce(mean)
        if parameter.grad is None or not torch.equal(parameter.grad, mean):
            unequal.append(name)
    return {"unequal": unequal}


def disagreement(**difference: Any) -> str:
    """Rank 1 asks for something else."""
    model = nn.Linear(8, 4 if dist.get_rank() == 0 else difference.pop("width", 4))
    options = {"dtype": torch.bfloat16, **(difference if dist.get_rank() == 1 else {})}
    try:
        _compile(model, parallel=DataParallel(), **options)
    except ParallelError as error:
        return str(error)
    return "no error"


def batch_shapes() -> str:
    """Rank 1 has a batch of another shape in its first step."""
    step = _compile(nn.Linear(8, 4), parallel=DataParallel(), dtype=torch.bfloat16)
    rows = 6 + dist.get_rank()
    try:
        step(torch.ones(rows, 8), torch.zeros(rows, dtype=torch.long))
    except ParallelError as error:
        return str(error)
    return "no error"


CASES: dict[str, Callable[[], Any]] = {
    "gradients fp16": lambda: gradients(dtype=torch.float16),
    "gradients bf16": lambda: gradients(dtype=torch.bfloat16),
    "gradients accumulated": lambda: gradients(dtype=torch.float16, accumulate_steps=3),
    "gradients without a scaler": lambda: gradients(dtype=torch.bfloat16, loss_scaler=None, accumulate_steps=2),
    "gradients in small buckets": lambda: gradients(dtype=torch.float16, spec=DataParallel(bucket_mb=1e-4)),
    "gradients in pieces": lambda: gradients(Broken, dtype=torch.float16, accumulate_steps=2),
    "gradients sent in bf16": lambda: gradients(dtype=torch.bfloat16, spec=DataParallel(reduce_dtype=torch.bfloat16)),
    "overflow": overflow,
    "overflow accumulated": lambda: overflow(accumulate_steps=2),
    "overflow in pieces": lambda: overflow(Broken, accumulate_steps=2),
    "flush": flush,
    "used later": used_later,
    "used in the first micro-batch only": lambda: used_later(2, (True, False, False, True)),
    "another width": lambda: disagreement(width=5),
    "another level": lambda: disagreement(level="O1"),
    "another black list": lambda: disagreement(black_list=["linear"]),
    "another batch": batch_shapes,
}
