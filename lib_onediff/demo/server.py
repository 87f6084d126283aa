"""Putting the host together: model, scripts, options, page and API, served by uvicorn."""
from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request

from ..api.auth import login_check, password_check, protection
from ..api.basic import Basic
from ..api.gate import Gate
from ..api.origins import Origins, host_name
from .docs import add_docs
from .listening import url_of
from .loaded_model import LoadedModel
from .modules import paths, script_callbacks, scripts, sd_models, shared
from .offline import OwnResourcesOnly
from .page import build_page
from .rest import make_router

# Answers to what is under way are waited for so long; then connections are closed, which pages keep open for ever.
SECONDS_FOR_ANSWERS = 0.5
API_PATHS = ("/sdapi/", "/onediff/", "/internal/")


class StoppingServer(uvicorn.Server):
    """Prints the address once requests are answered, and ends soon after it is told to."""

    def __init__(
        self, config: uvicorn.Config, listener: socket.socket, on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.listener, self.on_stop = listener, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"OneDiff demo running on {url_of(self.listener)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_stop()
        shared.state.stop_server()
        asyncio.get_running_loop().call_later(SECONDS_FOR_ANSWERS, self.hang_up)
        await super().shutdown(sockets)

    def hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.close()


def make_app(arguments: argparse.Namespace, model: LoadedModel, only_this_machine: bool = False) -> FastAPI:
    """The whole host as one ASGI app. modules_importable() must be in force.

    only_this_machine: whether nobody else can reach it.
    """
    use_data_folder(arguments.data_dir)
    shared.cmd_opts = arguments
    scripts.load_scripts()
    sd_models.use_model(model)
    script_callbacks.call_all("ui_settings")
    page = build_page()
    app = FastAPI(title="OneDiff demo", docs_url=None, redoc_url=None, openapi_url=None)
    protected = protection(arguments)
    app.include_router(make_router(), dependencies=protected)
    add_docs(app, protected)
    # Before the page takes every remaining path.
    script_callbacks.call_all("app_started", page, app)
    app.add_middleware(OwnResourcesOnly)
    app.add_middleware(Gate, origins=own_origins(arguments, only_this_machine), identify=identification(arguments))
    accounts = [tuple(account.split(":", 1)) for account in (arguments.gradio_auth or "").split(",") if account]
    # Requests beside the queue would take the threads that interrupt and progress need.
    queued = page.queue(default_concurrency_limit=4, api_open=False)
    return gr.mount_gradio_app(app, queued, path="/", auth=accounts or None)


def own_origins(arguments: argparse.Namespace, only_this_machine: bool) -> Origins:
    """Under which names the host's pages are its own."""
    # Who listens to others cannot know by which names they find it, unless it is told.
    strict = only_this_machine or bool(arguments.allowed_hosts)
    names = [arguments.host, *(arguments.allowed_hosts or "").split(",")]
    return Origins(strict_host=strict, names=set(map(host_name, names)) - {""})


def identification(arguments: argparse.Namespace) -> Callable[[Request], Awaitable[None]]:
    """Raises HTTPException for a request of somebody who has not logged in, where its path asks for that."""
    check_password = password_check(arguments.api_auth) if arguments.api_auth else None
    check_login = login_check(bool(arguments.gradio_auth))

    async def identify(request: Request) -> None:
        if check_password is not None and request.url.path.startswith(API_PATHS):
            credentials = await Basic()(request)
            check_password(credentials)
        else:
            check_login(request)

    return identify


def use_data_folder(folder: str) -> None:
    """Keep settings and images in folder, and load the settings that are there."""
    paths.data_path = str(Path(folder).expanduser().resolve())
    shared.config_filename = os.path.join(paths.data_path, "config.json")
    shared.opts.load(shared.config_filename)


def serve(app: FastAPI, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    """Answer requests until interrupted; then call on_stop first of all."""
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    try:
        StoppingServer(config, listener, on_stop).run(sockets=[listener])
    finally:
        shared.state.stop_server()
        script_callbacks.call_all("script_unloaded")
