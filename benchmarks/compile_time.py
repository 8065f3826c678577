"""Compile time of `amp_compile` against `torch.compile(backend="aot_eager")`, and how it grows with size.

One sample is everything from the call that wraps the model to the end of the first backward, with all of
Dynamo's caches empty. Both sides include one eager run of the graphs, which the last column shows alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import torch
from common import BertLike, LlamaLike, console, interleave, ms, print_header, print_table, spread, write_results
from torch import Tensor, nn

from amp_compiler import amp_compile

OURS, PEER = "amp_compile O2", "torch.compile aot_eager"


class Subject:
    """One size of transformer, and what its compilations showed."""

    def __init__(self, layers: int, hidden: int, model: str = "bert") -> None:
        torch.manual_seed(0)
        self.layers = layers
        self.model: nn.Module = LlamaLike(layers, hidden, heads=4, vocab=100)
        if model == "bert":
            self.model = BertLike(layers, hidden, heads=4, intermediate=4 * hidden, vocab=100, seq=16)
        self.ids = torch.randint(100, (2, 16))
        self.samples: dict[str, list[float]] = {}
        self.runs: dict[str, list[float]] = defaultdict(list)  # a second step, nothing left to compile
        self.passes: dict[str, list[float]] = defaultdict(list)
        self.nodes = 0

    def measure(self, rounds: int) -> None:
        ours = partial(amp_compile, self.model, level="O2", dtype=torch.bfloat16, backend="eager")
        peer = partial(torch.compile, self.model, backend="aot_eager")
        cases = {OURS: partial(self.sample, OURS, ours), PEER: partial(self.sample, PEER, peer)}
        self.samples = interleave(cases, rounds)

    def sample(self, name: str, compile_model: Callable[[], nn.Module]) -> float:
        torch._dynamo.reset()
        self.model.zero_grad()
        start = time.perf_counter()
        compiled = compile_model()
        step(compiled, self.ids)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        step(compiled, self.ids)
        self.runs[name].append(time.perf_counter() - start)
        if name == OURS:
            self.look_at(compiled)
        return seconds

    def look_at(self, compiled: nn.Module) -> None:
        self.nodes = sum(len(graph.graph.nodes) for graph in compiled.graphs)
        seconds: Counter[str] = Counter()
        for record in compiled.history:
            seconds[record.name] += record.seconds
        for name, value in seconds.items():
            self.passes[name].append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])


def step(model: Callable[[Tensor], Tensor], ids: Tensor) -> None:
    model(ids).float().sum().backward()


def exponent(small: Subject, large: Subject, seconds: Callable[[Subject], float]) -> float:
    """k in seconds = c * nodes^k through both sizes: 1 is linear."""
    return math.log(seconds(large) / seconds(small)) / math.log(large.nodes / small.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=["bert", "llama"], default="bert", help="llama's code reads dtypes")
    args = parser.parse_args()

    facts = print_header("Compile time: first call and first backward")
    Subject(1, 16).measure(1)  # imports and torch's own caches
    subjects = [Subject(layers, args.hidden, args.model) for layers in sorted(args.layers)]
    for subject in subjects:
        subject.measure(args.rounds)

    rows = []
    for subject in subjects:
        for name in (OURS, PEER):
            seconds = subject.median(name)
            rows.append(
                {
                    "layers": subject.layers,
                    "nodes": subject.nodes,
                    "compiler": name,
                    "seconds": seconds,
                    "ratio": seconds / subject.median(PEER),
                    "seconds_per_node": seconds / subject.nodes,
                    "run_seconds": statistics.median(subject.runs[name]),
                    "samples": subject.samples[name],
                    "passes": {p: statistics.median(v) for p, v in subject.passes.items()}
                    if name == OURS
                    else {},
                }
            )
    print_table(
        f"Median of {args.rounds} (range), ms. Nodes are those of our forward graphs.",
        ["transformer", "nodes", OURS, PEER, "ratio", "ours, ms/node", "peer, ms/node", "ours, a run"],
        [
            (
                f"{s.layers} layers",
                s.nodes,
                spread(s.samples[OURS]),
                spread(s.samples[PEER]),
                f"{s.median(OURS) / s.median(PEER):.2f}",
                f"{s.median(OURS) / s.nodes * 1e3:.3f}",
                f"{s.median(PEER) / s.nodes * 1e3:.3f}",
                ms(statistics.median(s.runs[OURS])),
            )
            for s in subjects
        ],
    )
    print_passes(subjects)
    write_results("compile_time", facts, rows)


def print_passes(subjects: list[Subject]) -> None:
    small, large = subjects[0], subjects[-1]
    columns = [
        "pass",
        *(f"{s.layers} layers, ms" for s in subjects),
        *(f"{s.layers}, µs/node" for s in subjects),
    ]

    def row(name: str, seconds: Callable[[Subject], float]) -> list[str]:
        values = [seconds(s) for s in subjects]
        cells = [
            name,
            *map(ms, values),
            *(f"{v / s.nodes * 1e6:.1f}" for v, s in zip(values, subjects, strict=True)),
        ]
        grows = large.nodes > small.nodes and min(values) > 0
        return [*cells, f"{exponent(small, large, seconds):.2f}" if grows else "-"]

    def pass_seconds(name: str, subject: Subject) -> float:
        return statistics.median(subject.passes.get(name, [0.0]))

    rows = [row(name, partial(pass_seconds, name)) for name in large.passes]
    rows += [row(f"total, {name}", lambda s, name=name: s.median(name)) for name in (OURS, PEER)]
    print_table("Passes (median of the sum over graphs)", [*columns, "exponent"], rows)
    console.print("Exponent: k in time = c · nodes^k between the smallest and the largest; 1 is linear.")


if __name__ == "__main__":
    main()
