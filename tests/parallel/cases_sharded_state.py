"""A divided model that its user changes between steps; ``test_sharded_state.py`` says what must come of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Switch
from torch import nn
from worker_settings import by_rule

from amp_compiler import Sharded, compile_train_step


def _step(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compile_train_step(model, nn.functional.cross_entropy, optimizer, dtype=torch.bfloat16, **options)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def frozen_between_steps() -> dict[str, list[bool]]:
    """Which steps change the first layer, of a plain step and of a divided one, if it is frozen and unfrozen."""
    moved: dict[str, list[bool]] = {}
    for way, options in (("plain", {}), ("sharded", {"parallel": Sharded()})):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        model[0].requires_grad_(False)
        step = _step(model, **options)
        moved[way] = []
        for number in range(6):
            if number in (2, 4):
                model[0].requires_grad_(number == 2)
            with torch.no_grad():
                before = _whole(model[0].weight).clone()
            with by_rule(way == "plain"):
                step(*_batch())
            moved[way].append(not torch.equal(before, _whole(model[0].weight)))
    return moved


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def written_while_gathered() -> dict[str, Any]:
    """Weights that are loaded into the gathered model, with rows that do not divide evenly."""
    model = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    wanted = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    wanted["2.bias"] = torch.arange(4.0)
    step = _step(model, parallel=Sharded())
    step(*_batch())
    with step.gathered() as whole:
        whole.load_state_dict(wanted)
    wrong = [name for name, p in model.named_parameters() if not torch.equal(_whole(p), wanted[name])]
    return {"wrong": wrong, "updated": bool(step(*_batch()).updated)}


def used_later() -> dict[str, Any]:
    """A layer that all processes use in some steps only."""
    model = Switch()
    alone = copy.deepcopy(model)
    step, other = _step(model, parallel=Sharded()), _step(alone)
    unequal: list[str] = []
    x, y = _batch()
    for both in (False, True, False):
        step((x, both), y)
        with by_rule():
            other((x, both), y)
        unequal += [
            name for (name, p), twin in zip(model.named_parameters(), alone.parameters(), strict=True)
            if not torch.equal(_whole(p), twin)
        ]  # fmt: skip
    return {"unequal": unequal, "ranks": dist.get_world_size()}


def explained() -> dict[str, Any]:
    """Gradients that fp16 flushes to zero, of a plain step and of a divided one."""
    told = {}
    for way, options in (("plain", {}), ("sharded", {"parallel": Sharded()})):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        step = compile_train_step(
            model, lambda output, target: nn.functional.cross_entropy(output, target) * 1e-6,
            torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.float16, loss_scaler=1.0, **options,
        )  # fmt: skip
        with by_rule(way == "plain"):
            step(*_batch())
            found = step.explain_underflow()
        told[way] = [found.share, found.module, list(map(list, found.parameters)), found.better_scale]
    return told


CASES: dict[str, Callable[[], Any]] = {
    "frozen": frozen_between_steps, "written": written_while_gathered, "used later": used_later,
    "explained": explained,
}  # fmt: skip
