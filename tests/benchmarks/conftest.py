"""The benchmarks' modules, importable by their own names.

Their folder is on the path only while they are loaded here: it holds a `kernels.py`, and transformers would take that
for the package of this name.
"""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    for name in ("harness", "subjects", "variants", "steps", "compare", "search", "decode"):
        importlib.import_module(name)
finally:
    sys.path.remove(BENCHMARKS)


@pytest.fixture(autouse=True)
def _freed_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark changes how its process allocates, for good; tests that measure memory share this one."""
    monkeypatch.setattr("harness.results.keep_freed_memory", lambda: None)
