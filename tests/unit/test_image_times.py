"""What is shown of an image's times: the mean over all of its steps, beside the host's own in their place."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import diffusers_output
from samplings import EVERY_THIRD, STEPS, Adopted, call_of, equal_distances, few_steps_suffice  # noqa: F401

from lib_onediff.core.call import PromptRows, half_of
from lib_onediff.core.inputs import take_rows
from lib_onediff.core.settings import Settings
from lib_onediff.core.table import ENOUGH
from lib_onediff.ui.status import described, summary_html

WHOLE_MS, CACHED_MS, ALONE_MS, HOST_MS = 900.0, 150.0, 500.0, 1200.0
# A forecast takes what it takes: very little.
SLACK = 10.0


class Images(Adopted):
    """The clock says what it is told."""

    @torch.no_grad()
    def make(self, size: int = 8, settings: Settings | None = None, seconds: float = 2.0) -> None:
        p, settings = SimpleNamespace(), settings or self.settings
        generation = self.runtime.generations.begin(p, settings)
        self.begin(why_no_forecast=lambda: "")
        for time in STEPS:
            call = call_of(self.unet, time, size=size)
            call.latent[1] = call.latent[0]
            rows = PromptRows(half_of(2, False), lambda call=call: self.host(take_rows(call, half_of(2, False))))
            self.runtime.run(self.unet, call, lambda call=call: self.host(call), guidance=lambda rows=rows: rows)
        self.runtime.generations.end(p)
        self.set_times()
        self.runtime.call_stats.end_image(generation, size, seconds=seconds)

    def host(self, call: Any) -> torch.Tensor:
        return diffusers_output(self.unet, call)

    def set_times(self) -> None:
        for entry in self.runtime.table.entries():
            own = CACHED_MS if entry.key.is_cached_pass else ALONE_MS if entry.key.batch == 1 else WHOLE_MS
            entry.own._times.extend([own] * 32)
            if entry.host._times:
                entry.host._times.extend([HOST_MS if entry.key.batch == 2 else HOST_MS / 2] * 32)

    def status(self) -> dict[str, Any]:
        return self.runtime.status()


def assert_times(times: Any, step_ms: float) -> None:
    """times: a status, or a row."""
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
def test_every_step_counts_where_times_are_shown_and_stored(
    options: dict[str, Any], steps: dict[str, int], step_ms: float, tmp_path: Path
) -> None:
    images = Images(**options)
    images.runtime.history.open(tmp_path)
    images.make()
    status = images.status()
    assert status["image"] == {"seconds": 2.0, "host_seconds": None, "steps": steps}
    assert_times(status, step_ms)
    (row,) = images.runtime.rows()
    assert_times(row, step_ms)
    # The next image is no part of it.
    images.make(size=9)
    assert_times(next(row for row in images.runtime.rows() if row.resolution == "64x64"), step_ms)
    images.runtime.keep_history()
    kept = {(row.resolution, row.batch): row for row in images.runtime.history.rows()}["64x64", 2]
    assert (kept.step_ms, kept.host_ms) == (pytest.approx(step_ms, abs=SLACK), pytest.approx(HOST_MS))
    facts = dict(described(status))
    assert facts["Image"] == "2.0 s" and " ms" in facts["Step"]


def test_what_the_host_made_is_compared_with_nothing_and_its_seconds_stand_beside_ours() -> None:
    images = Images()
    images.make(settings=Settings(enabled=False), seconds=5.0)
    status = images.status()
    assert (status["ratio"], status["image"]["steps"]) == (None, {"host": 20})
    assert dict(described(status))["Speed"] == "\N{EN DASH}" and "5.0 s/image" in summary_html(status)
    images.make(size=9)
    assert images.status()["image"]["host_seconds"] is None, "another size"
    images.make()
    assert dict(described(images.status()))["Image"] == "2.0 s (WebUI 5.0 s)"


def test_a_call_that_makes_a_size_ready_is_in_no_image() -> None:
    images = Images(**EVERY_THIRD)
    images.make()
    call = call_of(images.unet, STEPS[0], size=9)
    with images.runtime.wait_for_compile(), torch.no_grad():
        for _ in range(ENOUGH):
            images.runtime.run(images.unet, call, lambda: images.host(call))
    status = images.status()
    assert status["image"] == {"seconds": None, "host_seconds": None, "steps": {"whole": 1}}
    assert status["resolution"] == "72x72"
    images.make()
    images.make(size=9)
    assert {row.resolution: row.images for row in images.runtime.rows()} == {"64x64": 2, "72x72": 1}
