"""/onediff/v1/... over HTTP, on any WebUI: what it shows, and what purging, pinning and releasing do to pictures."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import requests
from webui_client import PICTURE, WebUI
from webui_models import Models
from webui_process import HostProcess

PREFIX = "/onediff/v1"
SECONDS = 120


class Rest:
    """The extension's own API."""

    def __init__(self, webui: WebUI) -> None:
        self.webui = webui

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> requests.Response:
        return requests.request(method, f"{self.webui.url}{PREFIX}/{path}", json=body, headers=headers, timeout=SECONDS)

    def refused(self, status: int, method: str, path: str, body: Any = None, **headers: str) -> str:
        """The sentence that comes with a status."""
        answer = self.ask(method, path, body, **headers)
        assert answer.status_code == status, answer.text
        assert set(answer.json()) == {"detail"}
        return answer.json()["detail"]

    def done(self, path: str, body: Any = None) -> dict[str, Any]:
        answer = self.ask("POST", path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        return {(row["resolution"], row["model"]): row for row in self.webui.get(f"{PREFIX}/shapes")["rows"]}

    def row(self, resolution: str) -> dict[str, Any]:
        """The only row of a resolution."""
        (found,) = [row for (name, _), row in self.rows().items() if name == resolution]
        return found


@pytest.fixture
def rest(webui: WebUI, sd15: Models) -> Iterator[Rest]:
    """A model is loaded, and 64x64 and 128x64 have been used."""
    found = Rest(webui)
    # Most tests leave them as they are.
    known = {resolution for resolution, _ in found.rows()}
    for width, height in ((64, 64), (128, 64)):
        if f"{width}x{height}" not in known:
            webui.txt2img(width=width, height=height)
    yield found


def test_rows_and_totals_fit_together(rest: Rest) -> None:
    answer = rest.webui.get(f"{PREFIX}/shapes")
    row, status = rest.row("128x64"), rest.webui.status()
    assert row["model"] == status["model"]
    assert row["uses"] > 0 and row["shapes"] and row["last_used"] <= time.time() + 60
    assert set(row["shapes"][0]) > {"batch", "tokens", "state", "reason", "step_ms", "host_ms", "bytes", "needs"}
    assert answer["totals"]["calls"] == status["calls"]
    assert set(answer["totals"]) >= {"vram", "budget", "disk", "hit_rate"}
    of_model = rest.webui.get(f"{PREFIX}/shapes?model={row['model']}")["rows"]
    assert {found["model"] for found in of_model} == {row["model"]}


def test_purge_one_and_the_others_stay(rest: Rest) -> None:
    before = rest.webui.txt2img(width=128, height=64)
    known = set(rest.rows())
    name = ("128x64", rest.row("128x64")["model"])
    answer = rest.done("purge", {"resolutions": ["128x64"], "model": name[1]})
    assert answer["purged"] == [{"resolution": "128x64", "model": name[1]}]
    # What the VAE has decoded at this size belongs to no model, and is now a row of its own.
    assert {row for row in rest.rows() if row[1] == name[1]} == {row for row in known if row[1] == name[1]} - {name}
    assert "No such resolution" in rest.refused(404, "POST", "purge", {"resolutions": ["128x64"], "model": name[1]})
    again = rest.webui.txt2img(width=128, height=64)
    assert numpy.abs(again.pixels - before.pixels).max() <= 1
    assert name in rest.rows()


def test_a_picture_in_progress_is_not_disturbed(rest: Rest) -> None:
    """A purge that does not get its turn is refused, and the picture is the same as alone."""
    # Some seconds with the checkpoint that each WebUI is tested with.
    request = {**PICTURE, "steps": 15 if rest.webui.kind == "forge" else 100, "width": 128, "height": 128}
    rest.webui.make({**request, "steps": 3})
    alone = rest.webui.make(request)
    pictures: list[Any] = []
    worker = threading.Thread(target=lambda: pictures.append(rest.webui.make(request)))
    worker.start()
    try:
        deadline = time.monotonic() + SECONDS
        while rest.webui.get("/sdapi/v1/progress")["state"]["sampling_step"] < 2:
            assert time.monotonic() < deadline and worker.is_alive()
            time.sleep(0.02)
        answer = rest.ask("POST", "purge", {"resolutions": ["128x128"], "wait": 1})
        if answer.status_code == 200:
            pytest.skip("this machine makes the picture in less than a second")
        assert answer.status_code == 409 and "1 s" in answer.json()["detail"]
        assert rest.ask("GET", "shapes").elapsed.total_seconds() < 5
    finally:
        worker.join(SECONDS)
    assert numpy.array_equal(pictures[0].pixels, alone.pixels)
    assert "128x128" in {resolution for resolution, _ in rest.rows()}, "the refused purge came later"
    assert rest.done("purge", {"resolutions": ["128x128"]})["purged"]


def test_rows_and_pins_outlive_the_process(tmp_path: Path) -> None:
    for number in range(3):
        host = HostProcess("--port", "0", "--data-dir", str(tmp_path))
        try:
            rest = Rest(WebUI(host.url()))
            if number == 0:
                rest.webui.txt2img(width=128, height=64)
                rest.done("pin", {"resolution": "128x64", "model": rest.row("128x64")["model"]})
            elif number == 1:
                assert (rest.row("128x64")["state"], rest.row("128x64")["pinned"]) == ("on disk", True)
                assert rest.done("purge", {"all": True})["purged"]
                assert rest.rows() == {}
            else:
                assert rest.rows() == {}
        finally:
            host.stop()
        assert "Traceback" not in host.output, host.output
