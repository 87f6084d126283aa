"""Who may use the API of a host that was started with accounts."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from webui_process import HostProcess

REQUESTS = [
    ("GET", "/onediff/v1/status", None), ("GET", "/onediff/v1/shapes", None), ("GET", "/onediff/v1/jobs", None),
    ("POST", "/onediff/v1/prewarm", {"sizes": "64x64"}), ("DELETE", "/onediff/v1/jobs/1", None),
    ("POST", "/onediff/v1/purge", {"all": True}), ("POST", "/onediff/v1/pin", {"resolution": "64x64", "model": "SD1"}),
    ("POST", "/onediff/v1/release", {}), ("GET", "/sdapi/v1/options", None),
    ("GET", "/openapi.json", None),
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a host with accounts."""
    data = str(tmp_path_factory.mktemp("data"))
    host = HostProcess("--port", "0", "--data-dir", data, "--gradio-auth", "ann:one,bob:two:parts")
    yield host.url()
    host.stop()
    assert "Traceback" not in host.output, host.output


def send(session: Any, url: str, request: tuple[str, str, Any], **options: Any) -> requests.Response:
    method, path, body = request
    return session.request(method, url + path, json=body, timeout=60, **options)


def logged_in(url: str, user: str, password: str) -> requests.Session:
    session = requests.Session()
    session.post(f"{url}/login", data={"username": user, "password": password}, timeout=60)
    return session


def test_accounts_are_let_in_and_strangers_get_nothing(guarded: str) -> None:
    for session in (requests.Session(), logged_in(guarded, "ann", "two")):
        for request in REQUESTS:
            for account in (None, ("ann", "one"), ("", "")):
                answer = send(session, guarded, request, auth=account)
                assert answer.status_code == 401 and set(answer.json()) == {"detail"}, (request, answer.text)
    for user, password in (("ann", "one"), ("bob", "two:parts")):
        assert send(logged_in(guarded, user, password), guarded, REQUESTS[0]).status_code == 200


def test_login_on_the_page(browser: Any, guarded: str) -> None:
    browser.driver.get(guarded)
    fields = browser.wait(lambda: browser.driver.find_elements("css selector", "input, textarea"), "the login form", 60)
    for field, value in zip(fields, ("bob", "two:parts"), strict=True):
        field.send_keys(value)
    browser.driver.find_element("css selector", "button.primary, button.lg").click()
    browser.wait(lambda: browser.there("txt2img_generate"), "the page", 60)
    browser.driver.delete_all_cookies()


def test_a_host_that_others_can_reach_asks_for_an_account(tmp_path: Path) -> None:
    with HostProcess.running("--port", "0", "--host", "0.0.0.0", "--data-dir", str(tmp_path)) as host:
        url = host.url()
        password = re.search(r"password (\S+)\.", host.output)[1]
        for path in ("/config", "/onediff/v1/status"):
            assert requests.get(url + path, timeout=60).status_code == 401
            assert logged_in(url, "onediff", password).get(url + path, timeout=60).status_code == 200
