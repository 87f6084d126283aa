"""Options that compute less, in a WebUI: DeepCache, its forecast (steps are extrapolated), and the guidance end (the
negative prompt is skipped). Switched off, they change nothing; switched on, each skips its part of the work."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from webui_client import PICTURE, Pictures, WebUI, gradient, largest_difference, one_run, start_from
from webui_compare import need
from webui_models import Models

# Below 10 steps all of them are inactive.
THIRTEEN = {"steps": 13, "sampler_name": "Euler", "negative_prompt": "snow"}
EVERY_THIRD = {"deepcache_interval": 3}
HALF = {"skip_negative_after": 50}
FORECAST = {**EVERY_THIRD, "deepcache_depth": 0}
PARTS = ("deepcache", "forecast", "guidance")


@dataclass(frozen=True)
class Counted:
    """A generation: its images; the numbers of full and cached passes by DeepCache, of extrapolated steps (forecasts),
    and of steps without the negative prompt; and the reason in the status for each of PARTS."""

    pictures: Pictures
    full: int
    cached: int
    forecasts: int
    without_negative: int
    reasons: dict[str, str]

    @property
    def left_out(self) -> tuple[int, int, int]:
        return self.cached, self.forecasts, self.without_negative


def generated(webui: WebUI, options: dict[str, Any], **request: Any) -> Counted:
    before = webui.status()
    pictures = webui.make({**PICTURE, **THIRTEEN, **request, **one_run(**options)})
    after = webui.status()
    assert after["faults"] == before["faults"]
    counts = [
        after[part][name] for part, name in (("deepcache", "full"), ("deepcache", "cached"), ("forecast", "calls"),
                                             ("guidance", "without_negative"))
    ]
    return Counted(pictures, *counts, reasons={part: after[part]["reason"] for part in PARTS})


def distance(one: Counted, other: Counted) -> float:
    """The mean absolute difference of pixel values, which are between 0 and 255."""
    return float(numpy.abs(one.pictures.pixels - other.pictures.pixels).mean())


@pytest.fixture(scope="module")
def whole(webui: WebUI, models: Models) -> Counted:
    """A generation in which every step is computed whole."""
    models.use("sd15")
    return generated(webui, {})


@pytest.fixture(scope="module")
def far(webui: WebUI, whole: Counted) -> float:
    """The distance between two exact images with different seeds."""
    return distance(generated(webui, {}, seed=8), whole)


@pytest.fixture
def exact(webui: WebUI, sd15: Models, whole: Counted) -> Iterator[Counted]:
    """A generation in which every step is computed whole. After the test, it is repeated, and must be the same to the
    bit."""
    yield whole
    again = generated(webui, {})
    assert largest_difference(again.pictures, whole.pictures) == 0 and again.left_out == (0, 0, 0)
    assert "deepcache" not in again.pictures.info["infotexts"][0]


@pytest.mark.parametrize(("options", "full", "left_out"), [
    ({"deepcache_interval": 2}, 8, (5, 0, 0)), (EVERY_THIRD, 6, (7, 0, 0)),
    ({"deepcache_interval": 20}, 2, (11, 0, 0)), ({**EVERY_THIRD, "deepcache_depth": 3}, 6, (7, 0, 0)),
    (HALF, 0, (0, 0, 6)),
], ids=str)
def test_each_option_skips_its_part_of_the_work(
    webui: WebUI, exact: Counted, far: float, options: dict[str, Any], full: int, left_out: tuple[int, int, int]
) -> None:
    """The image differs from the exact one, and is much nearer to it than one with another seed. A second image with
    the same seed is equal. full: the expected number of DeepCache's full passes. left_out: those of cached passes, of
    forecasts, and of steps without the negative prompt."""
    found = generated(webui, options)
    assert (found.full, found.left_out) == (full, left_out)
    # With random weights, an image of two full passes in thirteen steps is not near.
    assert distance(found, exact) > 0 and (full == 2 or distance(found, exact) < 0.75 * far)
    assert largest_difference(generated(webui, options).pictures, found.pictures) == 0


@pytest.mark.parametrize("sampler", ["Euler", "DDIM"])
def test_with_deepcache_depth_0_some_steps_are_extrapolated(
    webui: WebUI, exact: Counted, far: float, sampler: str
) -> None:
    """5 or 6 of the 12 steps. The distance to the exact image is less than half of that between two seeds."""
    steps = {"steps": 12, "sampler_name": sampler}
    plain = generated(webui, {}, **steps)
    found = generated(webui, FORECAST, **steps)
    assert found.forecasts in (5, 6) and found.reasons["forecast"] == ""
    assert 0 < distance(found, plain) < 0.5 * far


# The number of calls depends on the WebUI: A1111's DDIM makes one step less than the request says, and Heun calls the
# UNet twice in each step but the last. A WebUI may also call it separately for the prompt and for the negative prompt.
@pytest.mark.parametrize("request_", [
    {"sampler_name": "Euler a"}, {"sampler_name": "DPM++ 2M"}, {"sampler_name": "Heun"}, {"sampler_name": "DDIM"},
    {"batch_size": 2}, {"prompt": "a fox AND a hill"}, {"prompt": "a red fox and " * 30},
    {"width": 72, "height": 88}, {**start_from(gradient(64, 64)), "steps": 24}, {"steps": 16, "cfg_scale": 1.0},
], ids=lambda request: str(request)[:40])
def test_deepcache_computes_as_many_full_passes_as_scheduled_for_every_kind_of_request(
    webui: WebUI, sd15: Models, request_: dict[str, Any]
) -> None:
    """A full pass in a third of the steps, and one at the end. The number of steps is taken from the passes that were
    counted, as it depends on the WebUI (see the comment above). request_: replaces fields of the usual request."""
    need(webui, "AND prompts" if "AND" in request_.get("prompt", "") else "")
    need(webui, "img2img" if "init_images" in request_ else "")
    found = generated(webui, EVERY_THIRD, **request_)
    steps = found.full + found.cached
    calls = 2 if request_.get("sampler_name") == "Heun" or steps > 24 else 1
    steps = (steps + 1) // calls if calls == 2 else steps
    # As many full passes as if they were evenly spaced, although most are early; and one in the last step.
    least = -(-steps // 3) + 1
    assert 12 <= steps <= 18 and found.full in (calls * least, calls * least - 1)


# Reasons that depend on what the WebUI tells OneDiff. Unit tests cover the others.
@pytest.mark.parametrize(("options", "request_", "part", "why"), [
    (EVERY_THIRD, {"cfg_scale": 1.5}, "deepcache", "few-step models"),
    (FORECAST, {"sampler_name": "Euler a"}, "forecast", "Euler and DDIM"),
    (HALF, {"prompt": "a fox AND a hill"}, "guidance", "is inactive"),
], ids=str)
def test_an_option_that_does_not_apply_to_a_request_skips_nothing_and_the_status_says_why(
    webui: WebUI, exact: Counted, options: dict[str, Any], request_: dict[str, Any], part: str, why: str
) -> None:
    """The image must be the same to the bit as without the option. CFG scales as low as 1.5 are for few-step models.
    part: the key of the option's entry in status(). why: words of the reason in this entry."""
    need(webui, "AND prompts" if "prompt" in request_ else "")
    plain = generated(webui, {}, **request_)
    found = generated(webui, options, **request_)
    assert found.left_out == (0, 0, 0) and largest_difference(found.pictures, plain.pictures) == 0
    assert why in found.reasons[part]
