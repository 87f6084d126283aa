"""Pre-warming over the REST API: it prepares the calls that the next image at a size needs. An image that is requested
meanwhile waits for one size at most."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import requests
from busy import until
from webui_client import PICTURE, WebUI
from webui_models import Models
from webui_process import HostProcess

SECONDS = 600
PENDING = ("queued", "running")
Job = dict[str, Any]
READY = ("proved", "ready")
SERVED = ("graph", "plain")
# A hundred tokens for every tokenizer, whatever words it knows: more than one piece of a prompt, and less than two.
LONG = " ".join("abcdefghij" * 10)
CALLS_OF_A_JOB = 9  # At most: three for each kind of call that a WebUI makes at a size.


class Prewarm:
    """The pre-warm jobs of one WebUI, over the API."""

    def __init__(self, webui: WebUI) -> None:
        self.webui = webui

    def ask(self, sizes: str, **more: Any) -> list[Job]:
        """Request a pre-warm of these sizes. more: other fields of the request. Returns their jobs."""
        answer = self.webui.post("/onediff/v1/prewarm", {"sizes": sizes, **more})
        assert answer.status_code == 202, answer.text
        return answer.json()["jobs"]

    def jobs(self, asked: Iterable[Job] | None = None) -> list[Job]:
        """The current state of all jobs, or of those in asked."""
        jobs = self.webui.get("/onediff/v1/jobs")["jobs"]
        wanted = None if asked is None else {job["id"] for job in asked}
        return [job for job in jobs if wanted is None or job["id"] in wanted]

    def wait(self, asked: Iterable[Job], look: Callable[[list[Job]], bool]) -> list[Job]:
        """Wait until look() of the jobs' current states is true. Returns these states."""
        asked = list(asked)
        jobs: list[Job] = []

        def wanted() -> bool:
            jobs[:] = self.jobs(asked)
            return look(jobs)

        until(wanted, lambda: jobs, SECONDS, 0.1)
        return jobs

    def finish(self, asked: Iterable[Job]) -> list[Job]:
        """Wait until all of these jobs are over. Returns their states."""
        return self.wait(asked, lambda jobs: not any(job["state"] in PENDING for job in jobs))

    def shapes(self, resolution: str) -> dict[tuple[int, int], dict[str, Any]]:
        """The shapes that OneDiff has prepared at a resolution, by (number of latents, tokens). A decode of the VAE has
        0 tokens."""
        rows = self.webui.get("/onediff/v1/shapes")["rows"]
        return {
            (shape["batch"], shape["tokens"]): shape
            for row in rows if row["resolution"] == resolution for shape in row["shapes"]
        }

    def forget(self, *resolutions: str) -> None:
        answer = self.webui.post("/onediff/v1/purge", {"resolutions": list(resolutions)})
        assert answer.status_code in (200, 404), answer.text


@pytest.fixture
def prewarm(webui: WebUI, sd15: Models) -> Iterator[Prewarm]:
    webui.txt2img()  # Some hosts load the checkpoint with the first picture.
    queue = Prewarm(webui)
    yield queue
    for job in queue.jobs():
        if job["state"] in PENDING:
            requests.delete(f"{webui.url}/onediff/v1/jobs/{job['id']}", timeout=30)
    queue.finish(queue.jobs())


def grown(webui: WebUI, before: dict[str, int]) -> dict[str, int]:
    """The number of UNet calls by each route since `before`."""
    now = webui.calls()
    return {route: count - before[route] for route, count in now.items()}


def image_by_prepared_shapes(prewarm: Prewarm, **changes: Any) -> None:
    """Make an image, and assert that it used only shapes that were prepared before it, for its UNet calls and its
    decode, that OneDiff served every UNet call, and that the WebUI's own forward was not timed again. changes: other
    parameters of the request."""
    request = {**PICTURE, **changes}
    resolution = f"{request['width']}x{request['height']}"
    before = prewarm.shapes(resolution)
    calls = prewarm.webui.calls()
    assert before and all(shape["state"] in READY for shape in before.values()), before
    assert len(prewarm.webui.txt2img(**changes).images) >= request.get("batch_size", 1)
    after = prewarm.shapes(resolution)
    made = grown(prewarm.webui, calls)
    assert made["host"] == 0 and sum(made[route] for route in SERVED) >= request["steps"], made
    assert set(after) == set(before), "the picture needed a kind of call that was not made ready"
    used = {kind for kind in after if after[kind]["uses"] > before[kind]["uses"]}
    assert {tokens > 0 for _, tokens in used} == {True, False}, "a UNet call and a decode"
    for kind in used:
        # The first call of the image is checked, and the host's own is not timed once more.
        assert after[kind]["host_ms"] == before[kind]["host_ms"] is not None, kind


def test_an_image_at_a_pre_warmed_size_uses_only_prepared_shapes(prewarm: Prewarm) -> None:
    """The jobs' UNet calls are all served by OneDiff. For the images, see image_by_prepared_shapes()."""
    resolutions = ("96x64", "64x96", "88x72")
    prewarm.forget(*resolutions)
    before = prewarm.webui.calls()
    jobs = prewarm.finish(prewarm.ask(", ".join(resolutions)))
    assert [(job["size"], job["source"]) for job in jobs] == [(size, "API") for size in resolutions]
    assert {job["state"] for job in jobs} == {"done"}
    made = grown(prewarm.webui, before)
    assert made["host"] == 0 and sum(made[route] for route in SERVED) == sum(job["done"] for job in jobs)
    for resolution in resolutions:
        width, height = map(int, resolution.split("x"))
        image_by_prepared_shapes(prewarm, width=width, height=height)


def test_a_batch_and_a_long_prompt_are_pre_warmed(prewarm: Prewarm) -> None:
    """"x2": a batch of two images. tokens: the length of a prompt of two pieces of 77 tokens. See
    image_by_prepared_shapes()."""
    prewarm.forget("72x64")
    batch, long = prewarm.finish([*prewarm.ask("72x64 x2"), *prewarm.ask("72x64", tokens=154)])
    assert (batch["state"], long["state"], long["tokens"]) == ("done", "done", 154)
    made = set(prewarm.shapes("72x64"))
    # (rows, tokens); half the rows where the WebUI computes prompt and negative prompt in calls of their own.
    assert made & {(4, 77), (2, 77)} and made & {(2, 154), (1, 154)}
    image_by_prepared_shapes(prewarm, width=72, height=64, batch_size=2)
    if not prewarm.webui.is_standalone:
        image_by_prepared_shapes(prewarm, width=72, height=64, prompt=LONG, negative_prompt="blurry")


@pytest.mark.parametrize("option, value", [("batch_cond_uncond", False), ("pad_cond_uncond", True)])
def test_a_pre_warm_prepares_the_calls_that_the_batching_options_of_the_webui_cause(
    prewarm: Prewarm, option: str, value: bool
) -> None:
    """batch_cond_uncond: whether prompt and negative prompt are computed in one UNet call. pad_cond_uncond: whether
    they are padded to one length. See image_by_prepared_shapes()."""
    webui = prewarm.webui
    if option not in webui.get("/sdapi/v1/options"):
        pytest.skip(f"this host has no option {option}")
    with webui.options(**{option: value}):
        prewarm.forget("64x80")
        prewarm.finish(prewarm.ask("64x80", tokens=154))
        assert (2, 154) in prewarm.shapes("64x80") or option == "batch_cond_uncond"
        image_by_prepared_shapes(prewarm, width=64, height=80, prompt=LONG, negative_prompt="blurry")
        image_by_prepared_shapes(prewarm, width=64, height=80, prompt=LONG, negative_prompt=LONG)


def test_an_image_during_a_pre_warm_waits_for_one_size_at_most_and_equals_one_without_it(prewarm: Prewarm) -> None:
    """20 sizes are queued. From the image's request to its end, at most as many calls are made for them as one size
    needs (CALLS_OF_A_JOB). The image equals the one without a pre-warm."""
    webui = prewarm.webui
    webui.txt2img(seed=3)
    alone = webui.txt2img(seed=3)
    asked = prewarm.ask(", ".join(f"{128 + 8 * number}x128" for number in range(20)))
    done = sum(job["done"] for job in prewarm.wait(asked, lambda jobs: jobs[0]["done"] >= 1))
    picture = webui.txt2img(seed=3)
    now = prewarm.jobs(asked)
    assert any(job["state"] in PENDING for job in now), "the warm-up was over before the picture"
    assert sum(job["done"] for job in now) - done <= CALLS_OF_A_JOB
    assert numpy.array_equal(picture.pixels, alone.pixels)


# --- at the start of a process ----------------------------------------------------------------------------------------


def test_the_most_used_sizes_of_an_earlier_process_are_pre_warmed_at_the_start(tmp_path: Path) -> None:
    """The first process makes images at three sizes, pins the least used one, and sets the option "most used 2". The
    next one pre-warms the two most used sizes, and still has the third size and its pin."""
    with HostProcess.running("--port", "0", "--data-dir", str(tmp_path)) as host:
        webui = WebUI(host.url())
        for width, steps in ((64, 3), (72, 20), (80, 10)):
            webui.txt2img(width=width, height=64, steps=steps)
        pinned = {"resolution": "64x64", "model": webui.status()["model"]}
        assert webui.post("/onediff/v1/pin", pinned).status_code == 200
        webui.set_options(onediff_prewarm="most used 2")
    with HostProcess.running("--port", "0", "--data-dir", str(tmp_path)) as host:
        prewarm = Prewarm(WebUI(host.url()))
        jobs = prewarm.finish(prewarm.jobs())
        assert [(job["size"], job["source"], job["state"]) for job in jobs] == [
            ("72x64", "most used", "done"), ("80x64", "most used", "done"),
        ], f"{jobs!r}\n{host.output}"
        rows = {row["resolution"]: row for row in prewarm.webui.get("/onediff/v1/shapes")["rows"]}
        assert rows["64x64"]["state"] == "on disk" and rows["72x64"]["state"] in READY
        assert {resolution for resolution, row in rows.items() if row["pinned"]} == {"64x64"}
    assert "Traceback" not in host.output
