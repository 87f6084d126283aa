"""The pre-warm queue as a client of the REST API uses it."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import requests
from webui_client import WebUI

SECONDS = 600
PENDING = ("queued", "running")
Job = dict[str, Any]


class Prewarm:
    """The queue of one WebUI."""

    def __init__(self, webui: WebUI) -> None:
        self.webui = webui

    def ask(self, sizes: str, **more: Any) -> list[Job]:
        """The jobs of these sizes."""
        answer = self.webui.post("/onediff/v1/prewarm", {"sizes": sizes, **more})
        assert answer.status_code == 202, answer.text
        return answer.json()["jobs"]

    def jobs(self, asked: Iterable[Job] | None = None) -> list[Job]:
        """Every job that the queue knows, or these as they are now."""
        jobs = self.webui.get("/onediff/v1/jobs")["jobs"]
        wanted = None if asked is None else {job["id"] for job in asked}
        return [job for job in jobs if wanted is None or job["id"] in wanted]

    def watch(self, asked: Iterable[Job], until: Callable[[list[Job]], bool]) -> list[list[Job]]:
        """How these jobs looked, again and again, until they look as wanted."""
        asked, deadline, seen = list(asked), time.monotonic() + SECONDS, []
        while not seen or not until(seen[-1]):
            assert time.monotonic() < deadline, seen[-1]
            time.sleep(0.1 if seen else 0)
            seen.append(self.jobs(asked))
        return seen

    def finish(self, asked: Iterable[Job]) -> list[Job]:
        """These jobs when all of them are over."""
        return self.watch(asked, lambda jobs: not any(job["state"] in PENDING for job in jobs))[-1]

    def cancel(self, job: Job) -> bool:
        answer = requests.delete(f"{self.webui.url}/onediff/v1/jobs/{job['id']}", timeout=30)
        assert answer.status_code in (200, 409), answer.text
        return answer.status_code == 200

    def shapes(self, resolution: str) -> dict[tuple[int, int], dict[str, Any]]:
        """What is known of every kind of UNet call at a resolution, by latents and tokens; a decode of the VAE takes 0
        tokens."""
        rows = self.webui.get("/onediff/v1/shapes")["rows"]
        return {
            (shape["batch"], shape["tokens"]): shape
            for row in rows if row["resolution"] == resolution for shape in row["shapes"]
        }

    def forget(self, *resolutions: str) -> None:
        answer = self.webui.post("/onediff/v1/purge", {"resolutions": list(resolutions)})
        assert answer.status_code in (200, 404), answer.text
