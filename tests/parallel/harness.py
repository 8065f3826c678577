"""Many cases in one ``torchrun``: each process runs a module's cases in turn and writes down what each gave.

A module of cases has ``CASES``, name -> function without arguments; what a function returns must be JSON. Tests ask
``results(module, world, names)`` for the answers of all ranks. The test processes share one run per list of cases, and
the lists of ``diagonal.py`` are one run together. There the ranks compile the same graphs, so only the first one
verifies them deep; in other runs all do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
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
#: seconds without an answer of any rank after which a run counts as hanging; the longest case takes one minute alone
PATIENCE = 600


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
            found.write_text(json.dumps(_run(world, cases, deep=1 if asked is DIAGONAL else world)))
    answers: dict[str, list[Any]] = json.loads(found.read_text())
    return {name: answers[f"{module}:{name}"] for name in names}


def value(answers: dict[str, list[Any]], name: str) -> list[Any]:
    """What a case returned in each rank; a case that raised fails the test with its traceback."""
    for rank, answer in enumerate(answers[name]):
        assert "error" not in answer, f"rank {rank}:\n{answer.get('error')}"
    return [answer["value"] for answer in answers[name]]


def _run(world: int, names: Sequence[str], deep: int) -> dict[str, list[Any]]:
    """``deep``: how many of the ranks run with ``AMP_VERIFY=deep``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
            str(HERE / "harness.py"), folder, str(deep), *names,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(world)]
        with (Path(folder) / "said").open("w+") as said:
            torchrun = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT)
            ended = _until_done(torchrun, files)
            said.seek(0)
            lost = {"error": f"no answer; torchrun {ended}:\n{said.read()[-6000:]}"}
        ranks = [dict(json.loads(line) for line in f.read_text().splitlines()) if f.exists() else {} for f in files]
    return {name: [rank.get(name, lost) for rank in ranks] for name in names}


def _until_done(torchrun: subprocess.Popen[bytes], files: Sequence[Path]) -> str:
    """Wait for a run and return how it ended. One that answers no further case for minutes is told to end, which ends
    the ranks too; killed, torchrun would leave them behind."""
    known, since = -1, time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ended with {torchrun.wait(timeout=1)}"
        size = sum(file.stat().st_size for file in files if file.exists())
        if size != known:
            known, since = size, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            torchrun.terminate()
            torchrun.wait()
            return f"answered nothing for {PATIENCE} s and was ended"


def _worker(folder: str, deep: int, names: Sequence[str]) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE))
    sys.path.insert(0, str(HERE.parent))
    from worker_settings import SAVE_TIME, keep_what_is_imported, spend_less

    torch.set_num_threads(1)
    spend_less()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    os.environ["AMP_VERIFY"] = "deep" if dist.get_rank() < deep else ""
    if deep < dist.get_world_size():
        os.environ[SAVE_TIME] = "1"
    cases = {module: importlib.import_module(module).CASES for module in {name.partition(":")[0] for name in names}}
    keep_what_is_imported()
    with (Path(folder) / f"{dist.get_rank()}.jsonl").open("w") as out:
        for name in names:
            torch.manual_seed(0)
            torch._dynamo.reset()
            try:
                module, _, case = name.partition(":")
                answer: dict[str, Any] = {"value": cases[module][case]()}
            except Exception:
                answer = {"error": traceback.format_exc()}
            out.write(json.dumps([name, answer]) + "\n")
            out.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
