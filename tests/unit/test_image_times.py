"""The times of an image in the status and the table: the time of a step is the mean over all steps of the image (whole,
cached or skipped), and the speedup compares it with the WebUI's time of a whole step."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import diffusers_output
from samplings import EVERY_THIRD, STEPS, Adopted, call_of, evenly_spaced, few_steps_suffice  # noqa: F401

from lib_onediff.core import sampling, table
from lib_onediff.core.call import PromptRows, half_of
from lib_onediff.core.inputs import take_rows
from lib_onediff.core.sampling import Solver
from lib_onediff.core.settings import Settings
from lib_onediff.core.table import ENOUGH, State
from lib_onediff.runtime.rows import ResolutionRow
from lib_onediff.ui.status import image_facts, spent_html, summary_html

WHOLE_MS = 900.0
CACHED_MS = 150.0
ALONE_MS = 500.0
HOST_MS = 1200.0
# A forecast takes almost no time.
SLACK = 10.0


class Images(Adopted):
    """Makes images, and then sets the times of their passes to WHOLE_MS, CACHED_MS, ALONE_MS (prompt alone) and HOST_MS
    (the WebUI's)."""

    @torch.no_grad()
    def make(
        self, size: int = 8, settings: Settings | None = None, seconds: float = 2.0, steps: Sequence[float] = STEPS,
        second_pass: Callable[[], object] = lambda: None, is_whole: bool = True,
    ) -> None:
        """Make an image. size: the side of the latent. seconds: the time of the image. second_pass: called after its
        steps. is_whole: False if the image was interrupted."""
        p = SimpleNamespace()
        settings = settings or self.settings
        generation = self.runtime.generations.begin(p, settings)
        self.sample(size, steps)
        second_pass()
        self.runtime.generations.end(p)
        self.set_times()
        self.runtime.call_stats.end_image(generation, size, seconds=seconds, is_whole=is_whole)

    @torch.no_grad()
    def sample(self, size: int = 8, steps: Sequence[float] = STEPS) -> None:
        self.begin(steps, solver=lambda: Solver.FIRST_ORDER)
        for at in steps:
            call = call_of(self.unet, at, size=size)
            call.latent[1] = call.latent[0]
            rows = PromptRows(half_of(2, False), lambda call=call: self.host(take_rows(call, half_of(2, False))))
            self.runtime.run(self.unet, call, lambda call=call: self.host(call), guidance=lambda rows=rows: rows)

    def row(self, resolution: str) -> ResolutionRow:
        return next(row for row in self.runtime.rows() if row.resolution == resolution)

    def host(self, call: Any) -> torch.Tensor:
        return diffusers_output(self.unet, call)

    def set_times(self) -> None:
        for entry in self.runtime.table.entries():
            own = WHOLE_MS
            if entry.key.is_cached_pass:
                own = CACHED_MS
            elif entry.key.batch == 1:
                own = ALONE_MS
            add_times(entry.own, own)
            if entry.host.median_ms is not None:
                add_times(entry.host, HOST_MS if entry.key.batch == 2 else HOST_MS / 2)

    def status(self) -> dict[str, Any]:
        return self.runtime.status()


def add_times(stopwatch: table.Stopwatch, milliseconds: float) -> None:
    """Add so many times of this length that earlier ones no longer count."""
    for _ in range(32):
        stopwatch.add(milliseconds / 1e3)


def assert_times(times: Any, step_ms: float) -> None:
    """Assert the times of a status or a row: step_ms, the WebUI's HOST_MS, and their ratio."""
    of = times.get if isinstance(times, dict) else lambda name: getattr(times, name)
    assert (of("step_ms"), of("host_ms")) == (pytest.approx(step_ms, abs=SLACK), pytest.approx(HOST_MS))
    assert of("ratio") == pytest.approx(HOST_MS / of("step_ms"))


@pytest.mark.parametrize(("options", "steps", "step_ms"), [
    ({}, {"whole": 20}, WHOLE_MS),
    (EVERY_THIRD, {"whole": 8, "cached": 12}, (8 * WHOLE_MS + 12 * CACHED_MS) / 20),
    ({"skip_negative_after": 50}, {"whole": 10, "prompt alone": 10}, (WHOLE_MS + ALONE_MS) / 2),
    ({"deepcache_interval": 2, "deepcache_depth": 0, "skip_negative_after": 60},
     {"whole": 7, "prompt alone": 6, "forecast": 7},
     (7 * WHOLE_MS + 6 * ALONE_MS) / 20),
], ids=["exact", "DeepCache", "guidance end", "forecast and guidance end"])
def test_the_time_of_a_step_is_the_mean_over_whole_cached_and_skipped_steps(
    options: dict[str, Any], steps: dict[str, int], step_ms: float, tmp_path: Path
) -> None:
    """The same mean is in the status, in the row of the size, and in the history on the disk. steps: the number of
    steps of each kind. step_ms: the mean of the times that set_times() gives them."""
    images = Images(**options)
    images.runtime.history.open(tmp_path)
    images.make()
    status = images.status()
    image = images.status()["image"]
    assert (image["state"], image["images"], image["seconds"], image["host_seconds"]) == ("done", 1, 2.0, None)
    assert image["steps"] == steps and image["calls"] == {"plain": 20 - steps.get("forecast", 0)}
    assert [(part["resolution"], part["steps"]) for part in image["parts"]] == [("64x64", steps)]
    assert_times(status, step_ms)
    (row,) = images.runtime.rows()
    assert_times(row, step_ms)
    # The next image is not part of it.
    images.make(size=9)
    assert_times(next(row for row in images.runtime.rows() if row.resolution == "64x64"), step_ms)
    images.runtime.keep_history()
    kept = {(row.resolution, row.batch): row for row in images.runtime.history.rows()}["64x64", 2]
    assert (kept.step_ms, kept.host_ms) == (pytest.approx(step_ms, abs=SLACK), pytest.approx(HOST_MS))
    facts = dict(image_facts(status))
    assert facts["Image"] == "2.0 s" and " ms" in facts["Step"]


def test_images_by_the_webui_have_no_speedup_and_are_the_baseline_of_our_images() -> None:
    """host_seconds, the baseline in the status, is the time of the WebUI's last image of the same size; None without
    one."""
    images = Images()
    images.make(settings=Settings(enabled=False), seconds=5.0)
    status = images.status()
    assert (status["ratio"], status["image"]["steps"]) == (None, {"host": 20})
    assert dict(image_facts(status))["Speed"] == "\N{EN DASH}" and "5.0 s/image" in summary_html(status)
    images.make(size=9)
    assert images.status()["image"]["host_seconds"] is None, "another size"
    images.make()
    assert dict(image_facts(images.status()))["Image"] == "2.0 s (WebUI 5.0 s)"


def test_calls_of_pre_warming_are_counted_in_no_image() -> None:
    """A size is pre-warmed between two images: the status still shows the last image, and only its total of calls
    grows."""
    images = Images(**EVERY_THIRD)
    images.make()
    before = images.status()
    call = call_of(images.unet, STEPS[0], size=9)
    with images.runtime.warming_up(), torch.no_grad():
        images.runtime.begin_sampling(images.unet)
        for _ in range(ENOUGH):
            images.runtime.run(images.unet, call, lambda: images.host(call))
    assert images.status()["calls"]["plain"] == 20 + ENOUGH
    assert {**images.status(), "calls": {}} == {**before, "calls": {}}
    images.make()
    images.make(size=9)
    assert {row.resolution: row.images for row in images.runtime.rows()} == {"64x64": 2, "72x72": 1}


# --- values of one image do not show in the next ----------------------------------------------------------------------


OFF = Settings(enabled=False)


def test_an_image_by_the_webui_alone_shows_nothing_of_our_last_image() -> None:
    """The backend, error and time of our image must not stay in the status. If the WebUI then makes an image of the
    same size, the row of this size keeps the times of the image that OneDiff made."""
    images = Images()
    images.make()
    before = images.row("64x64")
    images.make(size=9, settings=OFF, seconds=5.0)
    status = images.status()
    assert (status["route"], status["resolution"], status["model"]) == ("host", "72x72", before.model)
    assert (status["backend"], status["relative_error"], status["image"]["calls"]) == ("", None, {"host": 20})
    # The time of its steps is the host's own measured time.
    assert 0 < status["step_ms"] < 1e3 * 5.0 and status["step_ms"] != WHOLE_MS
    step = dict(image_facts(status))["Step"]
    assert f"{status['step_ms']:.3g} ms"[:3] in step and "WebUI" not in step
    assert images.row("64x64") == before
    # At the same size, the row still shows the steps of images that OneDiff has made.
    images.make(settings=OFF)
    after = images.row("64x64")
    assert (after.step_ms, after.ratio, after.images) == (before.step_ms, before.ratio, before.images + 1)


def test_an_image_whose_inputs_are_not_understood_is_shown_at_its_own_size_without_times() -> None:
    """OneDiff does not understand the WebUI's calls of the UNet, for the reason "inputs", and knows only the image's
    size. The row of the earlier image, of another size, does not change."""
    images = Images()
    images.make()
    before = images.row("64x64")
    p = SimpleNamespace()
    generation = images.runtime.generations.begin(p, images.settings)
    generation.resolution = "128x64"
    images.runtime.note_host("inputs", images.unet)
    images.runtime.generations.end(p)
    images.runtime.call_stats.end_image(generation, "like", seconds=1.0)
    status = images.status()
    assert (status["resolution"], status["reason"], status["step_ms"]) == ("128x64", "inputs", None)
    assert status["image"]["spent"]["rest"] is None, "how long it took is not known"
    assert images.row("64x64") == before


def test_the_row_of_a_size_shows_its_last_image_whichever_shapes_it_used() -> None:
    """The first two images use DeepCache, so that their shapes are used most; the third skips the negative prompt in
    half of its steps."""
    images = Images(**EVERY_THIRD)
    for _ in range(2):
        images.make()
    images.make(settings=Settings(skip_negative_after=50))
    assert_times(images.row("64x64"), (WHOLE_MS + ALONE_MS) / 2)
    images.make()
    assert_times(images.row("64x64"), (8 * WHOLE_MS + 12 * CACHED_MS) / 20)


def test_the_status_counts_full_and_cached_passes_of_the_last_image_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three images, the first uses DeepCache, the second has too few steps for it, and the third has a second pass
    with too few steps. A second pass belongs to the same image. The reason for no DeepCache is that of the same image,
    too."""
    images = Images(**EVERY_THIRD)
    images.make()
    assert images.status()["deepcache"] == {"full": 8, "cached": 12, "reason": ""}
    monkeypatch.setattr(sampling, "FEWEST_STEPS", 10)
    images.make(steps=STEPS[:4])
    short = images.status()["deepcache"]
    assert (short["full"], short["cached"]) == (0, 0) and "fewer than 10 steps" in short["reason"]
    # A second pass belongs to the same image.
    images.make(second_pass=lambda: images.sample(9, STEPS[:4]))
    both = images.status()
    assert (both["deepcache"]["full"], both["deepcache"]["cached"]) == (8, 12)
    assert both["deepcache"]["reason"].endswith("(at 4 of 24 steps)")
    assert [(part["resolution"], part["steps"]) for part in both["image"]["parts"]] == [
        ("64x64", {"whole": 8, "cached": 12}), ("72x72", {"whole": 4}),
    ]
    facts = dict(image_facts(both))
    assert facts["Sizes"].startswith("64x64: 20 steps, ") and "; 72x72: 4 steps, 900 ms" in facts["Sizes"]
    assert images.row("72x72").step_ms == WHOLE_MS


def test_the_reason_for_steps_by_the_webui_is_shown_until_the_end_of_the_image() -> None:
    """The WebUI computes 4 steps of the second pass, and OneDiff the later ones. The next image shows no such
    reason."""
    images = Images()
    images.make()
    theirs = iter(range(4))

    def second_pass() -> None:
        for _ in theirs:
            images.runtime.note_host("an extension has replaced input_blocks.2 by its own Scaler", images.unet)
        images.sample(steps=STEPS[:2])

    images.make(second_pass=second_pass)
    status = images.status()
    total = sum(images.status()["image"]["steps"].values())
    assert status["route"] != "host" and status["image"]["by_host"] == {
        "an extension has replaced input_blocks.2 by its own Scaler": 4
    }
    sentence = f"4 of {total} steps without OneDiff: an extension has replaced input_blocks.2 by its own Scaler"
    assert status["reason"].startswith(sentence) and status["reason"].count("Scaler") == 1
    images.make()
    assert "Scaler" not in images.status()["reason"] and images.status()["image"]["by_host"] == {}


def test_an_image_made_inside_another_has_a_record_of_its_own() -> None:
    """ADetailer makes such images. The steps of the inner image are not counted in the outer one, and its time is shown
    separately."""
    images = Images()
    images.make(second_pass=lambda: images.make(size=9, steps=STEPS[:4], seconds=0.5), seconds=2.0)
    outer = images.status()["image"]
    (inner,) = outer["inside"]
    assert (outer["steps"], inner["steps"], inner["resolution"]) == ({"whole": 20}, {"whole": 4}, "72x72")
    assert outer["spent"]["inside"] == inner["seconds"] == 0.5
    assert dict(image_facts(images.status()))["Images inside it"] == "72x72 0.5 s"
    assert {row.resolution: row.images for row in images.runtime.rows()} == {"64x64": 1, "72x72": 1}


def test_an_interrupted_image_is_shown_as_interrupted_and_is_no_baseline() -> None:
    """The time of an interrupted image, by the WebUI or by OneDiff, is that of fewer steps: later images must not be
    compared with it."""
    images = Images()
    for settings in (OFF, images.settings):
        images.make(steps=STEPS[:5], settings=settings, seconds=0.5, is_whole=False)
        status = images.status()
        assert (status["image"]["state"], status["image"]["images"]) == ("interrupted", 0)
        assert "interrupted after 0.5 s" in summary_html(status)
        assert dict(image_facts(status))["Image"] == "interrupted after 0.5 s"
    images.make()
    assert images.status()["image"]["host_seconds"] is None
    assert images.row("64x64").images == 1


def test_an_image_that_failed_is_shown_as_failed_until_the_next_image() -> None:
    """After an exception, the WebUI deletes p, its processing object, without ending the generation."""
    images = Images()
    images.make()
    p = SimpleNamespace()
    images.runtime.generations.begin(p, images.settings)
    images.sample(9, STEPS[:4])
    assert images.status()["image"]["state"] == "in progress"
    del p  # as after an exception of the host
    status = images.status()
    assert (status["image"]["state"], status["resolution"]) == ("failed", "72x72")
    assert status["image"]["seconds"] is None and ">failed, " in summary_html(status)
    assert images.row("72x72").images == 0
    images.make()
    assert (images.status()["image"]["state"], images.status()["resolution"]) == ("done", "64x64")


def test_the_record_of_an_image_does_not_change_with_later_times_of_its_shapes() -> None:
    images = Images()
    images.make()
    before = images.runtime.call_stats.image
    for entry in images.runtime.table.entries():
        add_times(entry.own, 1.0)
    assert images.runtime.call_stats.image == before and before.step_ms == WHOLE_MS


def test_time_outside_of_the_steps_is_split_into_first_uses_and_the_rest() -> None:
    """A first use is the first call at a size, which is checked. The test sleeps 0.3 s after the steps: these are the
    rest. The parts of `spent` (UNet, first use, rest ...) add up to the time of the image."""
    images = Images()
    p = SimpleNamespace()
    generation = images.runtime.generations.begin(p, images.settings)
    began = time.perf_counter()
    images.sample()
    time.sleep(0.3)
    images.runtime.generations.end(p)
    record = images.runtime.call_stats.end_image(generation, "like")
    took = time.perf_counter() - began
    spent = record.spent
    assert record.seconds == pytest.approx(took, abs=0.1) and record.first_uses == 1
    assert record.step_ms is not None and spent.unet == pytest.approx(20 * record.step_ms / 1e3)
    assert spent.first_use > 0 and spent.slower == 0 and 0.3 <= spent.rest < 0.3 + 0.1
    assert sum(dataclasses.astuple(spent)) == pytest.approx(record.seconds, abs=0.01)
    status = images.status()
    assert f"other {spent.rest:.1f} s" in spent_html(status)
    summary = summary_html(status)
    # Which of both took longer depends on the machine.
    assert ("other 0." in summary or "first use of this size " in summary) and "/step" not in summary


def test_the_time_of_a_step_is_that_of_the_last_image_and_not_of_those_before_it() -> None:
    """Images.make() makes the first of two images and sets the times of its steps to 900 ms each; the steps of the
    second one count as long as they really took, which is less."""
    images = Images()
    images.make()
    p = SimpleNamespace()
    generation = images.runtime.generations.begin(p, images.settings)
    images.sample(steps=STEPS[:8])
    images.runtime.generations.end(p)
    record = images.runtime.call_stats.end_image(generation, "like")
    assert 8 * record.step_ms / 1e3 < record.seconds < 8 * WHOLE_MS / 1e3
    assert record.ratio == pytest.approx(HOST_MS / record.step_ms)
    assert images.row("64x64").step_ms == record.step_ms


def test_the_row_of_a_size_shows_the_speedup_of_its_last_image_as_the_status_does() -> None:
    """The shape of an earlier image is used more often than that of the last one."""
    images = Images()
    images.make()
    (used,) = images.runtime.table.entries()
    images.make(settings=dataclasses.replace(images.settings, skip_negative_after=5))
    row = images.row("64x64")
    assert used.uses == max(shape.uses for shape in row.shapes)
    assert row.reason == used.no_graph and row.ratio == images.status()["ratio"] is not None


# --- the table's bound ------------------------------------------------------------------------------------------------


def test_forgetting_a_row_deletes_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table may hold 4 shapes here, and must forget some at the fifth size. The pinned one, the ready one and the
    one in use stay. A forgotten size is checked again at its next use."""
    for name, value in (("MOST_SHAPES", 4), ("FORGOTTEN_AT_ONCE", 2), ("NEVER_FORGOTTEN", 1)):
        monkeypatch.setattr(table, name, value)
    images = Images()
    images.make(size=8, steps=STEPS[:2])
    images.runtime.history.pin(images.row("64x64").model, "64x64", True)
    for size in (9, 10, 11):
        images.make(size=size, steps=STEPS[:2])
    ready = next(entry for entry in images.runtime.table.entries() if entry.key.resolution == "72x72")
    ready.state = State.READY
    images.make(size=12, steps=STEPS[:2])
    # Pinned, ready, and in use.
    assert {row.resolution for row in images.runtime.rows()} == {"64x64", "72x72", "96x96"}
    call_stats = images.runtime.call_stats
    assert {place.resolution for place in call_stats.images} == {"64x64", "72x72", "96x96"}
    assert {place.resolution for place in call_stats.parts} == {"64x64", "72x72", "96x96"}
    # A shape that is used again is checked again.
    images.make(size=10, steps=STEPS[:2])
    assert images.status()["image"]["first_uses"] == 1 and images.row("80x80").images == 1
