"""Images of any kind as tensors of one kind."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHANNELS = 3
WHITE = 255


def pixels_of(image: Any) -> Tensor:
    """An image as float64 (height, width, 3), sRGB from 0 to 1, on the CPU.

    image: a PIL image; or an array or tensor, (height, width, 3) or (3, height, width), of uint8 from 0 to 255 or of
    floats from 0 to 1. Raises ValueError with a sentence for anything else, and for floats that are not finite.
    """
    if hasattr(image, "tobytes") and hasattr(image, "convert"):
        return of_image(image)
    values = torch.as_tensor(image).detach().cpu()
    if values.ndim != 3:
        raise ValueError(f"An image has three dimensions, not {values.ndim}.")
    if values.shape[-1] != CHANNELS:
        if values.shape[0] != CHANNELS:
            raise ValueError(f"An image has {CHANNELS} channels, and this is {tuple(values.shape)}.")
        values = values.permute(1, 2, 0)
    if values.dtype == torch.uint8:
        return values.double() / WHITE
    if not values.is_floating_point():
        raise ValueError(f"An image is of uint8 or of floats, not of {values.dtype}.")
    if not values.isfinite().all():
        raise ValueError("The image has pixels that are no numbers.")
    return values.double().clamp(0, 1)


def of_image(image: Any) -> Tensor:
    """pixels_of for a PIL image of any mode."""
    rgb = image.convert("RGB")
    flat = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return flat.view(rgb.height, rgb.width, CHANNELS).double() / WHITE


def pair_of(first: Any, second: Any) -> tuple[Tensor, Tensor]:
    """pixels_of both. Raises ValueError with a sentence where they are not of one size."""
    one, other = pixels_of(first), pixels_of(second)
    if one.shape != other.shape:
        sizes = " and ".join(f"{pixels.shape[1]}x{pixels.shape[0]}" for pixels in (one, other))
        raise ValueError(f"Only images of one size can be compared, not {sizes}.")
    return one, other
