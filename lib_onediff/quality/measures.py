"""scikit-image's measures of two images: PSNR, SSIM and CIELAB. It is imported when the first two are compared.

Every WebUI brings it; for users of diffusers it is the extra `quality`.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from ..guard import first_line

# Wang, Bovik, Sheikh, Simoncelli: "Image quality assessment: from error visibility to structural similarity" (2004),
# section III C: a Gaussian window of 11 pixels with a deviation of 1.5, which scikit-image has under these names.
WINDOW = 11
AS_WANG = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}


def require_scikit_image() -> None:
    """Raises ValueError with a sentence where scikit-image is missing or cannot be imported."""
    try:
        from skimage import color, metrics  # noqa: F401
    except Exception as error:  # built for another NumPy, it raises ValueError
        raise ValueError(
            f"Images are compared by scikit-image, which cannot be imported here ({first_line(error)}). Install it "
            "with: pip install scikit-image"
        ) from error


def psnr(first: Tensor, second: Tensor) -> float:
    """The peak signal-to-noise ratio in decibels; infinite for equal images.

    first, second: (height, width, 3) from 0 to 1.
    """
    from skimage.metrics import peak_signal_noise_ratio

    # scikit-image answers infinity too, and warns that it divides by zero.
    if torch.equal(first, second):
        return math.inf
    return float(peak_signal_noise_ratio(first.numpy(), second.numpy(), data_range=1.0))


def ssim(first: Tensor, second: Tensor) -> float:
    """The mean structural similarity (Wang et al. 2004) over the channels: 1 for equal images.

    first, second: float64 (height, width, 3) from 0 to 1. Raises ValueError with a sentence for an image smaller than
    the window.
    """
    from skimage.metrics import structural_similarity

    if min(first.shape[:2]) < WINDOW:
        raise ValueError(f"SSIM needs images of at least {WINDOW}x{WINDOW} pixels.")
    return float(structural_similarity(first.numpy(), second.numpy(), channel_axis=-1, data_range=1.0, **AS_WANG))


def lab_of(pixels: Tensor) -> Tensor:
    """sRGB from 0 to 1 as CIELAB under D65: L* from 0 to 100, then a* and b*, in the last dimension."""
    from skimage.color import rgb2lab

    return torch.from_numpy(rgb2lab(pixels.numpy()))
