"""Compile a case of ``check_cases.py`` for a GPU that need not be present, and read the result.

It needs Triton and nothing else: Triton includes the assemblers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from .check_cases import LIMITS, Case, Limits

UNITS = {"mma.sync": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mfma": "v_mfma_f32"}


@dataclass(frozen=True)
class Result:
    """The result of compiling a case."""

    case: Case
    unit: str = ""
    registers: int = 0
    spilled: int = 0  # bytes (AMD: registers, or bytes of scratch memory)
    shared: int = 0
    occupancy: float = 0.0
    error: str = ""
    instructions: int = 0  # of tensor cores, in the assembly text: those in a loop count once
    loads: tuple[int, int] = (0, 0)  # from memory, in the assembly text: of 16 bytes, and all
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
        yield f"needs {result.shared} bytes of shared memory, but the target has {limits.shared}"


def build(case: Case) -> Any:
    """Compile for the target, down to machine code, and return Triton's compiled kernel."""
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
    return triton.compile(source, target=limits.gpu, options=case.options)


def compile_case(case: Case) -> Result:
    """Compile a case and return what can be read from the result."""
    limits = LIMITS[case.target]
    try:
        compiled = build(case)
    except Exception as error:
        if not isinstance(case.kernel, JITFunction):
            raise
        return Result(case, error=str(error).strip().splitlines()[-1] or type(error).__name__)
    text = compiled.asm["ptx" if limits.gpu.backend == "cuda" else "amdgcn"]
    registers, spilled = _ptxas(text, limits.gpu.arch) if limits.gpu.backend == "cuda" else _amd(text)
    used = {unit: text.count(instruction) for unit, instruction in UNITS.items() if instruction in text}
    warps = compiled.metadata.num_warps
    return Result(
        case,
        ", ".join(used),
        registers,
        spilled,
        compiled.metadata.shared,
        resident(limits, registers, compiled.metadata.shared, warps) * warps / limits.warps,
        instructions=sum(used.values()),
        loads=_loads(text),
        binary=len(compiled.asm["cubin" if limits.gpu.backend == "cuda" else "hsaco"]),
    )


def _loads(text: str) -> tuple[int, int]:
    """Count loads from global memory, including those directly to shared memory: of 16 bytes, and all."""
    wide = r"ld\.global\S*\.v4\.[bfsu]32|ld\.global\S*\.v2\.[bfsu]64|cp\.async\.c[ag]\.shared\.global.*, 0x10[,;]"
    wide += r"|(?:global|buffer)_load_dwordx4"
    every = r"ld\.global|cp\.async\.c[ag]\.shared\.global|(?:global|buffer)_load_"
    return len(re.findall(wide, text)), len(re.findall(every, text))


def _ptxas(text: str, arch: int) -> tuple[int, int]:
    """Return the registers per thread and the bytes spilled, as NVIDIA's assembler reports them."""
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
    """Return the registers per lane (gfx942 has one pool for vector and accumulation ones) and registers or bytes
    spilled."""
    spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", text)  # scalar ones go to vector registers, not to memory
    return _number(r"\.vgpr_count:\s+(\d+)", text), spilled or _number(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the assembler's output does not contain {pattern!r}: Triton may have changed.")
    return int(found[1])


def resident(limits: Limits, registers: int, shared: int, warps: int) -> int:
    """Return how many programs a processor runs at once, by its limits. No GPU was used to measure it."""
    each = -(-max(1, registers) // limits.granularity) * limits.granularity
    return min(
        limits.programs,
        limits.warps // warps,
        limits.registers // each // warps,
        limits.shared_processor // (shared + limits.reserved) if shared + limits.reserved else limits.programs,
    )
