"""The sizes that one click makes ready, and sizes as users write them."""
from __future__ import annotations

import pytest

from lib_onediff.core.sizes import LARGEST_BATCH, MOST_SIZES, Size, parse_prewarm, parse_sizes
from lib_onediff.prewarm.worker import FAMILIES, families_for

ALL = ["SD 1.5", "SD 2", "SDXL", "Anima"]


@pytest.mark.parametrize("model, names", [
    ("SD1", ["SD 1.5"]), ("SD1 inpainting", ["SD 1.5"]), ("SD2", ["SD 2"]), ("SDXL", ["SDXL"]),
    ("SDXL refiner", ["SDXL"]), ("SD 1.x UNet, small (prompt width 64)", ["SD 1.5"]),
    ("SDXL UNet, small (prompt width 64)", ["SDXL"]), ("Anima", ["Anima"]), ("another", ALL), (None, ALL), ("", ALL),
])
def test_those_of_the_loaded_model_are_shown(model: str | None, names: list[str]) -> None:
    assert [family.name for family in families_for(model)] == names
    assert all(parse_sizes(size) for family in FAMILIES for size in family.sizes)


@pytest.mark.parametrize("text, expected", [
    ("", []),
    ("512x768", [Size(512, 768)]),
    ("1024x1024, 832x1216 x2", [Size(1024, 1024), Size(832, 1216, 2)]),
    ("64X64;4096×64\n72 x 88 X 3", [Size(64, 64), Size(4096, 64), Size(72, 88, 3)]),
    ("512x512, 768x512, 512x512, 512x512 x2", [Size(512, 512), Size(768, 512), Size(512, 512, 2)]),
    (f"512x512 x{LARGEST_BATCH}", [Size(512, 512, LARGEST_BATCH)]),
])
def test_sizes_that_can_be(text: str, expected: list[Size]) -> None:
    assert parse_sizes(text) == expected


@pytest.mark.parametrize("text, part", [
    ("wide", "'wide' is not a size"), ("9" * 10000, "'9999999999999999999999999999999999999999...' is not a size"),
    ("512x512x2x2", "is not a size"),
    ("٥١٢x٥١٢", "is not a size"),
    ("1234567x512", "is not a size"),
    ("500x512", "the width must be a multiple of 8 from 64 to 4096 pixels."),
    ("512x60", "the height must be a multiple of 8"),
    ("4104x512", "the width must be a multiple of 8 from 64 to 4096 pixels."),
    (f"512x512 x{LARGEST_BATCH + 1}", "a batch has 1 to"),
])
def test_sizes_that_cannot_be(text: str, part: str) -> None:
    for wrong in (text, f"512x512, {text}, 768x512"):
        with pytest.raises(ValueError) as caught:
            parse_sizes(wrong)
        assert part in str(caught.value)
        assert str(caught.value).endswith(".")


def test_the_words_that_the_prewarm_list_took_before_are_left_out() -> None:
    assert parse_prewarm("512x512, Most used 4, while idle, most used") == [Size(512, 512)]
    with pytest.raises(ValueError, match="'most' is not a size"):
        parse_prewarm("512x512, most")


def test_too_many_sizes() -> None:
    assert len(parse_sizes(", ".join(f"512x512 x{batch}" for batch in range(1, 65)))) == 64
    many = [f"{64 + 8 * step}x64" for step in range(MOST_SIZES + 1)]
    assert len(parse_sizes(", ".join(many[:-1]))) == MOST_SIZES
    with pytest.raises(ValueError, match=f"at most {MOST_SIZES}"):
        parse_sizes(", ".join(many))
