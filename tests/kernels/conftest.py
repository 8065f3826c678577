"""Every test of a CPU kernel runs twice: compiled, and in Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from amp_compiler.kernels import build, registry


@pytest.fixture(scope="module", params=["compiled", "python"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    kind: str = request.param
    built = build.prepare()
    if kind == "compiled":
        if not built.loaded:
            pytest.skip(f"no compiled kernels on this machine: {built.reason}")
        yield kind
        return
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that a kernel is registered over another
        patch.setattr(registry, "loaded", lambda: False)
        over = torch.library.Library("amp", "IMPL", "CPU")
        for name, kernel in registry._KERNELS.items():
            over.impl(name, kernel)
        yield kind
        over._destroy()
