"""Renders the drawing of every emoji in several sizes, as premultiplied RGBA."""
from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from sources import STYLES, Catalogue
from torch import Tensor
from torch.nn import functional

Pixels = NDArray[numpy.uint8]
LARGEST, SMALLEST = 512, 64


def sprite(emoji: int, style: str) -> int:
    """The index of an emoji's drawing in this style."""
    return emoji * len(STYLES) + STYLES.index(style)


def rasterise(task: tuple[str, int, int]) -> Pixels:
    """The pixels (side, side, 4) of a drawing. task: (the content of the SVG, the side of its view box, the side in
    pixels)."""
    import resvg_py
    from PIL import Image

    body, box, side = task
    if not body:
        return numpy.zeros((side, side, 4), numpy.uint8)
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {box} {box}" width="{side}" height="{side}">{body}</svg>'
    )
    with Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=text)))) as image:
        pixels = numpy.asarray(image.convert("RGBA"), dtype=numpy.uint16)
    alpha = pixels[..., 3:]
    return numpy.concatenate([(pixels[..., :3] * alpha + 127) // 255, alpha], 2).astype(numpy.uint8)


def tasks(catalogue: Catalogue, side: int) -> Iterator[tuple[str, int, int]]:
    for emoji in catalogue.emoji:
        for style in STYLES:
            yield emoji.drawings.get(style, ""), catalogue.view_boxes[style], side


def rasterised(catalogue: Catalogue, side: int, cache: Path | None = None) -> Pixels:
    """The pixels of all drawings, (emoji * styles, side, side, 4). cache: a folder in which they are kept, or None."""
    file = cache / f"sprites_{len(catalogue)}_{side}.npy" if cache else None
    if file and file.is_file():
        return numpy.asarray(numpy.load(file))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        pixels = numpy.stack(list(pool.map(rasterise, tasks(catalogue, side), chunksize=16)))
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        numpy.save(file, pixels)
    return pixels


class Sprites:
    """The drawings on a device. sizes: by side, which is halved from one size to the next, uint8 (drawings, 4, side,
    side)."""

    def __init__(self, pixels: Pixels, device: torch.device) -> None:
        self.sizes: dict[int, Tensor] = {}
        level = torch.from_numpy(numpy.ascontiguousarray(pixels)).to(device).permute(0, 3, 1, 2).contiguous()
        while True:
            self.sizes[level.shape[-1]] = level
            if level.shape[-1] <= SMALLEST:
                break
            level = torch.cat([
                functional.avg_pool2d(part.float(), 2).round().byte() for part in level.split(256)
            ])
