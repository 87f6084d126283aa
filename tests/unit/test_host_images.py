"""The WebUI's running and waiting images in the list of jobs, also if the WebUI's state lacks fields."""
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lib_onediff.core.settings import Settings
from lib_onediff.hosts.images import HostImages, step_of_host
from lib_onediff.runtime.generations import Generations


def interrupt() -> None:
    pass


@pytest.mark.parametrize(("state", "shown"), [
    ({"job": "txt2img", "job_no": 1, "job_count": 2, "sampling_step": 3, "sampling_steps": 20}, ("20 steps", 23, 40)),
    ({"job": "txt2img", "job_count": -1, "sampling_steps": 20}, ("20 steps", 0, 20)),
    ({"sampling_step": None, "sampling_steps": None}, ("", 0, 0)),
    ({}, ("", 0, 0)),
])
def test_a_running_image_is_a_job_whichever_fields_the_state_of_the_webui_has(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], shown: tuple[str, int, int]
) -> None:
    """state: the fields of modules.shared.state. shown: (title, done, total) of the job; done and total count the steps
    of all images of the run. A task that waits in the WebUI's queue is a job, too. images.jobs() returns the same job
    objects at each call."""
    monkeypatch.setitem(sys.modules, "modules.shared", SimpleNamespace(
        state=SimpleNamespace(interrupt=interrupt, **state)
    ))
    monkeypatch.setitem(sys.modules, "modules.progress", SimpleNamespace(pending_tasks={"task": 1.0}))
    generations = Generations()
    p = SimpleNamespace()
    generation = generations.begin(p, Settings())
    images = HostImages(generations)
    runs, waits = images.jobs()
    assert (runs.title, runs.done, runs.total) == shown and runs.state == "running" and waits.state == "queued"
    assert images.jobs() == [runs, waits], "the same objects"
    assert generations.end(p) is generation and images.jobs() == [waits]


def test_outside_of_a_webui_the_step_is_0_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """step_of_host() is (steps done, all steps) of the image in progress."""
    monkeypatch.delitem(sys.modules, "modules.shared", raising=False)
    assert step_of_host() == (0, 0)
