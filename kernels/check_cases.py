"""The cases that ``check.py`` compiles: each Triton kernel for each kind of GPU, in every use of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget

from . import cast_matmul_triton, multi_tensor_triton
from .cast_matmul_configs import TARGETS, Config

DTYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}


@dataclass(frozen=True)
class Limits:
    """The limits of one program, and of one processor of a target, from NVIDIA's and AMD's manuals."""

    gpu: GPUTarget
    shared: int  # bytes per program
    shared_processor: int  # bytes per streaming multiprocessor or compute unit
    warps: int  # per processor (AMD: wavefronts of 64)
    programs: int  # per processor
    registers: int  # per processor, in units of one register of all lanes of a warp
    granularity: int  # registers come in multiples of this
    reserved: int = 0  # bytes of shared memory that are reserved per program


LIMITS = {
    "sm_80": Limits(GPUTarget("cuda", 80, 32), 166912, 167936, 64, 32, 2048, 8, 1024),
    "sm_86": Limits(GPUTarget("cuda", 86, 32), 101376, 102400, 48, 16, 2048, 8, 1024),
    "sm_90": Limits(GPUTarget("cuda", 90, 32), 232448, 233472, 64, 32, 2048, 8, 1024),
    "sm_100": Limits(GPUTarget("cuda", 100, 32), 232448, 233472, 64, 32, 2048, 8, 1024),
    "gfx942": Limits(GPUTarget("hip", "gfx942", 64), 65536, 65536, 32, 16, 2048, 8),
}


@dataclass(frozen=True)
class Case:
    """One compilation: a kernel with the types of its arguments and its compile-time constants."""

    target: str
    kernel: Any
    name: str  # of the configuration
    what: str  # operands and layout, for people
    types: dict[str, str]  # of the arguments that are not constants
    constants: dict[str, Any]
    options: dict[str, int]
    unit: str = ""  # the tensor-core instruction that it has to use; none if it is not a matmul
    aligned: bool = True  # pointers, sizes and strides are multiples of 16


@dataclass(frozen=True)
class Product:
    """One use of the matmul kernel that a configuration has to support."""

    a: str
    b: str
    low: str
    out: str
    layout: str  # of each operand, as in BLAS: n row by row, t transposed
    bias: bool
    reason: str
    ragged: bool = False  # sizes and strides that are multiples of nothing
    wide: bool = False


PRODUCTS = (
    Product("fp32", "fp32", "bf16", "bf16", "nt", True, "linear with fp32 weights: most shared memory and registers"),
    Product("fp32", "fp32", "fp16", "fp16", "nn", False, "gradient of the input, or split K"),
    Product("bf16", "bf16", "bf16", "fp32", "tn", False, "gradient of the weight, returned in fp32"),
    Product("fp16", "fp16", "fp16", "fp16", "nt", True, "linear with low weights"),
    Product("bf16", "fp32", "bf16", "bf16", "nt", True, "low activations, fp32 weights", ragged=True),
    Product("fp32", "fp16", "fp16", "fp32", "tn", False, "64-bit offsets: most registers", wide=True),
)


def cases(target: str, quick: bool = False) -> Iterator[Case]:
    """Yield all compilations for a target; if ``quick``, one per kernel."""
    kind = TARGETS[target]
    for config in kind.configs[:1] if quick else kind.configs:
        for product in PRODUCTS[:1] if quick else PRODUCTS:
            if config.takes_unaligned or not product.ragged:
                yield matmul_case(target, config, product)
    for low in ("bf16",) if quick else ("bf16", "fp16"):
        yield Case(
            target,
            cast_matmul_triton.add_pieces_kernel,
            f"{cast_matmul_triton.ADD_BLOCK} w4",
            f"fp32 → {low} +bias",
            {"parts": "*fp32", "bias": "*fp32", "out": f"*{low}", "numel": "i32", "N": "i32", "pieces": "i32"},
            {"stride_bias": 1, "DTYPE": DTYPES[low], "HAS_BIAS": True, "BLOCK": cast_matmul_triton.ADD_BLOCK},
            {"num_warps": 4},
        )
    for source, to in (("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("fp16", "fp16"), ("bf16", "bf16")):
        for unscale in (True, False):
            for aligned in (True, False):
                if not (quick and (source != to or source != "fp32" or not aligned)) and (unscale or source == to):
                    yield unscale_case(target, source, to, unscale, aligned)


def matmul_case(target: str, config: Config, product: Product) -> Case:
    """Return the case of the matmul kernel in one configuration for one use."""
    types = {"a": f"*{product.a}", "b": f"*{product.b}", "bias": "*fp32", "out": f"*{product.out}"}
    types |= dict.fromkeys(("M", "N", "K", "batch", "piece"), "i32")
    strides = ("stride_az", "stride_am", "stride_ak", "stride_bz", "stride_bk", "stride_bn")
    types |= dict.fromkeys(strides, "i64" if product.wide else "i32")
    constants: dict[str, Any] = {
        "stride_am" if product.layout[0] == "t" else "stride_ak": 1,
        "stride_bk" if product.layout[1] == "t" else "stride_bn": 1,
        "stride_bias": 1,
        "DTYPE": DTYPES[product.low],
        "HAS_BIAS": product.bias,
        "EVEN_K": not product.ragged,
        "WIDE": product.wide,
        **config.meta(),
    }
    if not product.bias:
        constants["bias"] = None
    what = f"{product.a} · {product.b} → {product.out} in {product.low}, {product.layout}"
    what += " +bias" * product.bias + " ragged" * product.ragged + " wide" * product.wide
    kind, kernel = TARGETS[target], cast_matmul_triton.matmul_kernel
    unit, options = config.unit or kind.unit, config.compiler()
    return Case(target, kernel, config.name, what, types, constants, options, unit, not product.ragged)


def unscale_case(target: str, source: str, to: str, unscale: bool, aligned: bool) -> Case:
    """Return the case of the multi-tensor kernel for one pair of dtypes."""
    constants = {
        "FROM": DTYPES[source],
        "TO": DTYPES[to],
        "UNSCALE": unscale,
        "ALIGNED": aligned,
        "CHUNK": multi_tensor_triton.CHUNK,
        "BLOCK": multi_tensor_triton.BLOCK,
    }
    if not unscale:
        constants["inv_scale"] = None
    return Case(
        target,
        multi_tensor_triton.unscale_kernel,
        f"{multi_tensor_triton.BLOCK} w{multi_tensor_triton.WARPS}",
        (f"{source} → {to}" if unscale else f"{source}, finite?") + ("" if aligned else " unaligned"),
        {"table": "*i64", "owners": "*i64", "inv_scale": "*fp32", "found": "*fp32"},
        constants,
        {"num_warps": multi_tensor_triton.WARPS},
        aligned=aligned,
    )
