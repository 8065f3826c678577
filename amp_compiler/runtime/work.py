"""Measure which shares of a model's work run captured, under autocast and in fp32, with one more call of it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..inspect.profile import GRAPH, list_products
from ..ir import LOW_DTYPES
from ..policy import dtype_name


class _Thread(threading.local):
    def __init__(self) -> None:
        self.counting: list[Counter[int]] = []  # while products are recorded: how often each graph ran


_HERE = _Thread()


@dataclass(frozen=True, slots=True)
class Work:
    """``shares``: of "captured", "autocast" and "float32" in all floating-point operations of products and convolutions
    in one forward. ``wide``: one line for each place outside of the graphs whose products did not run low."""

    shares: dict[str, float]
    wide: tuple[str, ...] = ()


def named(graph: int, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable of a captured graph, which the profiler sees by its number while products are recorded."""

    def call(*args: Any) -> Any:
        if not _HERE.counting:
            return run(*args)
        _HERE.counting[-1][graph] += 1
        with torch.profiler.record_function(f"{GRAPH}{graph}"):
            return run(*args)

    return call


def measure(call: Callable[[], Any], flops: Callable[[int], int], modules: Mapping[int, str]) -> Work:
    """Call a compiled model and measure where its products run.

    ``flops``: of a graph by its number, for products that the profiler does not see (Inductor's kernels). ``modules``:
    paths by ``id``. A second call finds the places of products in fp32.
    """
    ran: Counter[int] = Counter()
    _HERE.counting.append(ran)
    try:
        products = list_products(call)
        ran = Counter(ran)
        wide = [p for p in products if p.graph is None and p.dtype not in LOW_DTYPES]
        if wide:
            wide = [p for p in list_products(call, with_stack=True) if p.graph is None and p.dtype not in LOW_DTYPES]
    finally:
        _HERE.counting.pop()
    seen: Counter[int] = Counter()
    for product in products:
        if product.graph is not None:
            seen[product.graph] += product.flops
    captured = sum(seen[graph] or times * flops(graph) for graph, times in ran.items())
    under_autocast = sum(p.flops for p in products if p.graph is None and p.dtype in LOW_DTYPES)
    in_fp32 = sum(p.flops for p in products if p.graph is None and p.dtype not in LOW_DTYPES)
    total = max(captured + under_autocast + in_fp32, 1)
    shares = {"captured": captured / total, "autocast": under_autocast / total, "float32": in_fp32 / total}
    places: dict[str, int] = {}
    for product in wide:
        module = modules.get(product.module, "")
        where = f" in {module or 'the model'}" + (f", {product.source}" if product.source else "")
        text = f"{product.op.removeprefix('aten::')} in {dtype_name(product.dtype)}{where}"
        places[text] = places.get(text, 0) + product.flops
    listed = sorted(places.items(), key=lambda item: -item[1])
    return Work(shares, tuple(f"{text} ({number / total:.1%} of the work)" for text, number in listed))


@contextlib.contextmanager
def unchanged(tensors: list[Tensor]) -> Iterator[None]:
    """Restore these tensors and the random generators on exit."""
    kept = [tensor.clone() for tensor in tensors]
    devices = {t.device for t in tensors if t.is_cuda}
    with torch.random.fork_rng(sorted(devices, key=str)):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, old in zip(tensors, kept, strict=True):
                    tensor.copy_(old)
