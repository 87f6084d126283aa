"""Compares two images with scikit-image, and puts the difference into words.

Every WebUI installs scikit-image; users of diffusers get it with the extra `quality`.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# The largest value of a channel.
WHITE = 255
# The limits between verdicts were set by images of emoji-sd compared with the host's: 24 prompts, 256x256, 20 steps of
# Euler in float32.
#                        PSNR: least, median, most    SSIM: least, median, most
#   VAE bf16                 54.4   55.0   55.9         0.998   0.998   0.999
#   DeepCache 2              29.9   38.6   44.8         0.963   0.993   0.997
#   DeepCache 3              18.8   33.2   39.2         0.819   0.979   0.993
#   another seed             14.7   19.6   25.4         0.679   0.798   0.863
#   another prompt            5.0    9.5   12.8         0.366   0.582   0.711
# From this PSNR on, in decibels, the verdict is UNSEEN. Else from CLOSE_SSIM on it is FINE_DETAILS. Else it is DETAILS,
# or UNLIKE below DIFFERENT_PSNR.
INVISIBLE_PSNR = 48.0
CLOSE_SSIM = 0.96
DIFFERENT_PSNR = 14.0
# The verdicts: the keys of SENTENCES.
IDENTICAL = "identical"
PALER = "paler"
UNSEEN = "unseen"
FINE_DETAILS = "fine details"
DETAILS = "details"
UNLIKE = "unlike"
VERDICTS = (IDENTICAL, PALER, UNSEEN, FINE_DETAILS, DETAILS, UNLIKE)
SENTENCES = {
    IDENTICAL: "Identical: every pixel is the same.",
    PALER: "The right image is paler: saturation {saturation:+.0%}, contrast {contrast:+.0%}.",
    UNSEEN: "No difference can be seen.",
    FINE_DETAILS: "The same image; only fine details differ.",
    DETAILS: "The same scene, but details differ clearly.",
    UNLIKE: "Two different images.",
}
# For the verdict PALER. Colours are compared on means over squares of SQUARE by SQUARE pixels, because noise alone adds
# saturation and contrast to single pixels. The relative fall of one of the two has to exceed that of the lightness by
# LEAST_FALL; DeepCache lowers them by at most 0.02. Below SAME_SSIM, images differ too much in structure to compare
# their colours.
SQUARE = 8
LEAST_FALL = 0.04
SAME_SSIM = 0.6


@dataclass(frozen=True)
class ImageComparison:
    """How a second image differs from a first.

    psnr: in decibels; infinite for equal images.
    ssim: 1 for equal images (Wang et al. 2004).
    largest: the largest difference of a channel of a pixel, from 0 to 255.
    delta_e: the mean distance in CIELAB; people notice 2.3 between two patches (Mahy et al. 1994).
    contrast, saturation: the relative changes from the first to the second image (-0.1: 10 % less) of the standard
        deviation of L*, and of the root mean square of the chroma; 0 if the first image is flat or grey.
    washed_out: whether the second image has the same structure, and lost clearly more contrast or saturation than
        lightness (see LEAST_FALL).
    """

    psnr: float
    ssim: float
    largest: float
    delta_e: float
    contrast: float
    saturation: float
    washed_out: bool

    @property
    def verdict(self) -> str:
        """The difference in one word, one of VERDICTS (see SENTENCES). PALER comes before all but IDENTICAL."""
        if self.largest == 0:
            return IDENTICAL
        if self.washed_out:
            return PALER
        if self.psnr >= INVISIBLE_PSNR:
            return UNSEEN
        if self.ssim >= CLOSE_SSIM:
            return FINE_DETAILS
        return UNLIKE if self.psnr < DIFFERENT_PSNR else DETAILS

    def sentence(self) -> str:
        """The verdict as a sentence for the user, who sees the first image on the left and the second on the right."""
        return SENTENCES[self.verdict].format(**vars(self))


def compare(first: Any, second: Any) -> ImageComparison:
    """How `second` differs from `first`, an image of the same size.

    Each is a PIL image, or an array or CPU tensor of uint8, (height, width, 3) or (3, height, width). Raises ValueError
    with a sentence for the user if one is anything else, their sizes differ, or scikit-image is missing.
    """
    try:
        from skimage import color, measure, metrics
    except Exception as error:  # a scikit-image that was built for another NumPy raises ValueError
        raise ValueError(
            f"Images cannot be compared without scikit-image ({error}). Install it with: pip install scikit-image"
        ) from error
    one = pixels_of(first)
    other = pixels_of(second)
    if one.shape != other.shape:
        raise ValueError("Only images of the same size can be compared.")
    labs = color.rgb2lab(one), color.rgb2lab(other)
    before, after = (colours_of(measure.block_reduce(lab, (SQUARE, SQUARE, 1), np.mean)) for lab in labs)
    # Values below 0.25 are rounding noise of flat grey images: their relative change means nothing.
    light, contrast, saturation = (
        float(new / old - 1) if old > 0.25 else 0.0 for old, new in zip(before, after, strict=True)
    )
    ssim = metrics.structural_similarity(
        one, other, channel_axis=-1, data_range=WHITE, gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    )
    return ImageComparison(
        math.inf if np.array_equal(one, other) else metrics.peak_signal_noise_ratio(one, other, data_range=WHITE),
        float(ssim), float(np.abs(one.astype(int) - other).max()), float(color.deltaE_cie76(*labs).mean()),
        contrast, saturation, min(contrast, saturation) < min(0.0, light) - LEAST_FALL and ssim >= SAME_SSIM,
    )


def pixels_of(image: Any) -> Any:
    """An image as an array of uint8, (height, width, 3). image: see compare. Raises ValueError with a sentence for the
    user for anything else."""
    pixels = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
    if pixels.ndim == 3 and pixels.shape[0] == 3 != pixels.shape[2]:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ValueError(f"An image must be (height, width, 3) of uint8, not {pixels.shape} of {pixels.dtype}.")
    return pixels


def colours_of(lab: Any) -> tuple[Any, Any, Any]:
    """(mean L*, standard deviation of L*, root mean square chroma) of an image in CIELAB, (height, width, 3)."""
    return lab[..., 0].mean(), lab[..., 0].std(), np.sqrt(np.square(lab[..., 1:]).sum(-1).mean())
