"""OneDiff's gradio events refuse requests from pages of other sites, in every version of gradio. The WebUI's events do
not change."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")
pytest.importorskip("httpx")

import gradio
from fastapi.testclient import TestClient

from lib_onediff.api.auth import LOGIN_CHECK, refuse_foreign_pages
from lib_onediff.ui.events import QUIET

# The prefix of gradio's routes, which depends on its version.
PREFIX = LOGIN_CHECK.removesuffix("/login_check")
# Headers of requests from pages of other sites. The last is DNS rebinding: the site's own name for the WebUI's address.
FOREIGN = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"},
    {"Host": "evil.example:7860", "Origin": "http://evil.example:7860"},
]
# Headers of requests without a browser, from the WebUI's own page, from this page behind a proxy, and from a site that
# --cors-allow-origins allows.
OWN = [
    {}, {"Host": "127.0.0.1:7860", "Origin": "http://127.0.0.1:7860"}, {"Sec-Fetch-Site": "same-origin"},
    {"Host": "127.0.0.1:7860", "Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"},
]


@pytest.fixture(params=["lib_onediff.ui.somewhere", "modules.ui"])
def clicked(request: pytest.FixtureRequest) -> tuple[TestClient, list[Any], bool]:
    """A page with one event, whose handler's module is the parameter. Returns (a client of the page, the values that
    the handler has got, whether the event is OneDiff's)."""
    given: list[Any] = []

    def note(text: str, number: float) -> str:
        given.append((text, number))
        return f"{text} {number:g}"

    note.__module__ = request.param
    with gradio.Blocks(analytics_enabled=False) as page:
        inputs = [gradio.Textbox("a"), gradio.Number(1)]
        gradio.Button("do").click(note, inputs=inputs, outputs=[gradio.HTML()], queue=False, **QUIET)
    refuse_foreign_pages(page, SimpleNamespace(listen=False, cors_allow_origins="https://friend.example"))
    page.auth = page.auth_message = page.favicon_path = None
    page.config = page.get_config_file()
    page.root_path = ""
    page.delete_cache = None
    page.show_error = True
    page.max_file_size = None
    client = TestClient(gradio.routes.App.create_app(page), base_url="http://127.0.0.1:7860")
    return client, given, request.param.startswith("lib_onediff")


def click(client: TestClient, headers: dict[str, str]) -> Any:
    body = {"fn_index": 0, "data": ["fox", 2], "session_hash": "x"}
    return client.post(f"{PREFIX}/run/predict", json=body, headers=headers)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_reaches_none_of_our_events(clicked: Any, headers: dict[str, str]) -> None:
    """Events with a handler of lib_onediff are answered with status 500, and the handler is not called. Events of the
    WebUI (modules.ui) still run, because OneDiff does not change them."""
    client, given, is_ours = clicked
    assert click(client, headers).status_code == (500 if is_ours else 200)
    assert given == ([] if is_ours else [("fox", 2)])


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_page_of_the_webui_and_allowed_sites_reach_every_event(clicked: Any, headers: dict[str, str]) -> None:
    """Events of both OneDiff and the WebUI run and return their results. headers: see OWN."""
    client, given, _ = clicked
    answer = click(client, headers)
    assert answer.status_code == 200 and answer.json()["data"] == ["fox 2"]
    assert given == [("fox", 2)]
