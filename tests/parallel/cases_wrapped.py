"""What two ranks do with models that ``torch.distributed`` has wrapped; ``test_wrapped.py`` says what must come of it."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from amp_compiler import amp_compile, compile_train_step

# ------------------------------------------------------------------------------------------------------ models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Ops of its own before, between and after the blocks, which it calls in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(2))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x))
        for i, block in enumerate(self.blocks):
            x = block(x) * (0.5 + i)
        return self.head(x * 2)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.last(self.second(torch.relu(self.norm(self.first(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.layers = nn.Sequential(Residual(6), nn.MaxPool2d(2), Residual(6))
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), Block(12), Block(12), nn.Linear(12, 4))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, num_labels=4,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"Sequential": sequential, "class": Net, "BERT": bert, "ResNet": ResNet}


def loss(output: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output if isinstance(output, Tensor) else output.logits, targets)


def batch(name: str, number: int = 0) -> tuple[Any, Tensor]:
    """A batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    targets = torch.randint(0, 4, (6,), generator=generator)
    if name == "BERT":
        return {"input_ids": torch.randint(0, 32, (6, 5), generator=generator)}, targets
    shape = (6, 1, 6, 6) if name == "ResNet" else (6, 8)
    return torch.randn(shape, generator=generator), targets


# ---------------------------------------------------------------------------------------------------- wrappers


def is_block(module: nn.Module) -> bool:
    return type(module).__name__ in ("Block", "Residual", "BertLayer")


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Nested units: every block, then the rest of the model."""
    for module in list(model.modules()):
        if is_block(module):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": shard,
    "FSDP2 of the root": fully_shard,  # type: ignore[dict-item]
    "FSDP2 that keeps parameters": functools.partial(shard, reshard_after_forward=False),
    "FSDP2 that frees parameters": functools.partial(shard, reshard_after_forward=True),
    "FSDP2 with a policy": functools.partial(
        shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "FSDP2 offloaded": functools.partial(shard, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


# ------------------------------------------------------------------------------------------------------- cases


def rows(report: Any) -> list[str]:
    """What each op is, where it stands and how it runs, as far as no graph's own names are in it."""
    return sorted(f"{row.op} in {row.module or 'the model'}: {row.precision}" for row in report.rows)


def differing(report: Any, other: Any) -> list[str]:
    """Ops that one report has and the other has not, or has in another precision."""
    here, there = Counter(rows(report)), Counter(rows(other))
    return [f"only wrapped: {row}" for row in here - there] + [f"only plain: {row}" for row in there - here]


def called(model: Any, inputs: Any) -> Any:
    result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return result if isinstance(result, Tensor) else result.logits


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def averaged(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    means = {name: gradient / dist.get_world_size() for name, gradient in gradients.items()}
    for mean in means.values():
        dist.all_reduce(mean)
    return means


def unequal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [f"{name}: {(found[name] - g).abs().max():.3g} of {g.abs().max():.3g}" for name, g in wanted.items()
            if not torch.equal(found[name], g)]  # fmt: skip


def messages(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in seen if "amp_compiler" in str(w.message)]


def forward(name: str, wrapper: str, **options: Any) -> dict[str, Any]:
    """``amp_compile`` of a wrapped model, or a wrapper around a compiled one, beside the model alone."""
    model = MODELS[name]()
    inputs, targets = batch(name)
    alone = amp_compile(copy.deepcopy(model), **options)
    loss(called(alone, inputs), targets).backward()
    around = wrapper.startswith("around ")
    if around:
        compiled: Any = amp_compile(model, **options)
        wrapped: Any = WRAPPERS[wrapper.removeprefix("around ")](compiled)
    else:
        wrapped = compiled = amp_compile(WRAPPERS[wrapper](model), **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = called(wrapped, inputs)
        loss(output, targets).backward()
        report = compiled.report()
    return {
        "precision": [report.by_precision, alone.report().by_precision], "differing": differing(report, alone.report()),
        "unequal": unequal(named_gradients(model), averaged(named_gradients(alone))), "warnings": messages(seen),
        "not captured": list(report.not_captured), "dtype": str(output.dtype),
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()) or not isinstance(model, FSDPModule),
    }  # fmt: skip


def step(name: str, wrapper: str, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    """``compile_train_step`` of a wrapped model beside the model alone."""
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    alone = compile_train_step(
        plain, loss, torch.optim.SGD(plain.parameters(), lr=0.1), accumulate_steps=accumulate, **options
    )
    wrapped = WRAPPERS[wrapper](model)
    together = compile_train_step(
        wrapped, loss, torch.optim.SGD(wrapped.parameters(), lr=0.1), accumulate_steps=accumulate, **options
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(accumulate):
            mine, ours = alone(*batch(name, number)), together(*batch(name, number))
    found, wanted = named_gradients(wrapped), averaged(named_gradients(plain))
    again = together(*batch(name, 7))
    return {
        "precision": [together.report().by_precision, alone.report().by_precision],
        "differing": differing(together.report(), alone.report()), "unequal": unequal(found, wanted),
        "off": max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items()),
        "loss": [float(ours.loss), float(mine.loss)], "norm": float(ours.grad_norm),
        "updated": bool(ours.updated) and (accumulate > 1 or bool(again.updated)), "warnings": messages(seen),
        "notes": list(together.report().notes), "not captured": list(together.report().not_captured),
    }  # fmt: skip


CASES: dict[str, Callable[[], Any]] = {}
for _model in MODELS:
    for _wrapper in [*WRAPPERS, "around DDP", "around FSDP2"]:
        for _dtype in ("bfloat16", "float16"):
            CASES[f"forward {_model} {_wrapper} {_dtype}"] = functools.partial(forward, _model, _wrapper, dtype=_dtype)
            if not _wrapper.startswith("around"):
                CASES[f"step {_model} {_wrapper} {_dtype}"] = functools.partial(step, _model, _wrapper, dtype=_dtype)
