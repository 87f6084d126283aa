"""Ending the standalone host: soon, without a traceback, and with nothing left running, whatever it is doing."""
from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from webui_client import PICTURE
from webui_process import HostProcess

LONG = {**PICTURE, "steps": 150, "n_iter": 100, "width": 128, "height": 128}
SECONDS = 120


@pytest.fixture
def host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HostProcess]:
    """With a folder of its own for temporary files; by its command line where the test's parameter says so."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    from_nothing = getattr(request, "param", False)
    host = HostProcess("--port", "0", "--data-dir", str(tmp_path / "data"), from_nothing=from_nothing)
    yield host
    host.process.kill()


def end(host: HostProcess, number: int, folder: Path) -> None:
    """Ends it, and fails where it goes on or something is left of it."""
    host.process.send_signal(number)
    try:
        exit_code = host.process.wait(30)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the host goes on:\n{host.output}") from None
    assert exit_code == 0
    assert "Traceback" not in host.output and "ERROR" not in host.output, host.output
    assert len([line for line in host.lines if not line.startswith("OneDiff: ")]) <= 2, host.output
    assert list((folder / "temporary").glob("onediff-page-*")) == []


def test_with_a_page_that_makes_images_streams_and_requests_that_wait(
    browser: Any, host: HostProcess, tmp_path: Path
) -> None:
    url = host.url()
    browser.open(url)
    for name, value in {"steps": 150, "batch_count": 100}.items():
        browser.type(f"#txt2img_{name} input[type=number]", value)
    browser.click("txt2img_generate")
    wait_until(lambda: state(url)["sampling_step"] > 0)
    streams = [requests.get(f"{url}/heartbeat/{number}", stream=True, timeout=SECONDS) for number in range(5)]
    for path, body in (("sdapi/v1/txt2img", LONG), ("onediff/v1/purge", {"all": True, "wait": 60})):
        threading.Thread(target=ask, args=(f"{url}/{path}", body), daemon=True).start()
    end(host, signal.SIGTERM, tmp_path)
    for stream in streams:
        stream.close()
    browser.driver.get("about:blank")


@pytest.mark.parametrize("host", [True], indirect=True, ids=["from nothing"])
def test_while_the_model_is_loaded(host: HostProcess, tmp_path: Path) -> None:
    wait_until(lambda: any("Loading the model" in line for line in host.lines))
    end(host, signal.SIGINT, tmp_path)


def ask(url: str, body: dict[str, Any]) -> None:
    with suppress(requests.RequestException):
        requests.post(url, json=body, timeout=SECONDS)


def state(url: str) -> dict[str, Any]:
    return requests.get(f"{url}/sdapi/v1/progress", timeout=SECONDS).json()["state"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
