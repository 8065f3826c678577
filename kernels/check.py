"""What can be known about the Triton kernels without a GPU.

``python -m amp_compiler.kernels.check`` compiles every kernel and every tuning configuration for real GPUs, prints
what came out and exits with 1 if a kernel that should use tensor cores does not, spills registers, or needs more
shared memory than the target has. It needs Triton and nothing else: the assemblers are in it.

``interpreted(module)`` runs the kernels of a module on CPU tensors, for tests of their results.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from . import cast_matmul_triton, multi_tensor_triton

UNITS = {"mma.sync": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mfma": "v_mfma_f32"}
DTYPES = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}


@dataclass(frozen=True)
class Limits:
    """What one program, and one processor of a target, can have. From NVIDIA's and AMD's manuals."""

    gpu: GPUTarget
    shared: int  # bytes a program
    shared_processor: int  # bytes a streaming multiprocessor or compute unit
    warps: int  # a processor (AMD: wavefronts of 64)
    programs: int  # a processor
    registers: int  # a processor, in units of one register of all lanes of a warp
    granularity: int  # registers come in multiples of this
    reserved: int = 0  # bytes of shared memory that each program loses


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
class Result:
    """What the compiler made of a case."""

    case: Case
    unit: str = ""
    registers: int = 0
    spilled: int = 0  # bytes (AMD: registers, or bytes of scratch memory)
    shared: int = 0
    occupancy: float = 0.0
    error: str = ""
    instructions: int = 0  # of tensor cores, in the text: those of a loop count once
    loads: tuple[int, int] = (0, 0)  # from memory, in the text: of 16 bytes, and all
    binary: int = 0  # bytes of machine code, with its headers
    problems: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "problems", tuple(_problems(self)))


def _problems(result: Result) -> Iterator[str]:
    case, limits = result.case, LIMITS[result.case.target]
    if result.error:
        yield f"does not compile: {result.error}"
        return
    if case.unit and result.unit != case.unit:
        yield f"should use {case.unit} but uses {result.unit or 'no tensor cores'}"
    if result.spilled:
        yield f"spills {result.spilled}"
    if result.shared > limits.shared:
        yield f"needs {result.shared} bytes of shared memory, the target has {limits.shared}"


@dataclass(frozen=True)
class Product:
    """One use of the matmul kernel that a configuration has to serve."""

    a: str
    b: str
    low: str
    out: str
    layout: str  # of each operand, as BLAS says it: n row by row, t transposed
    bias: bool
    reason: str
    ragged: bool = False  # sizes and strides that are multiples of nothing
    wide: bool = False


PRODUCTS = (
    Product("fp32", "fp32", "bf16", "bf16", "nt", True, "linear with fp32 weights: most shared memory and registers"),
    Product("fp32", "fp32", "fp16", "fp16", "nn", False, "gradient of the input, or split K"),
    Product("bf16", "bf16", "bf16", "fp32", "tn", False, "gradient of the weight that comes out in fp32"),
    Product("fp16", "fp16", "fp16", "fp16", "nt", True, "linear with low weights"),
    Product("bf16", "fp32", "bf16", "bf16", "nt", True, "low activations, fp32 weights", ragged=True),
    Product("fp32", "fp16", "fp16", "fp32", "tn", False, "64-bit offsets: most registers", wide=True),
)


def cases(target: str, quick: bool = False) -> Iterator[Case]:
    """All compilations for a target; if ``quick``, one of each kernel."""
    kind = cast_matmul_triton.TARGETS[target]
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


def matmul_case(target: str, config: cast_matmul_triton.Config, product: Product) -> Case:
    """The matmul kernel in one configuration for one use."""
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
    kind, kernel = cast_matmul_triton.TARGETS[target], cast_matmul_triton.matmul_kernel
    unit, options = config.unit or kind.unit, config.compiler()
    return Case(target, kernel, config.name, what, types, constants, options, unit, not product.ragged)


def unscale_case(target: str, source: str, to: str, unscale: bool, aligned: bool) -> Case:
    """The multi-tensor kernel for one pair of dtypes."""
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


def compile_case(case: Case) -> Result:
    """Compile for the target, down to machine code, and read what came out."""
    if not isinstance(case.kernel, JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so there is nothing to compile; unset it.")
    limits = LIMITS[case.target]
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for place, name in enumerate(names):
        pointer = signature[name].startswith("*")
        if signature[name] != "constexpr" and name not in ("batch", "pieces") and (case.aligned or pointer):
            attributes[(place,)] = [["tt.divisibility", 16]]
            if pointer and limits.gpu.backend == "hip" and "i64" not in case.types.values():
                attributes[(place,)].append(["tt.pointer_range", 32])  # Triton tells AMD's compiler: under 2 GB
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    try:
        compiled = triton.compile(source, target=limits.gpu, options=case.options)
    except Exception as error:
        return Result(case, error=str(error).strip().splitlines()[-1] or type(error).__name__)
    text = compiled.asm["ptx" if limits.gpu.backend == "cuda" else "amdgcn"]
    registers, spilled = _ptxas(text, limits.gpu.arch) if limits.gpu.backend == "cuda" else _amd(text)
    shared = compiled.metadata.shared
    used = {unit: text.count(instruction) for unit, instruction in UNITS.items() if instruction in text}
    occupancy = _occupancy(limits, registers, shared, compiled.metadata.num_warps)
    return Result(
        case,
        ", ".join(used),
        registers,
        spilled,
        shared,
        occupancy,
        instructions=sum(used.values()),
        loads=_loads(text),
        binary=len(compiled.asm["cubin" if limits.gpu.backend == "cuda" else "hsaco"]),
    )


def _loads(text: str) -> tuple[int, int]:
    """Loads from global memory, also those that go straight to shared memory: of 16 bytes, and all."""
    wide = r"ld\.global\S*\.v4\.[bfsu]32|ld\.global\S*\.v2\.[bfsu]64|cp\.async\.c[ag]\.shared\.global.*, 0x10[,;]"
    wide += r"|(?:global|buffer)_load_dwordx4"
    every = r"ld\.global|cp\.async\.c[ag]\.shared\.global|(?:global|buffer)_load_"
    return len(re.findall(wide, text)), len(re.findall(every, text))


def _ptxas(text: str, arch: int) -> tuple[int, int]:
    """Registers a thread, and bytes spilled, as NVIDIA's assembler tells them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(text)
        command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(arch)}"]
        log = subprocess.run(
            [*command, str(file), "-o", str(file) + ".o"], check=True, capture_output=True, text=True
        ).stderr
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill", log))
    return _number(r"Used (\d+) registers", log), spilled


def _amd(text: str) -> tuple[int, int]:
    """Registers a lane (gfx942 has one pool for vector and accumulation ones), and registers or bytes spilled."""
    spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", text)  # scalar ones go to vector registers, not to memory
    return _number(r"\.vgpr_count:\s+(\d+)", text), spilled or _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the assembler's output does not hold {pattern!r}: was Triton updated?")
    return int(found[1])


def _occupancy(limits: Limits, registers: int, shared: int, warps: int) -> float:
    """Which part of the warps that a processor can hold are there at once. An estimate: no GPU was asked."""
    each = -(-max(1, registers) // limits.granularity) * limits.granularity
    programs = min(
        limits.programs,
        limits.warps // warps,
        limits.registers // each // warps,
        limits.shared_processor // (shared + limits.reserved) if shared + limits.reserved else limits.programs,
    )
    return programs * warps / limits.warps


def table(results: Sequence[Result]) -> Table:
    """The results for people."""
    made = Table(title="Triton kernels, compiled without a GPU", pad_edge=False)
    for column in ("target", "kernel", "config", "case", "tensor cores"):
        made.add_column(column, no_wrap=True)
    for column in ("registers", "spills", "shared", "occupancy"):
        made.add_column(column, justify="right")
    made.add_column("")
    last = None
    for result in results:
        case = result.case
        if last is not None and last != (case.target, case.kernel):
            made.add_section()
        last = (case.target, case.kernel)
        made.add_row(
            case.target,
            case.kernel.__name__.removesuffix("_kernel"),
            case.name,
            case.what,
            result.unit or "–",
            str(result.registers),
            str(result.spilled),
            str(result.shared),
            f"{result.occupancy:.0%}",
            "[red]✗[/]" if result.problems else "[green]✓[/]",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_compiler.kernels.check",
        description="Compile every Triton kernel and every tuning configuration for real GPUs, without one.",
        epilog="Exits with 1 if a kernel does not compile, should use tensor cores and does not, spills registers, or "
        "needs more shared memory than the target has. What is compiled once stays in Triton's cache.",
    )
    parser.add_argument(
        "--target", nargs="+", choices=list(LIMITS), default=list(LIMITS), metavar="TARGET", help=", ".join(LIMITS)
    )
    parser.add_argument("--quick", action="store_true", help="one configuration of each kernel")
    chosen = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not isinstance(cast_matmul_triton.matmul_kernel, JITFunction):
        console.print("TRITON_INTERPRET is set, so there is nothing to compile; unset it.")
        return 2
    results = []
    with console.status("") as status:
        for target in chosen.target:
            for case in cases(target, chosen.quick):
                status.update(f"{target}: {case.kernel.__name__}, {case.name}, {case.what}")
                results.append(compile_case(case))
    console.print(table(results))
    failed = [result for result in results if result.problems]
    for result in failed:
        case = result.case
        where = f"{case.target}, {case.kernel.__name__}, {case.name}, {case.what}"
        console.print(f"✗ {where}: {'; '.join(result.problems)}.", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(results)} compiled, {len(failed)} failed.", highlight=False)
    return 1 if failed else 0


@contextlib.contextmanager
def interpreted(module: ModuleType) -> Iterator[None]:
    """Run the kernels of a module in Triton's interpreter, on CPU tensors, until the end of the block.

    It does what TRITON_INTERPRET=1 does, but for one module and not for the rest of the process. It also mends what the
    interpreter of Triton 3.7 to 3.9 does with bf16, which numpy does not have: it cuts fp32 off instead of rounding it,
    reads fp16 as if it were the bits of bf16 (and the other way round), and multiplies the bits of bf16 as integers.
    """
    floats = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
    builder: Any = interpreter.InterpreterBuilder
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    before = {name: getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp", "create_dot")}

    def cast(self: Any, source: Any, to: Any) -> Any:
        kinds = source.dtype.scalar, to.scalar
        if tl.bfloat16 not in kinds or not all(kind in floats for kind in kinds):
            return before["cast_impl"](self, source, to)
        data = torch.from_numpy(numpy.ascontiguousarray(source.data))
        values = data.view(torch.bfloat16) if kinds[0] == tl.bfloat16 else data
        result = values.to(floats[kinds[1]])
        return interpreter.TensorHandle(
            (result.view(torch.uint16) if kinds[1] == tl.bfloat16 else result).numpy(), kinds[1]
        )

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return before["create_dot"](self, a, b, *rest)

    try:
        builder.cast_impl, builder.create_dot = cast, dot
        builder.create_fp_to_fp = lambda self, source, to, rounding: cast(self, source, to)
        for name, kernel in kernels.items():
            setattr(module, name, interpreter.InterpretedFunction(kernel.fn))
        yield
    finally:
        for name, value in before.items():
            setattr(builder, name, value)
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


if __name__ == "__main__":
    sys.exit(main())
