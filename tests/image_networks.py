"""Networks for images in the manner of torchvision's, small and with trained-looking batch norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import ResidualBlock


def trained(model: nn.Module) -> nn.Module:
    """Statistics as training leaves them, in eval mode."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return model.eval()


def conv(inner: int, outer: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(True))


def resnet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        conv(3, 16, 2), nn.MaxPool2d(3, 2, 1), ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2),
        ResidualBlock(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip
    return trained(model), torch.randn(2, 3, 64, 64)


class UNet(nn.Module):
    """Two steps down, two up by transposed convolutions, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 16), conv(16, 32), conv(32, 64)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.merge = nn.ModuleList([conv(64, 32), conv(32, 16)])
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        for up, merge, skip in zip(self.up, self.merge, (second, first), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


def unet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return trained(UNet()), torch.randn(2, 3, 32, 32)


class Detector(nn.Module):
    """A single-shot detector: class scores and boxes from two feature maps, boxes decoded around anchors."""

    def __init__(self, classes: int = 5, anchors: int = 3) -> None:
        super().__init__()
        self.classes = classes
        self.stem = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2))
        self.deeper = conv(32, 64, 2)
        self.scores = nn.ModuleList(nn.Conv2d(c, anchors * classes, 3, padding=1) for c in (32, 64))
        self.boxes = nn.ModuleList(nn.Conv2d(c, anchors * 4, 3, padding=1) for c in (32, 64))
        self.register_buffer("anchors", torch.rand(anchors * (16 * 16 + 8 * 8), 4) + 0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = [self.stem(x)]
        maps.append(self.deeper(maps[0]))

        def flat(heads: nn.ModuleList, size: int) -> Tensor:
            parts = [head(m).permute(0, 2, 3, 1).reshape(len(x), -1, size) for head, m in zip(heads, maps, strict=True)]
            return torch.cat(parts, 1)

        scores, offsets = flat(self.scores, self.classes), flat(self.boxes, 4)
        centre = self.anchors[:, :2] + offsets[..., :2] * 0.1 * self.anchors[:, 2:]
        size = self.anchors[:, 2:] * torch.exp(offsets[..., 2:] * 0.2)
        return {"scores": scores.softmax(-1), "boxes": torch.cat([centre - size / 2, centre + size / 2], -1)}


def detector() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return trained(Detector()), torch.randn(2, 3, 64, 64)


IMAGES = {"resnet": resnet, "unet": unet, "detector": detector}
