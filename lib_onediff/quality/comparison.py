"""Two images compared: the numbers, and a sentence."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .measures import psnr, require_scikit_image, ssim
from .pixels import WHITE, pair_of
from .tone import Shift, shift_of

# From so many decibels on a difference is not seen: 8-bit rounding alone is at 59 dB.
INVISIBLE = 48.0
CLOSE_SSIM = 0.98
# Below so many decibels two images share no more than two of other prompts do, which are at 10 to 13 dB. Noise that
# nobody overlooks, of 32 in 255, is at 18 dB.
DIFFERENT = 14.0


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

    def sentence(self) -> str:
        """What the numbers mean, for people."""
        if self.identical:
            return "Identical: every pixel is the same."
        if self.washed_out:
            return (
                f"Washed out: saturation {percent(self.shift.saturation)}, contrast {percent(self.shift.contrast)}, "
                f"lightness {signed(self.shift.lightness)}."
            )
        if self.psnr >= INVISIBLE:
            return f"Not to be seen: the largest difference is {self.largest:.0f} of {WHITE}."
        if self.ssim >= CLOSE_SSIM:
            return "The same image, with fine differences."
        if self.psnr < DIFFERENT:
            return f"Different images: a channel differs by {self.mean:.0f} of {WHITE} on average."
        return "The images differ in detail."

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
