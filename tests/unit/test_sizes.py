"""Sizes as users write them."""
from __future__ import annotations

import pytest

from lib_onediff.shapes.sizes import LARGEST_BATCH, MOST_SIZES, Size, parse_size, parse_sizes


@pytest.mark.parametrize("text, expected", [
    ("", []),
    (" , ,", []),
    ("512x768", [Size(512, 768)]),
    ("1024x1024, 832x1216 x2", [Size(1024, 1024), Size(832, 1216, 2)]),
    ("64X64;4096×64\n72 x 88 X 3", [Size(64, 64), Size(4096, 64), Size(72, 88, 3)]),
    ("512x512x2", [Size(512, 512, 2)]),
    ("512x512, 768x512, 512x512, 512x512 x2", [Size(512, 512), Size(768, 512), Size(512, 512, 2)]),
    (f"512x512 x{LARGEST_BATCH}", [Size(512, 512, LARGEST_BATCH)]),
])
def test_sizes_that_can_be(text: str, expected: list[Size]) -> None:
    assert parse_sizes(text) == expected


@pytest.mark.parametrize("text, part", [
    ("wide", "'wide' is not a size"),
    ("512", "'512' is not a size"),
    ("512x", "is not a size"),
    ("512x512x2x2", "is not a size"),
    ("-512x512", "is not a size"),
    ("512.0x512", "is not a size"),
    ("٥١٢x٥١٢", "is not a size"),
    ("512x512 512x512", "is not a size"),
    ("1234567x512", "is not a size"),
    ("500x512", "the width must be a multiple of 8 from 64 to 4096 pixels, for example 496 or 504."),
    ("512x60", "the height must be a multiple of 8"),
    ("512x0", "the height must be"),
    ("4104x512", "the width must be a multiple of 8 from 64 to 4096 pixels."),
    ("512x512 x0", "a batch has 1 to"),
    (f"512x512 x{LARGEST_BATCH + 1}", "a batch has 1 to"),
])
def test_sizes_that_cannot_be(text: str, part: str) -> None:
    for wrong in (text, f"512x512, {text}, 768x512"):
        with pytest.raises(ValueError) as caught:
            parse_sizes(wrong)
        assert part in str(caught.value)
        assert str(caught.value).endswith(".")


def test_too_many_sizes() -> None:
    assert len(parse_sizes(", ".join(f"512x512 x{batch}" for batch in range(1, 65)))) == 64
    many = [f"{64 + 8 * step}x64" for step in range(MOST_SIZES + 1)]
    assert len(parse_sizes(", ".join(many[:-1]))) == MOST_SIZES
    with pytest.raises(ValueError, match=f"at most {MOST_SIZES}"):
        parse_sizes(", ".join(many))


def test_a_long_text_is_not_quoted_whole() -> None:
    with pytest.raises(ValueError) as caught:
        parse_size("9" * 10000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("size", [Size(512, 768), Size(832, 1216, 2), Size(64, 4096, LARGEST_BATCH)])
def test_a_size_is_written_as_it_is_read(size: Size) -> None:
    assert parse_size(str(size)) == size
