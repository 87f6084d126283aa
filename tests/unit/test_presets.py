"""The image sizes that can be pre-warmed: the usual ones of a model, its most used ones, and those that users write."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib_onediff.core.sizes import LARGEST_BATCH, MOST_SIZES, Size, parse_prewarm, parse_sizes
from lib_onediff.families.registry import FAMILIES
from lib_onediff.store.history import History, HistoryRow

ALL = ["SD 1.5", "SD 2", "SDXL", "Anima", "Krea 2", "Z-Image", "Lumina 2"]


@pytest.mark.parametrize("model, names", [
    ("SD1", ["SD 1.5"]), ("SD1 inpainting", ["SD 1.5"]), ("SD2", ["SD 2"]), ("SDXL", ["SDXL"]),
    ("SDXL refiner", ["SDXL"]), ("SD 1.x UNet, small (prompt width 64)", ["SD 1.5"]),
    ("SDXL UNet, small (prompt width 64)", ["SDXL"]), ("Anima", ["Anima"]), ("Krea 2", ["Krea 2"]),
    ("Z-Image", ["Z-Image"]), ("Lumina 2", ["Lumina 2"]),
    ("another", ALL), (None, ALL), ("", ALL),
])
def test_the_usual_sizes_are_those_of_the_loaded_model(model: str | None, names: list[str]) -> None:
    """names: the groups of usual sizes that are offered. All groups are offered if the model is unknown or not loaded.
    Each usual size can be read by parse_sizes()."""
    assert [family.name for family in FAMILIES.usual_sizes(model)] == names
    assert all(parse_sizes(size) for family in FAMILIES.usual_sizes() for size in family.sizes)


def row(resolution: str, uses: int, batch: int = 2, tokens: int = 77, model: str = "SD1") -> HistoryRow:
    return HistoryRow("architecture", model, resolution, batch, tokens, "float16", uses=uses)


def history_of(folder: Path, *rows: HistoryRow) -> History:
    history = History()
    history.open(folder)
    for each in rows:
        history.record(each)
    return history


def test_the_most_used_sizes_come_first_and_each_once(tmp_path: Path) -> None:
    """Sizes are ordered by the sum of their uses over all batches, and each has its most used batch. most_used(model,
    count) returns at most `count` of them."""
    history = history_of(tmp_path, row("512x512", 40), row("512x768", 30), row("768x512", 90), row("512x512", 60, 4))
    assert history.most_used("SD1", 10) == [
        (Size(512, 512, 2), 77), (Size(768, 512), 77), (Size(512, 768), 77),
    ]
    assert history.most_used("SD1", 1) == [(Size(512, 512, 2), 77)]
    assert history.most_used("SD1", 0) == [] == history.most_used("SD2", 9)


@pytest.mark.parametrize("batch, tokens, wanted", [(1, 154, (1, 154)), (3, 308, (3, 77)), (16, 75, (8, 77))])
def test_the_batch_of_a_most_used_size_counts_images_and_not_rows(
    batch: int, tokens: int, wanted: Any, tmp_path: Path
) -> None:
    """batch, tokens: batch size and prompt length of the stored UNet calls; an even batch has two rows for each image
    (prompt and negative prompt). wanted: (images, tokens). A number of tokens that users cannot choose becomes 77."""
    history = history_of(tmp_path, row("512x512", 5, batch=batch, tokens=tokens), row("512x512", 4))
    assert history.most_used("SD1", 1) == [(Size(512, 512, wanted[0]), wanted[1])]


def test_most_used_sizes_that_users_cannot_enter_are_left_out(tmp_path: Path) -> None:
    """The stored sizes are too wide, no size at all, of a batch that is too large, and one that users can enter."""
    rows = row("8192x64", 50), row("rubbish", 40), row("512x512", 30, batch=1000), row("64x64", 1)
    assert history_of(tmp_path, *rows).most_used("SD1", 2) == [(Size(64, 64), 77)]


@pytest.mark.parametrize("text, expected", [
    ("", []),
    ("512x768", [Size(512, 768)]),
    ("1024x1024, 832x1216 x2", [Size(1024, 1024), Size(832, 1216, 2)]),
    ("64X64;4096×64\n72 x 88 X 3", [Size(64, 64), Size(4096, 64), Size(72, 88, 3)]),
    ("512x512, 768x512, 512x512, 512x512 x2", [Size(512, 512), Size(768, 512), Size(512, 512, 2)]),
    (f"512x512 x{LARGEST_BATCH}", [Size(512, 512, LARGEST_BATCH)]),
])
def test_written_sizes_are_read_with_any_separator_and_a_batch_size_and_duplicates_are_dropped(
    text: str, expected: list[Size]
) -> None:
    """Between sizes: a comma, semicolon or line break; between width and height: x, X or ×; before the batch size: x or
    X."""
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
def test_a_wrong_size_is_refused_in_a_sentence(text: str, part: str) -> None:
    """The size is given alone, and in a list with valid sizes. part: a part of the sentence."""
    for wrong in (text, f"512x512, {text}, 768x512"):
        with pytest.raises(ValueError) as caught:
            parse_sizes(wrong)
        assert part in str(caught.value)
        assert str(caught.value).endswith(".")


def test_a_message_names_each_wrong_size_of_a_list_once_and_at_most_five() -> None:
    """Of seven wrong sizes, the message names five and says that two more are wrong."""
    with pytest.raises(ValueError) as caught:
        parse_prewarm("wide, 512x512, 99x64, most used 4, wide, 64x64 x0")
    assert str(caught.value) == (
        "'wide' is not a size. 99x64: the width must be a multiple of 8 from 64 to 4096 pixels. "
        "64x64 x0: a batch has 1 to 64 images. Write for example 768x512, or 768x512 x2 for two images at once."
    )
    with pytest.raises(ValueError, match=r"^'a' is .* 'e' is not a size\. 2 more are wrong\. Write"):
        parse_sizes("a, b, c, d, e, f, g")


def test_more_than_100_sizes_are_refused() -> None:
    """MOST_SIZES is 100. One resolution with 64 different batches is 64 sizes."""
    assert len(parse_sizes(", ".join(f"512x512 x{batch}" for batch in range(1, 65)))) == 64
    many = [f"{64 + 8 * step}x64" for step in range(MOST_SIZES + 1)]
    assert len(parse_sizes(", ".join(many[:-1]))) == MOST_SIZES
    with pytest.raises(ValueError, match=f"at most {MOST_SIZES}"):
        parse_sizes(", ".join(many))
