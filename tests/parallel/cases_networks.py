"""Every network of the tests, a BERT from transformers, and 20 steps beside autocast + DDP, by two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from worker_settings import by_rule

from amp_compiler import DataParallel, DynamicLossScaler, compile_train_step
from networks import NETWORKS

Batch = tuple[Any, Any]


def loss_of(output: Any, targets: Any) -> Tensor:
    output = output[0] if isinstance(output, (tuple, list)) else output
    loss: Tensor = output.float().pow(2).mean()
    return loss


def of_network(name: str) -> tuple[nn.Module, Any, list[Batch]]:
    model, args = NETWORKS[name]()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches: list[Batch] = []
    for _ in range(2):
        given = tuple(
            torch.randn(a.shape, generator=generator) if a.is_floating_point() else a for a in args
        )
        batches.append((given, None))
    return model, loss_of, batches


def of_bert() -> tuple[nn.Module, Any, list[Batch]]:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = [torch.randint(0, 64, (2, 8), generator=generator) for _ in range(2)]
    batches: list[Batch] = [({"input_ids": x, "labels": x[:, 0] % 2}, None) for x in ids]
    return transformers.BertForSequenceClassification(config), None, batches


class Checkpointed(nn.Module):
    """Two blocks whose activations are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def of_checkpointed() -> tuple[nn.Module, Any, list[Batch]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return Checkpointed(), loss_of, [(torch.randn(4, 8, generator=generator), None) for _ in range(2)]


def compare(made: tuple[nn.Module, Any, list[Batch]], dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """One update of two micro-batches: the mean of single processes' gradients, and the same precisions."""
    model, loss_fn, batches = made
    alone = copy.deepcopy(model)
    kept = {"dtype": dtype, "accumulate_steps": 2, "loss_scaler": 64.0, **options}
    step = compile_train_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), parallel=DataParallel(), **kept)
    alone.load_state_dict(model.state_dict())
    other = compile_train_step(alone, loss_fn, torch.optim.SGD(alone.parameters(), 0.1), **kept)
    for batch in batches:
        step(*batch)
        with by_rule():
            other(*batch)
    unequal = []
    for (name, parameter), twin in zip(model.named_parameters(), alone.parameters(), strict=True):
        if twin.grad is None or parameter.grad is None:
            unequal += [] if twin.grad is parameter.grad else [name]
            continue
        mean = twin.grad.to_dense().div(2)
        dist.all_reduce(mean)
        unequal += [] if torch.equal(mean, parameter.grad) else [name]
    return {"unequal": unequal, "ours": counts(step), "theirs": counts(other)}


def counts(step: Any) -> dict[str, int]:
    return {str(precision): number for precision, number in step.report().by_precision.items()}


def curves(dtype: torch.dtype) -> dict[str, list[float]]:
    """20 steps of a small classifier, beside autocast + DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    peer = DDP(copy.deepcopy(model))
    step = compile_train_step(
        model, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), dtype=dtype,
        loss_scaler=DynamicLossScaler(init_scale=1024.0), parallel=DataParallel(),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(peer.parameters(), 1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(dist.get_rank())
    ours, theirs = [], []
    for _ in range(20):
        y = torch.randint(0, 4, (32,), generator=generator)
        x = centres[y] + torch.randn(32, 16, generator=generator)
        ours.append(float(step(x, y).loss))
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(peer(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.append(float(loss.detach()))
    return {"ours": ours, "theirs": theirs}


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _cases() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for short, dtype in DTYPES.items():
        for name in NETWORKS:
            found[f"{name} {short}"] = lambda name=name, dtype=dtype: compare(of_network(name), dtype)
        found[f"bert {short}"] = lambda dtype=dtype: compare(of_bert(), dtype)
        found[f"checkpointed {short}"] = lambda dtype=dtype: compare(of_checkpointed(), dtype)
        found[f"curves {short}"] = lambda dtype=dtype: curves(dtype)
    found["inductor bf16"] = lambda: compare(of_network("dense"), torch.bfloat16, backend="inductor")
    return found


CASES = _cases()
