"""The first call and re-compilations of Hugging Face models, and the import: CPU seconds, beside torch's.

*Calls*: a BERT and a Llama of a few layers, with a backward and in inference. A compiled model is called for the first
time, then with another batch size, with another length, and in the other mode (`eval()` after training, `train()` in
inference); each call captures the model again, and its time includes one run. The peer is
`torch.compile(backend="aot_eager")` in fp32. All of Dynamo's caches are empty before a first call. Garbage collections
that fall into a call are part of its time, as in a user's process.
*Import*: in a process that has imported torch, what is added by `import amp_compiler`, which loads nothing, and by
`from amp_compiler import amp_compile`, which loads the compiler.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler import amp_compile
from harness import DTYPES, Ratio, Row, Run, arguments, bars, console, interleave, ratio

OURS, PEER = "O2", "aot_eager"
VOCABULARY = 100
CALLS = ("first call", "new batch size", "new length", "other mode")
#: (batch size, length) of each call
SIZES = ((2, 16), (3, 16), (3, 24), (3, 24))
IMPORTS = ("import amp_compiler", "from amp_compiler import amp_compile")


def make(name: str, layers: int) -> nn.Module:
    """A model with the code of `transformers`, and weights so small that running it takes no time."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    size: dict[str, Any] = {
        "num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    if name == "llama":
        return LlamaModel(LlamaConfig(**size, num_key_value_heads=2, use_cache=False))
    return BertModel(BertConfig(**size))


class Subject:
    """One model in one kind of use; every sample compiles a copy of it anew."""

    def __init__(self, name: str, kind: str, layers: int, dtype: torch.dtype) -> None:
        self.kind, self.dtype = kind, dtype
        self.model = make(name, layers).train(kind == "training")
        self.inputs = [torch.randint(VOCABULARY, size) for size in SIZES]
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)  # (call, variant) -> by round

    def compiled(self, model: nn.Module, variant: str) -> Callable[..., Any]:
        if variant == PEER:
            return torch.compile(model, backend="aot_eager")
        return amp_compile(model, level="O2", dtype=self.dtype, backend="eager")

    def sample(self, variant: str) -> float:
        torch._dynamo.reset()
        gc.unfreeze()  # the harness freezes all objects, which a user's process does not: collections are timed too
        gc.collect()
        model = copy.deepcopy(self.model)
        first = time.process_time()
        compiled = self.compiled(model, variant)
        start = first
        for call, ids in zip(CALLS, self.inputs, strict=True):
            if call == "other mode":
                model.train(not model.training)
            self.run(compiled, ids)
            end = time.process_time()
            self.seconds[call, variant].append(end - start)
            start = end
        return start - first

    def run(self, compiled: Callable[..., Any], ids: Tensor) -> None:
        with torch.set_grad_enabled(self.kind == "training"):
            out = compiled(input_ids=ids).last_hidden_state
            if self.kind == "training":
                out.sum().backward()


def measure_calls(args: argparse.Namespace, run: Run) -> None:
    for name in args.models:
        for kind in args.kinds:
            Subject(name, kind, 1, DTYPES[args.dtype]).sample(OURS)  # imports and torch's own caches
            subject = Subject(name, kind, args.layers, DTYPES[args.dtype])
            subject.sample(PEER)
            subject.seconds.clear()
            with console.status(f"{name}, {kind}"):
                interleave({variant: partial(subject.sample, variant) for variant in (PEER, OURS)}, args.rounds)
            for (call, variant), seconds in subject.seconds.items():
                key: dict[str, str | int] = {"model": name, "layers": args.layers, "kind": kind, "call": call}
                reference = {**key, "variant": PEER} if variant == OURS else None
                run.add(Row({**key, "variant": variant}, samples={"cpu_seconds": seconds}, reference=reference))


def started(statement: str) -> float:
    """CPU seconds that a statement takes in a process of its own that has imported torch."""
    code = f"import time, torch; start = time.process_time(); {statement}; print(time.process_time() - start)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def measure_import(args: argparse.Namespace, run: Run) -> None:
    for statement in IMPORTS:
        started(statement)  # writes bytecode
    with console.status("import"):
        samples = interleave({statement: partial(started, statement) for statement in IMPORTS}, args.imports)
    for statement, seconds in samples.items():
        run.add(Row({"call": "import", "variant": statement}, samples={"cpu_seconds": seconds}))


def show(run: Run) -> None:
    taken = {tuple(row.key.items()): row.samples["cpu_seconds"] for row in run.rows}
    table, added = [], []
    for row in run.rows:
        own = row.samples["cpu_seconds"]
        if row.key["call"] == "import":
            added.append((row.key["variant"], f"{1e3 * statistics.median(own):.1f}"))
        elif row.reference is not None:
            peer = taken[tuple(row.reference.items())]
            both = [f"{1e3 * statistics.median(seconds):.0f}" for seconds in (own, peer)]
            table.append((row.key["model"], row.key["kind"], row.key["call"], *both, ratio(own, peer)))
    if table:
        columns = ["model", "kind", "call", OURS, PEER, f"{OURS} / {PEER}"]
        run.table("A call that compiles: CPU ms, median", columns, table)
    if added:
        run.table("After `import torch`: CPU ms, median", ["statement", "CPU ms"], added)


def ratios(run: Run) -> dict[str, dict[str, Ratio | float]]:
    """By model and kind, then by call: what ours takes divided by what the peer takes."""
    taken = {tuple(row.key.items()): row.samples["cpu_seconds"] for row in run.rows}
    found: dict[str, dict[str, Ratio | float]] = defaultdict(dict)
    for row in run.rows:
        if row.reference is not None and "model" in row.key:
            peer = taken[tuple(row.reference.items())]
            subject = f"{row.key['model']}, {row.key['kind']}"
            found[subject][str(row.key["call"])] = ratio(row.samples["cpu_seconds"], peer)
    return dict(found)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="*", choices=["bert", "llama"], default=["bert", "llama"])
    made.add_argument("--kinds", nargs="+", choices=["training", "inference"], default=["training", "inference"])
    made.add_argument("--layers", type=int, default=2)
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    made.add_argument("--imports", type=int, default=9, help="processes of each import; 0: none")
    return arguments(made, rounds=3, threads=1)


def main() -> int:
    args = parser().parse_args()
    title = "Compiling Hugging Face models, and the import"
    run = Run("compiling", title, args)
    measure_calls(args, run)
    if args.imports:
        measure_import(args, run)
    show(run)

    def plot(path: Path) -> None:
        bars(path, title, ratios(run), "× torch.compile(backend=\"aot_eager\")")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
