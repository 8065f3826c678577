"""What all tests share: deep verification after every pass, one thread, a clean Dynamo, one profile."""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("helpers")
os.environ["AMP_VERIFY"] = (
    "deep"  # every pass result is propagated again on fakes, see amp_compiler/rewrite/verify.py
)
os.environ.setdefault("AMP_CPU_KERNELS", "native")  # tests of kernels set "wide", whatever CPU they run on
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes would import torch again, twice
torch.set_num_threads(1)
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # torch 2.13: the key of Inductor's cache does not hold it, and code for one width of vectors runs with another
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{capability}")
    )

settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")


# pytest listens to every logger that does not propagate. torch's structured trace is one, and once somebody listens
# every graph is formatted, hashed and kept at each stage of compilation: a tenth of the time of all tests.
trace = logging.getLogger("torch.__trace")
trace.handlers.clear()
trace.addHandler = lambda handler: None  # type: ignore[method-assign]


# With this one Python, Dynamo warns at every guard, and does just this.
if sys.version_info[:3] == (3, 13, 0):
    from torch._dynamo.guards import GuardBuilder

    GuardBuilder._get_generic_dict_manager_example_value = staticmethod(lambda value: None)  # type: ignore[method-assign]


# Python looks for garbage after every 700 new objects, and a compilation makes millions: a seventh of the time of all
# tests went there.
gc.set_threshold(200_000, 10, 10)


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection: half a million objects that stay anyway."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_guard_latency() -> None:
    """Dynamo measures how long the guards of each frame take, with the processor's caches flushed; it only logs it."""
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *args: 0.0  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Start each test with the same random state, whichever tests ran before in this process."""
    torch.manual_seed(0)


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


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The low dtypes in which Dynamo has traced code a second time."""
    from amp_compiler.capture import twin

    made, trace = [], twin.twin_of_frame

    def counted(policy: Any, modules: Any) -> Any:
        made.append(policy.low)
        return trace(policy, modules)

    monkeypatch.setattr(twin, "twin_of_frame", counted)
    return made
