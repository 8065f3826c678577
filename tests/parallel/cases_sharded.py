"""What two ranks do with ``Sharded``; ``test_sharded.py`` says what must come of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parallel_models import Broken
from torch import nn
from torch.distributed.fsdp import fully_shard
from worker_settings import by_rule

from amp_compiler import (
    AmpError,
    CaptureError,
    DataParallel,
    ParallelError,
    Sharded,
    amp_compile,
    compile_train_step,
)
from amp_compiler.ir import GATHERS, SCATTERS
from amp_compiler.parallel import sharded

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


class Recurrent(nn.Module):
    """A layer that keeps a list of its weights beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.rnn(x.unsqueeze(1))[0][:, -1])
        return out


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
    "convolutions": (convolutions, images), "recurrent": (Recurrent, vectors),
    "mixed": (Mixed, vectors), "checkpointed": (checkpointed, vectors),
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
        with by_rule():
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


def large(**options: Any) -> dict[str, Any]:
    """Every parameter has a gather of its own, as parameters that are larger than a bucket have."""
    held, sharded.BUCKET_BYTES = sharded.BUCKET_BYTES, 0
    try:
        return gradients("tied", **options)
    finally:
        sharded.BUCKET_BYTES = held


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


def clipped() -> dict[str, Any]:
    """Gradients are clipped by the norm of the whole gradients, not by that of a rank's rows."""
    model, limit = Tied(), 0.1
    alone = copy.deepcopy(model)
    step = compiled(model, parallel=Sharded(), dtype=bf16, max_grad_norm=limit)
    result = step(*tokens(0))
    means, _ = _sum_of_means(alone, tokens, dtype=bf16)
    factor = limit / (float(result.grad_norm) + 1e-6)
    far = [n for n, p in model.named_parameters() if not torch.allclose(whole(p.grad), means[n] * factor, rtol=1e-5)]
    return {"far": far, "norm": float(result.grad_norm), "clipped": factor < 1}


def profiled() -> dict[str, Any]:
    """The bytes that torch's profiler records, beside those that the graph plans."""
    step = compiled(Mixed(), parallel=Sharded(), dtype=bf16)
    step(*vectors(0))
    with torch.profiler.profile(record_shapes=True) as profile:
        step(*vectors(1))
    sizes = {"float": 4, "c10::BFloat16": 2}
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "gloo:all_gather"]  # type: ignore[union-attr]
    sent = [sizes[e.dtypes()[0]] * torch.Size(e.shapes()[0]).numel() * dist.get_world_size() for e in events]
    gathers = step.joint_graphs[0].meta[GATHERS]
    return {"sent": sent, "planned": [g.bytes for g in gathers],
            "gathers": [(g.phase, list(g.names), str(g.dtype)) for g in gathers]}  # fmt: skip


def low_only() -> dict[str, Any]:
    """All-gather bytes of a model whose parameters are all low, and of the same model in fp32."""
    found = {}
    for level in ("O0", "O2"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        step = compiled(model, parallel=Sharded(), dtype=bf16, level=level)
        step(*vectors(0))
        found[level] = sum(g.bytes for g in step.joint_graphs[0].meta[GATHERS])
    return found


def copied() -> dict[str, Any]:
    """A deep copy of a step trains a model of its own."""
    step = compiled(sequential(), parallel=Sharded(), dtype=bf16, accumulate_steps=2)
    for number in range(3):
        step(*vectors(number))
    twin = copy.deepcopy(step)
    losses = [float(one(*vectors(3)).loss) for one in (step, twin)]
    pairs = list(zip(step.model.parameters(), twin.model.parameters(), strict=True))
    return {"losses": losses, "same": all(torch.equal(whole(p.detach()), whole(q.detach())) for p, q in pairs),
            "apart": all(p is not q for p, q in pairs)}  # fmt: skip


def evaluated() -> dict[str, Any]:
    """Inside ``gathered`` the model can be called, compiled and saved; afterwards it is divided again."""
    model = sequential()
    step = compiled(model, parallel=Sharded(), dtype=bf16)
    step(*vectors(0))
    with step.gathered() as inside, torch.no_grad():
        inside.eval()
        x = torch.ones(3, 8)
        plain, low = inside(x), amp_compile(inside, dtype=bf16)(x)
        kinds = {type(p).__name__ for p in inside.parameters()}
        inside.train()
    step(*vectors(1))
    return {"close": torch.allclose(plain, low, atol=0.05), "kinds": sorted(kinds), "sum": float(plain.sum()),
            "after": sorted({type(p).__name__ for p in model.parameters()}), "graphs": len(step.graphs)}  # fmt: skip


def frozen() -> dict[str, Any]:
    """A parameter that is not trained is divided too; an optimizer with a state keeps it; a fused one skips alone."""
    model = sequential()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    moments = optimizer.state[model[0].bias]["exp_avg"].clone()  # type: ignore[index]
    step = compile_train_step(model, nn.functional.cross_entropy, optimizer, parallel=Sharded(), dtype=fp16)
    weight, state = model[0].weight, optimizer.state[model[0].bias]  # type: ignore[index]
    kept = torch.equal(whole(state["exp_avg"]), moments)
    before = whole(weight.detach())
    x, y = vectors(0)
    updated = [bool(step(x * (1e30 if bad and dist.get_rank() == 1 else 1), y).updated) for bad in (0, 1, 0)]
    return {"kept": kept, "updated": updated, "unchanged": torch.equal(before, whole(weight.detach())),
            "steps": float(state["step"]), "grad": weight.grad is None,
            "rows": weight.to_local().shape[0]}  # type: ignore[operator]  # fmt: skip


def changing_sizes() -> dict[str, Any]:
    """A batch of another size: another graph, the same collectives."""
    step = compiled(sequential(), parallel=Sharded(), dtype=bf16)
    x, y = vectors(0)
    losses = [float(step(x[:n], y[:n]).loss) for n in (6, 4, 3)]
    return {"finite": all(math.isfinite(loss) for loss in losses), "graphs": len(step.graphs)}


def refused() -> dict[str, str]:
    """What cannot be divided says so, and leaves the model as it was."""
    told = {}

    def attempt(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            told[name] = "no error"
        except AmpError as error:
            told[name] = f"{type(error).__name__}: {error}"

    model, extra = sequential(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    loss = nn.functional.cross_entropy
    attempt("a tensor of its own", lambda: compile_train_step(model, loss, optimizer, parallel=Sharded()))
    told["left"] = type(next(model.parameters())).__name__
    attempt("a pass", lambda: compiled(model, parallel=Sharded(), disable_passes=["gather_parameters"]))
    attempt("DDP", lambda: compiled(nn.parallel.DistributedDataParallel(sequential()), parallel=Sharded()))
    attempt("fully_shard", lambda: compiled(fully_shard(sequential()), parallel=Sharded()))
    step = compiled(model, parallel=Sharded(), dtype=bf16)
    with torch.compiler.set_stance("force_eager"):
        attempt("eager", lambda: step(*vectors(0)))
    attempt("data", lambda: compiled(model, parallel=DataParallel()))
    sparse = compiled(nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 11)), parallel=Sharded(), dtype=bf16)
    attempt("sparse", lambda: sparse(*tokens(0)))
    return told


def disagreement() -> str:
    """Rank 1 asks for another level."""
    try:
        compiled(sequential(), parallel=Sharded(), dtype=bf16, level="O1" if dist.get_rank() else "O2")
    except ParallelError as error:
        return str(error)
    return "no error"


def one_model_two_steps() -> list[float]:
    """A second step takes over a model that the first has divided."""
    model = sequential()
    first, second = (compiled(model, parallel=Sharded(), dtype=dtype) for dtype in (bf16, fp16))
    losses = [first(*vectors(0)).loss, second(*vectors(0)).loss]
    for loss in losses:
        dist.all_reduce(loss)
    return [float(loss) for loss in losses]


bf16, fp16 = torch.bfloat16, torch.float16
GRADIENTS: dict[str, Callable[[], Any]] = {
    "sequential bf16": lambda: gradients("sequential", dtype=bf16),
    "sequential fp16": lambda: gradients("sequential", dtype=fp16),
    "tied bf16": lambda: gradients("tied", dtype=bf16),
    "tied fp16": lambda: gradients("tied", dtype=fp16, loss_scaler=1024.0),
    "bert bf16": lambda: gradients("bert", dtype=bf16),
    "bert fp16": lambda: gradients("bert", dtype=fp16),
    "convolutions bf16": lambda: gradients("convolutions", dtype=bf16),
    "convolutions fp16": lambda: gradients("convolutions", dtype=fp16),
    "recurrent bf16": lambda: gradients("recurrent", dtype=bf16),
    "mixed bf16": lambda: gradients("mixed", dtype=bf16),
    "checkpointed bf16": lambda: gradients("checkpointed", dtype=bf16),
    "accumulated": lambda: gradients("sequential", dtype=fp16, accumulate_steps=3),
    "without a scaler": lambda: gradients("sequential", dtype=bf16, loss_scaler=None, accumulate_steps=2),
    "not resharded": lambda: gradients("bert", dtype=bf16, spec=Sharded(reshard_after_forward=False)),
    "large": lambda: large(dtype=bf16),
    "large accumulated": lambda: large(dtype=bf16, accumulate_steps=2),
    "O0": lambda: gradients("sequential", dtype=bf16, level="O0"),
    "O1": lambda: gradients("sequential", dtype=bf16, level="O1"),
    "O3": lambda: gradients("sequential", dtype=bf16, level="O3"),
    "inductor": lambda: gradients("sequential", dtype=bf16, backend="inductor"),
}
CASES: dict[str, Callable[[], Any]] = {
    **GRADIENTS,
    "sent in bf16": lambda: gradients("sequential", dtype=bf16, spec=Sharded(reduce_dtype=bf16)),
    "clipped": clipped,
    "profiled": profiled,
    "low only": low_only,
    "overflow": overflow,
    "overflow accumulated": lambda: overflow(accumulate_steps=2),
    "broken": broken,
    "copied": copied,
    "evaluated": evaluated,
    "frozen": frozen,
    "changing sizes": changing_sizes,
    "refused": refused,
    "disagreement": disagreement,
    "one model, two steps": one_model_two_steps,
}
