"""Which requests the demo refuses, in gradio's routes and in the API: those from pages of other sites, those under
another host name, and those without a login. And uploads or requests that would harm other users."""
from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from webui_client import WebUI
from webui_process import HostProcess

# More than a process has files for, on many systems.
SILENT = 300


@pytest.fixture
def site() -> Iterator[Any]:
    """Another HTTP server on this machine, with an empty page at every path. asked: the paths of all requests to it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title>")

        def log_message(self, *words: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", asked=asked)
    server.shutdown()
    server.server_close()


def event_of_page(url: str, elem_id: str, **values: Any) -> dict[str, Any]:
    """The body of the request that a click on a button of the page sends. elem_id: the button's elem_id. values: values
    of the event's inputs, by the input's elem_id; the other inputs have their initial values."""
    config = requests.get(f"{url}/config", timeout=60).json()
    props = {component["id"]: component["props"] for component in config["components"]}
    button = next(number for number, own in props.items() if own.get("elem_id") == elem_id)
    event = next(event for event in config["dependencies"] if [button, "click"] in event["targets"])
    data = [values.get(props[number].get("elem_id"), props[number].get("value")) for number in event["inputs"]]
    return {"fn_index": event["id"], "session_hash": "another", "trigger_id": button, "data": data, "event_data": None}


def wait_for_event(url: str, session: str) -> str:
    """Wait until all events of a session are processed. Returns the text of its event stream."""
    place = f"{url}/gradio_api/queue/data"
    with requests.get(place, params={"session_hash": session}, stream=True, timeout=60) as stream:
        return "\n".join(line.decode() for line in stream.iter_lines() if line)


def answer_to_head(url: str, head: str, body: bytes = b"") -> str:
    """The server's answer to a request of which it has received the headers (head and more), and only this part of the
    body."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}\r\nHost: {host}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        return connection.recv(4096).decode()


def test_an_uploaded_page_is_downloaded_and_not_shown(standalone: WebUI) -> None:
    """The scripts of an HTML page or an SVG image at the demo's address could make requests in the name of the user who
    opens it."""
    page = b"<title>mine</title><script>document.title = 'taken'</script>"
    for name, kind in (("page.html", "text/html"), ("image.svg", "image/svg+xml"), ("page.xhtml", "text/html")):
        sent = requests.post(f"{standalone.url}/gradio_api/upload", files={"files": (name, page, kind)}, timeout=60)
        answer = requests.get(f"{standalone.url}/gradio_api/file={sent.json()[0]}", timeout=60)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("sandbox")


def test_a_url_in_the_place_of_a_file_is_not_fetched(standalone: WebUI, site: Any) -> None:
    """A request has a URL where gradio expects the path of a file. If the demo fetched it, any user could reach servers
    in the demo's network. site: such a server, which must get no request."""
    image = {"path": f"{site.url}/secret.png", "meta": {"_type": "gradio.FileData"}}
    body = event_of_page(standalone.url, "txt2img_generate", txt2img_prompt=image)
    with HostProcess.running("--port", "0") as host:
        url = host.url()
        requests.post(f"{url}/gradio_api/queue/join", json=body, timeout=60).raise_for_status()
        assert "process_completed" in wait_for_event(url, "another")
        requests.post(f"{url}/gradio_api/run/predict", json=body, timeout=60)
        followed = requests.get(f"{url}/gradio_api/file={site.url}/secret.png", timeout=60, allow_redirects=False)
        assert followed.status_code == 403
    assert site.asked == []


# Unit tests have more headers; this test has all kinds of routes. "null" is the origin of a sandboxed frame. The last
# case is DNS rebinding: a page whose host name leads to this server once it is loaded.
@pytest.mark.parametrize("headers", [
    {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"},
], ids=str)
def test_no_route_answers_another_site(standalone: WebUI, headers: dict[str, str]) -> None:
    """headers: those by which a browser shows that the request comes from another site. The status is 403, and no
    header allows the other site to read the answer. A large body is refused without being read."""
    for path in ("/", "/config", "/gradio_api/queue/data?session_hash=x", "/gradio_api/file=/etc/hostname",
                 "/openapi.json", "/logout", "/sdapi/v1/options", "/onediff/v1/status"):
        answer = requests.get(standalone.url + path, headers=headers, timeout=60)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, path
    for path in ("/gradio_api/queue/join", "/gradio_api/run/predict", "/gradio_api/upload", "/login",
                 "/sdapi/v1/txt2img", "/onediff/v1/release"):
        answer = requests.post(standalone.url + path, headers=headers, json={}, timeout=60)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, path
        refusal = answer_to_head(standalone.url, f"POST {path} HTTP/1.1\r\nContent-Length: 600000000")
        assert refusal.startswith(("HTTP/1.1 413", "HTTP/1.1 403")), "a large body is not read"


def test_a_link_on_another_site_may_open_the_page_and_nothing_else(standalone: WebUI) -> None:
    """Not another route, and not the page in a frame."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert requests.get(f"{standalone.url}/?__theme=dark", headers=link, timeout=60).status_code == 200
    for path, changed in (("/logout", {}), ("/config", {}), ("/", {"Sec-Fetch-Dest": "iframe"})):
        assert requests.get(standalone.url + path, headers={**link, **changed}, timeout=60).status_code == 403


# --- accounts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a demo that other machines can reach, with the accounts ann and bob."""
    flags = ("--host", "0.0.0.0", "--gradio-auth", "ann:one,bob:two:parts", "--allowed-hosts", "my.box.lan")
    with HostProcess.running("--port", "0", "--data-dir", str(tmp_path_factory.mktemp("data")), *flags) as host:
        yield host.url().replace("localhost", "127.0.0.1")
    assert "Traceback" not in host.output, host.output


def logged_in(url: str, user: str, password: str, headers: dict[str, str] | None = None) -> requests.Session:
    session = requests.Session()
    session.post(f"{url}/login", data={"username": user, "password": password}, headers=headers, timeout=60)
    return session


def test_a_user_logs_in_on_the_page(browser: Any, guarded: str) -> None:
    """The user's password contains a colon."""
    browser.driver.get(guarded)
    fields = browser.wait(lambda: browser.driver.find_elements("css selector", "input, textarea"), "the login form", 60)
    for field, value in zip(fields, ("bob", "two:parts"), strict=True):
        field.send_keys(value)
    browser.driver.find_element("css selector", "button.primary, button.lg").click()
    browser.wait(lambda: browser.there("txt2img_generate"), "the page", 60)
    browser.driver.delete_all_cookies()


def test_the_demo_answers_only_under_its_own_host_names(guarded: str) -> None:
    """Other names are refused, because a page whose host name leads to this machine could otherwise use the demo (DNS
    rebinding). my.box.lan is in --allowed-hosts. An origin with another name is refused even after a login."""
    for name in ("my.box.lan", "127.0.0.1"):
        own, foreign = ({"Host": name, "Origin": f"http://{origin}"} for origin in (name, "evil.example"))
        session = logged_in(guarded, "ann", "one", own)
        assert session.get(f"{guarded}/", headers={"Host": name}, timeout=60).status_code == 200
        assert session.post(f"{guarded}/sdapi/v1/interrupt", headers=own, timeout=60).status_code == 200
        assert session.post(f"{guarded}/sdapi/v1/interrupt", headers=foreign, timeout=60).status_code == 403
    assert requests.get(f"{guarded}/", headers={"Host": "evil.example"}, timeout=60).status_code == 403


def test_no_large_body_is_read_before_the_login(guarded: str) -> None:
    """Neither one with a Content-Length nor a chunked one. The server answers after the headers, or after two
    chunks."""
    head = "POST /sdapi/v1/txt2img HTTP/1.1\r\n"
    assert answer_to_head(guarded, f"{head}Content-Length: 100000").startswith("HTTP/1.1 413")
    part = b"f000\r\n" + b" " * 0xF000 + b"\r\n"
    answer = answer_to_head(guarded, f"{head}Transfer-Encoding: chunked", 2 * part)
    assert answer.startswith(("HTTP/1.1 413", "HTTP/1.1 401"))


def test_wrong_passwords_for_one_account_delay_no_other_account(guarded: str) -> None:
    """After several wrong passwords for eve, the next attempt gets status 429. ann and bob can still log in."""
    def try_one(name: str, password: str) -> requests.Response:
        return requests.post(f"{guarded}/login", data={"username": name, "password": password}, timeout=60)

    answers = [try_one("eve", str(number)) for number in range(7)]
    assert {answer.status_code for answer in answers[:5]} == {400} and answers[-1].status_code == 429
    assert "try again in" in answers[-1].json()["detail"] and int(answers[-1].headers["retry-after"]) > 0
    assert logged_in(guarded, "ann", "one").get(f"{guarded}/config", timeout=60).status_code == 200
    assert try_one("bob", "two:parts").status_code == 200


def test_the_refusal_without_a_login_names_no_option_that_the_demo_lacks(guarded: str) -> None:
    """In other WebUIs, the refusal names the option --api-auth, which the demo does not have."""
    answer = requests.get(f"{guarded}/onediff/v1/status", timeout=60)
    assert answer.status_code == 401 and "--api-auth" not in answer.text


def test_300_silent_connections_do_not_block_a_request(standalone: WebUI) -> None:
    """The connections send nothing. Requests are answered while they are open, and after they are closed."""
    host, port = standalone.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        assert requests.get(f"{standalone.url}/onediff/v1/status", timeout=60).status_code == 200
    assert requests.get(f"{standalone.url}/onediff/v1/prewarm", timeout=60).status_code == 405


def test_a_demo_that_other_machines_can_reach_requires_the_password_that_it_prints(tmp_path: Path) -> None:
    """Without --gradio-auth, the demo makes a password for the user onediff."""
    with HostProcess.running("--port", "0", "--host", "0.0.0.0", "--data-dir", str(tmp_path)) as host:
        url = host.url()
        password = re.search(r"password (\S+)\.", host.output)[1]
        for path in ("/config", "/onediff/v1/status"):
            assert requests.get(url + path, timeout=60).status_code == 401
            assert logged_in(url, "onediff", password).get(url + path, timeout=60).status_code == 200
