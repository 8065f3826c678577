"""The machine at hand as a device: its CPU, measured once and kept in a file; its GPU, by its name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.errors import ArgumentError
from ..common.files import write_text
from ..common.torch_names import OpOverload
from ..kernels import build, capability, cpu
from ..kernels.lowering import BY_OP, LOW
from .device import GIGA, Device
from .products import ATTENTION, CONVOLUTION
from .table import DEVICES

NAME = "this_machine"
_SIZE = 384  # of the square matrices that are multiplied: short enough to be undisturbed now and then
_ELEMENTS = 1 << 20  # of the tensor that is copied: what activations of a small model take, in the cache of a CPU
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_REPEATS, _PATIENCE = 100, 0.5  # calls of each kind, about so many seconds at most
_OPS = 300
Case = tuple[Callable[[], object], float]  # what to call, and its FLOPs
aten = torch.ops.aten


@dataclass(frozen=True)
class Figures:
    """What was measured: FLOP/s of products by dtype, bytes per second of an element-wise op, seconds of an op that has
    nothing to do. ``key``: what it depends on."""

    key: str
    peak: Mapping[str, float]
    bandwidth: float
    overhead: float


def this_machine(*, again: bool = False, native: bool = False) -> Device:
    """This machine's CPU. It is measured if that was not done before, or ``again``, and kept in the cache folder.

    ``native``: with torch's own kernels in every dtype, not those that compiled graphs run.
    """
    digest = hashlib.sha256(_key().encode()).hexdigest()[:12]
    path = build.cache_folder() / f"this_machine-{'native-' if native else ''}{digest}.json"
    found = None if again else _read(path)
    if found is None:
        found = measure(native)
        with contextlib.suppress(OSError, ArgumentError):  # a folder that cannot be written: measure again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(asdict(found)))
    threads = torch.get_num_threads()
    return Device(
        NAME, f"this machine's CPU, {threads} threads", f"measured: {path}", found.peak, found.bandwidth, threads,
        _memory(), found.bandwidth, found.overhead, 0.0, True,
    )  # fmt: skip


def measure(native: bool = False) -> Figures:
    """Measure the CPU: products, convolutions and attention as a compiled graph runs them, forward and backward, an
    element-wise op, and the least that an op takes."""
    if not native and any(cpu.wants_compiled(dtype) for dtype in LOW):
        build.prepare()
    peak: dict[str, float] = {}
    for suffix, case in (("", _product), (f":{CONVOLUTION}", _convolution), (f":{ATTENTION}", _attention)):
        cases = {name: case(dtype, native) for name, dtype in _DTYPES.items()}
        found = seconds_of({name: run for name, (run, _) in cases.items()})
        peak |= {f"{name}{suffix}": flops / found[name] for name, (_, flops) in cases.items()}
    x, y = torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
    one = torch.ones(1)
    least = seconds_of({
        "memory": lambda: torch.mul(x, 2.0, out=y), "ops": lambda: [one.mul(2.0) for _ in range(_OPS)],
    })  # fmt: skip
    return Figures(_key(), peak, 8 * _ELEMENTS / least["memory"], least["ops"] / _OPS)


def _kernel(op: OpOverload, values: list[Tensor], native: bool) -> Any:
    """What a compiled graph runs in the place of an op."""
    row = None if native else BY_OP.get(op)
    return row.kernel if row is not None and row.why(values) else op


def _product(dtype: torch.dtype, native: bool) -> Case:
    a = torch.ones(_SIZE, _SIZE, dtype=dtype)
    wide = dtype in LOW and not native and cpu.runs_wide(dtype)
    run = partial(torch.ops.amp.cast_matmul.default, a, a, None, dtype, dtype) if wide else partial(torch.mm, a, a)
    return run, 2 * _SIZE**3


def _convolution(dtype: torch.dtype, native: bool) -> Case:
    """A convolution with its backward, which does twice the work."""
    channels, size = 64, 16
    x = torch.ones(4, channels, size, size, dtype=dtype)
    w = torch.ones(channels, channels, 3, 3, dtype=dtype)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    forward = _kernel(aten.convolution.default, [x, w], native)
    backward = _kernel(aten.convolution_backward.default, [x, x, w], native)

    def run() -> None:
        forward(x, w, None, *rest)
        backward(x, x, w, None, *rest, [True, True, False])

    return run, 3 * 2 * x.numel() * channels * 9


def _attention(dtype: torch.dtype, native: bool) -> Case:
    """An attention with its backward, which does two and a half times the work."""
    q = torch.ones(2, 4, 64, 32, dtype=dtype)
    forward = _kernel(aten._scaled_dot_product_flash_attention_for_cpu.default, [q, q, q], native)
    backward = _kernel(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, [q, q, q, q], native)

    def run() -> None:
        out, sums = forward(q, q, q)
        backward(out, q, q, q, out, sums, 0.0, False)

    return run, 3.5 * 2 * 2 * q.numel() * 64


def seconds_of(cases: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of calls, the best of several each. They take turns, so that other work slows down all of them."""
    best, spent = dict.fromkeys(cases, math.inf), dict.fromkeys(cases, 0.0)
    with torch.no_grad():
        for run in cases.values():
            run()
        for _ in range(_REPEATS):
            for name, run in cases.items():
                if spent[name] < _PATIENCE:
                    start = time.perf_counter()
                    run()
                    seconds = time.perf_counter() - start
                    best[name], spent[name] = min(best[name], seconds), spent[name] + seconds
    return best


def _key() -> str:
    wide = "".join(str(int(cpu.runs_wide(dtype))) for dtype in LOW)
    threads = torch.get_num_threads()
    parts = (platform.node(), platform.machine(), *capability.features(), torch.__version__, threads, wide)
    return " ".join(map(str, parts))


def _read(path: Path) -> Figures | None:
    """What was kept, if it is of this machine as it is now."""
    try:
        found = Figures(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.key == _key() else None


def _memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):  # not every system tells it
        return 16 * GIGA


# ---------------------------------------------------------------------------------------------------- GPUs


def known_gpu(name: str, memory: int) -> Device | None:
    """The device that CUDA calls ``name`` and that has so many bytes, if the table has it.

    >>> known_gpu("NVIDIA A100-SXM4-80GB", 85_000_000_000).name
    'a100_80'
    """
    told = name.upper().replace("-", " ").replace("SXM4", "SXM").replace("SXM5", "SXM")
    words = set(told.split())
    near = [d for d in DEVICES.values() if abs(d.memory - memory) < 0.25 * d.memory or d.name.startswith("v100")]
    for device in near:
        model, _, form = device.name.upper().partition("_")
        fits = model in words or model in told.replace(" ", "")
        if fits and (form not in ("PCIE", "SXM", "SXM2") or form[:3] in told):
            return device
    return None
