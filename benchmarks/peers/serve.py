"""How a worker in another framework's interpreter talks with `frameworks.py`: a line in, a line of JSON out.

The worker is given a file of arrays (weights, batch), makes every variant, says of each whether it runs, and then takes
as many steps of a variant as it is asked for, so that frameworks can take turns. Needs numpy only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy

Arrays = Mapping[str, numpy.ndarray]
Step = Callable[[], float]  # one update of the weights; gives the loss before it
WARM = 3  # steps before the first that is timed: a framework may compile, and its memory pools fill


def serve(make: Callable[[str, Arrays], Step], variants: Sequence[str], version: str) -> None:
    """Answer requests on stdin until it ends. `sys.argv[1]` is the file of arrays."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the framework prints goes to stderr
    with numpy.load(sys.argv[1]) as file:
        arrays = dict(file)
    steps: dict[str, Step] = {}
    refused: dict[str, str] = {}
    for variant in variants:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                step = make(variant, arrays)
                for _ in range(WARM):
                    step()
            except Exception as error:  # whatever it says is the result of this variant
                refused[variant] = reason(error)
                continue
        idle = [str(warning.message) for warning in told if "no effect" in str(warning.message)]
        if idle:
            refused[variant] = idle[-1]  # it would be fp32 under another name
        else:
            steps[variant] = step
    print(json.dumps({"version": version, "variants": list(steps), "refused": refused}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        step, loss = steps[request["variant"]], 0.0
        start = time.perf_counter()
        for _ in range(request["steps"]):
            loss = step()
        seconds = (time.perf_counter() - start) / request["steps"]
        print(json.dumps({"seconds": seconds, "loss": loss}), file=out, flush=True)


def reason(error: Exception) -> str:
    """The line of an error that says what was wrong: frameworks put traces and rules around it."""
    lines = [line.strip(" -\t") for line in str(error).splitlines()]
    lines = [line for line in lines if any(letter.isalpha() for letter in line) and "Traceback" not in line]
    told = [line for line in lines if "Error" in line or "not support" in line.lower() or "unsupported" in line.lower()]
    return f"{type(error).__name__}: {(told or lines or [''])[0]}"[:200]
