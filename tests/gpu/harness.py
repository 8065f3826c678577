"""Many cases in one process with a GPU, or with the stand-in for one: a process loads it before torch.

A module of cases has ``CASES``, name -> function without arguments; what a function returns must be JSON. Tests ask
``results(module, names)``. The test processes share one run per list of cases, and all of ``chosen.py`` are one run.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def answer(module: str, name: str) -> Any:
    """What one of the cases of ``chosen.py`` returned."""
    from gpu.chosen import CHOSEN

    return value(results(module, CHOSEN[module]), name)


def results(module: str, names: Sequence[str]) -> dict[str, Any]:
    """Case -> its answer: ``{"value": …}`` or ``{"error": traceback}``; one run for all test processes that ask."""
    import pytest
    import torch
    from gpu.chosen import CHOSEN
    from gpu.stand_in import cause

    real = torch.cuda.is_available()
    if not real and (why := cause()):
        pytest.skip(why)
    root = Path(tempfile.gettempdir()) / f"amp-gpu-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    root.mkdir(exist_ok=True)
    asked = CHOSEN if CHOSEN.get(module) == tuple(names) else {module: tuple(names)}
    cases = [f"{of}:{name}" for of, own in asked.items() for name in own]
    found = root / f"{hashlib.sha256(chr(10).join(cases).encode()).hexdigest()[:12]}.json"
    with (root / f"{found.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(json.dumps(_run(real, cases)))
    answers: dict[str, Any] = json.loads(found.read_text())
    return {name: answers[f"{module}:{name}"] for name in names}


def value(answers: dict[str, Any], name: str) -> Any:
    """What a case returned; a case that raised fails the test with its traceback."""
    assert "error" not in answers[name], answers[name]["error"]
    return answers[name]["value"]


def _run(real: bool, names: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.jsonl"
        command = [sys.executable, str(HERE / "harness.py"), "gpu" if real else "stand-in", str(out), *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMP_VERIFY": "deep"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)
        lines = out.read_text().splitlines() if out.exists() else []
    lost = {"error": f"no answer; the process ended with {done.returncode}:\n{done.stderr[-4000:]}"}
    return {**dict.fromkeys(names, lost), **dict(json.loads(line) for line in lines)}


def _worker(kind: str, out: str, names: Sequence[str]) -> None:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import stand_in

    if kind == "stand-in":
        stand_in.load()
    import torch

    if kind == "stand-in":
        stand_in.install()
    torch.set_num_threads(1)
    with Path(out).open("w") as file:
        for name in names:
            torch.manual_seed(0)
            torch._dynamo.reset()
            module, _, case = name.partition(":")
            try:
                line = json.dumps([name, {"value": importlib.import_module(module).CASES[case]()}])
            except Exception:
                line = json.dumps([name, {"error": traceback.format_exc()}])
            file.write(f"{line}\n")
            file.flush()


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2], sys.argv[3:])
