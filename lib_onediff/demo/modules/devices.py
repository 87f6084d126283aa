"""The device and precision that the host computes with, and its check for NaN."""
from __future__ import annotations

import gc

import torch
from torch import Tensor

cpu = torch.device("cpu")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.float16 if device.type == "cuda" else torch.float32


class NansException(Exception):
    """The model produced NaN or infinity; the message is a sentence for the user."""


def test_for_nans(values: Tensor, where: str) -> None:
    """Raise NansException when values has an element that is not finite; where is "unet" or "vae"."""
    if torch.isfinite(values).all():
        return
    part = {"unet": "UNet", "vae": "VAE"}.get(where, where)
    raise NansException(
        f"The {part} produced numbers that are not finite (NaN or infinity), so there is no image. "
        "The model file may be damaged, or the model may need a higher precision."
    )


def torch_gc() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
