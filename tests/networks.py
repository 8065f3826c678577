"""Small networks that many tests and the benchmarks share. No dropout, one seed, the same every time.

`NETWORKS` maps a name to a function that makes (model, example arguments). Floating-point arguments
require a gradient, so that a test can compare gradients of inputs too.

>>> model, args = NETWORKS["dense"]()
>>> model(*args).shape
torch.Size([4, 8])
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]
NETWORKS: dict[str, Callable[[], Made]] = {}

# torch.autocast itself fails on these in fp16 on CPU: oneDNN has no fp16 LSTM for training.
BF16_ONLY = frozenset({"lstm"})


def network(make: Callable[[], Made]) -> Callable[[], Made]:
    """Register a maker under its own name and give it a fixed seed; the caller's random state is kept."""

    @functools.wraps(make)
    def seeded() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    NETWORKS[make.__name__] = seeded
    return seeded


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


class Attention(nn.Module):
    """Multi-head self-attention over `F.scaled_dot_product_attention`."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def split(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        return x.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        context = F.scaled_dot_product_attention(query, key, value)
        return self.out(context.transpose(1, 2).reshape(x.shape))


class EncoderLayer(nn.Module):
    """BERT's layer: attention and feed-forward, each with a residual and a layer norm after it."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.down(F.gelu(self.up(x))))


class BertLike(nn.Module):
    """Our own BERT for classification: embeddings, `layers` encoder layers, pooler, classifier.

    `seq` is the longest sequence that it takes.
    """

    def __init__(
        self,
        layers: int = 4,
        hidden: int = 128,
        heads: int = 4,
        intermediate: int = 512,
        vocab: int = 1000,
        seq: int = 64,
        classes: int = 4,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(seq, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads, intermediate) for _ in range(layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.token(ids) + self.position(positions))
        for layer in self.layers:
            x = layer(x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class RMSNorm(nn.Module):
    """Computes in fp32 and gives back the dtype that it got, as Llama's does."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


class LlamaLayer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.output_norm = RMSNorm(hidden), RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, 2 * hidden, bias=False), nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + torch.cat((-t[..., 1::2], t[..., ::2]), -1) * sin for t in (qkv[0], qkv[1]))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        x = x + self.out((weights @ qkv[2]).transpose(1, 2).reshape(batch, length, hidden))
        h = self.output_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LlamaLike(nn.Module):
    """A decoder whose code asks for dtypes all over: norms, rotary tables, the mask, the softmax."""

    def __init__(self, layers: int = 4, hidden: int = 128, heads: int = 4, vocab: int = 1000) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(LlamaLayer(hidden, heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        width = hidden // heads
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, width, 2) / width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        length = ids.shape[1]
        angles = torch.arange(length, device=x.device).float()[:, None] * self.inv_freq.float().repeat(2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        later = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), 1)
        mask = torch.zeros(length, length, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(later, torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, mask, cos, sin)
        return self.head(self.norm(x)).float()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.third = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.first(x)))
        return self.third(F.gelu(self.second(x)))


class ConvBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first_norm(self.first(x))), 2)
        x = F.relu(self.second_norm(self.second(x)))
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


class TorchDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.out = nn.Linear(32, 20)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        # Said, not found out: nn.TransformerDecoder would compare the mask in Python, a graph break.
        return self.out(self.decoder(target, memory, tgt_mask=self.mask, tgt_is_causal=True))


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(50, 16, mode="mean")
        self.out = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return F.log_softmax(self.out(self.words(ids)), dim=-1)


class MaskedAttention(nn.Module):
    """Attention spelled out: matmul, masked_fill, softmax, matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, 4, hidden // 4).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(hidden // 4)
        scores = scores.masked_fill(mask[:, None, None, :], -1e4)
        context = torch.matmul(scores.softmax(dim=-1), value)
        return self.out(context.transpose(1, 2).reshape(batch, length, hidden))


class SharedWeights(nn.Module):
    """The output layer's weight is the embedding's, and one linear runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(40, 32)
        self.mix = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.out = nn.Linear(32, 40, bias=False)
        self.out.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for _ in range(3):
            x = x + torch.tanh(self.mix(x))
        return self.out(self.norm(x))


class GraphBreak(nn.Module):
    """Dynamo captures this in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(self.norm(x))


class Quantize(torch.autograd.Function):
    """Round to quarters. Its gradient is a straight-through estimator, not the derivative (0 almost
    everywhere): it passes where |x| < 1 and is scaled by 0.5 elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, grad, grad * 0.5)


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Quantize.apply(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], layers: int) -> None:
        super().__init__()
        self.rnn = kind(16, 32, num_layers=layers, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.out(states[:, -1])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.inside(x))
        deep = F.silu(self.norm(self.down(skip)))
        return self.out(torch.cat([skip, self.up(deep)], dim=1))


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


class MixerBlock(nn.Module):
    """Mixes across patches, then across channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.patch_norm = nn.LayerNorm(channels)
        self.patch = nn.Sequential(nn.Linear(patches, 16), nn.GELU(), nn.Linear(16, patches))
        self.channel_norm = nn.LayerNorm(channels)
        self.channel = nn.Sequential(nn.Linear(channels, 32), nn.GELU(), nn.Linear(32, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patch(self.patch_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.channel_norm(x))


class FunctionalMix(nn.Module):
    """Ops of every class in one forward: white, black, promoting, exact, indexing, scalars and 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.bias = nn.Parameter(torch.randn(3, 8, 16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("picks", torch.tensor([3, 0, 2, 2, 1]))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("bij,bjk->bik", x, self.weight)
        mixed = torch.baddbmm(self.bias, low, self.weight, beta=0.5, alpha=2.0)
        weights = F.softmax(mixed, dim=-1)
        total = torch.cumsum(weights * low, dim=1)
        root = (total.pow(2) + 1e-3).log().mul(0.25)
        root = root * (1 + 0.1 * weights).prod(dim=-1, keepdim=True)  # prod is fp32 under autocast on CPU
        joined = torch.cat([low, root], dim=-1)  # low and fp32: promotes
        pair = torch.stack([mixed, low * self.scale])  # the 0-dim tensor does not promote
        chosen = torch.where(pair[0] > 0, pair[0], pair[1] / 3)
        rows = joined.index_select(1, self.picks)
        gathered = chosen.gather(1, self.picks.view(1, 5, 1).expand(3, 5, 16))
        picked = low[:, self.picks, :8] - 2.0
        both = torch.cat([rows, gathered, picked], dim=-1)
        return torch.addcmul(both, both, torch.sigmoid(both), value=0.1).clamp(-50, 50).sum(dim=1)


@network
def dense() -> Made:
    return Dense(), (floats(4, 16),)


@network
def conv_bn() -> Made:
    return ConvBatchNorm(), (floats(4, 3, 8, 8),)


@network
def encoder() -> Made:
    model = BertLike(layers=2, hidden=32, heads=4, intermediate=64, vocab=50, seq=8)
    return model, (torch.randint(50, (2, 8)),)


@network
def llama() -> Made:
    return LlamaLike(layers=2, hidden=32, heads=4, vocab=50), (torch.randint(50, (2, 8)),)


@network
def torch_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (floats(2, 8, 32),)


@network
def decoder() -> Made:
    return TorchDecoder(), (floats(2, 6, 32), floats(2, 5, 32))


@network
def embedding() -> Made:
    return BagOfWords(), (torch.randint(50, (4, 6)),)


@network
def masked_attention() -> Made:
    mask = torch.arange(8) >= torch.tensor([[5], [8]])
    return MaskedAttention(), (floats(2, 8, 32), mask)


@network
def shared_weights() -> Made:
    return SharedWeights(), (torch.randint(40, (2, 8)),)


@network
def graph_break() -> Made:
    return GraphBreak(), (floats(4, 16),)


@network
def custom_function() -> Made:
    return CustomFunction(), (floats(4, 16),)


@network
def lstm() -> Made:
    return Recurrent(nn.LSTM, 2), (floats(2, 5, 16),)


@network
def gru() -> Made:
    return Recurrent(nn.GRU, 1), (floats(2, 5, 16),)


@network
def unet() -> Made:
    return UNet(), (floats(2, 3, 8, 8),)


@network
def resnet() -> Made:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    model = nn.Sequential(ResidualBlock(3, 8, 2), ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), *head)
    return model, (floats(2, 3, 8, 8),)


@network
def mlp_mixer() -> Made:
    model = nn.Sequential(MixerBlock(8, 16), MixerBlock(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    return model, (floats(2, 8, 16),)


@network
def functional_mix() -> Made:
    return FunctionalMix(), (floats(3, 8, 16),)
