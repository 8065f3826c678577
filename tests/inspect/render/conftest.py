"""Inspections that most tests here look at: a small network's graphs, and an encoder's inference graph."""

from __future__ import annotations

import pytest
import torch

from amp_compiler.inspection import Inspection, inspect_model
from amp_compiler.policy import Policy
from networks import BertLike
from render_helpers import inspect_small


@pytest.fixture(scope="session")
def forward() -> Inspection:
    return inspect_small("forward")


@pytest.fixture(scope="session")
def joint() -> Inspection:
    return inspect_small("joint")


@pytest.fixture(scope="session")
def encoder() -> Inspection:
    model = BertLike(layers=2, hidden=32, heads=4, intermediate=64, vocab=50, seq=8).eval()
    ids = torch.randint(50, (2, 8))
    return inspect_model(model, (ids,), policy=Policy("O2", torch.bfloat16), graph="inference", target="encoder")
