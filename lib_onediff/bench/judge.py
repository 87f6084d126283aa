"""A small classifier of emoji and backgrounds in images, whose features also give a distance between images.

The distance is like LPIPS (Zhang et al. 2018), without weights learned from people: features are normalised over the
channels at each position, and their squared differences averaged over positions and added over stages.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# The width and height in pixels at which the judge classifies an image.
SIDE = 128
# The channels of each stage, and its number of Residual blocks.
WIDTHS = (32, 64, 128, 192)
BLOCKS = (1, 1, 2, 1)
# In a judge's file, "NAME.scale" has the scales of the int8 weight NAME.
SCALE = ".scale"


class Residual(nn.Module):
    """A depthwise convolution and a two-layer perceptron at each position, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 5, padding=2, groups=width, bias=False), nn.BatchNorm2d(width),
            nn.Conv2d(width, 3 * width, 1), nn.GELU(), nn.Conv2d(3 * width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, values: Tensor) -> Tensor:
        return values + self.layers(values)


class Judge(nn.Module):
    """The classifier, as a module. names: of the emoji classes, backgrounds: of the background classes, each in the
    order of its logits."""

    def __init__(self, names: list[str], backgrounds: list[str]) -> None:
        super().__init__()
        self.names = names
        self.backgrounds = backgrounds
        before = 3
        stages = []
        for width, blocks in zip(WIDTHS, BLOCKS, strict=True):
            shrink = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
            stages.append(nn.Sequential(
                shrink, nn.BatchNorm2d(width), nn.GELU(), *(Residual(width) for _ in range(blocks))
            ))
            before = width
        self.stages = nn.ModuleList(stages)
        self.emoji = nn.Linear(before, len(names))
        self.ground = nn.Linear(before, len(backgrounds))

    def values(self, images: Tensor) -> Tensor:
        """Images of uint8 as the network's input: float32 from -1 to 1, on the network's device, at their own size."""
        return images.to(self.emoji.weight.device) / 127.5 - 1

    def features(self, images: Tensor) -> list[Tensor]:
        """The output of each stage, (n, channels, h, w), each with half the height and width of the one before. images:
        the result of values(), of any size."""
        found = []
        for stage in self.stages:
            images = stage(images)
            found.append(images)
        return found

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(logits of the emoji, logits of the background), each (n, classes). images: (n, 3, height, width) of uint8,
        of any size; they are resized to the judge's."""
        last = self.features(at_its_size(self.values(images)))[-1]
        return self.emoji(last.amax((2, 3))), self.ground(last.mean((2, 3)))

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """The distance of each pair of images, (n,); 0 for equal ones. first, second: (n, 3, height, width) of uint8,
        of one size, at which they are compared (they are not resized)."""
        pairs = zip(self.features(self.values(first)), self.features(self.values(second)), strict=True)
        return torch.stack([
            (unit(one.float()) - unit(other.float())).square().sum(1).mean((1, 2)) for one, other in pairs
        ]).sum(0)


def load_judge(file: Path, device: Any = "cpu") -> Judge:
    """A judge in float32, for inference, from a safetensors file: its large weights are int8 with a scale for each
    output channel, and its metadata has the names of the classes."""
    from safetensors import safe_open

    with safe_open(file, "pt") as read:
        lists = read.metadata()
        stored = {name: read.get_tensor(name) for name in read.keys()}
    judge = Judge(lists["names"].split("\n"), lists["backgrounds"].split("\n"))
    weights = {}
    for name in judge.state_dict():
        value = stored[name]
        if name + SCALE in stored:
            value = value.float() * stored[name + SCALE].view(-1, *[1] * (value.ndim - 1))
        weights[name] = value
    judge.load_state_dict(weights)
    return judge.to(device).eval().requires_grad_(False)


def at_its_size(images: Tensor) -> Tensor:
    """Images, (n, 3, height, width), resized with antialiasing to SIDE x SIDE, at which the judge was trained."""
    return functional.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)


def unit(values: Tensor) -> Tensor:
    """Features, (n, channels, h, w), divided by their norm over the channels at each position."""
    return values / (values.norm(dim=1, keepdim=True) + 1e-6)
