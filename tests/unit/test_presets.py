"""The sizes that one click makes ready."""
from __future__ import annotations

import pytest

from lib_onediff.prewarm.presets import FAMILIES, families_for

BUCKETS = "1024x1024 1152x896 896x1152 1216x832 832x1216 1344x768 768x1344 1536x640 640x1536"


def sizes_of(family: int, label: str) -> list[str]:
    return [str(size) for preset in FAMILIES[family].presets if preset.label == label for size in preset.sizes]


def test_what_the_presets_are() -> None:
    assert sizes_of(0, "All 4") == ["512x512", "512x768", "768x512", "768x768"]
    assert " ".join(sizes_of(2, "All 9")) == BUCKETS
    assert sizes_of(0, "512x512 → 1024x1024") == ["512x512", "1024x1024"]
    assert sizes_of(2, "832x1216 → 1248x1824") == ["832x1216", "1248x1824"]
    for family in FAMILIES:
        labels = [preset.label for preset in family.presets]
        assert len(set(labels)) == len(labels)
        assert all(preset.label == str(preset.sizes[0]) for preset in family.presets if len(preset.sizes) == 1)


def test_sdxl_was_trained_at_about_a_million_pixels() -> None:
    for width, _, height in (size.partition("x") for size in sizes_of(2, "All 9")):
        assert 0.93 < int(width) * int(height) / 2**20 <= 1.01
        assert int(width) % 64 == int(height) % 64 == 0


@pytest.mark.parametrize("model, names", [
    ("SD1", ["SD 1.5"]), ("SD1 inpainting", ["SD 1.5"]), ("SD2", ["SD 2"]), ("SDXL", ["SDXL"]),
    ("SDXL refiner", ["SDXL"]), ("UNet with context width 64", ["SD 1.5", "SD 2", "SDXL"]),
    (None, ["SD 1.5", "SD 2", "SDXL"]), ("", ["SD 1.5", "SD 2", "SDXL"]),
])
def test_those_of_the_loaded_model_are_shown(model: str | None, names: list[str]) -> None:
    assert [family.name for family in families_for(model)] == names
