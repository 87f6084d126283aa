"""Estimates of how long pre-warming a size takes, from the times of other sizes; and how durations are written."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from panel_builders import ROW, SHAPE

from lib_onediff.core.jobs import JobQueue
from lib_onediff.core.sizes import Size
from lib_onediff.prewarm.worker import DECODING, GROWTH, WEIGHTS, WarmUp
from lib_onediff.runtime.rows import ResolutionRow
from lib_onediff.ui.amounts import duration, minutes_or_hours


def warm_up_after(*images: tuple[str, float]) -> WarmUp:
    """A WarmUp after images of SD1. images: (resolution, milliseconds of a step with two latents)."""
    return warm_up_of([replace(ROW, resolution=resolution, step_ms=step) for resolution, step in images])


def warm_up_of(rows: list[ResolutionRow]) -> WarmUp:
    """A WarmUp of SD1 whose table has these rows."""
    webui: Any = SimpleNamespace(model_name=lambda: "SD1", call_shapes=lambda images, tokens: ((2 * images, tokens),))
    runtime: Any = SimpleNamespace(rows=lambda: rows)
    return WarmUp(webui, runtime, JobQueue())


# A call of one shape takes two latents, the decode one.
CALLS_OF_A_SIZE = 2 * sum(WEIGHTS.values()) - WEIGHTS[DECODING]


def test_a_size_is_estimated_from_the_nearest_one_that_was_timed() -> None:
    """Here 512x512. Half as many pixels take half as long; twice as many take 2 ** (1 + GROWTH) times as long. The
    second value of an estimate says whether it is only a lower bound."""
    warmup = warm_up_after(("64x64", 600.0), ("512x512", 2000.0))
    half = Size(512, 256)
    double = Size(1024, 512)
    found = warmup.estimates([half, double])
    assert found[half] == (pytest.approx(CALLS_OF_A_SIZE * 1.0 / 2), False)
    assert found[double] == (pytest.approx(CALLS_OF_A_SIZE * 1.0 * 2 ** (1 + GROWTH)), False)


def test_the_estimate_of_a_size_far_above_the_timed_ones_is_only_a_lower_bound() -> None:
    """After one image of 64x64 with a step of 0.6 s, 512x512 was once estimated at 36 minutes. Now it gets the estimate
    of 128x128, as a lower bound (is_least)."""
    warmup = warm_up_after(("64x64", 600.0))
    found = warmup.estimates([Size(128, 128), Size(512, 512)])
    assert found[Size(512, 512)] == (found[Size(128, 128)].seconds, True)
    assert found[Size(512, 512)].seconds < 60 and not found[Size(128, 128)].is_least


def test_an_image_of_a_size_that_cannot_be_pre_warmed_breaks_no_estimate() -> None:
    """Such as 512x5120, an image that was enlarged beyond the largest size."""
    known = warm_up_after(("512x512", 2000.0)).estimates([Size(512, 512)])
    assert warm_up_after(("512x512", 2000.0), ("512x5120", 9000.0)).estimates([Size(512, 512)]) == known != {}


def test_without_a_measurement_nothing_is_estimated() -> None:
    assert warm_up_after().estimates([Size(512, 512)]) == {}


def test_rows_of_other_models_of_the_vae_and_without_times_give_no_estimate() -> None:
    other = replace(ROW, model="SDXL")
    decode = replace(ROW, shapes=(replace(SHAPE, tokens=0),))
    assert warm_up_of([other, decode, replace(ROW, step_ms=None)]).estimates([Size(512, 512)]) == {}


@pytest.mark.parametrize("took, said", [
    (3.0, "3.0 s"), (119.0, "119 s"), (120.0, "2 min"), (5970.0, "100 min"), (6000.0, "1.7 h"), (24180.0, "6.7 h"),
    (36000.0, "10 h"), (100000.0, "28 h"),
])
def test_long_durations_are_in_minutes_or_hours(took: float, said: str) -> None:
    """took: seconds. said: the text of duration(). minutes_or_hours() gives the same text from 2 minutes on."""
    assert duration(took) == said
    assert minutes_or_hours(max(took, 120.0)) == (said if took >= 120.0 else "2 min")
