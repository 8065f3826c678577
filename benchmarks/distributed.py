"""Training by several processes: the time of a step and the bytes that it exchanges, beside DDP and FSDP2.

All ways run in turns in the same processes (`torchrun`, gloo), on a BERT-like encoder. A step's time is that of the
slowest rank.

/ DDP      the time divided by that of autocast + DistributedDataParallel, round by round: below 1 is faster
all-…      megabytes of the whole tensors that a step's collectives gather, scatter or average, by dtype; ours are
           read off the graph that runs, the baselines' follow from their settings: DDP averages fp32 gradients, FSDP2
           gathers parameters in `param_dtype` for the forward and again for the backward, and scatters fp32 gradients
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness import DTYPES, Row, Run, arguments, bars, interleave, positive, ratio, spread

# isort: split
from torch import nn

from networks import BertLike  # in tests/, which the harness puts on the path

PEER = "autocast + DDP"
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
Made = tuple[Callable[[], object], dict[str, int]]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--ranks", type=positive, default=2)
    found.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    found.add_argument("--layers", type=positive, default=4)
    found.add_argument("--width", type=positive, default=256)
    found.add_argument("--batch", type=positive, default=8, help="of each process; sequences of 64")
    found.add_argument("--steps", type=positive, default=3, help="in each sample")
    found.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return arguments(found, rounds=7, threads=1)


# ------------------------------------------------------------------------------------------------ in each process


def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), targets)


def ours(parallel: Any, dtype: torch.dtype, model: nn.Module, batch: Any) -> Made:
    from amp_compiler import compile_train_step
    from amp_compiler.parallel.plan import traffic

    step = compile_train_step(
        model, loss_of, torch.optim.AdamW(model.parameters(), 1e-4), level="O2", dtype=dtype, parallel=parallel
    )
    step(*batch)
    sent = {f"{t.kind} {t.dtype}": t.bytes for t in traffic(step.joint_graphs[-1])}
    return lambda: step(*batch), sent


def loop(model: nn.Module, dtype: torch.dtype | None, batch: Any, sent: dict[str, int]) -> Made:
    """A training loop as people write it."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def step() -> None:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(batch[0])
        loss = loss_of(output, batch[1])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, sent


def sharded_by_torch(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mp_policy=mixed)
    return fully_shard(model, mp_policy=mixed)


def ways(args: argparse.Namespace) -> dict[str, Made]:
    from torch.nn.parallel import DistributedDataParallel as DDP

    from amp_compiler import DataParallel, Sharded

    dtype = DTYPES[args.dtype]
    torch.manual_seed(0)
    model = BertLike(args.layers, args.width, intermediate=4 * args.width)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, 100, (args.batch, 64), generator=generator)
    with torch.no_grad():
        batch = ids, torch.randn(model(ids).shape, generator=generator)
    numbers = sum(p.numel() for p in model.parameters())
    low = {f"all-gather {args.dtype}": 2 * numbers * dtype.itemsize, "reduce-scatter float32": 4 * numbers}

    def fresh() -> nn.Module:
        return copy.deepcopy(model)

    return {
        "fp32 + DDP": loop(DDP(fresh()), None, batch, {"all-reduce float32": 4 * numbers}),
        PEER: loop(DDP(fresh()), dtype, batch, {"all-reduce float32": 4 * numbers}),
        "FSDP2, MixedPrecisionPolicy": loop(sharded_by_torch(fresh(), dtype), None, batch, low),
        "O2, DataParallel": ours(DataParallel(), dtype, fresh(), batch),
        f"O2, DataParallel(reduce_dtype={args.dtype})": ours(DataParallel(reduce_dtype=dtype), dtype, fresh(), batch),
        "O2, Sharded": ours(Sharded(), dtype, fresh(), batch),
    }


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    made = ways(args)

    def sample(step: Callable[[], object]) -> Callable[[], float]:
        step()

        def timed() -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            slowest = torch.tensor((time.perf_counter() - start) / args.steps, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            return float(slowest)

        return timed

    samples = interleave({name: sample(step) for name, (step, _) in made.items()}, args.rounds)
    if dist.get_rank() == 0:
        sent = {name: bytes_ for name, (_, bytes_) in made.items()}
        args.worker.write_text(json.dumps({"samples": samples, "sent": sent}))
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ the parent


def _sent(sent: dict[str, int], kind: str) -> str:
    """The megabytes of one kind of collective, by dtype: ``0.22 bfloat16 + 0.28 float32``."""
    parts = [f"{size / 1e6:.2f} {name.split()[1]}" for name, size in sent.items() if name.split()[0] == kind]
    return " + ".join(parts) or "–"


def main() -> int:
    args = parser().parse_args()
    if args.worker is not None:
        worker(args)
        return 0
    run = Run("distributed", f"A training step of {args.ranks} processes in {args.dtype}", args)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks),
                   __file__, *sys.argv[1:], "--worker", str(answer)]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)}, check=False)
        if done.returncode:
            return done.returncode
        found = json.loads(answer.read_text())
    rows = []
    peer = found["samples"][PEER]
    for name, samples in found["samples"].items():
        key = {"subject": "bert", "kind": "training", "dtype": args.dtype, "variant": name}
        sent = found["sent"][name]
        run.add(Row(key, counts={f"bytes {kind}": size for kind, size in sent.items()}, samples={"step": samples},
                    reference={**key, "variant": PEER} if name != PEER else None))  # fmt: skip
        divided = ratio(samples, peer) if name != PEER else "1"
        rows.append((name, spread(samples), divided, *(_sent(sent, kind) for kind in KINDS)))
    run.table("", ("", "ms: median (range)", "/ DDP", *KINDS), rows)
    drawn = {name: ratio(samples, peer) for name, samples in found["samples"].items() if name != PEER}
    title = f"A training step of {args.ranks} processes"
    return run.finish(lambda path: bars(path, title, {"bert": drawn}, f"time / {PEER}"))


if __name__ == "__main__":
    sys.exit(main())
