"""Which web pages may send requests to the server, decided by the headers that browsers send."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from lib_onediff.api.gate import Gate, Origins, host_name, origins_of

OWN = "http://127.0.0.1:7860"


@pytest.mark.parametrize("headers", [
    {}, {"origin": OWN}, {"origin": "https://127.0.0.1:7860"}, {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin", "origin": "https://behind.a.proxy.example"},
])
def test_requests_from_programs_and_from_pages_of_this_server_are_allowed(headers: dict[str, str]) -> None:
    """The server is 127.0.0.1:7860, with and without strict_host. Programs send neither Origin nor Sec-Fetch-Site.
    Behind a proxy, Origin has the proxy's name, and Sec-Fetch-Site is same-origin."""
    for origins in (Origins(), Origins(strict_host=True)):
        assert not origins.is_foreign({"host": "127.0.0.1:7860", **headers})


@pytest.mark.parametrize("headers", [
    {"origin": "null"}, {"origin": "null", "sec-fetch-site": "same-origin"}, {"origin": ""},
    {"origin": "http://127.0.0.1:7861"}, {"origin": "http://localhost:7860"}, {"origin": f"{OWN}.evil.example"},
    {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": ""},
    {"sec-fetch-site": "cross-site", "origin": OWN},
])
def test_pages_of_other_sites_are_refused(headers: dict[str, str]) -> None:
    """The server is 127.0.0.1:7860: by default, with strict_host, and if it allows further sites than these. A page of
    the same machine at another port, or of localhost, is another site."""
    for origins in (Origins(), Origins(strict_host=True), Origins(("https://friend.example",), r"https://.*\.friends")):
        assert origins.is_foreign({"host": "127.0.0.1:7860", **headers})


def test_strict_host_refuses_pages_under_a_host_name_that_is_not_in_its_names() -> None:
    """DNS rebinding: another site makes its host name resolve to this machine, so that Origin and Host agree. Without
    strict_host, or with this name among `names`, such a page is allowed."""
    rebound = {"host": "evil.example:7860", "origin": "http://evil.example:7860"}
    assert Origins(strict_host=True).is_foreign(rebound)
    assert not Origins(strict_host=True, names=["evil.example"]).is_foreign(rebound)
    assert not Origins().is_foreign(rebound)


@pytest.mark.parametrize("host, name, fixed", [
    ("127.0.0.1:7860", "127.0.0.1", True), ("LocalHost", "localhost", True), ("sub.localhost:1", "sub.localhost", True),
    ("[::1]:7860", "::1", True), ("[fe80::1]", "fe80::1", True), ("192.168.0.7:80", "192.168.0.7", True),
    ("localhost.", "localhost", True), ("", "", False), ("evil.example:7860", "evil.example", False),
    ("127.0.0.1.evil.example", "127.0.0.1.evil.example", False), ("localhost.evil", "localhost.evil", False),
    ("[evil.example]", "evil.example", False), (":7860", "", False), ("127.0.0.1@evil", "127.0.0.1@evil", False),
    ("2130706433", "2130706433", False),
])
def test_strict_host_knows_only_ip_addresses_and_localhost(host: str, name: str, fixed: bool) -> None:
    """host: the Host header. name: the host name in it. fixed: whether strict_host knows it; without strict_host, every
    name but "" is known."""
    assert host_name(host) == name
    assert Origins(strict_host=True).knows(host) is fixed
    assert Origins().knows(host) is bool(name)


@pytest.mark.parametrize("flags, strict", [
    ({"listen": False, "server_name": None, "share": False}, True), ({"listen": True}, False), ({}, False),
    ({"listen": False, "server_name": "0.0.0.0"}, False), ({"listen": False, "share": True}, False),
    ({"listen": False, "ngrok": "token"}, False), ({"listen": False, "subpath": "sd"}, False),
], ids=str)
def test_strict_host_is_on_only_if_the_webui_is_reached_from_this_machine_alone(
    flags: dict[str, Any], strict: bool
) -> None:
    """flags: the WebUI's command line; {}: it has no such options. With --listen, --share, ngrok or behind a proxy
    (--subpath), users reach the WebUI under names that it cannot know."""
    assert origins_of(SimpleNamespace(**flags)).strict_host is strict


@pytest.mark.parametrize("headers, own", [
    ({"host": "sd.lan", "origin": "http://sd.lan:8080"}, True),
    ({"host": "127.0.0.1:7860", "x-forwarded-host": "sd.lan", "origin": "http://sd.lan"}, True),
    ({"host": "sd.lan:80", "origin": "http://sd.lan:8080"}, False),
    ({"host": "sd.lan", "origin": "http://sd.lan.evil:8080"}, False),
    ({"host": "sd", "origin": "http://sd.lan"}, False),
])
def test_without_sec_fetch_site_a_page_is_our_own_if_its_origin_names_the_requested_host(
    headers: dict[str, str], own: bool
) -> None:
    """The requested host is in Host or X-Forwarded-Host; ports are compared only if this header has one. own: whether
    the page is ours. strict_host refuses all of these pages, because it knows none of the names."""
    assert Origins().is_foreign(headers) is not own
    assert Origins(strict_host=True).is_foreign(headers)


def test_sites_that_the_command_line_allows_are_not_refused() -> None:
    """The options are --cors-allow-origins, with sites or with "*", and --cors-allow-origins-regex. Origin "null" is
    allowed by "*" alone."""
    for flags in ({"cors_allow_origins": "http://other.example,https://friend.example"}, {"cors_allow_origins": "*"},
                  {"cors_allow_origins_regex": r"https://.*\.example"}):
        origins = origins_of(SimpleNamespace(listen=False, **flags))
        friend = {"host": "127.0.0.1", "origin": "https://friend.example", "sec-fetch-site": "cross-site"}
        assert not origins.is_foreign(friend)
        assert origins.is_foreign({"host": "127.0.0.1", "origin": "null"}) is (flags.get("cors_allow_origins") != "*")


@pytest.mark.parametrize("headers", [{}, {"origin": "https://evil.example"}])
def test_every_web_socket_is_refused(headers: dict[str, str]) -> None:
    """A browser opens web sockets for any page without asking the server first (no CORS), and neither OneDiff's routes
    nor gradio's use one. headers: with and without another site's Origin."""
    app = FastAPI()

    @app.websocket("/")
    async def answer(socket: WebSocket) -> None:
        await socket.accept()

    app.add_middleware(Gate, origins=Origins())
    with (
        TestClient(app) as browser, pytest.raises(WebSocketDisconnect) as closed,
        browser.websocket_connect("/", headers=headers),
    ):
        pass
    assert closed.value.code == 1008
