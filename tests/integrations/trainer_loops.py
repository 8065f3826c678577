"""A small transformer, its batches, and the loop that every trainer must equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler import DynamicLossScaler, amp_compile

WORDS, LENGTH, WIDTH, CLASSES = 32, 6, 16, 3


class Block(nn.Module):
    """Attention and two layers, each behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(self.norm(x)).chunk(3, dim=-1)
        x = x + self.outward(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(nn.functional.gelu(self.up(self.other_norm(x))))


class Transformer(nn.Module):
    """Tokens in, logits of ``CLASSES`` classes out."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def make_model(seed: int = 0, layers: int = 2) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(layers)


def make_batches(count: int, size: int = 4, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels; the label is a function of the tokens, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(WORDS, (size, LENGTH), generator=generator) for _ in range(count)]
    return [(x, x.sum(dim=1) % CLASSES) for x in tokens]


@dataclass
class Curve:
    """What a run leaves behind: losses of the micro-batches, scales and learning rates after each update, weights, and
    how many ops were computed in each precision."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    precisions: dict[str, int] = field(default_factory=dict)


def own_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    dtype: torch.dtype,
    level: str = "O2",
    accumulate: int = 1,
    clip: float | None = None,
    scaler: DynamicLossScaler | None = None,
    scheduler: Any = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> Curve:
    """Train as a user of ``amp_compile`` and ``DynamicLossScaler`` does by hand.

    The loss of a micro-batch is divided by ``accumulate``, gradients are clipped by ``clip_grad_norm_`` after the
    unscaling, and the scheduler moves only after an update that was taken.
    """
    compiled = amp_compile(model, level, dtype=dtype)
    scaler = scaler or DynamicLossScaler(enabled=dtype is torch.float16)
    curve = Curve()
    for number, (tokens, labels) in enumerate(batches, 1):
        loss = loss_fn(compiled(tokens), labels)
        curve.losses.append(float(loss.detach()))
        scaler.scale(loss / accumulate).backward()
        if number % accumulate:
            continue
        scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None and scaler.get_scale() >= before:
            scheduler.step()
        curve.scales.append(scaler.get_scale())
        curve.rates.append(optimizer.param_groups[0]["lr"])
    curve.precisions = dict(compiled.report().by_precision)
    curve.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return curve
