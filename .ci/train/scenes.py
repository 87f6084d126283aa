"""Renders scenes, many images at a time, on a device."""
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
    """n scenes as tensors.

    background: (n, 3), the colour, from 0 to 1.
    ground: (n,), the index of the background in BACKGROUNDS.
    emoji: (n, 2), the index of each emoji, -1 for none.
    sprites: (n, 2), the index of each drawing.
    boxes: (n, 2, 3), the size, x and y of each emoji.
    flipped: (n, 2), whether each emoji is mirrored.
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
        """The scenes cropped to this part of the image's sides, at a random position for each scene."""
        middle = (torch.rand(len(self), 1, 2, generator=generator) * 2 - 1) * (1 - share)
        middle = middle.to(self.boxes.device)
        boxes = torch.cat([self.boxes[..., :1], self.boxes[..., 1:] - middle], 2) / share
        return replace(self, boxes=boxes)

    def on_any_colour(self, share: float, generator: torch.Generator) -> Batch:
        """The scenes, of which this part gets a random colour as background."""
        chosen = torch.rand(len(self), 1, generator=generator) < share
        colours = torch.rand(len(self), 3, generator=generator)
        device = self.background.device
        return replace(self, background=torch.where(chosen.to(device), colours.to(device), self.background))


def batch_of(scenes: Sequence[Scene]) -> Batch:
    """Scenes as a Batch on the CPU."""
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
            # Use the smallest level that need not be enlarged; the largest one for everything larger.
            fits = wanted <= side if side < max(drawings.sizes) else torch.ones_like(there)
            rows = (there & fits & ~(wanted <= side / 2 if side > min(drawings.sizes) else ~there)).nonzero()[:, 0]
            if len(rows):
                layer = placed(batch[rows], place, level, height, width)
                images[rows] = images[rows] * (1 - layer[:, 3:]) + layer[:, :3]
    return images * 2 - 1


def placed(batch: Batch, place: int, level: Tensor, height: int, width: int) -> Tensor:
    """An image for each scene with one of its emoji at its position: premultiplied RGBA from 0 to 1, (n, 4, height,
    width). place: which of the scene's emoji. level: the drawings in one size."""
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
