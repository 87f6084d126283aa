"""Helpers that compare generations with OneDiff on and off: their images, and the routes of their UNet calls.

route: what computed a call. graph: OneDiff, by CUDA graphs; plain: OneDiff without graphs; host: the WebUI.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
from webui_client import PICTURE, Pictures, WebUI, largest_difference, one_run

LARGEST_DIFFERENCE = 1  # of 255
ROUTES = ("graph", "plain", "host")
WHOLE_UNET = ("graph", "plain")
GRAPHS = "/onediff-graphs/v1"
# Features that a WebUI lacks, by kind.
NOT_SERVED = {
    "standalone": {
        "AND prompts", "hires fix", "refiner", "tiling", "live preview", "skip", "LoRA", "UI reload", "ControlNet",
        "checkpoint switch", "long prompts", "masks", "img2img",
    },
    "forge": {"tiling"},  # It ignores the option, and prints that tiling is under maintenance. Neo has tiling.
}


@dataclass(frozen=True)
class Run:
    """A generation: its images, the number of UNet calls by route, and the reason given for the last call."""

    pictures: Pictures
    calls: dict[str, int]
    reason: str

    def served(self, routes: tuple[str, ...]) -> int:
        return sum(self.calls[route] for route in routes)


def need(webui: WebUI, feature: str) -> None:
    """Skip the test if the WebUI lacks a feature."""
    if feature == "tiling" and webui.is_neo:
        return
    if feature in NOT_SERVED.get(webui.kind, ()):
        pytest.skip(f"the {webui.kind} host has no {feature}: give the address of another WebUI with --webui URL")


def run(webui: WebUI, request: dict[str, Any], **options: Any) -> Run:
    """Make the images of a request, with fields of PICTURE for those that it lacks. options: OneDiff's, for this
    run."""
    scripts = {**request.get("alwayson_scripts", {}), **one_run(**options)["alwayson_scripts"]}
    whole = {**PICTURE, **request, "alwayson_scripts": scripts}
    if webui.kind in ("forge", "ldm_patched") and "init_images" in whole:
        webui.make(whole)  # In these WebUIs, the first img2img image after another request differs from later ones.
    before = webui.calls()
    pictures = webui.make(whole)
    status = webui.status()
    grown = {route: status["calls"][route] - before[route] for route in ROUTES}
    assert min(grown.values()) >= 0, f"a counter of calls went back: {grown}"
    return Run(pictures, grown, status["reason"])


def run_on(webui: WebUI, request: dict[str, Any], least_calls: int | None = None, routes: Any = WHOLE_UNET) -> Run:
    """Make a run with OneDiff on. Asserts that each of its calls took one of the routes.

    least_calls: the fewest calls that the run must have; by default one for each step of each batch.
    """
    made = run(webui, request, enabled=True)
    others = [route for route in ROUTES if route not in routes]
    assert made.served(tuple(others)) == 0, f"{made.calls}: {made.reason}"
    assert made.served(routes) >= (least_calls or steps_of(request)), made.calls
    return made


def run_off(webui: WebUI, request: dict[str, Any], least_calls: int | None = None) -> Run:
    """Make a run with OneDiff off. Asserts that the WebUI computed each of its calls. least_calls: see run_on."""
    made = run(webui, request, enabled=False)
    assert made.served(("graph", "plain")) == 0, made.calls
    assert made.served(("host",)) >= (least_calls or steps_of(request)), made.calls
    return made


@contextlib.contextmanager
def graphs_on_a_cpu(webui: WebUI) -> Iterator[None]:
    """A context in which OneDiff replays graphs on a CPU, by the extension onediff-graphs. Skips the test if the WebUI
    does not have this extension."""
    if not webui.has(GRAPHS):
        pytest.skip("link tests/webui/extensions/onediff-graphs into the WebUI's extensions folder")
    assert webui.post(GRAPHS, {"on": True}).json()["on"]
    try:
        yield
    finally:
        webui.post(GRAPHS, {"on": False})


def steps_of(request: dict[str, Any]) -> int:
    whole = {**PICTURE, **request}
    return whole["steps"] * whole.get("n_iter", 1)


def assert_same_on_and_off(webui: WebUI, request: dict[str, Any], least_calls: int | None = None) -> tuple[Run, Run]:
    """Make a request with OneDiff on and off. Asserts that OneDiff and the WebUI, respectively, computed all UNet
    calls, in equal numbers, and that the images are the same. Returns both runs."""
    on = run_on(webui, request, least_calls)
    off = run_off(webui, request, least_calls)
    assert on.served(WHOLE_UNET) == off.served(("host",)), f"on {on.calls}, off {off.calls}"
    assert_same(on, off)
    return on, off


def assert_within(
    webui: WebUI, request: dict[str, Any], plain_request: dict[str, Any], reason: str, routes: Any = WHOLE_UNET
) -> tuple[Run, Run]:
    """Assert that with another extension's feature, all UNet calls take one of the routes, with a reason that matches
    the pattern; that the image is the same with OneDiff off; and that a later image without the feature equals an
    earlier one to the bit. request, plain_request: with and without the feature. Returns the runs without and with
    it."""
    plain, _ = assert_same_on_and_off(webui, plain_request)
    off = run(webui, request, enabled=False)
    calls = off.calls["host"]
    assert off.served(("graph", "plain")) == 0 and calls >= steps_of(request)
    on = run_on(webui, request, calls, routes)
    assert calls == on.served(routes) and re.search(reason, on.reason, re.IGNORECASE), (on.calls, on.reason)
    assert_same(on, off)
    assert largest_difference(run_on(webui, plain_request).pictures, plain.pictures) == 0
    return plain, on


def assert_between_graphs(
    webui: WebUI, request: dict[str, Any], plain_request: dict[str, Any], reason: str = ""
) -> tuple[Run, Run]:
    """As assert_within, for calls in which the parts between the other extension's functions are replayed as graphs
    (see graphs_on_a_cpu)."""
    for _ in range(2):
        # The first use of a shape is checked, the second is captured: from the third on, images are equal to the bit.
        plain = run_on(webui, plain_request)
        run_on(webui, request)
    on = run_on(webui, request, routes=("graph",))
    assert re.search(reason, on.reason, re.IGNORECASE), on.reason
    assert_same(on, run_off(webui, request))
    assert largest_difference(run_on(webui, plain_request).pictures, plain.pictures) == 0
    return plain, on


def assert_same(one: Run, other: Run) -> None:
    """Assert that the images of two runs differ in no pixel by more than 1 of 255."""
    difference = largest_difference(one.pictures, other.pictures)
    assert difference <= LARGEST_DIFFERENCE, f"{difference} of 255 apart"


def assert_different(one: Run, other: Run, what: str) -> None:
    """Assert that the first images of two runs differ, since a test of a feature that changes nothing could not fail.
    what: the feature."""
    mine = one.pictures.arrays[0]
    yours = other.pictures.arrays[0]
    if mine.shape == yours.shape:
        assert numpy.abs(mine - yours).max() > LARGEST_DIFFERENCE, f"{what} changed nothing"
