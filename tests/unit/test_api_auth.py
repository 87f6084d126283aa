"""Who may use the REST API: passwords, gradio's own logins, and pages of other sites."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from api_builders import Api, a1111s_app, basic, command_line, remember
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lib_onediff.api.auth import FOREIGN_PAGE, LOG_IN, NO_CHECK, NO_PAGE, OR_BY_API_AUTH
from lib_onediff.runtime.runtime import runtime

PREFIX = "/onediff/v1"
REQUESTS = [
    ("GET", "status", None), ("GET", "shapes", None), ("GET", "jobs", None), ("GET", "jobs/1", None),
    ("DELETE", "jobs/1", None), ("POST", "prewarm", {"sizes": "64x64"}), ("POST", "purge", {"all": True}),
    ("POST", "pin", {"resolution": "512x512", "model": "SD1"}), ("POST", "release", {}),
]
CHANGES = [request for request in REQUESTS if request[0] != "GET"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    remember(tmp_path, [("512x512", "SD1")])
    return tmp_path


def send(client: TestClient, request: tuple[str, str, Any], **headers: str) -> Any:
    method, path, body = request
    return client.request(method, f"{PREFIX}/{path}", json=body, headers=headers)


def nothing_happened(api: Api) -> bool:
    (row,) = runtime.rows()
    return not api.warmup.jobs() and not row.pinned


# --- --api-auth -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: f"{request[0]} {request[1]}")
def test_every_endpoint_requires_an_account_of_api_auth(request_: Any) -> None:
    """A wrong, partial or missing password is answered with 401, and changes nothing. Each account given to --api-auth
    is accepted."""
    api = Api()
    client = TestClient(api.add_to(a1111s_app("ann:one,bob:two"), command_line(api_auth="ann:one,bob:two")))
    for headers in ({}, *map(basic, ["ann:two", "ann:", "ann", ":", "", "ANN:one"]), {"Authorization": "Bearer x"},
                    {"Cookie": "access-token=x; access-token-unsecure=x"}):
        answer = send(client, request_, **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Basic"), headers
        assert set(answer.json()) == {"detail"}
    assert nothing_happened(api)
    for account in ("ann:one", "bob:two"):
        assert send(client, request_, **basic(account)).status_code != 401


def test_without_the_password_check_of_the_webui_every_request_is_refused() -> None:
    """OneDiff uses the check of --api-auth that the WebUI's own API routes have. A bare FastAPI() has none of these
    routes, so even a correct password is refused."""
    client = TestClient(Api().add_to(FastAPI(), command_line(api_auth="ann:one")))
    for request in REQUESTS:
        answer = send(client, request, **basic("ann:one"))
        assert answer.status_code == 401 and answer.json() == {"detail": NO_CHECK}


# --- --gradio-auth ----------------------------------------------------------------------------------------------------


def page_of_a_host(accounts: list[tuple[str, str]]) -> Any:
    """gradio's own app, which A1111 and Forge hand to scripts."""
    gradio = pytest.importorskip("gradio")
    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.HTML("page")
    page.auth = accounts
    page.auth_message = None
    page.config = page.get_config_file()
    page.root_path = ""
    page.favicon_path = None
    page.delete_cache = getattr(page, "delete_cache", None)
    app = gradio.routes.App.create_app(page, app_kwargs={"docs_url": "/docs"})

    @app.middleware("http")
    async def as_a1111_has_one(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    return app


def logged_in_client(app: Any, account: dict[str, str]) -> TestClient:
    client = TestClient(app)
    client.post("/login", data=account)
    return client


def test_a_refusal_does_not_mention_api_auth_if_the_webui_lacks_that_option() -> None:
    """The demo has --gradio-auth, but no --api-auth: the refusal names only the login on the page."""
    options = SimpleNamespace(api=True, gradio_auth="ann:one")
    client = TestClient(Api().add_to(page_of_a_host([("ann", "one")]), options))
    answer = send(client, REQUESTS[0])
    sentence = "Log in on the WebUI's page first, and send its cookie."
    assert (answer.status_code, answer.json()) == (401, {"detail": sentence})


@pytest.mark.parametrize("flag", ["gradio_auth", "gradio_auth_path"])
def test_with_gradio_auth_only_clients_that_have_logged_in_are_answered(flag: str) -> None:
    """A client without a login, with a wrong password, or with an invented cookie gets 401 from every endpoint. A
    password of the page, sent as those of --api-auth are, is refused. flag: the option by which the WebUI got its
    accounts."""
    api = Api()
    app = api.add_to(page_of_a_host([("ann", "one"), ("bob", "two:parts")]), command_line(**{flag: "given"}))
    stranger = TestClient(app)
    mistaken = logged_in_client(app, {"username": "ann", "password": "two"})
    forger = TestClient(app, cookies={"access-token": "x", "access-token-unsecure": "x"})
    for client in (stranger, mistaken, forger):
        for request in REQUESTS:
            answer = send(client, request)
            assert answer.status_code == 401 and answer.json() == {"detail": LOG_IN.format(OR_BY_API_AUTH)}
        assert send(client, REQUESTS[0], **basic("ann:one")).status_code == 401
    assert nothing_happened(api)
    for account in ({"username": "ann", "password": "one"}, {"username": "bob", "password": "two:parts"}):
        assert send(logged_in_client(app, account), REQUESTS[0]).status_code == 200, account


def test_gradio_auth_without_a_page_refuses_every_request() -> None:
    """With --nowebui there is no page to log in on. The app's own routes /user and /login_check are not gradio's, and
    must not be used as a login check."""
    app = FastAPI()
    app.add_api_route("/user", lambda: "ann")
    app.add_api_route("/login_check", lambda: None)
    api = Api()
    client = TestClient(api.add_to(app, command_line(nowebui=True, api=False, gradio_auth="ann:one")))
    for request in REQUESTS:
        answer = send(client, request)
        assert answer.status_code == 401 and answer.json() == {"detail": NO_PAGE}
    assert nothing_happened(api)


# --- pages of other sites ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}], ids=str)
def test_requests_that_change_something_are_refused_from_pages_of_other_sites(headers: dict[str, str]) -> None:
    """They are refused even with a correct password, which a browser may add by itself, and even as plain text, which a
    form can send, and nothing is changed. headers: those by which a browser says that the page is of another site.
    test_api_origins.py tests which sites count as others."""
    for flags, password in (({}, {}), ({"api_auth": "ann:one"}, basic("ann:one"))):
        api = Api()
        client = TestClient(api.add_to(a1111s_app("ann:one"), command_line(**flags)))
        for request in CHANGES:
            answer = send(client, request, **headers, **password)
            assert answer.status_code == 403 and answer.json() == {"detail": FOREIGN_PAGE}, request
            plain = {**headers, **password, "Content-Type": "text/plain"}
            assert send(client, request, **plain).status_code == 403
        assert nothing_happened(api)
