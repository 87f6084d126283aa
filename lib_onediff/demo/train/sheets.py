"""Images side by side in one file."""
from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional


def save_sheet(images: Tensor, file: Path, columns: int, side: int) -> None:
    """images: (n, 3, height, width) from -1 to 1; each is drawn `side` pixels wide and high."""
    from PIL import Image

    small = functional.interpolate(images.float().cpu(), (side, side), mode="bilinear", antialias=True)
    pixels = ((small.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    rows = -(-len(pixels) // columns)
    sheet = torch.full((3, rows * side, columns * side), 255, dtype=torch.uint8)
    for number, image in enumerate(pixels):
        top, left = number // columns * side, number % columns * side
        sheet[:, top : top + side, left : left + side] = image
    Image.fromarray(sheet.permute(1, 2, 0).numpy()).save(file)
