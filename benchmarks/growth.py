"""How compile time, memory and step time grow with the number of layers: ours beside torch's.

*Compile time*: `amp_compile` beside `torch.compile(backend="aot_eager")`, from the call that wraps the model to the
end of the first backward; `compile_train_step` beside autocast, `GradScaler` and `torch.compile`, to the end of the
first update. All of Dynamo's caches are empty, and with `--inductor`, which adds both with that backend, Inductor's
too. Every time includes one run, which a column shows alone.
*Memory*: the exact peak of torch's allocator in a step, what the forward keeps for the backward, and, in a fresh
process each, how far the process rises above its imports while it compiles and takes two steps.
*Step time*: of an update, beside fp32 and autocast without a compiler.

The exponent is k in figure = c · layers^k. The part of a figure that does not come from layers (embeddings, imports,
setup) would make k look smaller. So a network with no layers at all is measured too, in the same way, and the verdict
is on what the layers add to it; the exponent of the whole figure stands beside it. A round times every way at every
size, and an exponent is fitted round by round; shown are the median and its interval. "no steeper than fp32's" is no
if the interval of the difference lies above 0.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import AmpModule, amp_compile, compile_train_step
from harness import (
    Row,
    Run,
    arguments,
    console,
    fit,
    in_fresh_process,
    interleave,
    interval,
    lines,
    ms,
    peak_bytes,
    peak_resident,
    ratio,
    sampled,
    saved_by_autograd,
    saved_in_graph,
    set_threads,
    spread,
)
from networks import BertLike, LlamaLike

DTYPE = torch.bfloat16
BATCH, LENGTH, VOCABULARY = 2, 16, 100
LIMIT = 1.1
STEP_ROUNDS = 6  # at least: cheap, and with fewer there is no interval
OURS, PEER = "amp_compile", "torch.compile aot_eager"
STEP, STEP_PEER = "compile_train_step", "autocast + aot_eager"
PAIRS = {OURS: PEER, STEP: STEP_PEER, f"{STEP} inductor": "autocast + inductor"}
Update = Callable[[], object]


def make(model: str, layers: int, hidden: int) -> nn.Module:
    torch.manual_seed(0)
    if model == "llama":
        return LlamaLike(layers, hidden, heads=4, vocab=VOCABULARY)
    return BertLike(layers, hidden, heads=4, intermediate=4 * hidden, vocab=VOCABULARY, seq=LENGTH)


def batch(model: str) -> tuple[Tensor, Tensor]:
    """Tokens, and a target for what the model gives: classes, or the next token."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    return ids, ids.clone() if model == "llama" else torch.randint(4, (BATCH,))


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2).float(), target.flatten())


# ---------------------------------------------------------------------------------------------- ways to take a step


def by_hand(forward: Callable[[Tensor], Tensor], model: nn.Module, data: tuple[Tensor, Tensor], cast: bool) -> Update:
    """A loop as PyTorch's documentation has it."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=cast)

    def update() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPE, enabled=cast):
            loss = loss_fn(forward(data[0]), data[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return update


def ours(model: nn.Module, data: tuple[Tensor, Tensor], backend: str = "eager") -> Update:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, fused=True)
    step = compile_train_step(model, loss_fn, optimizer, "O2", dtype=DTYPE, backend=backend)
    return lambda: step(*data)


def forward_backward(compiled: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Update:
    return lambda: compiled(data[0]).float().sum().backward()


# ------------------------------------------------------------------------------------------------------ compile time


@dataclass
class Subject:
    """One size of network, and what its compilations showed."""

    name: str
    layers: int
    hidden: int
    device: str | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    runs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # a second time, nothing to compile
    passes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nodes: int = 0
    steps: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model, self.data = make(self.name, self.layers, self.hidden), batch(self.name)

    def compilations(self, inductor: bool) -> dict[str, Callable[[], float]]:
        """Every way to compile, as cases for `interleave`."""

        def peer(model: nn.Module, backend: str) -> Update:
            return by_hand(torch.compile(model, backend=backend), model, self.data, cast=True)

        def amp(model: nn.Module) -> Update:
            level = "O2" if self.device is None else "auto"
            compiled = amp_compile(model, level=level, dtype=DTYPE, backend="eager", device=self.device)
            self.compiled: AmpModule = compiled
            return forward_backward(compiled, self.data)

        ways: dict[str, Callable[[nn.Module], Update]] = {
            OURS: amp,
            PEER: lambda model: forward_backward(torch.compile(model, backend="aot_eager"), self.data),
            STEP: lambda model: ours(model, self.data),
            STEP_PEER: lambda model: peer(model, "aot_eager"),
        }
        if inductor:
            ways[f"{STEP} inductor"] = lambda model: ours(model, self.data, "inductor")
            ways["autocast + inductor"] = lambda model: peer(model, "inductor")
        return {name: partial(self.sample, name, way) for name, way in ways.items()}

    def sample(self, name: str, way: Callable[[nn.Module], Update]) -> float:
        torch._dynamo.reset()
        model = copy.deepcopy(self.model)
        with _cold() if "inductor" in name else contextlib.nullcontext():
            start = time.perf_counter()
            update = way(model)
            update()
            seconds = time.perf_counter() - start
            start = time.perf_counter()
            update()
            self.runs[name].append(time.perf_counter() - start)
        if name == OURS:
            self.look_at(self.compiled)
        return seconds

    def look_at(self, compiled: AmpModule) -> None:
        self.nodes = sum(len(graph.graph.nodes) for graph in compiled.graphs)
        seconds: dict[str, float] = defaultdict(float)
        for record in compiled.history:
            seconds[record.name] += record.seconds
        for name, value in seconds.items():
            self.passes[name].append(value)

    def updates(self) -> dict[str, Callable[[], float]]:
        """Every way to take a step, as cases for `interleave`; their memory is counted here."""
        updates = {name: way(copy.deepcopy(self.model), self.data) for name, way in WAYS.items()}
        cases = {name: sampled(update, 0.1) for name, update in updates.items()}
        for name, update in updates.items():
            self.memory[name] = {"peak_bytes": peak_bytes(update)}
        for name in ("fp32", "autocast"):
            model = copy.deepcopy(self.model)

            def forward(model: nn.Module = model, cast: bool = name == "autocast") -> Tensor:
                with torch.autocast("cpu", DTYPE, enabled=cast):
                    return loss_fn(model(self.data[0]), self.data[1])

            self.memory[name]["saved_bytes"] = saved_by_autograd(forward, model, self.data)
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, fused=True)
        step = compile_train_step(model, loss_fn, optimizer, "O2", dtype=DTYPE)
        step(*self.data)
        self.memory["O2"]["saved_bytes"] = saved_in_graph(step)
        return cases


def in_turns(
    subjects: Sequence[Subject], cases: Callable[[Subject], Mapping[str, Callable[[], float]]], rounds: int
) -> Iterator[tuple[Subject, dict[str, list[float]]]]:
    """Run every way at every size in every round, so that a temporarily slow machine affects all sizes."""
    made = {(place, name): run for place, subject in enumerate(subjects) for name, run in cases(subject).items()}
    samples = interleave(made, rounds)
    for place, subject in enumerate(subjects):
        yield subject, {name: taken for (owner, name), taken in samples.items() if owner == place}


@contextlib.contextmanager
def _cold() -> Iterator[None]:
    """Run Inductor with an empty disk cache, so that its C++ kernels are compiled again too."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


#: without a compiler, and ours
WAYS: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Update]] = {
    "fp32": lambda model, data: by_hand(model, model, data, cast=False),
    "autocast": lambda model, data: by_hand(model, model, data, cast=True),
    "O2": ours,
}
#: those that compile, for the memory of the whole process
COMPILED: dict[str, Callable[[nn.Module, tuple[Tensor, Tensor]], Update]] = {
    STEP_PEER: lambda model, data: by_hand(torch.compile(model, backend="aot_eager"), model, data, cast=True),
    STEP: ours,
}


def resident_of(args: argparse.Namespace) -> dict[str, int]:
    """In a fresh process: how far memory rises above imports and a first tiny compile, by compiling and two steps."""
    way, data = COMPILED[args.resident_of], batch(args.model)
    way(make(args.model, 0, 16), data)()
    torch._dynamo.reset()
    model = make(args.model, args.layers[0], args.hidden)

    def twice() -> None:
        update = way(model, data)
        update()
        update()

    return {"resident_bytes": peak_resident(twice)}


# --------------------------------------------------------------------------------------------------------- exponents


@dataclass(frozen=True)
class Exponents:
    """How one figure grows, per round: what the layers add (None where that was below the noise), and the whole."""

    added: tuple[float | None, ...]
    whole: tuple[float, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], values: Sequence[Sequence[float]]) -> Exponents:
        """`sizes` begin with 0 layers; `values`: for each size the figure in each round.

        >>> Exponents.of([0, 2, 4], [[10.0], [12.0], [14.0]])
        Exponents(added=(1.0,), whole=(0.222392421336,))
        """
        added: list[float | None] = []
        whole = []
        for none, *rest in zip(*values, strict=True):
            whole.append(fit(sizes[1:], rest).exponent)
            above = [value - none for value in rest]
            added.append(fit(sizes[1:], above).exponent if min(above) > 0 else None)
        return cls(tuple(added), tuple(whole))

    @property
    def known(self) -> list[float]:
        return [exponent for exponent in self.added if exponent is not None]

    @property
    def at_most(self) -> str:
        """yes if the median of what the layers add is at most the limit."""
        if not self.known:
            return "the layers add less than the noise"
        return "yes" if statistics.median(self.known) <= LIMIT else "no"

    def steeper_than(self, other: Exponents) -> bool:
        """Whether the difference, round by round, lies above 0."""
        pairs = zip(self.added, other.added, strict=True)
        differences = [own - theirs for own, theirs in pairs if own is not None and theirs is not None]
        return bool(differences) and interval(differences)[1] > 0

    def figures(self) -> dict[str, float]:
        found = {"whole_exponent": statistics.median(self.whole)}
        if self.known:
            names = ("exponent", "exponent_low", "exponent_high")
            found |= dict(zip(names, interval(self.known), strict=True))
        return found


def shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle, low, high = interval(values)
    return f"{middle:.2f}" if low == high else f"{middle:.2f} ({low:.2f} to {high:.2f})"


# ------------------------------------------------------------------------------------------------------------ tables


def compile_tables(subjects: Sequence[Subject], run: Run) -> dict[str, Exponents]:
    names, sizes = list(subjects[0].samples), [s.layers for s in subjects]
    peers = {**PAIRS, **{peer: peer for peer in PAIRS.values()}}
    for subject, name in itertools.product(subjects, names):
        key = _key(subject, "compile", name)
        reference = None if peers[name] == name else _key(subject, "compile", peers[name])
        counts = {"nodes": subject.nodes} if name == OURS else {}
        run.add(Row(key, counts, {"seconds": subject.samples[name], "run_seconds": subject.runs[name]},
                    reference=reference))  # fmt: skip
    for own, peer in PAIRS.items():
        if own not in names:
            continue
        run.table(
            f"Compile time, {subjects[0].name}: median (range), ms. Nodes are those of our forward graphs.",
            ["", "nodes", own, peer, "ratio", "ours, ms/node", "peer, ms/node", "ours, a run"],
            [
                (f"{s.layers} layers", s.nodes, spread(s.samples[own]), spread(s.samples[peer]),
                 ratio(s.samples[own], s.samples[peer]),
                 *(f"{_median(s, name) / s.nodes * 1e3:.3f}" for name in (own, peer)),
                 ms(statistics.median(s.runs[own])))
                for s in subjects
            ],
        )  # fmt: skip
    return {name: Exponents.of(sizes, [s.samples[name] for s in subjects]) for name in names}


def pass_table(subjects: Sequence[Subject], run: Run) -> None:
    """Our passes, one by one; the exponent is by nodes, of what the layers add."""
    nodes = [s.nodes - subjects[0].nodes for s in subjects[1:]]

    def row(name: str, seconds: Callable[[Subject], float]) -> list[object]:
        values = [seconds(s) for s in subjects]
        added = [value - values[0] for value in values[1:]]
        exponent = f"{fit(nodes, added).exponent:.2f}" if len(nodes) > 1 and min(added) > 0 else "–"
        each = [f"{value / s.nodes * 1e6:.1f}" for value, s in zip(values, subjects, strict=True)]
        return [name, *map(ms, values), *each, exponent]

    def pass_seconds(name: str, subject: Subject) -> float:
        return statistics.median(subject.passes.get(name, [0.0]))

    rows = [row(name, partial(pass_seconds, name)) for name in subjects[-1].passes]
    rows += [row(f"total, {name}", partial(_median, name=name)) for name in (OURS, PEER)]
    columns = ["pass", *(f"{s.layers}, ms" for s in subjects), *(f"{s.layers}, µs/node" for s in subjects)]
    run.table("Passes by layers (median of the sum over graphs)", [*columns, "exponent by nodes"], rows)
    for subject, name in itertools.product(subjects, subjects[-1].passes):
        samples = {"seconds": subject.passes.get(name, [0.0])}
        run.add(Row({**_key(subject, "pass", OURS), "pass": name}, samples=samples))


def step_tables(subjects: Sequence[Subject], run: Run) -> dict[str, Exponents]:
    names, sizes = list(WAYS), [s.layers for s in subjects]
    for subject, name in itertools.product(subjects, names):
        reference = None if name == "fp32" else _key(subject, "step", "fp32")
        key = _key(subject, "step", name)
        run.add(Row(key, subject.memory[name], {"seconds": subject.steps[name]}, reference=reference))
    run.table(
        "A step: median (range), ms",
        ["", *names, "O2 / fp32", "O2 / autocast"],
        [
            (f"{s.layers} layers", *(spread(s.steps[name]) for name in names),
             ratio(s.steps["O2"], s.steps["fp32"]), ratio(s.steps["O2"], s.steps["autocast"]))
            for s in subjects
        ],
    )  # fmt: skip
    titles = {"peak_bytes": "Peak of torch's allocator in a step", "saved_bytes": "Kept for backward"}
    for field_name, title in titles.items():
        run.table(
            f"{title}, KiB",
            ["", *names, "O2 / fp32", "O2 / autocast"],
            [
                (f"{s.layers} layers", *(f"{s.memory[name][field_name] / 1024:,.0f}" for name in names),
                 *(f"{s.memory['O2'][field_name] / s.memory[peer][field_name]:.2f}" for peer in ("fp32", "autocast")))
                for s in subjects
            ],
        )  # fmt: skip
    found = {f"step time, {name}": Exponents.of(sizes, [s.steps[name] for s in subjects]) for name in names}
    for name in names:
        peaks = [[float(s.memory[name]["peak_bytes"])] for s in subjects]
        found[f"peak of the allocator, {name}"] = Exponents.of(sizes, peaks)
    return found


def resident_tables(subjects: Sequence[Subject], args: argparse.Namespace, run: Run) -> dict[str, Exponents]:
    sizes = [s.layers for s in subjects]
    values: dict[str, list[list[float]]] = {name: [] for name in COMPILED}
    table = []
    for subject in subjects:
        for name in COMPILED:
            with console.status(f"memory of the process, {subject.layers} layers, {name}"):
                found = in_fresh_process(__file__, [
                    "--resident-of", name, "--layers", str(subject.layers), "--hidden", str(args.hidden),
                    "--model", args.model, "--threads", str(args.threads),
                ])  # fmt: skip
            values[name].append([float(found["resident_bytes"])])
            run.add(Row(_key(subject, "resident", name), figures={"resident_bytes": found["resident_bytes"]}))
        table.append([f"{subject.layers} layers", *(f"{values[name][-1][0] / 1e6:,.0f}" for name in COMPILED)])
    run.table("The process while it compiles and takes two steps: MB above its imports", ["", *COMPILED], table)
    return {f"memory of the process, {name}": Exponents.of(sizes, values[name]) for name in COMPILED}


def _median(subject: Subject, name: str) -> float:
    return statistics.median(subject.samples[name])


def _key(subject: Subject, what: str, variant: str) -> dict[str, str | int]:
    return {"model": subject.name, "layers": subject.layers, "what": what, "variant": variant}


def verdicts(found: Mapping[str, Exponents], model: str, run: Run) -> None:
    table: list[list[object]] = []
    fp32 = found.get("step time, fp32")
    for name, exponents in found.items():
        if name.startswith("step time"):
            verdict = "" if exponents is fp32 or fp32 is None else f"no steeper than fp32's: {_no(exponents, fp32)}"
        else:
            verdict = f"at most {LIMIT}: {exponents.at_most}"
        table.append([name, shown(exponents.known), shown(exponents.whole), verdict])
        run.add(Row({"model": model, "what": "exponent", "variant": name}, figures=exponents.figures(), note=verdict))
    run.table("Exponents: figure = c · layers^k", ["", "k of what layers add", "k of the whole", ""], table)


def _no(own: Exponents, fp32: Exponents) -> str:
    return "no" if own.steeper_than(fp32) else "yes"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 32, 48])
    made.add_argument("--hidden", type=int, default=64)
    made.add_argument("--model", choices=["bert", "llama"], default="bert", help="llama's code reads dtypes")
    made.add_argument("--inductor", action="store_true", help="compile with Inductor too, its caches empty")
    made.add_argument("--device", help="amp_compile at level auto with this device: neutral ops placed by its costs")
    made.add_argument("--resident", action=argparse.BooleanOptionalAction, default=True,
                      help="memory of the process: a fresh one for each size")  # fmt: skip
    made.add_argument("--resident-of", choices=COMPILED, help=argparse.SUPPRESS)
    return arguments(made, rounds=3, threads=1)


def main() -> int:
    args = parser().parse_args()
    if args.resident_of:
        set_threads(args.threads)
        print(json.dumps(resident_of(args)))
        return 0
    sizes = [0, *sorted(set(args.layers) - {0})]
    if len(sizes) < 3:
        raise SystemExit("growth.py: an exponent needs two numbers of layers at least, beside none")
    run = Run("growth", f"Growth with the number of layers, {args.model}", args)
    for first in Subject(args.model, 0, 16).compilations(args.inductor).values():
        first()  # imports and torch's own caches
    subjects = [Subject(args.model, layers, args.hidden, args.device) for layers in sizes]
    with console.status("compiling"):
        for subject, samples in in_turns(subjects, lambda s: s.compilations(args.inductor), args.rounds):
            subject.samples = samples
    torch._dynamo.reset()
    with console.status("steps"):
        for subject, samples in in_turns(subjects, Subject.updates, max(args.rounds, STEP_ROUNDS)):
            subject.steps = samples
    found = {f"compile time, {name}": value for name, value in compile_tables(subjects, run).items()}
    pass_table(subjects, run)
    found |= step_tables(subjects, run)
    if args.resident:
        found |= resident_tables(subjects, args, run)
    verdicts(found, args.model, run)

    def plot(path: Path) -> None:
        series = {}
        for name in subjects[0].samples:
            label = f"{name}: k = {shown(found[f'compile time, {name}'].known)}"
            series[label] = (sizes[1:], [_median(s, name) for s in subjects[1:]])
        for name in WAYS:
            label = f"a step, {name}: k = {shown(found[f'step time, {name}'].known)}"
            series[label] = (sizes[1:], [statistics.median(s.steps[name]) for s in subjects[1:]])
        lines(path, f"Seconds by layers, {args.model}: compiling, and a step", series, "layers", "seconds")

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
