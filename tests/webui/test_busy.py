"""A standalone host that has much to do: everything else is answered meanwhile, and nothing is made for nobody."""
from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from webui_client import PICTURE
from webui_process import HostProcess

LONG = {**PICTURE, "steps": 150, "n_iter": 100, "width": 128, "height": 128}
MOST_WAITING = 64
SECONDS = 120


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with HostProcess.running("--port", "0", "--data-dir", str(tmp_path_factory.mktemp("data"))) as host:
        yield host.url()
        assert "Traceback" not in host.output, host.output


def ask(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which images are waited for."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=SECONDS)
    content = json.dumps(body).encode()
    head = (
        f"POST /sdapi/v1/txt2img HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def state(url: str) -> dict[str, Any]:
    return requests.get(f"{url}/sdapi/v1/progress", timeout=SECONDS).json()["state"]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_client_that_leaves_ends_its_image(url: str) -> None:
    connection = ask(url, LONG)
    wait_until(lambda: state(url)["sampling_step"] > 0)
    connection.close()
    wait_until(lambda: state(url)["job"] == "")


def test_a_client_that_leaves_ends_nobody_elses_image(url: str) -> None:
    first = ask(url, LONG)
    wait_until(lambda: state(url)["sampling_step"] > 0)
    waiting = ask(url, LONG)
    answers: list[requests.Response] = []
    last = threading.Thread(
        target=lambda: answers.append(requests.post(f"{url}/sdapi/v1/txt2img", json=PICTURE, timeout=SECONDS))
    )
    last.start()
    time.sleep(1)
    waiting.close()
    time.sleep(1)
    assert state(url)["job"] and not state(url)["interrupted"]
    first.close()
    last.join(SECONDS)
    assert answers[0].status_code == 200 and len(answers[0].json()["images"]) == 1


def test_waiting_requests_block_nothing_else(url: str) -> None:
    connections = [ask(url, LONG) for _ in range(MOST_WAITING)]
    try:
        wait_until(lambda: state(url)["sampling_step"] > 0)
        for path in ("/sdapi/v1/options", "/onediff/v1/status", "/config", "/"):
            assert requests.get(url + path, timeout=SECONDS).status_code == 200
        assert requests.post(f"{url}/sdapi/v1/interrupt", timeout=SECONDS).status_code == 200
        time.sleep(1)
        refused = {**PICTURE, "width": 65}
        while requests.post(f"{url}/sdapi/v1/txt2img", json=refused, timeout=SECONDS).status_code != 503:
            connections.append(ask(url, LONG))
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: state(url)["job"] == "")
    assert requests.post(f"{url}/sdapi/v1/txt2img", json=PICTURE, timeout=SECONDS).status_code == 200


def test_a_prompt_as_long_as_any_can_be_interrupted(url: str) -> None:
    for prompt in ("a" * 100_000, "a " * 50_000):
        answer = requests.post(f"{url}/sdapi/v1/txt2img", json={**PICTURE, "prompt": prompt}, timeout=SECONDS)
        assert answer.status_code == 422 and "6000 at most" in answer.json()["detail"]
    answers: list[requests.Response] = []
    body = {**PICTURE, "prompt": "a" * 6000, "batch_size": 8, "n_iter": 100}
    work = threading.Thread(
        target=lambda: answers.append(requests.post(f"{url}/sdapi/v1/txt2img", json=body, timeout=SECONDS))
    )
    work.start()
    wait_until(lambda: state(url)["job"] != "")
    assert requests.post(f"{url}/sdapi/v1/interrupt", timeout=SECONDS).status_code == 200
    work.join(SECONDS)
    assert answers[0].status_code == 200 and len(answers[0].json()["images"]) <= 8
