"""Two images compared: the numbers, a sentence, and where they differ as an image."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .measures import psnr, require_scikit_image, ssim
from .pixels import WHITE, pair_of
from .tone import Shift, shift_of

# Where one verdict ends and the next begins was measured on pairs of images of emoji-sd, the first of each the host's:
# 24 held-out prompts (8 for VAE bf16 and another seed), 256x256, 20 steps of Euler, float32, on a CPU, drawn as by
#   python -m lib_onediff.bench quality --images 24 --steps 20 --dtype fp32
#                        PSNR: least, median, most    SSIM: least, median, most
#   OneDiff, exact           91.5   94.1  101.1         1.000   1.000   1.000
#   VAE bf16                 54.4   55.0   55.9         0.998   0.998   0.999
#   DeepCache 2              29.9   38.6   44.8         0.963   0.993   0.997
#   DeepCache 3              18.8   33.2   39.2         0.819   0.979   0.993
#   DeepCache 5              17.5   26.1   35.1         0.777   0.922   0.984
#   another seed             14.7   19.6   25.4         0.679   0.798   0.863
#   another prompt            5.0    9.5   12.8         0.366   0.582   0.711
# A difference of 1 of 255 everywhere is 48.1 dB, and a rounded VAE is above it; no cache comes near.
INVISIBLE = 48.0
# All of DeepCache 2's images are above it, 23 of 24 of DeepCache 3's, where outlines stay and a shade moves, and 2 of
# 24 of DeepCache 5's; in the others, seen beside the host's, a shape has changed.
CLOSE_SSIM = 0.96
# Between another seed's images, which show the same, and another prompt's. Noise that nobody overlooks, of 32 in 255,
# is at 18 dB.
DIFFERENT = 14.0
VERDICTS = IDENTICAL, PALER, UNSEEN, FINE_DETAILS, DETAILS, UNLIKE = (
    "identical", "paler", "unseen", "fine details", "details", "unlike",
)
SENTENCES = {
    IDENTICAL: "Identical: every pixel is the same.",
    PALER: "The second image is paler: saturation {saturation}, contrast {contrast}, lightness {lightness}.",
    UNSEEN: "No difference can be seen: colours differ by at most {largest} of {white}.",
    FINE_DETAILS: "The same image; only fine details differ.",
    DETAILS: "The same scene, but details differ clearly.",
    UNLIKE: "Two different images.",
}
# Of a difference that is shown.
MOST_GAIN = 64


@dataclass(frozen=True)
class ImageComparison:
    """How the second image differs from the first. psnr in decibels; ssim up to 1; largest and mean: absolute
    differences of channels, of 255; shift: of lightness, contrast and saturation."""

    psnr: float
    ssim: float
    largest: float
    mean: float
    shift: Shift

    @property
    def identical(self) -> bool:
        return self.largest == 0

    @property
    def washed_out(self) -> bool:
        """Whether the second image is paler than the first, beyond noise; see tone.Shift.washed_out."""
        return self.shift.washed_out

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.identical:
            return IDENTICAL
        if self.washed_out:
            return PALER
        if self.psnr >= INVISIBLE:
            return UNSEEN
        if self.ssim >= CLOSE_SSIM:
            return FINE_DETAILS
        return UNLIKE if self.psnr < DIFFERENT else DETAILS

    def sentence(self) -> str:
        """What the numbers mean, for people."""
        return SENTENCES[self.verdict].format(
            saturation=percent(self.shift.saturation), contrast=percent(self.shift.contrast),
            lightness=signed(self.shift.lightness), largest=f"{self.largest:.0f}", white=WHITE,
        )

    def as_dict(self) -> dict[str, Any]:
        """The numbers under plain names, for JSON; an infinite PSNR is None."""
        return {
            "psnr": self.psnr if math.isfinite(self.psnr) else None, "ssim": self.ssim, "largest": self.largest,
            "mean": self.mean, "lightness": self.shift.lightness, "contrast": self.shift.contrast,
            "saturation": self.shift.saturation, "washed_out": self.washed_out,
        }


def compare(first: Any, second: Any) -> ImageComparison:
    """Compare two images of one size; see pixels.pixels_of for what an image may be.

    Raises ValueError with a sentence for what cannot be compared, and without scikit-image.
    """
    require_scikit_image()
    one, other = pair_of(first, second)
    difference = (one - other).abs() * WHITE
    return ImageComparison(
        psnr=psnr(one, other), ssim=ssim(one, other), largest=difference.max().item(), mean=difference.mean().item(),
        shift=shift_of(one, other),
    )


def percent(share: float) -> str:
    """A relative change for people: -0.123 is "-12 %"."""
    return f"{rounded(100 * share, 0)} %"


def signed(change: float) -> str:
    """A change in units of L* for people."""
    return rounded(change, 1)


def rounded(value: float, digits: int) -> str:
    """With its sign, but for what is nothing after rounding."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


@dataclass(frozen=True)
class Difference:
    """image: a PIL image of the absolute difference of each channel times gain, black where the images agree."""

    image: Any
    gain: int


def difference_map(first: Any, second: Any, gain: int | None = None) -> Difference:
    """The difference of two images of one size (see pixels.pixels_of), as an image.

    gain: how much it is amplified; by default the highest power of two, up to 64, at which nothing is cut off.
    """
    from PIL import Image

    one, other = pair_of(first, second)
    difference = (one - other).abs()
    if gain is None:
        gain = gain_for(difference.max().item())
    values = (difference * (gain * WHITE)).round().clamp(0, WHITE).to(torch.uint8).contiguous()
    data = bytes(values.flatten().tolist())
    return Difference(Image.frombytes("RGB", (values.shape[1], values.shape[0]), data), gain)


def gain_for(largest: float) -> int:
    """The highest power of two up to MOST_GAIN that keeps largest times it at 1 or below."""
    gain = 1
    while gain < MOST_GAIN and 2 * gain * largest <= 1:
        gain *= 2
    return gain
