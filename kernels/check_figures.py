"""Write ``cast_matmul_figures.py``: figures of the compiled matrix product in every configuration.

``python -m amp_compiler.kernels.check_figures`` compiles each configuration for every target with one operand in fp32,
the left or the right one, and reads the machine code. It takes minutes, and needs Triton but no GPU. Run it after a
change to the kernel or to its configurations, or for another Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import triton

from .cast_matmul_configs import TARGETS, Config
from .cast_matmul_figures import Figures
from .check_cases import LIMITS, Product, matmul_case
from .check_compile import build, compile_case, resident
from .check_loop import disassemble, read_loop

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


def variants(target: str) -> Iterator[Product]:
    """Yield the uses that are measured: an fp32 operand on either side. AMD's conversion to bf16 takes more steps."""
    for low in ("fp16", "bf16") if LIMITS[target].gpu.backend == "hip" else ("fp16",):
        yield Product(low, "fp32", low, low, "nt", False, "an fp32 weight")
        yield Product("fp32", low, low, low, "nt", False, "fp32 rows")


def key(target: str, config: Config, product: Product) -> tuple[str, str, str]:
    """Return the key of a row: target, configuration, and which operand is fp32 beside which dtype."""
    side = "left" if product.a == "fp32" else "right"
    return target, config.name, f"{side} {product.low}"


def figures(target: str, config: Config, product: Product) -> Figures:
    """Compile one use of a configuration and read its machine code."""
    case, limits = matmul_case(target, config, product), LIMITS[target]
    compiled, result = build(case), compile_case(case)
    amd = limits.gpu.backend == "hip"
    text = compiled.asm["amdgcn"] if amd else disassemble(compiled.asm["cubin"])
    step = config.block_k * (config.block_m * BYTES[product.a] + config.block_n * BYTES[product.b])
    loop = read_loop(text, config.warps, limits.gpu.warp_size, step)
    programs = resident(limits, result.registers, result.shared, config.warps)
    return Figures(programs, loop.instructions, loop.converts, loop.shared, loop.loaded)


def main() -> int:
    """Compile everything and write the table between its marks."""
    rows = [f'TRITON = "{triton.__version__}"', "FIGURES: dict[tuple[str, str, str], Figures] = {"]
    for target, kind in TARGETS.items():
        for config in kind.configs:
            for product in variants(target):
                row = figures(target, config, product)
                rows.append(f"    {key(target, config, product)}: Figures{tuple(row)},".replace("'", '"'))
                print(rows[-1].strip(), flush=True)
    file = Path(__file__).with_name("cast_matmul_figures.py")
    head = file.read_text().split("# written by check_figures.py\n")[0]
    file.write_text("\n".join([f"{head}# written by check_figures.py", *rows, "}  # fmt: skip", ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
