"""How fast this machine is in each dtype, and what that means for a model: ``amp-compiler doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..ir.view import GraphView, NodeView, Value
from ..kernels import build, capability, cpu
from ..kernels import cast_matmul as _defines_cast_matmul  # noqa: F401
from ..policy import dtype_name

SIZE = 512  # of the square matrices that are multiplied
_REPEATS = 3
_TENSOR_CORES, _BF16, _AMPERE = (7, 0), (8, 0), (8, 0)
_ON_AMPERE = " On GPUs from A100 on, multiples of 64 are fastest."
LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Speed:
    """A product of square matrices of one dtype on one device: the seconds in torch and in a compiled graph.

    ``kernel``: the op that a compiled graph runs. ``runs_on``: which units it uses, and why. ``of_fp32``: its time as a
    multiple of fp32's on the same device.
    """

    device: str
    dtype: str
    native: float
    ours: float
    runs_on: str
    kernel: str = "aten::mm"
    of_fp32: float = 1.0

    @property
    def gflops(self) -> float:
        """The speed in a compiled graph."""
        return 2 * SIZE**3 / self.ours / 1e9


@dataclass(frozen=True)
class Machine:
    """Hardware and software inventory."""

    python: str
    torch: str
    triton: str
    cpu: str
    cores: int
    features: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    speeds: tuple[Speed, ...] = ()
    advice: tuple[str, ...] = field(default=())


def look(progress: Callable[[str], None] = lambda text: None) -> Machine:
    """Inspect this machine and measure what each dtype costs on it."""
    gpus = tuple(
        Gpu(p.name, (p.major, p.minor), p.total_memory)
        for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    )
    if any(cpu.wants_compiled(dtype) for dtype in LOW):
        progress("compiling and loading the CPU kernels")
        build.prepare()
    speeds: list[Speed] = []
    for device in ("cpu", *(["cuda"] if gpus else [])):
        fp32 = None
        for dtype in (torch.float32, *LOW):
            progress(f"measuring {dtype_name(dtype)} on {device}")
            speed = measure(device, dtype)
            fp32 = fp32 or speed
            speeds.append(replace(speed, of_fp32=speed.ours / fp32.ours))
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") is not None else ""
    machine = Machine(
        platform.python_version(), torch.__version__, triton, _cpu_name(), os.cpu_count() or 1, capability.features(),
        gpus, tuple(speeds),
    )  # fmt: skip
    return replace(machine, advice=tuple(advise(machine)))


def measure(device: str, dtype: torch.dtype) -> Speed:
    """Time one product, natively and with the kernel that a compiled graph runs. Call ``build.prepare`` first."""
    a = torch.ones(SIZE, SIZE, dtype=dtype, device=device)
    native = _best(lambda: torch.mm(a, a), device)
    if dtype is torch.float32:
        return Speed(device, dtype_name(dtype), native, native, "native fp32 units")
    if device != "cpu":
        return Speed(device, dtype_name(dtype), native, native, "the GPU's units")
    if not cpu.runs_wide(dtype):
        return Speed(device, dtype_name(dtype), native, native, f"native units: {cpu.reason(dtype)}")
    ours = _best(lambda: torch.ops.amp.cast_matmul.default(a, a, None, dtype, dtype), device)
    how = f"fp32 units, between two roundings: {cpu.reason(dtype)}"
    return Speed(device, dtype_name(dtype), native, ours, how, "amp::cast_matmul")


def _best(run: Callable[[], object], device: str) -> float:
    times = []
    with torch.no_grad():
        run()
        for _ in range(_REPEATS):
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


def advise(machine: Machine) -> list[str]:
    """Return advice on mixed precision for this machine."""
    found = []
    for dtype, units in ((torch.bfloat16, ("avx512_bf16", "amx_bf16")), (torch.float16, ("amx_fp16",))):
        if not set(units) & set(machine.features):
            name = dtype_name(dtype)
            found.append(
                f"This CPU has no {name} units: {name} saves memory, not time. Products run in fp32 between two "
                "roundings, with the numerics of a GPU, so you can develop and test them here."
            )
    for gpu in machine.gpus:
        have = ".".join(map(str, gpu.capability))
        if gpu.capability < _TENSOR_CORES:
            found.append(
                f"{gpu.name} has compute capability {have}, older than 7.0: no tensor cores, so mixed precision saves "
                "memory but hardly any time."
            )
        elif gpu.capability < _BF16:
            found.append(f"{gpu.name} (compute capability {have}) has no bfloat16 units: use float16 and loss scaling.")
    if not machine.gpus:
        found.append("There is no GPU here: this machine can reproduce the numerics of one, but not its speed.")
    elif not machine.triton:
        found.append("Triton is not installed, so our GPU kernels are not used: pip install 'amp-compiler[gpu]'.")
    return found


# ---------------------------------------------------------------------------------------- of a model


def advise_model(view: GraphView, gpus: Sequence[Gpu] = ()) -> list[str]:
    """Return advice on a model's shapes for tensor cores, from its forward graph."""
    multiple = 8
    products = [(node, sizes) for node in view.nodes if (sizes := _sizes(node, view))]
    odd = [(node, bad) for node, sizes in products if (bad := [s for s in sizes if s % multiple])]
    found = []
    ampere = any(g.capability >= _AMPERE for g in gpus)
    if odd:
        node, bad = odd[0]
        where = f" in {node.module}" if node.module else ""
        padded = ", ".join(f"{size} to {-(-size // multiple) * multiple}" for size in dict.fromkeys(bad))
        found.append(
            f"{len(odd)} of {len(products)} matrix multiplications and convolutions have a dimension that isn't a "
            f"multiple of {multiple}, which tensor cores need for full speed: the first is {node.name} "
            f"({node.op}{where}); pad {padded} (the batch, the vocabulary or the channels).{_ON_AMPERE * ampere}"
        )
    flops = sum(n.flops for n in view.nodes)
    moved = sum(n.nbytes for n in view.nodes if n.kind == "call")
    if not flops:
        found.append("The model has no matrix product or convolution: mixed precision can save memory, but not time.")
    elif flops < moved * _INTENSITY:
        found.append(
            f"Only {flops / max(moved, 1):.0f} FLOPs of products and convolutions per byte that its ops write: below "
            f"about {_INTENSITY}, memory traffic takes most of the time, and AMP helps by halving that, not by tensor "
            "cores. Larger batches or wider layers change that."
        )
    return found


#: FLOPs per byte written; with fewer, products don't dominate the time (a V100 does about 140 fp16 FLOPs while it moves
#: one byte; a model whose other ops write more than that waits for memory)
_INTENSITY = 100


def _sizes(node: NodeView, view: GraphView) -> list[int]:
    """Return M, N, K of a matrix multiplication or the channels of a convolution, without symbolic sizes.

    All dimensions of the input of a layer but the last are one dimension of the product.
    """
    if node.kind != "call" or not node.flops or not node.values:
        return []
    given = [_value(view, name) for name in node.inputs]
    shapes = [v.shape for v in given if v is not None]
    if not shapes:
        return []
    if "conv" in node.op:
        weight = shapes[1] if len(shapes) > 1 else ()
        sizes: Sequence[int | str] = weight[:2]
    elif len(shapes) > 1 and len(shapes[1]) <= 2:
        rows, made = node.values[0].shape[:-1], node.values[0].shape[-1:]
        known = [s for s in rows if isinstance(s, int)]
        sizes = (*([math.prod(known)] if len(known) == len(rows) else []), *made, *shapes[0][-1:])
    else:
        sizes = (*node.values[0].shape[-2:], *shapes[0][-1:])
    return [s for s in sizes if isinstance(s, int)]


def _value(view: GraphView, name: str) -> Value | None:
    node = view.by_name.get(name)
    return node.values[0] if node is not None and node.values else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
