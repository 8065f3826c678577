"""What the tests of Accelerate and of the Hugging Face Trainer share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from integrations.trainer_loops import Curve, make_batches, make_model, own_loop

RATE, DECAY, CLIP, ACCUMULATE, LAYERS = 1e-2, 0.95, 1.0, 2, 1
#: the runs that are compared with our own loop: dtype, micro-batches; two of these make an update. ``make test`` runs
#: fp16, which has a scaler; ``test_low_weights.py`` compares shorter runs in bf16 there
RUNS = [pytest.param(torch.bfloat16, 100, marks=pytest.mark.trainers), (torch.float16, 100)]


def reset() -> None:
    """Forget the accelerators that were made: they share their state."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    reset()
    yield
    reset()


@functools.cache
def own_curve(dtype: torch.dtype, batches: int) -> Curve:
    """Our own loop with AdamW, accumulation, clipping and a scheduler."""
    model = make_model(layers=LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    return own_loop(
        model, optimizer, make_batches(batches), dtype=dtype, accumulate=ACCUMULATE, clip=CLIP, scheduler=scheduler
    )


def same_weights(curve: Curve, model: torch.nn.Module) -> bool:
    found = dict(model.named_parameters())
    return found.keys() == curve.weights.keys() and all(torch.equal(found[n], w) for n, w in curve.weights.items())
