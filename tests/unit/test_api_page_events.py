"""Our events refuse requests from pages of other sites, in every gradio. The WebUI's own events stay as they are."""
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

# gradio's.
PREFIX = LOGIN_CHECK.removesuffix("/login_check")
FOREIGN = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"},
    {"Host": "evil.example:7860", "Origin": "http://evil.example:7860"},
]
OWN = [
    {}, {"Host": "127.0.0.1:7860", "Origin": "http://127.0.0.1:7860"}, {"Sec-Fetch-Site": "same-origin"},
    {"Host": "127.0.0.1:7860", "Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"},
]


@pytest.fixture(params=["lib_onediff.ui.somewhere", "modules.ui"])
def clicked(request: pytest.FixtureRequest) -> tuple[TestClient, list[Any], bool]:
    """A page with one event; returns the values that its handler got, and whether the event is ours."""
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
def test_another_sites_page_reaches_none_of_our_events(clicked: Any, headers: dict[str, str]) -> None:
    """Events whose handlers are lib_onediff's fail with 500. Those of the WebUI (modules.ui) still run: they are not
    ours to close."""
    client, given, is_ours = clicked
    assert click(client, headers).status_code == (500 if is_ours else 200)
    assert given == ([] if is_ours else [("fox", 2)])


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_webuis_own_page_and_allowed_sites_reach_every_event(clicked: Any, headers: dict[str, str]) -> None:
    client, given, _ = clicked
    answer = click(client, headers)
    assert answer.status_code == 200 and answer.json()["data"] == ["fox 2"]
    assert given == [("fox", 2)]
