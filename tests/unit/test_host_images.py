"""The WebUI's images as jobs, whatever its state does not have."""
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


@pytest.mark.parametrize(("state", "told"), [
    ({"job": "txt2img", "job_no": 1, "job_count": 2, "sampling_step": 3, "sampling_steps": 20}, ("20 steps", 23, 40)),
    ({"job": "txt2img", "job_count": -1, "sampling_steps": 20}, ("20 steps", 0, 20)),
    ({"sampling_step": None, "sampling_steps": None}, ("", 0, 0)),
    ({}, ("", 0, 0)),
])
def test_a_state_without_some_fields_is_an_image_all_the_same(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], told: tuple[str, int, int]
) -> None:
    monkeypatch.setitem(sys.modules, "modules.shared", SimpleNamespace(
        state=SimpleNamespace(interrupt=interrupt, **state)
    ))
    monkeypatch.setitem(sys.modules, "modules.progress", SimpleNamespace(pending_tasks={"task": 1.0}))
    generations = Generations()
    p = SimpleNamespace()
    generation = generations.begin(p, Settings())
    images = HostImages(generations)
    runs, waits = images.jobs()
    assert (runs.title, runs.done, runs.total) == told and runs.state == "running" and waits.state == "queued"
    assert images.jobs() == [runs, waits], "the same objects"
    assert generations.end(p) is generation and images.jobs() == [waits]


def test_no_webui_has_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "modules.shared", raising=False)
    assert step_of_host() == (0, 0)
