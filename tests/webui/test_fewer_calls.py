"""Guidance end and output forecast in a WebUI: off they change nothing, on they leave out what they say and no more."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from webui_client import PICTURE, Pictures, WebUI, largest_difference, one_run
from webui_compare import WHOLE_UNET
from webui_models import Models

TWELVE = {"steps": 12, "sampler_name": "Euler", "negative_prompt": "snow"}
# Of 12 steps at interval 3, these are computed: 0, 1, 2, 4, 8 and the last.
FORECAST, INTERVAL = 6, {"deepcache_interval": 3, "deepcache_depth": 0}
HALF = {"guidance_end": 0.5}


@dataclass(frozen=True)
class Counted:
    """A generation: its pictures, what became of its UNet calls, and the reasons in the status."""

    pictures: Pictures
    forecasts: int
    without_negative: int
    computed: int
    others: int
    reasons: dict[str, str]


def made(webui: WebUI, options: dict[str, Any], **request: Any) -> Counted:
    before = webui.status()
    pictures = webui.make({**PICTURE, **TWELVE, **request, **one_run(**options)})
    after = webui.status()
    assert after["faults"] == before["faults"]
    grown = lambda part, name: after[part][name] - before[part][name]  # noqa: E731
    calls = {route: grown("calls", route) for route in after["calls"]}
    computed = sum(calls[route] for route in WHOLE_UNET)
    return Counted(
        pictures, grown("forecast", "calls"), grown("guidance", "without_negative"), computed,
        sum(calls.values()) - computed, {part: after[part]["reason"] for part in ("forecast", "guidance")},
    )


def distance(one: Counted, other: Counted) -> float:
    """The mean over pixels, of 255."""
    return float(numpy.abs(one.pictures.pixels - other.pictures.pixels).mean())


@pytest.fixture(scope="module")
def first(webui: WebUI, models: Models) -> Counted:
    """A generation with neither, the host's image."""
    models.use("sd15")
    found, hosts = made(webui, {}), made(webui, {"enabled": False})
    assert largest_difference(found.pictures, hosts.pictures) <= 1 and hosts.others == found.computed
    return found


@pytest.fixture(scope="module")
def far(webui: WebUI, first: Counted) -> float:
    """How far the image of another seed is."""
    return distance(made(webui, {}, seed=8), first)


@pytest.fixture
def exact(webui: WebUI, sd15: Models, first: Counted) -> Iterator[Counted]:
    """A generation with neither, and bit for bit the same again after the test."""
    yield first
    again = made(webui, {"guidance_end": 1.0, "deepcache_interval": 1})
    assert largest_difference(again.pictures, first.pictures) == 0 and again.reasons == first.reasons
    assert (again.forecasts, again.without_negative) == (0, 0)


def assert_near(one: Counted, exact: Counted, far: float) -> None:
    """Another image than the exact one, and much nearer to it than that of another seed."""
    assert largest_difference(one.pictures, exact.pictures) > 0
    assert distance(one, exact) < 0.5 * far


def test_forecasts_answer_what_the_schedule_says(webui: WebUI, exact: Counted, far: float) -> None:
    found = made(webui, INTERVAL)
    assert (found.forecasts, found.others) == (FORECAST, 0) and found.reasons["forecast"] == ""
    assert found.forecasts + found.computed == exact.computed
    assert_near(found, exact, far)
    assert largest_difference(made(webui, INTERVAL).pictures, found.pictures) == 0


def test_ddim_has_forecasts_too(webui: WebUI, exact: Counted, far: float) -> None:
    ddim = {"sampler_name": "DDIM"}
    whole, found = made(webui, {}, **ddim), made(webui, INTERVAL, **ddim)
    assert found.forecasts >= FORECAST - 1 and found.others == 0 and found.reasons["forecast"] == ""
    assert found.forecasts + found.computed == whole.computed
    assert_near(found, whole, far)


@pytest.mark.parametrize(("request_", "why"), [
    ({"sampler_name": "Euler a"}, "Euler and DDIM"), ({"sampler_name": "DPM++ 2M"}, "Euler and DDIM"),
    ({"steps": 7}, "10 steps"),
], ids=lambda given: str(given))
def test_forecasts_rest_and_say_why(webui: WebUI, exact: Counted, request_: dict[str, Any], why: str) -> None:
    whole, found = made(webui, {}, **request_), made(webui, INTERVAL, **request_)
    assert found.forecasts == 0 and largest_difference(found.pictures, whole.pictures) == 0
    assert found.reasons["forecast"].startswith("Output forecast rests: ") and why in found.reasons["forecast"]


@pytest.mark.parametrize("request_", [{}, {"batch_size": 2}, {"sampler_name": "DPM++ 2M"}], ids=str)
def test_half_of_the_steps_have_no_negative_prompt(
    webui: WebUI, exact: Counted, far: float, request_: dict[str, Any]
) -> None:
    whole = made(webui, {}, **request_)
    found = made(webui, HALF, **request_)
    assert (found.without_negative, found.others) == (6, 0) and found.reasons["guidance"] == ""
    assert found.computed == whole.computed
    assert_near(found, whole, far)


def test_both_together(webui: WebUI, exact: Counted, far: float) -> None:
    """The line begins anew where the negative prompt ends: steps 6 and 7 are computed, for the prompt alone."""
    found = made(webui, {**INTERVAL, **HALF})
    assert (found.forecasts, found.computed, found.others) == (4, 8, 0), found.reasons
    assert set(found.reasons.values()) == {""}
    assert_near(found, exact, far)


def test_guidance_without_a_negative_half_or_with_several_prompts_is_whole(webui: WebUI, exact: Counted) -> None:
    for request in ({"cfg_scale": 1}, {"steps": 7}, {"prompt": "a fox AND a hill"}):
        if webui.is_standalone and "prompt" in request:
            continue  # It has no AND prompts.
        whole, found = made(webui, {}, **request), made(webui, HALF, **request)
        assert found.without_negative == 0 and largest_difference(found.pictures, whole.pictures) == 0, request
        assert found.reasons["guidance"].startswith("Guidance end rests: "), request
