"""The REST API in a separate app: the real runtime, store and pre-warm queue, and a WebUI that is only a lock."""
from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from busy import until
from fastapi import Depends, FastAPI, HTTPException
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from fastapi.testclient import TestClient

pytest.importorskip("gradio")

from lib_onediff.api import routes
from lib_onediff.core.jobs import JobQueue
from lib_onediff.core.refusal import Refusal
from lib_onediff.hosts.contract import WebUI
from lib_onediff.prewarm.worker import WarmUp
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History, HistoryRow

STATUS = {"host": "standalone", "hooks": 1, "reason": "no UNet call yet", "ratio": float("nan")}
SECONDS = 30


class LockOnly(WebUI):
    """A WebUI without a model. While its lock is held, it counts as busy with an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        raise Refusal("no model is loaded")

    def exclusively(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            return work()


class Api:
    """The REST API in an app that has nothing else. client: sends requests to the app. webui: the WebUI behind it.
    jobs: the jobs that the API lists. warmup: the pre-warm queue, whose jobs are among them."""

    def __init__(self) -> None:
        self.webui = LockOnly()
        self.jobs = JobQueue()
        self.warmup = WarmUp(self.webui, runtime, self.jobs)
        self.app = FastAPI()
        self.client = TestClient(self.add_to(self.app, command_line()), raise_server_exceptions=False)

    def add_to(self, app: Any, cmd_opts: Any) -> Any:
        """Add the API to an app, if the WebUI's command line (cmd_opts) allows it, and return the app."""
        exclusively = self.webui.exclusively
        routes.add_routes(app, cmd_opts, runtime, self.warmup, self.jobs, exclusively, lambda: STATUS)
        return app

    def get(self, path: str, status: int = 200) -> Any:
        return self.ask("GET", path, status)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return self.ask("POST", path, status, json=body)

    def ask(self, method: str, path: str, status: int, **options: Any) -> Any:
        """Send a request and return the JSON of the answer. Asserts the answer's status, and that the JSON of an error
        (from status 400 on) is one sentence."""
        answer = self.client.request(method, f"/onediff/v1/{path}", **options)
        assert answer.status_code == status, answer.text
        if status >= 400:
            (sentence,) = answer.json().values()
            assert isinstance(sentence, str) and sentence[-1] in ".?" and "\n" not in sentence
        return answer.json()


def a1111s_app(accounts: str) -> FastAPI:
    """An app in which A1111 has added its own API. accounts: the value of --api-auth, "user:password,user:password"."""
    app = FastAPI()
    passwords = dict(account.split(":") for account in accounts.split(","))

    def auth(credentials: HTTPBasicCredentials = Depends(HTTPBasic())) -> bool:  # noqa: B008
        if passwords.get(credentials.username) == credentials.password:
            return True
        raise HTTPException(401, "Incorrect username or password", headers={"WWW-Authenticate": "Basic"})

    app.add_api_route("/internal/ping", lambda: {})
    app.add_api_route("/sdapi/v1/txt2img", lambda: {}, methods=["POST"], dependencies=[Depends(auth)])
    return app


def command_line(**flags: Any) -> SimpleNamespace:
    """A WebUI's command line, with --api unless flags change it."""
    return SimpleNamespace(**{"api": True, "nowebui": False, "api_auth": None, "gradio_auth": None, **flags})


def remember(folder: Path, rows: Iterable[tuple[str, str]]) -> None:
    """Let the runtime open the history of a folder, in which earlier processes have recorded these uses. rows:
    (resolution, model) of each."""
    history = History()
    history.open(folder)
    for resolution, model in rows:
        history.record(HistoryRow(model, model, resolution, 2, 77, "float16", step_ms=10.0, host_ms=20.0))
    history.commit()
    runtime.history.open(folder)


def basic(account: str) -> dict[str, str]:
    """The header of HTTP basic authentication. account: "user:password"."""
    return {"Authorization": "Basic " + base64.b64encode(account.encode()).decode()}


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until holds() is true; fails after SECONDS."""
    until(holds, "a state of the API", SECONDS, 0.01)
