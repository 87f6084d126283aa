"""Two images compared."""
from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from quality_images import HEIGHT, WIDTH, desaturated, noisy, painted, poster, veiled
from torch import Tensor
from torch.nn import functional

from lib_onediff.quality import ImageComparison, compare, difference_map, pixels_of
from lib_onediff.quality.comparison import DETAILS, FINE_DETAILS, SENTENCES, UNLIKE, UNSEEN, VERDICTS
from lib_onediff.quality.measures import lab_of, psnr, ssim

IMAGES = [painted(seed) for seed in range(4)] + [poster(seed) for seed in range(3)]
IDS = ["painted"] * 4 + ["poster"] * 3


# --- what an image may be -----------------------------------------------------------------------------------------


def test_the_same_image_in_every_form() -> None:
    image_module = pytest.importorskip("PIL.Image")
    numpy = pytest.importorskip("numpy")
    values = (painted() * 255).round().to(torch.uint8)
    image = image_module.fromarray(values.numpy())
    forms = [image, image.convert("RGBA"), values.numpy(), values, values.permute(2, 0, 1), values.numpy() / 255,
             numpy.ascontiguousarray(values.permute(2, 0, 1).numpy()), (values / 255).float()]
    for form in forms:
        torch.testing.assert_close(pixels_of(form), values.double() / 255, rtol=0, atol=1e-7)


@pytest.mark.parametrize("wrong, part", [
    (torch.zeros(8, 8), "three dimensions"), (torch.zeros(8, 8, 4), "3 channels"),
    (torch.zeros(8, 8, 3, dtype=torch.int64), "uint8 or of floats"), (torch.full((8, 8, 3), math.nan), "no numbers"),
])
def test_what_is_no_image_gets_a_sentence(wrong: Tensor, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        pixels_of(wrong)


def test_images_of_two_sizes_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="compared, not 160x128 and 159x128"):
        compare(painted(), painted()[:, :-1])
    with pytest.raises(ValueError, match="at least 11x11"):
        compare(painted()[:8, :8], painted()[:8, :8])


# --- the measures -------------------------------------------------------------------------------------------------


def test_psnr_by_its_definition() -> None:
    black = torch.zeros(16, 16, 3, dtype=torch.float64)
    assert psnr(black, black) == math.inf
    assert psnr(black, black + 0.1) == pytest.approx(20.0)
    assert psnr(black, black + 1 / 255) == pytest.approx(48.1308, abs=1e-4)


def test_ssim_by_its_definition() -> None:
    """Of two flat images only the first factor of Wang's formula is left; beside one bright pixel, his Gaussian too."""
    one, other = (torch.full((32, 32, 3), level, dtype=torch.float64) for level in (0.5, 0.25))
    expected = (2 * 0.5 * 0.25 + 1e-4) / (0.5**2 + 0.25**2 + 1e-4)
    assert ssim(one, other) == pytest.approx(expected, rel=1e-9)
    assert ssim(painted(), painted()) == pytest.approx(1)

    black = torch.zeros(11, 11, 3, dtype=torch.float64)
    dot = black.clone()
    dot[5, 5] = 1
    weights = torch.exp(-0.5 * (torch.arange(-5, 6, dtype=torch.float64) / 1.5).square())
    middle = float(1 / weights.sum()) ** 2  # the window's weight at its own centre
    expected = 1e-4 / (middle**2 + 1e-4) * 9e-4 / (middle - middle**2 + 9e-4)
    assert ssim(black, dot) == pytest.approx(expected, rel=1e-9)


def test_colours_and_greys_are_measured_as_cielab() -> None:
    """Lindbloom's values for sRGB's corners under D65."""
    corners = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    expected = torch.tensor([[100, 0, 0], [0, 0, 0], [53.24, 80.09, 67.20], [32.30, 79.19, -107.86]]).double()
    torch.testing.assert_close(lab_of(corners), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("why", ["missing", "built for another NumPy"])
def test_without_scikit_image_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "skimage"]:
        monkeypatch.delitem(sys.modules, name)
    if why == "missing":
        monkeypatch.setitem(sys.modules, "skimage", None)
    else:
        (tmp_path / "skimage.py").write_text("raise ValueError('numpy.dtype size changed')\n")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="^Images are compared by scikit-image, which cannot .*pip install"):
        compare(painted(), painted())


def test_shifts_are_what_was_done() -> None:
    image = painted()
    assert compare(image, desaturated(image, 0.5)).shift.saturation == pytest.approx(-0.5, abs=0.05)
    lighter = compare(image, veiled(image, 0.3)).shift
    assert lighter.lightness > 3 and lighter.contrast < -0.2 and lighter.saturation < -0.2
    assert (darker := compare(veiled(image, 0.3), image).shift).lightness == pytest.approx(-lighter.lightness)
    assert darker.contrast > 0.2


# --- washed out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", IMAGES, ids=IDS)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.8])
def test_desaturated_image_is_washed_out(image: Tensor, kept: float) -> None:
    found = compare(image, desaturated(image, kept))
    assert found.washed_out and found.sentence().startswith("The second image is paler: saturation -")
    assert not compare(desaturated(image, kept), image).washed_out


def test_slightly_desaturated_image_is_washed_out() -> None:
    for seed in range(4):
        assert compare(painted(seed), desaturated(painted(seed), 0.9)).washed_out
        assert not compare(painted(seed), desaturated(painted(seed), 0.98)).washed_out


@pytest.mark.parametrize("image", IMAGES, ids=IDS)
@pytest.mark.parametrize("veil", [0.1, 0.2, 0.4])
def test_veiled_image_is_washed_out_with_noise_on_it_too(image: Tensor, veil: float) -> None:
    for deviation in (0, 8):
        assert compare(image, noisy(veiled(image, veil), deviation)).washed_out
        assert not compare(noisy(veiled(image, veil), deviation), image).washed_out


@pytest.mark.parametrize("deviation", [0.5, 2, 8, 16, 32])
@pytest.mark.parametrize("image", IMAGES, ids=IDS)
def test_noise_is_not_washed_out(image: Tensor, deviation: float) -> None:
    """Neither on the second image nor on the first, nor on both, nor noise that is as coarse as a latent's."""
    small = torch.randn(1, 3, image.shape[0] // 8, image.shape[1] // 8, generator=torch.Generator().manual_seed(5))
    coarse = functional.interpolate(small.double(), image.shape[:2], mode="bicubic")[0].permute(1, 2, 0)
    coarse = (image + coarse * deviation / 255).clamp(0, 1)
    grey = desaturated(image, 0.1)
    for first, second in (
        (image, noisy(image, deviation)), (noisy(image, deviation), image),
        (noisy(image, deviation, 2), noisy(image, deviation, 3)), (image, coarse), (coarse, image),
        (grey, noisy(grey, deviation)), (noisy(grey, deviation), grey),
    ):
        assert not compare(first, second).washed_out


def test_other_changes_are_not_washed_out() -> None:
    for seed in range(4):
        image = painted(seed)
        for name, changed in {
            "equal": image, "darker": image * 0.8, "lighter": (image * 1.1).clamp(0, 1),
            "more colourful": desaturated(image, 1.2).clamp(0, 1),
            "moved": image.roll((3, 5), (0, 1)), "upside down": image.flip(0),
            "another image": painted(seed + 10), "less blue": image * image.new_tensor([1, 1, 0.97]),
        }.items():
            assert not compare(image, changed).washed_out, name


def test_sentences() -> None:
    image = (painted() * 255).round() / 255
    assert compare(image, image).sentence() == "Identical: every pixel is the same."
    off_by_one = image.clone()
    off_by_one[::7, ::5] = (off_by_one[::7, ::5] + 1 / 255).clamp(0, 1)
    assert compare(image, off_by_one).sentence() == "No difference can be seen: colours differ by at most 1 of 255."
    assert compare(image, noisy(image, 2)).sentence() == "The same image; only fine details differ."
    assert compare(image, noisy(image, 32)).sentence() == "The same scene, but details differ clearly."
    assert compare(image, image).as_dict()["psnr"] is None


# Of comparison.INVISIBLE's table: PSNR and SSIM of real images, least, median, most.
MEASURED = {
    "exact": ((91.5, 1.0), (94.1, 1.0), (101.1, 1.0)), "VAE bf16": ((54.4, 0.998), (55.0, 0.998), (55.9, 0.999)),
    "DeepCache 2": ((29.9, 0.963), (38.6, 0.993), (44.8, 0.997)),
    "DeepCache 3": ((18.8, 0.819), (33.2, 0.979), (39.2, 0.993)),
    "DeepCache 5": ((17.5, 0.777), (26.1, 0.922), (35.1, 0.984)),
    "another seed": ((14.7, 0.679), (19.6, 0.798), (25.4, 0.863)),
    "another prompt": ((5.0, 0.366), (9.5, 0.582), (12.8, 0.711)),
}


@pytest.mark.parametrize(("setting", "verdicts"), [
    ("exact", (UNSEEN,) * 3), ("VAE bf16", (UNSEEN,) * 3), ("DeepCache 2", (FINE_DETAILS,) * 3),
    ("DeepCache 3", (DETAILS, FINE_DETAILS, FINE_DETAILS)), ("DeepCache 5", (DETAILS, DETAILS, FINE_DETAILS)),
    ("another seed", (DETAILS,) * 3), ("another prompt", (UNLIKE,) * 3),
])
def test_verdicts_of_measured_images(setting: str, verdicts: tuple[str, str, str]) -> None:
    unmoved = compare(painted(), noisy(painted(), 2)).shift
    assert not unmoved.washed_out
    found = tuple(ImageComparison(psnr, ssim, 200, 5, unmoved).verdict for psnr, ssim in MEASURED[setting])
    assert found == verdicts
    assert set(found) <= set(VERDICTS) == set(SENTENCES)


def flat(*colour: float) -> Tensor:
    return torch.tensor(colour, dtype=torch.float64).expand(HEIGHT, WIDTH, 3)


def blob(*colour: float) -> Tensor:
    """A disc of a colour on grey: a tenth of the image."""
    row, column = torch.meshgrid(torch.arange(HEIGHT), torch.arange(WIDTH), indexing="ij")
    inside = (row - HEIGHT / 2).square() + (column - WIDTH / 2).square() < 26**2
    return torch.where(inside[..., None], flat(*colour), flat(0.5, 0.5, 0.5))


@pytest.mark.parametrize("first, second", [
    (flat(1, 0, 0), flat(0, 0, 1)), (flat(0, 0, 0), flat(1, 1, 1)), (flat(1, 1, 1), flat(0, 0, 0)),
    (blob(0, 0.8, 0), blob(0.8, 0, 0.8)), (painted(), painted(10)), (painted(), painted().flip(1)),
    (poster(), poster(10)),
], ids=["red, blue", "black, white", "white, black", "green, magenta", "two images", "mirrored", "two posters"])
def test_images_that_have_nothing_in_common(first: Tensor, second: Tensor) -> None:
    found = compare(first, second)
    assert found.psnr < 13.5
    assert found.sentence() == "Two different images."


@pytest.mark.parametrize("image", IMAGES, ids=IDS)
def test_one_image_with_noise_or_moved_is_no_different_image(image: Tensor) -> None:
    for changed in (noisy(image, 8), noisy(image, 32), image.roll(1, 0)):
        assert not compare(image, changed).sentence().startswith("Two different images")


# --- the difference as an image -----------------------------------------------------------------------------------


def test_difference_map_shows_where() -> None:
    pytest.importorskip("PIL")
    image = torch.full((16, 24, 3), 0.5, dtype=torch.float64)
    changed = image.clone()
    changed[4, 6] += 3 / 255
    found = difference_map(image, changed)
    assert (found.gain, found.image.size) == (64, (24, 16))
    assert found.image.getpixel((6, 4)) == (192, 192, 192) and found.image.getpixel((5, 4)) == (0, 0, 0)
    assert difference_map(image, changed, gain=2).image.getpixel((6, 4)) == (6, 6, 6)
    assert difference_map(image, 1 - image * 0).gain == 2
    assert difference_map(image * 0, 1 - image * 0).gain == 1
