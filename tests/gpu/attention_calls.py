"""Calls of ``scaled_dot_product_attention``, and which of CUDA's kernels torch takes for each.

``attention_chosen.json`` has the answers of a CUDA build of torch, which ``ask_attention.py`` asked without a GPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

RECORD = Path(__file__).with_name("attention_chosen.json")
CAPABILITIES = (80, 90)  # A100, H100
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Call(NamedTuple):
    """Sizes of queries, keys and values, and what else a choice may depend on."""

    dtype: str = "fp16"
    width: int = 64
    value_width: int = 0  # 0: as wide as the others
    mask: str = ""  # a dtype, "bool", or "learned" for one with a gradient
    causal: bool = False
    grad: bool = False
    queries: int = 16
    keys: int = 16
    key_heads: int = 4  # of 4; fewer are grouped queries
    batch: int = 2  # of the keys; of the queries it is 2
    apart: bool = False  # numbers of a head are not side by side in memory
    dropout: float = 0.0

    def __str__(self) -> str:
        told = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return " ".join(f"{name}={value}" for name, value in {"dtype": self.dtype, **told}.items())


def calls() -> Iterator[Call]:
    """Every dtype with every width; and what else may matter, one thing and two at a time."""
    widths = (1, 4, 7, 8, 64, 72, 96, 128, 136, 192, 200, 256, 264, 512)
    for dtype, width, grad in itertools.product(DTYPES, widths, (False, True)):
        yield Call(dtype, width, grad=grad)
    changes: list[dict[str, Any]] = [
        {"causal": True}, {"mask": "fp16"}, {"mask": "bool"}, {"mask": "learned"}, {"mask": "fp32"}, {"grad": True},
        {"value_width": 32}, {"value_width": 12}, {"keys": 32}, {"keys": 1}, {"queries": 1}, {"queries": 0},
        {"keys": 0}, {"key_heads": 2}, {"key_heads": 1}, {"key_heads": 3}, {"batch": 1}, {"apart": True},
        {"dropout": 0.1}, {"dtype": "fp32"}, {"width": 256}, {"width": 7}, {"width": 12}, {"queries": 17, "keys": 17},
    ]  # fmt: skip
    for one, two in itertools.combinations_with_replacement(changes, 2):
        if len({**one, **two}) == len(one) + len(two) or one == two:
            yield Call(**{**one, **two})


CALLS = list(dict.fromkeys(calls()))


#: what only torch's own formula calls: it scales the operands, and multiplies them
MATH = ("mul", "bmm", "baddbmm", "_safe_softmax")


class Chosen(Exception):
    """The kernel that torch has chosen: nothing after the choice is run."""


class _Stop(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name.startswith("_scaled_dot_product_") and name.endswith("_attention"):
            raise Chosen(name.removeprefix("_scaled_dot_product_").removesuffix("_attention"))
        if name in MATH:
            raise Chosen("math")
        return func(*args, **(kwargs or {}))


def chosen(call: Call) -> str:
    """The kernel for a call: "cudnn", "flash", "efficient", "math", or "refused"."""
    dtype, wide = DTYPES[call.dtype], call.value_width or call.width

    def make(*size: int) -> torch.Tensor:
        if call.apart:
            size = (*size[:-1], 2 * size[-1])
        made = torch.empty(size, dtype=dtype, device="cuda", requires_grad=call.grad)
        return made[..., ::2] if call.apart else made

    query, key = make(2, 4, call.queries, call.width), make(call.batch, call.key_heads, call.keys, call.width)
    value, mask = make(call.batch, call.key_heads, call.keys, wide), None
    if call.mask:
        of = {"bool": torch.bool, "learned": dtype}.get(call.mask) or DTYPES[call.mask]
        size = (call.queries, call.keys)
        mask = torch.empty(size, dtype=of, device="cuda", requires_grad=call.mask == "learned")
    try:
        with _Stop():
            F.scaled_dot_product_attention(
                query, key, value, mask, call.dropout, call.causal, enable_gqa=call.key_heads < 4
            )
    except Chosen as found:
        return str(found)
    except (RuntimeError, ValueError):
        return "refused"
    return "math"


def recorded() -> dict[str, dict[str, str]]:
    """Compute capability, as a text -> call -> kernel."""
    found: dict[str, dict[str, str]] = json.loads(RECORD.read_text())["chosen"]
    return found


def recorded_release() -> str:
    """The release of torch that was asked, such as "2.13"."""
    version: str = json.loads(RECORD.read_text())["torch"]
    return version.rpartition(".")[0]
