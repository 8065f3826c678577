"""The networks that benchmarks train and run, by name, each with a loss, one batch and a tiny form for tests.

No dropout, one seed: the same weights and batches in every variant and every run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness  # noqa: F401  (finds the networks of the tests)
from networks import BertLike, LlamaLike, ResidualBlock

LossFn = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """A size of a network: how to build it, and one batch for it."""

    build: Callable[[], nn.Module]
    example: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Subject:
    """A network to measure. `tiny` is the same in a size for tests; `slow` ones run only if they are asked for."""

    name: str
    title: str
    loss_fn: LossFn
    form: Form
    small: Form
    slow: bool = False

    @property
    def tiny(self) -> Subject:
        name = f"{self.name} (tiny)"
        return Subject(name, name, self.loss_fn, self.small, self.small)

    def make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.form.build()

    def batches(self, number: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return [self.form.example() for _ in range(number)]


# ------------------------------------------------------------------------------------------------------ networks


class NineLayers(nn.Module):
    """Nine linear layers in a row, as in Paddle's guide to mixed precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.Sequential(*(nn.Linear(width, width) for _ in range(9)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linears(x)


class GPTLayer(nn.Module):
    """Norms before attention and feed-forward; every place sees itself and what came before it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.output_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.output_norm(x)), approximate="tanh"))


class GPTLike(nn.Module):
    """A decoder as GPT-2's: learned places, norms first, and the head's weight is the embedding's."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.layers = nn.ModuleList(GPTLayer(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Two convolutions a stage, halved and doubled twice, with what was there before beside what came back."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        first, second, third = channels, 2 * channels, 4 * channels
        self.inside, self.down, self.bottom = _stage(3, first), _stage(first, second), _stage(second, third)
        self.up = nn.ConvTranspose2d(third, second, 2, stride=2)
        self.up_stage = _stage(2 * second, second)
        self.top = nn.ConvTranspose2d(second, first, 2, stride=2)
        self.top_stage = _stage(2 * first, first)
        self.out = nn.Conv2d(first, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.inside(x)
        half = self.down(F.max_pool2d(whole, 2))
        deep = self.bottom(F.max_pool2d(half, 2))
        half = self.up_stage(torch.cat([half, self.up(deep)], dim=1))
        return self.out(self.top_stage(torch.cat([whole, self.top(half)], dim=1)))


def _stage(inputs: int, outputs: int) -> nn.Module:
    def half(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*half(inputs), *half(outputs))


class LSTM(nn.Module):
    """Layers of LSTM and a classifier of their last state."""

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden, num_layers=layers, batch_first=True)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.out(states[:, -1])


def _encoder(hidden: int, heads: int, layers: int, activation: str = "relu") -> nn.Module:
    layer = nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, activation, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def _resnet(channels: int) -> nn.Module:
    stem = (nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    sizes = ((channels, 1), (2 * channels, 2), (4 * channels, 2))
    inputs, blocks = channels, []
    for outputs, stride in sizes:
        blocks.append(ResidualBlock(inputs, outputs, stride))
        inputs = outputs
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Bottleneck(nn.Module):
    """A block of ResNet-50: narrow, 3 x 3, wide, beside what came in."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()

        def part(into: int, out: int, size: int, step: int = 1) -> list[nn.Module]:
            return [nn.Conv2d(into, out, size, step, size // 2, bias=False), nn.BatchNorm2d(out)]

        outputs = 4 * channels
        narrow, inner = part(inputs, channels, 1), part(channels, channels, 3, stride)
        self.body = nn.Sequential(*narrow, nn.ReLU(), *inner, nn.ReLU(), *part(channels, outputs, 1))
        beside = part(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else []
        self.beside = nn.Sequential(*beside)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.beside(x))


def _resnet50_front(channels: int) -> nn.Module:
    """ResNet-50 up to the first block of its second stage, with a classifier."""
    stem = (nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    wide = 4 * channels
    blocks = (Bottleneck(channels, channels, 1), Bottleneck(wide, channels, 1), Bottleneck(wide, 2 * channels, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * wide, 10))


class LlamaBlocks(nn.Module):
    """Layers of a Llama-like decoder on hidden states, with torch's attention and a gated feed-forward."""

    def __init__(self, layers: int, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaBlock(hidden, heads, intermediate) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.output_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        parts = (part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        context = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(x.shape))
        normed = self.output_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


@contextlib.contextmanager
def without_scripts() -> Iterator[None]:
    """To import transformers in: it looks for a package "kernels" and would import benchmarks/kernels.py."""
    path, sys.path = sys.path, [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent.resolve()]
    try:
        yield
    finally:
        sys.path = path


def _hf_bert(hidden: int, layers: int) -> nn.Module:
    with without_scripts():
        from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=4 * hidden,
        vocab_size=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    ))  # fmt: skip


# -------------------------------------------------------------------------------------------- losses and batches


def next_token(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def of_logits(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, targets)


def _regression(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.rand(shape), torch.rand(shape))


def _tokens(batch: int, length: int, vocab: int, each: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """`each`: a target for every place, else a class of four for every sequence."""

    def example() -> tuple[Tensor, Tensor]:
        ids = torch.randint(vocab, (batch, length))
        return ids, torch.randint(vocab, (batch, length)) if each else torch.randint(4, (batch,))

    return example


def _classes(shape: tuple[int, ...], targets: tuple[int, ...], classes: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(shape), torch.randint(classes, targets))


# ------------------------------------------------------------------------------------------------------ the list


def _nine(width: int) -> Subject:
    small = Form(lambda: NineLayers(8), _regression(4, 8))
    form = Form(lambda: NineLayers(width), _regression(256, width))
    return Subject(f"nine_{width}", f"nine linear layers of {width}, batch 256", F.mse_loss, form, small)


def _bert(layers: int, hidden: int, seq: int, vocab: int) -> nn.Module:
    return BertLike(layers, hidden, heads=4, intermediate=4 * hidden, vocab=vocab, seq=seq)


_ALL = (
    _nine(256),
    _nine(512),
    _nine(1024),
    Subject(
        "bert", "BERT-like, 4 layers of 128, batch 8 x 64", F.cross_entropy,
        Form(lambda: _bert(4, 128, 64, 1000), _tokens(8, 64, 1000, each=False)),
        Form(lambda: _bert(1, 16, 8, 50), _tokens(2, 8, 50, each=False)),
    ),
    Subject(
        "gpt", "GPT-like, 4 layers of 128, batch 8 x 64", next_token,
        Form(lambda: GPTLike(4, 128, 4, 1000, 64), _tokens(8, 64, 1000, each=True)),
        Form(lambda: GPTLike(1, 16, 2, 50, 8), _tokens(2, 8, 50, each=True)),
    ),
    Subject(
        "llama", "Llama-like, 4 layers of 128, batch 8 x 64", next_token,
        Form(lambda: LlamaLike(4, 128, 4, 1000), _tokens(8, 64, 1000, each=True)),
        Form(lambda: LlamaLike(1, 16, 2, 50), _tokens(2, 8, 50, each=True)),
    ),
    Subject(
        "encoder", "nn.TransformerEncoder, 4 layers of 128, batch 8 x 64", F.mse_loss,
        Form(lambda: _encoder(128, 4, 4), _regression(8, 64, 128)),
        Form(lambda: _encoder(16, 2, 1), _regression(2, 8, 16)),
    ),
    Subject(
        "resnet", "small ResNet, batch 16 x 32²", F.cross_entropy,
        Form(lambda: _resnet(32), _classes((16, 3, 32, 32), (16,), 10)),
        Form(lambda: _resnet(4), _classes((2, 3, 8, 8), (2,), 10)),
    ),
    Subject(
        "unet", "U-Net, 2 stages down and up, batch 8 x 64²", F.cross_entropy,
        Form(lambda: UNet(16, 4), _classes((8, 3, 64, 64), (8, 64, 64), 4)),
        Form(lambda: UNet(2, 4), _classes((2, 3, 8, 8), (2, 8, 8), 4)),
    ),
    Subject(
        "lstm", "LSTM, 2 layers of 128, batch 16 x 32", F.cross_entropy,
        Form(lambda: LSTM(64, 128, 2), _classes((16, 32, 64), (16,), 10)),
        Form(lambda: LSTM(8, 8, 1), _classes((2, 4, 8), (2,), 10)),
    ),
    Subject(
        "hf_bert", "BertForSequenceClassification, 4 layers of 128, batch 8 x 64", of_logits,
        Form(lambda: _hf_bert(128, 4), _tokens(8, 64, 1000, each=False)),
        Form(lambda: _hf_bert(16, 1), _tokens(2, 8, 1000, each=False)),
        slow=True,
    ),
    Subject(
        "bert_large", "one layer of BERT-large (1024, 16 heads), batch 4 x 128", F.mse_loss,
        Form(lambda: _encoder(1024, 16, 1, "gelu"), _regression(4, 128, 1024)),
        Form(lambda: _encoder(16, 2, 1, "gelu"), _regression(2, 8, 16)),
        slow=True,
    ),
    Subject(
        "llama_2048", "one Llama-like layer of 2048 / 5632, batch 2 x 128", F.mse_loss,
        Form(lambda: LlamaBlocks(1, 2048, 16, 5632), _regression(2, 128, 2048)),
        Form(lambda: LlamaBlocks(1, 16, 2, 32), _regression(2, 8, 16)),
        slow=True,
    ),
    Subject(
        "resnet50", "the front of a ResNet-50, batch 4 x 224²", F.cross_entropy,
        Form(lambda: _resnet50_front(64), _classes((4, 3, 224, 224), (4,), 10)),
        Form(lambda: _resnet50_front(4), _classes((2, 3, 32, 32), (2,), 10)),
        slow=True,
    ),
)  # fmt: skip
SUBJECTS: dict[str, Subject] = {subject.name: subject for subject in _ALL}


# ------------------------------------------------------------------------------------------------- a large model


def bert_base_shapes() -> list[tuple[int, int]]:
    """As many and as large as BERT-base's parameters: 199 tensors, 109.5 million numbers."""
    hidden, inner = 768, 3072
    layer = [(hidden, hidden), (hidden, 1)] * 4 + [(hidden, 1)] * 4
    layer += [(inner, hidden), (inner, 1), (hidden, inner), (hidden, 1)]
    embeddings = [(30522, hidden), (512, hidden), (2, hidden), (hidden, 1), (hidden, 1)]
    return [*embeddings, *(layer * 12), (hidden, hidden), (hidden, 1)]
