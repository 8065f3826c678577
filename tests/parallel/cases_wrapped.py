"""What two ranks do with models in wrappers of ``torch.distributed``; ``test_wrapped.py`` says what must come of it."""

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
from worker_settings import by_rule

from amp_compiler import all_finite, amp_compile, compile_train_step
from amp_compiler.kernels.norm import total_norm
from amp_compiler.kernels.unscale import unscale_

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


PARAM_DTYPE = torch.bfloat16  # of the MixedPrecisionPolicy in "FSDP2 with a policy"
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": shard,
    "FSDP2 of the root": fully_shard,  # type: ignore[dict-item]
    "FSDP2 that keeps parameters": functools.partial(shard, reshard_after_forward=False),
    "FSDP2 that frees parameters": functools.partial(shard, reshard_after_forward=True),
    "FSDP2 with a policy": functools.partial(
        shard, mp_policy=MixedPrecisionPolicy(param_dtype=PARAM_DTYPE, reduce_dtype=torch.float32)
    ),
    "FSDP2 offloaded": functools.partial(shard, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


# ------------------------------------------------------------------------------------------------------- cases


def rows(report: Any) -> list[str]:
    """What each op is, where it stands and how it runs, as far as no graph's own names are in it."""
    places = [(row.op, row.module.removeprefix("module").removeprefix("."), row.precision) for row in report.rows]
    return sorted(f"{op} in {module or 'the model'}: {precision}" for op, module, precision in places)


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


def averaged(gradients: dict[str, Tensor], wrapper: str) -> dict[str, Tensor]:
    """The mean over the processes. With a ``param_dtype`` each gradient is rounded before: FSDP2 gives the model low
    parameters, and autograd gives a tensor a gradient of its own dtype."""
    if "with a policy" in wrapper:
        gradients = {name: gradient.to(PARAM_DTYPE).float() for name, gradient in gradients.items()}
    means = {name: gradient / dist.get_world_size() for name, gradient in gradients.items()}
    for mean in means.values():
        dist.all_reduce(mean)
    return means


def unequal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The gradients that differ, and by how much of their largest element."""
    assert found.keys() == wanted.keys()
    return {name: float((found[name] - gradient).abs().max() / gradient.abs().max())
            for name, gradient in wanted.items() if not torch.equal(found[name], gradient)}  # fmt: skip


def messages(seen: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in seen if "amp_compiler" in str(w.message)]


def forward(name: str, wrapper: str, **options: Any) -> dict[str, Any]:
    """``amp_compile`` of a wrapped model, or a wrapper around a compiled one, beside the model alone."""
    model = MODELS[name]()
    inputs, targets = batch(name)
    alone = amp_compile(copy.deepcopy(model), **options)
    with by_rule():
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
        "unequal": unequal(named_gradients(model), averaged(named_gradients(alone), wrapper)),
        "warnings": messages(seen), "not captured": list(report.not_captured), "dtype": str(output.dtype),
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
            with by_rule():
                mine = alone(*batch(name, number))
            ours = together(*batch(name, number))
    found, wanted = named_gradients(wrapped), averaged(named_gradients(plain), wrapper)
    again = together(*batch(name, 7))
    return {
        "precision": [together.report().by_precision, alone.report().by_precision],
        "differing": differing(together.report(), alone.report()), "unequal": unequal(found, wanted),
        "off": max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items()),
        "loss": [float(ours.loss), float(mine.loss)], "norm": float(ours.grad_norm),
        "updated": bool(ours.updated) and (accumulate > 1 or bool(again.updated)), "warnings": messages(seen),
        "notes": list(together.report().notes), "not captured": list(together.report().not_captured),
    }  # fmt: skip


def low_outputs(wrapper: str) -> dict[str, Any]:
    """Outputs stay as computed if they are asked for so, also where the model is not the outermost module."""
    made = {name: amp_compile(WRAPPERS[wrapper](make()), keep_output_dtypes=False) for name, make in MODELS.items()
            if name in ("Sequential", "class")}  # fmt: skip
    return {name: str(model(batch(name)[0]).dtype) for name, model in made.items()}


def freed(wrapper: str) -> dict[str, Any]:
    """What autograd keeps for the backward: no copy of a parameter."""
    model = MODELS["class"]()
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    compiled = amp_compile(WRAPPERS[wrapper](model))
    kept: list[list[Any]] = []

    def keep(value: Tensor) -> Tensor:
        kept.append([list(value.shape), str(value.dtype)])
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        called(compiled, batch("class")[0])
    return {"kept": len(kept), "low copies": [k for k in kept if tuple(k[0]) in shapes and "bfloat16" in k[1]]}


def overflow(wrapper: str) -> dict[str, Any]:
    """Inf in the batch of rank 1 only, then a batch that is right."""
    model = WRAPPERS[wrapper](MODELS["class"]())
    together = compile_train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    inputs, targets = batch("class")
    result = together(inputs * float("inf") if dist.get_rank() == 1 else inputs, targets)
    changed = [name for name, p in model.named_parameters() if not torch.equal(whole(p.detach()), before[name])]
    assert together.scaler is not None
    scale = together.scaler.get_scale()
    return {
        "skipped": bool(result.skipped), "changed": changed, "scale": scale,
        "updated": bool(together(inputs, targets).updated),
    }  # fmt: skip


def unscale_shards() -> dict[str, Any]:
    """Shards beside plain gradients, with an inf that only rank 1 holds."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((2, 3), 4.0)
    if dist.get_rank() == 1:
        local[0, 0] = float("inf")
    shards: Any = DTensor.from_local(local, mesh, [Shard(0)])
    fine: Any = DTensor.from_local(torch.full((2, 3), 3.0), mesh, [Shard(0)])
    plain, found = torch.full((5,), 8.0), torch.zeros(1)
    finite = [bool(all_finite([fine, plain])), bool(all_finite([shards, plain]))]
    norm = float(total_norm([fine, torch.tensor([1.0])], torch.device("cpu")))
    unscale_([shards, plain], torch.tensor(0.5), found)
    return {"found": float(found), "local": float(local[1, 1]), "plain": float(plain[0]), "finite": finite,
            "norm": norm}  # fmt: skip


# --------------------------------------------------------------------------------------------- tensor parallel


def columns_and_rows(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [name for name, m in model.named_modules() if is_block(m)]
    plan: Any = {f"{name}.up": ColwiseParallel() for name in blocks}
    plan |= {f"{name}.down": RowwiseParallel() for name in blocks}
    return parallelize_module(model, mesh, plan)


class Sequence(nn.Module):
    """What a transformer does between two attentions, on [batch, sequence, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def sequence_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def tensor_parallel(name: str, **options: Any) -> dict[str, Any]:
    """Both ranks have the same batch; the gradients are those of one process, but for the order of sums."""
    make, wrap = {"Sequence": (Sequence, sequence_parallel)}.get(name, (MODELS.get(name), columns_and_rows))
    assert make is not None
    model = make()
    plain = copy.deepcopy(model)
    inputs = torch.randn(4, 6, 8) if name == "Sequence" else torch.randn(6, 8)
    own = inputs.chunk(2, 1)[dist.get_rank()] if name == "Sequence" else inputs
    alone = amp_compile(plain, **options)
    with by_rule():
        wanted = alone(inputs)
        wanted.square().mean().backward()
    wrapped = wrap(model)
    compiled = amp_compile(wrapped, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        output = compiled(own)
        output.square().mean().backward()
    found, expected = named_gradients(wrapped), named_gradients(plain)
    target = torch.zeros_like(output)
    together = compile_train_step(wrapped, nn.functional.mse_loss, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    losses = [float(together(own, target).loss) for _ in range(3)]
    return {
        "precision": [compiled.report().by_precision, alone.report().by_precision],
        "differing": differing(compiled.report(), alone.report()), "warnings": messages(seen),
        "off": max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items()),
        "output": float((output - wanted).abs().max() / wanted.abs().max()), "losses": losses,
        "not captured": list(compiled.report().not_captured),
    }  # fmt: skip


def explain_tensor_parallel() -> dict[str, Any]:
    """An overflow of a model that is divided among the ranks: both run the batch once more."""
    model = columns_and_rows(MODELS["class"]())
    step = compile_train_step(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.float16,
        loss_scaler=64.0,
    )  # fmt: skip
    inputs = torch.randn(6, 8)
    result = step(inputs * 1e4, torch.zeros_like(model(inputs)))
    told = step.explain_overflow()
    return {"skipped": bool(result.skipped), "phase": told.phase, "module": told.module, "told": str(told)}


class Around(Net):
    """A value that is read inside and outside of a unit."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.embed(x))
        for block, factor in zip(self.blocks, (0.5, 1.5), strict=True):
            x = x + block(x) * factor
        return self.head(x)  # type: ignore[no-any-return]


MODELS["residual"] = Around
CASES: dict[str, Callable[[], Any]] = {
    "step class DDP accumulated": functools.partial(step, "class", "DDP", accumulate=2),
    "step class FSDP2 accumulated": functools.partial(step, "class", "FSDP2", accumulate=2),
    "step residual FSDP2": functools.partial(step, "residual", "FSDP2"),
    "forward class FSDP2 auto": functools.partial(forward, "class", "FSDP2", level="auto", exclude=["blocks.0"]),
    "forward class DDP auto": functools.partial(forward, "class", "DDP", level="auto", exclude=["blocks.0"]),
    "low DDP": functools.partial(low_outputs, "DDP"),
    "low FSDP2": functools.partial(low_outputs, "FSDP2"),
    "freed FSDP2": functools.partial(freed, "FSDP2 that frees parameters"),
    "overflow DDP": functools.partial(overflow, "DDP"),
    "overflow FSDP2": functools.partial(overflow, "FSDP2"),
    "shards": unscale_shards,
    "explain tensor": explain_tensor_parallel,
    "tensor Sequential bfloat16": functools.partial(tensor_parallel, "Sequential", dtype="bfloat16"),
    "tensor Sequential float16": functools.partial(tensor_parallel, "Sequential", dtype="float16"),
    "tensor class bfloat16": functools.partial(tensor_parallel, "class", dtype="bfloat16"),
    "tensor Sequence bfloat16": functools.partial(tensor_parallel, "Sequence", dtype="bfloat16"),
    "tensor Sequence float16": functools.partial(tensor_parallel, "Sequence", dtype="float16"),
}
for _model in ("Sequential", "class", "BERT", "ResNet"):
    for _wrapper in [*WRAPPERS, "around DDP", "around FSDP2"]:
        for _dtype in ("bfloat16", "float16"):
            if _wrapper == "FSDP2 with a policy" and _dtype == "float16":
                continue  # the policy's own dtype is another
            CASES[f"forward {_model} {_wrapper} {_dtype}"] = functools.partial(forward, _model, _wrapper, dtype=_dtype)
            if not _wrapper.startswith("around"):
                CASES[f"step {_model} {_wrapper} {_dtype}"] = functools.partial(step, _model, _wrapper, dtype=_dtype)
