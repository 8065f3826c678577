"""What two ranks do with ``Sharded``; ``test_sharded.py`` says what must come of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from amp_compiler import CaptureError, Sharded, compile_train_step
from amp_compiler.ir import GATHERS, SCATTERS

Batch = tuple[Any, Any]


class Tied(nn.Module):
    """A user's class with a tied weight, a number as parameter, and rows that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens)) * self.gain
        return self.head(torch.relu(self.inner(hidden)) + self.one)


class Mixed(nn.Module):
    """A weight that is read in low precision and in fp32, and others that are read in one of them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.both, self.low = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(self.both(x)) + torch.logsumexp(self.both.weight, 0)


class Broken(nn.Module):
    """A model with a graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.relu(x))


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(5, 4),
    )  # fmt: skip


def checkpointed() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            body = lambda x: torch.tanh(self.second(torch.relu(self.first(x))))  # noqa: E731
            out: torch.Tensor = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
            return out

    return nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                   max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0,
                   attention_probs_dropout_prob=0.0)
    )  # fmt: skip


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * dist.get_rank() + seed)


def vectors(seed: int) -> Batch:
    g = _generator(seed)
    return torch.randn(6, 8, generator=g), torch.randint(0, 4, (6,), generator=g)


def tokens(seed: int) -> Batch:
    g = _generator(seed)
    return torch.randint(0, 11, (6,), generator=g), torch.randint(0, 11, (6,), generator=g)


def images(seed: int) -> Batch:
    g = _generator(seed)
    return torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 4, (4,), generator=g)


def sentences(seed: int) -> Batch:
    g = _generator(seed)
    given = {"input_ids": torch.randint(0, 50, (3, 7), generator=g), "labels": torch.randint(0, 3, (3,), generator=g)}
    return given, None


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "sequential": (sequential, vectors), "tied": (Tied, tokens), "bert": (bert, sentences),
    "convolutions": (convolutions, images), "mixed": (Mixed, vectors), "checkpointed": (checkpointed, vectors),
}  # fmt: skip


def compiled(model: nn.Module, *, adam: bool = False, **options: Any) -> Any:
    loss = None if hasattr(model, "bert") else nn.functional.cross_entropy
    if adam:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return compile_train_step(model, loss, optimizer, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return full


def by_precision(step: Any) -> dict[str, int]:
    return {str(k): v for k, v in step.report().by_precision.items()}


def _sum_of_means(model: nn.Module, batch: Callable[[int], Batch], **options: Any) -> tuple[dict[str, Any], Any]:
    """Gradients of single processes, averaged over the ranks, micro-batch by micro-batch, and added up."""
    size = options.get("accumulate_steps", 1)
    sums: dict[str, torch.Tensor] = {}
    for number in range(size):
        single = compiled(alone := copy.deepcopy(model), **{**options, "accumulate_steps": size})
        single(*batch(number))
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                mean = parameter.grad.clone().div_(dist.get_world_size())
                dist.all_reduce(mean)
                sums[name] = sums[name] + mean if name in sums else mean
    return sums, single


def gradients(kind: str, **options: Any) -> dict[str, Any]:
    """One update: are the gradients the mean of single processes', and is the model as low as without parallel?"""
    torch.manual_seed(dist.get_rank())  # rank 0's parameters must win
    make, batch = MODELS[kind]
    model = make()
    spec = options.pop("spec", Sharded())
    reference = make()
    step = compiled(model, parallel=spec, **options)
    with step.gathered():
        reference.load_state_dict(model.state_dict())
    means, single = _sum_of_means(reference, batch, **options)
    for number in range(options.get("accumulate_steps", 1)):
        result = step(*batch(number))
    held = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in means.values()]))
    graph = step.joint_graphs[-1]
    return {
        "unequal": [n for n in means if n not in held or not torch.equal(held[n], means[n])],
        "far": [n for n in means if not torch.allclose(held[n], means[n], rtol=2e-2, atol=1e-3)],
        "updated": bool(result.updated), "norm": float(result.grad_norm), "norm_of_means": float(norm),
        "by_precision": by_precision(step), "alone": by_precision(single),
        "gathers": [(g.phase, list(g.names), str(g.dtype), g.bytes) for g in graph.meta[GATHERS]],
        "scatters": [list(names) for names in graph.meta[SCATTERS]],
        "local": sum(p.to_local().numel() for p in model.parameters()),
        "numel": sum(p.numel() for p in model.parameters()),
        "sum": float(sum(whole(p.detach()).double().sum() for p in model.parameters())),
    }  # fmt: skip


def overflow(**options: Any) -> dict[str, Any]:
    """Inf on rank 1 only, in the first micro-batch."""
    model = sequential()
    step = compiled(model, parallel=Sharded(), dtype=torch.float16, **options)
    size = options.get("accumulate_steps", 1)
    for number in range(size):
        step(*vectors(number))
    before = copy.deepcopy(step.state_dict())
    for number in range(size):
        x, y = vectors(number)
        if dist.get_rank() == 1 and number == 0:
            x = x * 1e30
        result = step(x, y)
    after = step.state_dict()
    changed = [name for name, value in after["model"].items() if not _same(value, before["model"][name])]
    for place, state in after["optimizer"]["state"].items():
        held = before["optimizer"]["state"][place]
        changed += [f"optimizer {place} {key}" for key, value in state.items() if not _same(value, held[key])]
    told = step.explain_overflow()
    left = [type(p).__name__ for p in model.parameters()]
    again = step(*vectors(0)) if size == 1 else None
    return {"skipped": bool(result.skipped), "scale": step.scaler.get_scale(), "changed": changed,
            "was": before["scaler"]["scale"], "told": str(told), "left": left,
            "again": bool(again.updated) if again is not None else True}  # fmt: skip


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other))


def broken() -> str:
    step = compiled(Broken(), parallel=Sharded(), dtype=torch.bfloat16)
    try:
        step(*vectors(0))
    except CaptureError as error:
        return str(error)
    return "no error"


bf16, fp16 = torch.bfloat16, torch.float16
CASES: dict[str, Callable[[], Any]] = {
    "sequential fp16": lambda: gradients("sequential", dtype=fp16),
    "tied bf16": lambda: gradients("tied", dtype=bf16),
    "tied fp16": lambda: gradients("tied", dtype=fp16),
    "bert bf16": lambda: gradients("bert", dtype=bf16),
    "bert fp16": lambda: gradients("bert", dtype=fp16),
    "convolutions bf16": lambda: gradients("convolutions", dtype=bf16),
    "convolutions fp16": lambda: gradients("convolutions", dtype=fp16),
    "mixed bf16": lambda: gradients("mixed", dtype=bf16),
    "checkpointed bf16": lambda: gradients("checkpointed", dtype=bf16),
    "accumulated": lambda: gradients("sequential", dtype=fp16, accumulate_steps=3),
    "without a scaler": lambda: gradients("sequential", dtype=bf16, loss_scaler=None, accumulate_steps=2),
    "clipped": lambda: gradients("tied", dtype=bf16, max_grad_norm=0.1),
    "not resharded": lambda: gradients("bert", dtype=bf16, spec=Sharded(reshard_after_forward=False)),
    "sent in bf16": lambda: gradients("sequential", dtype=bf16, spec=Sharded(reduce_dtype=bf16)),
    "O1": lambda: gradients("sequential", dtype=bf16, level="O1"),
    "O3": lambda: gradients("sequential", dtype=bf16, level="O3"),
    "overflow": overflow,
    "overflow accumulated": lambda: overflow(accumulate_steps=2),
    "broken": broken,
}
