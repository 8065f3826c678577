"""Many cases in one ``torchrun``: each process runs a module's cases in turn and writes down what each gave.

A module of cases has ``CASES``, name -> function without arguments; what a function returns must be JSON. Tests ask
``results(module, world, names)`` for the answers of all ranks. The test processes share one run per list of cases, and
the lists of ``diagonal.py`` are one run together.
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
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if __name__ == "__main__":  # torchrun puts this folder on the path
    from diagonal import DIAGONAL
else:
    from parallel.diagonal import DIAGONAL
#: a rank that fails leaves the others waiting in a collective: they give up after this many seconds
TIMEOUT = 60


def results(module: str, world: int, names: Sequence[str]) -> dict[str, list[Any]]:
    """Case -> what it returned in each rank, from one run for all test processes that ask for the same cases."""
    root = Path(tempfile.gettempdir()) / f"amp-parallel-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    root.mkdir(exist_ok=True)
    asked = {module: tuple(names)}
    if world == 2 and DIAGONAL.get(module) == tuple(names):
        asked = DIAGONAL
    cases = [f"{of}:{name}" for of, own in asked.items() for name in own]
    found = root / f"{world}-{hashlib.sha256(chr(10).join(cases).encode()).hexdigest()[:12]}.json"
    with (root / f"{found.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            found.write_text(json.dumps(_run(world, cases)))
    answers: dict[str, list[Any]] = json.loads(found.read_text())
    return {name: answers[f"{module}:{name}"] for name in names}


def value(answers: dict[str, list[Any]], name: str) -> list[Any]:
    """What a case returned in each rank; a case that raised fails the test with its traceback."""
    for rank, answer in enumerate(answers[name]):
        assert "error" not in answer, f"rank {rank}:\n{answer.get('error')}"
    return [answer["value"] for answer in answers[name]]


def _run(world: int, names: Sequence[str]) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
            str(HERE / "harness.py"), folder, *names,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMP_VERIFY": "deep"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1200)
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(world)]
        ranks = [dict(json.loads(line) for line in f.read_text().splitlines()) if f.exists() else {} for f in files]
    lost = {"error": f"no answer; torchrun ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"}
    return {name: [rank.get(name, lost) for rank in ranks] for name in names}


def _worker(folder: str, names: Sequence[str]) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE))
    sys.path.insert(0, str(HERE.parent))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    with (Path(folder) / f"{dist.get_rank()}.jsonl").open("w") as out:
        for name in names:
            torch.manual_seed(0)
            torch._dynamo.reset()
            try:
                module, _, case = name.partition(":")
                answer: dict[str, Any] = {"value": importlib.import_module(module).CASES[case]()}
            except Exception:
                answer = {"error": traceback.format_exc()}
            out.write(json.dumps([name, answer]) + "\n")
            out.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(sys.argv[1], sys.argv[2:])
