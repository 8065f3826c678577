"""Fifty steps of three models: the loss falls, and stays as near to torch.autocast's as autocast's to fp32's.

Every model starts from the same weights and sees the same batches in fp32, under ``torch.autocast`` and under
``amp_compile``; AdamW, bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_compiler import amp_compile
from zoo.models import SMALL_T5, SMALL_VISION, TEXT, build

BF16 = torch.bfloat16
STEPS, BATCH, LENGTH, SYMBOLS, WINDOW = 50, 16, 8, 16, 5
Batches = Iterator[dict[str, Tensor]]


def counting() -> Batches:
    """Sequences that count up modulo SYMBOLS, from any start: the next token follows from the last."""
    random = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(0, SYMBOLS, (BATCH, 1), generator=random)
        ids = (start + torch.arange(LENGTH)) % SYMBOLS + 3
        yield {"input_ids": ids, "labels": ids}


def stripes() -> Batches:
    """Images of noise and a sine whose frequency is the class."""
    random = torch.Generator().manual_seed(1)
    while True:
        labels = torch.randint(0, 4, (BATCH,), generator=random)
        wave = torch.sin((labels + 1).view(-1, 1) * torch.arange(32) * (torch.pi / 16)).view(BATCH, 1, 1, 32)
        yield {"pixel_values": wave + 0.5 * torch.randn(BATCH, 3, 32, 32, generator=random), "labels": labels}


def repetition() -> Batches:
    """One symbol many times, some of them replaced; the answer is its successor, repeated."""
    random = torch.Generator().manual_seed(1)
    while True:
        symbol = torch.randint(0, SYMBOLS, (BATCH, 1), generator=random)
        noise = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=random)
        kept = torch.rand(BATCH, LENGTH, generator=random) < 0.8
        labels = ((symbol + 1) % SYMBOLS + 3).repeat(1, LENGTH // 2)
        yield {"input_ids": torch.where(kept, symbol, noise) + 3, "labels": labels}


def decoder(layers: int = 1) -> nn.Module:
    sizes = TEXT | {"vocab_size": SYMBOLS + 3, "num_key_value_heads": 2, "num_hidden_layers": layers}
    return build("LlamaForCausalLM", "sdpa", **sizes)


def vision() -> nn.Module:
    kind = "single_label_classification"  # else the model writes it into its configuration, and Dynamo compiles again
    return build("ViTForImageClassification", "eager", num_labels=4, problem_type=kind, **SMALL_VISION)


def encoder_decoder() -> nn.Module:
    sizes = SMALL_T5 | {"vocab_size": SYMBOLS + 3, "num_layers": 1}
    return build("T5ForConditionalGeneration", None, decoder_start_token_id=0, **sizes)


def train(model: nn.Module, call: Callable[..., Any], batches: Batches, *, autocast: bool = False) -> Tensor:
    """The loss of each step, smoothed over WINDOW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _, batch in zip(range(STEPS), batches, strict=False):
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            loss = call(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses).unfold(0, WINDOW, 1).mean(1)


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        pytest.param(decoder, counting, id="llama"),
        pytest.param(partial(decoder, layers=2), counting, id="llama-2", marks=pytest.mark.zoo),
        pytest.param(vision, stripes, id="vit", marks=pytest.mark.zoo),
        pytest.param(encoder_decoder, repetition, id="t5", marks=pytest.mark.zoo),
    ],
)
def test_loss_curve(make: Callable[[], nn.Module], batches: Callable[[], Batches]) -> None:
    """The mean loss of the last 5 steps is below 0.6 times that of the first 5, in all three runs.

    Autocast's curve is fp32's and rounding noise; ours has noise of the same size, but other noise. The difference
    of two such curves is about sqrt(2) times as large, and its maximum is one draw of few, so 3 times the
    largest noise seen is allowed. A noise below one rounding of the loss itself is taken as that.
    """
    model = make()
    plain = train(model, model, batches())
    model = make()
    theirs = train(model, model, batches(), autocast=True)
    model = make()
    ours = train(model, amp_compile(model, level="auto", dtype=BF16, backend="eager"), batches())
    for curve in (plain, theirs, ours):
        assert curve[-1] < 0.6 * curve[0]
    noise = max(float((theirs - plain).abs().max()), torch.finfo(BF16).eps * float(plain.mean()))
    assert float((ours - theirs).abs().max()) <= 3 * noise
