"""Hundreds of requests that hypothesis makes up, thousands at night: no fault, and no effect that was not asked for."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("hypothesis")

import hypothesis
from api_builders import SECONDS, Api, a1111s_app, command_line, remember
from api_requests import PASSWORD, ROWS, Request, requests
from fastapi.testclient import TestClient
from grid import WHOLE
from runtime_fixtures import remember_nothing

from lib_onediff.runtime.runtime import runtime

REQUESTS = 2000 if WHOLE else 300
PREFIX, OURS = "/onediff/v1", "onediff"
# What must have come up, so that not all was refused at the door.
OUTCOMES = [
    ("prewarm", 202), ("prewarm", 422), ("purge", 200), ("purge", 422), ("purge", 401), ("purge", 403), ("pin", 200),
    ("pin", 404), ("release", 200), ("jobs", 200), ("jobs", 404), ("shapes", 200),
]


@pytest.fixture
def client() -> Iterator[TestClient]:
    """Of a WebUI with --api-auth, and without a model, for which nothing can be made ready."""
    api = Api()
    app = api.add_to(a1111s_app("ann:one"), command_line(api_auth="ann:one"))
    yield TestClient(app, raise_server_exceptions=False)
    api.warmup.stop(SECONDS)


class State(NamedTuple):
    """What a request may have changed."""

    settings: Any
    files: set[Path]
    job: int
    pins: dict[tuple[str, str], bool]


def state(client: TestClient, folder: Path) -> State:
    jobs = client.get(f"{PREFIX}/jobs", headers=PASSWORD).json()["jobs"]
    return State(
        runtime.settings, {file for file in folder.rglob("*") if OURS not in file.parts},
        max((job["id"] for job in jobs), default=0),
        {(row.resolution, row.model): row.pinned for row in runtime.rows()},
    )


def start_again_with_rows(folder: Path) -> None:
    remember_nothing()
    remember(folder, ROWS)


def check_effect(request: Request, answer: Any, before: State, after: State) -> None:
    """Only what was asked for is different."""
    assert (after.settings, after.files) == (before.settings, before.files)
    done = request.is_trusted and answer.status_code < 300
    name = request.path if request.method == "POST" and done else ""
    if name != "prewarm":
        assert after.job == before.job
    if name == "purge":
        body, gone = json.loads(request.body), set(before.pins) - set(after.pins)
        named = {
            (resolution, model) for resolution, model in before.pins
            if body.get("all") or body.get("disk") or (
                resolution in (body.get("resolutions") or [resolution]) and model in (body.get("model"), model)
                and (body.get("model") in (None, model)))
        }
        assert gone <= named and set(after.pins) <= set(before.pins)
    elif name == "pin":
        body = json.loads(request.body)
        changed = {row for row in before.pins if before.pins[row] != after.pins[row]}
        assert changed <= {(body["resolution"], body["model"])} and set(after.pins) == set(before.pins)
    else:
        assert after.pins == before.pins


def test_no_request_breaks_anything(client: TestClient, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / OURS
    start_again_with_rows(folder)
    seen: dict[tuple[str, int], int] = {}
    before = state(client, tmp_path)

    @hypothesis.settings(
        max_examples=REQUESTS, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(request=requests)
    def send(request: Request) -> None:
        nonlocal before
        if len(before.pins) < len(ROWS):
            start_again_with_rows(folder)
            before = state(client, tmp_path)
        url = f"{PREFIX}/{request.path}"
        answer = client.request(request.method, url, content=request.body, headers=request.headers)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400 and request.method != "HEAD":
            assert isinstance(answer.json()["detail"], str), answer.text
        if not request.is_trusted:
            reads = request.method == "GET" and request.headers.get("Authorization") == PASSWORD["Authorization"]
            assert answer.status_code >= 400 or reads, answer.text
        after = state(client, tmp_path)
        check_effect(request, answer, before, after)
        before = after
        path = request.path.partition("?")[0].partition("/")[0]
        seen[path, answer.status_code] = seen.get((path, answer.status_code), 0) + 1

    send()
    assert sum(seen.values()) >= REQUESTS
    missing = [outcome for outcome in OUTCOMES if outcome not in seen]
    assert not missing, sorted(seen.items())
