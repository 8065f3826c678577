"""The networks of published measurements, by name, at the sizes that were measured, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subjects import NineLayers, without_scripts

Layers = list[nn.Module]
Sizes = tuple[int, ...]
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Loss(nn.Module):
    """A model with its loss: the inputs are the model's, then the targets."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss_fn(self.model(x), targets)


def nine(batch: int, training: bool) -> Call:
    """Nine Linear(8192, 8192): Paddle's guide to mixed precision."""
    x = torch.empty(batch, 8192)
    model = NineLayers(8192)
    return (Loss(model, F.mse_loss), (x, torch.empty(batch, 8192)), {}) if training else (model, (x,), {})


# --------------------------------------------------------------------------------------------- residual networks


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 (with the stride, as in "v1.5") and 1 × 1, beside a shortcut."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first, self.middle = _conv(inputs, inner, 1), _conv(inner, inner, 3, stride, groups)
        self.last = _conv(inner, outputs, 1)
        self.shortcut = _conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.middle(F.relu(self.first(x), inplace=True)), inplace=True)
        return F.relu(self.last(inner) + self.shortcut(x), inplace=True)


def _stage(inputs: int, inner: int, outputs: int, blocks: int, stride: int, groups: int = 1) -> nn.Sequential:
    first = Bottleneck(inputs, inner, outputs, stride, groups)
    return nn.Sequential(first, *(Bottleneck(outputs, inner, outputs, 1, groups) for _ in range(blocks - 1)))


def _body(blocks: Sizes, groups: int = 1, widening: int = 1, strides: Sizes = (1, 2, 2, 2)) -> Layers:
    layers: Layers = [_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for place, (count, stride) in enumerate(zip(blocks, strides, strict=False)):
        outputs = 256 * 2**place
        layers.append(_stage(inputs, 64 * widening * 2**place, outputs, count, stride, groups))
        inputs = outputs
    return layers


def _classifier(body: Layers) -> nn.Module:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _images(model: nn.Module, batch: int, training: bool) -> Call:
    x, targets = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)
    return (Loss(model, F.cross_entropy), (x, targets), {}) if training else (model, (x,), {})


def resnet50(batch: int, training: bool) -> Call:
    return _images(_classifier(_body((3, 4, 6, 3))), batch, training)


def resnext101(batch: int, training: bool) -> Call:
    """ResNeXt-101, 32 groups of 4 channels in the first stage."""
    return _images(_classifier(_body((3, 4, 23, 3), groups=32, widening=2)), batch, training)


# ------------------------------------------------------------------------------------------------------ detectors


class Detector(nn.Module):
    """A single-shot detector: class scores and box offsets from feature maps that grow smaller."""

    def __init__(self, body: Layers, maps: Layers, channels: list[int], boxes: list[int]) -> None:
        super().__init__()
        self.body, self.maps = nn.Sequential(*body), nn.ModuleList(maps)
        pairs = list(zip(channels, boxes, strict=True))
        self.offsets = nn.ModuleList(nn.Conv2d(c, 4 * number, 3, padding=1) for c, number in pairs)
        self.scores = nn.ModuleList(nn.Conv2d(c, 81 * number, 3, padding=1) for c, number in pairs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = [self.body(x)]
        for layer in self.maps:
            found.append(layer(found[-1]))

        def flat(heads: nn.ModuleList, size: int) -> Tensor:
            return torch.cat([head(m).reshape(len(x), size, -1) for head, m in zip(heads, found, strict=True)], 2)

        return flat(self.offsets, 4), flat(self.scores, 81)


def _smaller(inputs: int, inner: int, outputs: int, stride: int) -> nn.Module:
    last = nn.Conv2d(inner, outputs, 3, stride, 1 if stride > 1 else 0, bias=False)
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(*_conv(inputs, inner, 1), relu, last, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def ssd300(batch: int, training: bool) -> Call:
    """SSD 300 on three stages of a ResNet-50, the third without its stride; 8732 boxes."""
    channels = [1024, 512, 512, 256, 256, 256]
    inner = (256, 256, 128, 128, 128)
    steps = zip(channels[:-1], inner, channels[1:], (2, 2, 2, 1, 1), strict=True)
    body = _body((3, 4, 6), strides=(1, 2, 1))
    model = Detector(body, [_smaller(*step) for step in steps], channels, [4, 6, 6, 6, 4, 4])
    return model, (torch.empty(batch, 3, 300, 300),), {}


def ssd512(batch: int, training: bool) -> Call:
    """SSD 512 on a whole ResNet-50, its last two stages and four smaller maps, as in GluonCV; the first map that the
    detector reads is the body's last one here."""
    channels = [2048, 512, 512, 256, 256]
    steps = zip(channels[:-1], (512, 256, 128, 128), channels[1:], (2, 2, 2, 2), strict=True)
    body = _body((3, 4, 6, 3))
    model = Detector(body, [_smaller(*step) for step in steps], channels, [6, 6, 6, 4, 4])
    return model, (torch.empty(batch, 3, 512, 512),), {}


# ---------------------------------------------------------------------------------------------------- transformers


def bert(layers: int, length: int) -> Callable[[int, bool], Call]:
    """BERT-large as it was in 2019: attention in single ops."""

    def make(batch: int, training: bool) -> Call:
        with without_scripts():
            from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
                            attn_implementation="eager")  # fmt: skip
        ids = torch.zeros(batch, length, dtype=torch.int64)
        return BertForMaskedLM(config), (), {"input_ids": ids, **({"labels": ids} if training else {})}

    return make


class Translator(nn.Module):
    """The "big" Transformer for translation with one vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(33712, 1024)
        self.body = nn.Transformer(1024, 16, 6, 6, 4096, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.body(self.tokens(source), self.tokens(target))
        logits = F.linear(states, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def transformer(batch: int, training: bool) -> Call:
    """``batch``: tokens, in sentences of 32."""
    ids = torch.zeros(batch // 32, 32, dtype=torch.int64)
    return Translator(), (ids, ids), {}


NETWORKS: dict[str, Callable[[int, bool], Call]] = {
    "nine_8192": nine, "resnet50": resnet50, "resnext101": resnext101, "ssd300": ssd300, "ssd512": ssd512,
    "bert_large_128": bert(24, 128), "bert_large_384": bert(24, 384), "bert_large_512": bert(24, 512),
    "transformer_big": transformer,
}  # fmt: skip


def make(name: str, batch: int, training: bool, channels_last: bool) -> Call:
    """A network on the meta device with a batch for it."""
    with torch.device("meta"):
        model, args, kwargs = NETWORKS[name](batch, training)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            args = tuple(a.to(memory_format=torch.channels_last) if a.dim() == 4 else a for a in args)
    return model, args, kwargs
