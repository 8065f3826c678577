"""Check the Triton kernels without a GPU.

``python -m amp_compiler.kernels.check`` compiles every kernel and every tuning configuration for real GPUs, prints
the results, and exits with 1 if a kernel that should use tensor cores does not, spills registers, or needs more shared
memory than the target has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from triton.runtime.jit import JITFunction

from . import cast_matmul_triton
from .check_cases import LIMITS, cases
from .check_compile import Result, compile_case


def table(results: Sequence[Result]) -> Table:
    """Return the results as a table."""
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
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m amp_compiler.kernels.check",
        description="Compile every Triton kernel and every tuning configuration for real GPUs, without one.",
        epilog="Exits with 1 if a kernel does not compile, should use tensor cores but does not, spills registers, or "
        "needs more shared memory than the target has. Compiled kernels stay in Triton's cache.",
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


if __name__ == "__main__":
    sys.exit(main())
