"""Cases in a process with a GPU, or with the stand-in for one: a process loads it before torch.

A module of cases has ``CASES``, name -> function without arguments; what a function returns must be JSON. Tests ask
``answer(module, name)``. Starting such a process takes longer than most cases: those of ``chosen.py`` are one run for
all test processes, and each test process has one more for all others that it asks for, one case after another. Cases
for another GPU than an H100 have processes of their own where torch remembers which GPU it has asked about.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent


def answer(module: str, name: str) -> Any:
    """What a case returned; a case that raised fails the test with its traceback."""
    import pytest
    import torch
    from gpu.chosen import CHOSEN
    from gpu.stand_in import cause

    real = torch.cuda.is_available()
    if not real and (why := cause()):
        pytest.skip(why)
    found = _chosen(real)[f"{module}:{name}"] if name in CHOSEN.get(module, ()) else _ask(real, f"{module}:{name}")
    assert "error" not in found, found["error"]
    return found["value"]


@functools.cache
def _chosen(real: bool) -> dict[str, Any]:
    """The answers of all cases of ``chosen.py``; one run for all test processes."""
    from gpu.chosen import CHOSEN

    root = Path(tempfile.gettempdir()) / f"amp-gpu-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    root.mkdir(exist_ok=True)
    cases = [f"{of}:{name}" for of, own in CHOSEN.items() for name in own]
    found = root / f"{hashlib.sha256(chr(10).join(cases).encode()).hexdigest()[:12]}.json"
    with (root / f"{found.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            processes: dict[str, subprocess.Popen[str]] = {}
            found.write_text(json.dumps({case: _one(_process_for(case, real, processes), case) for case in cases}))
            for process in processes.values():
                _end(process)
    answers: dict[str, Any] = json.loads(found.read_text())
    return answers


_ASKED: dict[str, subprocess.Popen[str]] = {}


def _ask(real: bool, case: str) -> Any:
    """The answer of one case, by the process that this test process keeps for it."""
    return _one(_process_for(case, real, _ASKED), case)


def _process_for(case: str, real: bool, processes: dict[str, subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """The process for a case; a new one is added to ``processes``."""
    import torch

    # A CUDA build of torch 2.15 chooses its attention by the GPU that it saw first. Names of those cases end with it.
    number = re.search(r"attention.* (\d+)$", case)
    gpu = number[1] if number and torch.version.cuda else ""
    if gpu not in processes or processes[gpu].poll() is not None:
        processes[gpu] = _process(real)
        atexit.register(_end, processes[gpu])
    return processes[gpu]


def _process(real: bool) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "harness.py"), "gpu" if real else "stand-in"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMP_VERIFY": "deep"}
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=said, text=True)
        process.said = os.fdopen(os.dup(said.fileno()), "r")  # type: ignore[attr-defined]
    return process


def _one(process: subprocess.Popen[str], case: str) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    line = ""
    if process.poll() is None:
        process.stdin.write(f"{case}\n")
        process.stdin.flush()
        line = process.stdout.readline()
    if line:
        return json.loads(line)
    said: IO[str] = process.said  # type: ignore[attr-defined]
    said.seek(0)
    return {"error": f"no answer; the process ended with {process.wait()}:\n{said.read()[-4000:]}"}


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None and process.stdin is not None:
        process.stdin.close()
        process.wait()


def _worker(kind: str) -> None:
    """Read names of cases, one per line, and write the answers: what cases print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import stand_in

    if kind == "stand-in":
        stand_in.load()
    import torch

    if kind == "stand-in":
        stand_in.install()
    from worker_settings import keep_what_is_imported, spend_less

    torch.set_num_threads(1)
    spend_less()
    keep_what_is_imported()
    for line in sys.stdin:
        torch.manual_seed(0)
        torch._dynamo.reset()
        module, _, case = line.strip().partition(":")
        try:
            text = json.dumps({"value": importlib.import_module(module).CASES[case]()})
        except Exception:
            text = json.dumps({"error": traceback.format_exc()})
        answers.write(f"{text}\n")
        answers.flush()


if __name__ == "__main__":
    _worker(sys.argv[1])
