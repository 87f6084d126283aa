"""compare() of two images: PSNR, SSIM, delta E and the verdict in words."""
from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from quality_images import desaturated, noisy, painted, poster, veiled
from torch import Tensor

from lib_onediff.core.quality import (
    DETAILS,
    FINE_DETAILS,
    IDENTICAL,
    PALER,
    UNLIKE,
    UNSEEN,
    ImageComparison,
    compare,
)

IMAGES = [painted(0), painted(1), poster(0)]
IDS = ["painted", "painted too", "poster"]


def bytes_of(image: Tensor) -> Tensor:
    """An image of values from 0 to 1 as uint8."""
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def verdict(first: Tensor, second: Tensor) -> str:
    return compare(bytes_of(first), bytes_of(second)).verdict


def test_an_image_is_identical_to_itself_in_every_type() -> None:
    """As a PIL image, with alpha or without, as a NumPy array, and as a tensor with the channels first or last."""
    values = bytes_of(painted())
    image = Image.fromarray(values.numpy())
    forms: list[Any] = [image, image.convert("RGBA"), values.numpy(), values.permute(2, 0, 1)]
    for form in forms:
        found = compare(values, form)
        assert (found.verdict, found.psnr, found.ssim, found.delta_e) == (IDENTICAL, math.inf, 1, 0)


@pytest.mark.parametrize("other, part", [
    (torch.zeros(128, 160), "An image must be"), (torch.zeros(128, 160, 3), "of uint8, not"),
    (torch.zeros(128, 152, 3, dtype=torch.uint8), "of the same size"),
])
def test_images_that_cannot_be_compared_are_refused_in_a_sentence(other: Tensor, part: str) -> None:
    """part: a part of the message of ValueError."""
    with pytest.raises(ValueError, match=part):
        compare(bytes_of(painted()), other)


def test_psnr_ssim_and_delta_e_follow_their_definitions() -> None:
    """The images have one colour each, for which the formulas are written out, or known for delta E."""
    black, grey = (torch.full((16, 16, 3), level, dtype=torch.uint8) for level in (0, 1))
    found = compare(black, grey)
    assert found.psnr == pytest.approx(48.1308, abs=1e-4) and found.largest == 1
    # For two flat images, only the first factor of Wang's formula differs from 1.
    one, other = (torch.full((32, 32, 3), level, dtype=torch.uint8) for level in (128, 64))
    least = (0.01 * 255) ** 2
    expected = (2 * 128 * 64 + least) / (128**2 + 64**2 + least)
    assert compare(one, other).ssim == pytest.approx(expected, rel=1e-6)
    # Lindbloom's values for sRGB's red and blue under D65.
    red, blue = (torch.tensor(colour, dtype=torch.uint8).expand(16, 16, 3) for colour in ((255, 0, 0), (0, 0, 255)))
    lab = torch.tensor([[53.24, 80.09, 67.20], [32.30, 79.19, -107.86]])
    assert compare(red, blue).delta_e == pytest.approx((lab[0] - lab[1]).norm().item(), rel=1e-3)


@pytest.mark.parametrize("why", ["missing", "built for another NumPy"])
def test_without_a_working_scikit_image_the_comparison_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "skimage"]:
        monkeypatch.delitem(sys.modules, name)
    if why == "missing":
        monkeypatch.setitem(sys.modules, "skimage", None)
    else:
        (tmp_path / "skimage.py").write_text("raise ValueError('numpy.dtype size changed')\n")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="^Images cannot be compared without scikit-image .*pip install scikit-image"):
        compare(bytes_of(painted()), bytes_of(painted()))


@pytest.mark.parametrize("image", IMAGES[:2], ids=IDS[:2])
def test_an_image_with_less_saturation_or_contrast_has_the_verdict_paler(image: Tensor) -> None:
    """kept: the share of the saturation that is kept. veiled() mixes the image with light grey. If the first image is
    the veiled one, the second one is not paler."""
    for kept in (0.9, 0.5):
        found = compare(bytes_of(image), bytes_of(desaturated(image, kept)))
        assert found.verdict == PALER and found.saturation == pytest.approx(kept - 1, abs=0.05)
    found = compare(bytes_of(image), bytes_of(veiled(image, 0.1)))
    assert found.verdict == PALER and found.contrast < -0.08
    assert "paler: saturation -" in found.sentence()
    assert verdict(veiled(image, 0.1), image) != PALER


@pytest.mark.parametrize("image", IMAGES, ids=IDS)
def test_images_with_other_changes_are_not_called_paler(image: Tensor) -> None:
    """The changes: noise, brightness, more saturation, another position, another image."""
    for changed in (noisy(image, 2), noisy(image, 16), noisy(image, 32), image * 0.8, image * 1.1,
                    desaturated(image, 1.2), image.roll((3, 5), (0, 1)), image.flip(0), painted(10)):
        assert verdict(image, changed) != PALER


# PSNR and SSIM of real images: the medians of the table in core/quality.py.
@pytest.mark.parametrize(("psnr", "ssim", "expected"), [
    (55.0, 0.998, UNSEEN), (38.6, 0.993, FINE_DETAILS), (33.2, 0.979, FINE_DETAILS), (19.6, 0.798, DETAILS),
    (9.5, 0.582, UNLIKE),
])
def test_the_verdict_follows_from_psnr_and_ssim(psnr: float, ssim: float, expected: str) -> None:
    """In images that are neither identical nor paler."""
    assert ImageComparison(psnr, ssim, 200, 5, 0.0, 0.0, False).verdict == expected
