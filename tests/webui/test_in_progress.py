"""Live previews, interrupt and skip while the WebUI makes an image with OneDiff on."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from busy import until
from webui_client import PICTURE, Pictures, WebUI, one_run
from webui_compare import assert_same, assert_same_on_and_off, largest_difference, need, run_on
from webui_models import Models

LONG = {**PICTURE, "width": 128, "height": 128, "sampler_name": "Euler"}


class InBackground:
    """A generation that is requested over the API in another thread."""

    def __init__(self, webui: WebUI, request: dict[str, Any]) -> None:
        self.webui = webui
        self._answers: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(webui.post("/sdapi/v1/txt2img", request)))
        self._thread.start()

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda progress: progress["state"]["sampling_step"] >= step, f"step {step}")

    def wait_until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        def there() -> bool:
            is_there = condition(self.webui.get("/sdapi/v1/progress"))
            assert is_there or self._thread.is_alive(), f"the generation ended before {what}"
            return is_there

        until(there, what, 180, 0.02)

    def pictures(self) -> Pictures:
        until(lambda: not self._thread.is_alive(), "the generation's end", 300)
        return Pictures(self._answers[0])


def long_run(webui: WebUI, **changes: Any) -> dict[str, Any]:
    """A request with OneDiff on that takes some seconds on the WebUI under test. changes: other parameters of it."""
    steps = 12 if webui.kind == "forge" else 100
    return {**LONG, "steps": steps, **one_run(enabled=True), **changes}


def test_an_interrupted_generation_returns_an_image_and_the_next_image_is_as_before(
    webui: WebUI, sd15: Models
) -> None:
    """OneDiff serves every call before the interrupt. The reported progress is between 0 and 1 before it, and 0 after
    it. The next image equals the one from before."""
    plain = run_on(webui, {})
    before = webui.calls()
    request = long_run(webui)
    generation = InBackground(webui, request)
    generation.wait_for_step(3)
    seen = webui.get("/sdapi/v1/progress")
    assert 0 < seen["progress"] < 1 and seen["state"]["sampling_steps"] == request["steps"]
    assert webui.post("/sdapi/v1/interrupt").status_code == 200
    assert len(generation.pictures().images) == 1
    after = webui.calls()
    served = sum(after[route] - before[route] for route in ("plain", "graph"))
    assert 3 <= served < request["steps"], "the interrupt came too late or too early to tell anything"
    assert after["host"] == before["host"]
    assert webui.get("/sdapi/v1/progress")["progress"] == 0
    assert_same(run_on(webui, {}), plain)
    assert_same_on_and_off(webui, {"width": 72, "height": 88, "n_iter": 2})


def test_an_image_after_a_skipped_one_is_the_same_as_without_the_skip(webui: WebUI, sd15: Models) -> None:
    """The first of two images is skipped, OneDiff serves every call, and no pixel of the second one differs by more
    than 1 of 255 from its image in a request without a skip."""
    need(webui, "skip")
    request = long_run(webui, n_iter=2)
    whole = webui.make(request)
    before = webui.calls()
    generation = InBackground(webui, request)
    generation.wait_for_step(3)
    assert webui.post("/sdapi/v1/skip").status_code == 200
    skipped = generation.pictures()
    after = webui.calls()
    served = sum(after[route] - before[route] for route in ("plain", "graph"))
    assert request["steps"] < served < 2 * request["steps"], "the skip came too late or too early to tell anything"
    assert after["host"] == before["host"]
    assert len(skipped.images) == 2
    skipped.images = skipped.images[1:]
    whole.images = whole.images[1:]
    assert largest_difference(skipped, whole) <= 1


@pytest.mark.parametrize("method", ["Approx cheap", "Full"])
def test_live_previews_change_no_image(webui: WebUI, sd15: Models, method: str) -> None:
    """No pixel differs by more than 1 of 255 from the image without previews. method: how the preview is made from the
    latent; Full decodes it by the VAE."""
    need(webui, "live preview")
    request = long_run(webui)
    quiet = webui.make(request)
    shown = {"live_previews_enable": True, "show_progress_every_n_steps": 1, "show_progress_type": method}
    with webui.options(**shown):
        generation = InBackground(webui, request)
        generation.wait_until(lambda progress: progress["current_image"] is not None, "a preview")
        generation.wait_for_step(5)
        made = generation.pictures()
        assert largest_difference(made, quiet) <= 1
        assert_same_on_and_off(webui, {})
