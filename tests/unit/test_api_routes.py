"""The REST API: what each endpoint does to the real runtime, store and pre-warm queue."""
from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from api_builders import SECONDS, Api, command_line, remember, wait_until
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lib_onediff.api import routes
from lib_onediff.core.settings import Settings
from lib_onediff.core.sizes import Size
from lib_onediff.prewarm import worker
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store import store as store_module
from lib_onediff.store.history import History
from lib_onediff.ui.cache.panel import Panel

ROWS = [("512x512", "SD1"), ("768x512", "SD1"), ("512x512", "SDXL")]


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.warmup.stop(SECONDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The cache folder, with ROWS in it."""
    remember(tmp_path, ROWS)
    return tmp_path


def rows_shown(api: Api, path: str = "shapes") -> set[tuple[str, str]]:
    """(resolution, model) of each row in the API's answer."""
    return {(row["resolution"], row["model"]) for row in api.get(path)["rows"]}


# --- endpoints and their documentation --------------------------------------------------------------------------------


def test_endpoints_exist_only_if_the_webuis_own_api_is_on() -> None:
    """The WebUI's own API is switched on by --api, and by --nowebui."""
    for flags, there in (({}, True), ({"api": False}, False), ({"api": False, "nowebui": True}, True)):
        app = Api().add_to(FastAPI(), command_line(**flags))
        assert ("/onediff/v1/status" in app.openapi()["paths"]) == there, flags
        assert (TestClient(app).get("/onediff/v1/status").status_code == 200) == there, flags


@pytest.mark.parametrize("has_page", [False, True])
def test_a_wrong_method_is_answered_with_405_and_the_allowed_methods(api: Api, has_page: bool) -> None:
    """The OpenAPI document lists only the allowed methods. has_page: the demo's page is mounted at /, and takes every
    path that is not the API's."""
    if has_page:
        api.app.mount("/", FastAPI())
    right = {"status": "GET", "shapes": "GET", "prewarm": "POST", "jobs": "GET, DELETE", "jobs/1": "GET, DELETE",
             "purge": "POST", "pin": "POST", "release": "POST"}
    for path, allowed in right.items():
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "ODD"} - set(allowed.split(", ")):
            answer = api.client.request(method, f"/onediff/v1/{path}")
            assert answer.status_code == 405 and answer.headers["allow"] == allowed, (method, path)
            assert answer.json() == {"detail": f"This path takes {allowed}, not {method}."}
        assert api.client.head(f"/onediff/v1/{path}").status_code == 405
    assert api.client.get("/onediff/v1/nothing").status_code == 404
    operations = [method for path in api.app.openapi()["paths"].values() for method in path]
    assert sorted(operations) == ["delete"] * 2 + ["get"] * 4 + ["post"] * 4


def test_the_openapi_document_describes_every_endpoint(api: Api) -> None:
    """Each of the ten operations has a summary and a description, and a body only where it is a POST."""
    paths = api.client.get("/openapi.json").json()["paths"]
    operations = [(method, one) for methods in paths.values() for method, one in methods.items()]
    assert len(operations) == 10 and all(one["summary"] and one["description"] for _, one in operations)
    assert all(("requestBody" in one) == (method == "post") for method, one in operations)


def test_the_documentation_names_every_field_of_the_answers(api: Api, folder: Path) -> None:
    """Each key of the answers' JSON is in .readme/api.md."""
    shapes = api.get("shapes")
    page = (Path(__file__).parents[2] / ".readme" / "api.md").read_text(encoding="utf-8")
    with api.webui.lock:
        job = api.post("prewarm", {"sizes": "64x64"}, 202)["jobs"][0]
    wait_until(lambda: api.get(f"jobs/{job['id']}")["state"] == "failed")
    others = [api.ask("DELETE", "jobs", 200)]
    others += api.post("release", {}), api.post("purge", {"all": True})
    for answer in (shapes, shapes["rows"][0], shapes["rows"][0]["shapes"][0], shapes["totals"], job, *others):
        assert all(f"`{name}`" in page for name in answer), [name for name in answer if f"`{name}`" not in page]


# --- ready ------------------------------------------------------------------------------------------------------------


def ready(api: Api) -> str:
    """The reason why GET status is not ready; "" if it is. Asserts that ?probe=true agrees, with status 200 or 503."""
    status = api.get("status")
    assert status["ready"] == (status["ready_reason"] == "")
    if status["ready"]:
        assert api.get("status?probe=true")["ready"] is True
    else:
        assert api.get("status?probe=true", 503) == {"detail": status["ready_reason"]}
    return status["ready_reason"]


def test_status_is_not_ready_before_the_checkpoint_is_loaded_and_its_sizes_are_prewarmed(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the WebUI loads a checkpoint at its start. It is not enough that the checkpoint's name is known: the WebUI
    must report that it is loaded."""
    monkeypatch.setattr(api.webui, "loads_at_start", lambda: True)
    assert ready(api) == worker.LOADING
    # The WebUI knows the checkpoint now, but has not reported it: nothing is queued yet.
    monkeypatch.setattr(api.webui, "model_name", lambda: "SD1")
    assert ready(api) == worker.LOADING
    with api.webui.lock:
        api.warmup.add([Size(64, 64)], "settings")
        api.warmup.checkpoint_loaded()
        assert ready(api) == "1 size is being made ready."
    wait_until(lambda: ready(api) == "")


def test_without_a_checkpoint_status_is_ready_unless_sizes_must_be_prewarmed(api: Api, folder: Path) -> None:
    """Here the WebUI loads no checkpoint at its start. With OneDiff switched off, nothing is pre-warmed."""
    assert ready(api) == ""
    for wanted in ({"prewarm": "512x512"}, {"prewarm": "most used 2"}):
        runtime.configure(Settings(**wanted))
        assert ready(api) == worker.NO_CHECKPOINT, wanted
        runtime.configure(Settings(**wanted, enabled=False))
        assert ready(api) == "", wanted


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_get_shapes_returns_the_rows_and_totals_of_the_runtime(api: Api, folder: Path) -> None:
    """The rows are read from the cache folder: SDXL's was recorded with 10 ms a step, and 20 ms without OneDiff."""
    answer = api.get("shapes")
    assert [row["resolution"] for row in answer["rows"]] == [row.resolution for row in runtime.rows()]
    row = next(row for row in answer["rows"] if row["model"] == "SDXL")
    assert (row["state"], row["step_ms"], row["host_ms"], row["ratio"]) == ("on disk", 10.0, 20.0, 2.0)
    assert row["shapes"][0]["batch"] == 2 and row["pinned"] is False and row["needs"] == 0
    # What lies on the disk may just be written.
    assert {**answer["totals"], "disk": 0} == {**vars(runtime.totals()), "disk": 0}
    assert answer["totals"]["disk"] > 0


# --- purging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "left"), [
    ({"resolutions": ["512x512"]}, {("768x512", "SD1")}),
    ({"resolutions": ["512x512"], "model": "SD1"}, {("768x512", "SD1"), ("512x512", "SDXL")}),
    ({"resolutions": ["512x512", "8x8"], "model": "SDXL"}, {("512x512", "SD1"), ("768x512", "SD1")}),
    ({"model": "SD1"}, {("512x512", "SDXL")}),
    ({"disk": True}, set()),
    ({"all": True}, set()),
])
def test_purge_deletes_only_the_named_entries(api: Api, folder: Path, body: dict[str, Any], left: set[Any]) -> None:
    """The answer lists the deleted rows. left: the rows of ROWS that remain."""
    before = rows_shown(api)
    answer = api.post("purge", body)
    assert rows_shown(api) == left
    if "disk" not in body:
        assert {(row["resolution"], row["model"]) for row in answer["purged"]} == before - left
    assert answer["disk"] == 0 or "disk" in body or "all" in body


@pytest.mark.parametrize("body", [
    {}, {"resolutions": None}, {"all": False}, {"resolutions": []}, {"all": True, "model": "SD1"},
    {"all": True, "disk": True}, {"disk": True, "resolutions": ["512x512"]}, {"model": ""}, {"everything": True},
    {"all": 1}, {"wait": 5}, None, [],
])
def test_a_purge_without_exactly_one_target_is_refused(api: Api, folder: Path, body: Any) -> None:
    """Each body is answered with 422, and a valid target that matches no row with 404. Nothing is deleted."""
    api.post("purge", body, 422)
    for unknown in ({"resolutions": ["768x512"], "model": "SDXL"}, {"model": "SD9"}):
        assert "no such resolution or model" in api.post("purge", unknown, 404)["detail"]
    assert rows_shown(api) == set(ROWS)


@pytest.mark.parametrize(("path", "body"), [("purge", {"all": True}), ("purge", {"disk": True}), ("release", {})])
def test_a_purge_or_release_is_refused_if_an_image_is_in_progress_for_longer_than_its_wait(
    api: Api, folder: Path, path: str, body: dict[str, Any]
) -> None:
    """The test holds the lock of an image in progress. The request waits for the field "wait", in seconds, and is
    answered with 409. It must not be carried out later, either."""
    with api.webui.lock:
        began = time.monotonic()
        assert "1 s" in api.post(path, {**body, "wait": 1}, 409)["detail"]
        # By default it waits for half a minute.
        assert 0.9 < time.monotonic() - began < 25
    with api.webui.lock:  # If the refused request still waits for the lock, it is carried out before this.
        assert rows_shown(api) == set(ROWS)


# --- pins -------------------------------------------------------------------------------------------------------------


def on_the_disk(folder: Path) -> tuple[set[str], set[tuple[str, str]]]:
    """The resolutions and pins that another process finds now."""
    history = History()
    history.open(folder)
    return {row.resolution for row in history.rows()}, set(history.pins())


def test_a_pin_or_purge_answered_with_200_is_on_the_disk(api: Api, folder: Path) -> None:
    """The test reads the file as another process would: the change survives a kill. A purge keeps pins."""
    runtime.open_cache(folder)
    for body, status in (({"resolution": "8x8", "model": "SD1"}, 404), ({"resolution": "512x512"}, 422)):
        api.post("pin", body, status)
    assert api.post("pin", {"resolution": "512x512", "model": "SD1"})["pinned"] is True
    assert {row["resolution"] for row in api.get("shapes?model=SD1")["rows"] if row["pinned"]} == {"512x512"}
    assert on_the_disk(folder)[1] == {("SD1", "512x512")}
    for body in ({"resolutions": ["512x512"]}, {"disk": True}, {"all": True}):
        api.post("purge", body)
        found, pins = on_the_disk(folder)
        assert "512x512" not in found and pins == {("SD1", "512x512")}, body
    assert not found
    api.post("pin", {"resolution": "512x512", "model": "SD1", "pinned": False})
    assert on_the_disk(folder)[1] == set()


def test_changes_that_cannot_be_written_to_disk_are_answered_with_507(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another connection holds the database's write lock. The change is not made in memory, either: rows and pins stay,
    and the same purge succeeds later. The Cache page shows the same error."""
    runtime.open_cache(folder)
    monkeypatch.setattr(store_module, "BUSY_SECONDS", 0.05)
    pin = {"resolution": "512x512", "model": "SD1"}
    with contextlib.closing(sqlite3.connect(folder / "onediff-2-1.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for path, body in (("pin", pin), ("purge", {"all": True}), ("purge", {"disk": True})):
            assert "disk" in api.post(path, body, 507)["detail"]
        panel = Panel(runtime, api.warmup, api.jobs, api.webui.exclusively)
        assert "cannot be written to the disk" in str(panel.pin('["512x512 SD1"]', None)[1])
    assert on_the_disk(folder) == ({row[0] for row in ROWS}, set())
    assert api.post("purge", {"all": True})["purged"] and on_the_disk(folder)[0] == set()


# --- the pre-warm queue -----------------------------------------------------------------------------------------------


def test_prewarm_with_another_number_of_tokens_queues_nothing_and_names_the_valid_ones(api: Api) -> None:
    answer = api.post("prewarm", {"sizes": "64x64", "tokens": 100}, 422)
    assert answer["detail"].startswith("tokens must be 77, 154 or 231 ") and "not 100; no size" in answer["detail"]
    assert api.get("jobs")["jobs"] == []


def test_prewarm_queues_each_size_once_and_order_first_puts_it_before_waiting_ones(api: Api) -> None:
    """The test's lock blocks the first job, so that the others wait. A size that waits already keeps its job; with
    another number of tokens, it gets a second job. A waiting job can be cancelled once."""
    with api.webui.lock:
        answer = api.post("prewarm", {"sizes": "64x64, 832x1216 x2"}, 202)
        assert [(job["size"], job["tokens"], job["source"]) for job in answer["jobs"]] == [
            ("64x64", 77, "API"), ("832x1216 x2", 77, "API"),
        ]
        more = api.post("prewarm", {"sizes": "832x1216 x2, 64x128"}, 202)["jobs"]
        assert more[0]["id"] == answer["jobs"][1]["id"], "a waiting size keeps its job"
        assert (more[1]["width"], more[1]["height"], more[1]["batch"]) == (64, 128, 1)
        longer = api.post("prewarm", {"sizes": "64x128", "tokens": 154}, 202)["jobs"][0]
        assert longer["tokens"] == 154 and longer["id"] != more[1]["id"]
        assert [job["id"] for job in api.get("jobs")["jobs"]] == sorted(job.id for job in api.warmup.jobs())
        wait_until(lambda: api.get("jobs/1")["state"] == "running")
        api.post("prewarm", {"sizes": "256x64, 64x256", "order": "first"}, 202)
        sizes = [job["size"] for job in api.get("jobs")["jobs"]]
        assert sizes == ["64x64", "256x64", "64x256", "832x1216 x2", "64x128", "64x128"], "before waiting jobs"
        assert api.ask("DELETE", f"jobs/{longer['id']}", 200)["state"] == "cancelled"
        api.ask("DELETE", f"jobs/{longer['id']}", 409)


def test_a_failed_job_gives_its_reason_and_cannot_be_cancelled(api: Api) -> None:
    (job,) = api.post("prewarm", {"sizes": "64x64"}, 202)["jobs"]
    wait_until(lambda: api.get(f"jobs/{job['id']}")["state"] == "failed")
    assert api.get(f"jobs/{job['id']}")["reason"] == "no model is loaded"
    assert api.ask("DELETE", f"jobs/{job['id']}", 409) == {"detail": f"Job {job['id']} has already ended (failed)."}


@pytest.mark.parametrize("job", ["0", "-1", "1.5", "x", "9" * 5000, "%00", "1e3", "99999999999999999999"])
def test_an_invalid_job_number_is_answered_with_422_and_an_unknown_one_with_404(api: Api, job: str) -> None:
    for method in ("GET", "DELETE"):
        api.ask(method, f"jobs/{job}", 422)
        api.ask(method, "jobs/7", 404)


def test_a_full_queue_is_answered_with_429(api: Api) -> None:
    """500 sizes fill the queue to MOST_PENDING."""
    with api.webui.lock:
        for row in range(5):
            sizes = ", ".join(f"{64 + 8 * column}x{64 + 8 * row}" for column in range(100))
            api.post("prewarm", {"sizes": sizes}, 202)
        assert len(api.get("jobs")["jobs"]) == routes.MOST_PENDING
        api.post("prewarm", {"sizes": "2048x2048"}, 429)
        api.warmup.stop()


def test_while_onediff_is_off_prewarm_is_answered_with_409(api: Api) -> None:
    runtime.configure(Settings(enabled=False))
    api.post("prewarm", {"sizes": "64x64"}, 409)
    assert api.get("jobs") == {"jobs": []}
