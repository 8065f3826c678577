"""How fast low precision runs on this CPU: training steps and inference beside fp32 and `torch.autocast`.

Four networks: Paddle's nine linear layers (512 wide, batch 256), BertForSequenceClassification (transformers) and
nn.TransformerEncoder (both 4 layers of 128, 4 heads, 512 inside, no dropout, batch 8 x 64), and a small ResNet.

A training step is forward, loss, backward, unscaling and optimizer (fused SGD); the peer is `torch.autocast` with
`torch.amp.GradScaler`, and fp32 has neither. All run in turns, in one process; a ratio is of medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from common import DTYPES, NineLayers, console, interleave, print_header, print_table, sampled, spread, write_results
from torch import Tensor, nn
from train_step import LossFn, Problem, by_hand, make_optimizer, ours

from amp_compiler import amp_compile
from networks import ResidualBlock

SIZE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        **SIZE, vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4
    )
    return BertForSequenceClassification(config)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def resnet() -> nn.Module:
    blocks = (ResidualBlock(32, 32, 1), ResidualBlock(32, 64, 2), ResidualBlock(64, 128, 2))
    stem = (nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def problems(names: list[str]) -> list[Problem]:
    torch.manual_seed(0)

    def problem(
        title: str, make: Callable[[], nn.Module], loss: LossFn, x: Tensor, y: Tensor
    ) -> Problem:
        def seeded() -> nn.Module:
            torch.manual_seed(0)
            return make()

        return Problem(title, seeded, loss, [(x, y)])

    def classify(out: object, y: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, y)  # type: ignore[attr-defined]

    sequence = torch.randn(8, 64, 128)
    found = {
        "nine": problem(
            "nine linear layers", lambda: NineLayers(512), F.mse_loss, torch.rand(256, 512), torch.rand(256, 512)
        ),
        "bert": problem("BERT", bert, classify, torch.randint(1000, (8, 64)), torch.randint(4, (8,))),
        "encoder": problem("TransformerEncoder", encoder, F.mse_loss, sequence, torch.randn(8, 64, 128)),
        "resnet": problem(
            "small ResNet", resnet, F.cross_entropy, torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        ),
    }
    return [found[name] for name in names]


def training(problem: Problem, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    optimize = partial(make_optimizer, "sgd", True)
    return {
        "fp32": by_hand(problem, optimize, None).step,
        "autocast": by_hand(problem, optimize, dtype).step,
        "O2": ours(problem, optimize, "O2", dtype).step,
    }


def inference(problem: Problem, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    model = problem.make().eval()
    compiled = amp_compile(problem.make().eval(), "O2", dtype=dtype)
    x, _ = problem.batches[0]

    @torch.inference_mode()
    def cast() -> object:
        with torch.autocast("cpu", dtype):
            return model(x)

    return {
        "fp32": torch.inference_mode()(lambda: model(x)),
        "autocast": cast,
        "O2": torch.inference_mode()(lambda: compiled(x)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("nine", "bert", "encoder", "resnet")
    parser.add_argument("--networks", nargs="+", choices=names, default=list(names))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kind", nargs="+", choices=("training", "inference"), default=["training", "inference"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = print_header("Low precision on this CPU")
    records: list[dict[str, object]] = []
    table: list[list[object]] = []
    for problem in problems(args.networks):
        for kind in args.kind:
            for dtype in args.dtype:
                torch._dynamo.reset()
                make = training if kind == "training" else inference
                with console.status(f"{problem.name}, {kind}, {dtype}"):
                    cases = {name: sampled(run) for name, run in make(problem, DTYPES[dtype]).items()}
                    samples = interleave(cases, args.rounds)
                fp32, peer, own = (statistics.median(samples[name]) for name in ("fp32", "autocast", "O2"))
                table.append([
                    problem.name, kind, dtype, *(spread(samples[name]) for name in samples),
                    f"{own / fp32:.2f}", f"{peer / fp32:.2f}", f"{peer / own:.1f}",
                ])  # fmt: skip
                records += [
                    {"network": problem.name, "kind": kind, "dtype": dtype, "variant": name,
                     "seconds": statistics.median(taken), "seconds_min": min(taken), "seconds_max": max(taken),
                     "fp32_ratio": statistics.median(taken) / fp32, "autocast_ratio": statistics.median(taken) / peer}
                    for name, taken in samples.items()
                ]  # fmt: skip
    columns = ["", "", "dtype", "fp32 ms", "autocast ms", "O2 ms", "O2/fp32", "autocast/fp32", "autocast/O2"]
    print_table("Medians (range)", columns, table)
    write_results("speed", facts, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
