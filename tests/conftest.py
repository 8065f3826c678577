"""What all tests share: deep verification after every pass, one thread, a clean Dynamo, one profile."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("helpers")
os.environ["AMP_VERIFY"] = (
    "deep"  # every pass result is propagated again on fakes, see amp_compiler/verify.py
)
torch.set_num_threads(1)

settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    """Forget compiled frames after a test that compiled some; other tests do not even import Dynamo."""
    yield
    if "torch._dynamo.utils" not in sys.modules:
        return
    from torch._dynamo.utils import counters

    if counters["frames"]:
        torch._dynamo.reset()
        counters.clear()
