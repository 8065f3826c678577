"""Read the main loop of a compiled matrix product: what one step of it, one BLOCK_K, asks of a processor.

NVIDIA's machine code comes from ``nvdisasm``, which Triton includes; AMD's is the assembly text of the compiler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

#: tensor-core instructions, and conversions to low precision, of both vendors
MATRIX = re.compile(r"[HB]MMA|HGMMA|UTCHMMA|v_mfma")
CONVERTS = re.compile(r"F2FP|F2F\.|v_cvt_|v_pack_b32_f16")
#: how many bytes of each lane pass through shared memory, or come from memory, by the end of a name
SHARED = re.compile(r"^(?:LDS|STS|LDSM|LDGSTS|ds_read|ds_write)")
LOADS = re.compile(r"^(?:LDG\.|LDGSTS|buffer_load|global_load)")
WIDTHS = {"128": 16, "64": 8, "32": 4, "U16": 2, "16": 2, "U8": 1, "b128": 16, "b96": 12, "b64": 8, "b32": 4, "b16": 2,
          "dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """One step of the main loop: instructions of one warp, and bytes of all warps of a program."""

    instructions: int  # those that a scheduler issues one per clock (AMD: those of the vector unit, matrix ones not)
    matrix: int
    converts: int
    shared: int  # bytes that pass through shared memory
    loaded: int  # bytes that are loaded from memory


def disassemble(cubin: bytes) -> str:
    """Return NVIDIA's machine code as text."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return subprocess.run([str(tool), "-c", str(file)], check=True, capture_output=True, text=True).stdout


def read_loop(text: str, warps: int, lanes: int, step_bytes: int) -> Loop:
    """Read the innermost loop with tensor-core instructions. ``step_bytes``: what one step loads, from the tile: the
    compiler may have put several steps into one turn of the loop.

    >>> text = "L: \\n LDG.E.128 R1, [R2] ;\\n HMMA.16816.F32 R4 ;\\n BRA `(L) ;"
    >>> read_loop(text, warps=1, lanes=32, step_bytes=512)
    Loop(instructions=3, matrix=1, converts=0, shared=0, loaded=512)
    """
    body = min(_loops(list(_lines(text))), key=len, default=None)
    if body is None:
        raise RuntimeError("the machine code has no loop with tensor-core instructions: Triton may have changed.")
    loaded = sum(_bytes(name) for name in body if LOADS.match(name)) * warps * lanes
    steps, rest = divmod(loaded, step_bytes)
    if rest or not steps:
        raise RuntimeError(f"a turn of the loop loads {loaded} bytes, not a multiple of a tile's {step_bytes}.")
    amd = lanes == 64
    issued = [name for name in body if not amd or (name.startswith("v_") and not MATRIX.match(name))]
    shared = sum(_bytes(name) for name in body if SHARED.match(name)) * warps * lanes
    matrix, converts = (sum(bool(pattern.match(name)) for name in body) for pattern in (MATRIX, CONVERTS))
    counts = (-(-n // steps) for n in (len(issued), matrix, converts, shared, loaded))
    return Loop(*counts)


def _lines(text: str) -> Iterator[str]:
    """Yield labels, with their colon, and instructions, without addresses, predicates and comments."""
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/|;.*$|//.*$", "", line) if "/*" in line else re.sub(r"\s;.*$", "", line)
        line = re.sub(r"^\s*@!?U?P\w+\s+", "", line.strip() + " ").strip()
        if line.endswith(":") or (line and not line.startswith((".", "#"))):
            yield line


def _loops(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names of the instructions from a label to a branch back to it, if there is a matrix product."""
    at = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}
    for place, line in enumerate(lines):
        found = re.match(r"(?:BRA|s_cbranch|s_branch)\S*\s.*?([.\w]*L\w*)\)?\s*$", line)
        start = at.get(found[1]) if found else None
        if start is not None and start < place:
            body = [inner.split()[0] for inner in lines[start : place + 1] if not inner.endswith(":")]
            if any(MATRIX.match(name) for name in body):
                yield body


def _bytes(name: str) -> int:
    """Bytes of one lane of a load or store.

    >>> [_bytes(name) for name in ("LDS", "LDS.64", "LDSM.16.M88.4", "ds_read2st64_b64", "buffer_load_dwordx4")]
    [4, 8, 16, 16, 16]
    """
    if name.startswith("LDSM"):
        return 4 * int(name.rsplit(".", 1)[-1]) if name[-1].isdigit() and name[-2] == "." else 4
    sizes = [WIDTHS[part] for part in re.split(r"[._]", name) if part in WIDTHS]
    return (sizes[-1] if sizes else 4) * (2 if re.match(r"ds_(?:read|write)2", name) else 1)
