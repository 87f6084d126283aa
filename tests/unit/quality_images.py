"""Synthetic images, and changes of their quality: noise, less saturation, less contrast."""
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

WIDTH = 160
HEIGHT = 128


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def painted(seed: int = 0) -> Tensor:
    """An image (height, width, 3) with soft colours, hard edges and texture, as in a photograph."""
    generator = random(seed)
    soft = torch.rand(1, 3, 4, 5, generator=generator, dtype=torch.float64)
    patches = torch.rand(1, 3, 8, 10, generator=generator, dtype=torch.float64)
    texture = torch.rand(1, 1, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
    image = 0.55 * functional.interpolate(soft, (HEIGHT, WIDTH), mode="bicubic", align_corners=False)
    image = image + 0.35 * functional.interpolate(patches, (HEIGHT, WIDTH)) + 0.1 * texture
    return image[0].permute(1, 2, 0).clamp(0, 1)


def poster(seed: int = 0) -> Tensor:
    """Patches of pure colours, with black and white, which noise cannot exceed."""
    colours = torch.randint(0, 2, (8, 10, 3), generator=random(seed)).double()
    return colours.repeat_interleave(HEIGHT // 8, 0).repeat_interleave(WIDTH // 10, 1)


def noisy(image: Tensor, deviation: float, seed: int = 1) -> Tensor:
    """An image with normal noise. deviation: the noise's, in units of 1/255. Pixels are clipped to 0 to 1."""
    noise = torch.randn(image.shape, generator=random(seed), dtype=image.dtype)
    return (image + noise * deviation / 255).clamp(0, 1)


def desaturated(image: Tensor, kept: float) -> Tensor:
    """An image mixed with its own grey (ITU-R BT.601), as by PIL's ImageEnhance.Color. kept: the share of colour."""
    grey = (image @ image.new_tensor((0.299, 0.587, 0.114)))[..., None]
    return grey + kept * (image - grey)


def veiled(image: Tensor, veil: float) -> Tensor:
    """An image under a light grey veil: lighter, with less contrast and less saturation. veil: its opacity, 0 to 1."""
    return image * (1 - veil) + 0.8 * veil
