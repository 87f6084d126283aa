"""Scenes as pixels: emoji laid on a background, many images at a time, on the device."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from captions import BACKGROUNDS, Scene
from raster import Sprites, sprite
from torch import Tensor
from torch.nn import functional

THINGS = 2


@dataclass(frozen=True)
class Batch:
    """Scenes as tensors, one row each. background: its colour from 0 to 1; ground: its number in BACKGROUNDS.

    emoji: (n, 2), -1 for none; sprites: where their drawings lie; boxes: (n, 2, 3), size, x and y; flipped: (n, 2).
    """

    emoji: Tensor
    sprites: Tensor
    boxes: Tensor
    flipped: Tensor
    background: Tensor
    ground: Tensor

    def __len__(self) -> int:
        return len(self.emoji)

    def __getitem__(self, rows: Tensor | slice) -> Batch:
        return Batch(*(getattr(self, each.name)[rows] for each in fields(self)))

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, each.name).to(device) for each in fields(self)))

    def cropped(self, share: float, generator: torch.Generator) -> Batch:
        """As seen through a window of this share of the image, at a place of its own for each."""
        middle = (torch.rand(len(self), 1, 2, generator=generator) * 2 - 1) * (1 - share)
        middle = middle.to(self.boxes.device)
        boxes = torch.cat([self.boxes[..., :1], self.boxes[..., 1:] - middle], 2) / share
        return replace(self, boxes=boxes)

    def on_any_colour(self, share: float, generator: torch.Generator) -> Batch:
        """That share of them on a random colour instead."""
        chosen = torch.rand(len(self), 1, generator=generator) < share
        colours = torch.rand(len(self), 3, generator=generator)
        device = self.background.device
        return replace(self, background=torch.where(chosen.to(device), colours.to(device), self.background))


def batch_of(scenes: Sequence[Scene]) -> Batch:
    """On the CPU."""
    emoji = torch.full((len(scenes), THINGS), -1)
    sprites = torch.full((len(scenes), THINGS), -1)
    boxes = torch.zeros(len(scenes), THINGS, 3)
    flipped = torch.zeros(len(scenes), THINGS, dtype=torch.bool)
    names = list(BACKGROUNDS)
    for row, scene in enumerate(scenes):
        for place, thing in enumerate(scene.things):
            emoji[row, place] = thing.emoji
            sprites[row, place] = sprite(thing.emoji, thing.style)
            boxes[row, place] = torch.tensor((thing.size, thing.x, thing.y))
            flipped[row, place] = thing.flipped
    background = torch.tensor([BACKGROUNDS[scene.background] for scene in scenes]).float() / 255
    ground = torch.tensor([names.index(scene.background) for scene in scenes])
    return Batch(emoji, sprites, boxes, flipped, background, ground)


@torch.no_grad()
def compose(batch: Batch, drawings: Sprites, height: int, width: int) -> Tensor:
    """The images, (n, 3, height, width) from -1 to 1, in float32."""
    images = batch.background[:, :, None, None].expand(-1, -1, height, width).contiguous()
    shorter = min(height, width)
    for place in range(THINGS):
        there = batch.sprites[:, place] >= 0
        wanted = batch.boxes[:, place, 0] * shorter
        for side, level in drawings.sizes.items():
            # The smallest that is not enlarged; the largest serves what is larger still.
            fits = wanted <= side if side < max(drawings.sizes) else torch.ones_like(there)
            rows = (there & fits & ~(wanted <= side / 2 if side > min(drawings.sizes) else ~there)).nonzero()[:, 0]
            if len(rows):
                layer = placed(batch[rows], place, level, height, width)
                images[rows] = images[rows] * (1 - layer[:, 3:]) + layer[:, :3]
    return images * 2 - 1


def placed(batch: Batch, place: int, level: Tensor, height: int, width: int) -> Tensor:
    """One emoji of each scene at its place, premultiplied RGBA from 0 to 1."""
    size, x, y = batch.boxes[:, place].unbind(1)
    shorter = min(height, width)
    across, down = width / (size * shorter), height / (size * shorter)
    direction = torch.where(batch.flipped[:, place], -1.0, 1.0)
    zero = torch.zeros_like(size)
    corners = torch.stack([
        torch.stack([direction * across, zero, -direction * across * x], 1), torch.stack([zero, down, -down * y], 1),
    ], 1)
    grid = functional.affine_grid(corners, [len(batch), 4, height, width], align_corners=False)
    return functional.grid_sample(level[batch.sprites[:, place]].float() / 255, grid, align_corners=False)
