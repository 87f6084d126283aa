"""Which pages may send requests, by the headers that browsers send."""
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
def test_the_servers_own_pages_and_programs_are_allowed(headers: dict[str, str]) -> None:
    """Programs send neither Origin nor Sec-Fetch-Site. Behind a proxy, Origin is another name, and Sec-Fetch-Site says
    same-origin."""
    for origins in (Origins(), Origins(strict_host=True)):
        assert not origins.is_foreign({"host": "127.0.0.1:7860", **headers})


@pytest.mark.parametrize("headers", [
    {"origin": "null"}, {"origin": "null", "sec-fetch-site": "same-origin"}, {"origin": ""},
    {"origin": "http://127.0.0.1:7861"}, {"origin": "http://localhost:7860"}, {"origin": f"{OWN}.evil.example"},
    {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": ""},
    {"sec-fetch-site": "cross-site", "origin": OWN},
])
def test_pages_of_other_sites_are_refused(headers: dict[str, str]) -> None:
    for origins in (Origins(), Origins(strict_host=True), Origins(("https://friend.example",), r"https://.*\.friends")):
        assert origins.is_foreign({"host": "127.0.0.1:7860", **headers})


def test_a_strict_host_refuses_pages_under_a_name_that_is_not_its_own() -> None:
    """DNS rebinding: another site's name is made to resolve to this machine, so that Origin and Host agree. strict_host
    accepts addresses, localhost and the given names."""
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
def test_a_strict_host_knows_only_addresses_and_localhost(host: str, name: str, fixed: bool) -> None:
    """Without strict_host, every name that can be read from the Host header is known."""
    assert host_name(host) == name
    assert Origins(strict_host=True).knows(host) is fixed
    assert Origins().knows(host) is bool(name)


@pytest.mark.parametrize("flags, strict", [
    ({"listen": False, "server_name": None, "share": False}, True), ({"listen": True}, False), ({}, False),
    ({"listen": False, "server_name": "0.0.0.0"}, False), ({"listen": False, "share": True}, False),
    ({"listen": False, "ngrok": "token"}, False), ({"listen": False, "subpath": "sd"}, False),
], ids=str)
def test_only_a_webui_that_serves_this_machine_alone_is_strict_about_host_names(
    flags: dict[str, Any], strict: bool
) -> None:
    """With --listen, --share, ngrok or behind a proxy (--subpath) it is reached under names that it cannot know."""
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
    """The host is that of Host or X-Forwarded-Host; a port counts only where Host has one. strict_host refuses all of
    them, since these names are not of this machine."""
    assert Origins().is_foreign(headers) is not own
    assert Origins(strict_host=True).is_foreign(headers)


def test_sites_that_the_command_line_allows_are_not_foreign() -> None:
    for flags in ({"cors_allow_origins": "http://other.example,https://friend.example"}, {"cors_allow_origins": "*"},
                  {"cors_allow_origins_regex": r"https://.*\.example"}):
        origins = origins_of(SimpleNamespace(listen=False, **flags))
        friend = {"host": "127.0.0.1", "origin": "https://friend.example", "sec-fetch-site": "cross-site"}
        assert not origins.is_foreign(friend)
        assert origins.is_foreign({"host": "127.0.0.1", "origin": "null"}) is (flags.get("cors_allow_origins") != "*")


@pytest.mark.parametrize("headers", [{}, {"origin": "https://evil.example"}])
def test_every_web_socket_is_refused(headers: dict[str, str]) -> None:
    """A browser opens one for any page, without asking first; no route of ours or gradio's takes one."""
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
