"""``make test-gpu``: every test marked ``gpu`` on a real GPU, and one file with the results to send back.

Without a GPU it says what is missing and ends with 2; ``--stand-in`` runs the tests on the stand-in all the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "benchmarks" / "results" / "gpu-tests.txt"


def missing() -> list[str]:
    """What keeps the tests from running on a GPU, each with what to do; empty if nothing does."""
    found = []
    if torch.version.cuda is None and torch.version.hip is None:
        found.append(f"torch {torch.__version__} is built for CPUs: install the build for your GPU (pytorch.org).")
    elif not torch.cuda.is_available():
        found.append("torch finds no GPU: check the driver with nvidia-smi or rocm-smi.")
    if importlib.util.find_spec("triton") is None:
        found.append("Triton is not installed: pip install -c constraints.txt 'amp-compiler[gpu]'.")
    return found


class Noting:
    """Collects a line for each test, and the text of what failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.lines.append(f"{report.outcome:8} {report.duration:8.2f} s  {report.nodeid}")
        if report.failed:
            self.failures.append(f"---- {report.nodeid}\n{report.longreprtext}")


def doctor() -> str:
    """What ``amp-compiler doctor`` says of this machine."""
    command = [sys.executable, "-m", "amp_compiler", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def text(noting: Noting) -> str:
    """The file: the machine, each test, and what failed."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["none: the stand-in for one"]
    head = [f"torch {torch.__version__}", *(f"GPU: {name}" for name in gpus), doctor()]
    return "\n".join([*head, *noting.lines, "", *noting.failures, ""])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-in", action="store_true", help="run the tests without a GPU, on the stand-in for one")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="where the results go")
    args, rest = parser.parse_known_args(argv)
    lacking = missing()
    if lacking and not args.stand_in:
        print("The GPU tests cannot run here:", *(f"- {line}" for line in lacking), sep="\n")
        print("Without a GPU they run on a stand-in for one, in `make test` and with --stand-in: see docs/gpu.md.")
        return 2
    noting = Noting()
    code = int(pytest.main(["-m", "gpu", str(ROOT / "tests" / "gpu"), *rest], plugins=[noting]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text(noting))
    print(f"Results: {args.out}. Please attach this file to an issue.")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
