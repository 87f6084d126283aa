"""Which sizes are the most used, by the history of this machine."""
from __future__ import annotations

import pytest

from lib_onediff.prewarm.presets import most_used
from lib_onediff.shapes.sizes import Size
from lib_onediff.store.rows import HistoryRow


def row(resolution: str, uses: int, batch: int = 2, tokens: int = 77, model: str = "SD1") -> HistoryRow:
    return HistoryRow("architecture", model, resolution, batch, tokens, "float16", uses=uses)


def test_the_most_used_come_first_each_once() -> None:
    rows = [row("512x512", 40), row("512x768", 30), row("768x512", 90), row("512x512", 60, batch=4)]
    assert most_used(rows, "SD1", 10) == [
        (Size(512, 512, 2), 77), (Size(768, 512), 77), (Size(512, 768), 77),
    ]
    assert most_used(rows, "SD1", 1) == [(Size(512, 512, 2), 77)]
    assert most_used(rows, "SD1", 0) == [] == most_used([], "SD1", 9)


def test_only_the_loaded_model_counts() -> None:
    rows = [row("1024x1024", 900, model="SDXL"), row("512x512", 1), row("512x512", 70, model="VAE decoder", tokens=0)]
    assert most_used(rows, "SD1", 9) == [(Size(512, 512), 77)]
    assert most_used(rows, None, 9) == []


@pytest.mark.parametrize("batch, pictures", [(1, 1), (2, 1), (3, 3), (4, 2), (16, 8)])
def test_pictures_of_a_batch(batch: int, pictures: int) -> None:
    assert most_used([row("512x512", 5, batch=batch)], "SD1", 1) == [(Size(512, 512, pictures), 77)]


@pytest.mark.parametrize("tokens, wanted", [(154, 154), (231, 231), (308, 77), (75, 77)])
def test_the_usual_length_of_the_prompt(tokens: int, wanted: int) -> None:
    assert most_used([row("512x512", 5, tokens=tokens), row("512x512", 4)], "SD1", 1)[0].tokens == wanted


def test_a_size_made_ready_and_never_used_is_not_among_them() -> None:
    assert most_used([row("512x512", 0), row("64x64", 1)], "SD1", 9) == [(Size(64, 64), 77)]


def test_what_no_user_could_ask_for_is_left_out() -> None:
    rows = [row("8192x64", 50), row("rubbish", 40), row("512x512", 30, batch=1000), row("64x64", 1)]
    assert most_used(rows, "SD1", 2) == [(Size(64, 64), 77)]
