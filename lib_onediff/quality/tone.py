"""What happened to an image's lightness, contrast and saturation, and whether that makes it washed out.

All three are measured in CIELAB on means of squares of a few pixels, where noise has all but gone: noise alone makes
grey pixels colourful and flat ones contrasty.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .measures import lab_of

SQUARE = 8
# A fall counts from so much on, relative and in CIELAB's units. People notice 2.3 of those between two patches (Mahy,
# Van Eycken, Oosterlinck: "Evaluation of uniform color spaces", 1994); of a whole image less than half will do. What
# does not wash out loses less: of emoji-sd's images (comparison.INVISIBLE) DeepCache 2, 3 and 5 lost at most 0.021, VAE
# bf16 0.002, another seed none.
LEAST_FALL, LEAST_UNITS = 0.04, 1.0
# Colour or contrast of so few units is none: grey has as much from rounding.
NOTHING = 0.25
SEED = 0


@dataclass(frozen=True)
class Tone:
    """An image's mean lightness L*, its contrast (the standard deviation of L*) and its saturation (the root mean
    square of the chroma C*ab), all in CIELAB's units."""

    lightness: float
    contrast: float
    saturation: float


@dataclass(frozen=True)
class Shift:
    """What became of the first image's tone in the second. contrast_fall, saturation_fall: how much of it was lost
    at least, relative, whatever noise and what the images show besides may have done to the plain numbers."""

    first: Tone
    second: Tone
    contrast_fall: float
    saturation_fall: float

    @property
    def lightness(self) -> float:
        """In units of L*, positive where the second image is lighter."""
        return self.second.lightness - self.first.lightness

    @property
    def contrast(self) -> float:
        """Relative: -0.1 where the second image has a tenth less."""
        return relative(self.second.contrast, self.first.contrast)

    @property
    def saturation(self) -> float:
        """Relative, as contrast."""
        return relative(self.second.saturation, self.first.saturation)

    @property
    def washed_out(self) -> bool:
        """Whether the second image lost saturation or contrast, more than it gained of the other and more than it
        got darker, beyond what is seen and what noise does."""
        # A darker image has less of both, in proportion, and is not pale.
        darker = -min(0.0, relative(self.second.lightness, self.first.lightness))
        saturation = counts(self.saturation_fall - darker, self.first.saturation)
        contrast = counts(self.contrast_fall - darker, self.first.contrast)
        return (saturation and self.contrast < -self.saturation) or (contrast and self.saturation < -self.contrast)


def relative(after: float, before: float) -> float:
    return (after - before) / before if before else 0.0


def counts(fall: float, before: float) -> bool:
    """Whether a relative fall is one that people see."""
    return fall > LEAST_FALL and fall * before > LEAST_UNITS


def shift_of(first: Tensor, second: Tensor) -> Shift:
    """What became of the first image's tone in the second; both float64 (height, width, 3), sRGB from 0 to 1."""
    # What noise of this strength does by itself, because it cannot go beyond black, white and pure colours.
    signs = torch.randint(0, 2, first.shape[:2], generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    noisy = (first + fine_part(second - first) * signs[..., None]).clamp(0, 1)
    before, after, noise = (coarse(lab_of(pixels)) for pixels in (first, second, noisy))
    falls = []
    for part_of in (lightness_of, colour_of):
        one, other, blurred = (part_of(squares) for squares in (before, after, noise))
        falls.append(loss(one, other) - max(0.0, loss(one, blurred)))
    return Shift(tone_of(before), tone_of(after), *falls)


def tone_of(squares: Tensor) -> Tone:
    """The tone of CIELAB values in the last dimension."""
    contrast, saturation = (
        part_of(squares).square().sum(-1).mean().sqrt().item() for part_of in (lightness_of, colour_of)
    )
    return Tone(squares[..., 0].mean().item(), contrast, saturation)


def lightness_of(squares: Tensor) -> Tensor:
    """L* without its mean, in a last dimension of one."""
    return squares[..., :1] - squares[..., :1].mean()


def colour_of(squares: Tensor) -> Tensor:
    """a* and b*."""
    return squares[..., 1:]


def loss(before: Tensor, after: Tensor) -> float:
    """How much smaller after is than before, relative, counting only what is alike in both.

    It is 1 - k for after = k before. Whatever is in one of them alone, such as noise or another detail, makes it
    smaller: an image that has merely less noise has lost nothing, nor has one that shows something else.
    """
    alike, energy = (before * after).sum(-1).mean().item(), after.square().sum(-1).mean().item()
    if energy < NOTHING**2:
        return -relative(energy**0.5, before.square().sum(-1).mean().item() ** 0.5)
    return 1 - energy / alike if alike > 0 else 0.0


def coarse(values: Tensor) -> Tensor:
    """The means of squares of an image's (height, width, channels)."""
    planes = values.permute(2, 0, 1)[None]
    return functional.avg_pool2d(planes, SQUARE, ceil_mode=True, count_include_pad=False)[0].permute(1, 2, 0)


def fine_part(values: Tensor) -> Tensor:
    """values without the mean of each square."""
    planes = coarse(values).permute(2, 0, 1)[None]
    grown = planes.repeat_interleave(SQUARE, 2).repeat_interleave(SQUARE, 3)
    return values - grown[0, :, :values.shape[0], :values.shape[1]].permute(1, 2, 0)
