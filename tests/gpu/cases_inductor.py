"""Inductor's code for a GPU: generated for the stand-in, and its Triton kernels compiled for GPUs that are not here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import stand_in
import torch
import torch.nn.functional as F
from cases_steps import DTYPES, compiled, no_waiting
from torch import Tensor, fx, nn

from amp_compiler import ir

TARGETS = ("sm_80", "sm_90", "gfx942")


class Noted:
    """A kernel of Inductor's that notes its launches."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any, **kwargs: Any) -> None:
        stand_in.LAUNCHES.append(self.name)


@contextmanager
def sources() -> Iterator[dict[str, str]]:
    """Inside, Inductor's Triton kernels are collected, by name, instead of compiled and run."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    found: dict[str, str] = {}

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Noted:
        found[kernel_name] = source_code
        return Noted(kernel_name)

    before: Any = AsyncCompile.triton
    AsyncCompile.triton = triton  # type: ignore[method-assign]
    try:
        # The stand-in has no values and no clock: folding would read constants, and whether operands of a product are
        # padded is decided by timing both on the device.
        with config.patch(
            {
                "force_disable_caches": True,
                "compile_threads": 1,
                "joint_graph_constant_folding": False,
                "shape_padding": False,
            }
        ):
            yield found
    finally:
        AsyncCompile.triton = before  # type: ignore[method-assign]


class Chain(nn.Module):
    """Three roundings in a row: in eager mode each op writes a low-precision tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second((y + 0.3) * 1.7 - y)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x)) + x))


class Attention(nn.Module):
    """A gated projection of attention with four heads, over sequences of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 4 * 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x.view(4, 8, 64)).view(4, 8, 4, 4, 16).permute(2, 0, 3, 1, 4)
        q, k, v, gate = parts.unbind()
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True) * F.silu(gate)
        return self.out(heads.transpose(1, 2).reshape(32, 64))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x.view(32, 1, 8, 8))))
        return self.out((self.second(y) + y).flatten(1))


NETWORKS = (Chain, Norm, Attention, Convolution)


def is_low_pointwise(node: fx.Node) -> bool:
    """True for an op that computes each number by itself and rounds it to low precision."""
    value = ir.tensor_of(node) if node.op == "call_function" else None
    tags = getattr(node.target, "tags", ())
    return value is not None and value.dtype in ir.LOW_DTYPES and torch.Tag.pointwise in tags and not ir.is_cast(node)


def step(model: Callable[[], nn.Module], low: str) -> dict[str, Any]:
    """A whole training step by Inductor: the roundings in its kernels, and what compiling them says."""
    with sources() as found:
        run = compiled(model().cuda(), "O2", DTYPES[low], "adamw", backend="inductor")
        inputs = torch.randn(32, 64, device="cuda")
        run(inputs)
        stand_in.LAUNCHES.clear()
        with no_waiting():
            run(inputs)
    low_ops = [n for g in run.joint_graphs for n in g.graph.nodes if is_low_pointwise(n)]
    word = f".to(tl.{str(DTYPES[low]).removeprefix('torch.')})"
    return {
        "one_graph": bool(run.joint_graphs), "launched": sorted(set(found) & set(stand_in.LAUNCHES)) == sorted(found),
        "kernels": len(found), "low_ops": len(low_ops), "roundings": sum(text.count(word) for text in found.values()),
        "failed": {f"{name} for {target}": error for name, text in found.items() for target in TARGETS
                   if (error := offline(name, text, target))},
    }  # fmt: skip


def offline(name: str, source: str, target: str) -> str:
    """Compile a kernel of Inductor's in its first configuration, down to machine code; what went wrong, or ''."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.compiler import ASTSource

    from amp_compiler.kernels.check_cases import LIMITS

    source = source.replace("triton_helpers.set_driver_to_gpu()", "")  # it would look for CUDA's library
    tuner = getattr(PyCodeCache.load(source), name)
    meta, config, gpu = tuner.triton_meta, tuner.configs[0], LIMITS[target].gpu
    constants = {**meta.get("constants", {}), **config.kwargs}
    signature = {k: "constexpr" if k in constants else v for k, v in meta["signature"].items()}
    attributes = meta["configs"][0]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": False}
    try:
        made = triton.compile(ASTSource(tuner.fn, signature, constants, attributes), target=gpu, options=options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:400]
    return "" if len(made.asm["cubin" if gpu.backend == "cuda" else "hsaco"]) else "no binary"


CASES: dict[str, Callable[[], Any]] = {
    f"{model.__name__.lower()} {low}": functools.partial(step, model, low) for model in NETWORKS for low in DTYPES
}
