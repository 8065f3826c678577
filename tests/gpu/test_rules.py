"""The rules of ``cuda_rules.py`` against torch's meta functions, on fakes of device ``cuda``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

sys.path.append(str(Path(__file__).parent))  # cases import it without a package

from cuda_rules import CHECKED_BY_META, CHECKED_BY_SOME_RELEASES, SAME, SEEN_IN_SOURCE, violations

aten = torch.ops.aten
LOW, WIDE = torch.float16, torch.float32


def make(*size: int, dtype: torch.dtype = LOW) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def places(*size: int) -> Tensor:
    return make(*size, dtype=torch.int64)


#: op -> a call with operands of two dtypes
MIXED: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "mm": lambda: (aten.mm.default, (make(4, 4), make(4, 4, dtype=WIDE))),
    "bmm": lambda: (aten.bmm.default, (make(2, 4, 4), make(2, 4, 4, dtype=WIDE))),
    "addmm": lambda: (aten.addmm.default, (make(4), make(4, 4), make(4, 4, dtype=WIDE))),
    "baddbmm": lambda: (aten.baddbmm.default, (make(2, 4, 4), make(2, 4, 4), make(2, 4, 4, dtype=WIDE))),
    "dot": lambda: (aten.dot.default, (make(4), make(4, dtype=WIDE))),
    "mv": lambda: (aten.mv.default, (make(4, 4), make(4, dtype=WIDE))),
    "native_layer_norm": lambda: (
        aten.native_layer_norm.default, (make(4, 4), [4], make(4, dtype=WIDE), make(4, dtype=WIDE), 1e-5)
    ),
    "native_group_norm": lambda: (
        aten.native_group_norm.default, (make(2, 4, 4), make(4, dtype=WIDE), make(4, dtype=WIDE), 2, 4, 4, 2, 1e-5)
    ),
    "index_put": lambda: (aten.index_put.default, (make(4, 4), [places(2)], make(2, 4, dtype=WIDE))),
    "index_add": lambda: (aten.index_add.default, (make(4, 4), 0, places(2), make(2, 4, dtype=WIDE))),
    "scatter_add": lambda: (aten.scatter_add.default, (make(4, 4), 0, places(4, 4), make(4, 4, dtype=WIDE))),
}  # fmt: skip


@pytest.mark.usefixtures("quiet_fakes")
@pytest.mark.parametrize("name", MIXED)
def test_a_rule_refuses_what_meta_functions_refuse(name: str) -> None:
    """Our rule refuses the call; torch's meta function does for some ops, and a release that adds one is noticed."""
    with FakeTensorMode():
        op, args = MIXED[name]()
        try:
            op(*args)
            refused = False
        except RuntimeError:
            refused = True
        graph = fx.Graph()
        given = []
        for arg in args:
            node = graph.placeholder("x") if isinstance(arg, Tensor) else arg
            if isinstance(arg, Tensor):
                node.meta["val"] = arg
            given.append(node if not isinstance(arg, list) else [])
        found = list(violations(graph.call_function(op, tuple(given)), f"aten::{name}"))
    assert found
    if name not in CHECKED_BY_SOME_RELEASES:
        assert refused is (name in CHECKED_BY_META)


def test_what_was_checked_is_a_rule() -> None:
    assert {*CHECKED_BY_META, *CHECKED_BY_SOME_RELEASES, *SEEN_IN_SOURCE} <= SAME.keys()
