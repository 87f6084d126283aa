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
from grid import WHOLE
from webui_client import PICTURE
from webui_process import HostProcess

LONG = {**PICTURE, "steps": 150, "n_iter": 100, "width": 128, "height": 128}
SECONDS = 120


def ended_by(signal_number: int) -> pytest.MarkDecorator:
    """Both signals have one handler: each test has one of them by day, and both at night."""
    signals = (signal.SIGTERM, signal.SIGINT) if WHOLE else (signal_number,)
    return pytest.mark.parametrize("ending", signals, ids=lambda number: number.name)


@pytest.fixture
def from_nothing() -> bool:
    """Whether the host is started by its command line."""
    return False


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_nothing: bool) -> Iterator[HostProcess]:
    """With a folder of its own for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
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


@ended_by(signal.SIGTERM)
def test_with_images_waiting(host: HostProcess, tmp_path: Path, ending: int) -> None:
    url = host.url()
    for _ in range(3):
        threading.Thread(target=lambda: ask_for_images(url), daemon=True).start()
    wait_until(lambda: state(url)["sampling_step"] > 0)
    end(host, ending, tmp_path)


@ended_by(signal.SIGINT)
def test_with_streams_of_pages_open(host: HostProcess, tmp_path: Path, ending: int) -> None:
    url = host.url()
    streams = [requests.get(f"{url}/heartbeat/{number}", stream=True, timeout=SECONDS) for number in range(5)]
    threading.Thread(target=lambda: wait_for_nothing(url), daemon=True).start()
    end(host, ending, tmp_path)
    for stream in streams:
        stream.close()


def ask_for_images(url: str) -> None:
    with suppress(requests.RequestException):
        requests.post(f"{url}/sdapi/v1/txt2img", json=LONG, timeout=SECONDS)


def state(url: str) -> dict[str, Any]:
    return requests.get(f"{url}/sdapi/v1/progress", timeout=SECONDS).json()["state"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def wait_for_nothing(url: str) -> None:
    with suppress(requests.RequestException):
        requests.post(f"{url}/onediff/v1/purge", json={"all": True, "wait": 60}, timeout=SECONDS)


@ended_by(signal.SIGTERM)
def test_with_a_page_open_that_makes_an_image(browser: Any, host: HostProcess, tmp_path: Path, ending: int) -> None:
    url = host.url()
    browser.open(url)
    for name, value in {"steps": 150, "batch_count": 100}.items():
        browser.type(f"#txt2img_{name} input[type=number]", value)
    browser.click("txt2img_generate")
    browser.wait(lambda: state(url)["sampling_step"] > 0, "the first step", SECONDS)
    end(host, ending, tmp_path)
    browser.driver.get("about:blank")


@ended_by(signal.SIGINT)
@pytest.mark.parametrize("from_nothing", [True])
def test_while_the_model_is_loaded(host: HostProcess, tmp_path: Path, ending: int) -> None:
    wait_until(lambda: any("Loading the model" in line for line in host.lines))
    end(host, ending, tmp_path)
