"""Pages of other sites, and other names for this server: none gets at a standalone host, through gradio or the API."""
from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from webui_client import WebUI
from webui_process import HostProcess

SANDBOXED = """
const done = arguments[arguments.length - 1];
addEventListener('message', message => done(message.data), {once: true});
const frame = document.createElement('iframe');
frame.sandbox = 'allow-scripts';
frame.srcdoc = `<script>(${arguments[0]})(${JSON.stringify(arguments[1])})
    .then(told => parent.postMessage(told, '*'), problem => parent.postMessage('refused', '*'))</` + 'script>';
document.body.append(frame);
"""
READ = "async url => (await fetch(url)).text()"
UPLOAD = """async url => {
  const form = new FormData();
  form.append('files', new File(['<b>page</b>'], 'page.html', {type: 'text/html'}));
  return (await fetch(url, {method: 'POST', body: form})).text();
}"""
SEND = """
const [url, body, done] = arguments;
fetch(url, {method: 'POST', mode: 'no-cors', body: new Blob([body])}).then(() => done('sent'), () => done('refused'));
"""
FETCH = """
const [url, done] = arguments;
fetch(url).then(answer => answer.text()).then(done, () => done('refused'));
"""


@pytest.fixture
def site() -> Iterator[Any]:
    """Another server on this machine, whose pages are all empty. asked: the paths that somebody has asked it for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>another site</title>")

        def log_message(self, *words: Any) -> None:
            """Not on the screen."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", asked=asked)
    server.shutdown()
    server.server_close()


def event_of_page(url: str, elem_id: str, **values: Any) -> dict[str, Any]:
    """The body of the request that a click on a button sends, with other values for the inputs named by their ids."""
    config = requests.get(f"{url}/config", timeout=60).json()
    props = {component["id"]: component["props"] for component in config["components"]}
    button = next(number for number, own in props.items() if own.get("elem_id") == elem_id)
    event = next(event for event in config["dependencies"] if [button, "click"] in event["targets"])
    data = [values.get(props[number].get("elem_id"), props[number].get("value")) for number in event["inputs"]]
    return {"fn_index": event["id"], "session_hash": "another", "trigger_id": button, "data": data, "event_data": None}


def wait_for_event(url: str, session: str) -> str:
    """What the page's event stream says of everything that a session has asked for."""
    with requests.get(f"{url}/queue/data", params={"session_hash": session}, stream=True, timeout=60) as stream:
        return "\n".join(line.decode() for line in stream.iter_lines() if line)


@pytest.fixture
def from_site(browser: Any, standalone: WebUI, site: Any) -> Any:
    """The browser's driver on a page of another site."""
    browser.driver.get(site.url)
    browser.driver.set_script_timeout(60)
    return browser.driver


def setting_changed(url: str) -> tuple[dict[str, Any], bool]:
    """The page's request that switches OneDiff over, and how it is now."""
    now = requests.get(f"{url}/sdapi/v1/options", timeout=60).json()["onediff_enabled"]
    return event_of_page(url, "settings_submit", setting_onediff_enabled=not now), now


def saves(standalone: WebUI) -> bool:
    return standalone.get("/sdapi/v1/options")["onediff_enabled"]


def test_post_without_a_kind_from_another_sites_page_changes_nothing(from_site: Any, standalone: WebUI) -> None:
    body, before = setting_changed(standalone.url)
    from_site.execute_async_script(SEND, f"{standalone.url}/queue/join", json.dumps(body))
    from_site.execute_async_script(SEND, f"{standalone.url}/run/predict", json.dumps(body))
    # What was queued would be done by now: the queue is looked at 20 times a second.
    time.sleep(0.5)
    assert saves(standalone) is before


def test_sandboxed_frame_of_another_sites_page_reads_and_uploads_nothing(from_site: Any, standalone: WebUI) -> None:
    for script, path in ((READ, "/config"), (READ, "/"), (UPLOAD, "/upload")):
        told = from_site.execute_async_script(SANDBOXED, script, standalone.url + path)
        assert told == "refused" or "another site" in told, (path, told[:200])


@pytest.mark.usefixtures("browser")
def test_page_under_another_name_for_this_machine_reads_nothing(standalone: WebUI, tmp_path) -> None:
    """DNS rebinding: the name of another site leads to this server once the page is loaded."""
    from webui_browser import Browser

    rule = "--host-resolver-rules=MAP rebound.test 127.0.0.1"
    found = Browser(shutil.which("chromium"), shutil.which("chromedriver"), str(tmp_path / "profile"), rule)
    try:
        port = standalone.url.rpartition(":")[2]
        found.driver.get(f"http://rebound.test:{port}/config")
        assert "does not go by the name rebound.test" in found.driver.page_source
        body, before = setting_changed(standalone.url)
        found.driver.set_script_timeout(60)
        found.driver.execute_async_script(SEND, f"http://rebound.test:{port}/queue/join", json.dumps(body))
        told = found.driver.execute_async_script(FETCH, f"http://rebound.test:{port}/sdapi/v1/options")
        assert "onediff_enabled" not in told
        time.sleep(0.5)
        assert saves(standalone) is before
    finally:
        found.quit()


def test_uploaded_page_is_not_shown(browser: Any, standalone: WebUI) -> None:
    page = b"<title>mine</title><script>document.title = 'taken'</script>"
    for name, kind in (("page.html", "text/html"), ("image.svg", "image/svg+xml"), ("page.xhtml", "text/html")):
        sent = requests.post(f"{standalone.url}/upload", files={"files": (name, page, kind)}, timeout=60)
        answer = requests.get(f"{standalone.url}/file={sent.json()[0]}", timeout=60)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("sandbox")
        browser.driver.get("about:blank")
        browser.driver.get(f"{standalone.url}/file={sent.json()[0]}")
        assert browser.driver.title not in ("mine", "taken")


def test_address_in_the_place_of_a_file_is_not_fetched(standalone: WebUI, site: Any) -> None:
    image = {"path": f"{site.url}/secret.png", "meta": {"_type": "gradio.FileData"}}
    body = event_of_page(standalone.url, "img2img_generate", img2img_image=image)
    with HostProcess.running("--port", "0") as host:
        url = host.url()
        requests.post(f"{url}/queue/join", json=body, timeout=60).raise_for_status()
        assert "process_completed" in wait_for_event(url, "another")
        requests.post(f"{url}/run/predict", json=body, timeout=60)
        followed = requests.get(f"{url}/file={site.url}/secret.png", timeout=60, allow_redirects=False)
        assert followed.status_code == 403
    assert site.asked == []



# Which headers are whose is unit-tested; these are every door of a standalone host.
@pytest.mark.parametrize("headers", [
    {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"},
], ids=str)
def test_no_route_answers_another_site(standalone: WebUI, headers: dict[str, str]) -> None:
    for path in ("/", "/config", "/queue/data?session_hash=x", "/file=/etc/hostname", "/openapi.json", "/logout",
                 "/sdapi/v1/options", "/onediff/v1/status"):
        answer = requests.get(standalone.url + path, headers=headers, timeout=60)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, path
    for path in ("/queue/join", "/run/predict", "/upload", "/login", "/sdapi/v1/txt2img", "/onediff/v1/release"):
        answer = requests.post(standalone.url + path, headers=headers, json={}, timeout=60)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, path
        told = answer_to_head(standalone.url, f"POST {path} HTTP/1.1\r\nContent-Length: 600000000")
        assert told.startswith(("HTTP/1.1 413", "HTTP/1.1 403")), "a large body is not read"


def test_link_on_another_sites_page_shows_the_page(standalone: WebUI) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert requests.get(f"{standalone.url}/?__theme=dark", headers=link, timeout=60).status_code == 200
    for path, changed in (("/logout", {}), ("/config", {}), ("/", {"Sec-Fetch-Dest": "iframe"})):
        assert requests.get(standalone.url + path, headers={**link, **changed}, timeout=60).status_code == 403


def test_hosts_that_others_reach_work_under_their_names(tmp_path) -> None:
    flags = ("--host", "0.0.0.0", "--gradio-auth", "ann:one", "--allowed-hosts", "my.box.lan")
    with HostProcess.running("--port", "0", "--data-dir", str(tmp_path), *flags) as host:
        url, account = host.url(), {"username": "ann", "password": "one"}
        for name in ("my.box.lan", "127.0.0.1"):
            session, own = requests.Session(), {"Host": name, "Origin": f"http://{name}"}
            session.post(f"{url}/login", data=account, headers=own, timeout=60)
            assert session.get(f"{url}/", headers={"Host": name}, timeout=60).status_code == 200
            assert session.post(f"{url}/sdapi/v1/interrupt", headers=own, timeout=60).status_code == 200
            foreign = {"Host": name, "Origin": "http://evil.example"}
            assert session.post(f"{url}/sdapi/v1/interrupt", headers=foreign, timeout=60).status_code == 403
        assert requests.get(f"{url}/", headers={"Host": "evil.example"}, timeout=60).status_code == 403
        # Nor is a body read before the login.
        head = "POST /sdapi/v1/txt2img HTTP/1.1\r\n"
        assert answer_to_head(url, f"{head}Content-Length: 100000").startswith("HTTP/1.1 413")
        part = b"f000\r\n" + b" " * 0xF000 + b"\r\n"
        told = answer_to_head(url, f"{head}Transfer-Encoding: chunked", 2 * part)
        assert told.startswith(("HTTP/1.1 413", "HTTP/1.1 401"))


def answer_to_head(url: str, head: str, body: bytes = b"") -> str:
    """What a server answers to a request before it has got more of its body than this."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}\r\nHost: {host}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
        return connection.recv(4096).decode()
