"""Decoding with a converted model: the time per token of a Llama-like decoder, one row at a time, compared with fp32.

The decoder takes one token and the keys and values of all earlier ones, and is converted by `convert_model`; the same
`generate` runs the fp32 model and the converted one, interleaved, from the same prompt. One row is bound by the
bandwidth of the memory: weights of half the bytes need half the time. "autocast" casts every weight for every token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_compiler import convert_model
from harness import DTYPES, Ratio, Row, Run, arguments, bars, console, interleave, ratio, sampled, spread

#: layers, hidden, heads, intermediate, vocabulary, longest sequence
SIZES = {"368 million": (24, 1024, 16, 2816, 32000, 64), "tiny": (2, 32, 2, 64, 100, 16)}
#: takes (token, position, keys, values) and returns the logits and this token's keys and values
Step = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


class Layer(nn.Module):
    """One layer for one token: norms, attention to what was kept, a gated feed-forward."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.output_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, position: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        def split(y: Tensor) -> Tensor:
            return y.view(x.shape[0], 1, self.heads, -1).transpose(1, 2)

        normed = self.attention_norm(x)
        query, key = (rotated(split(y), turns) for y in (self.q(normed), self.k(normed)))
        value = split(self.v(normed))
        context = F.scaled_dot_product_attention(
            query, keys.index_copy(2, position, key), values.index_copy(2, position, value), attn_mask=mask
        )
        x = x + self.out(context.transpose(1, 2).reshape(x.shape))
        normed = self.output_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed)), key, value


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * turns[0] + torch.cat([-second, first], dim=-1) * turns[1]


class Decoder(nn.Module):
    """A Llama-like decoder that takes one token at a time."""

    def __init__(self, layers: int, hidden: int, heads: int, intermediate: int, vocab: int, longest: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, intermediate) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.kept = (layers, 1, heads, longest, hidden // heads)
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, self.kept[-1], 2) / self.kept[-1]))

    def forward(self, token: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, new = self.token(token), []
        angles = position.float() * self.inv_freq.float().repeat(2)
        turns = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        mask = torch.zeros(1, 1, 1, self.kept[3], dtype=x.dtype)
        mask = mask.masked_fill(torch.arange(self.kept[3]) > position, torch.finfo(x.dtype).min)
        keys, values = keys.to(x.dtype), values.to(x.dtype)
        for i, layer in enumerate(self.layers):
            x, key, value = layer(x, keys[i], values[i], position, turns, mask)
            new.append((key, value))
        return self.head(self.norm(x)), torch.stack([k for k, _ in new]), torch.stack([v for _, v in new])


@torch.inference_mode()
def generate(step: Step, kept: tuple[int, ...], tokens: int) -> list[int]:
    """Return the tokens that follow token 1, greedily; keys and values stay in the dtype that the step returns."""
    keys, values = torch.zeros(kept), torch.zeros(kept)
    token, found = torch.ones(1, 1, dtype=torch.long), []
    for number in range(tokens):
        position = torch.tensor([number])
        logits, key, value = step(token, position, keys, values)
        keys[:, :, :, number : number + 1], values[:, :, :, number : number + 1] = key, value
        token = logits[:, -1].argmax(-1, keepdim=True)
        found.append(int(token))
    return found


def steps(model: Decoder, dtype: torch.dtype) -> dict[str, Step]:
    example = (torch.ones(1, 1, dtype=torch.long), torch.tensor([1]), torch.zeros(model.kept), torch.zeros(model.kept))

    def cast(*args: Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return model(*args)

    return {"fp32": model, "autocast": cast, "converted": convert_model(model, example, dtype=dtype)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    made.add_argument("--size", choices=SIZES, default="368 million")
    made.add_argument("--tokens", type=int, default=32)
    made.add_argument("--variants", nargs="+", choices=("autocast", "converted"), default=["converted"])
    return arguments(made, rounds=5, threads=1)


def main() -> int:
    args = parser().parse_args()
    run = Run("decode", "Decoding with a converted model", args)
    torch.manual_seed(0)
    model = Decoder(*SIZES[args.size]).eval()
    table: list[list[object]] = []
    drawn: dict[str, dict[str, Ratio | float]] = {}
    for dtype in args.dtypes:
        with console.status(f"decoding, {dtype}"):
            wanted = {k: step for k, step in steps(model, DTYPES[dtype]).items() if k in ("fp32", *args.variants)}
            cases = {name: sampled(partial(generate, step, model.kept, args.tokens)) for name, step in wanted.items()}
            taken = interleave(cases, args.rounds)
        samples = {name: [seconds / args.tokens for seconds in found] for name, found in taken.items()}
        reference: dict[str, str | int] = {"what": "token", "dtype": dtype, "variant": "fp32"}
        for name, seconds in samples.items():
            key = {**reference, "variant": name}
            run.add(Row(key, samples={"seconds": seconds}, reference=None if key == reference else reference))
            divided = None if key == reference else ratio(seconds, samples["fp32"])
            table.append([f"{dtype}, {name}", spread(seconds), divided or ""])
            if divided is not None:
                drawn.setdefault(dtype, {})[name] = divided
    title = f"{args.tokens} tokens, {args.size} parameters, one row: time per token"
    run.table(title, ["", "ms: median (range)", "/ fp32"], table)

    def plot(path: Path) -> None:
        bars(path, "Decoding: time per token divided by fp32's", drawn, "× fp32, lower is better", log=True)

    return run.finish(plot)


if __name__ == "__main__":
    sys.exit(main())
