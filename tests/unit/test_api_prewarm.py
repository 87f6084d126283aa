"""The REST API and the pre-warm queue."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from api_builders import SECONDS, Api, wait_until

from lib_onediff.api import models, routes
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.warmup.stop(SECONDS)


def test_sizes_are_queued_as_text_or_objects(api: Api) -> None:
    with api.webui.lock:
        answer = api.post("prewarm", {"sizes": "64x64, 832x1216 x2"}, 202)
        models.JobsAnswer(**answer)
        assert [(job["size"], job["tokens"], job["source"]) for job in answer["jobs"]] == [
            ("64x64", 77, "API"), ("832x1216 x2", 77, "API"),
        ]
        asked = [{"width": 832, "height": 1216, "batch": 2}, {"width": 64, "height": 128}]
        more = api.post("prewarm", {"sizes": asked}, 202)["jobs"]
        assert more[0]["id"] == answer["jobs"][1]["id"], "what waits keeps its job"
        assert (more[1]["width"], more[1]["height"], more[1]["batch"]) == (64, 128, 1)
        longer = api.post("prewarm", {"sizes": "64x128", "tokens": 154}, 202)["jobs"][0]
        assert longer["tokens"] == 154 and longer["id"] != more[1]["id"]
        assert [job["id"] for job in api.get("jobs")["jobs"]] == sorted(job.id for job in api.warmup.jobs())
        wait_until(lambda: api.get("jobs/1")["state"] == "running")
        api.post("prewarm", {"sizes": "256x64, 64x256", "order": "first"}, 202)
        sizes = [job["size"] for job in api.get("jobs")["jobs"]]
        assert sizes == ["64x64", "256x64", "64x256", "832x1216 x2", "64x128", "64x128"], "before what waits"
        assert api.ask("DELETE", f"jobs/{longer['id']}", 200)["state"] == "cancelled"
        api.ask("DELETE", f"jobs/{longer['id']}", 409)


def test_a_job_that_fails_says_why(api: Api) -> None:
    (job,) = api.post("prewarm", {"sizes": "64x64"}, 202)["jobs"]
    wait_until(lambda: api.get(f"jobs/{job['id']}")["state"] == "failed")
    assert api.get(f"jobs/{job['id']}")["reason"] == "no model is loaded"
    assert api.ask("DELETE", f"jobs/{job['id']}", 409) == {"detail": f"Job {job['id']} is over: failed."}


@pytest.mark.parametrize("job", ["0", "-1", "1.5", "x", "9" * 5000, "%00", "1e3", "99999999999999999999"])
def test_no_such_job(api: Api, job: str) -> None:
    for method in ("GET", "DELETE"):
        api.ask(method, f"jobs/{job}", 422)
        api.ask(method, "jobs/7", 404)


def test_queue_has_an_end(api: Api) -> None:
    with api.webui.lock:
        for row in range(5):
            sizes = [{"width": 64 + 8 * column, "height": 64 + 8 * row} for column in range(100)]
            api.post("prewarm", {"sizes": sizes}, 202)
        assert len(api.get("jobs")["jobs"]) == routes.MOST_PENDING
        api.post("prewarm", {"sizes": "2048x2048"}, 429)
        api.warmup.stop()


def test_switched_off_means_nothing_is_queued(api: Api) -> None:
    runtime.configure(Settings(enabled=False))
    api.post("prewarm", {"sizes": "64x64"}, 409)
    assert api.get("jobs") == {"jobs": []}
