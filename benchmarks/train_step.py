"""A training step: ours against `torch.autocast` + `torch.amp.GradScaler` with the same optimizer, in the same run.

A step is one update of the weights: all its micro-batches, forward, loss, backward, unscaling, optimizer.
Two networks: nine linear layers with a mean squared error, and a four-layer BERT with a cross entropy.

ops     dispatched, as `amp_compiler.profile.count_ops` counts: an op of ours counts once, whatever it calls
        (`amp::unscale` calls one op a gradient and two more)
casts   number and bytes written, as `count_casts` counts them, also those inside ops of ours
peak    the largest sum of memory during a step, beyond parameters and the optimizer's state, torch's allocator
saved   bytes that the forward of one micro-batch keeps for its backward: every piece of memory once, without
        parameters and batch; low copies of weights count

Ratios in brackets are divided by autocast's: below 1 is better. fp32 is there for orientation, both without scaler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from common import (
    DTYPES,
    BertLike,
    NineLayers,
    console,
    interleave,
    peak_memory,
    print_header,
    print_table,
    spread,
    write_results,
)
from torch import Tensor, fx, nn

from amp_compiler import TrainStep, compile_train_step
from amp_compiler import graph as g
from amp_compiler.profile import CastCount, count_casts, count_ops

PEER = "autocast"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SAMPLE_SECONDS = 0.2  # a sample is as many steps as fill this
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """A network, its loss, and the micro-batches of one update."""

    name: str
    make: Callable[[], nn.Module]
    loss_fn: LossFn
    batches: list[tuple[Tensor, Tensor]]


@dataclass
class Variant:
    """One way to train: `step` makes one update; `saved` tells what one forward keeps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    saved: Callable[[], int]
    repeats: int = 1

    def sample(self, clock: Callable[[], float]) -> float:
        """Seconds a step."""
        start = clock()
        for _ in range(self.repeats):
            self.step()
        return (clock() - start) / self.repeats


@dataclass
class Row:
    """What was measured of one variant."""

    ops: int
    casts: CastCount
    peak: int
    saved: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# ------------------------------------------------------------------------------------------- variants


def make_optimizer(name: str, fused: bool, model: nn.Module) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    return kinds[name](model.parameters(), lr=1e-4, fused=fused or None)


def by_hand(
    problem: Problem, optimize: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype | None
) -> Variant:
    """A loop as PyTorch's documentation has it; `dtype` None: fp32, without autocast and scaler."""
    model = problem.make()
    optimizer = optimize(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is not None)
    count = len(problem.batches)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = problem.loss_fn(model(x), y)
            return loss / count if count > 1 else loss

    def step() -> None:
        optimizer.zero_grad()
        for x, y in problem.batches:
            scaler.scale(forward(x, y)).backward()
        scaler.step(optimizer)
        scaler.update()

    def saved() -> int:
        return saved_by_autograd(lambda: scaler.scale(forward(*problem.batches[0])), model, problem.batches[0])

    return Variant(model, optimizer, step, saved)


def ours(
    problem: Problem, optimize: Callable[[nn.Module], torch.optim.Optimizer], level: str, dtype: torch.dtype
) -> Variant:
    model = problem.make()
    optimizer = optimize(model)
    compiled = compile_train_step(
        model,
        problem.loss_fn,
        optimizer,
        level,
        dtype=dtype,
        loss_scaler=None if level == "O0" else "dynamic",
        accumulate_steps=len(problem.batches),
    )

    def step() -> None:
        for x, y in problem.batches:
            compiled(x, y)

    return Variant(model, optimizer, step, lambda: saved_in_graph(compiled))


# ------------------------------------------------------------------------------------------- bytes saved


def saved_by_autograd(forward: Callable[[], Tensor], model: nn.Module, batch: Iterable[Tensor]) -> int:
    """Bytes of memory that autograd holds after `forward`."""
    excluded = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)}
    held: dict[int, Tensor] = {}  # the tensors stay alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(t.untyped_storage().nbytes() for address, t in held.items() if address not in excluded)
    del result
    return total


def saved_in_graph(step: TrainStep) -> int:
    """Bytes that the joint graph makes before the first use of the loss's gradient, and reads after it."""
    if not step.joint_graphs:
        return 0
    graph = step.joint_graphs[0].graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    (tangent,) = [n for n in graph.nodes if n.op == "placeholder" and n.meta[g.ROLE].kind == "tangent"]
    border = min(order[user] for user in tangent.users)
    kept = {
        base(argument)
        for node in graph.nodes
        if order[node] >= border and node.op == "call_function"
        for argument in node.all_input_nodes
        if order[argument] < border
    }
    counted = (n for n in kept if n.op == "call_function" or (n.op == "placeholder" and n.meta[g.ROLE].kind == "low"))
    return sum(g.nbytes(value) for n in counted for value in g.tensor_outputs(n) if value is not None)


def base(node: fx.Node) -> fx.Node:
    """The node whose memory `node` shows: through views, and through getitem of them."""
    while node.op == "call_function":
        if g.is_getitem(node):
            source = node.args[0]
            if not _is_view(source):
                return node  # one result of an op with several
        elif _is_view(node):
            source = node.all_input_nodes[0]
        else:
            return node
        node = source
    return node


def _is_view(node: fx.Node) -> bool:
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


# ------------------------------------------------------------------------------------------- measuring


def measure(variants: dict[str, Variant], rounds: int, clock: Callable[[], float]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, variant in variants.items():
        with console.status(f"counting: {name}"):
            for _ in range(2):  # compiles; makes the optimizer's state
                variant.step()
            variant.repeats = max(1, round(SAMPLE_SECONDS / variant.sample(clock)))
            ops, casts = sum(count_ops(variant.step).values()), count_casts(variant.step)
            peak = peak_memory(variant.step, rest=variant.optimizer.zero_grad)
            rows[name] = Row(ops, casts, peak, variant.saved())
    with console.status("timing"):
        for name, samples in interleave({n: partial(v.sample, clock) for n, v in variants.items()}, rounds).items():
            rows[name].seconds = samples
    return rows


def problems(args: argparse.Namespace) -> list[Problem]:
    torch.manual_seed(0)
    width, batch = args.width, args.batch
    regression = [(torch.rand(batch, width), torch.rand(batch, width)) for _ in range(args.accumulate)]
    tokens = [(torch.randint(1000, (8, 64)), torch.randint(4, (8,))) for _ in range(args.accumulate)]

    def nine() -> nn.Module:
        torch.manual_seed(0)
        return NineLayers(width)

    def bert() -> nn.Module:
        torch.manual_seed(0)
        return BertLike(layers=4, hidden=128, heads=4, intermediate=512, seq=64)

    found = {
        "nine": Problem(
            f"nine linear layers, width {width}, batch {batch}, mean squared error", nine, F.mse_loss, regression
        ),
        "bert": Problem("BERT, 4 layers of 128, batch 8 x 64, cross entropy", bert, F.cross_entropy, tokens),
    }
    return [found[name] for name in args.networks]


# ------------------------------------------------------------------------------------------- showing

COLUMNS = ["", "ops", "casts", "KiB cast", "step ms: median (range)", "peak KiB", "saved KiB"]


def show(problem: Problem, rows: dict[str, Row]) -> None:
    peer = rows[PEER]

    def cell(text: str, own: float, other: float) -> str:
        return f"{text}  ({own / other:.2f})" if other else text

    table = [
        [
            name,
            cell(f"{row.ops:,}", row.ops, peer.ops),
            cell(f"{row.casts.number:,}", row.casts.number, peer.casts.number),
            cell(f"{row.casts.bytes / 1024:,.1f}", row.casts.bytes, peer.casts.bytes),
            cell(spread(row.seconds), row.median, peer.median),
            cell(f"{row.peak / 1024:,.0f}", row.peak, peer.peak),
            cell(f"{row.saved / 1024:,.0f}", row.saved, peer.saved),
        ]
        for name, row in rows.items()
    ]
    print_table(problem.name, COLUMNS, table)


def record(problem: Problem, rows: dict[str, Row], args: argparse.Namespace) -> list[dict[str, object]]:
    peer = rows[PEER]
    common = {
        "network": problem.name,
        "dtype": args.dtype,
        "optimizer": args.optimizer,
        "accumulate": args.accumulate,
        "clock": args.clock,
    }
    return [
        {
            **common,
            "variant": name,
            "ops": row.ops,
            "casts": row.casts.number,
            "cast_bytes": row.casts.bytes,
            "seconds": row.median,
            "seconds_min": min(row.seconds),
            "seconds_max": max(row.seconds),
            "peak_bytes": row.peak,
            "saved_bytes": row.saved,
            "ops_ratio": row.ops / peer.ops,
            "cast_bytes_ratio": row.casts.bytes / peer.casts.bytes,
            "seconds_ratio": row.median / peer.median,
            "peak_ratio": row.peak / peer.peak,
            "saved_ratio": row.saved / peer.saved,
        }
        for name, row in rows.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--level", nargs="+", choices=("O1", "auto", "O2", "O3"), default=["O2"])
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches an update")
    parser.add_argument("--networks", nargs="+", choices=("nine", "bert"), default=["nine", "bert"])
    parser.add_argument("--width", type=int, default=512, help="of the nine layers")
    parser.add_argument("--batch", type=int, default=256, help="of the nine layers")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of all threads, for a busy machine")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    dtype = DTYPES[args.dtype]

    optimizer = f"{'fused' if args.fused else 'plain'} {args.optimizer}"
    facts = print_header(
        f"A training step, {args.dtype}, {optimizer}, {args.accumulate} micro-batches an update, {args.clock} clock"
    )
    optimize = partial(make_optimizer, args.optimizer, args.fused)
    results: list[dict[str, object]] = []
    for problem in problems(args):
        torch._dynamo.reset()
        variants = {
            "fp32 eager": by_hand(problem, optimize, None),
            "fp32 O0": ours(problem, optimize, "O0", dtype),
            PEER: by_hand(problem, optimize, dtype),
            **{level: ours(problem, optimize, level, dtype) for level in args.level},
        }
        rows = measure(variants, args.rounds, CLOCKS[args.clock])
        show(problem, rows)
        results += record(problem, rows, args)
    write_results(f"train_step_{args.dtype}_{args.optimizer}_{args.accumulate}", facts, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
