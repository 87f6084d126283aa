"""How near two pictures are: PSNR and SSIM.

scikit-image computes both where it is installed, as it is with A1111 and Forge. Elsewhere our own functions do, which
agree with it to rounding.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

# Wang, Bovik, Sheikh, Simoncelli: "Image quality assessment: from error visibility to structural similarity" (2004),
# section III C: a Gaussian window of 11 pixels with a deviation of 1.5, K1 = 0.01, K2 = 0.03.
WINDOW, DEVIATION = 11, 1.5
K1, K2 = 0.01, 0.03


def psnr(first: Tensor, second: Tensor) -> float:
    """The peak signal-to-noise ratio in decibels, 10 log10(1 / mean squared error); infinite for equal pictures.

    first, second: (height, width, 3) from 0 to 1.
    """
    error = (first - second).square().mean().item()
    return math.inf if error == 0 else 10 * math.log10(1 / error)


def ssim(first: Tensor, second: Tensor) -> float:
    """The mean structural similarity (Wang et al. 2004) over the channels: 1 for equal pictures.

    first, second: float64 (height, width, 3) from 0 to 1. Raises ValueError with a sentence for a picture smaller than
    the window.
    """
    if min(first.shape[:2]) < WINDOW:
        raise ValueError(f"SSIM needs pictures of at least {WINDOW}x{WINDOW} pixels.")
    try:
        from skimage.metrics import structural_similarity
    except ImportError:
        return own_ssim(first, second)
    return float(structural_similarity(
        first.numpy(), second.numpy(), channel_axis=-1, data_range=1.0, gaussian_weights=True, sigma=DEVIATION,
        use_sample_covariance=False, K1=K1, K2=K2,
    ))


def own_ssim(first: Tensor, second: Tensor) -> float:
    """ssim without scikit-image."""
    mean_x, mean_y = blurred(first), blurred(second)
    variances = blurred(first * first) - mean_x * mean_x + blurred(second * second) - mean_y * mean_y
    covariance = blurred(first * second) - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    similarity = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    similarity /= (mean_x * mean_x + mean_y * mean_y + c1) * (variances + c2)
    return similarity.mean().item()


def blurred(values: Tensor) -> Tensor:
    """(height, width, channels) under the window, only where all of it lies inside."""
    distance = torch.arange(WINDOW, dtype=values.dtype) - WINDOW // 2
    weights = torch.exp(-0.5 * (distance / DEVIATION).square())
    weights = weights / weights.sum()
    for dimension in (0, 1):
        # A few times as fast as a convolution with one channel, which torch has no quick way for in float64.
        inside = values.shape[dimension] - WINDOW + 1
        total = torch.zeros_like(values.narrow(dimension, 0, inside))
        for start, weight in enumerate(weights.tolist()):
            total.add_(values.narrow(dimension, start, inside), alpha=weight)
        values = total
    return values
